"""`package.module:factory`: a step model made by code that the user names."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpack.dtypes import COMPUTE_DTYPES, DTYPES
from graphpack.errors import NotFoundError, Problem, UsageError
from graphpack.graph import Bucket
from graphpack.models.checkpoint import open_checkpoint
from graphpack.models.step import METHODS, StepModel
from graphpack.models.weights import WeightSource
from graphpack.refused import too_little

if TYPE_CHECKING:
    import torch

PROBE = Bucket(1, 16)
"""The bucket whose module is asked for parameters; they are the same for all."""


class FactoryModel:
    """The step model that a factory returned, and what graphpack wants to know about it."""

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self.factory = _import(reference)
        self.step = _call(reference, self.factory)
        self.module = self.step.module_for(PROBE)
        self.directory = _weights_directory(reference, self.step)
        self.architecture = str(getattr(self.step, "architecture", type(self.step).__qualname__))
        self.config = _plain_config(reference, self.step)
        self.stored_dtype = self._floating_dtype()

    def open_weights(self) -> WeightSource:
        """Tensors of the module's `state_dict`, in its memory or in the directory it names; equal storage is a tie."""
        if self.directory is not None:
            _, aliases = _distinct(self.module)
            shapes = {name: tuple(tensor.shape) for name, tensor in self.module.state_dict().items()}
            return open_checkpoint(self.directory, shapes, aliases)
        return weights_of(self.module)

    def build(self, weights: WeightSource, dtype: str) -> StepModel:
        """The step model, holding the weights of its directory if it has one.

        Raises UsageError for a `dtype` other than the factory's own: only its code can change that.
        """
        if dtype != self.stored_dtype:
            here = f"{self.reference} makes {self.stored_dtype}"
            raise UsageError(f"cannot run a factory's model in {dtype}: {here}; let the factory make it so")
        if self.directory is not None:
            self._bind(weights)
        return self.step

    def source_files(self) -> dict[str, Path]:
        """Module name -> source file, of the factory, the step model and every class of the module outside torch."""
        names = {base.__module__ for base in type(self.step).__mro__} | defining_modules(self.module)
        names.add(self.reference.partition(":")[0])
        names.add(getattr(inspect.unwrap(self.factory), "__module__", None) or "builtins")
        return files_of(names)

    def _bind(self, weights: WeightSource) -> None:
        from graphpack.models.decoder import bound_tensor

        for name, tensor in self.module.state_dict(keep_vars=True).items():
            tensor.data = bound_tensor(weights, name, _dtype(tensor))

    def _floating_dtype(self) -> str:
        """That of the first parameter, or buffer, that a model can be captured in."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return next((dtype for tensor in tensors if (dtype := _dtype(tensor)) in COMPUTE_DTYPES), "float32")


def weights_of(module: torch.nn.Module) -> WeightSource:
    """The tensors of a module's `state_dict`, those on a CPU where they lie; equal storage is a tie."""
    tensors, aliases = _distinct(module)
    arrays = {name: _array(tensor) for name, tensor in tensors.items()}
    dtypes = {name: _dtype(tensor) for name, tensor in tensors.items()}
    return WeightSource.from_arrays(arrays, dtypes, aliases)


def defining_modules(module: torch.nn.Module) -> set[str]:
    """Names of the Python modules that define the classes of a module's parts."""
    return {base.__module__ for part in module.modules() for base in type(part).__mro__}


def files_of(names: Iterable[str]) -> dict[str, Path]:
    """The source file of each of these Python modules that has one, torch's and the interpreter's left out."""
    return {name: file for name in names if (file := _source_file(name)) is not None}


def _import(reference: str) -> Callable[[], Any]:
    module_name, _, path = reference.partition(":")
    here = str(Path.cwd())
    # An installed command does not have the current directory on its path, `python -m` does.
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        missing = NotFoundError(f"cannot import module '{module_name}' of '{reference}': {error}")
        raise too_little(f"import module '{module_name}'", error) or missing from error
    except Exception as error:
        failed = UsageError(f"module '{module_name}' failed to import: {type(error).__name__}: {error}")
        raise too_little(f"import module '{module_name}'", error) or failed from error
    for part in path.split("."):
        if not hasattr(target, part):
            raise NotFoundError(f"module '{module_name}' has no attribute '{path}'")
        target = getattr(target, part)
    if not callable(target):
        raise UsageError(f"'{reference}' is not callable: a factory takes no arguments and returns a step model")
    factory: Callable[[], Any] = target
    return factory


def _call(reference: str, factory: Callable[[], Any]) -> StepModel:
    try:
        step = factory()
    except Exception as error:
        failed = UsageError(f"factory '{reference}' failed: {type(error).__name__}: {error}")
        raise too_little(f"call factory '{reference}'", error) or failed from error
    missing = [name for name in METHODS if not callable(getattr(step, name, None))]
    if missing:
        problems = [Problem(f"{type(step).__qualname__}.{name}", here="missing") for name in missing]
        raise UsageError(f"factory '{reference}' returned no step model (see graphpack.models.step)", problems)
    model: StepModel = step
    return model


def _weights_directory(reference: str, step: StepModel) -> Path | None:
    directory = getattr(step, "weights_directory", None)
    if directory is None or isinstance(directory, Path):
        return directory
    raise UsageError(f"factory '{reference}': weights_directory must be a pathlib.Path or None")


def _plain_config(reference: str, step: StepModel) -> dict[str, Any]:
    config = getattr(step, "config", {})
    if not isinstance(config, Mapping) or not _plain(config):
        raise UsageError(f"factory '{reference}': config must be a map of plain values")
    return dict(config)


def _plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(type(key) is str and _plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def _source_file(name: str) -> Path | None:
    if name.partition(".")[0] in ("builtins", "torch", "typing", "abc"):
        return None
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file) if file is not None else None


def _distinct(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors by name, and later name -> first name for those over the same memory."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in module.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first.setdefault(place, name)
            tensors[name] = tensor
    return tensors, aliases


def _dtype(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(f"graphpack cannot store a tensor of dtype {name}")
    return name


def _array(tensor: torch.Tensor) -> Any:
    """A numpy array over the tensor's memory, in the type that carries its bytes."""
    import torch

    dense = tensor.detach().cpu().contiguous()
    flat = dense.reshape(-1).view(torch.uint8).numpy().view(DTYPES[_dtype(dense)].numpy)
    return flat.reshape(tuple(dense.shape))
