"""A real Slurm: ranks and launchers that srun starts, batch scripts of `lockstep submit`, and their
ends.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slurm import Slurm, make_cluster, missing, wait_for

PROGRAM = """
import os, sys, time
import torch
import lockstep
from lockstep.training.callbacks import Callback, Checkpoints

class Slow(Callback):
    def on_train_step_end(self, trainer, result):
        if comm.rank == 0:
            print("step", result.step, flush=True)
        time.sleep(float(os.environ.get("SLOW", 0)) if "SLURM_RESTART_COUNT" not in os.environ else 0)

comm = lockstep.init("cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
data = torch.utils.data.TensorDataset(torch.randn(320, 4), torch.randint(0, 2, (320,)))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
loss, callbacks = torch.nn.CrossEntropyLoss(), [Slow(), Checkpoints("1epoch")]
loaders = int(os.environ.get("LOADERS", 0))
trainer = lockstep.Trainer(
    model, optimizer, loss, 8, virtual_workers=4, run_dir="run", callbacks=callbacks, num_workers=loaders
)
trainer.fit(data, 2)
if comm.rank == 0:
    print("result", lockstep.fingerprint(model, optimizer), comm.size, comm.world.nodes, comm.world.source, flush=True)
"""

LOCKSTEP = (sys.executable, "-m", "lockstep")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if missing():
        pytest.skip(missing())
    with make_cluster() as cluster:
        yield cluster


@pytest.fixture
def project(tmp_path: Path, slurm: Slurm) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(PROGRAM)
    yield tmp_path
    slurm.end_jobs()


@pytest.fixture(scope="module")
def alone(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of the run without Slurm, on one worker."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(PROGRAM)
    done = slurm.run(sys.executable, "train.py", cwd=folder)
    return result(done.stdout + done.stderr)[0]


def result(output: str) -> tuple[str, ...]:
    """The fingerprint, the ranks, the nodes and the launcher that a run has printed at its end."""
    found = re.findall(r"result (\S+) (\d+) (\d+) (\w+)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return tuple(found[0])


def submit(slurm: Slurm, project: Path, *options: str) -> tuple[str, Path]:
    """Let `lockstep submit` hand over the program; the number of the job, and its log."""
    words = ("submit", "--to", "slurm", "--shared-folder", project, "--yes", *options, "train.py")
    done = slurm.run(*LOCKSTEP, *words, cwd=project)
    found = re.fullmatch(r"Submitted batch job (\d+)\n", done.stdout)
    assert found is not None, done
    return found[1], project / "logs" / f"train-{found[1]}.out"


def wait_for_step(log: Path, number: int = 3) -> None:
    wait_for(
        lambda: log.exists() and f"step {number}\n" in log.read_text(),
        lambda: log.read_text() if log.exists() else "",
    )


def steps(log: Path) -> list[int]:
    return [int(number) for number in re.findall(r"step (\d+)$", log.read_text(), re.MULTILINE)]


@pytest.mark.parametrize(("nodes", "tasks"), [(2, 1), (1, 2), (2, 2)])
def test_one_task_for_each_rank(
    slurm: Slurm, project: Path, alone: str, nodes: int, tasks: int
) -> None:
    step = ("srun", f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--kill-on-bad-exit=1")
    done = slurm.run(*step, sys.executable, "train.py", cwd=project)
    assert result(done.stdout + done.stderr) == (alone, str(nodes * tasks), str(nodes), "slurm")


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_launcher_for_each_node(slurm: Slurm, project: Path, alone: str, nodes: int) -> None:
    step = ("srun", f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=2")
    run = ("run", "--no-prefix", "-np", "2", "--nodes", "auto", "train.py")
    done = slurm.run(*step, *LOCKSTEP, *run, cwd=project)
    assert result(done.stdout + done.stderr) == (alone, str(nodes * 2), str(nodes), "lockstep")


def test_the_file_of_submit(slurm: Slurm, project: Path, alone: str) -> None:
    number, log = submit(slurm, project, "--nodes", "2", "-np", "1", "--no-prefix", "--time", "5m")
    job = slurm.wait_for_job(number, "COMPLETED", "FAILED", "CANCELLED")
    assert job["JobState"] == "COMPLETED", log.read_text()
    assert result(log.read_text()) == (alone, "2", "2", "lockstep")


def test_scancel_ends_in_a_checkpoint_which_the_next_job_resumes(
    slurm: Slurm, project: Path, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(slurm.environment, "SLOW", "0.5")
    number, log = submit(slurm, project, "--nodes", "2", "-np", "1", "--no-prefix", "--time", "30m")
    wait_for_step(log)
    slurm.run("scancel", number, cwd=project)
    slurm.wait_for_job(number, "CANCELLED", "FAILED", "COMPLETED")
    done = steps(log)[-1]
    assert 3 <= done < 70
    wait_for(lambda: any(project.glob("run/checkpoints/step-*/manifest.json")), log.read_text)
    monkeypatch.delitem(slurm.environment, "SLOW")
    number, log = submit(slurm, project, "-np", "2", "--no-prefix")
    slurm.wait_for_job(number, "COMPLETED", "FAILED", "CANCELLED")
    assert result(log.read_text())[:2] == (alone, "2")
    assert steps(log)[0] > 3


def test_a_signal_to_the_steps_alone_ends_the_job_without_a_requeue(
    slurm: Slurm, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sends the signal to every process of the step, loader processes among them."""
    monkeypatch.setitem(slurm.environment, "SLOW", "0.5")
    monkeypatch.setitem(slurm.environment, "LOADERS", "1")
    number, log = submit(slurm, project, "-np", "2", "--no-prefix", "--time", "30m")
    wait_for_step(log)
    slurm.run("scancel", "--signal=TERM", number, cwd=project)
    job = slurm.wait_for_job(number, "FAILED", "COMPLETED", "CANCELLED")
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "143:0", "0")
    assert any(project.glob("run/checkpoints/step-*/manifest.json")), log.read_text()
    assert "DataLoader worker" not in log.read_text()


@pytest.mark.timeout(400)
def test_at_the_time_limit_the_job_is_requeued_and_resumes_with_equal_bits(
    slurm: Slurm, project: Path, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the signal comes 45 s before the end, or up to a minute earlier; a worker stops some steps
    # after it, in 15 s
    monkeypatch.setitem(slurm.environment, "SLOW", "1.5")
    number, log = submit(
        slurm, project, "--nodes", "2", "-np", "1", "--no-prefix", "--time", "2m", "--grace", "15"
    )
    job = slurm.wait_for_job(number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", limit=300.0)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log.read_text()
    assert result(log.read_text())[0] == alone
    assert steps(log) == list(range(80))  # saved before the end: none is lost, and none repeated


@pytest.mark.timeout(400)
def test_a_requeued_job_resumes_with_equal_bits(
    slurm: Slurm, project: Path, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(slurm.environment, "SLOW", "0.5")
    number, log = submit(slurm, project, "--nodes", "2", "-np", "1", "--no-prefix", "--time", "30m")
    wait_for_step(log)
    slurm.run("scontrol", "requeue", number, cwd=project)
    job = slurm.wait_for_job(number, "COMPLETED", "FAILED", "CANCELLED", limit=300.0)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log.read_text()
    assert result(log.read_text())[0] == alone
    assert steps(log) == list(range(80))


def test_the_doctor_examines_the_nodes_of_a_step(slurm: Slurm, project: Path) -> None:
    program = (
        "from lockstep.doctor.cluster import examine_cluster as e; s = e(60.0); print(s.facts, "
        "s.problems)"
    )
    step = ("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-c", program)
    shown = slurm.run(*step, cwd=project).stdout
    assert "Slurm: rank 0 of 2, which meet at 127.0.0.2:" in shown
    assert (
        ": all others have come" in shown
        and ": reached from here" in shown
        and " on 2 ranks" in shown
    )
    assert shown.count(" []\n") == 2  # no problems
    assert "main* (2 nodes" in shown


def test_what_slurm_refuses_is_one_line(slurm: Slurm, project: Path) -> None:
    def refused(*options: str) -> str:
        done = slurm.run(
            *LOCKSTEP, "submit", "--to", "slurm", "--yes", *options, "train.py", cwd=project
        )
        assert done.returncode and len(done.stderr.splitlines()) == 1, done
        return done.stderr

    shared = ("--shared-folder", str(project))
    assert "--nodes: expected at most 2, the nodes of partition main, got 3" in refused(
        *shared, "--nodes", "3"
    )
    assert "--partition: expected one of main, got 'gpus'" in refused(
        *shared, "--partition", "gpus"
    )
    assert "--time: expected at most 1:00:00, the limit of partition main" in refused(
        *shared, "--time", "2h"
    )
    assert "Slurm would not run this job: Invalid generic resource" in refused(
        *shared, "--gpus", "1"
    )
    assert "expected a file on a folder that all nodes share" in refused("--nodes", "2")
