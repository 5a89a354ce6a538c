"""The golden archive, and copies of it."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.matrix.sealing import clone

GOLDEN = Path(__file__).parents[1] / "archives" / "cpu-1.0"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden archive. Nobody writes into it."""
    return Path(shutil.copytree(GOLDEN, tmp_path_factory.mktemp("golden") / "base"))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Replay in one thread: steps this small only wait for others, for seconds where processors are shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # read when libgomp is loaded
        try:
            openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)
        except OSError:
            yield
            return
        threads = openmp.omp_get_max_threads()
        openmp.omp_set_num_threads(1)
        yield
        openmp.omp_set_num_threads(threads)


@pytest.fixture
def new_archive(base: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes copies of `base`, which is the golden archive where a module has no other."""
    count = iter(range(1000))
    return lambda: clone(base, tmp_path / f"archive{next(count)}")
