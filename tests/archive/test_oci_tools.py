"""Tools that know nothing of graphpack copy archives: between directories and through a registry."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import pytest

from graphpack.archive.store import Archive
from graphpack.opening import load
from graphpack.results import LoadRequest
from tests.archive.build import blob_path, make_archive, make_record, read_index
from tests.archive.independent_reader import read_archive

GOLDEN = Path(__file__).parents[1] / "archives" / "cpu-1.0"


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not installed: apt-get install skopeo docker-registry (CI installs both)")
    return found


def skopeo(*arguments: str) -> bytes:
    done = subprocess.run([tool("skopeo"), *arguments], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Address of a registry on this machine alone, with its store in a temporary directory."""
    server = tool("docker-registry")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": address},
    }
    (tmp_path / "registry.yml").write_text(json.dumps(config))
    process = subprocess.Popen(
        [server, "serve", str(tmp_path / "registry.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        while not answers(address):
            assert process.poll() is None, "the registry ended"
            assert time.monotonic() < deadline, "the registry does not answer"
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(10)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=1) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False


def check_copy(original: Path, copy: Path, name: str, tag: str | None) -> None:
    """The copy opens, reads to the last byte with both readers, and its blobs are those of the original."""
    opened = Archive.open(copy)
    (entry,) = opened.find(None)
    (expected,) = Archive.open(original).find([name])
    assert entry.record == expected.record
    assert entry.ref.tag == tag
    for blob in entry.record.blobs:
        opened.read_blob(blob)
    assert list(read_archive(str(copy))) == [name]
    for file in (copy / "blobs" / "sha256").iterdir():
        assert file.read_bytes() == blob_path(original, file.name).read_bytes()


def test_a_manifest_as_it_is(archive: Path) -> None:
    raw = skopeo("inspect", "--raw", f"oci:{archive}:tiny")
    digest = read_index(archive)["manifests"][0]["digest"]
    assert raw == blob_path(archive, digest).read_bytes()


def test_copies_to_another_layout(two: Path, tmp_path: Path) -> None:
    for tag in ("second", "renamed"):
        skopeo("copy", f"oci:{two}:second", f"oci:{tmp_path / tag}:{tag}")
        check_copy(two, tmp_path / tag, "second", tag)
    skopeo("copy", f"oci:{two}:tiny", f"oci:{tmp_path / 'untagged'}")
    check_copy(two, tmp_path / "untagged", "tiny", None)


def test_a_copy_into_an_archive_that_is_being_kept(two: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    make_archive(target, make_record("other"))
    (target / ".lock").write_text("1")
    skopeo("copy", f"oci:{two}:second", f"oci:{target}:second")
    skopeo("copy", f"oci:{two}:second", f"oci:{target}:again")
    assert Archive.open(target).entry_names() == ("other", "second")
    writer = Archive.create(target)
    writer.commit(writer.put_entry(make_record("third")), "third")
    skopeo("copy", f"oci:{target}:third", f"oci:{tmp_path / 'third'}:third")
    check_copy(target, tmp_path / "third", "third", "third")


def test_through_a_registry_and_back(two: Path, registry: str, tmp_path: Path) -> None:
    for name in ("tiny", "second"):
        remote = f"docker://{registry}/models/graphs:{name}"
        skopeo("copy", "--dest-tls-verify=false", f"oci:{two}:{name}", remote)
        skopeo("copy", "--src-tls-verify=false", remote, f"oci:{tmp_path / name}:pulled")
        check_copy(two, tmp_path / name, name, "pulled")


def test_copies_of_compiled_graphs_are_proven(registry: str, tmp_path: Path) -> None:
    """What skopeo copied, to a directory and through a registry, replays its goldens like the original."""
    remote = f"docker://{registry}/models/graphs:tiny-llama"
    skopeo("copy", f"oci:{GOLDEN}:tiny-llama", f"oci:{tmp_path / 'copied'}:tiny-llama")
    skopeo("copy", "--dest-tls-verify=false", f"oci:{GOLDEN}:tiny-llama", remote)
    skopeo("copy", "--src-tls-verify=false", remote, f"oci:{tmp_path / 'pulled'}:tiny-llama")
    for copy in ("copied", "pulled"):
        (model,) = load(LoadRequest(archive=tmp_path / copy, verify=True))
        with model:
            assert [bucket.steps for bucket in model.result.verified] == [128, 128]
            assert model.result.captures == 0
