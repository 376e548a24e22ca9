"""The command `lockstep train`, as its users would call it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lockstep
from lockstep.cli import main
from lockstep.cli.resolved_options import choose_folder
from lockstep.training import training_run
from lockstep.training.callbacks import Callback
from lockstep.training.options import TrainOptions
from lockstep.training.trainer import Trainer
from support import warm_python

pytestmark = pytest.mark.usefixtures("folder")

SMALL = ["--data", "synthetic", "--model", "mlp", "--workers", "1", "--epochs", "1", "--quiet"]


def run(*arguments: str) -> int:
    return main(["train", *SMALL, *arguments])


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"mine.py", "__pycache__"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "--global-batch-size 0",
            "--global-batch-size: expected a whole number of at least 1, got '0'",
        ),
        (
            "--global-batch-size -4",
            "--global-batch-size: expected a whole number of at least 1, got '-4'",
        ),
        (
            "--global-batch-size many",
            "--global-batch-size: expected a whole number of at least 1, got 'many'",
        ),
        ("--epochs 0", "--epochs: expected"),
        ("--epochs 1.5", "--epochs: expected a whole number of at least 1, got '1.5'"),
        ("--lr nan", "--lr: expected a finite number above 0, got 'nan'"),
        ("--lr 0", "--lr: expected"),
        ("--momentum -1", "--momentum: expected"),
        ("--weight-decay inf", "--weight-decay: expected"),
        ("--max-grad-norm 0", "--max-grad-norm: expected"),
        ("--gradient-accumulation-steps 0", "--gradient-accumulation-steps: expected"),
        ("--base-batch-size 0", "--base-batch-size: expected"),
        ("--seed -1", "--seed: expected"),
        ("--workers 0", "--workers: expected a whole number of at least 1 or auto, got '0'"),
        ("--workers some", "--workers: expected"),
        ("--warmup-epochs 2", "--warmup-epochs: expected less than the 1 epoch of"),
        ("--model lenett", "Did you mean lenet?"),
        ("--model mine:fiv", "Did you mean five?"),
        ("--model nowhere:net", "There is no module 'nowhere'"),
        (
            "--model mine:five",
            "--model: expected an output for each of the 10 classes of the data, got an output of",
        ),
        ("--model mine:narrow", "--model: expected a model for inputs of shape [2, 1, 28, 28]"),
        ("--model mine:nothing", "--model: expected a factory that returns a torch.nn.Module"),
        ("--data digit", "Did you mean digits?"),
        ("--data mine:text", "--data: expected a factory that returns (train, test)"),
        ("--data-dir .", "--data-dir: expected nothing, as synthetic reads no files"),
        ("--data mnist --data-dir no/such/folder/at/all", "no/such/folder/at/all"),
        ("--optimizer adamm", "Did you mean adam"),
        ("--schedule cosin", "Did you mean cosine?"),
        ("--precision fp8", "--precision: expected "),
        ("--device cuda", "--device: expected cpu or auto"),
        ("--log csv,wandb", "--log: expected csv or tensorboard, got 'wandb'"),
        ("--checkpoint-every often", "--checkpoint-every: expected"),
        (
            "--config none.yaml",
            "--config: expected a YAML, TOML or JSON file that can be read, got none.yaml",
        ),
        ("--resume nowhere", "--resume: expected a checkpoint, a run directory, or latest"),
        ("--resume latest", "--resume: expected an earlier run"),
        ("--worker 3", "Did you mean --workers"),
        (
            "--seed 18446744073709551616",
            "--seed: expected a whole number from 0 to 9223372036854775807",
        ),
        (
            "--model mine:silent",
            "--model: expected a factory that returns a torch.nn.Module, got ValueError from",
        ),
        ("--data mine:no_data", "--data: expected at least one sample in each data set"),
        ("--data mine:stream", "--data: expected a factory that returns (train, test)"),
        ("--data mine:listed", "--data: expected items that are pairs (input, label)"),
        ("--run-dir mine.py/run", "--run-dir: expected a folder that can be written"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    said: str,
) -> None:
    if arguments.startswith("--device cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if arguments.startswith("--data mnist"):
        refuse_network(monkeypatch)
    assert run(*arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("lockstep train: error: ")
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1
    assert left(folder) == set()


def refuse_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no network in this test")

    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_the_run_folder(folder: Path) -> None:
    assert run("--log", "tensorboard,csv") == 0
    (made,) = (folder / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-mlp-synthetic-[0-9a-f]{4}", made.name)
    assert {path.name for path in made.iterdir()} == {
        "config.json",
        "metrics.csv",
        "curve.png",
        "tensorboard",
        "checkpoints",
        "ledger.bin",
        "ledger.jsonl",
        "model.safetensors",
        "result.json",
    }
    weights = load_file(made / "model.safetensors")
    lockstep.models.mlp().load_state_dict(weights)
    result = json.loads((made / "result.json").read_text())
    assert set(result) >= {
        "val_accuracy",
        "train_loss",
        "epochs",
        "seconds_per_epoch",
        "samples_per_second",
        "workers",
        "devices",
        "global_batch_size",
        "torch",
        "fingerprint",
    }
    assert re.fullmatch("[0-9a-f]{64}", result["fingerprint"])


def test_divergence_at_once_leaves_the_ledger_which_blame_needs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", "mine:broken", "--run-dir", "out") == 1
    names = {path.name for path in (folder / "out").iterdir()}
    assert names == {"config.json", "ledger.bin", "ledger.jsonl"}
    assert lockstep.ledger("out").steps["step"].tolist() == [0]
    error = capsys.readouterr().err
    assert "the loss is nan at step 0 with learning rate 0.05" in error
    assert "`lockstep blame out` looks for the samples behind it" in error


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_what_a_run_has_written_before_it_diverged_stays(folder: Path) -> None:
    with (folder / "mine.py").open("a") as module:
        module.write(
            "import os\nclass Noted(nn.Linear):\n    def __init__(self): super().__init__(784, "
            "10)\n"
        )
        module.write(
            "    def forward(self, x):\n        if os.path.isdir('out'): open('out/notes', "
            "'w').close()\n"
        )
        module.write(
            "        return super().forward(x.flatten(1)) * (float('nan') if self.training else "
            "1)\n"
        )
    assert run("--model", "mine:Noted", "--run-dir", "out") == 1
    names = {path.name for path in (folder / "out").iterdir()}
    assert names == {"config.json", "notes", "ledger.bin", "ledger.jsonl"}


def test_a_run_that_dies_at_once_leaves_nothing(folder: Path) -> None:
    with (folder / "mine.py").open("a") as module:
        module.write("class Dies(nn.Linear):\n    def __init__(self): super().__init__(784, 10)\n")
        module.write(
            "    def forward(self, x):\n        if self.training: raise ZeroDivisionError\n"
        )
        module.write("        return super().forward(x.flatten(1))\n")
    assert run("--model", "mine:Dies") == 1
    assert left(folder) == set()


BAD_DATA = """
class Bad(torch.utils.data.Dataset):
    classes = 10
    def __len__(self): return 200
    def __getitem__(self, index):
        if index == 150: raise OSError("no such picture")
        return torch.zeros(1, 28, 28), 0
"""


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_data_that_fail_get_one_line_and_leave_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (folder / "mine.py").open("a") as module:
        module.write(BAD_DATA)
    (folder / "kept").mkdir()
    for arguments in ([], ["--run-dir", "made/here"], ["--run-dir", "kept", "--debug"]):
        assert run("--data", "mine:Bad", "--global-batch-size", "2", *arguments) == 2
        errors = capsys.readouterr().err
        *traceback, last = errors.splitlines()
        assert re.fullmatch(
            r"lockstep train: error: sample 150 of Bad: OSError: no such picture, at mine.py:\d+ in __getitem__",
            last,
        )
        assert bool(traceback) == ("--debug" in arguments)
        assert ("raise OSError" in errors) == ("--debug" in arguments)
        assert left(folder) == {"kept"}
    (folder / "mine.py").write_text(
        (folder / "mine.py").read_text().replace("index == 150", "False")
    )
    sys.modules.pop("mine")
    assert run("--data", "mine:Bad", "--run-dir", "made/here") == 0


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_run_that_loses_its_folder_to_another_spares_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = training_run.make_callbacks

    def be_overtaken(options: TrainOptions) -> list[Callback]:
        monkeypatch.setattr(training_run, "make_callbacks", make)
        assert run("--run-dir", "same") == 0
        return make(options)

    monkeypatch.setattr(training_run, "make_callbacks", be_overtaken)
    assert run("--run-dir", "same") == 2
    assert (
        "--run-dir: expected a folder without an earlier run, got 'same'. Continue with that run "
        "(resume), or choose another" in capsys.readouterr().err
    )
    assert (folder / "same/result.json").exists()


def test_runs_of_the_same_second_have_folders_of_their_own() -> None:
    assert len({choose_folder(None, None, "mlp") for _ in range(20)}) > 15


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_signal_after_the_last_step_leaves_all_files_and_the_code_of_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Last(Callback):
        def on_train_end(self, trainer: Trainer, error: BaseException | None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    make = training_run.make_callbacks
    monkeypatch.setattr(training_run, "make_callbacks", lambda options: [*make(options), Last()])
    assert run("--run-dir", "one") == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in capsys.readouterr().err
    assert {"result.json", "model.safetensors", "curve.png"} <= {
        path.name for path in (folder / "one").iterdir()
    }


def test_a_run_that_fails_at_once_spares_its_neighbours(folder: Path) -> None:
    with (folder / "mine.py").open("a") as module:
        module.write(
            "def beside():\n    net = broken()\n    net.register_forward_pre_hook(other)\n    "
            "return net\n"
        )
        module.write("def other(net, _):\n    import pathlib\n    if net.training:\n")
        module.write("        pathlib.Path('runs/another').mkdir(parents=True, exist_ok=True)\n")
        module.write("        raise lockstep.errors.DataError('unreadable')\n")
    assert run("--model", "mine:beside") == 1
    assert [path.name for path in (folder / "runs").iterdir()] == ["another"]


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--lr", "0", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_launched_workers(folder: Path) -> None:
    base = ["-m", "lockstep", "train", "--data", "synthetic", "--model", "mlp", "--epochs", "2"]
    done = warm_python.run([*base, "--workers", "2", "--run-dir", "two"], env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "epoch 2/2" in done.stdout
    assert "two/model.safetensors" in done.stdout
    assert main([*base[2:], "--workers", "1", "--run-dir", "one", "--quiet"]) == 0
    results = [json.loads((folder / name / "result.json").read_text()) for name in ("one", "two")]
    assert [result["workers"] for result in results] == [1, 2]
    assert results[1]["devices"] == ["cpu", "cpu"]
    assert results[1]["train_loss"] == pytest.approx(results[0]["train_loss"], rel=1e-3)
    assert results[1]["val_accuracy"] == pytest.approx(results[0]["val_accuracy"], abs=0.01)

    bad = warm_python.run([*base, "--workers", "3", "--global-batch-size", "2"], env=environment())
    assert bad.returncode == 2
    assert bad.stderr.startswith(
        "lockstep train: error: --global-batch-size: expected at least one sample for each of 3"
    )
    assert len(bad.stderr.splitlines()) == 1
    assert left(folder) == {"one", "two"}


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "2"), (signal.SIGTERM, "1")])
def test_a_signal_saves_and_prints_how_to_resume(folder: Path, number: int, workers: str) -> None:
    command = [
        "-m",
        "lockstep",
        "train",
        "--data",
        "synthetic",
        "--model",
        "mlp",
        "--run-dir",
        "long",
    ]
    command += ["--epochs", "100000", "--checkpoint-every", "0", "--workers", workers]
    with warm_python.popen(command, env=environment(), start_new_session=True) as process:
        assert process.stdout is not None
        assert "epoch" in process.stdout.readline()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert re.search(
        r"saved long/checkpoints/step-\d+\. Resume with: lockstep train --resume long$",
        errors.strip(),
    )
    assert "Traceback" not in errors
    assert len(list((folder / "long/checkpoints").iterdir())) == 1
