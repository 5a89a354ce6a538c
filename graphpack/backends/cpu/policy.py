"""What a compiled object may be. Checked on its bytes, before the loader runs any of its initialisers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from graphpack.archive.piecewise import piecewise_of
from graphpack.archive.record import Record
from graphpack.elf import ElfError, ElfFile, parse
from graphpack.errors import Problem
from graphpack.frozen import dataclass
from graphpack.identity.digests import piece_digest, piecewise_digest, settings_digest
from graphpack.schema import shown

ELF_MACHINES = {"x86_64": 62}
"""e_machine by `platform.machine()` (System V ABI, EM_X86_64)."""

SHARED_OBJECT = 3

ALLOWED_LIBRARIES = frozenset(
    {
        "libtorch.so",
        "libtorch_cpu.so",
        "libc10.so",
        "libgomp.so.1",
        "libstdc++.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "ld-linux-x86-64.so.2",
    }
)
PROXY_EXECUTOR = "aoti_torch_proxy_executor_call_function"

_OBJECT_NAME = re.compile(r"graphpack-([0-9a-f]{64})-([0-9a-f]{64})\.so")


def object_name(settings: str, topology: str) -> str:
    """The SONAME of an object: the digests of the settings it was compiled under and of its graph's topology.

    Without it an object could stand in the place of one for a larger batch, and would read past its inputs.
    """
    return f"graphpack-{settings}-{topology}.so"


def check_object(code: bytes, machine: str, where: str) -> list[Problem]:
    """Every way `code` breaks the policy; empty if it may be loaded."""
    try:
        elf = parse(code)
    except ElfError as error:
        return [Problem(where, "", f"not a loadable object: {error}")]
    problems = []
    if elf.machine != ELF_MACHINES.get(machine):
        problems.append(Problem(where, f"ELF machine {elf.machine}", f"{machine} is {ELF_MACHINES.get(machine)}"))
    if elf.type != SHARED_OBJECT:
        problems.append(Problem(where, f"ELF type {elf.type}", "only a shared object is loaded"))
    if elf.executable_stack:
        problems.append(Problem(where, "asks for an executable stack", "refused"))
    for kind, path in (("RPATH", elf.rpath), ("RUNPATH", elf.runpath)):
        if path is not None:
            problems.append(Problem(where, f"{kind} {path}", "refused: it would choose libraries"))
    problems += [
        Problem(where, f"needs {name}", "not among the libraries an object may need")
        for name in elf.needed
        if name not in ALLOWED_LIBRARIES
    ]
    if PROXY_EXECUTOR in elf.undefined:
        problems.append(Problem(where, f"calls {PROXY_EXECUTOR}", "needs Python at run time"))
    return problems


def needs(elf: ElfFile) -> tuple[str, ...]:
    """The symbol versions (GLIBC_2.34, GLIBCXX_3.4.30, ...) the object asks of the host, sorted."""
    return tuple(sorted({version for versions in elf.version_needs.values() for version in versions}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """An object as the record describes it: what it is `of`, its `settings` and its `topology`, two digests."""

    of: str
    digest: str
    images: int
    settings: str
    topology: str


def described_objects(record: Record) -> Iterator[Described]:
    """Every object of an entry: those of its graphs, and those of its pieces."""
    settings = settings_digest(record.settings)
    for graph in record.graphs:
        yield Described(
            of=f"bucket {graph.bucket}",
            digest=graph.object,
            images=len(graph.images),
            settings=settings,
            topology=graph.topology,
        )
    piecewise = piecewise_of(record)
    if piecewise is None:
        return
    settings = piecewise_digest(record.settings, piecewise.settings)
    for split in piecewise.graphs:
        for number, piece in enumerate(split.pieces):
            yield Described(
                of=f"piece {number} of {split.token_count} tokens",
                digest=piece.object,
                images=0,
                settings=settings,
                topology=piece_digest(split.topology, piece.topology),
            )


def check_described(code: bytes, record: Record, described: Described, where: str) -> list[Problem]:
    """Every way a well-formed object is not the one that the record describes."""
    elf = parse(code)
    problems = []
    if described.images:
        problems.append(Problem(f"images of {described.of}", str(described.images), "none on cpu", "save again"))
    if elf.soname != object_name(described.settings, described.topology):
        match = _OBJECT_NAME.fullmatch(elf.soname or "")
        here = f"topology {match[2][:12]} in the object" if match else f"an object named {shown(elf.soname)}"
        problems.append(Problem(where, f"topology {described.topology[:12]}", here, "save again"))
    undeclared = sorted(set(needs(elf)) - set(record.environment.symbol_versions))
    return problems + [
        Problem(where, f"needs {shown(version)}", "not in environment.symbol_versions", "save again")
        for version in undeclared
    ]


def compiled_settings(code: bytes) -> str | None:
    """The digest of the settings an object says it was compiled under; None if it says nothing."""
    try:
        name = parse(code).soname
    except ElfError:
        return None
    match = _OBJECT_NAME.fullmatch(name or "")
    return match[1] if match else None
