"""Step models for tests: one that can be captured, and ones that cannot, each with its culprit on a marked line."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, library, nn

from graphpack.graph import Bucket, TensorSpec

WIDTH = 8


class Step:
    """A step of a module: `x` and `y` are `[batch, 8]`; state, if it has any, is `seen`, `[8]`."""

    def __init__(self, module: nn.Module, *, dtype: str = "float32", stateful: bool = False) -> None:
        self.module = module
        self.dtype = dtype
        self.stateful = stateful

    def module_for(self, bucket: Bucket) -> nn.Module:
        return self.module

    def inputs(self, bucket: Bucket, slots: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="x", dtype=self.dtype, shape=(bucket.batch_size, WIDTH)),)

    def outputs(self, bucket: Bucket) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="y", dtype=self.dtype, shape=(bucket.batch_size, WIDTH)),)

    def state(self, slots: int, seq_len: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="seen", dtype=self.dtype, shape=(WIDTH,)),) if self.stateful else ()


class Normed(nn.Module):
    """Everything AOTInductor likes to turn into literals: a norm weight of head_dim 8, a scale without a dimension,
    a table that no checkpoint has. It drops values when in training mode, and remembers the sum of its inputs."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(WIDTH, dtype=torch.float32) / 4, persistent=False)
        values = torch.Generator().manual_seed(20)
        with torch.no_grad():
            for parameter in (self.norm.weight, self.proj.weight, self.proj.bias):
                parameter.copy_(torch.randn(parameter.shape, generator=values))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(x.sum(0))
        result: Tensor = self.proj(self.dropout(self.norm(x) * self.scale + self.table)) + seen
        return result


def normed() -> Step:
    """Left in training mode, as a caller who has just trained it would."""
    return Step(Normed().train(), stateful=True)


class _Culprit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)


class Item(_Culprit):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.sum().item()  # the culprit
        result: Tensor = self.proj(x) * scale
        return result


class Masked(_Culprit):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.proj(x)
        picked = result[result > 0]  # the culprit
        return result + picked.sum()


class Branch(_Culprit):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.proj(x)
        if x.sum() > 0:  # the culprit
            result = result + 1
        return result


class Noise(_Culprit):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.proj(x)
        return result + torch.rand_like(result)  # the culprit


class FunctionalDropout(_Culprit):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.proj(x)
        return nn.functional.dropout(result, 0.5, training=True)  # the culprit


@library.custom_op("graphpack_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operation that exists in Python only."""
    return 2 * x


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Proxied(_Culprit):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = twice(self.proj(x))  # the culprit
        return result


class Wide(_Culprit):
    """Gives something else than a step says it gives."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result: Tensor = self.proj(x)
        return torch.cat([result, result], dim=1), result


class Flat(_Culprit):
    """Gives no value a row."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.proj(x)
        return result.sum(1)


def item() -> Step:
    return Step(Item().eval())


def masked() -> Step:
    return Step(Masked().eval())


def branch() -> Step:
    return Step(Branch().eval())


def noise() -> Step:
    return Step(Noise().eval())


def functional_dropout() -> Step:
    return Step(FunctionalDropout().eval())


def proxied() -> Step:
    return Step(Proxied().eval())


def wide() -> Step:
    return Step(Wide().eval())


class FlatStep(Step):
    def outputs(self, bucket: Bucket) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="y", dtype="float32", shape=(bucket.batch_size,)),)


def flat() -> Step:
    return FlatStep(Flat().eval())


def culprit(module: type[nn.Module]) -> str:
    """`file:line` of the marked line of a module."""
    lines: Sequence[str]
    lines, first = inspect.getsourcelines(module)
    (offset,) = [number for number, line in enumerate(lines) if "# the culprit" in line]
    return f"{Path(inspect.getfile(module))}:{first + offset}"
