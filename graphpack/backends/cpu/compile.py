"""AOTInductor's C++ for a traced step, and the object g++ makes of it.

Inductor writes the source; graphpack runs the compiler itself. That is what fixes the instruction set, keeps
the builder's paths out of the object, lets the loader unload it, and needs no probing of the processor.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch._inductor

from graphpack.backends.cpu.export import TracedStep
from graphpack.backends.cpu.policy import PROXY_EXECUTOR, check_object
from graphpack.backends.inductor_cache import check_inductor_cache
from graphpack.elf import clear_executable_stack, parse
from graphpack.errors import CaptureRefusedError, GraphpackError, Problem, StorageError
from graphpack.identity.cpu_isa import CpuIsa
from graphpack.modes import node_line
from graphpack.refused import NO_ROOM, behind, too_little

GENERATED_NAME = "step"
_WRAPPER = f"{GENERATED_NAME}.wrapper.cpp"
_KERNELS = f"{GENERATED_NAME}.kernel.cpp"
_KERNELS_BEGIN = "#include <torch/csrc/inductor/cpp_prefix.h>"
_SAFE_PATH = "PYTHONSAFEPATH"

_WRAPPER_LEVEL = "-O1"
"""Nearly all of g++'s time goes into the wrapper, which computes nothing: its calls are the same at any level. Inductor
builds it so too, except where others are to build what it writes (`AotCodeCompiler` in torch/_inductor/codecache.py).
"""

_LAST_ERROR = "static thread_local std::string g_aoti_last_error;"
"""A destructor waiting for the end of a thread keeps the object in memory until then. Calls of one object come one
at a time, so that a variable for all threads will do."""


def generate(step: TracedStep, isa: CpuIsa, directory: Path) -> None:
    """Write the C++ of a step into the empty `directory`: the kernels, and the wrapper that calls them.

    Raises CaptureRefusedError if Inductor cannot lower an operation, naming it, or if there is no compiler, and
    StorageError if there is no room or memory for it.
    """
    compiler()
    check_inductor_cache()
    options: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.package_cpp_only": True,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.model_name_for_generated_files": GENERATED_NAME,
        "aot_inductor.precompile_headers": False,
        "aot_inductor.enable_line_tables": False,
        # Without this, small weights become literals in the code and a changed checkpoint replays stale.
        "always_keep_tensor_constants": True,
        # bfloat16 and float16 are rounded where the eager model rounds them, not once a fused kernel. The same code
        # for float32.
        "emulate_precision_casts": True,
        "cpp.dynamic_threads": True,
        "cpp.simdlen": isa.simd_bits,
        "cpp.march": isa.march,
        # The instruction set is chosen, not probed: probing compiles and runs four programs.
        "cpp.vec_isa_ok": True,
    }
    try:
        with torch.no_grad(), _safe_path(), _plain_path(directory) as path:
            options["aot_inductor.output_path"] = f"{path}/"
            torch._inductor.aot_compile(step.program.module(), step.inputs, options=options)
    except Exception as error:
        for found in behind(error):
            if isinstance(found, OSError) and found.errno in NO_ROOM:
                raise StorageError(f"no room for temporary files: {found.strerror}", _room_problems()) from error
            refused = too_little("compile the step", found)
            if refused is not None:
                raise refused from error
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise CaptureRefusedError(
            "torch cannot compile the step", [Problem("the model", "", lines[0] if lines else type(error).__name__)]
        ) from error
    text = (directory / _WRAPPER).read_text()
    calls = re.findall(r"\n[^\n]*aoti_torch_proxy_executor_call_function\([^\n]*", text)
    if calls:
        raise CaptureRefusedError(
            "the step needs operations that run only inside Python",
            [
                Problem(
                    _line_of(name, step), "", f"{name} has no C interface in this torch", "compute it outside the step"
                )
                for name in _proxied(directory) or [PROXY_EXECUTOR]
            ],
        )
    wrapper, begin, kernels = text.partition(_KERNELS_BEGIN)
    (directory / _WRAPPER).write_text(wrapper.replace(_LAST_ERROR, _LAST_ERROR.replace("thread_local ", "")))
    (directory / _KERNELS).write_text(begin + kernels)


def _room_problems() -> list[Problem]:
    return [Problem(tempfile.gettempdir(), hint="make room there, or set TMPDIR to another directory")]


def compiler() -> str:
    """The C++ compiler's command. Raises CaptureRefusedError if there is none."""
    command = os.environ.get("CXX") or "g++"
    if shutil.which(command) is None:
        raise CaptureRefusedError("save needs a C++ compiler", [Problem(command, "", "not on PATH", "install g++")])
    return command


@contextmanager
def _safe_path() -> Iterator[None]:
    """Inductor starts Python to try an instruction set, whatever it is told. The modules of that Python must not be
    files that happen to lie in the working directory."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


@contextmanager
def _plain_path(directory: Path) -> Iterator[str]:
    """Another path of a directory: Inductor splits its command lines at blanks."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _proxied(directory: Path) -> list[str]:
    """The operations Inductor listed for its proxy executor."""
    listing = directory / f"{GENERATED_NAME}.wrapper.json"
    nodes = json.loads(listing.read_text())["nodes"] if listing.is_file() else []
    return sorted({node["node"]["target"] for node in nodes})


def _line_of(operation: str, step: TracedStep) -> str:
    lines = [node_line(node) for node in step.program.graph.nodes if _operation(node) == operation]
    return lines[0] if lines else "the model"


def _operation(node: torch.fx.Node) -> str:
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


def build(directory: Path, name: str, stop: Event) -> bytes:
    """Compile and link what `generate` wrote into an object of this SONAME; its bytes, executable-stack flag cleared.

    Raises CaptureRefusedError if there is no compiler, StorageError if it has no room for its files or no memory, and
    GraphpackError if it fails or `stop` is set before it is done.
    """
    flags = json.loads((directory / f"{GENERATED_NAME}.wrapper_linker_flags.json").read_text())
    includes = Path(torch.__file__).parent / "include"
    compile_flags = [f"-{flag}" for flag in flags["cflags"] if flag not in ("shared", "Wall", "pedantic")]
    compile_command = [
        compiler(),
        *(f"-D{definition.strip()}" for definition in flags["definitions"]),
        *(f"-I{path}" for path in flags["include_dirs"]),
        *compile_flags,
        "-w",
        "-fno-gnu-unique",
        f"-ffile-prefix-map={includes}=torch",
        f"-ffile-prefix-map={directory}=.",
        "-c",
    ]
    link_command = [
        compiler(),
        "wrapper.o",
        "kernels.o",
        *(str(found.relative_to(directory)) for found in directory.rglob("*.weights.o")),
        "-shared",
        "-s",
        f"-Wl,-z,noexecstack,--build-id=none,-soname,{name}",
        *(f"-L{path}" for path in flags["libraries_dirs"] if "torch" in path),
        "-ltorch_cpu",
        "-lgomp",
        "-o",
        "step.so",
    ]
    _run([*compile_command, _WRAPPER_LEVEL, _WRAPPER, "-o", "wrapper.o"], directory, stop)
    _run([*compile_command, _KERNELS, "-o", "kernels.o"], directory, stop)
    _run(link_command, directory, stop)
    code = clear_executable_stack((directory / "step.so").read_bytes())
    problems = check_object(code, os.uname().machine, "the compiled object")
    if problems:
        raise CaptureRefusedError("the compiled object breaks the policy for native code", problems)
    return code


def _run(command: list[str], directory: Path, stop: Event) -> None:
    # In a session of its own the compiler and the programs it starts can be ended together; what they leave behind
    # lies in the directory, which goes too.
    environment = {**os.environ, "TMPDIR": str(directory), "LC_ALL": "C"}
    process = subprocess.Popen(
        command, cwd=directory, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    said = ""
    while process.returncode is None:
        try:
            _, said = process.communicate(timeout=0.1)
        except subprocess.TimeoutExpired:
            if stop.is_set():
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                raise GraphpackError("the save was stopped") from None
    if process.returncode and any(os.strerror(number) in said for number in NO_ROOM):
        raise StorageError("no room for the compiler's files", _room_problems())
    if process.returncode:
        failed = GraphpackError(f"{command[0]} failed on generated code:\n{said[-4000:]}")
        raise too_little("compile the step", RuntimeError(said)) or failed


def symbol_versions(code: bytes) -> set[str]:
    """The symbol versions an object asks of its host, such as GLIBC_2.34."""
    return {version for versions in parse(code).version_needs.values() for version in versions}
