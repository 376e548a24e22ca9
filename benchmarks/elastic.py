"""Measures elastic jobs: the pause after the loss of a worker, its parts, what --elastic costs, and
whether it leaks.

- The pause: one of 4 workers is killed (SIGKILL) at a random moment, again and again. It lasts
  until a group without that worker has completed a step. So for LeNet, and for a model of 20 M
  parameters with AdamW, 240 MB of state, which each worker that joins is given. Over "shm" and
  Gloo.
- Hosts: one of three hosts is lost, each a network namespace with a worker: its processes are
  killed, or its network is cut. It lasts until the others have completed a step. Left out where
  such hosts cannot be made.
- The cost: steps of LeNet on two workers with and without --elastic, in turns; a round of two jobs
  gives one ratio.
- Growth: memory, files, threads, mappings, child processes and segments of the launcher and of a
  survivor, before and after 200 regroups (60 over Gloo). Resident memory includes what is free and
  kept for later, allocated memory not.
- Others: the same loss under torchrun and Ray Train with a checkpoint after every step, under
  hvd.elastic with a commit after every step (Lockstep's), and under torchft; each is left out where
  it is not installed.

    python benchmarks/elastic.py          # ten minutes on two idle cores; --only for parts
    python benchmarks/elastic.py --quick  # a smoke run; its figures say nothing
    python benchmarks/elastic.py --write  # also the tables in docs/elastic.md
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from common import Spread, describe_machine, markdown_table, ratio
from frame import Benchmark
from meter import Job as Block
from turns import command_of, speeds_of, train_in_turns

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.sshd import Hosts, make_hosts

BENCHMARK = Benchmark("elastic", __doc__, "elastic.md")
HERE = Path(__file__).resolve().parent
WORKERS = 4
TRANSPORTS = ("shm", "gloo")
MODELS = {"lenet": "LeNet", "large": "20 M parameters, AdamW"}
LIMIT_S = 60.0  # to wait for anything; beyond it something hangs
PARTS = ("pause", "hosts", "cost", "growth", "others")

PAUSE = ("seen", "left", "formed", "begun", "step")
"""The parts of a pause: when the last survivor knows of the loss, has left its group, has formed
the next one, and begins a step with the right state; and when the first one has completed it."""


# --- a job whose workers note what they do
# ------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """What a worker has noted; `values` are those of its kind."""

    time: float
    pid: int
    kind: str
    generation: int
    values: dict[str, Any]

    @classmethod
    def of(cls, line: str) -> Event:
        """From a line of the file of events."""
        values = json.loads(line)
        time_, pid, kind, generation = (
            values.pop(name) for name in ("time", "pid", "kind", "generation")
        )
        return cls(time_, pid, kind, generation, values)


class Job:
    """A job that was started, and its events so far.

    Args:
        words: the command.
        folder: where its workers note their events.
        variables: of the command, beside those of this process.
    """

    def __init__(
        self, words: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.events: list[Event] = []
        self._path = folder / "events"
        self._read = 0
        self._log = folder / "log"
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        with self._log.open("w") as log:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(words, cwd=folder, env=env, **streams)

    def update(self) -> None:
        """Read the events that are new."""
        with suppress(FileNotFoundError), self._path.open() as file:
            file.seek(self._read)
            text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read += len(whole)
            self.events += map(Event.of, whole.splitlines())

    def wait(self, done: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Wait until `done`; False if the job has ended before, or it takes too long."""
        deadline = time.monotonic() + limit_s
        while True:
            over = self.process.poll() is not None or time.monotonic() > deadline
            self.update()
            if done():
                return True
            if over:
                return False
            time.sleep(0.005)

    def at_work(self, steps: int = 3, workers: int = WORKERS) -> list[int]:
        """The workers that have completed so many steps of the newest group, if all of them have;
        else [].
        """
        done = [event for event in self.events[-4000:] if event.kind == "step"]
        newest = max((event.generation for event in done), default=0)
        pids = [event.pid for event in done if event.generation == newest]
        enough = sorted(
            pid for pid in set(pids) if pids.count(pid) >= steps and psutil.pid_exists(pid)
        )
        return enough if len(enough) == workers else []

    def output(self) -> str:
        """The last lines that it has printed."""
        return "\n".join(self._log.read_text().splitlines()[-15:])

    def close(self) -> None:
        """End the job and all its processes."""
        with suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self.process.pid).children(recursive=True)
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10.0)
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.kill()
        self.process.wait()


@contextmanager
def running(
    command: Callable[[str], Sequence[str]], variables: Mapping[str, str] | None = None
) -> Iterator[Job]:
    """A job; `command` is given the folder for its events."""
    with tempfile.TemporaryDirectory(prefix="elastic-", ignore_cleanup_errors=True) as folder:
        job = Job(command(folder), Path(folder), variables)
        try:
            yield job
        finally:
            job.close()


def lockstep(
    folder: str, model: str, steps: int, transport: str, elastic: bool = True
) -> list[str]:
    options = ["--elastic", f"1:{WORKERS}"] if elastic else []
    words = [sys.executable, "-m", "lockstep", "run", "-q", *options, "-np", str(WORKERS)]
    return [*words, str(HERE / "side_elastic.py"), folder, model, str(steps), transport]


# --- pauses
# -------------------------------------------------------------------------------------------------


def first_of_each(events: Iterable[Event], kind: str) -> dict[int, float]:
    """Worker → time of its first event of a kind."""
    found: dict[int, float] = {}
    for event in events:
        if event.kind == kind:
            found.setdefault(event.pid, event.time)
    return found


def pause_of(
    events: Sequence[Event], killed: float, survivors: Collection[int]
) -> dict[str, float]:
    """Seconds from the kill to the end of each part of the pause, as in `PAUSE`; {} as long as it
    is not over.
    """
    after = [event for event in events if event.time >= killed and event.pid in survivors]
    opened = [event.generation for event in after if event.kind == "seen"]
    late = [event for event in after if event.generation >= min(opened, default=0)]
    times = {kind: first_of_each(late, kind) for kind in PAUSE}
    if not opened or len(times["begun"]) < len(survivors) or not times["step"]:
        return {}
    last = {kind: max(found.values()) - killed for kind, found in times.items()}
    return {**last, "step": min(times["step"].values()) - killed}


def joined_after(events: Sequence[Event], killed: float, known: Collection[int]) -> float | None:
    """Seconds from the kill to the first step of a worker that is not `known`; None as long as
    there is none.
    """
    new = [
        event
        for event in events
        if event.time >= killed and event.kind == "step" and event.pid not in known
    ]
    return new[0].time - killed if new else None


def handover_of(events: Sequence[Event], killed: float) -> float | None:
    """Seconds in which the worker that joined after the kill was given the state."""
    begun = first_of_each(
        (e for e in events if e.time >= killed and e.values.get("has") is False), "share"
    )
    done = first_of_each((e for e in events if e.time >= killed and e.pid in begun), "shared")
    return next((done[pid] - time_ for pid, time_ in begun.items() if pid in done), None)


def lose_one(job: Job, draw: random.Random, spared: Collection[int] = ()) -> dict[str, float]:
    """Kill a worker at a random moment, and wait until another one is at work in its place."""
    if not job.wait(lambda: bool(job.at_work())):
        raise SystemExit(
            f"a job is not complete again after {LIMIT_S:.0f} s; its output ends "
            f"with:\n{job.output()}"
        )
    time.sleep(draw.random() * 0.06)
    pids = job.at_work()
    seen = len(job.events)
    victim = draw.choice([pid for pid in pids if pid not in spared])
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    survivors = [pid for pid in pids if pid != victim]

    def is_over() -> bool:
        events = job.events[seen:]
        return (
            bool(pause_of(events, killed, survivors))
            and joined_after(events, killed, pids) is not None
        )

    if not job.wait(is_over):
        raise SystemExit(
            f"a job did not go on within {LIMIT_S:.0f} s; its output ends with:\n{job.output()}"
        )
    events = job.events[seen:]
    found = {
        **pause_of(events, killed, survivors),
        "joined": joined_after(events, killed, pids) or 0.0,
    }
    return {
        **found,
        "redone": found["step"] - found["begun"],
        "handover": handover_of(events, killed) or 0.0,
    }


def measure_pauses(model: str, transport: str, kills: int) -> dict[str, Any]:
    """Many losses in one job."""
    draw = random.Random(f"{model}, {transport}")
    found = []
    with running(lambda folder: lockstep(folder, model, 10**7, transport)) as job:
        for number in range(kills + 1):
            one = lose_one(job, draw)
            found += [one] * (
                number > 0
            )  # the first replacement loads what the fork server has not loaded yet
            progress(f"{MODELS[model]} over {transport}: loss {number} of {kills}")
    print(file=sys.stderr)
    return {"model": model, "transport": transport, "losses": found}


def progress(text: str) -> None:
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that is not below so large a part of the values."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def pauses_table(rows: list[dict[str, Any]]) -> str:
    header = ["from the kill to", *(f"{MODELS[row['model']]}, {row['transport']}" for row in rows)]
    median = statistics.median
    lines: dict[str, Callable[[list[dict[str, float]]], str]] = {
        "the last survivor knows": lambda losses: ms(median(each["seen"] for each in losses)),
        "has left its group": lambda losses: ms(median(each["left"] for each in losses)),
        "has formed the next": lambda losses: ms(median(each["formed"] for each in losses)),
        "begins a step": lambda losses: ms(median(each["begun"] for each in losses)),
        "**next completed step, median**": lambda losses: ms(
            median(each["step"] for each in losses)
        ),
        "95 %": lambda losses: ms(quantile([each["step"] for each in losses], 0.95)),
        "beside the step that is redone, median": lambda losses: ms(
            median(e["step"] - e["redone"] for e in losses)
        ),
        "first step of the replacement, median": lambda losses: ms(
            median(each["joined"] for each in losses)
        ),
        "its state handed over in, median": lambda losses: ms(
            median(each["handover"] for each in losses)
        ),
        "number of losses": lambda losses: str(len(losses)),
    }
    return markdown_table(
        header, [[name, *(cell(row["losses"]) for row in rows)] for name, cell in lines.items()]
    )


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


# --- hosts
# --------------------------------------------------------------------------------------------------

LOST = {"killed": "all its processes are killed", "cut": "its network is cut"}


def measure_hosts(losses: int) -> list[dict[str, Any]]:
    """Jobs on three hosts, each of which loses one of them, whichever."""
    found = []
    draw = random.Random("hosts")
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as folder,
        make_hosts(3, Path(folder)) as hosts,
    ):
        for how in LOST:
            pauses = []
            for number in range(losses):
                pauses.append(lose_host(hosts, how, draw))
                progress(f"one of three hosts, {LOST[how]}: job {number + 1} of {losses}")
            found.append({"how": how, "pauses": pauses})
    print(file=sys.stderr)
    return found


def lose_host(hosts: Hosts, how: str, draw: random.Random) -> float:
    """Start a job, lose a host at a random moment; returns the seconds until the others have
    completed a step.
    """

    def command(folder: str) -> list[str]:
        options = ["--elastic", "1:3", "-H", ",".join(hosts.namespaces), "-np", "3"]
        words = [sys.executable, "-m", "lockstep", "run", "-q", *options]
        return [*words, str(HERE / "side_elastic.py"), folder, "lenet", str(10**7), "shm"]

    with running(command, {"PATH": hosts.path}) as job:
        try:
            if not job.wait(lambda: bool(job.at_work(20, 3))):
                raise SystemExit(
                    f"a job on three hosts did not start; its output ends with:\n{job.output()}"
                )
            time.sleep(draw.random())
            name = draw.choice(list(hosts.namespaces))
            survivors = set(job.at_work(3, 3)) - set(hosts.processes(name))
            newest = max(event.generation for event in job.events)
            lost = time.monotonic()
            if how == "killed":
                hosts.kill(name)
            else:
                hosts.link(name, "down")
            if not job.wait(lambda: bool(after_loss(job.events, survivors, newest))):
                raise SystemExit(
                    f"a job did not go on without a host; its output ends with:\n{job.output()}"
                )
            return min(after_loss(job.events, survivors, newest)) - lost
        finally:
            for name in hosts.namespaces:
                hosts.link(name, "up")
                hosts.kill(name)


def after_loss(events: Sequence[Event], survivors: Collection[int], newest: int) -> list[float]:
    """When the survivors have completed steps of a group that is newer."""
    steps = [event for event in events if event.kind == "step" and event.pid in survivors]
    return [event.time for event in steps if event.generation > newest]


def hosts_table(rows: list[dict[str, Any]]) -> str:
    header = [
        "one of three hosts is lost (LeNet, one worker a host)",
        "median",
        "longest",
        "number of losses",
    ]
    cells = [
        [
            LOST[row["how"]],
            f"{statistics.median(row['pauses']):.2f} s",
            f"{max(row['pauses']):.2f} s",
            len(row["pauses"]),
        ]
        for row in rows
    ]
    return markdown_table(header, [[str(cell) for cell in line] for line in cells])


# --- the cost of --elastic
# ----------------------------------------------------------------------------------


JOBS = 5  # of each side


def measure_cost(rounds: int, timed_steps: int) -> dict[str, Any]:
    """Steps of LeNet on two workers, with and without --elastic, in turns."""

    def programs(folder: str) -> dict[str, tuple[list[str], Block]]:
        blocks = {
            side: Block("lenet", 256, 2, timed_steps, rounds + 1, 2, f"{folder}/{side}")
            for side in ("fixed", "elastic")
        }
        return {side: (command(side, block), block) for side, block in blocks.items()}

    def command(side: str, block: Block) -> list[str]:
        python, *words = command_of(
            "side_lockstep.py", replace(block, workers=1)
        )  # it starts no others itself
        return [
            python,
            "-m",
            "lockstep",
            "run",
            *(["--elastic", "1:2"] if side == "elastic" else []),
            "-np",
            "2",
            *words,
        ]

    speeds: dict[str, list[float]] = {}
    for _ in range(JOBS):  # two jobs with the same program differ by more than the rounds of a job
        for side, found in speeds_of(
            train_in_turns("fixed and elastic", rounds, programs), timed_steps * 256
        ).items():
            speeds.setdefault(side, []).extend(found)
    return {"samples_per_second": speeds, "ratio": ratio(speeds, "fixed", "elastic")}


def cost_line(found: dict[str, Any]) -> str:
    spread = Spread(**found["ratio"])
    return (
        f"A step of LeNet (global batch 256, two workers) takes {spread.text()} times as long "
        "with `--elastic`."
    )


# --- growth
# -------------------------------------------------------------------------------------------------

LOSSES = {"shm": 100, "gloo": 30}
COUNTS = ("MB resident", "open files", "threads", "mappings", "child processes")


def snapshot(job: Job, survivor: int) -> dict[str, dict[str, float]]:
    """What the launcher and a survivor hold, and the segments of shared memory on this host."""
    processes = {"launcher": psutil.Process(job.process.pid), "survivor": psutil.Process(survivor)}
    found = {name: held_by(process) for name, process in processes.items()}
    allocated = [
        event.values["mb"]
        for event in job.events
        if event.kind == "allocated" and event.pid == survivor
    ]
    if allocated and allocated[-1] is not None:
        found["survivor"]["MB allocated"] = allocated[-1]
    return found | {"host": {"segments in /dev/shm": len(list(Path("/dev/shm").iterdir()))}}


def held_by(process: psutil.Process) -> dict[str, float]:
    maps = Path(f"/proc/{process.pid}/maps").read_text().count("\n")
    resident = round(process.memory_info().rss / 1e6, 1)
    children = len(process.children(recursive=True))
    return dict(
        zip(
            COUNTS,
            (resident, process.num_fds(), process.num_threads(), maps, children),
            strict=True,
        )
    )


def measure_growth(transport: str, warm_up: int, losses: int) -> dict[str, Any]:
    """What is held before and after so many losses, each of which makes two regroups; the first
    worker stays.
    """
    draw = random.Random(transport)
    with running(lambda folder: lockstep(folder, "lenet", 10**7, transport)) as job:
        if not job.wait(lambda: bool(job.at_work())):
            raise SystemExit(f"a job did not start; its output ends with:\n{job.output()}")
        survivor = job.at_work()[0]
        before: dict[str, dict[str, float]] = {}
        for number in range(warm_up + losses):
            if number == warm_up:
                before = settled(job, survivor)
                first = job.events[-1].generation
            lose_one(job, draw, [survivor])
            progress(f"growth over {transport}: loss {number + 1} of {warm_up + losses}")
        after = settled(job, survivor)
    print(file=sys.stderr)
    regroups = max(event.generation for event in job.events) - first
    return {"transport": transport, "regroups": regroups, "before": before, "after": after}


def settled(job: Job, survivor: int) -> dict[str, dict[str, float]]:
    """Of a job that is complete again."""
    job.wait(lambda: len(job.at_work(60)) == WORKERS)
    return snapshot(job, survivor)


def growth_table(rows: list[dict[str, Any]]) -> str:
    header = [
        "before → after",
        *(f"{row['transport']}, {row['regroups']} regroups" for row in rows),
    ]
    names = [(who, what) for who, counts in rows[0]["before"].items() for what in counts]
    return markdown_table(
        header,
        [
            [
                f"{who}: {what}",
                *(f"{row['before'][who][what]:g} → {row['after'][who][what]:g}" for row in rows),
            ]
            for who, what in names
        ],
    )


# --- others
# -------------------------------------------------------------------------------------------------

OTHERS = {
    "lockstep": "Lockstep",
    "torchrun": "torchrun, a checkpoint a step",
    "ray": "Ray Train, a checkpoint a step",
    "horovod": "`hvd.elastic` of Lockstep, a commit a step",
    "torchft": "torchft, a replica group a worker",
}


def missing(side: str) -> str:
    """Why a side is left out; "" if it is not."""
    modules = {"ray": "ray", "torchft": "torchft"}
    if side in modules and find_spec(modules[side]) is None:
        return f"{modules[side]} is not installed"
    return ""


def command_for(side: str, steps: int, elastic: bool) -> Callable[[str], list[str]]:
    """How a side is started, given the folder for its events."""
    script = str(HERE / "side_elastic_others.py")
    python = sys.executable
    starts = {
        "torchrun": [python, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"],
        "horovod": [python, "-m", "lockstep", "horovodrun", "-np", str(WORKERS)],
    }
    starts["torchrun"].append(f"--nproc-per-node={WORKERS}")
    starts["horovod"] += ["--min-np", "1", "--max-np", str(WORKERS), "python"]
    if side == "lockstep":
        return lambda folder: lockstep(folder, "lenet", steps, "shm", elastic)
    return lambda folder: [*starts.get(side, [python]), script, side, folder, str(steps)]


def recovery_of(events: Sequence[Event], killed: float, known: Collection[int]) -> dict[str, float]:
    """The pause until a step of the next group or of new workers, and how many steps were done
    again; {} if none.
    """
    steps = [event for event in events if event.kind == "step"]
    before = max((event.generation for event in steps if event.time < killed), default=0)
    after = [e for e in steps if e.time >= killed and (e.generation > before or e.pid not in known)]
    if not after:
        return {}
    done = [
        event.values["step"]
        for event in steps
        if event.time < after[0].time and event is not after[0]
    ]
    first = after[0].values["step"]
    return {"pause": after[0].time - killed, "redone": max(0, max(done) - first + 1)}


def go_on_of(events: Sequence[Event], killed: float) -> dict[str, float]:
    """As `recovery_of` for a side whose survivors say nothing of a new group: their longest time
    without a step.
    """
    times = [event.time for event in events if event.kind == "step" and event.time >= killed - 1.0]
    gaps = [b - max(a, killed) for a, b in pairwise(times) if b > killed]
    return {"pause": max(gaps, default=0.0), "redone": 0}


def run_once(side: str, steps: int, at: int, draw: random.Random) -> dict[str, Any]:
    """Run a job to its end; a worker is killed after step `at`, if that is not negative."""
    result: dict[str, Any] = {}
    with running(command_for(side, steps, at >= 0)) as job:

        def has_begun() -> bool:
            return any(event.kind == "step" and event.values["step"] >= at for event in job.events)

        if at >= 0 and job.wait(has_begun):
            time.sleep(draw.random() * 0.03)
            job.update()
            pids = {event.pid for event in job.events if event.kind == "step"}
            killed = time.monotonic()
            os.kill(draw.choice(sorted(pids)), signal.SIGKILL)
            job.wait(lambda: bool(recovery_of(job.events, killed, pids)) or side == "torchft")
            result |= recovery_of(job.events, killed, pids)
        job.wait(lambda: any(event.kind == "end" for event in job.events))
        if at >= 0 and side == "torchft":
            result |= go_on_of(job.events, killed)
        ends = [event.values for event in job.events if event.kind == "end"]
        result |= ends[-1] if ends else {"output": job.output()}
    return result


def measure_other(side: str, steps: int, rounds: int) -> dict[str, Any]:
    """An undisturbed job, and some that lose a worker."""
    draw = random.Random(side)
    losses = []
    undisturbed = run_once(side, steps, -1, draw)
    for number in range(rounds):
        losses.append(run_once(side, steps, steps // 3, draw))
        progress(f"{OTHERS[side]}: job {number + 1} of {rounds}")
    print(file=sys.stderr)
    return {"side": side, "undisturbed": undisturbed, "losses": losses}


def others_table(rows: list[dict[str, Any]]) -> str:
    header = ["", "kill to next completed step", "steps done again", "the loss at the end"]
    return markdown_table(header, [[OTHERS[row["side"]], *other_cells(row)] for row in rows])


def other_cells(row: dict[str, Any]) -> list[str]:
    ended = [each for each in row["losses"] if "pause" in each and "loss" in each]
    lost = len(row["losses"]) - len(ended)
    failed = f"{lost} of {len(row['losses'])} did not go on" if lost else ""
    if not ended or "loss" not in row["undisturbed"]:
        return [failed or "failed without a loss", "–", "–"]
    pause = f"{statistics.median(each['pause'] for each in ended):.2f} s" + (
        f" ({failed})" if failed else ""
    )
    redone = sorted({int(each["redone"]) for each in ended})
    return [pause, " or ".join(map(str, redone)), agreement(row["undisturbed"], ended)]


def agreement(undisturbed: dict[str, Any], ended: Sequence[dict[str, Any]]) -> str:
    """How the loss at the end compares with that of an undisturbed job."""
    if all(each["digest"] == undisturbed["digest"] for each in ended):
        return "the same bits"
    most = max(abs(each["loss"] / undisturbed["loss"] - 1) for each in ended)
    return f"differs by up to {100 * most:.2g} %" if most > 1e-4 else "the same up to rounding"


# --- all
# --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = BENCHMARK.parser(
        "60 losses (LeNet) and 8 (20 M parameters), 12 rounds of 5 pairs of jobs, and 2 jobs of "
        "each side"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="only these parts")
    args = BENCHMARK.parse(parser, "only")
    parts = args.only or PARTS
    machine = describe_machine()
    quick = args.quick
    rounds = args.rounds
    found: dict[str, Any] = {}
    texts = []
    if "pause" in parts:
        kills = {"lenet": 2 if quick else rounds or 60, "large": 1 if quick else rounds or 8}
        found["pauses"] = [
            measure_pauses(model, each, kills[model]) for model in MODELS for each in TRANSPORTS
        ]
        texts.append(pauses_table(found["pauses"]))
    if "hosts" in parts:
        try:
            found["hosts"] = measure_hosts(1 if quick else rounds or 10)
            texts.append(hosts_table(found["hosts"]))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"hosts are left out: they cannot be made here ({error})", file=sys.stderr)
    if "cost" in parts:
        found["cost"] = measure_cost(1 if quick else rounds or 12, 2 if quick else 20)
        texts.append(cost_line(found["cost"]))
    if "growth" in parts:
        found["growth"] = [
            measure_growth(each, *((1, 2) if quick else (10, LOSSES[each]))) for each in TRANSPORTS
        ]
        texts.append(growth_table(found["growth"]))
    if "others" in parts:
        sides = [side for side in OTHERS if not said_missing(side)]
        found["others"] = [
            measure_other(side, 32 if quick else 128, 1 if quick else rounds or 2) for side in sides
        ]
        texts.append(others_table(found["others"]))
    BENCHMARK.publish(
        args, machine, "\n\n".join(texts), "images of 28×28 pixels, one thread a worker", **found
    )


def said_missing(side: str) -> bool:
    """Whether a side is left out, which is said."""
    reason = missing(side)
    if reason:
        print(f"{OTHERS[side]} is left out: {reason}", file=sys.stderr)
    return bool(reason)


if __name__ == "__main__":
    main()
