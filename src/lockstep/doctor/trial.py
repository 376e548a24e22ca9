"""Tests a backend by a small all-reduce of two ranks, in a process that can be aborted if it
hangs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .. import launcher
from ..errors import ConfigError, LockstepError

RANKS = 2
_WAIT = timedelta(seconds=60)
_SIZES = {
    "small": (1, 30),
    "large": (1 << 20, 8),
}  # float32 elements (4 B, 4 MiB), number of repetitions


def run_launched(path: str, *backends: str) -> None:
    """Test each of `backends` with processes of Lockstep's launcher, and append a line of JSON to
    the file `path`.
    """
    for backend in backends:
        try:
            seconds = launcher.launch(_init_and_measure, backend, workers=RANKS, threads=1)
        except LockstepError as error:
            text = getattr(error, "reason", "") or str(error)
            _append_result(path, backend, {"error": text.strip().splitlines()[0]})
        else:
            _append_result(path, backend, seconds)


def run_under_mpiexec(path: str) -> None:
    """Test "mpi4py" in the processes that mpiexec has started, each of which calls this."""
    try:
        dist.init_process_group("mpi4py", init_method="mpi4py://", timeout=_WAIT)
    except ConfigError as error:  # without its hint: whoever reads this line says what to do
        sys.exit(" ".join(str(error.__cause__ or error).split()))
    if dist.get_world_size() != RANKS:
        sys.exit(
            f"mpi4py sees {dist.get_world_size()} rank, not {RANKS}: it belongs to another MPI "
            "than this mpiexec"
        )
    seconds = _measure("cpu")
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    if first:
        _append_result(path, "mpi4py", seconds)


def _init_and_measure(backend: str) -> dict[str, float]:
    dist.init_process_group(backend, timeout=_WAIT)
    return _measure(f"cuda:{dist.get_rank()}" if backend == "nccl" else "cpu")


def _measure(device: str) -> dict[str, float]:
    """Measure the median seconds of an all-reduce of each size.

    Raises:
        LockstepError: a sum is wrong.
    """
    seconds = {}
    for name, (count, repetitions) in _SIZES.items():
        tensor = torch.ones(count, device=device)
        _time_all_reduce(tensor)
        seconds[name] = statistics.median(_time_all_reduce(tensor) for _ in range(repetitions))
        if not bool((tensor == RANKS).all()):
            raise LockstepError(f"the sum over {RANKS} ranks is wrong: {tensor[:4].tolist()}")
    return seconds


def _time_all_reduce(tensor: torch.Tensor) -> float:
    tensor.fill_(1.0)
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - begin


def _append_result(path: str, backend: str, result: dict[str, float] | dict[str, str]) -> None:
    with Path(path).open("a") as file:
        file.write(json.dumps({"backend": backend, **result}) + "\n")
