"""``lockstep run --elastic`` and ``lockstep resize``, on real jobs."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from lockstep.cli import main
from lockstep.flight_recorder import jobs, open_job
from lockstep.system.processes import is_alive
from support import warm_python
from support.elastic_program import fingerprint, rows, write_program
from support.examples import EXAMPLES, alone
from support.pool import Pool
from support.warm_python import WarmProcess

DEADLINE = 90.0


def start(folder: Path, *words: object) -> WarmProcess:
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    return warm_python.popen(["-m", "lockstep", "run", "--elastic", *words], folder, variables)


def write(folder: Path, epochs: int) -> Path:
    return write_program(folder, epochs, folder / "run", samples=96, virtual_workers=4)


def test_the_example_gives_the_same_bits_when_a_worker_is_killed(
    pool: Pool, tmp_path: Path
) -> None:
    with start(tmp_path, "1:4", "-np", 3, EXAMPLES / "elastic.py", 3) as job:
        end = time.monotonic() + DEADLINE
        while not (pids := training_ranks(job.pid)) and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(pids[-1], signal.SIGKILL)
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert "was lost (killed by SIGKILL); 2 workers go on" in err
    assert fingerprint(out) == fingerprint(alone(pool, "elastic.py", "3"))


def training_ranks(launcher: int) -> list[int]:
    """The processes of a job's ranks that have done some steps of the training."""
    found = []
    for folder, job in jobs.find_jobs().items():
        for reader in open_job(folder).values() if job.pid == launcher else ():
            if (reader.state().batch or 0) > 4:
                found.append(reader.pid)
            reader.close()
    return found


@pytest.mark.parametrize("lost", ["rank 0", "rank 1"])
def test_workers_are_lost_replaced_and_added(
    lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = write(tmp_path, 1000)
    with start(tmp_path, "1:4", "-np", 2, program) as job:
        seen = job.read_until(r"step 9 of 2")
        pids = {rank: int(pid) for rank, pid in re.findall(r"\[(\d)\] pid (\d+)", seen)}
        os.kill(pids[lost.removeprefix("rank ")], signal.SIGKILL)
        seen += job.read_until(r"pid \d+")
        seen += job.read_until(r"step \d+ of 2")
        assert main(["resize", str(job.pid), "4"]) == 0
        assert "2 workers before, 4 after" in capsys.readouterr().out
        seen += job.read_until(r"step \d+ of 4")
        assert main(["resize", str(job.pid), "5"]) == 1
        assert "expected 1 to 4 workers" in capsys.readouterr().err
        (tmp_path / "enough").touch()  # at the end of this epoch
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert f"{lost} was lost (killed by SIGKILL); 1 worker goes on" in err
    alone_ = tmp_path / "alone"
    alone_.mkdir()
    epochs = len(rows(tmp_path / "run")) - 1
    program = write(alone_, epochs)
    done = warm_python.run([program], alone_, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert fingerprint(seen + out) == fingerprint(done.stdout)
    assert rows(tmp_path / "run") == rows(alone_ / "run")


def test_the_first_replacement_joins_where_there_are_as_many_workers_as_virtual_ones(
    tmp_path: Path,
) -> None:
    program = write_program(tmp_path, 1000, tmp_path / "run", virtual_workers=2)
    with start(tmp_path, "1:2", "-np", 2, program) as job:
        seen = job.read_until(r"step 3 of 2")
        os.kill(int(re.findall(r"\[1\] pid (\d+)", seen)[0]), signal.SIGKILL)
        seen += job.read_until(r"pid \d+")
        seen += job.read_until(r"step \d+ of 2")
        (tmp_path / "enough").touch()
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert len(re.findall(r"pid \d+", seen + out)) == 3


FAULTY = """
def flip(gradient):
    if os.environ["LOCAL_RANK"] == "1" and trainer.step.steps_done >= 4:  # which is checked
        gradient = gradient.clone()
        gradient.view(torch.int32)[0, 0] ^= 1 << 22
    return gradient
model[0].weight.register_hook(flip)
print("local rank", os.environ["LOCAL_RANK"], flush=True)
trainer.fit("""


@pytest.mark.parametrize("workers", ["2:4", "3:3"])
def test_a_worker_that_computes_wrong_numbers_leaves_and_its_device_is_used_no_more(
    workers: str, tmp_path: Path
) -> None:
    program = write(tmp_path, 3)
    healthy = program.read_text()
    text = healthy.replace("virtual_workers=4,", "virtual_workers=4, cross_check=2,")
    program.write_text(text.replace("\ntrainer.fit(", FAULTY))
    with start(tmp_path, workers, "-np", 3, program) as job:
        out, err = job.communicate(DEADLINE)
    assert re.search(r"rank 1 \(host .*\) computes another gradient .* again when it was", err), err
    assert "rank 1 computes wrong numbers and leaves; its device is used no more" in err, err
    if workers == "3:3":
        assert job.returncode, err
        assert "2 workers can run without the devices that compute wrong numbers" in err
        assert sorted(re.findall(r"local rank (\d)", out)) == ["0", "1", "2"]
        return
    assert job.returncode == 0, err
    assert sorted(re.findall(r"local rank (\d)", out)) == ["0", "1", "2", "3"]
    program.write_text(healthy.replace(str(tmp_path / "run"), str(tmp_path / "alone")))
    done = warm_python.run([program], tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert fingerprint(out) == fingerprint(done.stdout)


COUNTS_WHAT_STAYS = """
import collections, gc
gc.disable()  # what only the search for cycles frees stays for some hundred changes of workers
PROGRAM
    found = collections.Counter(type(each).__name__ for each in gc.get_objects())
    for kind in ("ExitHooks", "Session", "WatchdogState", "FlightRecorder", "GroupMonitor", "CrossHost",
                 "Reducer", "Bucket", "BucketExchange", "PiecesInFlight", "GenerationStore",
                 "MembershipChangedError"):
        print("kept", kind, found[kind], flush=True)
"""


def test_losses_leave_nothing_behind(tmp_path: Path) -> None:
    program = write(tmp_path, 1000)
    program.write_text(COUNTS_WHAT_STAYS.replace("PROGRAM", program.read_text()))
    with start(tmp_path, "1:2", "-np", 2, program) as job:
        seen = job.read_until(r"step 3 of 2")
        files = []
        losses = 4
        for _ in range(losses):
            os.kill(int(re.findall(r"pid (\d+)", seen)[-1]), signal.SIGKILL)
            seen += job.read_until(r"pid \d+")
            seen += job.read_until(r"step \d+ of 2")
            files.append(psutil.Process(job.pid).num_fds())
        end = time.monotonic() + DEADLINE
        # The launcher opens the records of a worker's group a moment later, the first time after any
        # of these losses. What each loss left behind would be one file for each, at least.
        most = files[0] + losses - 1
        while psutil.Process(job.pid).num_fds() > most and time.monotonic() < end:
            time.sleep(0.01)  # a pipe is closed by the thread that reads it
        files.append(psutil.Process(job.pid).num_fds())
        (tmp_path / "enough").touch()
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert files[-1] <= most, files
    # of the group and the step at the end, and none of the eight groups and steps before
    kept = re.findall(r"kept (\w+) (\d+)", out)
    assert len(kept) == 12 and all(int(number) <= 2 for _, number in kept), kept


def test_a_worker_leaves_and_the_job_is_interrupted_and_resumed(tmp_path: Path) -> None:
    program = write(tmp_path, 30)
    with start(tmp_path, "1:4", "-np", 3, program) as job:
        seen = job.read_until(r"step 9 of 3")
        leaver = int(re.findall(r"\[2\] pid (\d+)", seen)[0])
        os.kill(leaver, signal.SIGTERM)
        job.read_until(r"step \d+ of 2")
        while is_alive(leaver):  # else the job's own signal may end it
            time.sleep(0.001)
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 143, err
    assert "rank 2 has left; 2 workers go on" in err
    assert "lost" not in err and "lockstep run --resume" in err
    with start(tmp_path, "1:4", "-np", 2, "--resume", tmp_path / "run", program) as job:
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    alone_ = tmp_path / "alone"
    alone_.mkdir()
    done = warm_python.run([write(alone_, 30)], alone_, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert fingerprint(out) == fingerprint(done.stdout)


def test_a_strategy_whose_state_is_in_parts_starts_again_from_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    program = write(tmp_path, 1000)
    text = program.read_text().replace("virtual_workers=4,", 'strategy="sharded",')
    text = text.replace("Checkpoints()", 'Checkpoints("2steps")')
    program.write_text(text[: text.index("if comm.rank == 0:\n    print")])
    with start(tmp_path, "1:2", "-np", 2, program) as job:
        seen = job.read_until(r"step 5 of 2")
        os.kill(int(re.findall(r"\[1\] pid (\d+)", seen)[0]), signal.SIGKILL)
        job.read_until(r"pid \d+")
        assert int(re.findall(r"step (\d+) of 2", job.read_until(r"step \d+ of 2"))[0]) >= 4
        (tmp_path / "enough").touch()
        _, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert (
        err.count("the loss of a worker starts all workers again, from the newest checkpoint") == 2
    ), err
    assert err.count("all workers are started again, from the checkpoint") == 1, err


KILLED_AT_A_CHECKPOINT = """
from lockstep.training.run import checkpoint_manager
def killed_at(path, note=checkpoint_manager.note_checkpoint):
    flag = "killed-at-" + os.path.basename(path)
    if path.endswith(("2", "6")) and not os.path.exists(flag):
        open(flag, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    note(path)
checkpoint_manager.note_checkpoint = killed_at
comm = lockstep.init"""


def test_a_checkpoint_is_resumed_from_that_was_complete_when_its_writer_was_lost(
    tmp_path: Path,
) -> None:
    program = write(tmp_path, 1)
    text = program.read_text().replace("Checkpoints()", 'Checkpoints("2steps")')
    program.write_text(text.replace("\ncomm = lockstep.init", KILLED_AT_A_CHECKPOINT, 1))
    with start(tmp_path, "1:4", "-np", 1, program) as job:
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert err.count("all workers are started again, from the beginning") == 1, err
    assert err.count("all workers are started again, from the checkpoint") == 1, err
    assert [int(step) for step in re.findall(r"step (\d+) of", out)] == list(range(8))
    assert len(rows(tmp_path / "run")) == 1 + 1 and not (tmp_path / "run-2").exists()


OWN_LOOP = """
import os, time, torch, lockstep
comm = lockstep.init("cpu")
print("pid", os.getpid(), flush=True)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
loss_fn, seen = torch.nn.CrossEntropyLoss(), {"values": []}
step = lockstep.TrainStep(model, optimizer, loss_fn, virtual_workers=4)
loader = lockstep.Loader(data, 12, virtual_workers=4)
training = lockstep.elastic.steps(loader, step, EPOCHS, state={"scheduler": scheduler, "seen": seen})
for batch in training:
    loss = step(batch)
    scheduler.step()
    seen["values"].append(float(loss))
    time.sleep(0.02)
    print("step", step.steps_done - 1, "of", comm.size, flush=True)
    if training.ends_epoch:
        held_out = lockstep.Loader(data, 32, virtual_workers=4)
        seen["values"].append(training.call(lockstep.evaluate, model, held_out, loss_fn)["loss"])
        if os.path.exists("enough"):
            training.stop()
if comm.rank == 0:
    print("fingerprint", lockstep.fingerprint(model, optimizer), flush=True)
    print("seen", training.epoch, seen["values"], flush=True)
"""


PREPARED = """
import os, time, torch, lockstep
comm = lockstep.init("cpu")
print("pid", os.getpid(), flush=True)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(1200, 8), torch.randint(0, 3, (1200,)))
held_out = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
loss_fn, seen = torch.nn.CrossEntropyLoss(), {"values": []}
loader = torch.utils.data.DataLoader(data, 12, shuffle=True)
model, optimizer, scheduler, loader = lockstep.prepare(
    model, optimizer, scheduler, loader, virtual_workers=4, state={"seen": seen})
accuracies = []
for epoch in range(EPOCHS):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        mean = optimizer.step(loss=loss)
        scheduler.step()
        if optimizer.stepped:
            seen["values"].append(float(mean))
            time.sleep(0.02)
            print("step", len(seen["values"]) - 1, "of", comm.size, flush=True)
    measured = lockstep.evaluate(model, lockstep.Loader(held_out, 32, virtual_workers=4), loss_fn)
    accuracies.append(measured["accuracy"])
    if comm.on_rank0(lambda: os.path.exists("enough")):
        break
if comm.rank == 0:
    print("fingerprint", lockstep.fingerprint(model, optimizer), flush=True)
    print("seen", epoch + 1, accuracies, seen["values"], flush=True)
"""


@pytest.mark.parametrize("text", [OWN_LOOP, PREPARED], ids=["steps", "prepare"])
def test_a_loop_of_ones_own_goes_on_without_and_with_other_workers(
    tmp_path: Path, text: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(text.replace("EPOCHS", "1000"))
    with start(tmp_path, "1:4", "-np", 3, program) as job:
        seen = job.read_until(r"step 9 of 3")
        pids = {int(rank): int(pid) for rank, pid in re.findall(r"\[(\d)\] pid (\d+)", seen)}
        os.kill(pids[0], signal.SIGKILL)
        seen += job.read_until(r"pid \d+")
        seen += job.read_until(r"step \d+ of 3")
        os.kill(pids[1], signal.SIGTERM)
        seen += job.read_until(r"step \d+ of 2")
        assert is_alive(pids[2])
        (tmp_path / "enough").touch()
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert (
        "rank 0 was lost (killed by SIGKILL); 2 workers go on" in err
        and "has left; 2 workers go on" in err
    )
    assert "started again" not in err and "in an elastic job, with" not in err
    values = re.findall(r"seen (\d+) (.*)", seen + out)
    program.write_text(text.replace("EPOCHS", values[0][0]))
    (tmp_path / "enough").unlink()
    done = warm_python.run([program], tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert re.findall(r"seen (\d+) (.*)", done.stdout) == values
    assert fingerprint(seen + out) == fingerprint(done.stdout)


SECOND_OPTIMIZER = "loader, v", "loader, torch.optim.SGD(model.parameters(), 0.1), v"
COLLECTIVE = (
    "        scheduler.step()",
    "        scheduler.step()\n        comm.allreduce(loss.detach())",
)


@pytest.mark.parametrize(
    ("change", "why"),
    [(SECOND_OPTIMIZER, "2 optimizers"), (COLLECTIVE, "collectives in its bodies")],
)
def test_a_prepared_loop_that_cannot_be_repeated_starts_again_and_says_so(
    change: tuple[str, str], why: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    text = (
        PREPARED.replace("EPOCHS", "1")
        .replace("virtual_workers=4", "virtual_workers=2")
        .replace(*change)
    )
    program.write_text(text.replace("scheduler, loader =", "scheduler, loader, *_ ="))
    with start(tmp_path, "2:2", "-np", 2, program) as job:
        seen = job.read_until(r"step 9 of 2")
        pids = {int(rank): int(pid) for rank, pid in re.findall(r"\[(\d)\] pid (\d+)", seen)}
        os.kill(pids[1], signal.SIGKILL)
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert (
        f"with {why}: no worker can join or leave, and the loss of a worker starts all workers "
        "again" in err
    )
    assert err.count("all workers are started again, from the beginning") == 1
    assert "step 0 of 2" in out and "step 99 of 2" in out


@pytest.mark.parametrize("loop", [OWN_LOOP, PREPARED])
def test_a_signal_to_the_launcher_ends_a_loop_of_ones_own(loop: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(loop.replace("EPOCHS", "1000"))
    with start(tmp_path, "1:4", "-np", 2, program) as job:
        job.read_until(r"step 9 of 2")
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(DEADLINE)
    assert job.returncode == 143, err
    assert "stopped by SIGTERM after step" in err


def test_a_worker_that_is_stopped_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "LOCKSTEP_STALL_WARNING", "2"
    )  # in other jobs it is an error after one second
    program = write(tmp_path, 1000)
    # between two steps: one that is stopped within a collective has reached it
    stops = f"if comm.rank == 1 and result.step == 3: os.kill(os.getpid(), {int(signal.SIGSTOP)})"
    program.write_text(program.read_text().replace("time.sleep(0.02)", stops))
    with start(tmp_path, "1:2", "-np", 2, program) as job:
        seen = job.read_until(r"step 3 of 2")
        while not (pids := re.findall(r"\[1\] pid (\d+)", seen)):
            seen += job.read_until(r"pid \d+")
        stopped = int(pids[0])
        assert job.stderr is not None
        warned = next(line for line in job.stderr if "straggler" in line)
        os.kill(stopped, signal.SIGCONT)
        seen += job.read_until(r"step \d+ of 2")
        (tmp_path / "enough").touch()
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert "has not reached" in warned and "lost" not in err
    assert len(re.findall(r"pid \d+", seen + out)) == 2


def test_a_worker_that_stays_stopped_is_replaced(tmp_path: Path) -> None:
    program = write(tmp_path, 1000)
    with start(tmp_path, "1:2", "-np", 2, "--stall-timeout", 1, program) as job:
        seen = job.read_until(r"step 3 of 2")
        os.kill(int(re.findall(r"pid (\d+)", seen)[-1]), signal.SIGSTOP)
        job.read_until(r"pid \d+")
        job.read_until(r"step \d+ of 2")
        (tmp_path / "enough").touch()
        _, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert re.search(r"rank \d has been stopped by a signal for 1 s .*; it is killed", err)
    assert "was lost (killed by SIGKILL); 1 worker goes on" in err


def test_a_worker_that_hangs_ends_the_job(tmp_path: Path) -> None:
    program = write(tmp_path, 1000)
    hang = "if comm.rank == 1 and result.step == 3: time.sleep(1000)"
    program.write_text(program.read_text().replace("time.sleep(0.02)", hang))
    with start(tmp_path, "1:2", "-np", 2, "--stall-timeout", 1, program) as job:
        _, err = job.communicate(DEADLINE)
    assert job.returncode == 1
    assert "Rank 1 did not reach" in err


ABORTS_AT_EXIT = """
import atexit, os, torch, lockstep
comm = lockstep.init("cpu")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randint(0, 3, (24,)))
model = torch.nn.Linear(8, 3)
optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.1), torch.nn.CrossEntropyLoss()
lockstep.Trainer(model, optimizer, loss_fn, 12, virtual_workers=2, callbacks=[]).fit(data, 2)
print("fitted", flush=True)
if comm.rank == 1:
    atexit.register(os.abort)
else:
    import time
    time.sleep(600)  # it does something else, and is ended
"""


def test_a_crash_at_exit_ends_the_job_with_its_code_and_trains_nothing_again(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(ABORTS_AT_EXIT)
    with start(tmp_path, "1:2", "-np", 2, program) as job:
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 128 + signal.SIGABRT, err
    assert out.count("fitted") == 2
    assert "rank 1" in err and "killed by SIGABRT" in err and "started again" not in err
    assert "Fatal Python error: Aborted" in err


FAILS = """
import lockstep, os, signal
comm = lockstep.init("cpu")
if comm.rank == 1:
    BODY
comm.barrier()
"""


def test_an_error_of_the_program_ends_the_job(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FAILS.replace("BODY", "raise ValueError('of the program')"))
    with start(tmp_path, "1:4", "-np", 2, program) as job:
        _, err = job.communicate(DEADLINE)
    assert job.returncode == 1
    assert "rank 1: ValueError: of the program" in err


def test_workers_that_are_lost_before_the_training_again_and_again_end_the_job(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(FAILS.replace("BODY", "os.kill(os.getpid(), signal.SIGKILL)"))
    with start(tmp_path, "1:4", "-np", 2, program) as job:
        _, err = job.communicate(DEADLINE)
    assert job.returncode == 1
    assert err.count("all workers are started again, from the beginning") == 3
    assert "without any progress" in err


def test_workers_that_are_all_lost_before_the_first_checkpoint_begin_again_in_the_same_folder(
    tmp_path: Path,
) -> None:
    program = write(tmp_path, 2)
    with start(tmp_path, "1:2", "-np", 2, program) as job:
        seen = job.read_until(r"step 2 of 2")
        for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none goes on without the other
            for pid in re.findall(r"pid (\d+)", seen):
                os.kill(int(pid), number)
        _, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    assert "all workers are started again, from the beginning" in err
    assert len(rows(tmp_path / "run")) == 1 + 2
    assert not (tmp_path / "run-2").exists()


MESSAGES = """
import os, signal, time, torch, torch.distributed as dist, lockstep
comm = lockstep.init("cpu", transport="gloo")
data = torch.utils.data.TensorDataset(torch.randn(18, 4), torch.randint(0, 2, (18,)))
model = torch.nn.Linear(4, 2)
loader = lockstep.Loader(data, global_batch_size=6, virtual_workers=3)
step = lockstep.TrainStep(
    model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.CrossEntropyLoss(), virtual_workers=3
)

def exchange():
    value = torch.tensor(float(comm.rank))
    if comm.rank == 2 and not os.path.exists("lost"):
        while not os.path.exists("waits"):
            time.sleep(0.01)
        time.sleep(0.2)
        open("lost", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank:
        time.sleep(0.2)
        dist.send(value, 0)
    received = [torch.tensor(0.0) for _ in range(1, comm.size if comm.rank == 0 else 1)]
    for rank, each in enumerate(received, 1):
        began = time.monotonic()
        try:
            if rank == 2:  # which is lost only now: before it would interrupt something else
                open("waits", "w").close()
            dist.recv(each, rank)
        except lockstep.errors.MembershipChangedError:
            print("interrupted after", time.monotonic() - began, flush=True)
            raise
    return [each.item() for each in received]

training = lockstep.elastic.steps(loader, step, epochs=1)
for batch in training:
    step(batch)
    print("received", training.call(exchange), flush=True)
"""


def test_messages_over_gloo_may_be_late_and_are_interrupted_by_a_loss(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(MESSAGES)
    with start(tmp_path, "1:3", "-np", 3, program) as job:
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    interruptions = re.findall(r"interrupted after (\S+)", out)
    assert len(interruptions) == 1, out + err
    assert float(interruptions[0]) < 10
    assert set(re.findall(r"received (\[\S.*\])", out)) <= {"[1.0]", "[1.0, 2.0]"}, out
    assert "mismatch" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--elastic", "3:2", "x.py"], "--elastic: expected MIN:MAX with MIN at most MAX"),
        (["--elastic", "0:2", "x.py"], "--elastic: expected a whole number from 1 to 120"),
        (
            ["--elastic", "1:2", "-np", "3", "x.py"],
            "-np: expected a number from 1 to 2, as --elastic 1:2",
        ),
        (
            ["--elastic", "1:2", "--restarts", "2", "x.py"],
            "--restarts: expected not to be given with --elastic",
        ),
        (
            ["--elastic", "1:2", "--no-watchdog", "x.py"],
            "--no-watchdog: expected not to be given with --elastic",
        ),
    ],
)
def test_bad_options(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert said in capsys.readouterr().err
