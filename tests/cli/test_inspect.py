"""`inspect`, on archives that the store wrote."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

import graphpack
from tests.cli import fakes
from tests.cli.conftest import Run


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    fakes.write_archive(tmp_path / "archive")
    return tmp_path / "archive"


def reseal(archive: Path, major: int) -> None:
    """Give the one entry's record another major version, with all digests above it made right again."""
    index = json.loads((archive / "index.json").read_text())
    manifest = json.loads(blob(archive, index["manifests"][0]).read_bytes())
    record = bytearray(blob(archive, manifest["config"]).read_bytes())
    record[8:10] = major.to_bytes(2, "little")
    put(archive, manifest["config"], bytes(record))
    put(archive, index["manifests"][0], json.dumps(manifest).encode())
    write(archive / "index.json", json.dumps(index).encode())


def blob(archive: Path, descriptor: dict[str, str]) -> Path:
    algorithm, _, digest = descriptor["digest"].partition(":")
    return archive / "blobs" / algorithm / digest


def put(archive: Path, descriptor: dict[str, Any], content: bytes) -> None:
    descriptor["digest"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    descriptor["size"] = len(content)
    write(blob(archive, descriptor), content)


def write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def test_what_is_shown(run: Run, archive: Path) -> None:
    outcome = run("inspect", archive)
    assert outcome.code == 0
    assert outcome.err == ""
    words = [line.split() for line in outcome.out.splitlines()]
    for expected in (
        "entry tiny-llama",
        "magic 89 47 50 4b 0d 0a 1a 0a",
        "format 1.0",
        "producer graphpack 0.1.0",
        "architecture LlamaForCausalLM",
        f"root {fakes.A}",
        f"fingerprint {fakes.C}",
        "environment, checked",
        "torch.version 2.13.0+cpu",
        "environment, informational",
        "host evil\\x1b[2Jhost",
        "paths.model /models/[red]m[/red]",
        "cpu_isa avx2",
        f"1x256 151 4.0 kB 8 0.0001 {fakes.D}",
    ):
        assert expected.split() in words


def test_graphs_and_kernels(run: Run, archive: Path) -> None:
    out = run("inspect", archive, "--graphs", "--kernels").out
    words = [line.split() for line in out.splitlines()]
    assert ["input", "token_ids", "int64", "1", "0", "to", "511"] in words
    assert ["output", "logits", "float32", "1x512"] in words
    assert ["state", "kv.0.key", "float32", "2x2x256x16"] in words
    assert ["kernels", "size", "isa", "graphs"] in words


@pytest.mark.parametrize("flags", [(), ("--graphs",), ("--kernels",)])
def test_json(run: Run, archive: Path, flags: tuple[str, ...]) -> None:
    (entry,) = run("inspect", archive, *flags, "--format", "json").document["entries"]
    assert entry["environment"]["checked"]["torch"]["version"] == "2.13.0+cpu"
    assert ("inputs" in entry["graphs"][0]) == ("--graphs" in flags)
    assert ("kernels" in entry) == ("--kernels" in flags)


def test_the_library_gives_the_same(run: Run, archive: Path) -> None:
    document = run("inspect", archive, "--graphs", "--kernels", "--format", "json").document
    assert json.loads(json.dumps(graphpack.inspect(archive))) == document
    assert graphpack.inspect(archive, "tiny-llama")["entries"] == document["entries"]


def test_one_entry_of_several(run: Run, archive: Path) -> None:
    fakes.write_archive(archive, "other")
    assert len(run("inspect", archive, "--format=json").document["entries"]) == 2
    (entry,) = run("inspect", archive, "--name", "other", "--format=json").document["entries"]
    assert entry["name"] == "other"
    assert run("inspect", archive, "--name", "third").code == 3


def test_a_later_major_shows_its_header_and_exits_5(run: Run, archive: Path) -> None:
    reseal(archive, 9)
    outcome = run("inspect", archive)
    assert outcome.code == 5
    words = [line.split() for line in outcome.out.splitlines()]
    for expected in ("magic 89 47 50 4b 0d 0a 1a 0a", "format 9.0", "producer graphpack 0.1.0"):
        assert expected.split() in words
    assert outcome.err.startswith("error: ")
    document = run("inspect", archive, "--format", "json").document
    assert document["error"]["code"] == 5
    assert document["entries"][0]["format"] == {"major": 9, "minor": 0}
    with pytest.raises(graphpack.UnsupportedFormatError):
        graphpack.inspect(archive)


@pytest.mark.parametrize("kind", ["nothing", "file", "folder", "device"])
def test_what_is_no_archive(run: Run, tmp_path: Path, kind: str) -> None:
    path = {"device": Path(os.devnull)}.get(kind, tmp_path / kind)
    if kind == "file":
        path.write_bytes(b"\x89PNG\r\n\x1a\n")
    elif kind == "folder":
        path.mkdir()
    assert run("inspect", path).code == 3
    assert run("inspect", path, "--format", "json").document["error"]["kind"] == "not-found"


def test_a_damaged_archive(run: Run, archive: Path) -> None:
    index = archive / "index.json"
    write(index, index.read_bytes()[:-1])
    assert run("inspect", archive).code == 4
    assert run("inspect", archive, "--format", "json").document["error"]["kind"] == "corrupt-archive"


def test_a_read_only_archive(run: Run, archive: Path) -> None:
    before = sorted(archive.rglob("*"))
    for path in (archive, *before):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert run("inspect", archive).code == 0
    assert sorted(archive.rglob("*")) == before
    for path in (archive, *before):
        path.chmod(0o755 if path.is_dir() else 0o644)
