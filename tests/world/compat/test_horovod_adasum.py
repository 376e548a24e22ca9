"""Adasum over the ranks of a job, by itself and inside DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.communicator.adasum import adasum_, adasum_hook, combine


def tensors_of(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(rank)
    shapes: list[tuple[int, ...]] = [(5, 7), (), (0,), (3,)]
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


def expected(ranks: int) -> list[torch.Tensor]:
    """The tree over ranks, written out by levels."""
    level = [tensors_of(rank, torch.float64) for rank in range(ranks)]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [
            [combine(*both) for both in zip(*pair, strict=True)] if len(pair) == 2 else pair[0]
            for pair in pairs
        ]
    return level[0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_tensor_is_combined_in_the_tree_over_ranks(pool: Any, ranks: int) -> None:
    def body() -> list[list[torch.Tensor]]:
        found = []
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            tensors = tensors_of(dist.get_rank(), dtype)
            adasum_(tensors)
            found.append(tensors)
        return found

    answers = pool.run(body, workers=ranks, backend="shm")
    for answer in answers:
        for tensors, tolerance in zip(answer, (1e-12, 1e-5, 3e-2), strict=True):
            for tensor, right in zip(tensors, expected(ranks), strict=True):
                torch.testing.assert_close(tensor.double(), right, rtol=tolerance, atol=tolerance)
        for mine, first in zip(answer, answers[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True))


def test_ddp_takes_it_as_a_hook(pool: Any) -> None:
    def body() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        local = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, adasum_hook)
        ddp(x).square().sum().backward()
        return list(local), [p.grad for p in model.parameters() if p.grad is not None]

    (first, found), (second, same) = pool.run(body, workers=2)
    for a, b, c, d in zip(first, second, found, same, strict=True):
        torch.testing.assert_close(c, combine(a, b))
        assert torch.equal(c, d)
