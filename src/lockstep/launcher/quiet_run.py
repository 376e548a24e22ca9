"""Runs a user's script on this host for a command that reports on it: its output goes to files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from .. import environment
from ..errors import LockstepError, WorkerError
from ..network import VirtualNetwork
from . import fixed_host, links
from .output.log_multiplexer import LogMultiplexer
from .worker_options import EXIT_GRACE, WorkerOptions
from .worker_process import fork_server
from .worker_process.script import Script

__all__ = ["OUTPUT", "in_one_line", "last_line", "run_quietly"]

OUTPUT = "output"
"""The folder, within that of a run, in which each rank's output is a file."""


def run_quietly(
    script: Script, workers: int, threads: int, folder: Path, network: VirtualNetwork | None = None
) -> LockstepError | None:
    """Run `script` on `workers` processes of this host, and return the error by which it failed, if
    it did.

    Args:
        script: the script.
        workers: their number.
        threads: of each of them.
        folder: an existing one, for its output.
        network: that is emulated between the workers.

    Raises:
        ConfigError: if this host has too little memory for the workers.
        KeyboardInterrupt: after Ctrl-C.
    """
    fork_server.check_memory(workers)
    # a later run may have more workers
    with environment.with_variables({"OMP_NUM_THREADS": str(threads)}):
        fork_server.start_fork_server()
    options = WorkerOptions(workers, threads, exit_grace=EXIT_GRACE, network=network)
    (folder / OUTPUT).mkdir()
    output = fixed_host.OutputSettings(
        LogMultiplexer((1, 2), colours=False), folder / OUTPUT, quiet=True
    )
    try:
        with closing(links.OneHost()) as hosts:
            fixed_host.run_program(script, options, output, hosts)
    except LockstepError as error:
        return error
    return None


def in_one_line(script: Script, failure: LockstepError, workers: int = 1) -> LockstepError:
    """Return the error for a script that has failed; one of Lockstep's own is returned as it is."""
    if not isinstance(failure, WorkerError):
        return failure
    lines = re.findall(
        rf'File "[^"]*{re.escape(Path(script.name).name)}", line (\d+)', failure.worker_traceback
    )
    place = f":{lines[-1]}" if lines else ""
    reason = " ".join(failure.reason.split())
    words = [
        "lockstep",
        "run",
        "-np",
        str(workers),
        *["-m"] * script.is_module,
        script.name,
        *script.arguments,
    ]
    shown = shlex.join(words)
    error = LockstepError(
        f"{script.name}{place} failed: {failure.kind}: {reason}. `{shown}` shows the traceback."
    )
    error.exit_code = failure.exit_code
    error.__cause__ = failure
    return error


def last_line(folder: Path) -> str:
    """Return the end of a sentence with the last line of what a script has written."""
    lines: Sequence[str] = ()
    for path in sorted((folder / OUTPUT).glob("*.log")):
        lines = path.read_text(errors="replace").strip().splitlines() or lines
    return (
        f"one whose last line of output is {lines[-1][:200]!r}" if lines else "one without output"
    )
