"""Sums over devices are the same everywhere, and in the order of the devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.replicas import allreduce_, broadcast_


@pytest.mark.parametrize("shape", [(3, 35), (2,), (1,), (0,), ()])
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_all_have_the_sum_in_the_order_of_devices(shape: tuple[int, ...], devices: int) -> None:
    tensors = [torch.randn(shape) * 10**number for number in range(devices)]
    expected = tensors[0].clone()
    for tensor in tensors[1:]:
        expected += tensor
    allreduce_(tensors)
    assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_tensors_that_are_not_contiguous() -> None:
    tensors = [torch.ones(4, 3).t(), torch.full((3, 4), 2.0)]
    allreduce_(tensors)
    assert all(tensor.eq(3).all() for tensor in tensors)


def test_leaves_that_want_a_gradient() -> None:
    tensors = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    allreduce_(tensors)
    broadcast_(tensors)
    assert [tensor.tolist() for tensor in tensors] == [[2, 2], [2, 2]]
    assert all(tensor.is_leaf for tensor in tensors)


def test_broadcast_copies_the_first() -> None:
    tensors = [torch.ones(2), torch.zeros(2), torch.zeros(2)]
    broadcast_(tensors)
    assert all(tensor.eq(1).all() for tensor in tensors)
    tensors[0].zero_()
    assert tensors[1].eq(1).all()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([], "none"),
        ([torch.ones(2), torch.ones(3)], "one shape"),
        ([torch.ones(2), torch.ones(2).double()], "one shape, dtype"),
        ([torch.ones(2).to_sparse(), torch.ones(2).to_sparse()], "dense"),
        ([torch.ones(2)] * 2, "the same tensor twice"),
        (torch.ones(2, 3), "a list with a tensor for each device, got Tensor"),
        ([torch.ones(2), 1], "a list with a tensor for each device, got list"),
    ],
)
def test_tensors_that_cannot_be_summed(tensors: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        allreduce_(tensors)
