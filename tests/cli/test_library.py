"""The functions of the package: what they ask of the rooms behind them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import graphpack
from graphpack.archive.keys import read_public_key
from graphpack.archive.store import Entry
from graphpack.configuration import yaml_file
from graphpack.models import checkpoint
from graphpack.results.load import LoadRequest
from graphpack.results.observer import SilentObserver
from graphpack.results.save import SaveRequest
from tests.cli import fakes
from tests.cli.conftest import Fake


def test_save(fake: Fake) -> None:
    seen: list[SaveRequest] = []
    fake("capture", fakes.module(save=fakes.saving(fakes.SAVED, seen)))
    result = graphpack.save(Path("model"), "archive", name="n", batch_sizes=[4, 1, 4], seq_lens={64}, replace=True)
    assert result is fakes.SAVED
    expected = SaveRequest(
        model="model", archive=Path("archive"), name="n", batch_sizes=(1, 4), seq_lens=(64,), replace=True
    )
    assert seen == [expected]


def test_save_refuses_every_bad_setting_at_once() -> None:
    with pytest.raises(graphpack.UsageError) as caught:
        graphpack.save("m", "a", name="-", device="gpu", batch_sizes=(0,), seq_lens=(), dtype="int8", cpu_isa="sse")
    where = [problem.where for problem in caught.value.problems]
    assert where == ["batch-sizes", "seq-lens", "device", "name", "dtype", "cpu-isa"]


def test_whole_numbers_of_numpy_are_whole_numbers(fake: Fake) -> None:
    seen: list[SaveRequest] = []
    fake("capture", fakes.module(save=fakes.saving(fakes.SAVED, seen)))
    given: dict[str, Any] = {"batch_sizes": np.array([4, 1, 4]), "seq_lens": (np.int64(64),), "slots": np.int64(5)}
    graphpack.save("model", "archive", **given)
    assert seen == [SaveRequest(model="model", archive=Path("archive"), batch_sizes=(1, 4), seq_lens=(64,), slots=5)]
    assert {type(number) for number in (*seen[0].batch_sizes, *seen[0].seq_lens, seen[0].slots)} == {int}


OTHER_THAN_TRUTH: tuple[Any, ...] = (None, "no", 1, np.array([True, False]), np.array(1))


@pytest.mark.parametrize("value", OTHER_THAN_TRUTH, ids=repr)
def test_what_is_no_truth_value_is_refused(value: Any, tmp_path: Path) -> None:
    for call, paths, names in (
        (graphpack.save, ("tiny-llama", tmp_path), ("replace", "compile")),
        (graphpack.load, (tmp_path,), ("verify", "copy_weights", "lazy_graphs", "require_signature")),
    ):
        made: Any = call
        for name in names:
            with pytest.raises(graphpack.UsageError) as caught:
                made(*paths, **{name: value})
            (problem,) = caught.value.problems
            assert (problem.where, problem.hint) == (name, "give True or False")


def test_an_array_without_dimensions_is_no_list() -> None:
    one: Any = np.array(1)
    with pytest.raises(graphpack.UsageError) as caught:
        graphpack.load("archive", allow=one, trusted_keys=one)
    assert [problem.where for problem in caught.value.problems] == ["allow", "trusted_keys"]
    with pytest.raises(graphpack.UsageError, match="batch_sizes"):
        graphpack.save("m", "a", batch_sizes=one)


@pytest.mark.parametrize("name", ["config", "complete", "names", "scatter", "foo"])
def test_a_pool_takes_what_a_load_takes(name: str) -> None:
    options: Any = {name: True}
    with graphpack.ModelPool() as pool, pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        pool.load("archive", **options)


def test_load(fake: Fake) -> None:
    restore = fakes.Loading((fakes.LOADED,))

    def load_only(request: LoadRequest) -> object:
        return restore(request, SilentObserver())[0]

    fake("opening", fakes.module(begun=lambda *_: nullcontext(), load_only=load_only))
    model = graphpack.load("archive", "n", weights="dir", verify=True, allow=["environment.torch"], copy_weights=True)
    assert restore.models == [cast("object", model)]
    expected = LoadRequest(
        archive=Path("archive"),
        names=("n",),
        weights={None: Path("dir")},
        verify=True,
        allow=frozenset({"environment.torch"}),
        copy_weights=True,
    )
    assert restore.requests == [expected]


@pytest.mark.parametrize("path", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
@pytest.mark.parametrize("read", [read_public_key, checkpoint.read_config, yaml_file.read, graphpack.open_archive])
def test_a_path_that_none_can_be_is_not_found(read: Callable[[Path], object], path: str) -> None:
    with pytest.raises(graphpack.NotFoundError):
        read(Path(path))


def test_load_refuses_a_device_that_does_not_exist() -> None:
    with pytest.raises(graphpack.UsageError):
        graphpack.load("archive", "n", device="gpu")


def test_load_without_a_name_takes_the_only_entry(fake: Fake, tmp_path: Path) -> None:
    restored: list[str] = []

    def restore_entry(archive: object, entry: Entry, *rest: object) -> AbstractContextManager[object]:
        restored.append(entry.record.entry.name)
        return nullcontext(fakes.FakeModel(fakes.LOADED))

    fake("restore", fakes.module(restore_entry=restore_entry))
    fakes.write_archive(tmp_path / "archive", "one")
    assert isinstance(graphpack.load(tmp_path / "archive"), fakes.FakeModel)
    assert restored == ["one"]
    fakes.write_archive(tmp_path / "archive", "two")
    with pytest.raises(graphpack.UsageError, match="2 entries: one, two"):
        graphpack.load(tmp_path / "archive")


def test_open_archive(tmp_path: Path) -> None:
    fakes.write_archive(tmp_path / "archive")
    assert [entry.record.entry.name for entry in graphpack.open_archive(tmp_path / "archive").find(None)] == [
        "tiny-llama"
    ]
    with pytest.raises(graphpack.NotFoundError):
        graphpack.open_archive(tmp_path / "nothing")


def test_everything_promised_is_there() -> None:
    assert [name for name in graphpack.__all__ if not hasattr(graphpack, name)] == []
