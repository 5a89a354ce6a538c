"""Which signature makes an entry one to trust. Each refusal has a twin that is trusted and differs in nothing else."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self

import pytest

from graphpack.archive import trust as trust_module
from graphpack.archive.store import Archive
from graphpack.archive.trust import Policy, trust_entry
from graphpack.errors import CorruptArchiveError, GraphpackError, UntrustedError
from tests.archive.build import (
    blob_path,
    edit_manifest,
    make_archive,
    make_record,
    read_index,
    reseal,
    write_blob,
    write_index,
)
from tests.archive.signed import (
    ANNOTATIONS,
    KEY,
    OTHER,
    attach,
    bundle,
    bundle_of,
    canonical,
    detach,
    digest_of,
    fingerprint,
    policy,
    public,
    signed_with,
    statement,
    trust,
)


def refusal(archive: Path, asked: Policy | None = None, name: str = "tiny") -> str:
    """Why the entry is not trusted."""
    with pytest.raises(UntrustedError) as caught:
        trust(archive, asked or policy(), name)
    assert caught.value.code == 11
    return str(caught.value)


def test_a_signature_by_a_trusted_key(archive: Path) -> None:
    assert "signature: here none" in refusal(archive)
    signed_with(archive)
    trusted = trust(archive, policy())
    assert trusted.reason == f"signed by {fingerprint(KEY)[:16]}, serial 5"
    assert trusted.notes == ()
    row = trusted.row()
    assert row is not None
    assert (row.key, row.serial, row.created, row.expires) == (fingerprint(KEY), 5, "2026-01-01T00:00:00Z", None)


def test_the_key_of_another(archive: Path) -> None:
    signed_with(archive)
    assert f"archived signed by {fingerprint(KEY)[:16]}, here trusted: {fingerprint(OTHER)[:16]}" in refusal(
        archive, policy(OTHER)
    )
    assert trust(archive, policy(OTHER, KEY)).key == fingerprint(KEY)


def test_no_key_at_all(archive: Path) -> None:
    signed_with(archive)
    assert "here no key is trusted" in refusal(archive, Policy(signature_required=True))
    assert trust(archive, Policy()).reason == "unsigned, permissions private"


def test_a_signature_that_only_names_the_key(archive: Path) -> None:
    forged = bundle(canonical(statement(digest_of(archive))), OTHER, claimed=fingerprint(KEY))
    attached = attach(archive, forged)
    assert f"archived signed by {fingerprint(KEY)[:16]}, here the signature is wrong" in refusal(archive)
    detach(archive, attached)
    attach(archive, bundle(canonical(statement(digest_of(archive))), KEY))
    assert trust(archive, policy()).statement


@pytest.mark.parametrize(("expires", "trusted"), [("2026-01-02T00:00:00Z", False), ("9999-12-31T23:59:59Z", True)])
def test_time(archive: Path, expires: str, trusted: bool) -> None:
    signed_with(archive, expires=expires)
    if trusted:
        assert trust(archive, policy()).statement
    else:
        assert f"expires: archived {expires}, here 2" in refusal(archive)


@pytest.mark.parametrize(
    ("limits", "trusted"),
    [
        ({"least_serial": 5}, True),
        ({"least_serial": 6}, False),
        ({"minimum_serial": {"tiny": 5}, "least_serial": 6}, True),
        ({"minimum_serial": {"tiny": 6}}, False),
        ({"minimum_serial": {"other": 6}}, True),
    ],
    ids=str,
)
def test_an_older_entry_than_is_asked_for(archive: Path, limits: dict[str, Any], trusted: bool) -> None:
    signed_with(archive)
    if trusted:
        assert trust(archive, policy(**limits)).statement
    else:
        assert "serial: archived 5, here at least 6" in refusal(archive, policy(**limits))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"entry": "other"}, "entry: archived other, here tiny"),
        ({"format": {"major": 1, "minor": 1}}, "format: archived 1.1, here 1.0"),
        ({}, ""),
    ],
    ids=str,
)
def test_a_statement_about_something_else(archive: Path, changes: dict[str, Any], said: str) -> None:
    signed_with(archive, **changes)
    if said:
        assert said in refusal(archive)
    else:
        assert trust(archive, policy()).statement


def test_a_signature_moved_to_another_entry(two: Path) -> None:
    """The bundle of `tiny`, listed as that of `second`: for neither a name nor a digest fits."""
    signature = bundle(canonical(statement(digest_of(two))))
    attached = attach(two, signature, entry=1)
    said = refusal(two, name="second")
    assert "entry: archived tiny, here second" in said
    assert f"manifest: archived {digest_of(two)}, here {digest_of(two, 1)}" in said
    detach(two, attached)
    attach(two, signature, entry=0)
    assert trust(two, policy()).statement
    assert "signature: here none" in refusal(two, name="second")


def test_a_name_written_into_the_record(archive: Path) -> None:
    signed_with(archive)
    assert trust(archive, policy()).statement
    reseal(archive, "entry.name", "tinier")
    assert "signature: here none" in refusal(archive, name="tinier")


@pytest.mark.parametrize("kept", [False, True])
def test_a_record_that_was_changed_brings_its_signature_along(archive: Path, kept: bool) -> None:
    """The signature is listed for the new manifest, every digest being right."""
    signature = bundle(canonical(statement(digest_of(archive))))
    if not kept:
        reseal(archive, "settings.slots", 4)
    attach(archive, signature)
    if kept:
        assert trust(archive, policy()).statement
    else:
        assert "manifest: archived" in refusal(archive)


def test_another_blob_in_the_entry(archive: Path) -> None:
    signed_with(archive)
    digest = write_blob(archive, b"more code")
    layer = {
        "mediaType": "application/vnd.graphpack.object.v1+zstd",
        "digest": f"sha256:{digest}",
        "size": len(b"more code"),
    }
    edit_manifest(archive, lambda manifest: manifest["layers"].append(layer))
    with pytest.raises(CorruptArchiveError, match="does not agree with its record about layers"):
        trust(archive, policy())


def test_another_blob_that_nothing_names_is_never_opened(archive: Path) -> None:
    signed_with(archive)
    (archive / ".git").mkdir()
    (archive / ".git" / "evil.so").write_bytes(b"\x7fELF")
    write_blob(archive, b"\x7fELF and more")
    assert trust(archive, policy()).statement
    opened = Archive.open(archive)
    opened.find(["tiny"])
    assert not any("evil" in name for name in opened.opened)


def test_one_good_signature_among_others(archive: Path) -> None:
    signed_with(archive, OTHER)
    signed_with(archive, expires="2026-01-02T00:00:00Z")
    assert refusal(archive).count("\n    ->") == 2
    signed_with(archive, serial=7)
    signed_with(archive, serial=6)
    assert trust(archive, policy()).reason.endswith("serial 7")


def test_what_others_attach_is_passed_over(archive: Path) -> None:
    signed_with(archive)
    attach(archive, b"{}", annotations={"dev.sigstore.bundle.predicateType": "https://slsa.dev/provenance/v1"})
    attach(archive, b"{}", annotations={**ANNOTATIONS, "org.opencontainers.image.created": "2026-01-01T00:00:00Z"})
    attach(archive, b"{}", artifactType="application/vnd.cncf.notary.signature")
    attach(archive, b"{}", artifactType="application/spdx+json", annotations={})
    assert trust(archive, policy()).statement
    assert Archive.open(archive).entry_names() == ("tiny",)


MANIFEST_EDITS: dict[str, dict[str, Any]] = {
    "two layers": {"layers": [{}, {}]},
    "no layers": {"layers": []},
    "a layer that is none": {"layers": [{"size": 2}]},
    "no subject": {"subject": None},
    "another config": {"config": {"mediaType": "x", "digest": "sha256:" + "0" * 64, "size": 2}},
    "another key": {"more": 1},
}


@pytest.mark.parametrize("changes", MANIFEST_EDITS.values(), ids=MANIFEST_EDITS)
def test_a_manifest_that_is_not_one_of_a_signature(archive: Path, changes: dict[str, Any]) -> None:
    attached = attach(archive, bundle(canonical(statement(digest_of(archive)))), **changes)
    with pytest.raises(CorruptArchiveError, match=attached):
        trust(archive, policy(required=False))


def test_a_signature_that_is_listed_as_something_else(archive: Path) -> None:
    signed_with(archive)
    index = read_index(archive)
    index["manifests"][1]["mediaType"] = "application/vnd.oci.image.index.v1+json"
    write_index(archive, index)
    with pytest.raises(CorruptArchiveError, match="not a signature that graphpack writes"):
        trust(archive, policy())


def test_the_tag_of_a_signature_decides_nothing(archive: Path) -> None:
    signed_with(archive)
    index = read_index(archive)
    del index["manifests"][1]["annotations"]
    write_index(archive, index)
    assert trust(archive, policy()).statement


def test_a_signature_taken_away(archive: Path) -> None:
    attached = signed_with(archive)
    assert trust(archive, policy()).statement
    detach(archive, attached)
    assert "signature: here none" in refusal(archive)
    assert trust(archive, policy(required=False)).statement is None


def test_a_signature_that_counts_for_nothing_is_told(archive: Path) -> None:
    signed_with(archive, OTHER)
    trusted = trust(archive, policy(required=False))
    assert trusted.statement is None
    sides = f"signed by {fingerprint(OTHER)[:16]}, here trusted: {fingerprint(KEY)[:16]}"
    assert trusted.notes == (f"a signature does not count: {sides}",)


# --- Every byte


def outcome(archive: Path) -> int:
    """0 where the entry is trusted; no other error than those of graphpack."""
    try:
        opened = Archive.open(archive)
        (entry,) = opened.find(["tiny"])
        assert trust_entry(opened, entry, policy()).statement
    except GraphpackError as error:
        return error.code
    return 0


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    """One bit of each byte turned: which one goes round with the position."""
    for position in range(len(data)):
        yield position, data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("which", ["bundle", "manifest of the signature", "manifest of the entry"])
def test_every_byte_of_a_file(archive: Path, which: str) -> None:
    attached = signed_with(archive)
    document = json.loads(blob_path(archive, attached).read_bytes())
    digests = {
        "bundle": document["layers"][0]["digest"],
        "manifest of the signature": attached,
        "manifest of the entry": digest_of(archive),
    }
    file = blob_path(archive, digests[which])
    data = file.read_bytes()
    file.chmod(0o644)
    for position, changed in flips(data):
        file.write_bytes(changed)
        assert outcome(archive) == 4, position
    file.write_bytes(data)
    assert outcome(archive) == 0


@pytest.mark.usefixtures("unmeasured")
def test_every_byte_of_a_bundle_with_the_digests_above_it_right(archive: Path) -> None:
    good = bundle_of(archive, signed_with(archive))
    index = read_index(archive)
    index["manifests"].pop()
    found = set()
    for _, changed in flips(good):
        write_index(archive, index)
        attach(archive, changed)
        found.add(outcome(archive))
    assert found == {4, 11}
    write_index(archive, index)
    attach(archive, good)
    assert outcome(archive) == 0


@pytest.mark.usefixtures("unmeasured")
def test_every_byte_of_a_manifest_with_the_digests_above_it_right(archive: Path) -> None:
    attached = signed_with(archive)
    good, index = blob_path(archive, attached).read_bytes(), read_index(archive)
    found = set()
    for _, changed in flips(good):
        index["manifests"][1] |= {"digest": f"sha256:{write_blob(archive, changed)}", "size": len(changed)}
        write_index(archive, index)
        found.add(outcome(archive))
    assert found == {4, 11}


@pytest.mark.usefixtures("unmeasured")
def test_every_byte_of_the_index(archive: Path) -> None:
    """Only the tags and the annotations of a signature can change, and they decide nothing."""
    signed_with(archive)
    data = (archive / "index.json").read_bytes()
    tags, annotations = [m.span() for m in re.finditer(rb'"annotations": {([^}]*)}', data)]
    name = data.index(b'"tiny"')
    free = {*range(name, name + 6), *range(*annotations)}
    assert tags[0] < name < tags[1]
    for position, changed in flips(data):
        (archive / "index.json").write_bytes(changed)
        code = outcome(archive)
        assert code in (3, 4, 5, 11) or (code == 0 and position in free), position


# --- The archive that holds signatures


def test_signing_again_replaces(archive: Path) -> None:
    opened = Archive.open(archive)
    (ref,) = opened.entries()
    for serial in (1, 2):
        opened.add_signatures({ref: bundle(canonical(statement(ref.digest, serial=serial)))})
    assert [signed.statement.serial for signed in Archive.open(archive).signatures(ref)] == [2]
    tags = [held["annotations"]["org.opencontainers.image.ref.name"] for held in read_index(archive)["manifests"]]
    assert tags == ["tiny", f"sha256-{ref.digest}.graphpack-sig"]
    assert trust(archive, policy()).statement


def test_what_graphpack_writes_is_what_the_format_says(archive: Path, tmp_path: Path) -> None:
    make_archive(tmp_path / "other")
    signature = bundle(canonical(statement(digest_of(archive))))
    attached = attach(archive, signature)
    opened = Archive.open(tmp_path / "other")
    opened.add_signatures({opened.entries()[0]: signature})
    assert read_index(tmp_path / "other")["manifests"][1]["digest"] == f"sha256:{attached}"
    assert blob_path(tmp_path / "other", attached).read_bytes() == blob_path(archive, attached).read_bytes()


def test_a_signature_goes_with_its_entry(two: Path) -> None:
    signed_with(two)
    attach(two, bundle(canonical(statement(digest_of(two, 1), entry="second"))), entry=1)
    writer = Archive.create(two)
    same = make_record()
    writer.commit(writer.put_entry(same), "tiny")
    assert trust(two, policy()).statement
    writer.commit(writer.put_entry(replace(same, informational={"host": "another"})), "tiny")
    assert len(read_index(two)["manifests"]) == 3
    assert "signature: here none" in refusal(two)
    assert trust(two, policy(), "second").statement


def test_an_entry_that_went_while_it_was_signed(archive: Path) -> None:
    opened = Archive.open(archive)
    (ref,) = opened.entries()
    index = read_index(archive)
    write_index(archive, {**index, "manifests": []})
    with pytest.raises(GraphpackError, match="was changed while an entry was signed") as caught:
        opened.add_signatures({ref: bundle(canonical(statement(ref.digest)))})
    assert caught.value.code == 12
    write_index(archive, index)
    opened.add_signatures({ref: bundle(canonical(statement(ref.digest)))})


def test_without_the_library_nothing_is_trusted(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed_with(archive)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    assert "pip install cryptography" in refusal(archive, policy(required=False))
    assert trust(archive, Policy()).reason == "unsigned, permissions private"


def test_a_key_is_what_its_bytes_are() -> None:
    assert public(KEY).fingerprint == fingerprint(KEY)
    message, checks = b"message", [public(key).made(KEY.sign(b"message"), b"message") for key in (KEY, OTHER)]
    assert checks == [True, False]
    assert not public(KEY).made(KEY.sign(message)[:-1], message)


CALLS: dict[str, Callable[[Path], object]] = {
    "an entry that was read": lambda archive: Archive.open(archive).find(["tiny"]),
    "the archive": Archive.open,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_broken_signature_is_no_reason_to_lose_the_archive(archive: Path, call: Callable[[Path], object]) -> None:
    """Its form is judged where it is asked for."""
    attach(archive, b"{}")
    call(archive)
    with pytest.raises(CorruptArchiveError):
        trust(archive, policy())


@pytest.mark.parametrize(("second", "trusted"), [(0, True), (1, False), (2, False)])
def test_a_signature_counts_until_the_second_it_expires(
    archive: Path, second: int, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(2026, 1, 2, 0, 0, second, tzinfo=tz)

    monkeypatch.setattr(trust_module, "datetime", Clock)
    signed_with(archive, expires="2026-01-02T00:00:01Z")
    if trusted:
        assert trust(archive, policy()).statement is not None
    else:
        assert "expires: archived 2026-01-02T00:00:01Z, here 2026-01-02T00:00:0" in refusal(archive)
