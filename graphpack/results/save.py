"""What a save is asked to do, and what it answers; and prewarming, which saves many models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from graphpack.arguments import device_problems
from graphpack.errors import GraphpackError, Problem, UsageError
from graphpack.frozen import dataclass
from graphpack.schema import shown
from graphpack.split_operations import DEFAULT_SPLIT
from graphpack.words import (
    CPU_ISAS,
    DTYPE_WORDS,
    LARGEST_SIZE,
    MODES,
    NAME_WORDS,
    TOKEN_COUNTS,
    is_entry_name,
)


def _sizes_problems(where: str, sizes: tuple[int, ...]) -> list[Problem]:
    good = all(type(size) is int and 1 <= size <= LARGEST_SIZE for size in sizes)
    if sizes and good and list(sizes) == sorted(set(sizes)):
        return []
    return [Problem(where, here=shown(list(sizes)), hint="give whole numbers from 1, sorted, each once")]


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
            *device_problems(self.device),
        ]
        largest = max((size for size in self.batch_sizes if type(size) is int), default=1)
        if self.slots is not None and not (type(self.slots) is int and largest <= self.slots < LARGEST_SIZE):
            hint = f"a whole number from {largest}, the largest batch size, to {LARGEST_SIZE - 1}"
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
