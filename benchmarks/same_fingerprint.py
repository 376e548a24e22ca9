"""Starts the same program with every launcher that is installed, and compares what it has trained:
nothing may differ.

`python`, `lockstep run`, `lockstep run -H` over ssh to network namespaces, torchrun, mpiexec, srun
in a Slurm of two nodes on this host, and Ray. A launcher that is not installed, or may not be used
here, is left out, and the table says why. The program has virtual workers, so that the number of
real ones makes no difference. It fails if anything differs.

    python benchmarks/same_fingerprint.py          # some five minutes on two idle cores
    python benchmarks/same_fingerprint.py --quick  # two steps; a launcher that fails is still seen
    python benchmarks/same_fingerprint.py --write  # also the table in docs/clusters.md
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import describe_machine
from frame import Benchmark

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))  # its hosts and its Slurm

BENCHMARK = Benchmark("same_fingerprint", __doc__, "clusters.md")
PROGRAM = str(HERE / "side_fingerprint.py")
LIMIT_S = 300.0


@dataclass(frozen=True)
class Row:
    """A way to start the program, and what came of it.

    Attributes:
        command: as users type it.
        workers, hosts: as the program saw them; 0 if it did not run.
        fingerprint: "" if it did not run.
        reason: why it did not.
    """

    command: str
    workers: int = 0
    hosts: int = 0
    fingerprint: str = ""
    reason: str = ""


class LeftOutError(Exception):
    """A launcher cannot be used here; the message says why."""


class FailedError(Exception):
    """A launcher is here, and the program has failed under it; the message says how."""


def run(words: list[str], variables: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a command, and return what rank 0 has printed.

    Raises:
        FailedError: it has failed.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LOCKSTEP_PROGRESS": "off",
        **(variables or {}),
    }
    paths = [str(HERE), str(HERE.parent / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise FailedError(f"no end within {LIMIT_S:g} s") from None
    for line in done.stdout.splitlines():
        if "result {" in line:
            found: dict[str, Any] = json.loads(line[line.index("{") :])
            return found
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()] or [
        "no output"
    ]
    raise FailedError(f"exit code {done.returncode}: {' / '.join(lines[-3:])[:400]}")


def needs(name: str) -> str:
    """Return the path of a program, beside this Python or on the PATH."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        raise LeftOutError(f"there is no {name} here")
    return path


# --- The launchers
# --------------------------------------------------------------------------------------------------

LOCKSTEP = [sys.executable, "-m", "lockstep", "run", "--no-prefix", "--quiet"]


def alone(steps: int) -> dict[str, Any]:
    """Without a launcher."""
    return run([sys.executable, PROGRAM, str(steps)])


def with_lockstep(workers: int) -> Callable[[int], dict[str, Any]]:
    """Lockstep's own launcher."""
    return lambda steps: run([*LOCKSTEP, "-np", str(workers), PROGRAM, str(steps)])


def over_ssh(steps: int) -> dict[str, Any]:
    """Lockstep's launcher on two network namespaces, each with an sshd."""
    from support.sshd import make_hosts

    if not Path("/usr/sbin/sshd").exists():
        raise LeftOutError("there is no sshd here")
    with tempfile.TemporaryDirectory() as folder:
        try:
            with make_hosts(2, Path(folder)) as hosts:
                words = [*LOCKSTEP, "-H", "alpha:1,beta:1", PROGRAM, str(steps)]
                return run(words, {"PATH": hosts.path})
        except (OSError, subprocess.CalledProcessError) as error:
            raise LeftOutError(
                f"network namespaces cannot be made here: {type(error).__name__}"
            ) from None


def with_torchrun(steps: int) -> dict[str, Any]:
    """torchrun."""
    return run([needs("torchrun"), "--standalone", "--nproc-per-node", "2", PROGRAM, str(steps)])


def with_mpiexec(steps: int) -> dict[str, Any]:
    """mpiexec of any MPI."""
    return run([needs("mpiexec"), "-n", "2", sys.executable, PROGRAM, str(steps)])


def with_srun(*options: str) -> Callable[[int], dict[str, Any]]:
    """A Slurm of two nodes on this host; srun starts the ranks, or with `options` a launcher on
    each node.
    """

    def start(steps: int) -> dict[str, Any]:
        from support.slurm import make_cluster, missing

        if missing():
            raise LeftOutError(missing())
        program = [*LOCKSTEP, *options, PROGRAM] if options else [sys.executable, PROGRAM]
        try:
            with make_cluster() as cluster:
                words = ["srun", "--nodes=2", "--ntasks-per-node=1", *program, str(steps)]
                return run(words, cluster.environment)
        except (OSError, AssertionError) as error:
            raise LeftOutError(f"Slurm does not start here: {str(error).splitlines()[0]}") from None

    return start


def with_ray(steps: int) -> dict[str, Any]:
    """Actors of a Ray on this host."""
    for name in ("ray", "lockstep.ray"):
        if importlib.util.find_spec(name) is None:
            raise LeftOutError(
                f"{name} is not installed" if name == "ray" else f"this Lockstep has no {name}"
            )
    return run([sys.executable, PROGRAM, str(steps), "ray"])


LAUNCHERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "python train.py": alone,
    "lockstep run -np 2 train.py": with_lockstep(2),
    "lockstep run -np 3 train.py": with_lockstep(3),
    "lockstep run -H alpha:1,beta:1 train.py": over_ssh,
    "torchrun --nproc-per-node 2 train.py": with_torchrun,
    "mpiexec -n 2 python train.py": with_mpiexec,
    "srun --nodes=2 --ntasks-per-node=1 python train.py": with_srun(),
    "srun --nodes=2 --ntasks-per-node=1 lockstep run -np 1 train.py": with_srun("-np", "1"),
    "lockstep.ray.launch(train, workers=2)": with_ray,
}


def measure(command: str, start: Callable[[int], dict[str, Any]], steps: int) -> Row:
    """Start the program in one way."""
    print(f"{command} ...", flush=True)
    try:
        found = start(steps)
    except LeftOutError as error:
        return Row(command, reason=" ".join(str(error).split())[:120])
    except FailedError as error:
        raise SystemExit(f"error: {command}: {error}") from None
    return Row(command, found["workers"], found["hosts"], found["fingerprint"])


def table(rows: list[Row]) -> str:
    """The rows as a table."""
    lines = ["| started by | workers | hosts | fingerprint |", "|---|---:|---:|---|"]
    for row in rows:
        found = f"`{row.fingerprint[:16]}`" if row.fingerprint else f"left out: {row.reason}"
        numbers = f"{row.workers} | {row.hosts}" if row.fingerprint else "– | –"
        lines.append(f"| `{row.command}` | {numbers} | {found} |")
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """The sentence below the table.

    Raises:
        SystemExit: two fingerprints differ.
    """
    ran = [row for row in rows if row.fingerprint]
    if len({row.fingerprint for row in ran}) != 1:
        raise SystemExit(f"{table(rows)}\n\nerror: the fingerprints differ")
    return f"{len(ran)} of {len(rows)} ways to start it, one fingerprint."


def main() -> None:
    """Start the program in every way."""
    parser = BENCHMARK.parser("64 steps")
    args = BENCHMARK.parse(parser, "rounds")
    machine = describe_machine()
    steps = args.rounds or (2 if args.quick else 64)
    rows = [measure(command, start, steps) for command, start in LAUNCHERS.items()]
    text = f"{table(rows)}\n\n{verdict(rows)}"
    BENCHMARK.publish(
        args,
        machine,
        text,
        f"LeNet, {steps} steps of 64 samples",
        steps=steps,
        rows=[*map(asdict, rows)],
    )


if __name__ == "__main__":
    main()
