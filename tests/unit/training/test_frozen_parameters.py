"""Checkpoints without the parameters that are not trained, and models that save themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import Callback, Checkpoints, Pretrained
from lockstep.errors import CheckpointError, ConfigError
from lockstep.training.loop import StateOfRun
from lockstep.training.trainer import Trainer

DATA = TensorDataset(
    torch.rand(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
)


class Adapted(nn.Module):
    """A frozen body and a trained head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))  # type: ignore[no-any-return]

    def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor]) -> None:
        save_file(state_dict, Path(folder) / "weights.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps({"kind": "Adapted"}))


def trainer(
    run_dir: Path, seed: int = 0, callbacks: list[Callback] | None = None, **options: Any
) -> Trainer:
    model = Adapted(seed)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.1)
    chosen = [Checkpoints()] if callbacks is None else callbacks
    return Trainer(
        model, optimizer, nn.CrossEntropyLoss(), 4, run_dir=run_dir, callbacks=chosen, **options
    )


def saved(run_dir: Path) -> set[str]:
    (newest,) = sorted((run_dir / "checkpoints").glob("step-*"))[-1:]
    return set(load_file(newest / "model.safetensors"))


def test_a_run_resumes_from_trained_parameters_and_buffers_alone(tmp_path: Path) -> None:
    trainer(tmp_path / "run", save_frozen=False).fit(DATA, 2)
    assert {name.split(".")[0] for name in saved(tmp_path / "run")} == {"norm", "head"}
    assert "norm.running_mean" in saved(tmp_path / "run")
    resumed, straight = trainer(tmp_path / "run", save_frozen=False), trainer(tmp_path / "straight")
    resumed.fit(DATA, 3, resume="latest")
    straight.fit(DATA, 3)
    assert lockstep.fingerprint(resumed.model, resumed.optimizer) == lockstep.fingerprint(
        straight.model, straight.optimizer
    )
    assert "body.weight" in saved(tmp_path / "straight")


def test_other_frozen_weights_are_refused(tmp_path: Path) -> None:
    trainer(tmp_path / "run", save_frozen=False).fit(DATA, 1)
    other = trainer(tmp_path / "run", seed=1, save_frozen=False)
    before = other.model.state_dict()["head.weight"].clone()
    with pytest.raises(CheckpointError, match="Load the same pretrained weights first"):
        other.fit(DATA, 2, resume="latest")
    assert torch.equal(other.model.state_dict()["head.weight"], before)


def test_a_parameter_that_is_not_frozen_must_be_there(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", save_frozen=False)
    state = run.state.state_dict()
    del state["model"]["head.weight"]
    with pytest.raises(
        CheckpointError, match=r"head\.weight: here of shape \[2, 4\], in the checkpoint missing"
    ):
        run.state.check_resumable(state)


@pytest.mark.parametrize("both", [(True, False), (False, True)])
def test_runs_with_and_without_frozen_parameters_resume_each_other(
    tmp_path: Path, both: tuple[bool, bool]
) -> None:
    trainer(tmp_path / "run", save_frozen=both[0]).fit(DATA, 1)
    resumed = trainer(tmp_path / "run", save_frozen=both[1])
    resumed.fit(DATA, 2, resume="latest")
    assert ("body.weight" in saved(tmp_path / "run")) is both[1]


def test_adapters_alone_are_saved_of_a_model_of_peft(tmp_path: Path) -> None:
    model = Adapted()
    model.peft_config = {}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.1)
    Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        4,
        run_dir=tmp_path / "run",
        callbacks=[Checkpoints()],
    ).fit(DATA, 1)
    assert "body.weight" not in saved(tmp_path / "run")


def test_a_model_saves_itself_when_the_run_ends(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", callbacks=[Pretrained()])
    run.fit(DATA, 1)
    run.fit(DATA, 2)  # in the place of the first one
    weights = load_file(tmp_path / "run" / "pretrained" / "weights.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"pretrained", "ledger.bin", "ledger.jsonl"}


def test_what_is_saved_stays_whole_when_a_model_cannot_save_itself(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", callbacks=[Pretrained()])
    run.fit(DATA, 1)

    def fails(folder: str, state_dict: dict[str, torch.Tensor]) -> None:
        (Path(folder) / "half").touch()
        raise OSError(28, "No space left on device")

    run.model.save_pretrained = fails
    with pytest.raises(
        lockstep.errors.LockstepError,
        match=r"pretrained: the model could not be saved: No space left",
    ):
        run.fit(DATA, 2)
    assert {path.name for path in (tmp_path / "run" / "pretrained").iterdir()} == {
        "weights.safetensors",
        "config.json",
    }


def test_a_model_that_cannot_save_itself_is_named(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    made = Trainer(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        nn.CrossEntropyLoss(),
        4,
        run_dir=tmp_path / "run",
        callbacks=[Pretrained()],
    )
    with pytest.raises(ConfigError, match=r"Pretrained.*a Linear"):
        made.fit(DATA, 1)


def test_pretrained_weights_that_are_not_saved_are_not_sent_to_workers_that_join() -> None:
    def state_of_run(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
        trainer = lockstep.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), 4, save_frozen=False, callbacks=[]
        )
        return StateOfRun(trainer, None, trainer._callbacks)  # type: ignore[arg-type]

    sent, same, other = state_of_run(0), state_of_run(0), state_of_run(1)
    with torch.no_grad():
        sent.model[1].weight.add_(1.0)
    sent.commit(None)
    state = sent.of_operations()
    assert list(state["model"]) == ["1.weight", "1.bias"]
    same.load_operations(state)
    assert torch.equal(same.model[1].weight, sent.model[1].weight)
    assert list(same.of_operations()["model"]) == ["1.weight", "1.bias"]
    with pytest.raises(
        CheckpointError, match="the other workers have sent trained parameters only"
    ):
        other.load_operations(state)
    with torch.no_grad():
        sent.model[0].weight.add_(1.0)  # which others do not have
    assert len(sent.of_operations()["model"]) == 4
