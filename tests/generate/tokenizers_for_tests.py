"""Small tokenizers of the two kinds there are, trained on a few sentences."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

END = "<|end|>"
SENTENCES = (
    "The capital of France is Paris, and that of Italy is Rome.",
    "Once upon a time there was a graph that was captured once and replayed a thousand times.",
    "Ein Graph wird einmal aufgenommen. 图只捕获一次。 🙂🙃 naïve café",
)


def byte_level() -> Tokenizer:
    """As those of GPT-2, Llama 3, Qwen and SmolLM: every byte is a token, so a character may need several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """As that of Llama 2: a blank is a mark at the front of a word, which decoding drops at the front of a text; bytes
    of characters it does not know are tokens; and every text begins with a token of its own."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    # Words are told apart only while they are learned.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(SENTENCES[:2], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    # Trainers have no way to put tokens into a vocabulary but as special ones, which decoding leaves out.
    content = json.loads(tokenizer.to_str()) | {"pre_tokenizer": None}
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(content))
