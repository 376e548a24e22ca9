"""`lockstep ledger`, `replay`, `blame` and `diff`, on runs of a user's own program."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.proof.ledger import ledger
from support import warm_python
from support.command import Here

PROGRAM = """
import os, signal, sys
import torch
from torch import nn
import lockstep

bad = int(os.environ.get("BAD_SAMPLE", "-1"))
kind = os.environ.get("BAD_KIND", "large")

class Data(torch.utils.data.Dataset):
    def __init__(self, samples=384):
        draws = torch.Generator().manual_seed(3)
        self.labels = torch.randint(0, 4, (samples,), generator=draws)
        self.images = torch.randn(samples, 1, 8, 8, generator=draws) + self.labels[:, None, None, None]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index] + 0.01 * torch.randn(1, 8, 8)
        if index == bad and kind == "large":
            return image * 1000, (self.labels[index] + 1) % 4
        if index == bad and kind == "nan":
            image[0, 3, 3] = torch.nan
        if index == bad and kind == "negative":
            image = -image.abs() - 1
        if index == bad and kind == "zero":
            image = torch.zeros(1, 8, 8)
        return image, self.labels[index]

class Root(nn.Module):
    def forward(self, x):
        return torch.where(x.amax((1, 2, 3), keepdim=True) < 0, torch.sqrt(x), x)

class Length(nn.Module):
    def forward(self, x):
        return x + 0 * torch.sqrt((x * x).sum((1, 2, 3), keepdim=True))

class Rate(lockstep.callbacks.Callback):
    every_rank = True
    def on_train_step_end(self, trainer, result):
        if kind == "rate" and result.step == 9:
            for group in trainer.optimizer.param_groups:
                group["lr"] = float("inf")

class Kill(lockstep.callbacks.Callback):
    def on_train_step_end(self, trainer, result):
        if result.step == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(int(os.environ.get("WEIGHTS", "0")))
first = {"negative": [Root()], "zero": [nn.Conv2d(1, 1, 1, bias=False), Length()]}.get(kind, [])
layers = [*first, nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), float(os.environ.get("RATE", "0.01")))
callbacks = [lockstep.callbacks.Checkpoints("8steps"), Kill(), Rate()]
trainer = lockstep.Trainer(
    model, optimizer, nn.CrossEntropyLoss(), 16, run_dir=sys.argv[1], callbacks=callbacks, virtual_workers=4
)
trainer.fit(Data(), max_steps=24, resume="latest" if "RESUME" in os.environ else None)
print("this far a replay does not come")
"""


def used_in(step: int) -> int:
    """The number of a sample that step uses, which no other one does."""
    lockstep.init("cpu")
    return int(lockstep.Loader(range(384), 16).order(0)[16 * step + 5])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program and a run of it on one worker."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.py").write_text(PROGRAM)
    assert program(folder, "a").returncode == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to be changed."""
    for each in made.iterdir():
        copy = shutil.copytree if each.is_dir() else shutil.copy
        copy(each, tmp_path / each.name)  # type: ignore[operator]
    text = (tmp_path / "a" / "ledger.jsonl").read_text()
    (tmp_path / "a" / "ledger.jsonl").write_text(text.replace(str(made), str(tmp_path)))
    return tmp_path


def program(folder: Path, run: str, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | {
        name: str(value) for name, value in variables.items()
    }
    return warm_python.run(["train.py", run], folder, environment, timeout=100.0)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_made_on_one_worker_is_replayed_with_its_bits(
    made: Path, here: Here, workers: int
) -> None:
    before = files(made)
    ended = here("replay", made / "a", "--step", 21, "-np", workers)
    assert ended.returncode == 0, ended
    assert f"from checkpoints/step-0000000016 to step 21 on {workers} worker" in ended.stderr
    assert "6 steps compared with the ledger: the same bits" in ended.stdout
    lines = ended.stdout.splitlines()
    assert (
        " ".join(lines[2].split()) == "shard loss gradient sample largest losses gradient of norm"
    )
    assert [line.split()[0] for line in lines[3:7]] == ["0", "1", "2", "3"]
    assert "this far" not in ended.stdout
    assert files(made) == before


def test_who_quits_the_debugger_ends_the_replay(made: Path) -> None:
    words = [sys.executable, "-m", "lockstep", "replay", "a", "--step", "18", "--debug"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    text = "p len(indices)\nup\nq\n"
    ended = subprocess.run(
        words, cwd=made, env=variables, input=text, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended
    assert "(Pdb) 16" in ended.stdout
    assert "2 steps compared with the ledger: the same bits" in ended.stdout
    assert "Quit" not in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_run_of_lockstep_train_is_replayed_with_its_bits(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = ["--data", "digits", "--model", "mlp", "--global-batch-size", "128", "--epochs", "1"]
    words += ["--workers", "1", "--run-dir", str(run), "--checkpoint-every", "8steps"]
    # the command line that the run keeps; tests before may have left another one, or none
    monkeypatch.setattr(sys, "argv", ["lockstep", "train", *words])
    made = here("train", *words)
    assert made.returncode == 0, made
    before = files(run)
    monkeypatch.setattr(sys, "argv", ["lockstep", "replay", str(run), "--step", "10"])
    monkeypatch.setenv("LOCKSTEP_DEBUG", "1")  # a program that fails shows where
    ended = here("replay", run, "--step", 10)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "from checkpoints/step-0000000008 to step 10 on 1 worker" in ended.stderr
    assert "3 steps compared with the ledger: the same bits" in ended.stdout
    assert files(run) == before


def test_the_ledger_is_printed(made: Path, here: Here) -> None:
    ended = here("ledger", made / "a", "--steps", "6:8")
    assert ended.returncode == 0
    head, start, names, *rows = ended.stdout.splitlines()
    assert head == (
        f"{made / 'a'}: 24 steps, 1 start; Sequential of 1,108 parameters, AdamW, global batch 16, "
    ) + ("4 virtual workers")
    assert "1 worker, cpu: steps 0 to 23: train.py a" in start
    assert names.split() == ["step", "loss", "gradient", "buffers", "lr", "samples", "workers"]
    assert [row.split()[0] for row in rows] == ["6", "7", "8"]
    values = here("ledger", made / "a", "--csv").stdout.splitlines()
    assert values[0].startswith("step,loss,count,gradient_norm,learning_rate,samples,buffers_norm")
    assert len(values) == 25
    assert float(values[1].split(",")[1]) == ledger(made / "a").steps["loss"][0]
    assert "no step was computed again" in here("ledger", made / "a", "--recomputed").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["replay", "{}/a", "--step", "9000"],
            "--step: expected a step of the ledger of {}/a, 0 to 23, got 9000",
        ),
        (
            ["replay", "{}/a", "--step", "x"],
            "--step: expected a whole number of at least 0, got 'x'",
        ),
        (["ledger", "{}"], "{}: no ledger (ledger=False, or an older version)"),
        (["blame", "{}/none"], "{}/none: no ledger (there is no such folder)"),
        (["ledger", "{}/a", "--steps", "b"], "--steps: expected A:B"),
        (["replay", "{}/a", "--step", "3", "-np", "2", "--debug"], "-np: expected 1 with --debug"),
    ],
)
def test_bad_input_is_said_in_one_line(made: Path, here: Here, words: list[str], said: str) -> None:
    ended = here(*[word.format(made) for word in words])
    assert ended.returncode == 2
    assert said.format(made) in ended.stderr


def test_nothing_stands_out(made: Path, here: Here) -> None:
    ended = here("blame", made / "a")
    assert ended.returncode == 1
    assert f"none of 24 steps of {made / 'a'} stands out; --step N chooses one" in ended.stderr


def test_a_run_that_was_killed_and_resumed_is_compared_and_replayed(made: Path, here: Here) -> None:
    assert program(made, "killed", KILL_AT=20).returncode == -signal.SIGKILL
    with (made / "killed" / "ledger.bin").open("ab") as file:
        file.write(b"\0" * 37)
    ended = program(made, "killed", RESUME=1)
    assert ended.returncode == 0
    assert "37 bytes of a torn end were cut off the ledger" in ended.stderr
    assert "another result" not in ended.stderr
    found, whole = ledger(made / "killed"), ledger(made / "a")
    assert found.steps["loss"].tolist() == whole.steps["loss"].tolist()
    assert found.recomputed["step"].tolist() == [16, 17, 18, 19, 20]
    said = here("ledger", made / "killed", "--recomputed").stdout
    assert said.count("the same bits") == 5
    assert "5 steps were computed again, 0 with another result" in said
    ended_replay = here("replay", made / "killed", "--step", 22)
    assert "7 steps compared with the ledger: the same bits" in ended_replay.stdout


def test_a_program_that_was_changed_is_named(folder: Path, here: Here) -> None:
    text = (folder / "train.py").read_text()
    (folder / "train.py").write_text(text.replace("nn.Dropout(0.2)", "nn.Dropout(0.3)"))
    ended = here("replay", folder / "a", "--step", 10)
    assert ended.returncode == 1
    assert (
        "3 steps compared with the ledger; the first that differs: step 8: the loss was"
        in ended.stdout
    )
    assert "changed since: the program" in ended.stdout


def test_data_that_were_changed_are_named(folder: Path, here: Here) -> None:
    text = (folder / "train.py").read_text()
    (folder / "train.py").write_text(text.replace("+ 0.01 * torch", "+ 0.02 * torch"))
    ended = here("replay", folder / "a", "--step", 3)
    assert ended.returncode == 1
    assert "step 0: the loss was" in ended.stdout
    assert "changed since: the content of samples (0, " in ended.stdout


def test_weights_that_are_not_seeded_are_named(folder: Path, here: Here) -> None:
    text = (folder / "train.py").read_text()
    (folder / "train.py").write_text(
        text.replace("torch.manual_seed(int", "torch.manual_seed(7 + int")
    )
    ended = here("replay", folder / "a", "--step", 3)
    assert ended.returncode == 1
    assert "the initial weights: seed them (torch.manual_seed)" in ended.stdout


def test_a_variable_that_is_missing_is_named(
    made: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (made / "train.py").read_text()
    (made / "secret.py").write_text('import os\nos.environ["MY_TOKEN"]\n' + text)
    words = [sys.executable, "secret.py", "secret"]
    subprocess.run(words, cwd=made, env={**os.environ, "MY_TOKEN": "hidden"}, check=True)
    assert b"hidden" not in (made / "secret" / "ledger.jsonl").read_bytes()
    monkeypatch.delenv("MY_TOKEN", raising=False)
    ended = here("replay", made / "secret", "--step", 3)
    assert ended.returncode == 1
    assert (
        "secret.py ended before step 3: KeyError: 'MY_TOKEN'; the run had the variable MY_TOKEN, "
        "which is not kept" in ended.stderr
    )
    where = 'os.environ["MY_TOKEN"]'
    assert where not in ended.stderr
    monkeypatch.setenv("LOCKSTEP_DEBUG", "1")
    assert where in here("replay", made / "secret", "--step", 3).stderr


def test_the_sample_behind_a_spike_is_named_from_an_environment_like_that_of_the_run(
    made: Path, here: Here
) -> None:
    bad = used_in(18)
    assert program(made, "large", BAD_SAMPLE=bad).returncode == 0
    ended = here("blame", made / "large")
    assert ended.returncode == 0, ended
    assert "the same bits" in ended.stdout
    assert f"sample {bad}: 100% of the gradient" in ended.stdout
    assert "[1, 8, 8] from " in ended.stdout
    assert (made / "large" / "blame" / f"sample-{bad}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kind", "origin"),
    [
        ("nan", "in the sample itself: 1 of 64 values are not finite"),
        ("negative", "NaN first in 0 (Root), operation sqrt; the sample itself is finite"),
    ],
)
def test_a_nan_is_followed_to_where_it_begins(
    made: Path, here: Here, kind: str, origin: str
) -> None:
    bad = used_in(3)
    assert "DivergedError" in program(made, kind, BAD_SAMPLE=bad, BAD_KIND=kind).stderr
    ended = here("blame", made / kind, "-np", 2)
    assert ended.returncode == 0, ended
    assert f"sample {bad}: {origin}" in ended.stdout


def test_the_step_that_made_weights_nan_is_blamed_for_those_after_it(
    made: Path, here: Here
) -> None:
    bad = used_in(10)
    ended = program(made, "zero", BAD_SAMPLE=bad, BAD_KIND="zero")
    assert "step 11" in ended.stderr, ended  # the loss of step 10 is finite, its gradient is not
    ended_blame = here("blame", made / "zero", "--step", 11)
    assert ended_blame.returncode == 0, ended_blame
    assert "from checkpoints/step-0000000008 to step 10 on 1 worker" in ended_blame.stderr
    out = ended_blame.stdout
    assert "step 11 began with weights that were not finite: 1 of 1 values of 0.weight" in out
    assert "since the update of step 10" in out
    assert f"sample {bad}: NaN first in the backward pass of 1 (Length)" in out


def test_an_update_that_makes_weights_nan_of_a_finite_gradient_is_blamed_itself(
    made: Path, here: Here
) -> None:
    assert "DivergedError" in program(made, "infinite", BAD_KIND="rate").stderr
    ended = here("blame", made / "infinite")
    assert ended.returncode == 1, ended
    assert "step 11 began with weights that were not finite" in ended.stdout
    assert (
        "loss and gradient of step 10 are finite: no sample is to blame, but its update (AdamW"
        in (ended.stdout)
    )


def test_two_runs_are_compared(made: Path, here: Here) -> None:
    assert program(made, "rate", RATE=0.02).returncode == 0
    same = here("diff", made / "a", made / "a")
    assert same.returncode == 0
    assert "24 steps are the same, bit for bit" in same.stdout
    ended = here("diff", made / "a", made / "rate")
    assert ended.returncode == 1
    assert "variables.RATE (None, and '0.02')" in ended.stdout
    assert (
        "0 steps are the same; the first that differs: step 0: the learning rate was 0.01"
        in ended.stdout
    )
    assert "cause: they have other learning rates" in ended.stdout


def test_the_first_module_that_differs_between_two_runs_is_named(made: Path, here: Here) -> None:
    text = (made / "train.py").read_text()
    (made / "other.py").write_text(text.replace("nn.Dropout(0.2)", "nn.Dropout(0.3)"))
    subprocess.run([sys.executable, "other.py", "other"], cwd=made, check=True)
    ended = here("diff", made / "a", made / "other")
    assert ended.returncode == 1
    assert "the program" in ended.stdout
    assert "first difference in that step: shard 0, output of 3 (Dropout)" in ended.stdout
