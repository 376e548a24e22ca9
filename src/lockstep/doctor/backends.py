"""The backends of torch.distributed: which are there, and whether two ranks can sum with each of them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import environment
from ..environment.launchers import LAUNCHERS
from .report import Problem, Section

__all__ = ["examine_backends"]

_START = "import sys; from lockstep.doctor import trial; trial.{}(*sys.argv[1:])"

_MOMENT_S = 3.0  # for a launcher to end its workers

Outcome = dict[str, Any]


def examine_backends(limit: float) -> Section:
    """What each backend needs, and an all-reduce between two ranks on it.

    Args:
        limit: seconds after which a trial is given up.
    """
    there = _there()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        names = [name for name, (usable, _) in there.items() if usable]
        outcomes = _try_launched([name for name in names if name != "mpi4py"], folder, limit)
        if "mpi4py" in names:
            outcomes["mpi4py"] = _try_under_mpiexec(folder, limit)
    section = Section("backends")
    for name, (_, about) in there.items():
        text, problem = describe(name, about, outcomes.get(name))
        section.add(name, text, problem, good=True if name in outcomes else None)
    if not _is_compiled():
        fix = "Install a C compiler, then Lockstep again: pip install --force-reinstall --no-deps lockstep-train"
        section.problems.append(Problem("shm works without its compiled part, and is slower", fix))
    return section


def _there() -> dict[str, tuple[bool, str]]:
    """For each backend, whether it can be tried, and a word about it."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = torch.distributed.is_nccl_available() and gpus > 1
    found = {
        "shm": (sys.platform == "linux", "compiled" if _is_compiled() else "not compiled"),
        "gloo": (torch.distributed.is_gloo_available(), ""),
        "nccl": (nccl, "" if nccl else f"not tried: it needs two GPUs, here {gpus or 'is none'}"),
    }
    if importlib.util.find_spec("mpi4py") is None:
        found["mpi4py"] = (False, "not installed: pip install 'lockstep-train[mpi]'")
    elif _mpiexec() is None:
        found["mpi4py"] = (False, "not tried: there is no mpiexec (pip install mpich brings one)")
    else:
        found["mpi4py"] = (True, "")
    return found


def _is_compiled() -> bool:
    return importlib.util.find_spec("lockstep.transports.shm._native") is not None


def _mpiexec() -> str | None:
    """The mpiexec beside this Python, or else the one on the path."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def describe(name: str, about: str, outcome: Outcome | None) -> tuple[str, Problem | None]:
    """The line about a backend, and what is wrong with it."""
    if outcome is None:
        return about or "not in this build of torch", None
    if "error" in outcome:
        fix = _FIXES.get(name, "Run a small program on it with LOCKSTEP_DEBUG=1 to see more.")
        return f"failed: {outcome['error']}", Problem(f"two ranks cannot sum over {name}: {outcome['error']}", fix)
    times = f"4 B in {_time(outcome['small']):>7}, 4 MiB in {_time(outcome['large']):>7}"
    return f"{times}, {about}" if about else times, None


_FIXES = {
    "shm": "Look above at memfd and /dev/shm; init() needs shm, or else make the process group with gloo yourself.",
    "gloo": "Set GLOO_SOCKET_IFNAME to one of the interfaces above, and let local connections through the firewall.",
    "nccl": "Run with NCCL_DEBUG=INFO to see which connection fails; NCCL_P2P_DISABLE=1 leaves out direct access.",
    "mpi4py": "Use the mpiexec of the MPI that mpi4py was built for: `python -m mpi4py --mpi-library` names it.",
}


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _try_launched(names: list[str], folder: str, limit: float) -> dict[str, Outcome]:
    """Outcomes by backend; one that hangs is given up, and those after it are tried."""
    path, left, found = Path(folder, "launched"), list(names), dict[str, Outcome]()
    while left:
        path.write_text("")
        problem = _run([sys.executable, "-c", _START.format("run_launched"), str(path), *left], folder, limit)
        found |= _read(path)
        stuck = [name for name in left if name not in found][:1]
        found |= {name: {"error": problem or "it has said nothing"} for name in stuck}
        left = [name for name in left if name not in found]
    return found


def _try_under_mpiexec(folder: str, limit: float) -> Outcome:
    path = Path(folder, "mpiexec")
    path.write_text("")
    command = [str(_mpiexec()), "-n", "2", sys.executable, "-c", _START.format("run_under_mpiexec"), str(path)]
    problem = _run(command, folder, limit)
    return _read(path).get("mpi4py", {"error": problem or "it has said nothing"})


def _read(path: Path) -> dict[str, Outcome]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line.pop("backend"): line for line in lines}


def _run(command: list[str], folder: str, limit: float) -> str:
    """Run `command`; returns what went wrong, in short."""
    errors = Path(folder, "errors")
    with errors.open("wb") as told:  # a file: a pipe would be waited for as long as anything holds it
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_without_job(environment.variables()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=told,
            start_new_session=True,
        )
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit:g} s"
    finally:
        if process.poll() is None:
            _end(process)
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return "" if process.returncode == 0 else (lines[-1] if lines else f"exit code {process.returncode}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what was started, by SIGTERM if that helps; workers end with their launcher."""
    for number, seconds in ((signal.SIGTERM, _MOMENT_S), (signal.SIGKILL, None)):
        os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def _without_job(variables: dict[str, str]) -> dict[str, str]:
    """The environment of a process that no launcher has started."""
    own = {"LOCKSTEP_LAUNCHED", "MASTER_ADDR", "MASTER_PORT"}
    own |= {name for launcher in LAUNCHERS for name in launcher.names}
    return {name: value for name, value in variables.items() if name not in own}
