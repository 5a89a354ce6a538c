"""What is asked of torch: the mode it is in, and what an operation is and where it was called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphpack.archive.record import Record
from graphpack.errors import LayoutMismatchError, Problem, UsageError

TORCH = Path(torch.__file__).parent
"""Where torch itself is: its frames are not the model's."""


def refuse_modes(device_type: str) -> None:
    """Raise UsageError for what is set around a capture on `device_type`, `cpu` or `cuda`: it would change the graph,
    and nothing in the model's identity would show it."""
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    modes = (
        ("autocast", "off", "on", torch.is_autocast_enabled(device_type)),
        ("inference mode", "off", "on", torch.is_inference_mode_enabled()),
        ("default device", "cpu", str(device), device.type != "cpu"),
        ("default dtype", "torch.float32", str(dtype), dtype != torch.float32),
    )
    problems = [
        Problem(f"torch {name}", f"{wanted} at save", here, "save outside of it")
        for name, wanted, here, wrong in modes
        if wrong
    ]
    if problems:
        raise UsageError("torch is in a mode that the graph would silently take over", problems)


def check_precision(record: Record) -> None:
    """Raise LayoutMismatchError if torch computes float32 products otherwise than the graphs of an entry."""
    archived, here = record.settings.float32_matmul_precision, torch.get_float32_matmul_precision()
    if archived != here:
        where = "settings.float32_matmul_precision"
        problem = Problem(where, archived, here, f"torch.set_float32_matmul_precision({archived!r})")
        raise LayoutMismatchError("torch computes float32 products otherwise than the graphs", [problem])


def draws_random_numbers(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an OpOverload is random. One that can drop values was perhaps told not to: attention without
    dropout, dropout in evaluation."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dropout_is_off = given.get("train") is False or ("dropout_p" in names and not given.get("dropout_p"))
    return not dropout_is_off


def node_line(node: torch.fx.Node) -> str:
    """`file:line` of the innermost model frame torch recorded for a node."""
    trace_lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    for line in reversed(trace_lines):
        file, _, rest = line.removeprefix('File "').partition('", line ')
        if TORCH not in Path(file).parents and not file.startswith("<"):
            return f"{file}:{rest.split(',')[0]}"
    return "the model"
