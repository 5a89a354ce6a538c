"""`graphpack verify`: what each level finds, and what it says it has not looked at."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import remembered
from graphpack.archive.store import Archive
from graphpack.contents import check_contents
from graphpack.errors import CorruptArchiveError
from tests.archive.build import blob_path, make_archive, make_record, read_record, reseal
from tests.cli.conftest import Run, environment

GOLDEN = Path(__file__).parents[1] / "archives" / "cpu-1.0"
OLD = time.time_ns() - 3600 * 10**9


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A copy of an archive of compiled graphs, last changed an hour ago as far as can be told by hand."""
    copied = Path(shutil.copytree(GOLDEN, tmp_path / "archive"))
    for path in copied.rglob("*"):
        os.utime(path, ns=(OLD, OLD))
    return copied


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the last change of a file, which nobody can set back, is long enough ago."""
    monkeypatch.setattr(remembered, "RACY_NANOSECONDS", -3600 * 10**9)


def verified(run: Run, level: str, *arguments: object) -> dict[str, Any]:
    outcome = run("verify", "archive", "--level", level, *arguments, "--format", "json")
    assert outcome.code == 0, outcome
    document = outcome.document
    assert document["level"] == level
    entry: dict[str, Any] = document["entries"][0]
    assert {"weights", "that it fits this machine", "outputs"} <= set(entry["not_proven"])
    assert not set(entry["proven"]) & set(entry["not_proven"])
    return entry


def blobs(archive: Path) -> list[Path]:
    (entry,) = Archive.open(archive).find(None)
    return [blob_path(archive, blob.digest) for blob in entry.record.blobs]


def damage(path: Path, keep_times: bool = False) -> None:
    """Turn the last bit."""
    before = path.stat()
    path.chmod(0o644)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_each_level_says(run: Run, archive: Path, settled: None) -> None:
    count = len(blobs(archive))
    entry = verified(run, "structure")
    assert (entry["blobs"], entry["hashed"], entry["remembered"]) == (count, 0, 0)
    assert "any byte of a blob" in entry["not_proven"]
    entry = verified(run, "full")
    assert (entry["hashed"], entry["remembered"]) == (count, 0)
    assert {"every byte of every blob", "that every blob is what the record says"} <= set(entry["proven"])
    entry = verified(run, "cached")
    assert (entry["hashed"], entry["remembered"]) == (0, count)
    assert f"bytes of {count} blobs since they were last hashed" in entry["not_proven"]
    assert not any("byte" in claim for claim in entry["proven"])
    assert verified(run, "full")["hashed"] == count
    human = run("verify", "archive").out.splitlines()
    assert human[0] == "verified tiny-llama"
    assert f"              passed   integrity (all {count} blobs hashed and decoded)" in human


@pytest.mark.parametrize("level", ["structure", "cached", "full"])
def test_documents_and_sizes_are_looked_at_by_all(run: Run, archive: Path, level: str) -> None:
    shutil.copytree(archive, "kept")
    blob = blobs(archive)[0]
    blob.chmod(0o644)
    with blob.open("ab") as file:
        file.write(b"\0")
    outcome = run("verify", "archive", "--level", level)
    assert outcome.code == 4
    assert blob.name in outcome.err
    blob.unlink()
    assert run("verify", "archive", "--level", level).code == 4
    shutil.rmtree(archive)
    shutil.copytree("kept", archive)
    verified(run, level)


@pytest.mark.parametrize(("level", "code"), [("structure", 0), ("cached", 4), ("full", 4)])
def test_a_bit_of_a_blob(run: Run, archive: Path, level: str, code: int) -> None:
    for blob in blobs(archive):
        shutil.copy(blob, "kept")
        damage(blob)
        outcome = run("verify", "archive", "--level", level)
        assert outcome.code == code
        assert code == 0 or blob.name in outcome.err
        shutil.copy("kept", blob)
    verified(run, level)


def test_a_change_is_noticed_whatever_its_times_say(run: Run, archive: Path, settled: None) -> None:
    """The time of the last change of the inode cannot be set."""
    verified(run, "full")
    for blob in blobs(archive):
        shutil.copy(blob, "kept")
        damage(blob, keep_times=True)
        assert run("verify", "archive", "--level", "cached").code == 4
        shutil.copy("kept", blob)
    assert verified(run, "cached")["remembered"] == 0


def test_a_file_that_was_just_written_is_not_remembered(run: Run, archive: Path) -> None:
    verified(run, "full")
    assert verified(run, "cached")["remembered"] == 0


def test_what_is_remembered_is_the_users_alone(run: Run, archive: Path, settled: None) -> None:
    verified(run, "full")
    folder = Path(os.environ["XDG_CACHE_HOME"], "graphpack")
    file = folder / "hashed.json"
    assert folder.stat().st_mode & 0o777 == 0o700
    count = len(blobs(archive))
    assert verified(run, "cached")["remembered"] == count
    for path in (folder, file):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        assert verified(run, "cached")["remembered"] == 0
        path.chmod(mode)
        for name in (folder, file):
            name.chmod(name.stat().st_mode & ~0o022)
        assert verified(run, "cached")["remembered"] == count
    kept = file.read_bytes()
    for data in (b"", b"[]", b"{", b'{"1-2-3-4-5": 1}', b'{"1-2-3-4-5":"' + b"0" * 63 + b'"}', b" " * (5 << 20)):
        file.write_bytes(data)
        assert verified(run, "cached")["remembered"] == 0
    file.write_bytes(kept)
    assert verified(run, "cached")["remembered"] == count


def test_without_a_place_to_remember_everything_is_hashed(
    run: Run, archive: Path, settled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    verified(run, "full")
    assert verified(run, "cached")["hashed"] == len(blobs(archive))
    assert not (tmp_path / "relative").exists()
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outcome = run("verify", "archive")
    assert outcome.code == 0
    assert "note: what was hashed is not remembered: cannot make" in outcome.err


@pytest.mark.parametrize(("kind", "known"), [("ext4", True), ("nfs4", False), ("fuse.sshfs", False), ("9p", False)])
def test_file_systems_of_others_are_not_remembered(
    run: Run, archive: Path, settled: None, kind: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = archive.stat().st_dev
    line = f"29 1 {os.major(device)}:{os.minor(device)} / / rw,relatime shared:1 - {kind} source rw"
    monkeypatch.setattr(Path, "read_text", lambda path, **options: f"1 1 0:0 / /x rw - proc proc rw\n{line}\n")
    verified(run, "full")
    assert verified(run, "cached")["remembered"] == (len(blobs(archive)) if known else 0)
    monkeypatch.setattr(Path, "read_text", lambda path, **options: "")
    assert verified(run, "cached")["remembered"] == 0

    def hidden(path: Path, **options: str) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", hidden)
    assert verified(run, "cached")["remembered"] == 0


def test_blobs_that_are_not_what_their_record_says(run: Run, tmp_path: Path) -> None:
    """Every digest and size is right. Only `full` looks into blobs."""
    make_archive(tmp_path / "archive")
    verified(run, "structure")
    verified(run, "cached")
    outcome = run("verify", "archive", "--format", "json")
    assert outcome.code == 4
    wrong = {problem["where"] for problem in outcome.document["error"]["problems"]}
    graphs = make_record().graphs
    assert wrong == {f"blobs/sha256/{digest}" for graph in graphs for digest in (graph.object, graph.golden)}


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("weights.bytes", 5, 4),
        ("weights.root", "0" * 64, 4),
        ("model.config_digest", "0" * 64, 4),
        ("model.stored_dtype", "float16", 4),
        ("model.effective_dtype", "float16", 4),
        ("features.verify", ["glow"], 5),
        ("layout.fingerprint", "0" * 64, 4),
        ("settings.slots", 1, 4),
        ("settings.attention", "custom", 4),
        ("graphs.0.golden_steps", 3, 4),
        ("graphs.0.topology", "0" * 64, 4),
    ],
    ids=str,
)
def test_records_that_contradict_themselves(run: Run, archive: Path, field: str, value: object, code: int) -> None:
    verified(run, "full")
    reseal(archive, field, value)
    assert run("verify", "archive").code == code


def test_constants_of_another_length(tmp_path: Path) -> None:
    record = make_record()
    archive = make_archive(tmp_path / "archive", record)
    contents = {blob.digest: archive.read_blob(blob) for blob in record.blobs}
    found = []
    for data in (contents[str(record.constants)], b"\0" * 17):
        with pytest.raises(CorruptArchiveError) as caught:
            check_contents(record, {**contents, str(record.constants): data})
        found.append([p for p in caught.value.problems if p.where == f"blobs/sha256/{record.constants}"])
    assert found[0] == []
    assert [problem.archived for problem in found[1]] == ["17 bytes"]


@pytest.fixture(params=["cuda-compiled-1.0", "cuda-eager-1.0"])
def cuda(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of an archive of CUDA graphs."""
    return Path(shutil.copytree(GOLDEN.with_name(request.param), tmp_path / "archive"))


@pytest.mark.usefixtures("cuda")
def test_cuda_graphs_without_a_device(run: Run) -> None:
    entry = verified(run, "full")
    assert "that every blob is what the record says" in entry["proven"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("graphs.0.topology", "0" * 64, "topology"),
        ("graphs.0.nodes", 1, "nodes"),
        ("graphs.0.bindings", [], "no model.norm.weight"),
        ("environment.cuda.capability", "8.0", "sm_90"),
    ],
    ids=str,
)
def test_cuda_graphs_that_are_not_what_their_record_says(
    run: Run, cuda: Path, field: str, value: object, said: str
) -> None:
    reseal(cuda, field, value)
    outcome = run("verify", "archive")
    assert outcome.code == 4
    assert said in outcome.err


def test_kernel_images_in_each_others_place(run: Run, cuda: Path) -> None:
    images = read_record(cuda)["graphs"][0]["images"]
    reseal(cuda, "graphs.0.images", images[::-1])
    outcome = run("verify", "archive")
    assert outcome.code == 4
    assert all(image in outcome.err for image in images[: len(images) // 2])
    reseal(cuda, "graphs.0.images", images)
    verified(run, "full")


def test_one_entry_of_several(run: Run, tmp_path: Path) -> None:
    make_archive(tmp_path / "archive", make_record(), make_record("second"))
    document = run("verify", "archive", "--level", "structure", "--name", "second", "--format", "json").document
    assert [entry["name"] for entry in document["entries"]] == ["second"]
    assert run("verify", "archive", "--name", "third").code == 3


def test_nothing_is_written_and_nothing_native_is_loaded(run: Run, archive: Path) -> None:
    before = {path: path.stat() for path in (archive, *archive.rglob("*"))}
    events: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        native = event.startswith("ctypes.dlopen") or event in ("subprocess.Popen", "os.system", "os.exec")
        if watching and native and arguments and arguments[0]:
            events.append(f"{event} {arguments}")

    sys.addaudithook(watch)
    try:
        verified(run, "full")
    finally:
        watching = False
    assert [event for event in events if "libc" not in event] == []
    unchanged = [(s.st_mode, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for s in before.values()]
    assert [(s.st_mode, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for s in (path.stat() for path in before)] == unchanged


def test_torch_is_not_needed(archive: Path) -> None:
    code = """
import sys
from graphpack.__main__ import run
run(["verify", "archive"])
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=archive.parent, env=environment(), capture_output=True)
    assert done.returncode == 0
    assert done.stdout.startswith(b"verified tiny-llama")
