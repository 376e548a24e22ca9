"""Ranks on virtual hosts: results as ever, and nothing arrives sooner than the emulated network
allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.emulation import delayed_groups
from lockstep.network import parse_network
from support.conformance import Case, offered
from support.operations import OPERATIONS, perform
from support.pool import Pool


@contextmanager
def emulated(folder: Path, network: str, backend: str, timeout_s: float = 60.0) -> Iterator[Any]:
    """The default group on the virtual hosts of `network`; give its class."""
    rank, size = (
        delayed_groups.environment.find_world().rank,
        delayed_groups.environment.find_world().world_size,
    )
    parsed = parse_network(network)
    delayed_groups.install(parsed, folder, parsed.host_of(rank, size))
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        yield type(dist.group.WORLD).__name__
        dist.barrier()
    finally:
        dist.destroy_process_group()
        delayed_groups.uninstall()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_every_operation_gives_what_it_gives_elsewhere(
    pool: Pool, tmp_path: Path, backend: str
) -> None:
    def body() -> str:
        with emulated(tmp_path, "2 hosts, 10Gbit, 5us, jitter 5us", backend) as kind:
            for name in OPERATIONS:
                for dtype in (torch.float32, torch.int64):
                    for case in offered("gloo", name, [Case((4, 3), dtype)]):
                        perform(name, case)
            for name in ("all_reduce", "broadcast", "all_gather", "barrier"):
                works, check = OPERATIONS[name](Case((1000,)), True)
                for work in works:
                    work.wait()
                check()
            model = DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
            model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
            assert model.module.weight.grad.eq(1.0).all()  # type: ignore[union-attr]
            del model
        return str(kind)

    kinds = pool.run(body, workers=3, init=False)
    assert kinds == [{"gloo": "EmulatedGroup", "shm": "HierarchicalGroup"}[backend]] * 3


# 40 KB at 4 MB/s are 10 ms
SIZE, SECONDS, LATENCY = 10_000, 10e-3, 5e-3
NETWORK = "2 hosts, 4MB, 5ms"


def _reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def _reduce_later(tensor: torch.Tensor) -> None:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(1e-4)
    work.wait()


def _with_future(tensor: torch.Tensor) -> None:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.get_future().wait()


def _there_and_back(tensor: torch.Tensor) -> None:
    for source in (0, 1):
        if dist.get_rank() == source:
            dist.send(tensor, 1 - source)
        else:
            dist.recv(tensor, source)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(
    ("operation", "least"),
    [
        (_reduce, 2 * LATENCY + SECONDS),
        (_reduce_later, 2 * LATENCY + SECONDS),
        (_with_future, 2 * LATENCY + SECONDS),
        (_there_and_back, 2 * (LATENCY + SECONDS)),
    ],
)
def test_nothing_ends_before_the_closed_form(
    pool: Pool,
    tmp_path: Path,
    backend: str,
    operation: Callable[[torch.Tensor], None],
    least: float,
) -> None:
    def body() -> float:
        with emulated(tmp_path, NETWORK, backend):
            dist.barrier()
            begin = time.monotonic()
            operation(torch.ones(SIZE))
            return time.monotonic() - begin

    # rank 1 sends back as soon as it has received, which need not be in its own time
    assert pool.run(body, init=False)[0] >= least


def test_ranks_of_one_virtual_host_share_memory_and_the_others_do_not(
    pool: Pool, tmp_path: Path
) -> None:
    def body() -> list[str]:
        with emulated(tmp_path, NETWORK, "shm"):
            groups = [dist.new_group(ranks) for ranks in ((0, 1), (1, 2))]
            mine = [group for group in groups if dist.get_rank(group) >= 0]
            return [type(group).__name__ for group in mine]

    near, far = "ShmGroup", "HierarchicalGroup"
    assert pool.run(body, workers=3, init=False) == [[near], [near, far], [far]]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_wait_for_a_lost_link_ends_with_an_error(
    pool: Pool, tmp_path: Path, backend: str
) -> None:
    def body() -> str:
        parsed = parse_network("2 hosts, 1Gbit, 5us, cut 0-1")
        delayed_groups.install(parsed, tmp_path, delayed_groups.environment.find_world().rank)
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=0.5))
            with pytest.raises(Exception, match=r"a link is lost|timed out|all_reduce") as caught:
                dist.all_reduce(torch.ones(1))
            return type(caught.value).__name__
        finally:
            dist.destroy_process_group()
            delayed_groups.uninstall()

    assert set(pool.run(body, init=False)) <= {"TransportError", "StallError", "RankLostError"}
