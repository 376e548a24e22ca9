"""The command `lockstep train`, as its users would call it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import lockstep
from lockstep.cli import main

SMALL = ["--data", "synthetic", "--model", "mlp", "--workers", "1", "--epochs", "1", "--quiet"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory with a module of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn

        def five(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 5))
        def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(100, 10))
        def nothing(): return 3
        def broken():
            net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
            net[1].weight.data.fill_(float("nan"))
            return net
        def three(): return torch.utils.data.TensorDataset(torch.zeros(3, 1, 28, 28), torch.zeros(3).long())
        def text(): return "data"
        """)
    )
    yield tmp_path
    sys.modules.pop("mine", None)


def run(*arguments: str) -> int:
    return main(["train", *SMALL, *arguments])


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"mine.py", "__pycache__"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--global-batch 0", "--global-batch: expected a whole number of at least 1, got 0"),
        ("--global-batch -4", "--global-batch: expected a whole number of at least 1, got -4"),
        ("--global-batch many", "--global-batch: expected a whole number, got 'many'"),
        ("--epochs 0", "--epochs: expected"),
        ("--epochs 1.5", "--epochs: expected a whole number, got 1.5"),
        ("--lr nan", "--lr: expected a finite number above 0, got nan"),
        ("--lr 0", "--lr: expected"),
        ("--momentum -1", "--momentum: expected"),
        ("--weight-decay inf", "--weight-decay: expected"),
        ("--clip-norm 0", "--clip-norm: expected"),
        ("--accumulate 0", "--accumulate: expected"),
        ("--base-batch 0", "--base-batch: expected"),
        ("--seed -1", "--seed: expected"),
        ("--workers 0", "--workers: expected a whole number of at least 1 or auto, got 0"),
        ("--workers some", "--workers: expected"),
        ("--warmup-epochs 2", "--warmup-epochs: expected less than the 1 epochs"),
        ("--model lenett", "Did you mean lenet?"),
        ("--model mine:fiv", "Did you mean five?"),
        ("--model nowhere:net", "There is no module 'nowhere'"),
        ("--model mine:five", "--model: expected an output for each of the 10 classes of the data, got an output of"),
        ("--model mine:narrow", "--model: expected a model for inputs of shape [2, 1, 28, 28]"),
        ("--model mine:nothing", "--model: expected a factory that returns a torch.nn.Module"),
        ("--data digit", "Did you mean digits?"),
        ("--data mine:text", "--data: expected a factory that returns (train, test)"),
        ("--data-dir .", "--data-dir: expected nothing, as synthetic reads no files"),
        ("--data mnist --data-dir no/such/folder/at/all", "no/such/folder/at/all"),
        ("--optimizer adamm", "Did you mean adam"),
        ("--schedule cosin", "Did you mean cosine?"),
        ("--precision fp8", "--precision: expected one of"),
        ("--strategy sharded", "--strategy: expected distributed, got 'sharded'. The strategy 'sharded' is planned"),
        ("--device cuda", "--device: expected cpu or auto"),
        ("--log csv,wandb", "--log: expected one of csv, tensorboard, got 'wandb'"),
        ("--checkpoint-every often", "--checkpoint-every: expected"),
        ("--config none.yaml", "--config: expected a YAML or TOML file that can be read, got none.yaml"),
        ("--resume nowhere", "--resume: expected a checkpoint, a run folder, or latest"),
        ("--resume latest", "--resume: expected an earlier run"),
        ("--worker 3", "Did you mean --workers"),
        ("--out mine.py/run", "--out: expected a folder that can be written"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
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


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "epoch: 3", "Did you mean epochs?"),
        ("a.yaml", "epochs: three", "epochs: expected a value of type int, got 'three'"),
        ("a.yaml", "- 1\n- 2", "to hold options by name"),
        ("a.yaml", "lr: [1", "to be YAML"),
        ("a.toml", "lr = ", "to be YAML, or TOML with the ending .toml"),
        ("a.yaml", "!!python/object/apply:os.mkdir [hacked]", "to be YAML"),
        ("a.yaml", "compile: maybe", "compile: expected a value of type bool"),
    ],
)
def test_bad_config_files(folder: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str) -> None:
    (folder / name).write_text(text)
    assert run("--config", name) == 2
    error = capsys.readouterr().err
    assert said in error
    assert name in error
    assert left(folder) == {name}


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "global-batch: 100\nlr: 0.25\n"), ("a.toml", "global_batch = 100\nlr = 0.25\n")]
)
@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_flags_win_over_a_config_file_and_all_is_written_down(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert run("--config", name, "--lr", "0.01", "--out", "done") == 0
    config = yaml.safe_load((folder / "done/config.yaml").read_text())
    assert (config["global_batch"], config["lr"], config["workers"], config["device"]) == (100, 0.01, "1", "cpu")
    # and the file is itself a config file
    assert run("--config", "done/config.yaml", "--out", "again") == 0
    fingerprints = [json.loads((folder / run / "result.json").read_text())["fingerprint"] for run in ("done", "again")]
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_the_run_folder(folder: Path) -> None:
    assert run("--log", "tensorboard,csv") == 0
    (made,) = (folder / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-mlp-synthetic", made.name)
    assert {path.name for path in made.iterdir()} == {
        "config.yaml",
        "metrics.csv",
        "curve.png",
        "tensorboard",
        "checkpoints",
        "model.safetensors",
        "result.json",
    }
    weights = load_file(made / "model.safetensors")
    lockstep.models.mlp().load_state_dict(weights)
    result = json.loads((made / "result.json").read_text())
    assert set(result) >= {
        "test_accuracy",
        "train_loss",
        "epochs",
        "seconds_per_epoch",
        "samples_per_second",
        "workers",
        "devices",
        "global_batch",
        "torch",
        "fingerprint",
    }
    assert re.fullmatch("[0-9a-f]{64}", result["fingerprint"])


def test_an_earlier_run_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "one") == 0
    before = (folder / "one/result.json").read_bytes()
    assert run("--out", "one", "--epochs", "2") == 2
    assert "Go on with --resume latest" in capsys.readouterr().err
    assert (folder / "one/result.json").read_bytes() == before


def test_going_on_takes_the_runs_own_options(folder: Path) -> None:
    assert run("--out", "straight", "--epochs", "2", "--global-batch", "100", "--seed", "3") == 0
    # the same, but stopped after one of two epochs
    assert run("--out", "one", "--epochs", "2", "--global-batch", "100", "--seed", "3") == 0
    for name in ("model.safetensors", "result.json", "metrics.csv"):
        (folder / "one" / name).unlink()
    checkpoints = sorted((folder / "one/checkpoints").iterdir())
    for part in checkpoints[-1].iterdir():
        part.unlink()
    checkpoints[-1].rmdir()
    assert main(["train", "--resume", "one"]) == 0
    results = [json.loads((folder / name / "result.json").read_text()) for name in ("one", "straight")]
    assert results[0]["fingerprint"] == results[1]["fingerprint"]
    assert results[0]["epochs"] == 2


def test_a_refused_resume_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "one") == 0
    before = {path: path.read_bytes() for path in (folder / "one").rglob("*") if path.is_file()}
    assert run("--resume", "one", "--model", "lenet", "--epochs", "2") == 2
    assert "a checkpoint of another model" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (folder / "one").rglob("*") if path.is_file()} == before


def test_divergence_at_once_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "mine:broken") == 1
    assert left(folder) == set()
    assert "the loss is nan at step 0 with learning rate 0.05" in capsys.readouterr().err


def test_a_run_that_fails_at_once_spares_its_neighbours(folder: Path) -> None:
    with (folder / "mine.py").open("a") as module:
        module.write("def beside():\n    net = broken()\n    net.register_forward_pre_hook(other)\n    return net\n")
        module.write("def other(net, _):\n    import pathlib\n    if net.training:\n")
        module.write("        pathlib.Path('runs/another').mkdir(parents=True, exist_ok=True)\n")
    assert run("--model", "mine:beside") == 1
    assert [path.name for path in (folder / "runs").iterdir()] == ["another"]


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--lr", "0", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_help_is_grouped_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for part in (
        "what to train:",
        "workers:",
        "the step:",
        "the run:",
        "files and display:",
        "examples:",
        "exit codes:",
    ):
        assert part in text
    assert "--global-batch" in text


def test_help_does_not_load_torch() -> None:
    code = "import sys; from lockstep.cli.main import _parser; _parser(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_launched_workers(folder: Path) -> None:
    base = [sys.executable, "-m", "lockstep", "train", "--data", "synthetic", "--model", "mlp", "--epochs", "2"]
    done = subprocess.run(
        [*base, "--workers", "2", "--out", "two"], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "epoch 2/2" in done.stdout
    assert "two/model.safetensors" in done.stdout
    assert main([*base[3:], "--workers", "1", "--out", "one", "--quiet"]) == 0
    results = [json.loads((folder / name / "result.json").read_text()) for name in ("one", "two")]
    assert [result["workers"] for result in results] == [1, 2]
    assert results[1]["devices"] == ["cpu", "cpu"]
    assert results[1]["train_loss"] == pytest.approx(results[0]["train_loss"], rel=1e-3)
    assert results[1]["test_accuracy"] == pytest.approx(results[0]["test_accuracy"], abs=0.01)

    bad = subprocess.run(
        [*base, "--workers", "3", "--global-batch", "2"], env=environment(), capture_output=True, text=True, check=False
    )
    assert bad.returncode == 2
    assert bad.stderr.startswith("lockstep train: error: --global-batch: expected at least one sample for each of 3")
    assert len(bad.stderr.splitlines()) == 1
    assert left(folder) == {"one", "two"}


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "2"), (signal.SIGTERM, "1")])
def test_a_signal_saves_and_says_how_to_go_on(folder: Path, number: int, workers: str) -> None:
    command = [sys.executable, "-m", "lockstep", "train", "--data", "synthetic", "--model", "mlp", "--out", "long"]
    command += ["--epochs", "100000", "--checkpoint-every", "0", "--workers", workers]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert "epoch" in process.stdout.readline()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert re.search(r"saved long/checkpoints/step-\d+\. Go on with: lockstep train --resume long$", errors.strip())
    assert "Traceback" not in errors
    assert len(list((folder / "long/checkpoints").iterdir())) == 1
