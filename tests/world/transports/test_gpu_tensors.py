"""Tensors on a GPU over "cpu:shm,cuda:shm", without a GPU: the areas are files that all ranks map, or copies.

What needs CUDA's handles and streams is in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from lockstep.errors import ConfigError, TransportError
from lockstep.transports import gpu_tensors
from lockstep.transports.gpu_tensors import GpuTensors, MappedCollectives
from support.faults import attempt
from support.pool import Pool

CPU = torch.device("cpu")


class NoFences:
    """On the CPU a copy has ended when its call returns."""

    def before_writing(self, half: int) -> None: ...
    def written(self, half: int) -> None: ...
    def before_reading(self, half: int) -> None: ...
    def has_read(self, half: int) -> None: ...


def carried(folder: str | None, half_size: int = 64) -> GpuTensors:
    """Return what takes the calls: through areas in files of `folder`, or through copies without one."""
    group: Any = dist.group.WORLD
    tensors = GpuTensors(group, CPU)
    if folder is not None:
        areas = [
            torch.from_file(f"{folder}/{rank}", shared=True, size=2 * half_size, dtype=torch.uint8)
            for rank in range(group.size())
        ]
        dist.barrier()
        tensors._mapped = MappedCollectives(areas, group.rank(), tensors._meet, NoFences())
    return tensors


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).mul(10).to(dtype)


def options(kind: Any, asynchronous: bool = False, **given: Any) -> Any:
    made = kind()
    made.asyncOp = asynchronous
    for name, value in given.items():
        setattr(made, name, value)
    return made


def call(tensors: GpuTensors, name: str, *args: Any) -> Any:
    group: Any = dist.group.WORLD
    work = tensors.run(name, getattr(group, name), args, {})
    work.wait()
    return work


COUNTS = (1, 7, 64, 1000)
DTYPES = (torch.float32, torch.bfloat16, torch.int32)


def check_reductions(tensors: GpuTensors) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in COUNTS:
        for dtype in DTYPES:
            own = [values(each, count, dtype) for each in range(size)]
            wide = [each.float() if dtype is torch.bfloat16 else each for each in own]
            expected = wide[0]
            for each in wide[1:]:
                expected = expected + each
            tensor = own[rank].clone()
            call(tensors, "allreduce", [tensor], options(c10d.AllreduceOptions))
            assert tensor.equal(expected.to(dtype)), (count, dtype)
    largest = values(rank, 9)
    call(tensors, "allreduce", [largest], options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.MAX))
    assert largest.equal(torch.stack([values(each, 9) for each in range(size)]).amax(0))
    strided = values(rank, 40).view(8, 5).t()
    call(tensors, "allreduce", [strided], options(c10d.AllreduceOptions))
    torch.testing.assert_close(strided, sum(values(each, 40).view(8, 5).t() for each in range(size)))
    out = torch.empty(30)
    whole = values(rank, 30 * size)
    call(tensors, "reduce_scatter_single", out, whole, options(c10d.ReduceScatterOptions))
    torch.testing.assert_close(out, sum(values(each, 30 * size).view(size, 30)[rank] for each in range(size)))
    to_root = values(rank, 33)
    call(tensors, "reduce", [to_root], options(c10d.ReduceOptions, rootRank=1))
    torch.testing.assert_close(to_root, sum(values(r, 33) for r in range(size)) if rank == 1 else values(rank, 33))


def check_copies(tensors: GpuTensors) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in COUNTS:
        tensor = values(rank, count)
        call(tensors, "broadcast", [tensor], options(c10d.BroadcastOptions, rootRank=size - 1))
        assert tensor.equal(values(size - 1, count))
        outputs = [torch.empty(count + source) for source in range(size)]
        call(tensors, "allgather", [outputs], [values(rank, count + rank)], options(c10d.AllgatherOptions))
        assert all(out.equal(values(source, count + source)) for source, out in enumerate(outputs))
        whole = torch.empty(size * count)
        call(tensors, "all_gather_single", whole, values(rank, count), options(c10d.AllgatherOptions))
        assert whole.equal(torch.cat([values(source, count) for source in range(size)]))
        inputs = [values(10 * rank + target, count + rank * target) for target in range(size)]
        outputs = [torch.empty(count + rank * source) for source in range(size)]
        call(tensors, "alltoall", outputs, inputs, options(c10d.AllToAllOptions))
        expected = [values(10 * source + rank, count + rank * source) for source in range(size)]
        assert all(out.equal(each) for out, each in zip(outputs, expected, strict=True))
        single = torch.empty(size * count)
        sent = torch.cat([values(10 * rank + target, count) for target in range(size)])
        call(tensors, "all_to_all_single", single, sent, [], [], options(c10d.AllToAllOptions))
        assert single.equal(torch.cat([values(10 * source + rank, count) for source in range(size)]))
    parts = [torch.empty(5) for _ in range(size)] if rank == 0 else []
    call(tensors, "gather", [parts] if rank == 0 else [], [values(rank, 5)], options(c10d.GatherOptions, rootRank=0))
    assert all(part.equal(values(source, 5)) for source, part in enumerate(parts))
    own = torch.empty(5)
    given = [[values(target, 5) for target in range(size)]] if rank == 0 else []
    call(tensors, "scatter", [own], given, options(c10d.ScatterOptions, rootRank=0))
    assert own.equal(values(rank, 5))


def check_messages(tensors: GpuTensors) -> None:
    """Receives that are begun before the sends, as a pair of ranks that exchange tensors does."""
    group: Any = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(6)
    receiving = tensors.run("recv", group.recv, ([received], (rank - 1) % size, 3), {})
    sending = tensors.run("send", group.send, ([values(rank, 6)], (rank + 1) % size, 3), {})
    sending.wait()
    receiving.wait()
    assert received.equal(values((rank - 1) % size, 6))
    group._start_coalescing(CPU)
    received.zero_()
    tensors.run("recv", group.recv, ([received], (rank - 1) % size, 3), {})
    tensors.run("send", group.send, ([values(rank, 6)], (rank + 1) % size, 3), {})
    group._end_coalescing(CPU).wait()
    assert received.equal(values((rank - 1) % size, 6))


def check_futures(tensors: GpuTensors) -> None:
    group: Any = dist.group.WORLD
    tensor = torch.ones(4)
    work = tensors.run("allreduce", group.allreduce, ([tensor], options(c10d.AllreduceOptions, True)), {})
    (result,) = work.get_future().wait()
    assert result.eq(dist.get_world_size()).all()
    assert tensor.eq(dist.get_world_size()).all()


@pytest.mark.parametrize("check", [check_reductions, check_copies, check_messages, check_futures])
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "through the host"])
@pytest.mark.parametrize("workers", [2, 3])
def test_collectives(
    pool: Pool, tmp_path: Path, workers: int, mapped: bool, check: Callable[[GpuTensors], None]
) -> None:
    def body() -> None:
        dist.init_process_group("shm")
        before = gpu_tensors._is_on_host
        gpu_tensors._is_on_host = lambda tensor: False  # so that tensors of the CPU are copied as those of a GPU
        try:
            check(carried(str(tmp_path) if mapped else None))
        finally:
            gpu_tensors._is_on_host = before

    pool.run(body, workers=workers, init=False)


@pytest.mark.parametrize("case", ["size", "dtype", "collective"])
def test_calls_that_differ_are_an_error_on_every_rank(pool: Pool, tmp_path: Path, case: str) -> None:
    def body() -> str:
        dist.init_process_group("shm")
        tensors = carried(str(tmp_path))
        dtype = torch.float64 if case == "dtype" and dist.get_rank() else torch.float32
        tensor = torch.ones(5 if case == "size" and dist.get_rank() else 4, dtype=dtype)
        name, made = "allreduce", options(c10d.AllreduceOptions)
        if case == "collective" and dist.get_rank():
            name, made = "broadcast", options(c10d.BroadcastOptions, rootRank=0)
        ended = attempt(lambda: call(tensors, name, [tensor], made))
        assert ended.kind == TransportError.__name__
        return ended.text

    first, second = pool.run(body, init=False)
    texts = {
        "size": ("rank 1 has 20 bytes in all_reduce, where rank 0 has 16", "rank 0 has 16 bytes in all_reduce"),
        "dtype": ("rank 1 has float64 in all_reduce, where rank 0 has float32", "rank 0 has float32 in all_reduce"),
        "collective": ("rank 1 has called another collective where rank 0 has called all_reduce", "rank 0 has called"),
    }
    for text, expected in zip((first, second), texts[case], strict=True):
        assert expected in text


def test_parts_that_do_not_fit_are_refused(pool: Pool, tmp_path: Path) -> None:
    def body() -> None:
        dist.init_process_group("shm")
        tensors = carried(str(tmp_path))
        ended = attempt(
            lambda: call(tensors, "all_gather_single", torch.empty(7), torch.ones(3), options(c10d.AllgatherOptions))
        )
        assert ended.kind == ConfigError.__name__
        assert "output: expected a number of elements divisible by 2 ranks, got 7" in ended.text

    pool.run(body, init=False)


def test_a_group_that_is_named_for_another_device_takes_its_tensors(pool: Pool) -> None:
    """With a device that every host has; it holds no values, so that only the call is seen."""

    def body() -> list[str]:
        dist.init_process_group("cpu:shm,meta:shm")
        called: list[str] = []

        def run(self: GpuTensors, name: str, *_: Any) -> Any:
            called.append(name)
            return gpu_tensors.CPUWork([], device=None)

        before, GpuTensors.run = GpuTensors.run, run  # type: ignore[method-assign]
        try:
            dist.all_reduce(torch.empty(3, device="meta"))
            total = torch.ones(3)
            dist.all_reduce(total)
            assert total.eq(2).all()
        finally:
            GpuTensors.run = before  # type: ignore[method-assign]
        return called

    assert pool.run(body, init=False) == [["allreduce"]] * 2
