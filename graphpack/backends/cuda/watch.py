"""The model's own operations, watched as they run before capture: what a graph cannot hold is refused by source line.

During capture torch can only say that some call was not permitted. Here each operation passes with its arguments.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import graphpack
from graphpack.errors import CaptureRefusedError, Problem
from graphpack.modes import draws_random_numbers

_TORCH = Path(torch.__file__).parent
_PACKAGE = Path(graphpack.__file__).parent
_MODELS = _PACKAGE / "models"
_DEFAULT_STREAM = 0


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses, with the model's line, what draws random numbers, waits for the device, reads from or writes to the
    host, has a result whose size depends on data, or runs on the default stream. Raises CaptureRefusedError."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        reason = _before(func, args, kwargs)
        result = None if reason else func(*args, **kwargs)
        reason = reason or _after(args, kwargs, result)
        if reason:
            what, hint = reason
            problem = Problem(model_line(), "", f"{func} {what}", hint)
            raise CaptureRefusedError("the model does something that a captured graph cannot hold", [problem])
        return result


def _before(func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[str, str] | None:
    tags = func.tags
    if draws_random_numbers(func, args, kwargs):
        return "draws random numbers", "sample outside the step"
    if torch.Tag.dynamic_output_shape in tags and not _has_fixed_shape(func, args, kwargs):
        return "has a result whose size depends on data", "use a mask of fixed shape instead"
    if torch.Tag.data_dependent_output in tags and any(tensor.is_cuda for tensor in _tensors(args)):
        return "waits for a value from the device", "compute it outside the step, or on the device"
    if torch.cuda.current_stream().cuda_stream == _DEFAULT_STREAM:
        return "runs on the default stream, which a capture does not see", "use the current stream"
    return None


def _after(args: Any, kwargs: Mapping[str, Any], result: Any) -> tuple[str, str] | None:
    given = [tensor.is_cuda for tensor in _tensors((args, kwargs)) if tensor.dim() or tensor.is_cuda]
    gives = [tensor.is_cuda for tensor in _tensors(result)]
    # Where a tensor goes is said by the result; `copy_` says it by its first argument, which is the result.
    if any(given) and gives and not any(gives):
        return "copies from the device to the host", "read results outside the step"
    if any(gives) and given and not all(given):
        return "reads a tensor of the host in every step", "make it a buffer of the module, or an input"
    return None


def _has_fixed_shape(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation that can have a result of any size was called so that it cannot."""
    if func is torch.ops.aten.index.Tensor:
        return not any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    return kwargs.get("output_size") is not None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def model_line() -> str:
    """`file:line` of the innermost frame of the caller that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_model(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "the model"


def blamed(error: BaseException) -> tuple[BaseException, str]:
    """Of an error and those it came from, the last in which the model's code stands; and the model's `file:line`.

    An error inside a capture is followed by another, when the capture ends.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        for frame in reversed(traceback.extract_tb(current.__traceback__)):
            if _is_model(frame.filename):
                return current, f"{frame.filename}:{frame.lineno}"
        seen.append(current)
        current = current.__cause__ or current.__context__
    return error, "the model"


def _is_model(filename: str) -> bool:
    path = Path(filename)
    own = _PACKAGE in path.parents and _MODELS not in path.parents
    return path.is_file() and not own and _TORCH not in path.parents and path.name != "contextlib.py"
