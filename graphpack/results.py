"""What a command is asked to do, what it answers, and what it tells while it works. Plain data: no torch, no printing.

`capture` and `restore` take a request and return a result; `report` prints results; `cli` joins the two.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from graphpack.arguments import ADDRESSES, PATH, PATHS, TEXT, TEXTS, check_arguments, optional
from graphpack.errors import GraphpackError, Problem, UsageError
from graphpack.graph import Bucket
from graphpack.schema import shown
from graphpack.split_operations import DEFAULT_SPLIT
from graphpack.words import (
    CPU_ISAS,
    DEVICE_WORDS,
    DTYPE_WORDS,
    LARGEST_SIZE,
    MODES,
    NAME_WORDS,
    TOKEN_COUNTS,
    is_device,
    is_entry_name,
)

AnyPath = str | os.PathLike[str]


def _sizes_problems(where: str, sizes: tuple[int, ...]) -> list[Problem]:
    good = all(type(size) is int and 1 <= size <= LARGEST_SIZE for size in sizes)
    if sizes and good and list(sizes) == sorted(set(sizes)):
        return []
    return [Problem(where, here=shown(list(sizes)), hint="give whole numbers from 1, sorted, each once")]


def _device_problems(device: str) -> list[Problem]:
    return [] if is_device(device) else [Problem("device", here=shown(device), hint=f"one of {DEVICE_WORDS}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """`batch_sizes`, `seq_lens` and `token_counts` are sorted and unique; `name` None means the model's own name.
    `slots` is how many rows can be in progress at once, None for as many as the largest batch. With the mode
    `piecewise`, prompts are run for any of `token_counts` in pieces, split at `split_operations`."""

    model: str
    archive: Path
    name: str | None = None
    device: str = "cpu"
    batch_sizes: tuple[int, ...] = (1,)
    seq_lens: tuple[int, ...] = (256,)
    slots: int | None = None
    dtype: str = "auto"
    replace: bool = False
    config: Path | None = None
    cpu_isa: str | None = None
    compile: bool = False
    mode: str = "full"
    token_counts: tuple[int, ...] = TOKEN_COUNTS
    split_operations: tuple[str, ...] = DEFAULT_SPLIT

    def __post_init__(self) -> None:
        problems = [
            *_sizes_problems("batch-sizes", self.batch_sizes),
            *_sizes_problems("seq-lens", self.seq_lens),
            *_sizes_problems("token-counts", self.token_counts),
            *_device_problems(self.device),
        ]
        largest = max((size for size in self.batch_sizes if type(size) is int), default=1)
        if self.slots is not None and not (type(self.slots) is int and largest <= self.slots < LARGEST_SIZE):
            hint = f"a whole number, at least the largest batch size, {largest}"
            problems.append(Problem("slots", here=shown(self.slots), hint=hint))
        if self.name is not None and not is_entry_name(self.name):
            problems.append(Problem("name", here=shown(self.name), hint=f"an entry's name is {NAME_WORDS}"))
        if self.dtype not in DTYPE_WORDS:
            problems.append(Problem("dtype", here=shown(self.dtype), hint=f"one of {', '.join(DTYPE_WORDS)}"))
        if self.cpu_isa is not None and self.cpu_isa not in CPU_ISAS:
            problems.append(Problem("cpu-isa", here=shown(self.cpu_isa), hint=f"one of {', '.join(CPU_ISAS)}"))
        if self.mode not in MODES:
            problems.append(Problem("mode", here=shown(self.mode), hint=f"one of {', '.join(MODES)}"))
        names = self.split_operations
        if not names or list(names) != sorted({*names} & {*DEFAULT_SPLIT}):
            hint = f"some of {', '.join(DEFAULT_SPLIT)}, sorted, each once"
            problems.append(Problem("split-operations", here=shown(list(names)), hint=hint))
        if problems:
            raise UsageError("nothing can be saved with these settings", problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """No `names` means every entry. `weights` maps an entry's name to a directory; the key None serves all others.
    With `complete` no names means every model of the configuration, each saved with the settings it has there.

    On cuda: with `lazy_graphs` all graphs but the smallest are built when they are first used; `bind` gives addresses
    of device memory that the caller holds in the place of regions; `scatter` moves every region by another distance,
    which proves that they move.

    `trusted_keys` are files of public keys; a signature by one of them is then required. What is not given here, the
    environment and the configuration of the user and the system say.
    """

    archive: Path
    names: tuple[str, ...] = ()
    weights: Mapping[str | None, Path] = field(default_factory=dict)
    device: str | None = None
    verify: bool = False
    allow: frozenset[str] = frozenset()
    copy_weights: bool = False
    config: Path | None = None
    lazy_graphs: bool = False
    complete: bool = False
    trusted_keys: tuple[Path, ...] = ()
    require_signature: bool = False
    bind: Mapping[str, int] = field(default_factory=dict)
    scatter: bool = False

    @classmethod
    def of(
        cls,
        archive: AnyPath,
        name: str | None,
        *,
        weights: AnyPath | None = None,
        device: str | None = None,
        allow: Collection[str] = (),
        trusted_keys: Collection[AnyPath] = (),
        bind: Mapping[str, int] | None = None,
        **others: Any,
    ) -> Self:
        """What `graphpack.load` is asked to do. Raises UsageError."""
        check_arguments(
            archive=(archive, PATH),
            name=(name, optional(TEXT)),
            weights=(weights, optional(PATH)),
            device=(device, optional(TEXT)),
            allow=(allow, TEXTS),
            trusted_keys=(trusted_keys, PATHS),
            bind=(bind, optional(ADDRESSES)),
        )
        return cls(
            archive=Path(archive),
            names=() if name is None else (name,),
            weights={} if weights is None else {None: Path(weights)},
            device=device,
            allow=frozenset(allow),
            trusted_keys=tuple(Path(key) for key in trusted_keys),
            bind=bind or {},
            **others,
        )

    def __post_init__(self) -> None:
        problems = [] if self.device is None else _device_problems(self.device)
        if problems:
            raise UsageError("nothing can be loaded with these settings", problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRow:
    """One graph of a saved entry. `seconds_capture` is None when it was already there."""

    batch_size: int
    seq_len: int
    nodes: int
    object_bytes: int
    seconds_capture: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecesRow:
    """One piecewise graph of a saved entry: its different pieces, and their nodes and bytes in all."""

    token_count: int
    pieces: int
    nodes: int
    object_bytes: int
    seconds_capture: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """`topology` has one digest a graph, in the order of `graphs`; `stages` maps a stage to its seconds."""

    name: str
    archive: Path
    action: Literal["saved", "replaced", "up to date"]
    graphs: tuple[GraphRow, ...]
    piecewise: tuple[PiecesRow, ...] = ()
    weights_root: str
    layout_fingerprint: str
    settings_digest: str
    topology: tuple[str, ...]
    bytes_written: int
    stages: Mapping[str, float]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmedModel:
    """What became of one configured model. `why` says how the entry that was there was out of date, as far as that had
    to be found out; `error` is why a model failed."""

    name: str
    action: Literal["saved", "replaced", "up to date", "failed"]
    graphs: int
    bytes_written: int
    seconds: float
    why: tuple[Problem, ...] = ()
    error: GraphpackError | None = None


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung of the ladder of validation, as it went."""

    name: str
    state: Literal["passed", "skipped", "waived"]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedBucket:
    """How the replay of one graph compared with its golden outputs; differences are in units of the outputs.
    `token_count` is that of a piecewise graph, whose `batch_size` are the rows it gives logits for."""

    batch_size: int
    seq_len: int
    token_count: int | None = None
    steps: int
    max_difference: float
    tolerance: float
    bit_identical: bool
    argmax_compared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureRow:
    """A signature of an entry. `key` is the fingerprint of the signer's key; times are UTC in ISO 8601."""

    key: str
    serial: int
    created: str
    expires: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEntry:
    """`captures` is always 0: restoring never captures. `verified` is empty unless outputs were compared.

    `signature` is the one that made the entry a trusted one, None for an unsigned entry.
    """

    name: str
    device: str
    graphs: int
    pieces: int = 0
    captures: int = 0
    stages: Mapping[str, float]
    ladder: tuple[Rung, ...]
    verified: tuple[VerifiedBucket, ...] = ()
    weights_bytes: int
    weights_mode: str
    proven: tuple[str, ...]
    not_proven: tuple[str, ...] = ()
    signature: SignatureRow | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedEntry:
    """`digest` is that of the manifest, which the signature covers."""

    name: str
    digest: str
    signature: SignatureRow


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedEntry:
    """`blobs` are the entry's; `hashed` of them were hashed now, `remembered` when they were last."""

    name: str
    digest: str
    ladder: tuple[Rung, ...]
    blobs: int
    hashed: int
    remembered: int
    signature: SignatureRow | None
    proven: tuple[str, ...]
    not_proven: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """Time of one decode step of one graph."""

    batch_size: int
    seq_len: int
    steps: int
    median_ms: float
    min_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a restored model has run: replays by bucket, those of no use left out; the padding rows among them; steps
    that no graph was captured for. `prefills` are runs of piecewise graphs by token count, in which `pieces` were
    replayed and `padded_tokens` were padding. `weights_root` is that of `RestoredModel.weights`."""

    replays: Mapping[Bucket, int]
    padded_rows: int
    fallbacks: int
    weights_root: str
    prefills: Mapping[int, int] = field(default_factory=dict)
    pieces: int = 0
    padded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CollectedFile:
    """A file that nobody needs any more; `name` is that below the archive."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was removed from an archive, or would be in a dry run. `kept` blobs are unused as well, but not for long."""

    dry_run: bool
    blobs: tuple[CollectedFile, ...]
    temporary: tuple[CollectedFile, ...]
    kept: tuple[CollectedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Entries taken out of an archive, by the digests of their manifests; `collected` if the files went as well."""

    entries: Mapping[str, str]
    collected: Collected | None


class Observer(Protocol):
    """Told what a long command is doing. Calls are cheap and come from the command's own thread."""

    def stage(self, name: str) -> None:
        """A stage begins; the one before it has ended."""

    def bytes(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `what` have been read or written."""

    def bucket(self, batch_size: int, seq_len: int, text: str) -> None:
        """Something happened to one bucket, such as `captured in 3.1 s`."""

    def pieces(self, token_count: int, text: str) -> None:
        """Something happened to the pieces for one token count."""

    def note(self, text: str) -> None:
        """Something worth knowing that is not an error."""


class SilentObserver:
    """Listens to nothing: what the library uses."""

    def stage(self, name: str) -> None: ...

    def bytes(self, what: str, done: int, total: int) -> None: ...

    def bucket(self, batch_size: int, seq_len: int, text: str) -> None: ...

    def pieces(self, token_count: int, text: str) -> None: ...

    def note(self, text: str) -> None: ...
