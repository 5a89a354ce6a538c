"""What a captured graph cannot hold, refused at save with the model's line."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import torch

import graphpack
from graphpack import CaptureRefusedError, GraphpackError, StorageError, UsageError
from graphpack.backends.cpu import compile as cpu_compile
from graphpack.backends.cpu import export
from graphpack.graph import Bucket, TensorSpec
from tests import models_for_tests
from tests.capture.conftest import Save

pytestmark = pytest.mark.filterwarnings("default")

CANNOT = "the model does something that a captured graph cannot hold"
BRANCHES = (
    "a value or size depends on data, so one graph cannot serve every input (Could not guard on data-dependent "
    "expression Eq(u0, 1) (unhinted: Eq(u0, 1)).  (Size-like symbols: none))"
)
REFUSED: dict[str, tuple[type[torch.nn.Module], str, str, str]] = {
    "item": (
        models_for_tests.Item,
        CANNOT,
        "aten.item.default takes a value out of the graph, and it depends on data",
        "keep it a tensor",
    ),
    "masked": (
        models_for_tests.Masked,
        CANNOT,
        "the size of the result of aten.index.Tensor depends on data",
        "use a mask of fixed shape instead",
    ),
    "branch": (
        models_for_tests.Branch,
        CANNOT,
        BRANCHES,
        "compute it outside the step, or with operations of fixed shape",
    ),
    "noise": (models_for_tests.Noise, CANNOT, "aten.rand_like.default draws random numbers", "sample outside the step"),
    "functional_dropout": (
        models_for_tests.FunctionalDropout,
        CANNOT,
        "aten.dropout.default draws random numbers",
        "sample outside the step",
    ),
    "proxied": (
        models_for_tests.Proxied,
        "the step needs operations that run only inside Python",
        "graphpack_tests::twice has no C interface in this torch",
        "compute it outside the step",
    ),
}


def save(factory: str, target: Path) -> None:
    graphpack.save(f"tests.models_for_tests:{factory}", target, batch_sizes=(2,), seq_lens=(16,))


@pytest.mark.parametrize("factory", REFUSED)
def test_the_refusal_names_the_line_and_the_rule_and_leaves_nothing(
    factory: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module, message, reason, hint = REFUSED[factory]
    with pytest.raises(CaptureRefusedError) as refusal:
        save(factory, tmp_path / "folder" / "archive")
    line = models_for_tests.culprit(module)
    assert str(refusal.value) == f"{message}\n  {line}: here {reason}\n    -> {hint}"
    assert refusal.value.code == 9
    assert list(tmp_path.iterdir()) == []
    assert "def forward" not in capfd.readouterr().err


def test_after_refusals_the_next_save_in_the_process_passes(save_normed: Save, tmp_path: Path) -> None:
    for factory in ("branch", "noise"):
        with pytest.raises(CaptureRefusedError):
            save(factory, tmp_path / "archive")
    assert save_normed().action == "saved"


@pytest.mark.parametrize(
    ("factory", "lines"),
    [
        ("wide", "  outputs: archived 1 declared, here 2 returned\n  y: archived float32 [2, 8], here float32 [2, 16]"),
        ("flat", "  the first output: archived floating [2, n], here float32 [2]"),
    ],
)
def test_outputs_that_are_not_as_declared_are_refused(factory: str, lines: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        save(factory, tmp_path / "archive")
    message = "the model's outputs for bucket 2x16 cannot be captured as it declares them"
    assert str(refusal.value) == f"{message}\n{lines}"
    assert list(tmp_path.iterdir()) == []


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, tuple[Callable[[], object], str]] = {
    "autocast": (lambda: torch.autocast("cpu"), "torch autocast: archived off at save, here on"),
    "inference mode": (torch.inference_mode, "torch inference mode: archived off at save, here on"),
    "default dtype": (default_dtype, "torch default dtype: archived torch.float32 at save, here torch.bfloat16"),
    "default device": (lambda: torch.device("meta"), "torch default device: archived cpu at save, here meta"),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_torch_that_the_graph_would_take_over_is_refused(mode: str, tmp_path: Path) -> None:
    enter, line = MODES[mode]
    with pytest.raises(UsageError) as refusal, enter():  # type: ignore[attr-defined]
        graphpack.save("tiny-llama", tmp_path / "archive", batch_sizes=(1,), seq_lens=(16,))
    message = "torch is in a mode that the graph would silently take over"
    assert str(refusal.value) == f"{message}\n  {line}\n    -> save outside of it"
    assert list(tmp_path.iterdir()) == []


def traced(module: torch.nn.Module) -> export.TracedStep:
    step = models_for_tests.Step(module, stateful=True)
    weights = frozenset(name for name, _ in module.named_parameters())
    return export.trace(module, step.inputs(Bucket(2, 16), 3), step.state(3, 16), weights)


def test_a_model_left_in_training_is_captured_in_evaluation_and_left_as_it_was() -> None:
    module = models_for_tests.Normed().train()
    module.norm.eval()
    flags = {name: part.training for name, part in module.named_modules()}
    torch.manual_seed(5)
    random = torch.get_rng_state()
    step = traced(module)
    assert {name: part.training for name, part in module.named_modules()} == flags
    assert torch.equal(torch.get_rng_state(), random)
    assert step.topology == traced(models_for_tests.Normed().eval()).topology
    (dropout,) = [node for node in step.program.graph.nodes if "dropout" in str(node.target)]
    assert dropout.args[2] is False


def test_a_step_larger_than_the_machine_is_refused_before_memory_is_touched() -> None:
    """The kernel gives the memory away and then ends whoever uses it."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    state = (TensorSpec(name="seen", dtype="float32", shape=(there // 4,)),)
    step = models_for_tests.Step(models_for_tests.Normed(), stateful=True)
    inputs = step.inputs(Bucket(2, 16), 3)
    with pytest.raises(StorageError) as refusal:
        export.trace(step.module, inputs, state, frozenset())
    needed = state[0].bytes + sum(spec.bytes for spec in inputs)
    assert str(refusal.value) == (
        "this machine has too little memory for the inputs and the state of a step\n"
        f"  memory: archived needs {needed} bytes, here {there} bytes\n"
        "    -> save with fewer slots, smaller batches or shorter sequences"
    )


def test_flags_and_random_numbers_are_as_before_a_refused_model() -> None:
    module = models_for_tests.Noise().train()
    random = torch.get_rng_state()
    step = models_for_tests.Step(module)
    with pytest.raises(CaptureRefusedError):
        export.trace(module, step.inputs(Bucket(2, 16), 3), (), frozenset())
    assert module.training
    assert torch.equal(torch.get_rng_state(), random)


def test_attention_without_dropout_is_not_random() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            rows = x[None, None]
            attended = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.0)
            return attended[0, 0] + seen

    assert traced(Attention()).nodes > 0


def test_control_flow_is_refused_by_name() -> None:
    class Controlled(torch.nn.Module):
        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))
            return result + seen

    with pytest.raises(CaptureRefusedError) as refusal:
        traced(Controlled())
    (problem,) = refusal.value.problems
    assert problem.where.startswith(f"{Path(__file__)}:")
    assert (problem.here, problem.hint) == ("cond is control flow", "a graph holds one fixed sequence")


# --- No room


def test_no_room_for_temporary_files_is_no_fault_of_the_model(
    save_normed: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor raises an error of its own, whatever the system said."""

    def refuse(*_: object, **__: object) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RuntimeError(f"OSError: {error}") from None

    monkeypatch.setattr(torch._inductor, "aot_compile", refuse)
    with pytest.raises(StorageError, match="no room for temporary files: No space left on device") as caught:
        save_normed()
    assert caught.value.problems[0].where == tempfile.gettempdir()
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize(
    "where", [(torch._inductor, "aot_compile"), (torch.export, "export")], ids=lambda pair: pair[1]
)
def test_no_memory_is_no_fault_of_the_model(
    where: tuple[types.ModuleType, str], save_normed: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        try:
            raise MemoryError
        except MemoryError as error:
            raise ValueError("something in the compiler") from error

    monkeypatch.setattr(*where, refuse)
    with pytest.raises(StorageError, match=r"the system has too little to (compile the step|trace the model)"):
        save_normed()
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize(
    "said", ["cc1plus: out of memory allocating 65536 bytes", "virtual memory exhausted: Cannot allocate memory"]
)
def test_a_compiler_without_memory_is_no_bug(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "short"
    short.write_text(f"#!/bin/sh\necho 'step.cpp:1: warning' >&2\necho '{said}' >&2\nexit 1\n")
    short.chmod(0o755)
    monkeypatch.setenv("CXX", str(short))
    flags: dict[str, list[str]] = {"cflags": [], "definitions": [], "include_dirs": [], "libraries_dirs": []}
    (tmp_path / "step.wrapper_linker_flags.json").write_text(json.dumps(flags))
    with pytest.raises(StorageError, match="too little to compile the step") as caught:
        cpu_compile.build(tmp_path, "name.so", Event())
    assert caught.value.problems[0].here == said


def test_a_compiler_without_room_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.write_text("#!/bin/sh\necho 'fatal error: error writing to /tmp/x.s: No space left on device' >&2\nexit 1\n")
    full.chmod(0o755)
    monkeypatch.setenv("CXX", str(full))
    flags: dict[str, list[str]] = {"cflags": [], "definitions": [], "include_dirs": [], "libraries_dirs": []}
    (tmp_path / "step.wrapper_linker_flags.json").write_text(json.dumps(flags))
    with pytest.raises(StorageError, match="no room for the compiler's files"):
        cpu_compile.build(tmp_path, "name.so", Event())
    full.write_text("#!/bin/sh\necho 'error: something else' >&2\nexit 1\n")
    with pytest.raises(GraphpackError, match="something else"):
        cpu_compile.build(tmp_path, "name.so", Event())
