"""The backends of torch.distributed: which are available, and whether an all-reduce of two ranks
works.
"""

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
from ..environment.variable_table import LAUNCHED, TRANSPORT
from ..errors import ConfigError
from .findings import Problem, Section

_START = "import sys; from lockstep.doctor import trial; trial.{}(*sys.argv[1:])"

_TERM_GRACE_S = 3.0  # for a launcher to end its workers

Result = dict[str, Any]


def examine_backends(limit: float) -> Section:
    """Check which backends are available, and run an all-reduce between two ranks on each of these.

    Args:
        limit: seconds after which a test is aborted.
    """
    backends = _available_backends()
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        names = [name for name, (usable, _) in backends.items() if usable]
        results = _test_launched([name for name in names if name != "mpi4py"], folder, limit)
        if "mpi4py" in names:
            results["mpi4py"] = _test_under_mpiexec(folder, limit)
    section = Section("backends")
    for name, (_, remark) in backends.items():
        result = results.get(name)
        text, problem = describe(name, remark, result, name != "mpi4py" or _wants_mpi())
        works = result is not None and "error" not in result
        section.add(name, text, problem, good=True if works else None)
    if environment.transport() == "mpi4py" and "mpi4py" not in backends:
        fix = f"Install it (pip install 'lockstep-train[mpi]'), or unset {TRANSPORT.name}."
        what = f"{TRANSPORT.name} is mpi4py, and that is not installed"
        section.add("mpi4py", "not installed", Problem(what, fix))
    not_compiled = _not_compiled()
    if not_compiled:
        source = "--force-reinstall --no-deps --no-binary lockstep-train lockstep-train"
        fix = f"Install a C compiler, then Lockstep from its source: pip install {source}"
        section.problems.append(
            Problem(
                f"no compiled part of {' and '.join(not_compiled)}; all works, but is slower", fix
            )
        )
    return section


def _available_backends() -> dict[str, tuple[bool, str]]:
    """Return for each backend that concerns this host whether it can be tested, and a remark."""
    import torch

    remark = "not compiled" if _SHM in _not_compiled() else "compiled"
    backends = {_SHM: (sys.platform == "linux", remark)}
    backends["gloo"] = (torch.distributed.is_gloo_available(), "")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        remark = "not tested: it needs two GPUs, and this host has one" if gpus == 1 else ""
        backends["nccl"] = (torch.distributed.is_nccl_available() and gpus > 1, remark)
    if importlib.util.find_spec("mpi4py") is not None:
        remark = (
            "" if _mpiexec() else "not tested: there is no mpiexec (pip install mpich installs one)"
        )
        backends["mpi4py"] = (_mpiexec() is not None, remark)
    return backends


_SHM = "shm"
_COMPILED = {
    _SHM: "lockstep.transports.shm._native",
    "the flight recorder": "lockstep.flight_recorder._native",
}


def _not_compiled() -> list[str]:
    """Return which parts of this installation lack their compiled module."""
    return [part for part, module in _COMPILED.items() if importlib.util.find_spec(module) is None]


def _mpiexec() -> str | None:
    """Return the mpiexec beside this Python, or else the one on the PATH."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def _wants_mpi() -> bool:
    """Return whether somebody has asked for MPI here: by the variable for the transport, or by
    starting this process with mpiexec.
    """
    if environment.transport() == "mpi4py":
        return True
    try:
        return environment.find_world().source in ("openmpi", "mpich")
    except ConfigError:  # the examination of the job says what is wrong
        return False


def describe(
    name: str, remark: str, result: Result | None, is_wanted: bool = True
) -> tuple[str, Problem | None]:
    """Return the line about a backend, and its problem, if any.

    Args:
        name: of the backend.
        remark: what is known of it without a test.
        result: of its test; None without one.
        is_wanted: whether it is a problem if it does not work. If not, the line says what to do if
            it is wanted.
    """
    if result is None:
        return remark or "not in this build of torch", None
    if "error" in result:
        error = str(result["error"]).rstrip(".")
        fix = _FIXES.get(name, "Run a small program on it with LOCKSTEP_DEBUG=1 to see more.")
        fix = next((fix for text, fix in _FIXES_BY_ERROR.items() if text in error), fix)
        if not is_wanted:
            return f'does not work here: {error}. Only transport="{name}" needs it. {fix}', None
        return f"failed: {error}", Problem(f"two ranks cannot sum over {name}: {error}", fix)
    times = f"4 B in {_time(result['small']):>7}, 4 MiB in {_time(result['large']):>7}"
    return f"{times}, {remark}" if remark else times, None


_FIXES = {
    "shm": "See memfd and /dev/shm above; init() needs shm, or else create the process group with "
    "gloo yourself.",
    "gloo": "Set GLOO_SOCKET_IFNAME to one of the interfaces above, and let local connections "
    "through "
    "the firewall.",
    "nccl": "Run with NCCL_DEBUG=INFO to see which connection fails; NCCL_P2P_DISABLE=1 disables "
    "direct access.",
    "mpi4py": "Use the mpiexec of the MPI that mpi4py was built for: `python -m mpi4py "
    "--mpi-library` "
    "names it.",
}

# part of an error → fix
_FIXES_BY_ERROR = {
    "run as root": "Run as another user; or, in a container, set OMPI_ALLOW_RUN_AS_ROOT=1 and "
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, without which Open MPI starts nothing for root.",
    "cannot load MPI library": "Install an MPI that mpi4py finds: pip install mpich.",
    "cannot open shared object file": "Install the MPI that mpi4py was built for, or build mpi4py "
    "again for the one that is here: pip install --force-reinstall --no-cache-dir mpi4py.",
}


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _test_launched(names: list[str], folder: str, limit: float) -> dict[str, Result]:
    """Test the backends, and return their results; one that hangs is aborted, and the remaining
    ones are tested.
    """
    path = Path(folder, "launched")
    remaining = list(names)
    results = dict[str, Result]()
    while remaining:
        path.write_text("")
        problem = _run(
            [sys.executable, "-c", _START.format("run_launched"), str(path), *remaining],
            folder,
            limit,
        )
        results |= _read(path)
        failed = [name for name in remaining if name not in results][:1]
        results |= {name: {"error": problem or "no output"} for name in failed}
        remaining = [name for name in remaining if name not in results]
    return results


def _test_under_mpiexec(folder: str, limit: float) -> Result:
    path = Path(folder, "mpiexec")
    path.write_text("")
    command = [
        str(_mpiexec()),
        "-n",
        "2",
        sys.executable,
        "-c",
        _START.format("run_under_mpiexec"),
        str(path),
    ]
    problem = _run(command, folder, limit)
    return _read(path).get("mpi4py", {"error": problem or "no output"})


def _read(path: Path) -> dict[str, Result]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line.pop("backend"): line for line in lines}


def _run(command: list[str], folder: str, limit: float) -> str:
    """Run `command`, and return its error message in one line; "" if it succeeded."""
    errors = Path(folder, "errors")
    of_launchers = {LAUNCHED.name, "MASTER_ADDR", "MASTER_PORT"}
    of_launchers |= {name for launcher in LAUNCHERS for name in launcher.names}
    variables = environment.variables()
    with errors.open("wb") as stderr:  # a file: a pipe stays open as long as any process holds it
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={name: variables[name] for name in variables if name not in of_launchers},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit:g} s"
    finally:
        if process.poll() is None:
            _end(process)
    if process.returncode == 0:
        return ""
    return error_line(errors.read_text(errors="replace")) or f"exit code {process.returncode}"


def error_line(text: str) -> str:
    """Return the line of an error output that says what went wrong; "" if it is empty.

    It is the last one, as of a traceback; but Open MPI puts its messages into a frame of two lines
    of dashes, of which the first line inside says it.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    frames = [number for number, line in enumerate(lines) if set(line) == {"-"}]
    if frames and frames[0] + 1 < len(lines):
        return lines[frames[0] + 1]
    return lines[-1] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group by SIGTERM, or else by SIGKILL; workers end with their launcher."""
    for number, seconds in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, None)):
        os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
