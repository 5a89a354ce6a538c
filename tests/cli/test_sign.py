"""Keys, signatures, and what becomes of them in load, inspect and verify, from the command line on."""

from __future__ import annotations

import datetime
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import graphpack
from graphpack import UntrustedError, UsageError, trust_settings
from graphpack.archive.oci import Index
from graphpack.signing import sign
from tests.archive.build import blob_path, make_archive, make_record, read_index, reseal
from tests.cli import fakes
from tests.cli.conftest import Outcome, Run

GOLDEN = Path(__file__).parents[1] / "archives" / "cpu-1.0"
DAY = 24 * 3600


@pytest.fixture
def key(run: Run, tmp_path: Path) -> Path:
    assert run("keygen", "release.key").code == 0
    return tmp_path / "release.key"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of the entries `tiny` and `second`."""
    make_archive(tmp_path / "archive", make_record(), make_record("second"))
    return tmp_path / "archive"


def error(outcome: Outcome) -> str:
    """What a refusal says, which must be one of trust."""
    assert outcome.code == 11, outcome
    failure = outcome.document["error"]
    assert failure["kind"] == "untrusted"
    return f"{failure['message']} {failure['problems']}"


def test_keygen(run: Run, tmp_path: Path) -> None:
    outcome = run("keygen", "k", "--format", "json")
    document = outcome.document
    assert (document["private_key"], document["public_key"]) == ("k", "k.pub")
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600
    assert run("keygen", "k").code == 2
    human = run("keygen", "other")
    assert human.out.splitlines()[:2] == [
        "made other: keep it secret",
        "made other.pub: give it to who loads what you sign",
    ]


def test_sign(run: Run, key: Path, archive: Path) -> None:
    before = int(time.time())
    document = run("sign", "archive", "--key", key, "--format", "json").document
    assert [entry["name"] for entry in document["entries"]] == ["tiny", "second"]
    signature = document["entries"][0]["signature"]
    assert before <= signature["serial"] <= time.time()
    assert signature["expires"] is None
    tags = [held["annotations"]["org.opencontainers.image.ref.name"] for held in read_index(archive)["manifests"]]
    digests = [entry["digest"] for entry in document["entries"]]
    assert tags == ["tiny", "second", *(f"sha256-{digest}.graphpack-sig" for digest in digests)]
    human = run("sign", "archive", "--key", key, "--name", "second", "--serial", 10**12, "--expires", 90)
    lines = dict(line.split(maxsplit=1) for line in human.out.splitlines()[1:])
    assert human.out.splitlines()[0] == "signed: second in archive"
    assert (lines["serial"], lines["key"]) == (str(10**12), signature["key"])
    expires = datetime.datetime.fromisoformat(lines["expires"]) - datetime.datetime.fromisoformat(lines["created"])
    assert expires == datetime.timedelta(days=90)


def test_a_serial_only_grows(run: Run, key: Path, archive: Path) -> None:
    def serial(*arguments: str) -> int:
        outcome = run("sign", "archive", "--name", "tiny", "--key", key, *arguments, "--format", "json")
        return int(outcome.document["entries"][0]["signature"]["serial"])

    assert serial("--serial", "7") == 7
    for older in ("7", "6"):
        assert run("sign", "archive", "--name", "tiny", "--key", key, "--serial", older).code == 2
    assert serial("--serial", "8") == 8
    assert serial("--serial", str(2**52)) == 2**52
    assert serial() == 2**52 + 1
    assert serial("--serial", str(2**53 - 1)) == 2**53 - 1
    for after in ((), ("--serial", str(2**53 - 1))):
        last = run("sign", "archive", "--name", "tiny", "--key", key, *after)
        assert last.code == 2
        assert "no larger one is left: sign with another key, or save again" in last.err
    assert run("verify", "archive", "--level", "structure").code == 0, "nothing was written that no reader takes"
    run("keygen", "other.key")
    assert run("sign", "archive", "--key", "other.key", "--serial", 1).code == 0


@pytest.mark.parametrize(
    "arguments",
    [("--serial", "-1"), ("--serial", str(2**53)), ("--expires", "0"), ("--expires", "36501"), ("--expires", "1.5")],
    ids=" ".join,
)
def test_numbers_that_cannot_be(run: Run, key: Path, archive: Path, arguments: tuple[str, str]) -> None:
    assert run("sign", "archive", "--key", key, *arguments).code == 2
    assert len(read_index(archive)["manifests"]) == 2


@pytest.mark.parametrize(("serial", "days"), [(-1, None), (2**53, None), (None, 0), (None, 36501)])
def test_numbers_that_cannot_be_in_the_library(archive: Path, key: Path, serial: int | None, days: int | None) -> None:
    with pytest.raises(UsageError):
        sign(archive, key, serial=serial, days=days)
    assert len(read_index(archive)["manifests"]) == 2


def test_signing_that_fails_leaves_nothing(archive: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(path for path in archive.rglob("*"))
    replaced = Index.replacing

    def full(*arguments: Any) -> Index:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Index, "replacing", full)
    with pytest.raises(OSError, match="No space left"):
        sign(archive, key)
    assert sorted(path for path in archive.rglob("*")) == before
    monkeypatch.setattr(Index, "replacing", replaced)
    assert len(sign(archive, key)) == 2


def test_what_is_not_signed(run: Run, key: Path, archive: Path, tmp_path: Path) -> None:
    assert run("sign", "archive", "--key", "nothing").code == 3
    assert run("sign", "nothing", "--key", key).code == 3
    assert run("sign", "archive", "--key", key, "--name", "tin").code == 3
    (tmp_path / "public").write_bytes((tmp_path / "release.key.pub").read_bytes())
    (tmp_path / "public").chmod(0o600)
    assert run("sign", "archive", "--key", "public").code == 2
    key.chmod(0o640)
    assert "others may read the private key" in error(run("sign", "archive", "--key", key, "--format", "json"))
    key.chmod(0o600)
    (archive / "index.json").chmod(0o664)
    assert "what would be signed" in error(run("sign", "archive", "--key", key, "--format", "json"))
    (archive / "index.json").chmod(0o644)
    blob = blob_path(archive, make_record().graphs[0].golden)
    blob.chmod(0o644)
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert run("sign", "archive", "--key", key).code == 4
    assert len(read_index(archive)["manifests"]) == 2
    blob.write_bytes(data)
    assert run("sign", "archive", "--key", key).code == 0


def test_verify_asks_for_the_signature(run: Run, key: Path, archive: Path) -> None:
    def verify(*arguments: object) -> Outcome:
        return run("verify", "archive", "--level", "structure", *arguments, "--format", "json")

    assert verify().document["entries"][0]["ladder"][-1]["note"] == "unsigned, permissions private"
    assert "has no signature" in error(verify("--require-signature"))
    assert "has no signature" in error(verify("--trusted-key", f"{key}.pub"))
    run("sign", "archive", "--key", key, "--name", "tiny")
    assert "'second' has no signature" in error(verify("--trusted-key", f"{key}.pub"))
    (entry,) = verify("--trusted-key", f"{key}.pub", "--name", "tiny").document["entries"]
    assert entry["ladder"][-1]["note"].startswith(f"signed by {entry['signature']['key'][:16]}, serial ")
    assert "signature" in entry["proven"]
    (entry,) = verify("--name", "tiny").document["entries"]
    assert entry["signature"] is None
    assert "signature" in entry["not_proven"]
    run("keygen", "other.key")
    assert "signed by" in error(verify("--trusted-key", "other.key.pub", "--name", "tiny"))
    assert verify("--trusted-key", "other.key.pub", "--trusted-key", f"{key}.pub", "--name", "tiny").code == 0


def test_the_environment_asks_for_it(run: Run, key: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust_settings.KEYS_VARIABLE, f"{key}.pub")
    command = ("verify", "archive", "--level", "structure", "--format", "json")
    assert "has no signature" in error(run(*command))
    run("sign", "archive", "--key", key)
    assert run(*command).code == 0
    monkeypatch.setenv(trust_settings.KEYS_VARIABLE, "")
    monkeypatch.setenv(trust_settings.REQUIRE_VARIABLE, "1")
    assert "no key is trusted" in error(run(*command))


def test_the_user_asks_for_it_and_the_working_directory_cannot(
    run: Run, key: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    settings = tmp_path / "user" / "graphpack" / "trust.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("require_signature: true\n")
    for name in ("trust.yaml", "graphpack/trust.yaml", ".config/graphpack/trust.yaml", "archive/trust.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"trusted_keys: [{key}.pub]\nrequire_signature: false\n")
    run("sign", "archive", "--key", key)
    command = ("verify", "archive", "--level", "structure", "--format", "json")
    assert "no key is trusted" in error(run(*command))
    settings.write_text(f"trusted_keys: [{key}.pub]\nminimum_serial: {{tiny: {10**12}}}\n")
    assert f"at least {10**12}" in error(run(*command))
    settings.write_text(f"trusted_keys: [{key}.pub]\nminimum_serial: {{tiny: 1}}\n")
    assert run(*command).code == 0


def test_inspect_tells(run: Run, key: Path, tmp_path: Path) -> None:
    fakes.write_archive(tmp_path / "archive")
    command = ("inspect", "archive", "--format", "json")

    def trust(*arguments: object) -> dict[str, Any]:
        trust: dict[str, Any] = run(*command, *arguments).document["entries"][0]["trust"]
        return trust

    assert trust() == {"trusted": True, "reason": "unsigned, permissions private", "problems": [], "claimed": []}
    (tmp_path / "archive" / "index.json").chmod(0o666)
    told = trust()
    assert (told["trusted"], [problem["where"] for problem in told["problems"]]) == (False, ["index.json"])
    assert "has no signature" in error(run(*command, "--require-signature"))
    (tmp_path / "archive" / "index.json").chmod(0o644)
    signed = run("sign", "archive", "--key", key, "--format", "json").document["entries"][0]["signature"]
    assert trust()["claimed"] == [signed]
    assert trust("--trusted-key", f"{key}.pub")["reason"].startswith("signed by ")
    run("keygen", "other.key")
    assert "signed by" in error(run(*command, "--trusted-key", "other.key.pub"))
    lines = run("inspect", "archive", "--trusted-key", f"{key}.pub").out
    assert f"    claimed[0].key      {signed['key']}\n" in lines


def test_inspect_describes_what_it_does_not_trust(
    run: Run, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is only configured asks nothing of inspect: it is how one finds out."""
    fakes.write_archive(tmp_path / "archive")
    monkeypatch.setenv(trust_settings.KEYS_VARIABLE, f"{key}.pub")
    entry = run("inspect", "archive", "--format", "json").document["entries"][0]
    assert (entry["name"], entry["trust"]["trusted"]) == ("tiny-llama", False)


# --- Compiled graphs


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "compiled"))


def test_load_of_a_signed_entry(run: Run, key: Path, compiled: Path) -> None:
    assert run("load", "compiled", "--trusted-key", f"{key}.pub").code == 11
    signed = run("sign", "compiled", "--key", key, "--format", "json").document["entries"][0]["signature"]
    (entry,) = run("load", "compiled", "--trusted-key", f"{key}.pub", "--format", "json").document["entries"]
    assert entry["signature"] == signed
    assert entry["ladder"][3] == {
        "name": "trust",
        "state": "passed",
        "note": f"signed by {signed['key'][:16]}, serial {signed['serial']}",
    }
    assert "signature" in entry["proven"]
    (entry,) = run("load", "compiled", "--format", "json").document["entries"]
    assert entry["ladder"][3]["note"] == "unsigned, permissions private"
    assert "signature" in entry["not_proven"]


@pytest.mark.parametrize("signed", [False, True])
def test_load_of_an_archive_that_others_may_write(run: Run, key: Path, compiled: Path, signed: bool) -> None:
    if signed:
        run("sign", "compiled", "--key", key)
    for path in (compiled, *compiled.rglob("*")):
        path.chmod(path.stat().st_mode | 0o020)
    if not signed:
        refused = run("load", "compiled")
        assert refused.code == 11
        assert refused.err.splitlines()[-1] == "  -> chmod -R go-w compiled"
        assert os.system("chmod -R go-w compiled") == 0
        assert run("load", "compiled").code == 0
    else:
        (entry,) = run("load", "compiled", "--trusted-key", f"{key}.pub", "--format", "json").document["entries"]
        assert entry["notes"] == [
            (
                "the archive, oci-layout, index.json and 9 more: writable by its group or everybody; "
                "the signature makes up for it"
            )
        ]


def test_load_of_an_entry_that_was_changed_after_it_was_signed(run: Run, key: Path, compiled: Path) -> None:
    """Every digest is right, and the signature is still listed; nothing native is loaded."""
    run("sign", "compiled", "--key", key)
    shutil.copytree(compiled, "kept")
    reseal(compiled, "entry.name", "tiny-lama")
    trusted = ("--trusted-key", f"{key}.pub", "--format", "json")
    assert "entry 'tiny-lama' has no signature that is trusted here" in error(run("load", "compiled", *trusted))
    assert run("load", "kept", *trusted).code == 0


def test_the_library_asks_as_well(key: Path, run: Run, compiled: Path) -> None:
    with pytest.raises(UntrustedError):
        graphpack.load(compiled, require_signature=True)
    with pytest.raises(UntrustedError):
        graphpack.load(compiled, trusted_keys=[f"{key}.pub"])
    run("sign", "compiled", "--key", key)
    with graphpack.load(compiled, trusted_keys=[f"{key}.pub"]) as model:
        assert "signature" in model.result.proven
    assert graphpack.inspect(compiled)["entries"][0]["trust"]["trusted"]


def test_a_signature_is_of_its_own_time(run: Run, key: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("sign", "compiled", "--key", key, "--expires", "1")
    command = ("load", "compiled", "--trusted-key", f"{key}.pub", "--format", "json")
    assert run(*command).code == 0
    later = time.time() + DAY + 1

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Later:
            return cls.fromtimestamp(later, tz)

    monkeypatch.setattr("graphpack.archive.trust.datetime", Later)
    assert "expires" in error(run(*command))
