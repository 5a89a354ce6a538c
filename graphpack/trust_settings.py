"""Whose archives may be loaded: what the command line, the environment, the user and the system say.

    # ~/.config/graphpack/trust.yaml, or /etc/graphpack/trust.yaml
    trusted_keys: [fleet.pub]      # public keys, relative to this file
    require_signature: true        # as it is anyway where keys are given; false takes unsigned archives as well
    minimum_serial: 12             # or by entry: {qwen3: 12}

Keys are those of the first of these four places that has any. A signature is required if any place asks for it, or if
there are keys and the place they are from does not say otherwise. Of two smallest serials the larger one holds.
Neither the working directory nor an archive is a place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from graphpack.archive.permissions import changeable_by, read_protected
from graphpack.archive.trust import Policy
from graphpack.errors import Problem, StorageError, UntrustedError, UsageError
from graphpack.frozen import dataclass
from graphpack.home import user_directory
from graphpack.schema import COUNT_LIMIT, shown

if TYPE_CHECKING:
    from graphpack.archive.keys import PublicKey

SYSTEM_FILE = Path("/etc/graphpack/trust.yaml")
FILE_NAME = "trust.yaml"
FILE_LIMIT = 64 << 10
KEYS_VARIABLE = "GRAPHPACK_TRUSTED_KEYS"
REQUIRE_VARIABLE = "GRAPHPACK_REQUIRE_SIGNATURE"
_TRUTH = {"": None, "1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What one place says. `required` is None where it leaves it open."""

    keys: tuple[Path, ...] = ()
    required: bool | None = None
    minimum_serial: dict[str, int] = field(default_factory=dict)
    least_serial: int = 0

    def least(self, name: str) -> int:
        """The smallest serial that the entry `name` may have."""
        return self.minimum_serial.get(name, self.least_serial)


def find_policy(trusted_keys: Sequence[Path] = (), require_signature: bool = False) -> Policy:
    """What the command line gives, joined with what the other places say.

    Raises UsageError, NotFoundError, UntrustedError and StorageError for a place or a key that cannot be used: then
    nothing may be loaded.
    """
    given = Place(keys=tuple(trusted_keys), required=require_signature or None)
    return join((given, _environment(), _user(), _file(SYSTEM_FILE)))


def join(places: Sequence[Place]) -> Policy:
    """One policy of places, the most particular first. Reads the keys."""
    with_keys = next((place for place in places if place.keys), Place())
    named = {name for place in places for name in place.minimum_serial}
    return Policy(
        keys=tuple(_read_keys(with_keys.keys)),
        signature_required=any(place.required for place in places)
        or (bool(with_keys.keys) and with_keys.required is not False),
        minimum_serial={name: max(place.least(name) for place in places) for name in named},
        least_serial=max((place.least_serial for place in places), default=0),
    )


def _read_keys(paths: Sequence[Path]) -> list[PublicKey]:
    if not paths:
        return []
    from graphpack.archive.keys import read_public_key

    return [read_public_key(path) for path in paths]


def _environment() -> Place:
    named = os.environ.get(KEYS_VARIABLE, "")
    keys = tuple(Path(name) for name in named.split(os.pathsep) if name)
    if named and not keys:
        # Two variables that were to be there and are not: who wanted keys gets no archive without.
        raise UsageError(f"{KEYS_VARIABLE} is {shown(named)}, and names no key")
    value = os.environ.get(REQUIRE_VARIABLE, "")
    if value.lower() not in _TRUTH:
        raise UsageError(f"{REQUIRE_VARIABLE} is {shown(value)}, and has to be 1 or 0")
    return Place(keys=keys, required=_TRUTH[value.lower()])


def _user() -> Place:
    folder = user_directory("XDG_CONFIG_HOME", ".config")
    return Place() if folder is None else _file(folder / FILE_NAME)


def _file(file: Path) -> Place:
    try:
        folder = file.parent.stat()
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Place()
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from error
    others = changeable_by(folder, os.geteuid())
    if others:
        problem = Problem(str(file.parent), here=others, hint=f"chmod go-w {file.parent}")
        raise UntrustedError(f"{file} says whom to trust, and others may exchange it", [problem])
    return read_place(read_protected(file, FILE_LIMIT), file)


def read_place(content: bytes, file: Path) -> Place:
    """What a `trust.yaml` says. UsageError names every problem by its dotted key."""
    from graphpack.configuration.keys import PATH
    from graphpack.configuration.reader import TRUST_KEYS, Reader
    from graphpack.configuration.yaml_file import parse

    reader = Reader(file.parent)
    value = parse(content, file)
    settings = reader.map({} if value is None else value, "", TRUST_KEYS)
    names = settings.get("trusted_keys", [])
    if not isinstance(names, list):
        reader.refuse("trusted_keys", names, "must be a list of paths of public keys")
        names = []
    named = {f"[{position}]": name for position, name in enumerate(names)}
    keys = [reader.value(named, key, "trusted_keys", PATH) for key in named]
    required = settings.get("require_signature")
    if required is not None and not isinstance(required, bool):
        reader.refuse("require_signature", required, "must be true or false")
    serials = settings.get("minimum_serial", 0)
    by_entry = reader.map(serials, "minimum_serial") if isinstance(serials, dict) else {}
    least = 0 if isinstance(serials, dict) else serials
    for where, serial in [
        ("minimum_serial", least),
        *((f"minimum_serial.{name}", by_entry[name]) for name in by_entry),
    ]:
        if type(serial) is not int or not 0 <= serial <= COUNT_LIMIT:
            reader.refuse(where, serial, "must be a whole number from 0, or a map of entries to such numbers")
    reader.finish(file)
    return Place(
        keys=tuple(path for path in keys if path is not None),
        required=required,
        minimum_serial=by_entry,
        least_serial=least,
    )
