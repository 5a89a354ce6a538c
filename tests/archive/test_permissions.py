"""Archives that others may change, without a signature and with one; and the files that say whom to trust."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from graphpack import documents, trust_settings
from graphpack.archive.permissions import SHOWN, Permissions, read_protected
from graphpack.archive.store import Archive
from graphpack.archive.trust import Policy, Trusted
from graphpack.errors import (
    CorruptArchiveError,
    GraphpackError,
    NotFoundError,
    StorageError,
    UntrustedError,
    UsageError,
)
from graphpack.results.observer import SilentObserver
from graphpack.verify import verify
from tests.archive.build import blob_path, make_archive, make_record
from tests.archive.signed import digest_of, policy, signed_with, trust

STRANGER = 12345
PLACES = {
    ".": "the archive",
    "oci-layout": "oci-layout",
    "index.json": "index.json",
    "blobs": "blobs",
    "blobs/sha256": "blobs/sha256",
    "manifest": "",
}


def place(archive: Path, name: str) -> tuple[Path, str]:
    """A file or directory of the archive, and its name in messages."""
    if name == "manifest":
        path = blob_path(archive, digest_of(archive))
        return path, str(path.relative_to(archive))
    return archive / name, PLACES[name]


def allow(path: Path, bits: int) -> None:
    path.chmod(path.stat().st_mode | bits)


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a file another's. Root can give it away; anybody else becomes another user, as far as can be asked."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: STRANGER)

    return give


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("bits", [0o020, 0o002, 0o022], ids=oct)
def test_what_others_may_write(archive: Path, name: str, bits: int) -> None:
    path, shown = place(archive, name)
    assert trust(archive, Policy()).reason == "unsigned, permissions private"
    allow(path, bits)
    with pytest.raises(UntrustedError, match="is unsigned, and others may change its archive") as caught:
        trust(archive, Policy())
    (problem,) = caught.value.problems
    assert (problem.where, problem.here) == (shown, "writable by its group or everybody")
    assert (caught.value.code, problem.hint) == (11, f"chmod -R go-w {archive}")
    signed_with(archive)
    trusted = trust(archive, policy())
    assert trusted.notes == (f"{shown}: writable by its group or everybody; the signature makes up for it",)


def test_the_command_in_the_refusal_mends_it(archive: Path) -> None:
    moved = archive.rename(archive.with_name("an archive; of mine"))
    for path in (moved, *moved.rglob("*")):
        allow(path, 0o022)
    with pytest.raises(UntrustedError) as caught:
        trust(moved, Policy())
    (problem,) = caught.value.problems
    assert problem.where == "the archive, oci-layout, index.json and 9 more"
    words = shlex.split(problem.hint)
    assert words == ["chmod", "-R", "go-w", str(moved)]
    assert os.system(problem.hint) == 0
    assert trust(moved, Policy()).reason == "unsigned, permissions private"


@pytest.mark.parametrize("name", PLACES)
def test_what_belongs_to_somebody_else(archive: Path, name: str, stranger: Callable[[Path], None]) -> None:
    path, shown = place(archive, name)
    assert trust(archive, Policy()).reason == "unsigned, permissions private"
    owner = os.geteuid()
    stranger(path)
    with pytest.raises(UntrustedError) as caught:
        trust(archive, Policy())
    (problem,) = caught.value.problems
    if owner == 0:
        assert (problem.where, problem.here) == (shown, f"owned by user {STRANGER}")
    assert f"chown -R {os.geteuid()} {archive}" in problem.hint
    signed_with(archive)
    assert len(trust(archive, policy()).notes) == 1


def test_what_belongs_to_root_is_fine_for_anybody(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Archive.open(archive)
    opened.find(None)
    theirs = {
        name: os.stat_result((status.st_mode, status.st_ino, status.st_dev, status.st_nlink, 0, 0, *status[6:]))
        for name, status in opened.opened.items()
    }
    assert Permissions(archive, STRANGER).check(theirs) == []
    (problem,) = Permissions(archive, 0).check(
        {"index.json": os.stat_result((0o100644, 1, 1, 1, STRANGER, 0, 0, 0, 0, 0))}
    )
    assert problem.here == f"owned by user {STRANGER}"


def test_hard_links(archive: Path, tmp_path: Path) -> None:
    os.link(archive / "index.json", tmp_path / "other name")
    with pytest.raises(UntrustedError) as caught:
        trust(archive, Policy())
    (problem,) = caught.value.problems
    assert (problem.where, problem.here) == ("index.json", "a hard link: it has another name elsewhere")
    assert problem.hint == f"copy it: cp -r {archive} COPY"
    assert os.system(f"cp -r {archive} {tmp_path / 'copy'}") == 0
    assert trust(tmp_path / "copy", Policy()).reason == "unsigned, permissions private"
    (tmp_path / "other name").unlink()
    assert trust(archive, Policy()).reason == "unsigned, permissions private"
    signed_with(archive)
    os.link(archive / "index.json", tmp_path / "other name")
    assert len(trust(archive, policy()).notes) == 1


def test_a_file_that_was_replaced_after_it_was_opened_is_no_hard_link(archive: Path) -> None:
    opened = Archive.open(archive)
    data = (archive / "index.json").read_bytes()
    with (archive / "index.json").open("rb") as stream:
        (archive / "index.json").unlink()
        (archive / "index.json").write_bytes(data)
        gone = os.fstat(stream.fileno())
    assert gone.st_nlink == 0
    assert Permissions(archive, os.geteuid()).check({**opened.opened, "index.json": gone}) == []


@pytest.mark.parametrize("name", ["index.json", "blobs", "blobs/sha256", "manifest"])
def test_symbolic_links_are_no_archive_whoever_signed_it(archive: Path, tmp_path: Path, name: str) -> None:
    signed_with(archive)
    path, _ = place(archive, name)
    kept = path.rename(tmp_path / "kept")
    path.symlink_to(kept)
    with pytest.raises(CorruptArchiveError) as caught:
        trust(archive, policy())
    assert caught.value.code == 4
    path.unlink()
    kept.rename(path)
    assert trust(archive, policy()).statement


def test_the_way_to_an_archive_may_lead_through_links(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(archive)
    assert trust(tmp_path / "current", Policy()).reason == "unsigned, permissions private"
    allow(archive, 0o002)
    with pytest.raises(UntrustedError):
        trust(tmp_path / "current", Policy())


def test_a_file_that_is_not_read_is_not_judged(archive: Path) -> None:
    (archive / "notes").write_text("of others")
    allow(archive / "notes", 0o022)
    assert trust(archive, Policy()).reason == "unsigned, permissions private"


def test_what_was_read_is_what_is_judged(archive: Path, tmp_path: Path) -> None:
    """The archive is private again by the time it is asked about: what counts is how it was when it was read."""
    shutil.copytree(archive, tmp_path / "loose")
    allow(tmp_path / "loose", 0o002)
    opened = Archive.open(tmp_path / "loose")
    opened.find(None)
    (tmp_path / "loose").rename(tmp_path / "away")
    archive.rename(tmp_path / "loose")
    assert opened.check_permissions()


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o077], ids=oct)
def test_what_is_saved_under_any_umask_can_be_loaded(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_archive(tmp_path / "archive")
        signed_with(tmp_path / "archive")
    finally:
        os.umask(before)
    (tmp_path / "archive" / "index.json").chmod(0o644)
    assert trust(tmp_path / "archive", Policy()).statement is None


NOBODY = 65534


def as_nobody(call: Callable[[], object]) -> int:
    """The exit code of what `call` raises in a process of a user without a home, 0 if it raises nothing."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            call()
            code = 0
        except GraphpackError as error:
            code = error.code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("home", ["/root", "/nonexistent", "", "."])
def test_another_user_in_earnest(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's archive is fine for anybody, their own too, a third one's is not; HOME may be that of root."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        archive = Path(name, "archive")
        make_archive(archive)
        monkeypatch.setattr(trust_settings, "SYSTEM_FILE", Path(name, "etc", "trust.yaml"))

        def trusted() -> Trusted:
            return trust(archive, trust_settings.find_policy())

        assert trusted().reason == "unsigned, permissions private"
        assert as_nobody(trusted) == 0
        for path in (archive, *archive.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        assert as_nobody(trusted) == 0
        with pytest.raises(UntrustedError, match="owned by user 65534"):
            trusted()
        (archive / "index.json").chmod(0o664)
        assert as_nobody(trusted) == 11
        os.chown(archive / "blobs", STRANGER, STRANGER)
        (archive / "index.json").chmod(0o644)
        assert as_nobody(trusted) == 11


def test_what_was_opened_is_judged_once_however_many_entries_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []
    genuine = Permissions._judge

    def counting(self: Permissions, name: str, status: os.stat_result) -> None:
        judged.append(name)
        genuine(self, name, status)

    monkeypatch.setattr(Permissions, "_judge", counting)

    def judgements(count: int, use: Callable[[Path], object]) -> int:
        path = tmp_path / str(count)
        if not path.exists():
            make_archive(path, *(make_record(f"entry-{number}") for number in range(count)))
        judged.clear()
        use(path)
        return len(judged)

    uses: dict[str, Callable[[Path], object]] = {
        "verify": lambda path: verify(path, (), "structure", Policy(), SilentObserver()),
        "inspect": lambda path: documents.inspect(path, (), Policy()),
    }
    for name, use in uses.items():
        once, twice = judgements(4, use), judgements(8, use)
        assert (name, once > 0, twice <= 2 * once) == (name, True, True), (once, twice)


def test_what_was_judged_before_still_counts_as_it_was_opened_last() -> None:
    def status(mode: int, user: int, links: int = 1) -> os.stat_result:
        return os.stat_result((mode, 1, 1, links, user, 0, 0, 0, 0, 0))

    permissions = Permissions(Path("archive"), 1)
    assert permissions.check({".": status(0o040755, 1, 4), "a": status(0o100666, 7, 2)}) == permissions.check({})
    found = permissions.check({"b": status(0o100644, 6), "c": status(0o100644, 6)})
    assert [(problem.where, problem.here) for problem in found] == [
        ("a", "writable by its group or everybody"),
        ("a, b, c", "owned by user 6, user 7"),
        ("a", "a hard link: it has another name elsewhere"),
    ]
    found = permissions.check({"a": status(0o100644, 1), "b": status(0o100644, 0)})
    assert [(problem.where, problem.here) for problem in found] == [("c", "owned by user 6")]
    assert permissions.check({"c": status(0o100644, 1)}) == []


# --- Files that say whom to trust


def test_a_file_that_only_this_user_can_change(tmp_path: Path, stranger: Callable[[Path], None]) -> None:
    file = tmp_path / "a file"
    file.write_bytes(b"12345")
    assert read_protected(file, 5) == b"12345"
    with pytest.raises(UsageError, match="larger than 4 bytes"):
        read_protected(file, 4)
    for bits in (0o020, 0o002):
        allow(file, bits)
        with pytest.raises(UntrustedError, match="others may change it") as caught:
            read_protected(file, 5)
        others = "everybody" if bits == 0o002 else f"group {os.getegid()}"
        assert (caught.value.problems[0].where, caught.value.problems[0].here) == (str(file), others)
        assert os.system(caught.value.problems[0].hint.partition(",")[0]) == 0
        assert read_protected(file, 5) == b"12345"
    stranger(file)
    with pytest.raises(UntrustedError, match="others may change it"):
        read_protected(file, 5)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(NotFoundError):
            read_protected(path, 5)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError):
        read_protected(tmp_path / "loop", 5)


def test_as_many_names_as_are_shown(archive: Path) -> None:
    blobs = sorted((archive / "blobs" / "sha256").iterdir())
    for count, wanted in ((SHOWN, "$"), (SHOWN + 1, " and 1 more$")):
        opened = {}
        for blob in blobs[:count]:
            blob.chmod(0o666)
            opened[blob.name] = blob.stat()
        (problem,) = Permissions(archive, os.geteuid()).check(opened)
        shown = ", ".join(blob.name for blob in blobs[:SHOWN])
        assert re.fullmatch(f"{shown}{wanted}", problem.where)
