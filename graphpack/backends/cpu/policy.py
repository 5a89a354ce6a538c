"""What a compiled object may be. Checked on its bytes, before the loader runs any of its initialisers."""

from __future__ import annotations

from graphpack.elf import ElfError, ElfFile, parse
from graphpack.errors import Problem

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
