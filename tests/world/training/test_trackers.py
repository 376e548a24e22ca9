"""`WandB` and `MLflow`: what is sent, how a run goes on, and that a training survives its tracker.

The packages are large, and no part of the extra `test`: what is sent is tested with stand-ins for
them, and the last two tests are for environments that have them.
"""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import Checkpoints, MLflow, WandB
from lockstep.errors import ConfigError

DATA = TensorDataset(torch.arange(80.0).reshape(20, 4) / 80, torch.arange(20) % 3)
LOGGER = "lockstep.training.callbacks.trackers"


def trainer(run_dir: Path, *callbacks: Any) -> Any:
    torch.manual_seed(0)
    lockstep.init("cpu")
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"run_dir": run_dir, "callbacks": [Checkpoints(), *callbacks]}
    return lockstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), 4, **options)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Run:
    """What `wandb.init` returns."""

    def __init__(self, calls: list[Any], **given: Any) -> None:
        self.calls, self.id = calls, given.get("id", "new")
        calls.append(("init", given))

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    module(monkeypatch, "wandb", init=lambda **given: Run(calls, **given))
    return calls


def test_wandb_gets_losses_and_rows_and_a_resumed_run_goes_on(
    wandb: list[Any], tmp_path: Path
) -> None:
    trainer(tmp_path / "run", WandB("p", "n", "offline", 3, {"mine": 1}, tags=["a"])).fit(
        DATA, max_steps=7, validate=DATA
    )
    kind, given = wandb[0]
    assert kind == "init" and wandb[-1] == ("finish", 0)
    assert given.pop("config") == {
        "global_batch_size": 4,
        "epochs": 2,
        "total_steps": 7,
        "workers": 1,
        "optimizer": "SGD",
        "lr": 0.1,
        "mine": 1,
    }
    assert given == {
        "dir": str(tmp_path / "run"),
        "project": "p",
        "name": "n",
        "mode": "offline",
        "tags": ["a"],
    }
    sent = [(step, sorted(values)) for step, values in wandb[1:-1]]
    columns = [
        "epoch",
        "lr",
        "samples_per_second",
        "seconds",
        "train_loss",
        "val_accuracy",
        "val_loss",
    ]
    assert sent == [(3, ["loss/train"]), (5, columns), (6, ["loss/train"]), (7, columns)]
    wandb.clear()
    again = WandB("p")
    trainer(tmp_path / "run", again).fit(DATA, 2, resume="latest")
    assert (wandb[0][1]["id"], wandb[0][1]["resume"], again.run_id) == ("new", "allow", "new")
    assert [step for step, _ in wandb[1:-1]] == [10, 10]  # the loss, and the row


def test_an_error_of_the_training_ends_the_trackers_run_as_failed(
    wandb: list[Any], tmp_path: Path
) -> None:
    class Fails(lockstep.callbacks.Callback):
        def on_row(self, trainer: Any, row: Any) -> None:
            raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        trainer(tmp_path / "run", WandB(), Fails()).fit(DATA, 1)
    assert wandb[-1] == ("finish", 1)


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_the_training_goes_on_without_its_tracker(
    wandb: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: str,
) -> None:
    def failing(*arguments: Any, **more: Any) -> None:
        raise ConnectionError("no network")

    if fails == "init":
        monkeypatch.setattr(sys.modules["wandb"], "init", failing)
    else:
        monkeypatch.setattr(Run, fails, failing)
    made = trainer(tmp_path / "run", WandB(every_steps=1))
    assert len(made.fit(DATA, 2)) == 2
    text = "WandB failed, and the training continues without it: ConnectionError: no network"
    assert [record[1:] for record in caplog.record_tuples if record[0] == LOGGER] == [
        (logging.WARNING, text)
    ]


class Client:
    """`mlflow.MlflowClient`; the runs are those of the class."""

    runs: dict[str, list[Any]]

    def __init__(self, tracking_uri: str | None) -> None:
        self.uri = tracking_uri

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str) -> str:
        return f"number of {name}"

    def create_run(self, experiment: str, run_name: str | None) -> Any:
        Client.runs["r1"] = [(self.uri, experiment, run_name)]
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def update_run(self, run_id: str, status: str) -> None:
        Client.runs[run_id].append(status)

    def log_batch(
        self, run_id: str, metrics: Any = (), params: Any = (), synchronous: bool = True
    ) -> Any:
        values = [(each.key, each.step) for each in metrics] or [each.key for each in params]
        Client.runs[run_id].append(values)
        return SimpleNamespace(wait=lambda: Client.runs[run_id].append("wait"))

    def set_terminated(self, run_id: str, status: str) -> None:
        Client.runs[run_id].append(status)


def test_mlflow_gets_parameters_losses_and_rows_and_a_resumed_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def metric(key: str, value: float, timestamp: int, step: int) -> Any:
        assert isinstance(value, float)
        return SimpleNamespace(key=key, step=step)

    entities = module(
        monkeypatch,
        "mlflow.entities",
        Metric=metric,
        Param=lambda key, text: SimpleNamespace(key=key),
    )
    module(monkeypatch, "mlflow", MlflowClient=Client, entities=entities, __path__=[])
    Client.runs = {}
    trainer(tmp_path / "run", MLflow("e", "n", "sqlite:///x", 5)).fit(DATA, max_steps=5)
    began, params, *sent, status = Client.runs["r1"]
    assert began == ("sqlite:///x", "number of e", "n") and status == "FINISHED"
    assert params == ["global_batch_size", "epochs", "total_steps", "workers", "optimizer", "lr"]
    assert (
        sent[0] == [("loss/train", 5)]
        and ("train_loss", 5) in sent[1]
        and sent[2:] == ["wait", "wait"]
    )
    trainer(tmp_path / "run", MLflow("e", tracking_uri="sqlite:///x")).fit(DATA, 2, resume="latest")
    assert list(Client.runs) == ["r1"]
    assert Client.runs["r1"][7] == "RUNNING" and Client.runs["r1"][-1] == "FINISHED"


@pytest.mark.parametrize("kind", [WandB, MLflow])
def test_a_package_that_is_not_there_is_named(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind.package, None)
    with pytest.raises(
        ConfigError, match=rf"needs the package {kind.package}: pip install '.*\[{kind.package}\]'$"
    ):
        kind()


def test_arguments_that_are_refused(wandb: list[Any]) -> None:
    with pytest.raises(
        ConfigError, match="every_steps: expected a whole number of at least 1, got 0"
    ):
        WandB(every_steps=0)
    with pytest.raises(ConfigError, match="mode: expected online, offline or disabled, got 'no'"):
        WandB(mode="no")


# --- the packages themselves
# --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
@pytest.mark.leaks("threads and files of the package")
def test_wandb_itself_writes_an_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    trainer(tmp_path / "run", made := WandB("p", mode="offline", every_steps=2)).fit(DATA, 2)
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert folder.name.endswith(made.run_id) and list(folder.glob("*.wandb"))


@pytest.mark.filterwarnings("default")
@pytest.mark.leaks("threads and files of the package")
def test_mlflow_itself_keeps_the_metrics(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    trainer(tmp_path / "run", first := MLflow("e", tracking_uri=uri, every_steps=2)).fit(
        DATA, max_steps=7
    )
    trainer(tmp_path / "run", again := MLflow("e", tracking_uri=uri, every_steps=2)).fit(
        DATA, 2, resume="latest"
    )
    client = mlflow.MlflowClient(uri)
    assert first.run_id == again.run_id and client.get_run(first.run_id).info.status == "FINISHED"
    assert [each.step for each in client.get_metric_history(first.run_id, "loss/train")] == [
        2,
        4,
        6,
        8,
        10,
    ]
