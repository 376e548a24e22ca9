"""Saving and resuming take little memory beside the state that a worker trains with."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import lockstep
from lockstep.parallel.sharded import Sharded
from support.pool import Pool

MIB = 2**20
FACTOR = 1.3
SIZE = 288  # MiB of state: weights and the two moments of AdamW

# torch's caches keep device meshes, and Gloo's files are open for as long as somebody holds its
# group
pytestmark = pytest.mark.leaks("a device mesh outlives its job, and its group with it")


def status(name: str) -> int:
    """A line of this process's status, in bytes; all kinds of resident memory count, mapped files
    too.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def grown(action: Callable[[], Any]) -> int:
    """By how many bytes the resident memory was larger during `action` than before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def held(*parts: Any) -> int:
    """Bytes of the tensors in state dicts that are in this process."""
    if isinstance(parts[0], torch.Tensor):
        return parts[0].to_local().nbytes if isinstance(parts[0], DTensor) else parts[0].nbytes
    inside = [value for part in parts if isinstance(part, dict) for value in part.values()]
    return sum(held(value) for value in inside if isinstance(value, (dict, torch.Tensor)))


def trainer(folder: Path, strategy: str, size: int, **options: Any) -> lockstep.Trainer:
    comm = lockstep.init("cpu")
    layers, width = 4, int((size * MIB / 3 / 4 / 4) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=False)
    chosen = (
        Sharded(comm, [str(layer) for layer in range(layers)])
        if strategy == "sharded"
        else strategy
    )
    return lockstep.Trainer(
        model, optimizer, nn.MSELoss(), 4, run_dir=folder, callbacks=[], strategy=chosen, **options
    )


def measured(folder: Path, strategy: str, size: int, **options: Any) -> dict[str, float]:
    """The largest part of the state that saving and resuming needed beside it, and the bytes of the
    state.
    """
    # What is freed goes back to the system at once, so that an earlier peak does not hide a later
    # one.
    ctypes.CDLL(None).mallopt(-3, MIB)
    made = trainer(folder, strategy, size, **options)
    width = made.model[0].in_features  # type: ignore[union-attr, index, operator]
    made.fit(TensorDataset(torch.randn(4, width), torch.randn(4, width)), 1)
    made.optimizer.zero_grad()
    state = held(made.model.state_dict(), made.optimizer.state_dict()["state"])
    made.save()  # imports what it needs
    saving = grown(made.save)
    made.checkpoint_manager.wait()
    there = [value.clone() for value in made.step.strategy.model_state(made.model).values()][-1]
    del made
    trainer(folder, strategy, size).resume("latest")  # imports what it needs
    gc.collect()
    again = trainer(folder, strategy, size)
    new = state - held(again.model.state_dict())
    resuming = grown(lambda: again.resume("latest"))
    assert held(again.model.state_dict(), again.optimizer.state_dict()["state"]) == state
    assert torch.equal(list(again.step.strategy.model_state(again.model).values())[-1], there)
    return {"state": state, "save": 1 + saving / state, "resume": 1 + (resuming - new) / state}


@pytest.fixture
def new_processes() -> Iterator[Pool]:
    """What other tests have left in the heap of a process changes how much more it gets from the
    system.
    """
    with closing(Pool()) as opened:
        opened.watch = False  # see `pytestmark`
        yield opened


@pytest.mark.parametrize("strategy", ["distributed", "sharded"])
def test_saving_and_resuming_need_less_than_a_third_of_the_state_beside_it(
    new_processes: Pool, tmp_path: Path, strategy: str
) -> None:
    for found in new_processes.run(measured, tmp_path, strategy, SIZE, workers=2, timeout=200):
        assert found["state"] > SIZE * MIB * (0.45 if strategy == "sharded" else 0.95)
        assert found["save"] <= FACTOR
        assert found["resume"] <= FACTOR
