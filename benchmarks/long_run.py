"""Trains for hours under random losses of workers, resizes and load, and shows what the processes
of the job hold over time.

LeNet is trained on handwritten digits in an elastic job with `virtual_workers=12`. Each sample
takes 80 ms to arrive, so that the job takes a small part of a core. Every 15 to 60 seconds one of
these happens, at random:

- one or two workers are killed (SIGKILL), one is told to leave (SIGTERM), or one is stopped
  (SIGSTOP) for up to eight seconds;
- `lockstep resize` asks for 2 to 6 workers;
- other processes take all cores for three seconds;
- `lockstep top` looks at the job.

One worker, the survivor, is never killed. Once in ten seconds memory, open descriptors, sockets,
threads and mappings of all processes are counted, and the files in the run directory, in /dev/shm
and in the folder for temporary files. Where it may, the benchmark mounts a /dev/shm of its own, so
that files of other programs do not count. When the time is over, the training ends with its epoch;
one worker without any loss then trains as many epochs, and both must have the same losses and the
same fingerprint.

    python benchmarks/long_run.py          # two hours; 10 to 20 % of a core
    python benchmarks/long_run.py --quick  # a smoke run of minutes; its figures say nothing
    python benchmarks/long_run.py --read FILE --write  # the documentation, from kept results
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
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from common import DOCS, describe_machine, markdown_table
from elastic import Job
from figures import draw_long_run
from frame import Benchmark

BENCHMARK = Benchmark("long_run", __doc__, "elastic.md")
HERE = Path(__file__).resolve().parent
FIGURE = DOCS / "figures" / "long_run.png"
WORKERS = 4  # at the start, and whenever the counts that are compared are taken
MOST_WORKERS = 6
SAMPLE_S = 0.08
EVERY_S = 10.0  # between two samples of what is held
BETWEEN_EVENTS_S = (15.0, 60.0)
WARM_UP_S = 600.0  # before the first counts: allocators and caches have their size by then
HANG_S = 600.0  # without a step; the machine may be busy with other things
LOAD_S = 3.0
WINDOW_S = 180.0  # in which nothing happens to the job; several epochs with their evaluations
IS_ISOLATED = "LONG_RUN_IS_ISOLATED"  # a variable of the environment

COUNTS = {
    "resident": "MB resident",
    "private": "MB of its own",
    "allocated": "MB allocated",
    "objects": "objects of Python",
    "descriptors": "open descriptors",
    "sockets": "sockets",
    "threads": "threads",
    "mappings": "mappings",
}
"""What is counted of a process."""

HOST_COUNTS = {
    "processes": "processes",
    "shm": "files in /dev/shm",
    "temporary": "temporary files",
    "run_files": "files in the run directory",
    "run_mb": "MB in the run directory",
}
"""What is counted of the job as a whole."""

GROWTH = ("resident", "private", "allocated", "objects", "run_mb")
"""Of which the growth over all samples is shown; other counts depend on the number of workers."""

MUST_NOT_GROW = ("descriptors", "sockets", "threads", "processes", "shm", "temporary", "run_files")
"""Of which the usual count of a window is compared, the median: at the instant of a sample a worker
may write a file or answer a question. Windows are compared that have the same processes, and before
which the job has had as many workers: files follow from both.
"""


# --- what is held
# --------------------------------------------------------------------------------------------------


def held_by(process: psutil.Process) -> dict[str, float]:
    """What a process holds."""
    memory = process.memory_full_info()
    folder = Path(f"/proc/{process.pid}")
    descriptors = []
    for link in (folder / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            descriptors.append(str(link.readlink()))
    return {
        "resident": round(memory.rss / 1e6, 2),
        "private": round(memory.uss / 1e6, 2),
        "descriptors": len(descriptors),
        "sockets": sum(text.startswith("socket:") for text in descriptors),
        "threads": process.num_threads(),
        "mappings": (folder / "maps").read_text().count("\n"),
        "processor_s": round(sum(process.cpu_times()[:2]), 2),
    }


def role_of(process: psutil.Process, launcher: int, parents: dict[int, str]) -> str:
    """What a process of the job is; `parents` has the roles of those that were started before."""
    words = " ".join(process.cmdline())
    if process.pid == launcher:
        return "launcher"
    if "resource_tracker" in words:
        return "resource tracker"
    parent = parents.get(process.ppid(), "")
    if parent == "launcher":
        return "fork server" if "forkserver" in words else "other"
    return {"fork server": "worker", "worker": "loader"}.get(parent, "other")


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and in its folders."""
    return [Path(path, name) for path, _, names in os.walk(folder) for name in names]


class LongRun:
    """A job under random events, and what was held meanwhile.

    Args:
        folder: of the job; ``samples`` in it gets a line of JSON for each sample.
        seed: of the events.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.events: dict[str, int] = {}
        self.samples: list[dict[str, Any]] = []
        self._draw = random.Random(seed)
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        words = [sys.executable, "-m", "lockstep", "run", "--elastic", f"1:{MOST_WORKERS}"]
        words += ["-np", str(WORKERS), *program(folder, SAMPLE_S, 10**6)]
        self.job = Job(words, folder, {"TMPDIR": str(self._temporary)})
        self.survivor = 0
        self._begun = time.monotonic()
        self._last_sample = 0.0
        self._last_step = (-1, self._begun)

    # --- the job

    def go_on(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Watch the job for a time, or until something is so; take the samples that are due."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            self.job.update()
            steps = [event for event in self.job.events if event.kind == "step"]
            if steps and steps[-1].values["step"] > self._last_step[0]:
                self._last_step = (steps[-1].values["step"], time.monotonic())
            if time.monotonic() - self._last_step[1] > HANG_S:
                self.fail(f"no step for {HANG_S:.0f} s")
            if self.job.process.poll() is not None:
                self.fail("the job has ended")
            if time.monotonic() - self._last_sample > EVERY_S:
                self.take_sample()
            self.forget()
            time.sleep(0.25)

    def forget(self) -> None:
        """Drop the events that nobody needs any more."""
        if len(self.job.events) > 4000:
            del self.job.events[:-2000]

    def members(self) -> dict[int, int]:
        """The workers of the newest step, each with its rank."""
        steps = [event for event in self.job.events if event.kind == "step"]
        if not steps:
            return {}
        newest = {event.pid: event for event in steps[-3 * MOST_WORKERS :]}
        last = steps[-1].values["step"]
        size = steps[-1].values["size"]
        return {
            pid: event.values["rank"]
            for pid, event in newest.items()
            if event.values["step"] >= last - 1
            and event.values["size"] == size
            and psutil.pid_exists(pid)
        }

    def has(self, workers: int) -> bool:
        """Whether so many workers train together."""
        members = self.members()
        return sorted(members.values()) == list(range(workers))

    def fail(self, reason: str) -> None:
        """Show where each process is, end the job, and end with an error."""
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        looks = self.command("top", "--once", str(self.job.process.pid))
        print(f"{looks.stdout}{looks.stderr}\n{self.job.output()}", file=sys.stderr)
        self.job.close()
        raise SystemExit(
            f"error: {reason}, {time.monotonic() - self._begun:.0f} s after the start; the job's "
            f"output is in {self.folder}/log"
        )

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of a user beside the job."""
        return subprocess.run(
            [sys.executable, "-m", "lockstep", *words],
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    # --- what happens to it

    def happen(self) -> None:
        """Let one thing happen, at random."""
        draw = self._draw
        victims = sorted(set(self.members()) - {self.survivor})
        kinds = {"killed": 5, "resized": 3, "stopped": 2, "left": 1, "two killed": 1, "load": 2}
        kind = draw.choices([*kinds, "looked at"], [*kinds.values(), 1])[0]
        if kind in ("killed", "two killed"):
            for pid in draw.sample(victims, min(len(victims), 1 + (kind == "two killed"))):
                self.signal(pid, signal.SIGKILL)
        elif kind == "left" and victims:
            self.signal(draw.choice(victims), signal.SIGTERM)
        elif kind == "stopped":
            pid = draw.choice([*victims, self.survivor])
            self.signal(pid, signal.SIGSTOP)
            self.go_on(8.0 * draw.random())
            self.signal(pid, signal.SIGCONT)
        elif kind == "resized":
            self.resize(draw.randrange(2, MOST_WORKERS + 1))
        elif kind == "load":
            burn = f"import time\nend = time.time() + {LOAD_S}\nwhile time.time() < end: pass"
            count = os.cpu_count() or 1
            burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(count)]
            self.go_on(LOAD_S)
            for burner in burners:
                burner.wait()
        elif kind == "looked at":
            looked = self.command("top", "--once", str(self.job.process.pid))
            if looked.returncode:
                self.fail(f"lockstep top has failed: {looked.stderr}")
        self.events[kind] = self.events.get(kind, 0) + 1
        print(f"{time.monotonic() - self._begun:7.0f} s  {kind}", flush=True)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a worker, which may have ended."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def resize(self, workers: int) -> None:
        """Ask for a number of workers."""
        answer = self.command("resize", str(self.job.process.pid), str(workers))
        if answer.returncode:
            self.fail(f"lockstep resize has failed: {answer.stderr}")

    def reach(self) -> None:
        """Wait until as many workers train as at the start. A worker that was told to leave before
        may count when the number is asked for, and leave after that: it is asked for again.
        """
        deadline = time.monotonic() + HANG_S
        while not self.has(WORKERS) and time.monotonic() < deadline:
            self.resize(WORKERS)
            self.go_on(30.0, lambda: self.has(WORKERS))

    # --- what is held

    def take_sample(self) -> dict[str, Any]:
        """Count what is held, and keep it."""
        self._last_sample = time.monotonic()
        launcher = self.job.process.pid
        processes = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
        roles: dict[int, str] = {}
        rows = []
        for process in processes:  # parents come before their children
            with suppress(psutil.Error, OSError):
                role = role_of(process, launcher, roles)
                roles[process.pid] = role
                name = role
                if self.survivor in (process.pid, process.ppid()):
                    name = {"worker": "survivor", "loader": "loader of the survivor"}[role]
                rows.append({"role": name, "pid": process.pid, **held_by(process)})
        held = [event for event in self.job.events if event.kind == "held"]
        for row in rows:
            for event in held:
                if event.pid == row["pid"]:
                    row |= {
                        "allocated": event.values["mb"] or 0.0,
                        "objects": event.values["objects"],
                    }
        rows.sort(key=lambda row: row["pid"])  # the loader of the training before others
        files = files_below(self.folder / "run")
        sizes = []
        for path in files:
            with suppress(OSError):
                sizes.append(path.stat().st_size)
        sample = {
            "seconds": round(time.monotonic() - self._begun, 1),
            "step": self._last_step[0],
            "workers": len(self.members()),
            "processes": len(rows),
            "shm": len(files_below(Path("/dev/shm"))),
            "temporary": len(files_below(self._temporary)),
            "run_files": len(files),
            "run_mb": round(sum(sizes) / 1e6, 2),
            "held": rows,
        }
        self.samples.append(sample)
        with (self.folder / "samples").open("a") as file:
            file.write(json.dumps(sample) + "\n")
        return sample

    def settled(self) -> dict[str, Any]:
        """What is held when as many workers train as at the start, with all of their loaders, and
        nothing happens to them.
        """
        deadline = time.monotonic() + HANG_S
        while True:
            self.reach()
            self.go_on(WINDOW_S)
            self.reach()
            if has_all_loaders(self.take_sample()) or time.monotonic() > deadline:
                break
        last = self.take_sample()
        return usual(
            [sample for sample in self.samples if last["seconds"] - sample["seconds"] < WINDOW_S]
        )

    # --- from the start to the end

    def run(self, seconds: float, warm_up: float) -> dict[str, Any]:
        """Train for so long; returns what was found."""
        self.go_on(HANG_S, lambda: self.has(WORKERS))
        self.survivor = min(self.members(), key=lambda pid: self.members()[pid])
        print(
            f"the launcher is PID {self.job.process.pid}, the survivor {self.survivor}", flush=True
        )
        first: dict[str, Any] = {}
        self.resize(MOST_WORKERS)  # files of the largest number of workers stay
        self.go_on(HANG_S, lambda: self.has(MOST_WORKERS))
        finish = self.folder / "finish"
        while (time.monotonic() - self._begun < seconds and not finish.exists()) or not first:
            if not first and time.monotonic() - self._begun > warm_up:
                first = self.settled()
            self.go_on(self._draw.uniform(*BETWEEN_EVENTS_S))
            self.happen()
        last = self.settled()
        (self.folder / "enough").touch()
        deadline = time.monotonic() + HANG_S
        while self.job.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.25)
        if self.job.process.poll() != 0:
            self.fail("the job has not ended with exit code 0")
        left = {
            "shm": len(files_below(Path("/dev/shm"))),
            "temporary": len(files_below(self._temporary)),
        }
        return {
            "seconds": round(time.monotonic() - self._begun),
            "events": self.events,
            "first": first,
            "last": last,
            "left": left,
            "end": end_of(self.folder),
            "samples": self.samples,
        }


def program(folder: Path, sample_s: float, epochs: int) -> list[str]:
    """The training and its arguments."""
    return [str(HERE / "side_long_run.py"), str(folder), str(sample_s), str(epochs)]


def end_of(folder: Path) -> dict[str, Any]:
    """What rank 0 has noted at the end: epochs, losses and the fingerprint."""
    lines = (folder / "events").read_text().splitlines()
    ends = [note for note in map(json.loads, lines) if note["kind"] == "end"]
    if len(ends) != 1:
        raise SystemExit(f"error: {len(ends)} workers have noted the end of the training, not one")
    return {name: ends[0][name] for name in ("epochs", "losses", "digest")}


def train_undisturbed(epochs: int) -> dict[str, Any]:
    """Train as many epochs on one worker, with samples that do not wait."""
    with tempfile.TemporaryDirectory(prefix="long-run-") as name:
        words = [sys.executable, "-m", "lockstep", "run", "-q", "-np", "1", "--threads", "1"]
        subprocess.run([*words, *program(Path(name), 0.0, epochs)], check=True)
        return end_of(Path(name))


# --- what is shown
# --------------------------------------------------------------------------------------------------


def processes_by_role(sample: dict[str, Any]) -> Counter[str]:
    """How many processes of each kind the job has."""
    return Counter(row["role"] for row in sample["held"])


def has_all_loaders(sample: dict[str, Any]) -> bool:
    """Whether each worker has as many loader processes as the survivor; others start theirs when
    they first need them.
    """
    roles = processes_by_role(sample)
    return roles["loader"] == roles["worker"] * roles["loader of the survivor"]


def comparable(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The first and the last window with what the job holds as a whole, if it has the same
    processes in both, and the first is not before the job had its largest number of workers.

    Where the first window is not so, as in results that were kept before windows were chosen by
    that, the earliest sample that is takes its place; None if there is none.
    """
    first = found["first"]
    last = found["last"]
    roles = processes_by_role(last)
    most = max(sample["workers"] for sample in found["samples"])
    reached = next(sample["seconds"] for sample in found["samples"] if sample["workers"] == most)
    for sample in (first, *found["samples"]):
        is_late = first["seconds"] <= sample["seconds"] < last["seconds"] - WINDOW_S
        if is_late and sample["seconds"] >= reached and processes_by_role(sample) == roles:
            return sample, last
    return None


def usual(window: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last sample of a window, with the usual counts of what must not grow."""
    last = window[-1]
    roles = processes_by_role(last)
    complete = [sample for sample in window if processes_by_role(sample) == roles]
    held = []
    for row in last["held"]:
        same = [
            earlier
            for sample in complete
            for earlier in sample["held"]
            if earlier["pid"] == row["pid"]
        ]
        held.append(row | usual_counts(same))
    return last | usual_counts(complete) | {"held": held}


def usual_counts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each count that must not grow."""
    return {
        count: statistics.median_low(row[count] for row in rows if count in row)
        for count in MUST_NOT_GROW
        if count in rows[-1]
    }


def slope(samples: Sequence[dict[str, Any]], role: str, count: str, after: float) -> float | None:
    """The growth in an hour, by least squares; None with fewer than three samples.

    Args:
        samples: of the run.
        role: the process; "" for the job.
        count: what is counted.
        after: seconds from the start at which the samples begin that count.
    """
    points = []
    for sample in samples:
        rows = [row for row in sample["held"] if row["role"] == role] if role else [sample]
        if sample["seconds"] >= after and rows and count in rows[0]:
            points.append((sample["seconds"] / 3600.0, rows[0][count]))
    if len(points) < 3:
        return None
    hours, values = zip(*points, strict=True)
    return statistics.linear_regression(hours, values).slope


def table(found: dict[str, Any]) -> str:
    """The counts after the warm-up and at the end, with the same number of workers."""
    first = found["first"]
    last = found["last"]
    after = first["seconds"]
    roles = ("launcher", "fork server", "survivor", "loader of the survivor")
    lines = []
    for role in roles:
        rows = [[row for row in sample["held"] if row["role"] == role] for sample in (first, last)]
        if not rows[0] or not rows[1]:
            continue
        for count, name in COUNTS.items():
            if count in rows[0][0] and count in rows[1][0]:
                growth = slope(found["samples"], role, count, after) if count in GROWTH else None
                lines.append(line(f"{role}: {name}", rows[0][0][count], rows[1][0][count], growth))
    if (windows := comparable(found)) is not None:
        of_job = windows[0]
        minutes = of_job["seconds"] / 60
        since = "" if of_job is first else f", first after {minutes:.0f} min"
        for count, name in HOST_COUNTS.items():
            growth = slope(found["samples"], "", count, after) if count in GROWTH else None
            lines.append(line(f"job: {name}{since}", of_job[count], last[count], growth))
    header = [
        f"with {WORKERS} workers",
        f"after {after / 60:.0f} min",
        f"after {last['seconds'] / 60:.0f} min",
        "growth in an hour, over all samples",
    ]
    return f"{summary(found)}\n\n{markdown_table(header, lines)}"


def line(name: str, first: float, last: float, growth: float | None) -> list[str]:
    """A line of the table."""
    return [name, f"{first:,.5g}", f"{last:,.5g}", "–" if growth is None else f"{growth:+,.2g}"]


def summary(found: dict[str, Any]) -> str:
    """The events, and how the run has ended, in a paragraph."""
    events = ", ".join(f"{kind}: {count}" for kind, count in sorted(found["events"].items()))
    end = found["end"]
    quiet = found["undisturbed"]
    same = end["digest"] == quiet["digest"] and end["losses"] == quiet["losses"]
    equal = "the same losses and the same fingerprint" if same else "**other results**"
    return (
        f"{found['seconds'] / 60:.0f} minutes, {end['epochs']} epochs, "
        f"{found['last']['step'] + 1:,} steps; events ({events}). One worker without a loss has "
        f"{equal} (`{end['digest'][:16]}…`). After the end {found['left']['shm']} files are left "
        f"in /dev/shm, and {found['left']['temporary']} temporary files."
    )


def problems(found: dict[str, Any]) -> list[str]:
    """What is wrong: other results, files that are left, or counts that have grown."""
    wrong = []
    if "**" in summary(found):
        wrong.append("the undisturbed run has other results")
    wrong += [f"{count} files left in {where}" for where, count in found["left"].items() if count]
    first = found["first"]
    last = found["last"]
    for row in first["held"]:
        for later in last["held"]:
            if row["pid"] == later["pid"]:
                wrong += [
                    f"{row['role']}: {count} {row[count]} → {later[count]}"
                    for count in MUST_NOT_GROW
                    if count in row and later[count] > row[count]
                ]
    windows = comparable(found)
    if windows is None:
        return [*wrong, "job: never the same processes as at the end, so that nothing is compared"]
    earlier, _ = windows
    wrong += [
        f"job: {count} {earlier[count]} → {last[count]}"
        for count in MUST_NOT_GROW
        if count in earlier and last[count] > earlier[count]
    ]
    return wrong


# --- all
# --------------------------------------------------------------------------------------------------


def isolate() -> None:
    """Go on with a /dev/shm of its own, where the host permits that."""
    if os.environ.get(IS_ISOLATED):
        return
    script = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, "sh"]
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"files of other programs in /dev/shm count as well ({error})", file=sys.stderr)
        return
    os.environ[IS_ISOLATED] = "1"
    os.execvp(words[0], [*words, sys.executable, *sys.argv])


def main() -> None:
    """Run from the command line."""
    parser = BENCHMARK.parser("one run, whose length --hours says")
    parser.add_argument("--hours", type=float, default=2.0, help="of training (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the events (default: 0)")
    parser.add_argument(
        "--folder",
        type=Path,
        help="of the job, which is kept (default: a temporary one); a file `finish` in it ends the "
        "run early",
    )
    parser.add_argument("--read", type=Path, help="show results that were kept, instead of a run")
    args = BENCHMARK.parse(parser)
    if args.read is not None:
        kept = json.loads(args.read.read_text())
        machine = kept.pop("machine")
        show(args, machine, kept)
        return
    isolate()
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="long-run-", ignore_cleanup_errors=True) as name:
        folder = args.folder or Path(name)
        folder.mkdir(exist_ok=True)
        run = LongRun(folder.resolve(), args.seed)
        try:
            seconds = 240.0 if args.quick else 3600.0 * args.hours
            found = run.run(seconds, 60.0 if args.quick else WARM_UP_S)
        finally:
            run.job.close()
    found["undisturbed"] = train_undisturbed(found["end"]["epochs"])
    show(args, machine, found)


def show(args: Any, machine: dict[str, Any], found: dict[str, Any]) -> None:
    """Publish what was found, and end with an error if something is wrong."""
    if args.write:
        draw_long_run(found["samples"], FIGURE)
    picture = "![Memory of the processes of the job over time](figures/long_run.png)"
    data = "handwritten digits, one thread a worker"
    BENCHMARK.publish(args, machine, table(found), data, picture, **found)
    wrong = problems(found)
    if wrong:
        raise SystemExit("error: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
