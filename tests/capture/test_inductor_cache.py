"""Whose directory torch's compiler may take code from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import graphpack
from graphpack.backends.inductor_cache import check_inductor_cache
from graphpack.errors import CaptureRefusedError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(path))
    return path


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775])
def test_a_directory_of_ones_own_is_fine(cache: Path, mode: int) -> None:
    check_inductor_cache()
    cache.chmod(mode)
    check_inductor_cache()


def test_one_that_everyone_can_write_to_is_not(cache: Path, tmp_path: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(CaptureRefusedError) as refused:
        graphpack.save("tiny-llama", tmp_path / "archive", batch_sizes=(1,), seq_lens=(16,))
    assert str(refused.value) == (
        "torch would run compiled code from a directory that others can write\n"
        f"  {cache}: here mode 777\n"
        "    -> remove it, or set TORCHINDUCTOR_CACHE_DIR to a directory of your own"
    )
    assert not (tmp_path / "archive").exists()


def test_one_of_another_user_is_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_inductor_cache()
    owner = cache.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        check_inductor_cache()
        os.chown(cache, 12345, -1)
        owner = 12345
    with pytest.raises(CaptureRefusedError, match=f"here owned by user {owner}\n"):
        check_inductor_cache()
