"""Optimizer state keeps its own dtype where it moves between workers: sharded, in stages, in
Horovod's interface.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import lockstep
import lockstep.compat.horovod.torch as hvd
from lockstep.callbacks import Checkpoints
from support.optimizers import MasterSGD
from support.pool import Pool

pytestmark = pytest.mark.leaks("a device mesh outlives its job, and its group with it")

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)).bfloat16()


def test_sharded_state_resumes_with_its_dtype(pool: Pool, tmp_path: Path) -> None:
    def train(run_dir: Path, epochs: int, resume: str | None = None) -> list[float]:
        lockstep.init("cpu")
        model = layers()
        optimizer = MasterSGD(model.parameters())
        trainer = lockstep.Trainer(
            *(model, optimizer, nn.MSELoss(), 8),
            run_dir=run_dir,
            callbacks=[Checkpoints()],
            strategy="sharded",
        )
        history = trainer.fit(DATA, epochs, resume=resume)
        for state in optimizer.state.values():
            assert isinstance(state["master"], DTensor)
            assert (state["master"].dtype, state["count"].dtype) == (torch.float32, torch.int64)
            assert [part.dtype for part in state["parts"]] == [torch.float32, torch.bool]
        return [row["train_loss"] for row in history]

    straight = pool.run(train, tmp_path / "straight", 4)
    pool.run(train, tmp_path / "run", 2)
    assert pool.run(train, tmp_path / "run", 4, "latest") == straight


def test_state_of_stages_is_loaded_with_its_dtype(pool: Pool) -> None:
    def body() -> bool:
        def step(pipe: Any, optimizer: Any) -> None:
            pipe.step(X, DATA.tensors[1], nn.MSELoss())
            optimizer.step()
            optimizer.zero_grad()

        pipe = lockstep.pipeline(layers())
        optimizer = MasterSGD(pipe.parameters())
        step(pipe, optimizer)
        other = lockstep.pipeline(layers())
        loaded = MasterSGD(other.parameters())
        for state in optimizer.state.values():
            state.pop("parts")  # a pipeline gathers tensors alone
        other.load_state_dict(pipe.state_dict())
        other.load_optimizer_state_dict(loaded, pipe.optimizer_state_dict(optimizer))
        pairs = zip(optimizer.state.values(), loaded.state.values(), strict=True)
        return all(torch.equal(one["master"], two["master"]) for one, two in pairs)

    assert pool.run(body) == [True, True]


def test_horovods_optimizer_states_keep_their_dtype(pool: Pool) -> None:
    def body() -> list[Any]:
        hvd.init()
        model = layers()
        optimizer = MasterSGD(model.parameters(), 0.1 * (1 + hvd.rank()))
        model(X).square().mean().backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        found: list[Any] = [state["master"].tolist() for state in optimizer.state.values()]
        state = hvd.elastic.TorchState(model, optimizer)
        state.restore()
        found += [state["master"].tolist() for state in optimizer.state.values()]
        hvd.shutdown()
        return [*found, *(state["master"].dtype for state in optimizer.state.values())]

    first, second = pool.run(body, backend="shm")
    assert first == second
    assert first[:4] == first[4:8]
    assert first[8:] == [torch.float32] * 4
