"""The tensor a step returns, through numpy and DLPack."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from graphpack.tensor import Tensor, carrier_of

DTYPES = ("float32", "bfloat16", "float16", "int64")


def of_torch(dtype: str) -> torch.Tensor:
    return torch.arange(-3, 3).to(getattr(torch, dtype)).reshape(2, 3)


def tensor(dtype: str) -> Tensor:
    """The same values, in the array that carries them."""
    values = of_torch(dtype)
    return Tensor((values.view(torch.uint16) if dtype == "bfloat16" else values).numpy().copy(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_takes_it_with_its_own_dtype_and_memory(dtype: str) -> None:
    ours = tensor(dtype)
    taken = from_dlpack(ours)
    assert torch.equal(taken, of_torch(dtype))
    taken[0, 0] = 7
    assert ours.numpy()[0, 0] == 7


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_numpy_takes_it_with_its_own_memory(dtype: str) -> None:
    ours = tensor(dtype)
    taken = np.from_dlpack(ours)
    assert (taken.dtype.name, taken.tolist()) == (dtype, of_torch(dtype).tolist())
    assert np.shares_memory(taken, np.from_dlpack(ours))


def test_numpy_has_no_bfloat16_and_says_so() -> None:
    with pytest.raises((BufferError, RuntimeError), match=r"^Unsupported dtype in DLTensor\.$"):
        np.from_dlpack(tensor("bfloat16"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numpy_values_are_those_of_torch(dtype: str) -> None:
    ours = tensor(dtype)
    assert ours.numpy().dtype.name == {"int64": "int64"}.get(dtype, "float32")
    np.testing.assert_array_equal(ours.numpy(), of_torch(dtype).to(torch.float64).numpy())
    np.testing.assert_array_equal(np.asarray(ours, dtype=np.float64), of_torch(dtype).to(torch.float64).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_torch_hands_out_comes_back_without_a_copy(dtype: str) -> None:
    theirs = of_torch(dtype)
    carried = carrier_of(theirs)
    assert carried.ctypes.data == theirs.data_ptr()
    assert carried.dtype.name == ("uint16" if dtype == "bfloat16" else dtype)
    assert torch.equal(from_dlpack(Tensor(carried.copy(), dtype)), theirs)
    np.testing.assert_array_equal(carrier_of(tensor(dtype)), carried)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_consumer_keeps_the_memory_when_the_tensor_is_gone(dtype: str) -> None:
    ours = tensor(dtype)
    memory = weakref.ref(ours._array)
    taken = from_dlpack(ours)
    del ours
    gc.collect()
    assert memory() is not None
    assert torch.equal(taken, of_torch(dtype))
    del taken
    gc.collect()
    assert memory() is None


def test_a_capsule_that_nobody_takes_gives_the_memory_back() -> None:
    ours = tensor("bfloat16")
    memory = weakref.ref(ours._array)
    capsules = [ours.__dlpack__() for _ in range(3)]
    del ours
    gc.collect()
    assert memory() is not None
    del capsules
    gc.collect()
    assert memory() is None


def test_a_copy_through_dlpack_shares_nothing() -> None:
    ours = tensor("float32")
    copied = from_dlpack(ours.__dlpack__(copy=True))
    copied[:] = 9
    assert ours.numpy()[0, 0] == -3


def test_it_is_on_the_cpu_and_stays_there() -> None:
    ours = tensor("float32")
    assert ours.__dlpack_device__() == (1, 0)
    assert ours.__dlpack__(dl_device=(1, 0)) is not None
    with pytest.raises(BufferError, match=r"^a tensor on the CPU is not copied to DLPack device \(2, 0\)$"):
        ours.__dlpack__(dl_device=(2, 0))


def test_it_says_what_it_is() -> None:
    ours = tensor("bfloat16")
    assert (repr(ours), ours.shape, ours.dtype) == ("Tensor(shape=(2, 3), dtype=bfloat16)", (2, 3), "bfloat16")


@pytest.mark.parametrize(
    ("producer", "reason"),
    [
        (torch.zeros(1, device="meta"), "Unknown device type meta for Dlpack"),
        (torch.ones(1, requires_grad=True), "Can't export tensors that require gradient, use tensor.detach()"),
        (torch.ones(2).to_sparse(), "Can't export tensors with layout other than torch.strided"),
    ],
)
def test_what_its_producer_does_not_hand_out_is_one_kind_of_error(producer: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as refusal:
        carrier_of(producer)
    assert str(refusal.value) == reason
