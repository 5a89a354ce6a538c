"""What a compiled object may be: checked on its bytes, and nothing is loaded before every earlier rung has passed."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

import graphpack
from graphpack import CorruptArchiveError, GraphpackError
from graphpack.backends.cpu import restore, runtime
from graphpack.backends.cpu.policy import check_object, object_name
from graphpack.elf import parse
from graphpack.identity.digests import settings_digest
from tests.archive.build import blob_path, read_record
from tests.backends.resealed import copied, with_object
from tests.capture.saved import object_of, record_of
from tests.matrix.row import Row
from tests.matrix.sealing import apply

PT_GNU_STACK, PF_X = 0x6474E551, 1


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything native would be loaded."""

    def refuse(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"loaded: {arguments}")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(runtime.CompiledObject, "__init__", refuse)
    monkeypatch.setattr(restore, "torch_library", refuse)


@pytest.fixture
def archive(normed: Path, tmp_path: Path) -> Path:
    return copied(normed, tmp_path / "archive")


@pytest.fixture
def weights(normed: Path) -> Path:
    return normed.parent / "weights"


def edited(code: bytes, offset: int, layout: str, value: int) -> bytes:
    data = bytearray(code)
    struct.pack_into(layout, data, offset, value)
    return bytes(data)


def with_executable_stack(code: bytes) -> bytes:
    """Set the flag in the program header of the stack (ELF64: e_phoff at 32, e_phnum at 56, p_flags at 4)."""
    first, count = struct.unpack_from("<Q", code, 32)[0], struct.unpack_from("<H", code, 56)[0]
    for index in range(count):
        header = first + 56 * index
        kind, flags = struct.unpack_from("<II", code, header)
        if kind == PT_GNU_STACK:
            return edited(code, header + 4, "<I", flags | PF_X)
    raise AssertionError("no stack header")


def linked(folder: Path, *options: str) -> bytes:
    """A small library, linked as `options` say."""
    (folder / "one.c").write_text("extern int other(void); int one(void) { return other(); }\n")
    (folder / "other.c").write_text("int other(void) { return 1; }\n")
    build = ["gcc", "-shared", "-fPIC"]
    subprocess.run([*build, "-o", folder / "libother.so", "-Wl,-soname,libother.so", folder / "other.c"], check=True)
    subprocess.run([*build, "-o", folder / "one.so", folder / "one.c", *options], check=True)
    return (folder / "one.so").read_bytes()


def bad_object(case: str, good: bytes, folder: Path) -> tuple[bytes, str]:
    """An object that breaks one rule of the policy, and how that is said."""
    match case:
        case "executable stack":
            return with_executable_stack(good), "archived asks for an executable stack, here refused"
        case "another machine":
            return edited(good, 18, "<H", 183), "archived ELF machine 183, here x86_64 is 62"
        case "a program":
            return edited(good, 16, "<H", 2), "archived ELF type 2, here only a shared object is loaded"
        case "RPATH":
            code = linked(folder, "-Wl,--disable-new-dtags,-rpath,/lib/evil")
            return code, "archived RPATH /lib/evil, here refused: it would choose libraries"
        case "RUNPATH":
            code = linked(folder, "-Wl,--enable-new-dtags,-rpath,$ORIGIN")
            return code, "archived RUNPATH $ORIGIN, here refused: it would choose libraries"
        case "unknown library":
            code = linked(folder, f"-L{folder}", "-lother")
            return code, "archived needs libother.so, here not among the libraries an object may need"
        case "garbage":
            return b"no object at all" * 100, "here not a loadable object: not an ELF file"
        case "truncated":
            return good[: len(good) // 2], ""
        case _:
            raise AssertionError(case)


CASES = (
    "executable stack", "another machine", "a program", "RPATH", "RUNPATH", "unknown library", "garbage", "truncated",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_bad_object_is_refused_before_it_is_loaded(
    case: str, normed: Path, archive: Path, weights: Path, tmp_path: Path, no_loading: None
) -> None:
    code, reason = bad_object(case, object_of(normed, 2), tmp_path)
    if not reason:
        (problem,) = check_object(code, "x86_64", "")
        reason = f"here {problem.here}"
        assert problem.here.startswith("not a loadable object: ")
    where = with_object(archive, code)
    with pytest.raises(CorruptArchiveError) as refusal:
        graphpack.load(archive, weights=weights)
    message = "the object of bucket 2x16 breaks the policy for native code"
    assert str(refusal.value) == f"{message}\n  {where}: {reason}"
    assert refusal.value.code == 4


def test_every_way_an_object_breaks_the_policy_is_said_at_once(normed: Path) -> None:
    code = edited(edited(with_executable_stack(object_of(normed, 2)), 18, "<H", 183), 16, "<H", 2)
    assert [problem.archived for problem in check_object(code, "x86_64", "here")] == [
        "ELF machine 183",
        "ELF type 2",
        "asks for an executable stack",
    ]


def test_what_save_makes_keeps_to_the_policy(normed: Path) -> None:
    code = object_of(normed, 2)
    assert check_object(code, "x86_64", "here") == []
    elf = parse(code)
    assert (elf.executable_stack, elf.rpath, elf.runpath) == (False, None, None)
    assert "libtorch_cpu.so" in elf.needed
    assert elf.soname == object_name(settings_digest(record_of(normed).settings), record_of(normed).graphs[0].topology)


def test_an_object_for_another_batch_is_refused(decoder: Path, tmp_path: Path, no_loading: None) -> None:
    """It would read past the ends of its inputs."""
    archive = copied(decoder, tmp_path / "archive")
    graphs = record_of(decoder).graphs
    where = with_object(archive, object_of(decoder, 4), graph=0)
    with pytest.raises(CorruptArchiveError) as refusal:
        graphpack.load(archive)
    assert str(refusal.value) == (
        "the object of bucket 1x64 is not the one the record describes\n"
        f"  {where}: archived topology {graphs[0].topology[:12]}, "
        f"here topology {graphs[2].topology[:12]} in the object\n"
        "    -> save again"
    )


EARLIER_RUNGS: dict[str, tuple[str, Any, int]] = {
    "format": ("features.load", ["of the future"], 5),
    "integrity": ("weights.tensors.0.shape", [9], 4),
    "environment": ("environment.machine", "aarch64", 6),
    "layout": ("layout.capture_version", 99, 8),
}
"""The rung `weights` has a test of its own: no edit of a record alone gets as far."""


@pytest.mark.parametrize("rung", EARLIER_RUNGS)
def test_nothing_is_loaded_when_an_earlier_rung_fails(
    rung: str, archive: Path, weights: Path, no_loading: None
) -> None:
    field, value, code = EARLIER_RUNGS[rung]
    apply(archive, Row(field=field, change=rung, edits=((field, value),)))
    with pytest.raises(GraphpackError) as refusal:
        graphpack.load(archive, weights=weights)
    assert refusal.value.code == code


def test_nothing_is_loaded_when_the_weights_differ(normed: Path, tmp_path: Path, no_loading: None) -> None:
    with pytest.raises(GraphpackError) as refusal:
        graphpack.load(normed, weights=tmp_path)
    assert refusal.value.code == 7


def test_nothing_is_loaded_from_a_damaged_blob(archive: Path, weights: Path, no_loading: None) -> None:
    path = blob_path(archive, read_record(archive)["graphs"][0]["object"])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(CorruptArchiveError):
        graphpack.load(archive, weights=weights)
