"""The examples run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from support import warm_python
from support.command import Here
from support.examples import EXAMPLES, alone
from support.pool import Pool

# one start of torchrun for both
BOTH = """
import runpy, sys
for sys.argv in (["own_loop.py", "3"], ["array_work.py"]):
    runpy.run_path(f"{EXAMPLES}/{sys.argv[0]}", run_name="__main__")
"""


def run(*words: str, cwd: Path) -> str:
    """Run Python with `words`, and return what it has printed."""
    done = warm_python.run(words, cwd, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout=100.0)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_accuracy(output: str) -> float:
    return float(output.split()[-1].removesuffix("%"))


def test_own_loop_and_array_work_under_torchrun(pool: Pool, tmp_path: Path) -> None:
    own_loop, array_work = alone(pool, "own_loop.py", "3"), alone(pool, "array_work.py")
    program = tmp_path / "both.py"
    program.write_text(f"EXAMPLES = {str(EXAMPLES)!r}\n{BOTH}")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    *together, last = run(*torchrun, str(program), cwd=tmp_path).splitlines()
    assert last_accuracy(own_loop) > 85
    assert last_accuracy(together[-1]) == pytest.approx(last_accuracy(own_loop), abs=1.5)
    assert array_work == "workers 1  sum 28  squares [0, 1, 4, 9, 16, 25, 36, 49]\n"
    assert last == "workers 2  sum 28  squares [0, 1, 4, 9, 16, 25, 36, 49]"


def test_a_gan_trains_the_same_on_three_workers(pool: Pool, here: Here) -> None:
    ended = here("run", "-np", 3, "--threads", 1, EXAMPLES / "gan.py", 1)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.replace("[0] ", "") == alone(pool, "gan.py", "1")


def test_a_gpt_of_ones_own_learns_the_same_on_two_workers(
    pool: Pool, here: Here, tmp_path: Path
) -> None:
    story = tmp_path / "story.txt"
    story.write_text("One ship sails east. Two ships sail west.\n" * 200)
    ended = here("run", "-np", 2, "--threads", 1, EXAMPLES / "gpt.py", story, 30)
    assert ended.returncode == 0, ended.stderr
    shown = alone(pool, "gpt.py", str(story), "30")
    line = "step   30  loss"
    assert loss_after(line, ended.stdout) == pytest.approx(loss_after(line, shown), rel=1e-3)
    assert loss_after("perplexity", shown) < 10 and "The " in shown


def test_tracking_leaves_what_it_says(tmp_path: Path) -> None:
    shown = run(str(EXAMPLES / "tracking.py"), str(tmp_path / "run"), cwd=tmp_path)
    assert float(shown.partition("accuracy ")[2][:5]) > 0.9
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert found >= {
        "averaged.safetensors",
        "checkpoints",
        "curve.png",
        "metrics.csv",
        "profile",
        "tensorboard",
    }
    assert all(f"{tmp_path}/run/{name}" in shown for name in found)
    header = (tmp_path / "run" / "metrics.csv").read_text().split("\n")[0].split(",")
    assert {"val_averaged_accuracy", "lr_biases", "momentum_weights"} <= set(header)


def test_notebook(tmp_path: Path) -> None:
    assert last_accuracy(run(str(EXAMPLES / "notebook.py"), cwd=tmp_path)) > 90


def test_ddp_runs_as_it_is_under_lockstep_run(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = here("run", "-np", 2, "--threads", 1, EXAMPLES / "ddp.py", 2)
    assert ended.returncode == 0, ended.stderr
    assert last_accuracy(ended.stdout) > 60
    assert {name.split(".")[0] for name in load_weights(tmp_path / "ddp.pt")} == {"0", "2", "6"}
    assert "lockstep" not in (EXAMPLES / "ddp.py").read_text().split('"""')[2]


@pytest.mark.parametrize(
    ("name", "needs"),
    [("finetune_transformers", "transformers"), ("lora", "peft"), ("images_folder", "PIL")],
)
def test_the_bits_are_those_of_one_worker(
    here: Here, name: str, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(needs)
    monkeypatch.chdir(tmp_path)
    ended = here("run", "-np", 2, "--threads", 1, EXAMPLES / f"{name}.py")
    assert ended.returncode == 0, ended.stderr
    assert (
        fingerprints(ended.stdout)
        == fingerprints(run(str(EXAMPLES / f"{name}.py"), cwd=tmp_path))
        != []
    )


def fingerprints(shown: str) -> list[str]:
    return re.findall(r"\b[0-9a-f]{64}\b", shown)


@pytest.mark.parametrize(
    ("name", "line"), [("sharded", "epoch 2: train loss"), ("pipeline", "step 60: loss")]
)
def test_model_parallel_loses_as_one_worker_does(
    pool: Pool, here: Here, name: str, line: str
) -> None:
    ended = here("run", "-np", 2, "--threads", 1, EXAMPLES / f"{name}.py")
    assert ended.returncode == 0, ended.stderr
    assert loss_after(line, ended.stdout) == pytest.approx(
        loss_after(line, alone(pool, f"{name}.py")), rel=1e-3
    )


def test_parquet_files_train_the_same_on_two_workers(
    pool: Pool, here: Here, tmp_path: Path
) -> None:
    ended = here("run", "-np", 2, "--threads", 1, EXAMPLES / "stream_parquet.py", tmp_path / "two")
    assert ended.returncode == 0, ended.stderr
    shown = alone(pool, "stream_parquet.py", str(tmp_path / "one"))
    assert last_accuracy(shown) > 95
    assert loss_after("3000 samples, loss", ended.stdout) == pytest.approx(
        loss_after("samples, loss", shown), rel=1e-2
    )


def loss_after(line: str, shown: str) -> float:
    return float(shown.partition(line)[2].split()[0].strip(","))


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found
