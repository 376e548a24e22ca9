"""What a resumed run has of its state: dtypes, expanded buffers, and the names of a model that is
wrapped otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import AveragedWeights, Checkpoints
from lockstep.errors import CheckpointError
from lockstep.parallel.full_state import load_optimizer
from lockstep.training.trainer import Trainer
from support.optimizers import MasterSGD

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))


def data(dtype: torch.dtype = torch.float32) -> TensorDataset:
    return TensorDataset(X.to(dtype), X.sum(1, keepdim=True).to(dtype))


def train(
    run_dir: Path,
    epochs: int,
    *,
    model: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(5, 1)),
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(
        parameters, 0.05, momentum=0.9
    ),
    dtype: torch.dtype = torch.float32,
    callbacks: Any = (),
    resume: str | None = None,
    **options: Any,
) -> Trainer:
    lockstep.init("cpu")
    torch.manual_seed(0)
    net = model().to(dtype)
    made = optimizer(net.parameters())
    trainer = Trainer(
        net,
        made,
        nn.MSELoss(),
        8,
        run_dir=run_dir,
        callbacks=[Checkpoints(), *callbacks],
        **options,
    )
    trainer.fit(data(dtype), epochs, resume=resume)
    return trainer


def states(trainer: Trainer) -> list[Any]:
    return [trainer.optimizer.state[p] for p in trainer.model.parameters()]


# --- dtypes of optimizer state
# ------------------------------------------------------------------------------


def test_optimizer_state_keeps_its_own_dtype(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": MasterSGD, "dtype": torch.bfloat16}
    straight = train(tmp_path / "straight", 4, **options)
    train(tmp_path / "run", 2, **options)
    resumed = train(tmp_path / "run", 4, resume="latest", **options)
    assert [row["train_loss"] for row in resumed.history] == [
        row["train_loss"] for row in straight.history
    ]
    assert lockstep.fingerprint(resumed.model, resumed.optimizer) == lockstep.fingerprint(
        straight.model, straight.optimizer
    )
    state = states(resumed)[0]
    assert (state["master"].dtype, state["count"].dtype) == (torch.float32, torch.int64)
    assert [each.dtype for each in state["parts"]] == [torch.float32, torch.bool]


def test_the_state_that_a_program_loads_keeps_it_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": MasterSGD, "dtype": torch.bfloat16}
    saved = train(tmp_path / "run", 2, **options)
    loaded = train(tmp_path / "other", 1, **options)
    loaded.load_state_dict(saved.state_dict())
    assert states(loaded)[0]["master"].dtype == torch.float32
    assert torch.equal(states(loaded)[0]["master"], states(saved)[0]["master"])


def test_what_an_optimizer_itself_converts_stays_converted() -> None:
    class Halved(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            for entries in self.state.values():
                entries["momentum_buffer"] = entries["momentum_buffer"].half()

    p = nn.Parameter(torch.ones(2))
    optimizer = Halved([p], 0.1, momentum=0.9)
    state = {"momentum_buffer": torch.ones(2, dtype=torch.float64)}
    load_optimizer(optimizer, {**optimizer.state_dict(), "state": {0: state}})
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.float16


def test_another_dtype_of_a_parameter_is_converted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 1, dtype=torch.float64)
    with caplog.at_level(logging.WARNING, "lockstep.training.run.run_state"):
        resumed = train(tmp_path, 2, dtype=torch.float32, resume="latest")
    assert (
        "the model has other dtypes than in the checkpoint, so that its values and their "
        "optimizer state were converted, and the run goes on with other results: 0.weight from "
        "torch.float64 to torch.float32, 0.bias from torch.float64 to torch.float32"
    ) in caplog.messages
    assert {state["momentum_buffer"].dtype for state in states(resumed)} == {torch.float32}


def test_state_of_another_dtype_than_the_parameter_had_is_not_converted(tmp_path: Path) -> None:
    train(tmp_path, 1, dtype=torch.bfloat16, optimizer=MasterSGD)
    resumed = train(tmp_path, 2, dtype=torch.float64, optimizer=MasterSGD, resume="latest")
    assert states(resumed)[0]["master"].dtype == torch.float32


def test_values_that_cannot_be_converted_are_refused(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: torch.Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 1)
            self.register_buffer("scale", scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale  # type: ignore[no-any-return]

    train(tmp_path, 1, model=lambda: Scaled(torch.tensor(0.5)))
    with pytest.raises(
        CheckpointError, match=r"scale: here torch\.int64, in the checkpoint torch\.float32"
    ):
        train(tmp_path, 2, model=lambda: Scaled(torch.tensor(1)), resume="latest")


# --- expanded buffers
# ---------------------------------------------------------------------------------------


class Gain(nn.Module):
    """A buffer made by `expand()`, whose values each step may replace."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.linear, self.changes = nn.Linear(5, 1), changes
        self.register_buffer("gain", torch.full((1,), 1.5).expand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.changes:
            self.gain = 0.9 * self.gain + 0.1 * x.detach().mean(0)
        return self.linear(x * self.gain)  # type: ignore[no-any-return]


@pytest.mark.parametrize("virtual_workers", [None, 2])
@pytest.mark.parametrize("changes", [False, True])
def test_a_buffer_made_by_expand_resumes(
    changes: bool, virtual_workers: int | None, tmp_path: Path
) -> None:
    def run(name: str, epochs: int, resume: str | None = None) -> Trainer:
        options = {"model": lambda: Gain(changes), "virtual_workers": virtual_workers}
        return train(tmp_path / name, epochs, resume=resume, **options)

    straight = run("straight", 3)
    run("run", 1)
    resumed = run("run", 3, resume="latest")
    assert lockstep.fingerprint(resumed.model) == lockstep.fingerprint(straight.model)
    assert resumed.model.gain.tolist() == straight.model.gain.tolist()
    assert (resumed.model.gain.stride() == (0,)) is not changes


# --- names
# --------------------------------------------------------------------------------------------------


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 1))


def compiled() -> nn.Module:
    return torch.compile(plain(), backend="eager")  # type: ignore[return-value]


def parallel() -> nn.Module:
    return nn.DataParallel(plain())


def compiled_parallel() -> nn.Module:
    return torch.compile(parallel(), backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("before", [plain, compiled, parallel, compiled_parallel])
@pytest.mark.parametrize("after", [plain, compiled, parallel])
def test_a_model_resumes_that_is_wrapped_in_another_way(
    before: Any, after: Any, tmp_path: Path
) -> None:
    average = AveragedWeights(0.5)
    straight = train(tmp_path / "straight", 2, callbacks=[average])
    train(tmp_path / "run", 1, model=before, callbacks=[AveragedWeights(0.5)])
    other = AveragedWeights(0.5)
    resumed = train(tmp_path / "run", 2, model=after, callbacks=[other], resume="latest")
    assert lockstep.fingerprint(resumed.model, resumed.optimizer) == lockstep.fingerprint(
        straight.model, straight.optimizer
    )
    assert lockstep.fingerprint(other.model) == lockstep.fingerprint(average.model)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    assert sorted(load_file(newest / "model.safetensors")) == sorted(resumed.model.state_dict())


def test_another_model_is_still_refused_by_its_own_names(tmp_path: Path) -> None:
    def other() -> nn.Module:
        return nn.Sequential(nn.Identity(), nn.Linear(5, 5), nn.Linear(5, 1))

    train(tmp_path, 1, model=compiled)
    with pytest.raises(
        CheckpointError,
        match=r"first difference is 1\.weight: here of shape \[5, 5\], in the check",
    ):
        train(tmp_path, 2, model=other, resume="latest")


def test_frozen_parameters_that_are_not_saved_are_found_under_the_other_names(
    tmp_path: Path,
) -> None:
    def frozen() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1))
        model[0].requires_grad_(False)
        return model

    train(tmp_path, 1, model=lambda: nn.DataParallel(frozen()), save_frozen=False)
    resumed = train(tmp_path, 2, model=frozen, save_frozen=False, resume="latest")
    assert [row["epoch"] for row in resumed.history] == [1, 2]
