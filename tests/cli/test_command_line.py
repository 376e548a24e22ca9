"""What is typed becomes options, and what cannot becomes one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep import environment, launcher
from lockstep.cli import main, train
from lockstep.cli.main import _parser
from lockstep.errors import ConfigError, WorkerError
from lockstep.launcher.worker_options import MetricsOptions, WorkerOptions
from lockstep.training import training_run
from lockstep.training.options import TrainOptions

# every option with another value than its default: as typed, and as it arrives
TYPED: dict[str, tuple[str, Any]] = {
    "model": ("mlp", "mlp"),
    "data": ("synthetic", "synthetic"),
    "data_dir": ("folder", "folder"),
    "workers": ("3", "3"),
    "device": ("cpu", "cpu"),
    "strategy": ("sharded", "sharded"),
    "sync_batchnorm": ("", True),
    "global_batch_size": ("100", 100),
    "lr": ("2.5e-2", 0.025),
    "optimizer": ("adamw", "adamw"),
    "momentum": ("0.5", 0.5),
    "weight_decay": ("0.01", 0.01),
    "beta1": ("0.8", 0.8),
    "beta2": ("0.95", 0.95),
    "param_groups": ("fc*:lr=0.1", "fc*:lr=0.1"),
    "max_grad_norm": ("2", 2.0),
    "gradient_accumulation_steps": ("4", 4),
    "precision": ("bf16", "bf16"),
    "compile": ("", True),
    "compile_mode": ("reduce-overhead", "reduce-overhead"),
    "channels_last": ("", True),
    "epochs": ("7", 7),
    "schedule": ("step", "step"),
    "warmup_epochs": ("0.5", 0.5),
    "base_batch_size": ("50", 50),
    "seed": ("11", 11),
    "checkpoint_every": ("20steps", "20steps"),
    "async_save": ("", True),
    "replica_check": ("7", 7),
    "keep_checkpoints": ("5", 5),
    "run_dir": ("somewhere", "somewhere"),
    "log": ("tensorboard", "tensorboard"),
    "loader_workers": ("2", 2),
    "max_steps_in_flight": ("4", 4),
    "quiet": ("", True),
    "allow_different_hardware": ("", True),
}

# those that contradict some of the others
WITH_VIRTUAL_WORKERS = {
    "virtual_workers": ("12", 12),
    "threads": ("3", 3),
    "shard_optimizer": ("", True),
    "cross_check": ("10", 10),
    "on_spike": ("skip", "skip"),
}
WITH_REPLICAS = {"devices": ("cpu,cpu", "cpu,cpu")}
WITH_TEXT: dict[str, tuple[str, Any]] = {
    "context": ("64", 64),
    "tokenizer": ("tokenizer.json", "tokenizer.json"),
    "layers": ("2", 2),
    "heads": ("2", 2),
    "width": ("32", 32),
    "dropout": ("0.1", 0.1),
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be run: options, after the number of workers where they are launched."""

    def here(options: TrainOptions) -> dict[str, Any]:
        runs.append(options)
        return {}

    def run_on_workers(of_workers: WorkerOptions, fn: Any, options: TrainOptions) -> dict[str, Any]:
        runs.append((of_workers.workers, options))
        return {}

    runs: list[Any] = []
    monkeypatch.setattr(training_run, "run", here)
    monkeypatch.setattr(launcher, "run_on_workers", run_on_workers)
    return runs


def test_every_option_is_tried_here() -> None:
    every = {**TYPED, **WITH_VIRTUAL_WORKERS, **WITH_REPLICAS, **WITH_TEXT}
    assert set(every) == {option.name for option in fields(TrainOptions)} - {"resume"}
    assert all(getattr(TrainOptions(), name) != value for name, (_, value) in every.items())


def test_flags_become_options(started: list[Any]) -> None:
    flags = [
        text
        for name, (typed, _) in TYPED.items()
        for text in ("--" + name.replace("_", "-"), typed)
        if text
    ]
    assert main(["train", *flags]) == 0
    ((workers, options),) = started
    assert workers == 3
    assert {name: getattr(options, name) for name in TYPED} == {
        name: value for name, (_, value) in TYPED.items()
    }


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--virtual-workers 12 --threads 3 --cross-check 10 --on-spike skip", (12, 3, 10, "skip")),
        ("--virtual-workers 8", (8, None, None, None)),
    ],
)
def test_virtual_workers_and_what_goes_with_them(
    started: list[Any], typed: str, expected: tuple[Any, ...]
) -> None:
    assert main(["train", "--workers", "1", "--quiet", *typed.split()]) == 0
    (options,) = started
    assert expected == (
        options.virtual_workers,
        options.threads,
        options.cross_check,
        options.on_spike,
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_metrics_come_from_a_launcher_also_with_one_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int
) -> None:
    pytest.importorskip("prometheus_client")
    launched: list[WorkerOptions] = []

    def run_on_workers(of_workers: WorkerOptions, *_: Any) -> dict[str, Any]:
        launched.append(of_workers)
        return {}

    monkeypatch.setattr(launcher, "run_on_workers", run_on_workers)
    words = f"--metrics-port 0 --metrics-host ::1 --metrics-file job.prom --workers {workers}"
    assert main(["train", "--quiet", *words.split()]) == 0
    (of_workers,) = launched
    assert of_workers.workers == workers
    assert of_workers.watch.metrics == MetricsOptions(0, "::1", str(tmp_path / "job.prom"))


def test_metrics_are_options_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["train", "--quiet", "--metrics-port", "9400"]) == 2
    assert "--metrics-port: expected none in a worker, got '9400'" in capsys.readouterr().err
    assert not started


def test_devices_of_replicas(started: list[Any]) -> None:
    assert main(["train", "--quiet", "--strategy", "replicas", "--devices", "cpu,cpu"]) == 0
    assert (started[0].strategy, started[0].devices) == ("replicas", "cpu,cpu")


def test_language_models(started: list[Any], empty_folder: Path) -> None:
    flags = [text for name, (typed, _) in WITH_TEXT.items() for text in (f"--{name}", typed)]
    words = ["--model", "gpt", "--data", "text:book.txt", "--workers", "1", "--quiet"]
    assert main(["train", *words, *flags]) == 0
    (options,) = started
    assert {name: getattr(options, name) for name in WITH_TEXT} == {
        n: value for n, (_, value) in WITH_TEXT.items()
    }
    assert "-gpt-book-" in Path(options.run_dir).name


def test_keys_of_a_file_become_options(started: list[Any], empty_folder: Path) -> None:
    lines = [f"{name}: {typed or 'true'}" for name, (typed, _) in TYPED.items()]
    (empty_folder / "a.yaml").write_text("\n".join(lines))
    assert main(["train", "--config", "a.yaml"]) == 0
    ((_, options),) = started
    assert {name: getattr(options, name) for name in TYPED} == {
        name: value for name, (_, value) in TYPED.items()
    }


def test_defaults(started: list[Any]) -> None:
    assert main(["train", "--workers", "1", "--quiet"]) == 0
    (options,) = started
    folder = options.run_dir
    assert Path(folder).parent == Path("runs")
    assert "-lenet-digits-" in Path(folder).name
    assert options == TrainOptions(workers="1", quiet=True, run_dir=folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "trian",
            "lockstep: error: command: expected one of .*train.*, got 'trian'. Did you mean train?",
        ),
        (
            "--versoin",
            "lockstep: error: command: expected .*got '--versoin'. Did you mean --version?",
        ),
        ("--quiet train", "lockstep: error: command: expected .*got '--quiet'"),
        ("train --epochs", "lockstep train: error: --epochs: expected a value, got none"),
        (
            "train --lr -1e-3",
            r"lockstep train: error: --lr: expected a value.* written --lr=VALUE\)",
        ),
        (
            "train --lr=-1e-3",
            "lockstep train: error: --lr: expected a finite number above 0, got '-1e-3'",
        ),
        (
            "train --compile=yes",
            "lockstep train: error: --compile/--no-compile: ignored explicit argument 'yes'",
        ),
        (
            "train --epoch 3",
            "lockstep train: error: option: .*got '--epoch'. Did you mean --epochs",
        ),
        (
            "train --global-bach=3",
            "lockstep train: error: option: .*got '--global-bach'. Did you mean "
            "--global-batch-size?",
        ),
        (
            "train -epochs 3",
            "lockstep train: error: option: .*got '-epochs'. Did you mean --epochs",
        ),
        ("train --no-compil", "lockstep train: error: option: .*Did you mean --no-compile"),
        (
            "train lenet",
            "lockstep train: error: option: expected one that `lockstep train --help` lists, got "
            "'lenet'",
        ),
        (
            "train --seed 18446744073709551616",
            "lockstep train: error: --seed: expected a whole number from 0 to",
        ),
        ("train --run-dir=", "lockstep train: error: --run-dir: expected a text, got ''"),
        (
            "train --run-dir " + "a" * 300,
            "lockstep train: error: --run-dir: expected a folder that can be written",
        ),
        (
            "train --resume " + "a" * 300,
            "lockstep train: error: --resume: expected a folder that can be read",
        ),
    ],
)
def test_what_cannot_be_taken_apart_gets_one_line(
    capsys: pytest.CaptureFixture[str], started: list[Any], arguments: str, said: str
) -> None:
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert re.match(said, printed.err), printed.err
    assert started == []


def test_line_breaks_in_what_was_typed_do_not_break_the_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--model", "a\nb"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for arguments in ([], ["--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "train a model" in shown[0]
    assert "lockstep train --help" in shown[0]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lockstep {lockstep.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(arguments)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80


def test_help_is_grouped_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    titles = (
        "what to train",
        "workers",
        "the step",
        "the run",
        "files and display",
        "examples",
        "exit codes",
    )
    positions = [text.index(f"\n{title}:") for title in titles]
    assert positions == sorted(positions)
    assert all(
        f"--{name.replace('_', '-')}" in text for name in [*TYPED, "resume", "config", "debug"]
    )


def test_examples_of_the_help_can_be_taken_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    examples = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  lockstep train")
    ]
    assert len(examples) > 5
    for example in examples:
        assert _parser().parse_known_args(example[1:])[1] == []


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys; from lockstep.cli.main import _parser; _parser(); sys.exit('torch' in "
        "sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_summary_shows_paths_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("a [/b] :cat: " + "long" * 30)
    folder.mkdir(parents=True)
    result = {
        "val_accuracy": 0.987,
        "epochs": 1,
        "workers": 2,
        "devices": ["CPU"] * 2,
        "samples_per_second": 1234.5,
    }
    train._print_summary(folder, result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "accuracy       98.70% of the test set, after 1 epoch"
    assert lines[2] == "speed          1,234 samples/s with 2 workers"
    assert lines[-1] == "all files      a [/b] :cat: " + "long" * 30  # the only one that is there
    train._print_summary(Path("a"), {**result, "val_accuracy": None})
    assert "accuracy" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "mps", "options", "workers"),
    [
        (0, False, {"global_batch_size": 1024}, 8),  # as many as there are cores
        (0, False, {"global_batch_size": 64}, 2),  # with 32 samples each
        (0, False, {"global_batch_size": 10}, 1),
        (0, False, {"workers": "5"}, 5),
        (4, False, {}, 4),
        (4, False, {"device": "cuda"}, 4),
        (4, False, {"device": "cpu", "global_batch_size": 256}, 8),
        (4, False, {"global_batch_size": 3}, 3),
        (0, True, {}, 1),
        (0, True, {"device": "mps"}, 1),
        (0, True, {"device": "cpu", "data": "fashion-mnist"}, 8),
    ],
)
def test_the_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, gpus: int, mps: bool, options: dict[str, Any], workers: int
) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = torch.device("cuda") if gpus else torch.device("mps") if mps else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    assert train.choose_workers(TrainOptions(**options)) == workers


def test_a_launcher_sets_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "33")
    assert train.choose_workers(TrainOptions()) == 33
    assert train.choose_workers(TrainOptions(workers="33")) == 33
    with pytest.raises(
        ConfigError, match="workers: expected auto or 33, as the launcher started, got '3'"
    ):
        train.choose_workers(TrainOptions(workers="3"))


def test_launched_workers_run_here(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 0
    assert [type(run) for run in started] == [TrainOptions]


@pytest.mark.parametrize(
    ("kind", "reason", "said"),
    [
        (
            "ConfigError",
            "global_batch_size: expected more",
            "--global-batch-size: expected more [rank 1]\n",
        ),
        ("DataError", "x.npy: damaged", "x.npy: damaged [rank 1]\n"),
        ("KeyError", "'x'", "rank 1: KeyError: 'x'\n\nits traceback\n"),
    ],
)
def test_errors_of_workers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    reason: str,
    said: str,
) -> None:
    def launch(*_: Any, **__: Any) -> None:
        raise WorkerError(1, kind, reason, "its traceback", 2)

    monkeypatch.setattr(launcher, "run_on_workers", launch)
    assert main(["train", "--workers", "2"]) == 2
    assert capsys.readouterr().err == f"lockstep train: error: {said}"


def test_help_of_a_module() -> None:
    variables = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-m", "lockstep", "--version"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == f"lockstep {lockstep.__version__}\n"
