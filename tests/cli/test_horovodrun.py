"""`lockstep horovodrun` and `lockstep run --as-horovod`: Horovod's programs as they are, with
Horovod's options.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import any_command
from lockstep.cli import run as run_module
from lockstep.cli.horovodrun import HorovodOptions, child_variables, program_of
from lockstep.cli.host_discovery import Discovery, Follower, OwnJob
from lockstep.cli.main import main
from lockstep.errors import ConfigError, LockstepError
from lockstep.hosts import Host
from lockstep.system.processes import is_alive
from support import warm_python

SCRIPTS = Path(__file__).parent / "horovod_scripts"
DEADLINE = 100.0
ANY = "lockstep.cli.any_command"


def lockstep(*words: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_NUM", "HOROVOD_"))
    }
    return warm_python.run(["-m", "lockstep", *words], cwd, own | env, timeout=DEADLINE)


# --- what is made of the options
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "script", "arguments", "is_module"),
    [
        ("python train.py --lr 1", "train.py", ["--lr", "1"], False),
        ("python3 -u train.py -x", "train.py", ["-x"], False),
        (f"{sys.executable} -u -m pack.train a", "pack.train", ["a"], True),
        ("-- python3.11 train.py", "train.py", [], False),
        ("train.py --lr 1", "train.py", ["--lr", "1"], False),
        ("bash -c ls", ANY, ["bash", "-c", "ls"], True),
        ("python -O train.py", ANY, [sys.executable, "-O", "train.py"], True),
        ("/other/bin/python train.py", ANY, ["/other/bin/python", "train.py"], True),
    ],
)
def test_the_program_of_a_command(
    command: str, script: str, arguments: list[str], is_module: bool
) -> None:
    found = program_of(command.split())
    assert (found["script"], found["arguments"], found.get("module", False)) == (
        script,
        arguments,
        is_module,
    )


def test_what_the_ranks_learn_from_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learnt(variables: dict[str, str], **own: Any) -> dict[str, str]:
        return child_variables(HorovodOptions(**own), variables)

    monkeypatch.chdir(tmp_path)
    warning = "LOCKSTEP_STALL_WARNING"
    assert learnt({}, timeline_filename="t.json") == {"HOROVOD_TIMELINE": str(tmp_path / "t.json")}
    assert learnt({}, timeline_mark_cycles=True) == {"HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    seconds = "HOROVOD_STALL_CHECK_TIME_SECONDS"
    assert learnt({seconds: "7"}) == {warning: "7", seconds: "7"}
    assert learnt({seconds: "7"}, stall_warning="9") == {warning: "9", seconds: "9"}
    disable = "HOROVOD_STALL_CHECK_DISABLE"
    assert learnt({}, no_stall_check=True) == learnt({disable: "1"})
    assert float(learnt({}, no_stall_check=True)[warning]) > 1e5
    assert learnt({}, no_stall_check=True)[disable] == "1"
    assert learnt({disable: "1"}, no_stall_check=False) == {disable: "0"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-np 2", "command: expected a command"),
        ("-np two python x.py", "-np: expected a whole number"),
        ("-np 2 --max-np 1 python x.py", "--max-np: expected at least 2"),
        (
            "-np 2 -H a:2 --host-discovery-script s python x.py",
            "--host-discovery-script: expected either this option",
        ),
        (
            "-np 2 --stall-check-warning-time-seconds 0 python x.py",
            "--stall-check-warning-time-seconds: expected",
        ),
        ("-np 2 --slot-per-host 3 python x.py", "Did you mean --slots-per-host"),
        ("-np 2 --slots none python x.py", "--slots: expected a whole number"),
        ("-np 2 python not-there.py", "script: expected an existing Python file"),
        ("-np 2 -hostfile not-there python x.py", "-hostfile: expected a text file"),
        ("-np 2 --mpi-args --oversubscribe python x.py", "error: --mpi-args: expected 1 argument"),
    ],
)
def test_bad_options_are_named(
    words: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["horovodrun", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_ignored_options_are_reported_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "-np 2 --autotune --fusion-threshold-mb 32 --blacklist-cooldown-range 1 2 --mpi-args=-x "
        "--gloo --verbose"
    )
    assert main(["horovodrun", *words.split(), "python", "not-there.py", "--autotune"]) == 2
    ignored, run, _ = capsys.readouterr().err.splitlines()
    assert ignored.endswith(
        "ignored: --autotune, --fusion-threshold-mb, --blacklist-cooldown-range, --mpi-args, --gloo"
    )
    assert run == "horovodrun: lockstep run --as-horovod -np 2 not-there.py --autotune"


def test_what_can_be_used_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horovodrun", "--check-build"]) == 0
    said = capsys.readouterr().out
    assert all(text in said for text in ("[X] PyTorch", "[ ] TensorFlow", "[X] Gloo", "[ ] MPI"))


def discovery(path: Path, body: str, **wanted: float) -> Discovery:
    script = path / "discover.sh"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o700)
    return Discovery(str(script), **{"timeout": 60.0, **wanted})  # type: ignore[arg-type]


def test_hosts_are_found_by_a_script_and_keep_their_order(tmp_path: Path) -> None:
    # at first there is b; later a comes, and is named first
    again = f"test -e {tmp_path}/again && echo a:3; touch {tmp_path}/again; echo b"
    hosts = discovery(tmp_path, again, needed=5, slots=2).find()
    assert [(host.name, host.slots) for host in hosts] == [("b", 2), ("a", 3)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo a:1", "expected 2 slots within 0 s, got 1: a:1"),
        ("true", "expected 2 slots within 0 s, got 0: no host"),
        ("echo no >&2; exit 3", "exit code 3: no"),
        ("echo a:b:c", "expected"),
        ("echo a:1,b:1", "one host per line"),
    ],
)
def test_a_script_that_does_not_print_enough_hosts_is_an_error(
    tmp_path: Path, body: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        discovery(tmp_path, body, needed=2, timeout=0.0).find()


def test_the_number_of_workers_follows_the_script(tmp_path: Path) -> None:
    asked: list[int] = []
    said: list[str] = []

    def resize(workers: int) -> None:
        if not asked:
            asked.append(workers)
            raise LockstepError("the job is not running yet")
        asked.append(workers)

    found = discovery(tmp_path, f"cat {tmp_path}/hosts")
    hosts = [Host("localhost", 2)]
    follower = Follower(found, hosts, OwnJob(2, 2, 4, resize).follow, said.append)
    for text in (
        "localhost:2",
        "localhost:3",
        "localhost:3",
        "localhost:3",
        "localhost:9",
        "",
        "other:3",
        "other:3",
    ):
        (tmp_path / "hosts").write_text(text)
        follower.check()
    assert asked == [3, 3, 4, 2]
    assert [line.partition(": ")[2].partition(",")[0] for line in said] == [
        "the job is not running yet",
        "host_discovery_script: expected localhost only",
    ]


def test_hosts_of_a_script_that_others_reach_by_their_names_may_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = folder / "discover.sh"
    script.write_text("#!/bin/sh\necho a:2\necho b:1\n")
    script.chmod(0o700)
    seen: list[Any] = []

    def follow(arguments: Any, listed: Callable[[], list[Host]]) -> int:
        seen.append((arguments.hosts, arguments.elastic, arguments.workers, listed()))
        script.write_text("#!/bin/sh\necho b:4\n")
        deadline = time.monotonic() + 60.0
        while listed() != [Host("b", 4)] and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(listed())
        return 0

    monkeypatch.setattr(run_module, "run_command", follow)
    assert (
        main(
            [
                "horovodrun",
                "--min-np",
                "1",
                "--host-discovery-script",
                str(script),
                "python",
                "train.py",
            ]
        )
        == 0
    )
    assert seen == [("a:2,b:1", "1:120", "3", [Host("a", 2), Host("b", 1)]), [Host("b", 4)]]


@pytest.mark.parametrize(
    ("words", "run"),
    [
        ("-np 4 --min-np 2 --max-np 8", "--elastic 2:8 -np 4"),
        ("-np 4 --min-np 2", "--elastic 2:4 -np 4"),
        ("--min-np 2 --max-np 8", "--elastic 2:8 -np 2"),
        ("-np 4 --min-np 2 --max-np 8 -H localhost:6", "--elastic 2:6 -np 4"),
        ("-np 4 --min-np 2 -H a:2,b:2", "--elastic 2:4 -np 4 -H a:2,b:2"),
        ("-np 2 --min-np 1 --max-np 6 -H a:2,b:2", "--elastic 1:4 -np 2 -H a:2,b:2"),
        ("-np 2 --min-np 2 --output-filename out", "-np 2 --output-dir out"),
        ("-np 2", "-np 2"),
    ],
)
def test_elastic_options(
    words: str, run: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(
        run_module, "run_command", lambda arguments, listed: chosen.append(vars(arguments)) or 0
    )
    assert main(["horovodrun", *words.split(), "python", "train.py"]) == 0
    (values,) = chosen
    names = {"elastic": "--elastic", "workers": "-np", "hosts": "-H", "output_dir": "--output-dir"}
    found = [f"{flag} {values[name]}" for name, flag in names.items() if name in values]
    assert " ".join(found) == run


# --- programs
# -----------------------------------------------------------------------------------------------


def endings(text: str, pattern: str) -> list[str]:
    """What `pattern` finds in the lines of rank 0 and of rank 1, one each."""
    found = [re.findall(rf"^\[{rank}\] .*{pattern}", text, re.MULTILINE) for rank in (0, 1)]
    assert [len(each) for each in found] == [1, 1], text
    return [each[0] for each in found]


def test_a_training_runs_unchanged(tmp_path: Path) -> None:
    ended = lockstep(
        "horovodrun",
        "-np",
        2,
        "--output-filename",
        "out",
        "python",
        SCRIPTS / "mnist.py",
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    weights = endings(ended.stdout, r"rank \d of 2: weights (.*)")
    assert weights[0] == weights[1]
    assert float(re.findall(r"Accuracy: (.*)%", ended.stdout)[-1]) > 50
    for rank in (0, 1):
        said = (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text()
        assert [f"[{rank}] {line}" for line in said.splitlines()] == [
            line for line in ended.stdout.splitlines() if line.startswith(f"[{rank}]")
        ]
        assert (tmp_path / "out" / f"rank.{rank}" / "stderr").read_text() == ""


def test_a_training_with_checkpoints_runs_unchanged_and_resumes(tmp_path: Path) -> None:
    ended = lockstep(
        "run", "-np", 2, "--as-horovod", SCRIPTS / "imagenet.py", "--fp16-allreduce", cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    losses = [endings(ended.stdout, rf"epoch {epoch} from 0: (.*)") for epoch in (0, 1)]
    assert all(one == other for one, other in losses)
    assert float(losses[0][0].split()[1][:-1]) > float(losses[1][0].split()[1][:-1])
    (tmp_path / "checkpoint-2.pth.tar").unlink()
    again = lockstep("run", "-np", 1, "--as-horovod", SCRIPTS / "imagenet.py", cwd=tmp_path)
    assert "epoch 1 from 1: loss" in again.stdout, again.stderr
    assert (tmp_path / "checkpoint-2.pth.tar").exists()


def test_an_elastic_training_resumes_from_its_last_commit(tmp_path: Path) -> None:
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho localhost:3\n")
    script.chmod(0o700)
    options = ("-np", 2, "--min-np", 2, "--max-np", 2, "--host-discovery-script", script)
    ended = lockstep("horovodrun", *options, sys.executable, SCRIPTS / "elastic.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "joined" not in ended.stderr  # max-np
    assert endings(ended.stdout, "reset at (.*)") == ["epoch 1, batch 2, with 2 ranks"] * 2
    # six batches in the first epoch, three up to the failure, and the four that were not done
    # before the commit
    weights = endings(ended.stdout, "ended with 1 failure, 13 batches, weights (.*)")
    assert weights[0] == weights[1]


ELASTIC = """
import os, time, torch, horovod.torch as hvd
hvd.init()
print("pid", os.getpid(), flush=True)
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
inputs = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
sampler = hvd.elastic.ElasticSampler(inputs)
loader = torch.utils.data.DataLoader(inputs, batch_size=2, sampler=sampler)

@hvd.elastic.run
def train(state):
    size = os.environ["HOROVOD_SIZE"]
    print(f"begin at {state.epoch}.{state.batch} as {hvd.rank()} of {hvd.size()}: {size}", flush=True)
    while not hvd.broadcast_object(os.path.exists("enough")):
        for index, x in enumerate(loader):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            sampler.record_batch(index, 2)
            state.batch += 1
            time.sleep(0.02)
            print("batch", state.batch, "of", hvd.size(), flush=True)
            if state.batch % 2 == 0:
                state.commit()
        assert len(sampler.processed_indices) == 48
        state.epoch, state.batch = state.epoch + 1, 0
        sampler.set_epoch(state.epoch)
        state.commit()

state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, sampler=sampler)
state.register_reset_callbacks([lambda: print("reset with", hvd.size(), flush=True)])
train(state)
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
print(f"done: {state.epoch} epochs, {total:g} ranks, weights {[p.tolist() for p in model.parameters()]}", flush=True)
"""


def test_after_the_loss_of_a_rank_the_others_go_on_and_the_script_adds_ranks(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    (tmp_path / "slots").write_text("2")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\necho localhost:$(cat {tmp_path}/slots)\n")
    script.chmod(0o700)
    words = [
        "-np",
        2,
        "--min-np",
        1,
        "--max-np",
        3,
        "--host-discovery-script",
        script,
        "python",
        "train.py",
    ]
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")
    }
    with warm_python.popen(["-m", "lockstep", "horovodrun", *words], tmp_path, variables) as job:
        seen = job.read_until(r"batch 9 of 2")
        pids = {int(rank): int(pid) for rank, pid in re.findall(r"\[(\d)\] pid (\d+)", seen)}
        before = len(seen)
        os.kill(pids[0], signal.SIGKILL)
        seen += job.read_until(r"begin at .* of 2: 2")  # with the one that replaces it
        (tmp_path / "slots").write_text("3")
        seen += job.read_until(r"begin at .* of 3: 3")
        assert is_alive(pids[1])
        (tmp_path / "enough").touch()
        out, err = job.communicate(DEADLINE)
    assert job.returncode == 0, err
    seen += out
    assert (
        "rank 0 was lost (killed by SIGKILL); 1 worker goes on" in err and "3 workers go on" in err
    )
    # the one that is left goes back to its last commit, of an even number of batches, and others
    # begin there
    assert re.search(r"begin at \d+\.\d*[02468] as 0 of [12]: ", seen[before:]), seen
    assert re.search(r"reset with [12]\n", seen[before:]), seen
    assert len(set(re.findall(r"pid (\d+)", seen))) == 4
    ends = re.findall(r"done: (.*)", seen)
    assert len(ends) == 3 and len(set(ends)) == 1 and ", 3 ranks, " in ends[0]


def test_a_signal_to_the_launcher_ends_an_elastic_training_at_a_commit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ELASTIC)
    words = ["run", "--as-horovod", "--elastic", "1:3", "-np", 2, "train.py"]
    with warm_python.popen(["-m", "lockstep", *words], tmp_path, dict(os.environ)) as job:
        job.read_until(r"batch 9 of 2")
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(DEADLINE)
    assert job.returncode == 143, err
    assert "stopped by SIGTERM after commit" in err


def test_other_commands_and_their_children_find_horovods_modules(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import horovod, horovod.torch as hvd, lockstep.compat.horovod.torch as own, "
        "importlib.util, torch, sys\nassert hvd is own and hvd.__spec__.name == own.__name__, "
        "hvd.__spec__\nassert importlib.util.find_spec('horovod.tensorflow') is None\nfrom "
        "horovod.runner.util.threads import in_thread\nhvd.init()\nprint('sum', "
        "hvd.allreduce(torch.ones(1), op=hvd.Sum, name='ones').item())\nsys.exit(hvd.rank() * 7)\n"
    )
    command = f"exec {sys.executable} -W error work.py"
    trace = tmp_path / "trace.json"
    options = ("-np", 2, "--timeline-filename", "trace.json")
    ended = lockstep("horovodrun", *options, "sh", "-c", command, cwd=tmp_path)
    assert ended.returncode == 7, ended.stderr
    assert endings(ended.stdout, "sum (.*)") == ["2.0", "2.0"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"].startswith("allreduce ones")} == {
        0,
        1,
    }
    assert [path.name for path in tmp_path.iterdir() if "records" in path.name] == []


def test_a_command_that_cannot_be_run_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").touch()
    assert any_command.main(["no-such-command"]) == 127
    assert any_command.main([str(tmp_path / "text")]) == 126
    assert "no-such-command: No such file" in capfd.readouterr().err
