"""Whom to trust is said by the command line, the environment, the user and the system, and by nobody else."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
import yaml

from graphpack import trust_settings
from graphpack.archive.trust import Policy
from graphpack.configuration.config import read_config
from graphpack.errors import GraphpackError, NotFoundError, StorageError, UntrustedError, UsageError
from graphpack.trust_settings import KEYS_VARIABLE, REQUIRE_VARIABLE, find_policy
from tests.archive.signed import KEY, OTHER, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Files of the public keys of `KEY` and `OTHER`."""
    (tmp_path / "one.pub").write_bytes(public(KEY).pem())
    (tmp_path / "two.pub").write_bytes(public(OTHER).pem())
    return tmp_path / "one.pub", tmp_path / "two.pub"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's trust.yaml, which is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    (tmp_path / "user" / "graphpack").mkdir(parents=True)
    return tmp_path / "user" / "graphpack" / "trust.yaml"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's trust.yaml, which is not there yet."""
    (tmp_path / "etc").mkdir()
    monkeypatch.setattr(trust_settings, "SYSTEM_FILE", tmp_path / "etc" / "trust.yaml")
    return tmp_path / "etc" / "trust.yaml"


def write(file: Path, **settings: object) -> None:
    file.write_text(yaml.safe_dump(settings))


def test_nothing_is_asked_for_where_nobody_says_anything() -> None:
    assert find_policy() == Policy()


def test_keys_require_a_signature(keys: tuple[Path, Path], user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_policy(keys[:1]) == Policy(keys=(public(KEY),), signature_required=True)
    assert find_policy(keys).keys == (public(KEY), public(OTHER))
    monkeypatch.setenv(KEYS_VARIABLE, f"{keys[0]}:{keys[1]}")
    assert find_policy() == Policy(keys=(public(KEY), public(OTHER)), signature_required=True)
    monkeypatch.delenv(KEYS_VARIABLE)
    write(user, trusted_keys=[str(keys[0])])
    assert find_policy() == Policy(keys=(public(KEY),), signature_required=True)
    write(user, trusted_keys=[str(keys[0])], require_signature=False)
    assert find_policy() == Policy(keys=(public(KEY),), signature_required=False)


def test_the_first_place_with_keys_counts(
    keys: tuple[Path, Path], user: Path, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(system, trusted_keys=[str(keys[0])])
    assert find_policy().keys == (public(KEY),)
    write(user, trusted_keys=[str(keys[1])])
    assert find_policy().keys == (public(OTHER),)
    monkeypatch.setenv(KEYS_VARIABLE, str(keys[0]))
    assert find_policy().keys == (public(KEY),)
    assert find_policy([keys[1]]).keys == (public(OTHER),)


@pytest.mark.parametrize("place", ["command line", "environment", "user", "system"])
def test_any_place_can_require_a_signature(
    place: str, keys: tuple[Path, Path], user: Path, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(user, trusted_keys=[str(keys[0])], require_signature=False)
    write(system, require_signature=False)
    monkeypatch.setenv(REQUIRE_VARIABLE, "0")
    assert not find_policy().signature_required
    if place == "environment":
        monkeypatch.setenv(REQUIRE_VARIABLE, "1")
    if place == "user":
        write(user, trusted_keys=[str(keys[0])])
    if place == "system":
        write(system, require_signature=True)
    assert find_policy(require_signature=place == "command line").signature_required


def test_keys_on_the_command_line_always_require_one(
    keys: tuple[Path, Path], user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(user, require_signature=False)
    monkeypatch.setenv(REQUIRE_VARIABLE, "no")
    assert find_policy(keys[:1]).signature_required
    assert not find_policy().signature_required


def test_the_larger_of_two_smallest_serials_holds(user: Path, system: Path) -> None:
    write(user, minimum_serial=7)
    write(system, minimum_serial=5)
    assert find_policy() == Policy(least_serial=7)
    write(user, minimum_serial={"a": 3, "b": 9})
    write(system, minimum_serial={"a": 4, "b": 8, "c": 1})
    assert find_policy() == Policy(minimum_serial={"a": 4, "b": 9, "c": 1})
    write(user, minimum_serial={"a": 3, "b": 9})
    write(system, minimum_serial=5)
    assert find_policy() == Policy(minimum_serial={"a": 5, "b": 9}, least_serial=5), "nobody lowers what another asks"
    write(user, minimum_serial=4)
    write(system, minimum_serial={"a": 3, "b": 9})
    assert find_policy() == Policy(minimum_serial={"a": 4, "b": 9}, least_serial=4)


def test_keys_are_relative_to_the_file_that_names_them(
    keys: tuple[Path, Path], user: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (user.parent / "mine.pub").write_bytes(keys[0].read_bytes())
    write(user, trusted_keys=["mine.pub"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.pub").write_bytes(keys[1].read_bytes())
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_policy().keys == (public(KEY),)


# --- What has no say


def test_the_working_directory_has_no_say(
    keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not under any name, and not through relative paths in the environment."""
    here = tmp_path / "here"
    for folder in (here, here / "graphpack", here / ".config" / "graphpack", here / "etc" / "graphpack"):
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "trust.yaml", trusted_keys=[str(keys[0])], require_signature=True)
        (folder / "trusted_keys").write_bytes(keys[0].read_bytes())
    monkeypatch.chdir(here)
    for variable in ("XDG_CONFIG_HOME", "HOME"):
        for value in ("", ".", ".config", "here/..", "etc"):
            monkeypatch.setenv(variable, value)
            assert find_policy() == Policy(), (variable, value)
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert find_policy().keys == (public(KEY),)


@pytest.mark.parametrize("key", ["trusted_keys", "require_signature", "minimum_serial"])
def test_the_configuration_of_models_has_no_say(key: str, tmp_path: Path) -> None:
    (tmp_path / "graphpack.yaml").write_text(f"{key}: []\n")
    with pytest.raises(UsageError) as caught:
        read_config(tmp_path / "graphpack.yaml")
    (problem,) = caught.value.problems
    assert problem.where == key
    assert problem.hint.startswith("only trust.yaml in the configuration of the user or the system")


# --- What cannot be used stops everything


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("trusted_keys: key.pub", "trusted_keys"),
        ("trusted_keys: [1]", "trusted_keys[0]"),
        ("trusted_keys: ['']", "trusted_keys[0]"),
        ('trusted_keys: ["\\ud800"]', "trusted_keys[0]"),
        ("trusted_keys: !!set {a}", "line 1, column 15"),
        ("minimum_serial: 1" + ":59" * 3000, "line 1, column 17"),
        ("minimum_serial: 012", "line 1, column 17"),
        ("require_signature: 'yes'", "require_signature"),
        ("require_signature: 1", "require_signature"),
        ("minimum_serial: -1", "minimum_serial"),
        ("minimum_serial: true", "minimum_serial"),
        ("minimum_serial: 1.5", "minimum_serial"),
        ("minimum_serial: {qwen3: many}", "minimum_serial.qwen3"),
        ("minimum_serial: {1: 1}", "minimum_serial.1"),
        ("trusted_key: [key.pub]", "trusted_key"),
        ("models: {}", "models"),
        ("[]", "the file"),
    ],
)
def test_a_file_that_is_not_as_it_should_be(text: str, where: str, user: Path) -> None:
    user.write_text(text)
    with pytest.raises(UsageError) as caught:
        find_policy()
    assert [problem.where for problem in caught.value.problems] == [where]


@pytest.mark.parametrize("text", ["trusted_keys: [", "a: &x 1", "a: 1\na: 2", "\xff", "x" * (65 << 10)])
def test_a_file_that_is_no_yaml(text: str, user: Path) -> None:
    user.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError):
        find_policy()
    user.write_text("")
    assert find_policy() == Policy()


@pytest.mark.parametrize("value", ["on", "2", " ", "require"])
def test_an_environment_that_says_neither_yes_nor_no(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_VARIABLE, value)
    with pytest.raises(UsageError, match="has to be 1 or 0"):
        find_policy()


@pytest.mark.parametrize("value", [":", "::"])
def test_a_list_of_keys_that_names_none_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would let everything in, where somebody put together two variables that are not set."""
    monkeypatch.setenv(KEYS_VARIABLE, value)
    with pytest.raises(UsageError, match="names no key"):
        find_policy()
    monkeypatch.setenv(KEYS_VARIABLE, "")
    assert find_policy().keys == ()


def test_keys_that_are_not_there(user: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pub"
    with pytest.raises(NotFoundError):
        find_policy([missing])
    monkeypatch.setenv(KEYS_VARIABLE, str(missing))
    with pytest.raises(NotFoundError):
        find_policy()
    monkeypatch.delenv(KEYS_VARIABLE)
    write(user, trusted_keys=["missing.pub"], require_signature=False)
    with pytest.raises(NotFoundError):
        find_policy()


@pytest.mark.parametrize("place", ["user", "system"])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_settings_that_others_may_change(place: str, what: str, user: Path, system: Path) -> None:
    file = user if place == "user" else system
    write(file, require_signature=True)
    assert find_policy() == Policy(signature_required=True)
    path = file if what == "file" else file.parent
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(UntrustedError) as caught:
        find_policy()
    assert caught.value.code == 11
    assert os.system(caught.value.problems[0].hint.partition(",")[0]) == 0
    assert find_policy() == Policy(signature_required=True)


def test_settings_that_cannot_be_read(user: Path) -> None:
    user.symlink_to(user)
    with pytest.raises(StorageError):
        find_policy()


# --- Whose home it is


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number without a line in the list of users, and no HOME, as containers have it."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1234567)
    with pytest.raises(KeyError):
        pwd.getpwuid(os.geteuid())
    assert find_policy() == Policy()


def test_a_home_that_is_no_place_is_looked_up(
    keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".config" / "graphpack").mkdir(parents=True)
    write(home / ".config" / "graphpack" / "trust.yaml", trusted_keys=[str(keys[0])])
    user = pwd.struct_passwd(("name", "x", os.geteuid(), 0, "", str(home), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    for value in ("", ".", "home"):
        monkeypatch.setenv("HOME", value)
        assert find_policy().keys == (public(KEY),)


def test_the_home_of_another_is_not_asked(
    keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".config" / "graphpack").mkdir(parents=True)
    write(home / ".config" / "graphpack" / "trust.yaml", trusted_keys=[str(keys[0])])
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert find_policy().signature_required
    monkeypatch.setattr(os, "access", lambda path, mode, **options: Path(path) != home)
    assert find_policy() == Policy()


def test_every_error_is_one_of_graphpack(user: Path) -> None:
    for text in ("- 1", "{", "trusted_keys: {}", "minimum_serial: [1]", "require_signature: []"):
        user.write_text(text)
        with pytest.raises(GraphpackError):
            find_policy()
