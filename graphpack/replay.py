"""A restored model: check the inputs, run the graph that fits them, read the outputs; verify against goldens."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from graphpack import logs
from graphpack.archive.piecewise import PiecewiseGraph
from graphpack.archive.record import Graph, Record, Weights
from graphpack.arguments import BY_NAME, SECONDS, TEXT, check_arguments
from graphpack.backends import KEEPS, Executable, Memory
from graphpack.backends.spare import Spare
from graphpack.dispatch import FALLBACKS, POLICIES, check_captured, check_choice, choose, no_bucket, padded
from graphpack.errors import InputError, Problem, WeightsMismatchError
from graphpack.fallback import Fallback
from graphpack.graph import Bucket, TensorSpec, is_decode
from graphpack.inputs import arrays_of, check_inputs, length_of, row_count, with_rows
from graphpack.life import Life
from graphpack.models.locate import Located
from graphpack.prefill import Prefill
from graphpack.results.load import LoadedEntry
from graphpack.slots import Slots, check_made_of_slots
from graphpack.tensor import Tensor

if TYPE_CHECKING:
    from graphpack.golden import Golden
    from graphpack.results.replay import BenchRow, Stats, VerifiedBucket


class RestoredModel:
    """Graphs of one entry, ready to replay. A context manager; one call at a time, others wait. It is for the process
    that restored it: torch's threads and CUDA do not outlive `os.fork`, so fork before the first load, or spawn.

    `result` says what was restored and what was proven about it; `checkpoint` is the directory of the weights, or None.
    """

    def __init__(
        self,
        record: Record,
        graphs: Mapping[Bucket, tuple[Graph, Executable]],
        memory: Memory,
        located: Located,
        result: LoadedEntry,
        pieces: Mapping[int, tuple[PiecewiseGraph, Executable]] | None = None,
    ) -> None:
        self.record = record
        self.result = result
        self.checkpoint = located.directory
        self.buckets: tuple[Bucket, ...] = tuple(sorted(graphs))
        """The captured (batch size, sequence length) pairs, smallest first."""
        self.inputs = graphs[self.buckets[0]][0].inputs
        """What a step of the smallest bucket takes."""
        self._graphs = dict(graphs)
        self._memory = memory
        self._prefill = Prefill(record, pieces or {})
        self.token_counts = self._prefill.token_counts
        """How many tokens of prompts can run at a time; empty for an entry without piecewise graphs."""
        self._fallback = Fallback(record, located, memory, self.buckets)
        self._slots = Slots(record.settings.slots - 1)
        self._replays: Counter[Bucket] = Counter()
        self._padded_rows = self._fallbacks = 0
        self._lock = threading.Lock()
        self._life = Life(record.entry.name)
        self.pool: object = None
        """The pool that alone lets it sleep and wake, if it is in one."""
        self._weights, self._updated = record.weights, False

    @property
    def slots(self) -> int:
        """How many rows the state of a decode entry holds, which is how many can be in progress at once."""
        return self._slots.count

    @property
    def weights(self) -> Weights:
        """What the weights are now: the recorded ones, until `update_weights`."""
        return self._weights

    @property
    def updated(self) -> bool:
        """Whether `update_weights` was called: the checkpoint is no longer what the weights are."""
        return self._updated

    @property
    def stats(self) -> Stats:
        """What was run so far, as it is now: `verify` and `bench` do not count."""
        from graphpack.results.replay import Stats

        with self._lock:
            return Stats(
                replays=MappingProxyType(dict(sorted(self._replays.items()))),
                padded_rows=self._padded_rows,
                fallbacks=self._fallbacks,
                prefills=self._prefill.replays,
                pieces=self._prefill.pieces,
                padded_tokens=self._prefill.padded_tokens,
                weights_root=self.weights.root,
            )

    def step(
        self,
        token_ids: Any,
        positions: Any,
        slots: Any = None,
        *,
        policy: str = "pad",
        fallback: str = "error",
        copy: bool = True,
    ) -> Tensor:
        """Decode one token a row and return the logits, `[rows, vocab]`.

        Each argument is int64 `[rows]`, dense: a list, a numpy array, or anything with `__dlpack__` on a CPU.
        Row i reads and writes the KV state of `slots[i]` (by default slot i) and puts its token at
        `positions[i]`. `policy` is `pad`, the smallest bucket that holds the rows, the rest being padding in the
        scratch slot; or `exact`, only a bucket of just this many rows; of several the one with the shortest sequence
        that fits. Where there is none, `fallback` is `error`; or `eager`, the model itself run by torch over the same
        state, for as many rows and positions as that holds. `copy=False` returns the graph's own memory, which a later
        step may overwrite.

        Raises InputError, before anything runs, for any other shape, dtype, stride, device or value, and for more
        rows or a later position than any bucket holds; ClosedError after `close`; and where the model cannot run
        eagerly here, the errors of `graphpack.eager.Eager`.
        """
        check_choice("policy", policy, POLICIES)
        check_choice("fallback", fallback, FALLBACKS)
        given = arrays_of({"token_ids": token_ids, "positions": positions})
        rows = row_count(given)
        given |= {"slots": np.arange(rows, dtype=np.int64)} if slots is None else arrays_of({"slots": slots})
        with self._lock:
            self._require_decode()
            length = length_of(given["positions"])
            bucket = choose(self.buckets, rows, length, policy)
            if bucket is None and fallback == "eager" and rows:
                return self._step_eagerly(given, rows, length, policy)
            if bucket is None:
                raise no_bucket(self.buckets, rows, length, policy).about(self.record.entry.name, f"{rows}x{length}")
            graph, executable = self._graphs[bucket]
            self._check([with_rows(spec, rows) for spec in graph.inputs], given, f"{rows}x{length}")
            filled = {spec.name: padded(given[spec.name], spec, bucket.batch_size) for spec in graph.inputs}
            logits = graph.outputs[0]
            values = executable.run(filled)[logits.name][:rows]
            self._count(bucket, bucket.batch_size - rows)
            return Tensor(values.copy() if copy else values, logits.dtype)

    def _step_eagerly(self, given: Mapping[str, np.ndarray], rows: int, length: int, policy: str) -> Tensor:
        graph, _ = self._graphs[max(self.buckets, key=lambda bucket: bucket.seq_len)]
        self._fallback.seq_len(rows, length)
        self._check([with_rows(spec, rows) for spec in graph.inputs], given, f"{rows}x{length}")
        values = self._fallback.run(given, rows, length, policy)
        self._fallbacks += 1
        return Tensor(values, graph.outputs[0].dtype)

    def prefill(
        self, prompts: Sequence[Any], slots: Sequence[int], *, positions: Sequence[int] | None = None
    ) -> Tensor:
        """Run prompts through the piecewise graphs and return the logits after the last token of each,
        `[prompts, vocab]`: many tokens at a time, of one prompt after the other.

        Each prompt is int64 `[tokens]`, at least one: a list, a numpy array, or anything with `__dlpack__` on a CPU.
        Prompt i becomes the KV state of `slots[i]` from `positions[i]` on, by default 0; what is before that is seen.

        Raises InputError, before anything runs, for anything else, and for an entry that has no piecewise graphs.
        """
        with self._lock:
            self._life.require_awake()
            checked = self._prefill.check(prompts, slots, positions)
            return Tensor(self._prefill.run(*checked), self._graphs[self.buckets[0]][0].outputs[0].dtype)

    def _count(self, bucket: Bucket, padding: int) -> None:
        if not self._replays:
            logs.info("replay active", entry=self.record.entry.name, bucket=str(bucket))
        self._replays[bucket] += 1
        self._padded_rows += padding

    def replay(self, bucket: Bucket, inputs: Mapping[str, Any], *, copy: bool = True) -> dict[str, Tensor]:
        """Run the graph of one bucket on exactly its own inputs, by name, and return its outputs by name.

        Raises InputError naming every input that is missing, unknown, or not what the graph was captured for.
        """
        with self._lock:
            self._life.require_awake()
            check_captured(bucket, self.buckets, self.record.entry.name)
            check_arguments(InputError, inputs=(inputs, BY_NAME))
            graph, executable = self._graphs[bucket]
            given = arrays_of(inputs)
            self._check(graph.inputs, given, bucket, scratch_allowed=True)
            outputs = executable.run(given)
            self._count(bucket, 0)
            return {
                spec.name: Tensor(outputs[spec.name].copy() if copy else outputs[spec.name], spec.dtype)
                for spec in graph.outputs
            }

    def state(self, name: str) -> Tensor:
        """A state region such as `kv.0.key`: on cpu its memory, on cuda a copy of it."""
        with self._lock:
            self._life.require_awake()
            check_arguments(InputError, name=(name, TEXT))
            specs = {spec.name: spec for graph, _ in self._graphs.values() for spec in graph.state}
            if name not in specs:
                raise InputError(f"no state is called {name!r}", [Problem(name, ", ".join(specs))])
            return Tensor(self._memory.array(name), specs[name].dtype)

    def reset(self, slot: int | None = None) -> None:
        """Set one slot of the state to zero; without `slot` all state, of which nothing is assigned then, as it was
        when the model was restored.

        Raises InputError for a slot there is not, or state that is not made of slots.
        """
        with self._lock:
            self._life.require_awake()
            if slot is None:
                self._memory.reset_state()
                self._slots.clear()
            else:
                self._check_slots()
                self._memory.reset_slot(self._slots.find(slot))

    def assign(self) -> int:
        """A free slot for a row that joins, its state zero; it is taken until `release` or `reset`.

        Raises InputError if none is free, or if the state is not made of slots. Who keeps count of slots without this
        may.
        """
        with self._lock:
            self._life.require_awake()
            self._check_slots()
            slot = self._slots.assign()
            self._memory.reset_slot(slot)
            return slot

    def release(self, slot: int) -> None:
        """Free the slot of a row that leaves. InputError for one that is not assigned."""
        with self._lock:
            self._life.require_awake()
            self._slots.release(slot)

    def verify(self, goldens: Mapping[Bucket, Golden]) -> tuple[VerifiedBucket, ...]:
        """Replay every golden from zeroed state and compare, leaving the state zeroed.

        Raises OutputsDifferError with the first step that differs in each bucket, and WeightsMismatchError after
        `update_weights`.
        """
        from graphpack.trials import Trial, check_as_saved, verify_graphs

        with self._lock:
            self._life.require_awake()
            check_as_saved(self.record, self.weights)
            check_arguments(InputError, goldens=(goldens, BY_NAME))
            for bucket in goldens:
                check_captured(bucket, self.buckets, self.record.entry.name)
            trials = [Trial(bucket, *self._graphs[bucket], golden) for bucket, golden in sorted(goldens.items())]
            return verify_graphs(self.record.entry.name, trials, self._memory)

    def bench(self, seconds: float = 1.0) -> list[BenchRow]:
        """Time steps of every bucket for about `seconds` each, at position 0, leaving the state zeroed."""
        from graphpack.trials import bench_graphs

        with self._lock:
            self._life.require_awake()
            check_arguments(InputError, seconds=(seconds, SECONDS))
            return bench_graphs(self.record, self._graphs, self._memory, seconds)

    @property
    def awake(self) -> bool:
        """Whether it can be used: neither asleep nor closed."""
        return self._life.awake

    @property
    def closed(self) -> bool:
        """Whether its memory and code were given back."""
        return self._life.closed

    def sleep(self, keep: str = "host", *, by: object = None, spare: Spare | None = None) -> None:
        """Give the memory of the device back until `wake`, once a step that runs has ended. Addresses and graphs stay,
        state does not, and no slot is assigned any more. Sleeping twice is fine.

        Weights are kept in page-locked memory of the host, or with `keep="disk"` read again from the checkpoint. On a
        CPU, weights that are kept in memory of the host stay where they are. `spare` takes the memory for a model that
        wakes next.

        Raises WeightsMismatchError for weights that were updated and would be lost, StorageError if the host has too
        little memory for them, UsageError for a model of a pool, unless it is asked for `by` that.
        """
        check_choice("keep", keep, KEEPS)
        with self._lock:
            self._life.refuse_closed()
            self._life.refuse_others(self.pool, by, "let it sleep there: ModelPool.sleep")
            if self._life.asleep:
                return
            if keep == "disk" and self.updated:
                problem = Problem("keep", here=keep, hint="keep them in memory of the host: keep='host'")
                raise WeightsMismatchError("updated weights cannot be read from the checkpoint again", [problem])
            self._memory.prepare_sleep(keep)
            self._life.asleep = True
            self._slots.clear()
            self._memory.sleep(spare)

    def check_wake(self, freed: int = 0) -> None:
        """Raise what `wake` would raise as things are, if `freed` more bytes of the device's memory were free."""
        with self._lock:
            self._life.refuse_closed()
            self._memory.check_wake(freed)

    def wake(self, *, by: object = None, spare: Spare | None = None) -> None:
        """Undo `sleep`, in memory of `spare` where that fits: graphs give the bits they gave, from state that is zero.

        Raises StorageError if the device has too little memory, WeightsMismatchError if weights are to be read again
        and the checkpoint has changed, UsageError as `sleep`; the model sleeps on then.
        """
        with self._lock:
            self._life.refuse_closed()
            self._life.refuse_others(self.pool, by, "switch to it: ModelPool.switch")
            if self._life.asleep:
                self._memory.wake(spare)
                self._life.asleep = False

    def update_weights(self, tensors: Mapping[str, Any], *, constants_hold: bool = False) -> None:
        """Give weights new values, from the next step on. `tensors` are arrays on the CPU by the checkpoint's names,
        each of the dtype and shape that the checkpoint has; numpy's of bfloat16 are uint16. The checkpoint is never
        written to. `weights` and `stats` say what the model's weights are from then on.

        `constants_hold` says that no constant of the entry was computed from its weights, where graphpack cannot know.

        Raises InputError with everything that does not fit, and nothing is written then. A model of which only a part
        could be written is closed.
        """
        from graphpack.weight_update import plan_update

        with self._lock:
            self._life.require_awake()
            check_arguments(InputError, tensors=(tensors, BY_NAME))
            update = plan_update(self.record, self.weights, tensors, self._memory.bound, constants_hold=constants_hold)
            self._updated = self.updated or bool(update.values)
            try:
                for region, values in update.values.items():
                    self._memory.write(region, values)
                self._memory.ready()
            except BaseException:
                self._close()
                raise
            self._weights = update.weights

    def close(self) -> None:
        """Give all memory and code back. Closing twice is fine; using a closed model is a ClosedError."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self.closed:
            return
        self._life.closed = True
        self._fallback.forget()
        self._prefill.close()
        for _, executable in self._graphs.values():
            executable.close()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_decode(self) -> None:
        self._life.require_awake()
        if not all(is_decode(graph.inputs) for graph, _ in self._graphs.values()):
            names = ", ".join(spec.name for spec in self.inputs)
            raise InputError("this entry is not a decode step; call replay", [Problem("inputs", names)])

    def _check(
        self,
        specs: Sequence[TensorSpec],
        given: Mapping[str, np.ndarray],
        asked: object,
        *,
        scratch_allowed: bool = False,
    ) -> None:
        """See `check_inputs`; its error says which entry it is about, and which bucket was asked for."""
        try:
            check_inputs(specs, given, scratch_allowed=scratch_allowed)
        except InputError as error:
            error.about(self.record.entry.name, asked)
            raise

    def _check_slots(self) -> None:
        self._require_decode()
        check_made_of_slots(next(iter(self._graphs.values()))[0].state, self.record.settings.slots)
