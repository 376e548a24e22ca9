"""Calls in words."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.watchdog.signatures import OPERATIONS, describe_call


def test_calls_are_described_in_text() -> None:
    opts = dist.AllreduceOptions()
    opts.reduceOp = dist.ReduceOp.MAX
    operation, key_of = OPERATIONS["allreduce"]
    assert (
        describe_call(operation, key_of([torch.ones(2, 3)], opts))
        == "all_reduce(float32[2, 3], max)"
    )
    many = key_of([torch.ones(n) for n in range(1, 9)], opts)
    assert (
        describe_call(operation, many)
        == "all_reduce(float32[1], float32[2], float32[3], … 5 more, max)"
    )
    operation, key_of = OPERATIONS["alltoall"]
    assert key_of([torch.ones(3)], [torch.ones(4)]) == key_of([torch.ones(5)], [torch.ones(6)])
