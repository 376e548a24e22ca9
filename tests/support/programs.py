"""Programs run as they are, to the end of their interpreters, without importing torch anew for each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ending", "run_programs"]


@dataclass(frozen=True)
class Ending:
    """How one rank of a program has ended.

    Attributes:
        code: its exit code; negative for a signal.
        out: what it wrote to standard output.
        err: what it wrote to standard error.
        at: when it ended, in seconds on the machine's monotonic clock.
    """

    code: int
    out: str
    err: str
    at: float


# Imports what is slow to import, then forks a process for each rank of each program. A rank leaves the loop, becomes
# the program, and ends as any Python program does.
_SERVER = """
import gc, json, os, sys, time
import torch, torch.distributed, torch.nn.parallel, lockstep.transports.make
torch.set_num_threads(1)
gc.freeze()  # a rank's last collection would otherwise copy every page of what is imported
folder, source = sys.argv[1], None
for number, (source, ranks) in enumerate(json.loads(sys.stdin.read())):
    pids = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            break
        pids[pid] = rank
    else:
        ended = []
        while pids:
            pid, status = os.wait()
            ended.append((pids.pop(pid), os.waitstatus_to_exitcode(status), time.monotonic()))
        print(json.dumps(sorted(ended)), flush=True)
        source = None
        continue
    break
if source is not None:
    name = f"{folder}/{number}"
    sys.argv = ["program", str(rank), str(ranks), name]
    for kind, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{name}.{rank}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    exec(compile(source, "program", "exec"), {"__name__": "__main__"})
"""


def run_programs(
    programs: Sequence[tuple[str, int]], folder: Path, timeout: float = 60.0, preload: Sequence[str] = ()
) -> list[list[Ending]]:
    """Run each program on its number of ranks, one program after the other; how each of its ranks ended.

    A program finds in `sys.argv` its rank, the number of ranks, and a path that is its own. The modules of `preload`
    are imported once for all of them.

    Raises:
        subprocess.TimeoutExpired: all together have taken longer than `timeout` seconds.
    """
    code = f"import {', '.join(preload)}\n{_SERVER}" if preload else _SERVER
    command = [sys.executable, "-W", "error", "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, start_new_session=True) as server:
        try:
            out, _ = server.communicate(json.dumps(programs), timeout)
        finally:
            _kill_group(server.pid)
    lines = out.splitlines()
    assert len(lines) == len(programs), f"{len(lines)} of {len(programs)} programs have ended"
    return [_endings(json.loads(line), f"{folder}/{number}") for number, line in enumerate(lines)]


def _endings(ended: list[Any], name: str) -> list[Ending]:
    def text(rank: int, kind: str) -> str:
        return Path(f"{name}.{rank}.{kind}").read_text()

    return [Ending(code, text(rank, "out"), text(rank, "err"), at) for rank, code, at in ended]


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
