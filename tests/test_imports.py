"""The house rules that can be read off the source: who imports whom, who may know torch, what is never called."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import graphpack

PACKAGE = Path(graphpack.__file__).parent
LONGEST_MODULE = 400

# A module imports only what stands before it.
ORDER = """
    frozen errors refused elf words process jobs logs
    split_operations schema suggestion arguments dtypes torch_arrays graph
    results results.observer results.replay results.sign results.load results.verify results.maintain results.save
    texts stages convert home interpreter
    configuration configuration.yaml_file configuration.keys configuration.reader configuration.environment
    configuration.config
    archive archive.glance archive.record archive.piecewise archive.ranks archive.codec archive.compression
    archive.limits archive.oci archive.owner archive.files archive.lock archive.looks archive.finding archive.check
    archive.permissions archive.keys archive.signature archive.reading archive.ahead archive.store archive.collect
    archive.trust archive.remembered
    archive.validate
    identity identity.symbol_versions identity.environment identity.cuda_software identity.cpu_isa identity.digests
    identity.weights identity.layout identity.compat identity.agreement
    models models.step models.safetensors models.seeded models.weights models.blocks models.architecture models.specs
    models.sharding models.checkpoint models.presets models.attention models.operations models.experts models.decoder
    models.ranked
    models.factory models.registry models.locate models.tokenizer
    ranks meeting collectives group regions tensor golden backends backends.spare lockstep modes splitting
    backends.capturing backends.inductor_cache
    backends.cpu.policy backends.cpu.memory backends.cpu.runtime backends.cpu.stitched backends.cpu.restore
    backends.cpu
    backends.cpu.export backends.cpu.compile backends.cpu.capture backends.cpu.pieces backends.cpu.agree
    backends.cpu.capturing
    backends.cuda.structs backends.cuda.libcuda backends.cuda.driver backends.cuda.device
    backends.cuda.attributes backends.cuda.columns_check backends.cuda.columns backends.cuda.builder
    backends.cuda.host backends.cuda.host_weights backends.cuda.heap backends.cuda.images backends.cuda.spans
    backends.cuda.own_kernels backends.cuda.leaf_hash backends.cuda.assertions
    backends.cuda.bindings backends.cuda.piece_columns backends.cuda.pieces_check
    backends.cuda.graphs_check backends.cuda.placement
    backends.cuda.arena
    backends.cuda.rebuild backends.cuda.ring backends.cuda.upload backends.cuda.relay
    backends.cuda.device_memory backends.cuda.executable backends.cuda.operations backends.cuda.stitched
    backends.cuda.session backends.cuda.restore
    backends.cuda
    backends.cuda.cubin backends.cuda.image_file backends.cuda.trim
    backends.cuda.listener backends.cuda.walk backends.cuda.audit backends.cuda.encode backends.cuda.encode_pieces
    backends.cuda.space backends.cuda.memory backends.cuda.recorder
    backends.cuda.watch backends.cuda.capture backends.cuda.capture_pieces
    backends.cuda.agree backends.cuda.capturing
    trust_settings inputs dispatch slots eager fallback prefill
    weight_update trials life replay restore completeness opening budget pool
    sampling generate
    signing contents verify
    freshness prewarm entry proof capture recorder
    documents report progress
    cli.logs cli.answer cli.options cli.save cli.load cli.generate cli.inspect cli.verify cli.sign cli.maintain
    cli.models cli.prewarm cli.config cli.completion cli
    __main__
""".split()  # noqa: SIM905 - rows are read more easily than seventy lines

# The way of `save`, of steps that no graph was captured for, of what runs between pieces, and of ranks. All other
# modules know torch neither at their top nor in their functions.
MAY_USE_TORCH = {
    "torch_arrays",
    "models.attention",
    "models.operations",
    "models.experts",
    "models.decoder",
    "models.ranked",
    "models.factory",
    "meeting",
    "collectives",
    "group",
    "lockstep",
    "modes",
    "splitting",
    "backends.inductor_cache",
    "backends.cpu.export",
    "backends.cpu.compile",
    "backends.cpu.capture",
    "backends.cpu.pieces",
    "backends.cpu.agree",
    "backends.cpu.capturing",
    "backends.cuda.operations",
    "backends.cuda.memory",
    "backends.cuda.recorder",
    "backends.cuda.watch",
    "backends.cuda.capture",
    "backends.cuda.capture_pieces",
    "backends.cuda.agree",
    "backends.cuda.capturing",
    "eager",
    "capture",
    "recorder",
}
# The doors to that way: functions that import it when they are called.
DOORS = {
    ("models.registry", "models.decoder"),
    ("models.registry", "models.ranked"),
    ("models.registry", "models.factory"),
    ("cli.save", "capture"),
    ("fallback", "eager"),
    ("backends.cpu.stitched", "models.operations"),
    ("backends.cpu.stitched", "torch_arrays"),
    ("opening", "group"),
    ("proof", "group"),
    ("backends.cuda.stitched", "backends.cuda.operations"),
}

# What a load on a CUDA device imports in any case, and what it leaves to those that need it: half of the time until the
# first token is that of imports.
LOAD = """
    opening results.load results.observer archive.reading identity.compat configuration.config trust_settings
    restore backends.cuda.restore
""".split()  # noqa: SIM905 - as above
NOT_FOR_EVERY_LOAD = """
    results.save results.verify results.maintain results.sign results.replay golden trials weight_update
    configuration.reader configuration.yaml_file archive.keys archive.signature archive.store archive.collect
    archive.lock elf identity.symbol_versions identity.cuda_software models.presets models.seeded models.registry
    backends.capturing backends.cuda.capturing backends.cpu sampling generate documents report
""".split()  # noqa: SIM905 - as above

MAY_START_PROCESSES = {"backends.cpu.compile", "jobs", "proof"}
NEVER_IMPORTED = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "zipfile", "tarfile"}
NEVER_CALLED = {"eval", "exec", "os.system", "os.popen", "torch.load", "torch.export.load", "aoti_load_package"}


@dataclass(frozen=True)
class Import:
    """`lazy` when it stands in a function. Imports for type checkers only are not listed."""

    name: str
    lazy: bool


@cache
def modules() -> tuple[str, ...]:
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return tuple(name for name in names if name != "__init__")


def file_of(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text())


@cache
def imports(module: str) -> tuple[Import, ...]:
    return tuple(_imports(tree(module), lazy=False))


def _imports(node: ast.AST, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                known = inner.removeprefix("graphpack.") in modules() and inner.startswith("graphpack.")
                yield Import(inner if known else str(child.module), lazy)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, lazy=lazy or inside)


def own(module: str) -> list[Import]:
    """Imports from this package, without its name. The package itself, for its version, is free for all."""
    prefix = "graphpack."
    return [Import(i.name.removeprefix(prefix), i.lazy) for i in imports(module) if i.name.startswith(prefix)]


def roots(module: str) -> set[str]:
    return {found.name.partition(".")[0] for found in imports(module)}


@pytest.mark.parametrize("module", modules())
def test_frozen_classes_with_slots_are_those_that_take_no_time_to_define(module: str) -> None:
    """In any module: which of them a load imports changes too easily to be noticed."""
    classes = [node for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)]
    calls = [call for node in classes for call in node.decorator_list if isinstance(call, ast.Call)]
    frozen = [call for call in calls if {"frozen", "slots"} <= {keyword.arg for keyword in call.keywords}]
    assert {ast.unparse(call.func) for call in frozen} <= {"dataclass"}
    assert not frozen or Import("graphpack.frozen", lazy=False) in imports(module)


def test_every_module_has_its_place() -> None:
    assert sorted(ORDER) == sorted(modules())


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_what_stands_before_it(module: str) -> None:
    before = ORDER[: ORDER.index(module)]
    assert [found.name for found in own(module) if found.name not in before] == []


@pytest.mark.parametrize("module", sorted(set(modules()) - MAY_USE_TORCH))
def test_torch_stays_on_the_way_of_save(module: str) -> None:
    assert "torch" not in roots(module)
    doors = {found.name for found in own(module) if found.lazy and (module, found.name) in DOORS}
    assert {found.name for found in own(module)} & MAY_USE_TORCH == doors


def test_the_list_of_torch_modules_is_tight() -> None:
    through_others = {"backends.cpu.capturing", "backends.cpu.pieces", "group"}
    assert {module for module in MAY_USE_TORCH if "torch" not in roots(module)} <= through_others


def test_only_progress_uses_rich() -> None:
    assert [module for module in modules() if "rich" in roots(module)] == ["progress"]


@pytest.mark.parametrize("module", modules())
def test_nothing_runs_what_it_reads(module: str) -> None:
    assert roots(module).isdisjoint(NEVER_IMPORTED)
    calls = [ast.unparse(node.func) for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]
    banned = [call for call in calls if call in NEVER_CALLED or call.rpartition(".")[2] == "aoti_load_package"]
    assert banned == []
    assert "subprocess" not in roots(module) or module in MAY_START_PROCESSES


@pytest.mark.parametrize("module", modules())
def test_no_module_is_too_long(module: str) -> None:
    assert len(file_of(module).read_text().splitlines()) <= LONGEST_MODULE


@pytest.mark.parametrize(
    "module", ["graphpack", "graphpack.archive.store", "graphpack.restore", "graphpack.models.registry"]
)
def test_importing_does_not_bring_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_what_starts_a_driver_is_imported_before_what_is_slow_to_import() -> None:
    code = "import sys, graphpack.opening, graphpack.backends.cuda.libcuda; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_a_load_imports_only_what_every_load_needs() -> None:
    assert set(LOAD) | set(NOT_FOR_EVERY_LOAD) <= set(ORDER)
    code = f"import sys, {', '.join(f'graphpack.{module}' for module in LOAD)}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    imported = {name.removeprefix("graphpack.") for name in result.stdout.split()}
    assert set(LOAD) <= imported
    assert sorted(imported & set(NOT_FOR_EVERY_LOAD)) == []


def test_the_first_step_imports_nothing() -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from graphpack.archive.reading import Reader\n"
        "from graphpack.inputs import arrays_of, check_inputs, length_of, row_count\n"
        "inputs = Reader.open(Path(sys.argv[1])).find(None)[0].record.graphs[0].inputs\n"
        "before = {*sys.modules}\n"
        "given = arrays_of({spec.name: np.zeros(spec.shape, spec.dtype) for spec in inputs})\n"
        "row_count(given), length_of(given['positions'])\n"
        "check_inputs(inputs, given, scratch_allowed=False)\n"
        "print(*{*sys.modules} - before)"
    )
    command = [sys.executable, "-c", code, str(PACKAGE.parent / "tests" / "archives" / "cpu-1.0")]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
