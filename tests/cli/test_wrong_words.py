"""Command lines with missing, contradictory and other launchers' words: one line says what to
type.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.main import main


def said(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command line, one line, with exit code 2."""
    assert main(words.split()) == 2
    text = capsys.readouterr().err.strip()
    assert len(text.splitlines()) == 1, text
    return text


@pytest.mark.parametrize(
    ("words", "here"),
    [
        ("run", "script: expected a Python file or, with -m, a module, got none"),
        ("run -np 2", "script: expected a Python file"),
        ("run -m", "script: expected a Python file or, with -m, a module, got none"),
        ("plan", "script: expected a Python file"),
        ("submit --to slurm", "script: expected a Python file"),
        ("timeline", "DIR: expected a value, got none"),
        (
            "run -np",
            "-np: expected a value, got none (one that begins with a dash is written "
            "--num-proc=VALUE)",
        ),
        (
            "run -np2 train.py",
            "-np: expected a whole number from 1 to 120000, got 'p2'. It is written -np 2",
        ),
        (
            "run --nproc_per_node 2 train.py",
            "--nproc_per_node: `lockstep run` has no such option: the number of",
        ),
        ("run --nproc-per-node=2 train.py", "the number of workers is -np N"),
        ("run --standalone train.py", "not needed"),
        ("run --max_restarts=3 train.py", "--restarts N"),
        ("run --num_machines 2 train.py", "--nnodes N"),
        ("run --rdzv-endpoint=a:1 train.py", "--master-addr ADDR"),
        ("run --gpus 2 train.py", "-np N"),
        ("run --mixed_precision bf16 train.py", 'precision="bf16"'),
        ("run --nprocc 2 train.py", "Did you mean --nproc"),
        ("train --batch-size 8", "--global-batch-size N"),
        ("train --learning_rate 1", "--lr X"),
        ("train --max_epochs 3", "--epochs N"),
        ("train -np 2", "--workers N"),
        (
            "resize",
            "WORKERS: expected the number of workers, 1 or more, after at most one job, got none",
        ),
        ("resize x", "WORKERS: expected the number of workers"),
        ("resize --remove beta 1 2", "--remove HOST takes no number of workers"),
        ("plan --transport shm train.py", "--transport: expected none without a FILE"),
    ],
)
def test_a_wrong_command_line_says_what_to_type(
    words: str, here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here in said(words, capsys)


def test_resize_without_an_elastic_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.flight_recorder import jobs

    monkeypatch.setattr(jobs, "find_jobs", dict)
    text = said("resize 3", capsys)
    assert "got no elastic job on this host. Start it with `lockstep run --elastic MIN:MAX`" in text
    assert "got 12345, which is none" in said("resize 12345 3", capsys)
    assert "no elastic job on this host" in said("join --show", capsys)


def test_a_folder_is_a_program_only_with_a_main(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.launcher.worker_process.script import Script

    (tmp_path / "train.py").touch()
    text = said(f"run {tmp_path}", capsys)
    assert "script: expected a Python file, or a folder with a __main__.py" in text
    assert "It has train.py." in text
    (tmp_path / "__main__.py").touch()
    Script(str(tmp_path)).check()


def test_transports_are_checked_before_the_measurement(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from lockstep.cli.plan import _check_transport
    from lockstep.errors import ConfigError

    measured = SimpleNamespace(transports={"shm": None, "gloo": None})
    _check_transport(measured, "gloo")
    _check_transport(measured, None)
    with pytest.raises(
        ConfigError, match=r"--transport: expected shm or gloo, got 'glo'. Did you mean gloo"
    ):
        _check_transport(measured, "glo")


def test_options_after_the_script_are_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.launcher import start

    monkeypatch.setattr(start, "start", lambda config, listed: None)
    for words, noted in (("train.py -np 2", True), ("-np 2 train.py --lr 1", False)):
        assert main(["run", *words.split()]) == 0
        assert ("-np after train.py goes to the program" in capsys.readouterr().err) is noted
    assert main(["run", "-q", "train.py", "-np", "2"]) == 0
    assert not capsys.readouterr().err
