"""Programs run as they are, to the end of their interpreters, without importing torch anew for
each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ending", "ProgramServer", "run_programs"]


@dataclass(frozen=True)
class Ending:
    """How one rank of a program has ended.

    Attributes:
        code: its exit code; negative for a signal.
        out: what it wrote to standard output.
        err: what it wrote to standard error.
        at: when it ended, in seconds on the host's monotonic clock.
    """

    code: int
    out: str
    err: str
    at: float


# Imports what is slow to import, then forks a process for each rank of each program. A rank leaves
# the loops, becomes the program, and ends as any Python program does. Each line of standard input
# has a folder, programs, and how many of them may run at once.
_SERVER = """
import gc, json, os, sys, time
import torch, torch.distributed, torch.nn.parallel, lockstep.transports.creation
torch.set_num_threads(1)
gc.freeze()  # a rank's last collection would otherwise copy every page of what is imported

def become_rank():
    print("ready", flush=True)
    for line in sys.stdin:
        folder, programs, at_once = json.loads(line)
        waiting = list(enumerate(programs))
        running = {}
        ended = {}
        while waiting or running:
            while waiting and len({number for number, _ in running.values()}) < at_once:
                number, (source, ranks) = waiting.pop(0)
                ended[number] = []
                for rank in range(ranks):
                    pid = os.fork()
                    if pid == 0:
                        return source, rank, ranks, f"{folder}/{number}"
                    running[pid] = number, rank
            pid, status = os.wait()
            number, rank = running.pop(pid)
            ended[number].append((rank, os.waitstatus_to_exitcode(status), time.monotonic()))
            if len(ended[number]) == programs[number][1]:
                print(json.dumps([number, sorted(ended[number])]), flush=True)
    sys.exit()

source, rank, ranks, name = become_rank()
del become_rank
sys.argv = ["program", str(rank), str(ranks), name]
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for kind, descriptor in (("out", 1), ("err", 2)):
    os.dup2(os.open(f"{name}.{rank}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
program = compile(source, "program", "exec")
if not FULL_END:
    exec(LEAVE)
exec(program, {"__name__": "__main__"})
"""

# Runs the program and ends the process where the interpreter would begin to take PyTorch apart: 0.3
# s of a core.
_LEAVE = """
import atexit, threading
code = 1
try:
    exec(program, {"__name__": "__main__"})
    code = 0
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
except BaseException:
    sys.excepthook(*sys.exc_info())
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


class ProgramServer:
    """A process that has imported `preload`, and runs programs on their numbers of ranks.

    A program finds in `sys.argv` its rank, the number of ranks, and a path that is its own.

    Args:
        preload: modules.
        full_end: whether ranks end as a Python program does, down to the end of its libraries, or
            faster: with the functions of `atexit`.
    """

    def __init__(self, preload: Sequence[str] = (), full_end: bool = True) -> None:
        imports = f"import {', '.join(preload)}\n" if preload else ""
        code = f"{imports}FULL_END, LEAVE = {full_end}, {_LEAVE!r}\n{_SERVER}"
        self._command = [sys.executable, "-W", "error", "-c", code]
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        server = subprocess.Popen(
            self._command, stdin=-1, stdout=-1, text=True, start_new_session=True
        )
        assert server.stdout is not None
        # it is ready: from now on it sleeps whenever a test begins or ends
        server.stdout.readline()
        return server

    def run(
        self,
        programs: Sequence[tuple[str, int]],
        folder: Path,
        timeout: float,
        at_once: int = 1,
    ) -> list[list[Ending]]:
        """Run the programs; returns how each rank of each has ended, in the order of the programs.

        Args:
            programs: the source of each, and its number of ranks.
            folder: where they keep their files.
            timeout: seconds for all of them together.
            at_once: how many may run at the same time; more than one where they wait for most of
                their time.

        Raises:
            subprocess.TimeoutExpired: all together have taken longer than `timeout` seconds; the
                server has ended.
        """
        if self._process.poll() is not None:  # killed by the limit of an earlier call
            self.close()
            self._process = self._start()
        server = self._process
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps([str(folder), programs, at_once]) + "\n")
        server.stdin.flush()
        limit = threading.Timer(timeout, _kill_group, [server.pid])
        limit.start()
        try:
            lines = [line for line in (server.stdout.readline() for _ in programs) if line]
        finally:
            late = not limit.is_alive()
            limit.cancel()
            limit.join()
        if late and len(lines) < len(programs):
            raise subprocess.TimeoutExpired(f"{len(programs)} programs in {folder}", timeout)
        assert len(lines) == len(programs), f"{len(lines)} of {len(programs)} programs have ended"
        endings = sorted(json.loads(line) for line in lines)
        return [_endings(ended, f"{folder}/{number}") for number, ended in endings]

    def close(self) -> None:
        """End the server, and what its programs have left behind."""
        server = self._process
        assert server.stdin is not None and server.stdout is not None
        _kill_group(server.pid)
        with suppress(BrokenPipeError):
            server.stdin.close()
        server.stdout.close()
        server.wait()


def run_programs(
    programs: Sequence[tuple[str, int]],
    folder: Path,
    timeout: float = 60.0,
    preload: Sequence[str] = (),
    at_once: int = 1,
) -> list[list[Ending]]:
    """Run each program on its number of ranks by a `ProgramServer` of their own, so many at once.

    Raises:
        subprocess.TimeoutExpired: all together have taken longer than `timeout` seconds.
    """
    with closing(ProgramServer(preload)) as server:
        return server.run(programs, folder, timeout, at_once)


def _endings(ended: list[Any], name: str) -> list[Ending]:
    def text(rank: int, kind: str) -> str:
        return Path(f"{name}.{rank}.{kind}").read_text()

    return [Ending(code, text(rank, "out"), text(rank, "err"), at) for rank, code, at in ended]


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
