"""Signed entries that tools which know nothing of signatures have copied: what has to be named, and what is proven."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path

import pytest

from graphpack.archive import keys
from graphpack.archive.store import Archive
from graphpack.errors import UntrustedError
from graphpack.opening import load
from graphpack.results.load import LoadRequest
from graphpack.signing import sign
from tests.archive.build import blob_path, make_archive, read_index
from tests.archive.oci_tools import skopeo

GOLDEN = Path(__file__).parents[1] / "archives" / "cpu-1.0"
NAME = "tiny-llama"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    keys.make_key(tmp_path / "key")
    return tmp_path / "key.pub"


@pytest.fixture
def signed(tmp_path: Path, key: Path) -> Path:
    """A signed archive of compiled graphs."""
    archive = Path(shutil.copytree(GOLDEN, tmp_path / "signed"))
    sign(archive, key.with_name("key"), days=1)
    return archive


def tag_of(archive: Path) -> str:
    (ref,) = Archive.open(archive).entries()
    return f"sha256-{ref.digest}.graphpack-sig"


def check_signed(archive: Path, key: Path) -> None:
    (model,) = load(LoadRequest(archive=archive, trusted_keys=(key,), verify=True))
    with model:
        assert "signature" in model.result.proven
        assert model.result.signature is not None
        assert model.result.captures == 0
        assert [bucket.steps for bucket in model.result.verified] == [128, 128]


def check_unsigned(archive: Path, key: Path) -> None:
    with pytest.raises(UntrustedError, match="has no signature") as caught:
        load(LoadRequest(archive=archive, trusted_keys=(key,)))
    assert caught.value.code == 11


def test_to_another_layout(signed: Path, key: Path, tmp_path: Path) -> None:
    """The entry alone comes without its signature; the tag brings it. No tag decides anything afterwards."""
    copy = tmp_path / "copy"
    skopeo("copy", f"oci:{signed}:{NAME}", f"oci:{copy}:renamed")
    check_unsigned(copy, key)
    skopeo("copy", f"oci:{signed}:{tag_of(signed)}", f"oci:{copy}:any-tag")
    check_signed(copy, key)


def test_through_a_registry_and_back(signed: Path, key: Path, registry: str, tmp_path: Path) -> None:
    repository = f"docker://{registry}/models/graphs"
    for tag in (NAME, tag_of(signed)):
        skopeo("copy", "--dest-tls-verify=false", f"oci:{signed}:{tag}", f"{repository}:{tag}")
    copy = tmp_path / "copy"
    skopeo("copy", "--src-tls-verify=false", f"{repository}:{NAME}", f"oci:{copy}:{NAME}")
    check_unsigned(copy, key)
    skopeo("copy", "--src-tls-verify=false", f"{repository}:{tag_of(copy)}", f"oci:{copy}:{tag_of(copy)}")
    check_signed(copy, key)
    for file in (copy / "blobs" / "sha256").iterdir():
        assert file.read_bytes() == blob_path(signed, file.name).read_bytes()


def test_all_tags_of_a_registry(signed: Path, key: Path, registry: str, tmp_path: Path) -> None:
    """A mirror of a repository has the signature, since it is one of its tags."""
    for tag in (NAME, tag_of(signed)):
        skopeo("copy", "--dest-tls-verify=false", f"oci:{signed}:{tag}", f"docker://{registry}/graphs:{tag}")
    with urllib.request.urlopen(f"http://{registry}/v2/graphs/tags/list") as reply:
        tags = json.load(reply)["tags"]
    assert sorted(tags) == sorted([NAME, tag_of(signed)])
    for tag in tags:
        skopeo("copy", "--src-tls-verify=false", f"docker://{registry}/graphs:{tag}", f"oci:{tmp_path / 'copy'}:{tag}")
    check_signed(tmp_path / "copy", key)


def test_into_an_archive_that_holds_others(signed: Path, key: Path, two: Path) -> None:
    """And what graphpack saves there afterwards leaves the signature where it is."""
    for tag in (NAME, tag_of(signed)):
        skopeo("copy", f"oci:{signed}:{tag}", f"oci:{two}:{tag}")
    writer = Archive.create(two)
    (second,) = writer.find(["second"])
    writer.commit(writer.put_entry(second.record), "second")
    assert Archive.open(two).entry_names() == ("tiny", "second", NAME)
    (model,) = load(LoadRequest(archive=two, names=(NAME,), trusted_keys=(key,)))
    with model:
        assert "signature" in model.result.proven


def test_the_signature_of_another_version(signed: Path, key: Path, tmp_path: Path) -> None:
    """Both were signed; the tags were exchanged on their way."""
    copy = tmp_path / "copy"
    skopeo("copy", f"oci:{signed}:{NAME}", f"oci:{copy}:{NAME}")
    make_archive(tmp_path / "other")
    sign(tmp_path / "other", key.with_name("key"))
    skopeo("copy", f"oci:{tmp_path / 'other'}:{tag_of(tmp_path / 'other')}", f"oci:{copy}:{tag_of(signed)}")
    check_unsigned(copy, key)
    skopeo("copy", f"oci:{signed}:{tag_of(signed)}", f"oci:{copy}:{tag_of(signed)}")
    check_signed(copy, key)


def test_skopeo_sees_a_referrer(signed: Path) -> None:
    manifest = json.loads(skopeo("inspect", "--raw", f"oci:{signed}:{tag_of(signed)}"))
    assert manifest["subject"]["digest"] == read_index(signed)["manifests"][0]["digest"]
    assert manifest["artifactType"] == manifest["layers"][0]["mediaType"]
