"""Tools that know nothing of graphpack copy archives: between directories and through a registry."""

from __future__ import annotations

from pathlib import Path

from graphpack.archive.store import Archive
from graphpack.opening import load
from graphpack.results.load import LoadRequest
from tests.archive.build import blob_path, make_archive, make_record, read_index
from tests.archive.independent_reader import read_archive
from tests.archive.oci_tools import skopeo

GOLDEN = Path(__file__).parents[1] / "archives" / "cpu-1.0"


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
