"""graphpack: capture a model's decode graphs once, restore them in any process they fit.

The journey is  model -> capture -> graph -> archive -> validate -> restore -> replay:

    import graphpack

    graphpack.save("checkpoints/qwen3", "archive", batch_sizes=(1, 4), seq_lens=(256,))

    with graphpack.load("archive", "qwen3", weights="checkpoints/qwen3") as model:
        logits = model.step(token_ids, positions)

`save` resolves the model, captures one graph for each batch size and sequence length, records outputs to compare with
later, and commits everything to the archive at once. `load` checks the archive, this machine, the weights and the
memory layout, in that order, and only then restores; `verify=True` also replays the recorded inputs. What does not fit
raises a `GraphpackError` that lists every problem found. `inspect` describes an archive without any of that. An engine
that captures CUDA graphs itself archives them with a `Recorder`. A `ModelPool` has many models in one process, of which
those that are not needed give their memory back.

Importing this package imports neither torch nor numpy; `save` and `Recorder` import torch, `load` and `inspect` do not.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from graphpack.errors import (
    AsleepError,
    CaptureRefusedError,
    ClosedError,
    CorruptArchiveError,
    EnvironmentMismatchError,
    GraphpackError,
    InputError,
    LayoutMismatchError,
    NotFoundError,
    OutputsDifferError,
    Problem,
    RankLostError,
    StorageError,
    UnsupportedFormatError,
    UntrustedError,
    UsageError,
    WeightsMismatchError,
)

if TYPE_CHECKING:
    from graphpack.archive.store import Archive
    from graphpack.pool import ModelPool
    from graphpack.recorder import Recorder
    from graphpack.replay import RestoredModel
    from graphpack.results.save import SaveResult

__version__ = "0.1.0"

__all__ = [
    "AsleepError",
    "CaptureRefusedError",
    "ClosedError",
    "CorruptArchiveError",
    "EnvironmentMismatchError",
    "GraphpackError",
    "InputError",
    "LayoutMismatchError",
    "ModelPool",
    "NotFoundError",
    "OutputsDifferError",
    "Problem",
    "RankLostError",
    "Recorder",
    "StorageError",
    "UnsupportedFormatError",
    "UntrustedError",
    "UsageError",
    "WeightsMismatchError",
    "__version__",
    "inspect",
    "load",
    "open_archive",
    "save",
]

AnyPath = str | os.PathLike[str]


def save(
    model: AnyPath,
    archive: AnyPath,
    *,
    name: str | None = None,
    device: str = "cpu",
    batch_sizes: Collection[int] = (1,),
    seq_lens: Collection[int] = (256,),
    slots: int | None = None,
    dtype: str = "auto",
    replace: bool = False,
    cpu_isa: str | None = None,
    compile: bool = False,  # noqa: A002 - the option's name
    mode: str = "full",
    token_counts: Collection[int] | None = None,
    split_operations: Collection[str] | None = None,
) -> SaveResult:
    """Capture `model` for every batch size and sequence length into `archive`, under `name` or the model's own name.

    `model` is what the command line takes: a built-in name, a checkpoint directory or `package.module:factory`.
    Saving what the archive already holds does nothing; another entry of that name needs `replace=True`. `slots` is how
    many rows can be in progress at once, in as many steps as that takes; by default as many as the largest batch.

    With `mode="piecewise"` prompts run many tokens at a time, for any of `token_counts`, in pieces between
    `split_operations`; see docs/modes.md.
    """
    from pathlib import Path

    from graphpack import capture
    from graphpack.arguments import NUMBERS, PATH, TEXT, TEXTS, TRUTH, check_arguments, each_once, optional, plain
    from graphpack.results.observer import SilentObserver
    from graphpack.results.save import SaveRequest
    from graphpack.split_operations import DEFAULT_SPLIT
    from graphpack.words import TOKEN_COUNTS

    check_arguments(
        model=(model, PATH),
        archive=(archive, PATH),
        name=(name, optional(TEXT)),
        device=(device, TEXT),
        batch_sizes=(batch_sizes, NUMBERS),
        seq_lens=(seq_lens, NUMBERS),
        replace=(replace, TRUTH),
        compile=(compile, TRUTH),
        mode=(mode, TEXT),
        token_counts=(token_counts, optional(NUMBERS)),
        split_operations=(split_operations, optional(TEXTS)),
    )
    request = SaveRequest(
        model=str(model),
        archive=Path(archive),
        name=name,
        device=device,
        batch_sizes=each_once(batch_sizes),
        seq_lens=each_once(seq_lens),
        slots=plain(slots),
        dtype=dtype,
        replace=replace,
        cpu_isa=cpu_isa,
        compile=compile,
        mode=mode,
        token_counts=TOKEN_COUNTS if token_counts is None else each_once(token_counts),
        split_operations=DEFAULT_SPLIT if split_operations is None else tuple(sorted(set(split_operations))),
    )
    return capture.save(request, SilentObserver())


def load(
    archive: AnyPath,
    name: str | None = None,
    *,
    weights: AnyPath | None = None,
    device: str | None = None,
    verify: bool = False,
    allow: Collection[str] = (),
    copy_weights: bool = False,
    lazy_graphs: bool = False,
    trusted_keys: Collection[AnyPath] = (),
    require_signature: bool = False,
    bind: Mapping[str, int] | None = None,
) -> RestoredModel:
    """Restore the entry `name`, or the only entry of the archive. Close the model after use, or use `with`.

    `weights` is the checkpoint directory; without it the built-in's own weights or the recorded directory are used.
    `verify` proves all it can: every blob and weight byte is hashed and the recorded inputs are replayed. `allow`
    waives environment fields by name. `copy_weights` copies weights instead of using the mapped checkpoint in place.
    `trusted_keys` are files of public keys, by one of which the entry must be signed; see `graphpack.trust_settings`.

    On cuda, `lazy_graphs` checks and builds all graphs but the smallest when they are first used: a damaged one is a
    CorruptArchiveError of that step. `bind` gives addresses of device memory that the caller holds for as long as the
    model: in it a region is neither filled nor zeroed.
    """
    from pathlib import Path

    from graphpack import opening
    from graphpack.arguments import PATH, TEXT, check_arguments, optional

    check_arguments(archive=(archive, PATH), device=(device, optional(TEXT)))
    with opening.begun(Path(archive), device):
        from graphpack.results.load import LoadRequest

        request = LoadRequest.of(
            archive,
            name,
            weights=weights,
            device=device,
            verify=verify,
            allow=allow,
            copy_weights=copy_weights,
            lazy_graphs=lazy_graphs,
            trusted_keys=trusted_keys,
            require_signature=require_signature,
            bind=bind,
        )
        return opening.load_only(request)


def inspect(archive: AnyPath, name: str | None = None) -> dict[str, Any]:
    """What `graphpack inspect --graphs --kernels --format json` prints. Reads no weights and runs nothing."""
    from pathlib import Path

    from graphpack import documents
    from graphpack.arguments import PATH, TEXT, check_arguments, optional
    from graphpack.trust_settings import find_policy

    check_arguments(archive=(archive, PATH), name=(name, optional(TEXT)))
    names = () if name is None else (name,)
    document = documents.inspect(Path(archive), names, find_policy(), graphs=True, kernels=True)
    if document.refusal is not None:
        raise document.refusal
    return document.content


def open_archive(archive: AnyPath) -> Archive:
    """The archive itself: its entries, their records and blobs."""
    from pathlib import Path

    from graphpack.archive.store import Archive
    from graphpack.arguments import PATH, check_arguments

    check_arguments(archive=(archive, PATH))
    return Archive.open(Path(archive))


def __getattr__(name: str) -> Any:
    """What imports torch, or numpy, is imported when it is asked for."""
    if name == "Recorder":
        from graphpack.recorder import Recorder

        return Recorder
    if name == "ModelPool":
        from graphpack.pool import ModelPool

        return ModelPool
    raise AttributeError(f"module 'graphpack' has no attribute '{name}'")
