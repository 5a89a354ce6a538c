"""Pools of real models on a CPU: switching, what sleeping gives back, and every refusal with its whole message."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import graphpack
from graphpack import (
    AsleepError,
    ClosedError,
    InputError,
    ModelPool,
    NotFoundError,
    StorageError,
    UsageError,
    WeightsMismatchError,
)
from graphpack.backends.cpu.memory import CpuMemory
from graphpack.graph import Bucket
from graphpack.replay import RestoredModel

PAGE = os.sysconf("SC_PAGE_SIZE")
TOKENS = (5, 17, 400, 3)
STATE = "kv.0.key"


def logits(model: RestoredModel) -> bytes:
    """A text of a few tokens, two rows at a time; what comes later depends on the state before."""
    return b"".join(model.step([token, token + 1], [at, at]).numpy().tobytes() for at, token in enumerate(TOKENS))


def memory_of(model: RestoredModel) -> CpuMemory:
    return cast("CpuMemory", model._memory)


def resident(*parts: tuple[int, int]) -> int:
    """Bytes in memory of the pages in which the parts, start and size, lie: those that the process has mapped now."""
    numbers = sorted({page for start, size in parts for page in range(start // PAGE, -(-(start + size) // PAGE))})
    with open("/proc/self/pagemap", "rb") as pagemap:
        words = [os.pread(pagemap.fileno(), 8, 8 * number) for number in numbers]
    return sum(PAGE for word in words if word[7] & 0x80)


def places(model: RestoredModel, kind: str) -> list[tuple[int, int]]:
    arrays = [memory_of(model).array(one.name) for one in model.record.layout.regions if one.kind == kind]
    return [(array.ctypes.data, array.nbytes) for array in arrays]


def whole_process() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.fixture
def room(decoder: Path) -> int:
    """What one of the models takes."""
    with graphpack.load(decoder) as model:
        regions = model.record.layout.regions
    return sum(region.bytes for region in regions if region.kind in ("weight", "constant", "state"))


@pytest.fixture
def pool(decoder: Path, checkpoint: Path, room: int) -> Iterator[ModelPool]:
    """Two models, of which one can be awake."""
    with ModelPool(budget=room + room // 2) as made:
        made.load(decoder, alias="mapped", weights=checkpoint)
        made.load(decoder, alias="copied", weights=checkpoint, copy_weights=True)
        yield made


def test_a_hundred_switches(pool: ModelPool) -> None:
    first = pool.switch("mapped")
    expected = logits(first)
    addresses = {name: places(pool.switch(name), "weight") for name in pool.names}
    sizes = []
    for turn in range(100):
        name, other = ("mapped", "copied")[:: 1 if turn % 2 else -1]
        model = pool.switch(name)
        assert pool.awake == (name,)
        assert not model.state(STATE).numpy().any(), "a text that was there before it slept"
        assert logits(model) == expected
        assert places(model, "weight") == addresses[name]
        sleeper = pool._members[other].model
        assert resident(*places(sleeper, "state")) == 0
        sizes.append(whole_process())
    assert sizes[-1] - sizes[20] <= 4 << 20, "a copy of anything a switch would be more"
    assert first.result.captures == 0


def test_memory_goes_back_to_the_kernel_and_comes_again(pool: ModelPool) -> None:
    for name in ("mapped", "copied"):
        model = pool.switch(name)
        logits(model)
        # Most: a system that is short of memory takes pages of files back.
        assert resident(*places(model, "weight")) > sum(size for _, size in places(model, "weight")) / 2
        assert resident(*places(model, "state")) > 0
        pool.sleep(name)
        assert resident(*places(model, "weight"), *places(model, "state")) == 0


def test_weights_kept_in_memory_of_the_host_stay_where_they_are(decoder: Path, checkpoint: Path) -> None:
    with ModelPool() as pool:
        model = pool.load(decoder, weights=checkpoint, keep="host", copy_weights=True)
        expected = logits(model)
        before = resident(*places(model, "weight"))
        pool.sleep("tiny-llama")
        assert resident(*places(model, "weight")) == before > 0
        assert resident(*places(model, "state")) == 0
        (checkpoint / "model.safetensors").write_bytes(b"")
        assert logits(pool.switch("tiny-llama")) == expected


def test_without_a_budget_nobody_sleeps_unasked(decoder: Path) -> None:
    with ModelPool() as pool:
        for name in "abc":
            pool.load(decoder, alias=name)
        assert [*pool.awake] == ["a", "b", "c"]
        pool.sleep("b")
        pool.sleep("b")
        assert [*pool.names] == ["a", "b", "c"]
        assert [*pool.awake] == ["a", "c"]
        pool.switch("a")
        assert [*pool.awake] == ["c", "a"]


def test_who_was_switched_to_the_longest_ago_sleeps(decoder: Path, room: int) -> None:
    with ModelPool(budget=2 * room) as pool:
        for name in "abc":
            pool.load(decoder, alias=name)
        assert pool.awake == ("b", "c")
        pool.switch("b")
        pool.switch("a")
        assert pool.awake == ("b", "a")


def test_a_model_that_was_closed_takes_nothing(decoder: Path, room: int) -> None:
    with ModelPool(budget=room) as pool:
        pool.load(decoder, alias="a").close()
        pool.load(decoder, alias="b")
        with pytest.raises(ClosedError, match="entry 'tiny-llama' was closed"):
            pool.switch("a")
        assert pool.awake == ("b",)
        pool.remove("a")
        assert pool.names == ("b",)


def test_a_model_that_was_closed_takes_nothing_of_the_host(decoder: Path) -> None:
    with graphpack.load(decoder) as model:
        weights = sum(region.bytes for region in model.record.layout.regions if region.kind == "weight")
    with ModelPool(host_budget=weights) as pool:
        first = pool.load(decoder, alias="a", keep="host")
        with pytest.raises(UsageError, match=f"of which others take {weights}"):
            pool.load(decoder, alias="b", keep="host")
        first.close()
        pool.load(decoder, alias="b", keep="host")
        assert pool.awake == ("b",)


def test_slots_are_free_after_sleep(pool: ModelPool) -> None:
    model = pool.switch("mapped")
    assert [model.assign(), model.assign()] == [0, 1]
    pool.switch("copied")
    assert pool.switch("mapped").assign() == 0


def test_outputs_that_were_not_copied_outlive_sleep(pool: ModelPool) -> None:
    view = pool.switch("mapped").step([1, 2], [0, 0], copy=False).numpy()
    kept = view.copy()
    pool.switch("copied").step([3, 4], [0, 0])
    np.testing.assert_array_equal(view, kept)


def test_an_entry_of_another_archive(normed: Path, decoder: Path) -> None:
    inputs = {"x": np.ones((2, 8), np.float32)}
    with ModelPool() as pool:
        model = pool.load(normed, weights=normed.parent / "weights", alias="normed")
        pool.load(decoder)
        expected = model.replay(Bucket(2, 16), inputs)["y"].numpy()
        for name in (*pool.names, "normed"):
            pool.sleep(name)
            pool.switch(name)
        np.testing.assert_array_equal(model.replay(Bucket(2, 16), inputs)["y"].numpy(), expected)


# --- threads


def test_sleep_waits_for_a_running_step(pool: ModelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pool.switch("mapped")
    expected = model.step([1], [0]).numpy()
    _, executable = model._graphs[model.buckets[0]]
    started, go_on = threading.Event(), threading.Event()
    run = executable.run

    def slowly(inputs: Any) -> Any:
        started.set()
        assert go_on.wait(60)
        return run(inputs)

    monkeypatch.setattr(executable, "run", slowly)
    results: list[Any] = []
    stepping = threading.Thread(target=lambda: results.append(model.step([1], [0]).numpy()))
    switching = threading.Thread(target=pool.switch, args=("copied",))
    stepping.start()
    assert started.wait(60)
    switching.start()
    switching.join(0.2)
    assert switching.is_alive(), "the model would lose its memory in the middle of a step"
    go_on.set()
    switching.join(60)
    stepping.join(60)
    np.testing.assert_array_equal(results[0], expected)
    assert pool.awake == ("copied",)


def test_many_threads_switch_and_step(pool: ModelPool) -> None:
    """Who steps a model that another thread has put to sleep meanwhile is told so, and gets no wrong numbers."""
    expected = pool.switch("mapped").step([1], [0]).numpy().tobytes()
    wrong: list[BaseException | bytes] = []
    counts = {"steps": 0}

    def work(name: str) -> None:
        for _ in range(25):
            try:
                got = pool.switch(name).step([1], [0]).numpy().tobytes()
                counts["steps"] += 1
                if got != expected:
                    wrong.append(got)
            except AsleepError:
                continue
            except BaseException as error:  # noqa: BLE001 - told to the test's own thread
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("mapped", "copied") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert counts["steps"] > 0


# --- refusals

USES: dict[str, Callable[[RestoredModel], object]] = {
    "step": lambda model: model.step([1], [0]),
    "replay": lambda model: model.replay(model.buckets[0], {}),
    "state": lambda model: model.state(STATE),
    "reset": lambda model: model.reset(),
    "assign": lambda model: model.assign(),
    "release": lambda model: model.release(0),
    "verify": lambda model: model.verify({}),
    "bench": lambda model: model.bench(0.0),
    "update_weights": lambda model: model.update_weights({}),
}


@pytest.mark.parametrize("use", USES)
def test_a_sleeping_model_cannot_be_used(pool: ModelPool, use: str) -> None:
    model = pool.switch("mapped")
    pool.switch("copied")
    with pytest.raises(AsleepError) as refused:
        USES[use](model)
    assert str(refused.value) == (
        "entry 'tiny-llama' is asleep\n  model: here asleep\n    -> switch to it first: ModelPool.switch, or wake it"
    )
    assert model.stats.fallbacks == 0, "what is counted can be read"
    pool.switch("mapped").step([1], [0])


def test_a_model_does_not_wake_or_sleep_behind_its_pool(pool: ModelPool) -> None:
    """Else two would be awake where the budget has room for one, and their weights beyond what the host's has."""
    sleeper, awake = pool.switch("mapped"), pool.switch("copied")
    here = "\n  model: here in a pool, whose budgets it counts to\n    -> "
    asked: list[tuple[Callable[[], object], str]] = [
        (sleeper.wake, "switch to it: ModelPool.switch"),
        (awake.sleep, "let it sleep there: ModelPool.sleep"),
        (lambda: awake.sleep("disk", by=object()), "let it sleep there: ModelPool.sleep"),
    ]
    for call, hint in asked:
        with pytest.raises(UsageError) as refused:
            call()
        assert str(refused.value) == f"entry 'tiny-llama' sleeps and wakes with its pool alone{here}{hint}"
        assert pool.awake == ("copied",)
    assert pool.switch("mapped") is sleeper
    pool.sleep("mapped")
    assert pool.awake == ()


def test_a_model_without_a_pool_sleeps_and_wakes(decoder: Path) -> None:
    with graphpack.load(decoder) as model:
        expected = logits(model)
        model.sleep()
        model.wake()
        assert logits(model) == expected


def test_names_there_are_not(pool: ModelPool) -> None:
    for call in (pool.switch, pool.sleep, pool.remove):
        with pytest.raises(NotFoundError) as refused:
            call("maped")
        assert str(refused.value) == (
            "the pool has no such model\n"
            "  maped: archived models mapped, copied, here no model of this name\n"
            "    -> did you mean mapped?"
        )
    with pytest.raises(NotFoundError) as refused, ModelPool() as empty:
        empty.switch("x")
    assert str(refused.value) == (
        "the pool has no such model\n  x: archived models none, here no model of this name\n    -> load it first"
    )


def test_a_name_that_is_taken(pool: ModelPool, decoder: Path) -> None:
    with pytest.raises(UsageError) as refused:
        pool.load(decoder, alias="copied")
    assert str(refused.value) == (
        "the pool has a model of this name\n  name: here copied\n    -> remove it first, or give the new one an alias"
    )
    assert (pool.names, pool.awake) == (("mapped", "copied"), ("copied",))
    pool.switch("copied").step([1], [0])


@pytest.mark.parametrize("alias", ["", 5, b"name", ["a"]])
def test_a_name_that_is_none(pool: ModelPool, decoder: Path, alias: Any) -> None:
    with pytest.raises(UsageError) as refused:
        pool.load(decoder, alias=alias)
    assert str(refused.value) == f"no model has such a name\n{_alias(alias)}    -> give a text"
    assert pool.names == ("mapped", "copied")


@pytest.mark.parametrize("name", [None, "", 1.5, [1]])
def test_a_model_cannot_be_asked_for_by_what_is_no_name(pool: ModelPool, name: Any) -> None:
    for call in (pool.switch, pool.sleep, pool.remove):
        with pytest.raises(UsageError) as refused:
            call(name)
        here = f": here {name}" if name != "" else ""
        assert str(refused.value) == f"no model has such a name\n  name{here}\n    -> give a text"
    assert pool.names == ("mapped", "copied")


def _alias(alias: Any) -> str:
    return f"  alias: here {alias}\n" if alias else "  alias\n"


def test_a_model_larger_than_the_budget(decoder: Path, room: int) -> None:
    with ModelPool(budget=room - 1) as pool:
        with pytest.raises(UsageError) as refused:
            pool.load(decoder)
        assert str(refused.value) == (
            "model 'tiny-llama' is larger than the budget of the pool\n"
            f"  budget: archived needs {room} bytes of cpu, here {room - 1} bytes\n"
            "    -> raise the budget, or save with fewer or smaller buckets"
        )
        assert pool.names == ()


def test_weights_larger_than_the_host_budget(decoder: Path) -> None:
    with ModelPool(host_budget=1000) as pool:
        with pytest.raises(UsageError, match="larger than what is left of the host budget"):
            pool.load(decoder, keep="host")
        pool.load(decoder)


def test_budgets_that_are_none() -> None:
    with pytest.raises(UsageError) as refused:
        ModelPool(budget=0, host_budget=cast("int", 1.5))
    assert str(refused.value) == (
        "no pool has such a budget\n"
        "  budget: here 0\n    -> a whole number of bytes, at least 1\n"
        "  host_budget: here 1.5\n    -> a whole number of bytes, at least 1"
    )


def test_a_budget_is_any_whole_number(decoder: Path, room: int) -> None:
    with ModelPool(budget=cast("int", np.int64(room))) as pool:
        pool.load(decoder)
        pool.load(decoder, alias="other")
        assert pool.awake == ("other",)
    with pytest.raises(UsageError, match=r"^no pool has such a budget\n  budget: here True\n"):
        ModelPool(budget=True)


def test_a_place_for_weights_that_there_is_not(pool: ModelPool, decoder: Path) -> None:
    expected = "no such keep: 'ram'\n  keep: archived host, disk, here 'ram'"
    for call in (lambda: pool.load(decoder, keep="ram"), lambda: pool.switch("mapped").sleep("ram")):
        with pytest.raises(InputError) as refused:
            call()
        assert str(refused.value) == expected


def test_memory_of_the_caller_cannot_sleep(pool: ModelPool, decoder: Path) -> None:
    with pytest.raises(UsageError) as refused:
        pool.load(decoder, alias="bound", bind={STATE: 4096})
    assert str(refused.value) == "memory of the caller cannot sleep\n  bind\n    -> load it outside of the pool"


def test_a_load_that_is_refused_leaves_the_pool(pool: ModelPool, normed: Path) -> None:
    with pytest.raises(WeightsMismatchError):
        pool.load(normed)
    assert pool.awake == ("copied",), "nobody sleeps for a model that never comes to take memory"


@pytest.mark.parametrize("name", ["mapped", "copied"])
def test_a_checkpoint_that_changed_meanwhile(pool: ModelPool, name: str, checkpoint: Path) -> None:
    pool.switch(name)
    other = next(one for one in pool.names if one != name)
    expected = logits(pool.switch(other))
    file = checkpoint / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\0\0\0\0")
    os.utime(file, ns=(0, 0))
    with pytest.raises(WeightsMismatchError) as refused:
        pool.switch(name)
    lines = str(refused.value).splitlines()
    assert lines[0] == "the checkpoint has changed since the model was loaded"
    assert lines[1].startswith(f"  {file}: here mtime_ns ")
    assert lines[2:] == ["    -> remove the model and load it again"]
    assert pool.awake == (other,), "it was known before anybody slept"
    if other == "copied":
        assert logits(pool.switch(other)) == expected
    pool.remove(name)
    assert pool.names == (other,)


def test_a_mapped_checkpoint_that_changed_while_its_pages_stayed(decoder: Path, checkpoint: Path) -> None:
    """Where it is mapped, a page that was not written is the file's."""
    with ModelPool() as pool:
        pool.load(decoder, weights=checkpoint, keep="host")
        pool.sleep("tiny-llama")
        os.utime(checkpoint / "model.safetensors", ns=(0, 0))
        with pytest.raises(WeightsMismatchError, match="the checkpoint has changed since the model was loaded"):
            pool.switch("tiny-llama")
        assert pool.awake == ()


def test_a_checkpoint_that_cannot_be_read_at_wake(pool: ModelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pool.switch("copied")
    expected = logits(model)
    pool.switch("mapped")
    source = memory_of(model)._weights

    def fails(*_: object) -> None:
        raise StorageError("cannot read: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(source, "read_into", fails)
        with pytest.raises(StorageError, match="cannot read: Input/output error"):
            pool.switch("copied")
    assert pool.awake == ()
    assert resident(*places(model, "weight")) == 0
    assert logits(pool.switch("copied")) == expected


def test_a_closed_pool(decoder: Path) -> None:
    pool = ModelPool()
    models = [pool.load(decoder, alias=name) for name in "ab"]
    pool.sleep("a")
    pool.close()
    pool.close()
    for call in (lambda: pool.switch("a"), lambda: pool.load(decoder), lambda: pool.sleep("a")):
        with pytest.raises(ClosedError) as refused:
            call()
        assert str(refused.value) == "the pool was closed"
    for model in models:
        for use in (model.wake, model.check_wake, model.sleep, model.reset):
            with pytest.raises(ClosedError, match="entry 'tiny-llama' was closed"):
                use()
