"""Starts the ranks of a job, as forks of one program, and makes their process group."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import lockstep  # noqa: F401 - makes "shm" known

SHM = "shm"
SHM_PYTHON = "shm-python"
GLOO = "gloo"
NCCL = "nccl"
TITLES = {SHM: "shm", SHM_PYTHON: "shm, Python only", GLOO: "Gloo"}
BACKENDS = {SHM: "shm", SHM_PYTHON: "shm", GLOO: "gloo", NCCL: "nccl"}
"""What torch calls the backend of a side."""


def run_ranks(body: Callable[[int], None], workers: int) -> None:
    """Run `body(rank)` in processes of their own until all have ended; the parent waits for them,
    idle.

    Forks, so that torch is imported once, and no agent beside them, which would wake up now and
    then.
    """
    start_processes(body, nprocs=workers, start_method="fork")  # type: ignore[no-untyped-call]


def join_group(side: str, rank: int, workers: int, meter: str) -> None:
    """Make the default process group of a side.

    Args:
        side: "shm", "shm-python" (without its compiled part), "gloo" or "nccl".
        rank: this worker.
        workers: how many.
        meter: the path of the controller's socket, beside which the ranks meet.
    """
    if side == SHM_PYTHON:
        state: Any = import_module("lockstep.transports.shm.rank_states")
        state._native = None
    dist.init_process_group(
        BACKENDS[side], init_method=f"file://{meter}.store", rank=rank, world_size=workers
    )
