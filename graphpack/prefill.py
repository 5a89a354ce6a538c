"""Prompts through piecewise graphs, many tokens of a few rows at a time; and steps, where there is nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from graphpack.archive.piecewise import PiecewiseGraph
from graphpack.archive.ranks import ranks_of
from graphpack.archive.record import Graph, Record
from graphpack.arguments import MANY, NUMBERS, check_arguments, optional, whole
from graphpack.backends import Executable
from graphpack.dispatch import Part, chunks
from graphpack.errors import InputError, Problem
from graphpack.graph import Bucket
from graphpack.inputs import array_of


class Prefill:
    """The piecewise graphs of an entry by token count, none where it has none, and what was run of them."""

    def __init__(self, record: Record, graphs: Mapping[int, tuple[PiecewiseGraph, Executable]]) -> None:
        self._name = record.entry.name
        self._slots = record.settings.slots - 1
        self._graphs = dict(sorted(graphs.items()))
        self.token_counts = tuple(self._graphs)
        self.pieces = self.padded_tokens = 0
        self._replays: Counter[int] = Counter()

    @property
    def replays(self) -> Mapping[int, int]:
        """Runs by token count."""
        return MappingProxyType(dict(sorted(self._replays.items())))

    def check(
        self, prompts: Sequence[Any], slots: Sequence[int], positions: Sequence[int] | None
    ) -> tuple[list[np.ndarray], list[int], list[int]]:
        """The tokens of each prompt, int64, its slot and its first position, 0 without `positions`. InputError with
        everything that is wrong."""
        check_arguments(
            InputError, prompts=(prompts, MANY), slots=(slots, NUMBERS), positions=(positions, optional(NUMBERS))
        )
        wanted = [whole(slot) for slot in slots]
        places = [0] * len(prompts) if positions is None else [whole(position) for position in positions]
        return self._check(list(prompts), wanted, places), [one or 0 for one in wanted], [one or 0 for one in places]

    def _check(
        self, prompts: Sequence[Any], slots: Sequence[int | None], positions: Sequence[int | None]
    ) -> list[np.ndarray]:
        if not self._graphs:
            problem = Problem("entry.mode", "full", "piecewise is needed", "save with --mode piecewise, or use step")
            raise InputError(f"entry '{self._name}' has no graphs for prompts", [problem]).about(self._name, "prefill")
        graph = next(iter(self._graphs.values()))[0]
        last_token, last_position = (graph.inputs[index].maximum or 0 for index in (0, 1))
        problems = []
        if not len(prompts) == len(slots) == len(positions):
            counts = f"{len(prompts)} prompts, {len(slots)} slots, {len(positions)} positions"
            problems.append(Problem("prefill", "as many of each", counts))
        if not len(prompts):
            problems.append(Problem("prefill", "at least one prompt", "no prompt"))
        if len(set(slots)) < len(slots) or not all(slot is not None and 0 <= slot < self._slots for slot in slots):
            problems.append(Problem("slots", f"0 to {self._slots - 1}, each once", str(list(slots))))
        arrays = []
        for index, (prompt, first) in enumerate(zip(prompts, positions, strict=False)):
            where = f"prompt {index + 1}"
            try:
                tokens = array_of(prompt)
            except (TypeError, ValueError) as error:
                problems.append(Problem(where, "a row of integers", str(error)))
                continue
            arrays.append(tokens)
            if tokens.size == 0:
                problems.append(Problem(where, "at least one token", "no token", "give it a first token"))
            elif tokens.ndim != 1 or tokens.dtype != np.int64:
                problems.append(Problem(where, "int64, one dimension", f"{tokens.dtype} {list(tokens.shape)}"))
            elif tokens.min() < 0 or tokens.max() > last_token:
                problems.append(Problem(where, f"tokens 0 to {last_token}", f"{tokens.min()} to {tokens.max()}"))
            elif first is None or first < 0 or first + len(tokens) - 1 > last_position:
                here = f"{len(tokens)} tokens from position {first!r}"
                problems.append(Problem(where, f"positions 0 to {last_position}", here, "save with larger --seq-lens"))
        if problems:
            raise InputError("the prompts cannot be run", problems).about(self._name, "prefill")
        return arrays

    def run(self, prompts: Sequence[np.ndarray], slots: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """The logits after each prompt, `[prompts, vocab]` in the type that carries them. Arguments were checked."""
        results: dict[int, np.ndarray] = {}
        rows = {count: graph.rows for count, (graph, _) in self._graphs.items()}
        for count, parts in chunks([len(prompt) for prompt in prompts], rows):
            graph, executable = self._graphs[count]
            inputs, ended = self._inputs(graph, parts, prompts, slots, positions)
            logits = executable.run(inputs)[graph.outputs[0].name]
            results |= {row: logits[index].copy() for index, row in enumerate(ended)}
            self._replays[count] += 1
            self.pieces += sum(call.piece is not None for call in graph.calls)
            self.padded_tokens += count - sum(part.stop - part.start for part in parts)
        return np.stack([results[row] for row in range(len(prompts))])

    def _inputs(
        self,
        graph: PiecewiseGraph,
        parts: Sequence[Part],
        prompts: Sequence[np.ndarray],
        slots: Sequence[int],
        positions: Sequence[int],
    ) -> tuple[dict[str, np.ndarray], list[int]]:
        """What a chunk takes, and the rows that end in it. Padding: token 0 at position 0 of the scratch slot."""
        filled = {spec.name: np.zeros(spec.shape, np.int64) for spec in graph.inputs}
        filled["slots"][:] = self._slots
        ended: list[int] = []
        at = 0
        for part in parts:
            here = slice(at, at + part.stop - part.start)
            filled["token_ids"][here] = prompts[part.row][part.start : part.stop]
            filled["positions"][here] = positions[part.row] + np.arange(part.start, part.stop)
            filled["slots"][here] = slots[part.row]
            at = here.stop
            if part.stop == len(prompts[part.row]):
                filled["ends"][len(ended)] = at - 1
                ended.append(part.row)
        return filled, ended

    def close(self) -> None:
        for _, executable in self._graphs.values():
            executable.close()


class _StepInPieces:
    """A decode step of as many rows as a piecewise graph has tokens: each token is a row of its own."""

    def __init__(self, graph: PiecewiseGraph, executable: Executable) -> None:
        self._executable = executable
        self._ends = np.arange(graph.rows, dtype=np.int64)

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return self._executable.run({**inputs, "ends": self._ends})

    def close(self) -> None:
        """The piecewise graph is closed by itself."""


def steps_in_pieces(
    record: Record, pieces: Mapping[int, tuple[PiecewiseGraph, Executable]]
) -> dict[Bucket, tuple[Graph, Executable]]:
    """The decode steps of an entry that has no graphs for them, by bucket: one for each batch size."""
    ranks, seq_len = ranks_of(record), max(record.settings.seq_lens)
    steps: dict[Bucket, tuple[Graph, Executable]] = {}
    for count in record.settings.batch_sizes if ranks else ():
        graph, executable = pieces[count]
        bucket = Bucket(count, seq_len)
        described = Graph(
            bucket=bucket,
            topology=graph.topology,
            nodes=sum(piece.nodes for piece in graph.pieces),
            object=graph.pieces[0].object,
            inputs=tuple(spec for spec in graph.inputs if spec.name != "ends"),
            outputs=graph.outputs,
            state=ranks.state if ranks else (),
            bindings=graph.bindings,
            golden=graph.golden,
            golden_steps=graph.golden_steps,
            tolerance=graph.tolerance,
            deviation=graph.deviation,
        )
        steps[bucket] = described, _StepInPieces(graph, executable)
    return steps
