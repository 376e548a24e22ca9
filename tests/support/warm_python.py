"""Runs Python in forks of one process that has PyTorch loaded, because loading it takes a core 3 s
each time.

The fork has the command line, folder, variables and streams that are asked for, and ends as any
interpreter does. The fork server that a launcher starts is a fork as well. Two things differ from a
process started by the system, and tests about these start one: /proc/PID/environ and
/proc/PID/cmdline are those of the first process, and libraries have read their variables
(OMP_NUM_THREADS) when they were loaded.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import Self

__all__ = ["Server", "WarmProcess", "load", "popen", "run", "unload"]

# What it forks leaves the loop, and runs at the top of the script, as the main program.
_SERVER = """
import gc, json, os, select, socket, sys, types
import torch, torch.distributed, torch.nn.parallel, numpy
import lockstep.cli, lockstep.compat.horovod.torch, lockstep.launcher.fixed_host, lockstep.launcher.node
import lockstep.launcher.remote_hosts.ssh, lockstep.training, lockstep.transports.creation, lockstep.watchdog.report
for name in sys.argv[2:]:
    __import__(name)
torch.set_num_threads(1)
gc.freeze()  # the last collection of a fork would otherwise copy every page of what is imported
requests = socket.socket(fileno=int(sys.argv[1]))

def next_request():
    children = set()
    requests.send(b"ready")
    while True:
        if select.select([requests], [], [], 0.01 if children else None)[0]:
            text, streams, _, _ = socket.recv_fds(requests, 1 << 20, 3)
            if not text:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                return json.loads(text), streams
            children.add(pid)
            requests.send(json.dumps([pid, None]).encode())
            for stream in streams:
                os.close(stream)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                requests.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())

def fork_instead(path, args, passfds):
    pid = os.fork()
    if pid == 0:
        wanted = sorted({0, 1, 2, *passfds})
        for low, high in zip(wanted, [*wanted[1:], 1 << 16]):
            os.closerange(low + 1, high)
        sys.argv, sys.orig_argv = ["-c"], [os.fsdecode(arg) for arg in args]
        import weakref
        weakref.finalize._registry.clear()  # of the launcher, such as that of its folder
        try:
            exec(sys.orig_argv[-1], {"__name__": "__main__"})
        finally:
            os._exit(0)  # and not back to what has called this
    return pid

def become(words, folder, variables, new_session, streams):
    import multiprocessing.util
    requests.close()
    if new_session:
        os.setsid()
    for wanted, stream in enumerate(streams):
        os.dup2(stream, wanted)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    spawn = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = lambda path, args, passfds: (
        fork_instead if "multiprocessing.forkserver" in str(args[-1]) else spawn)(path, args, passfds)
    sys.orig_argv = [sys.executable, *words]

request, streams = next_request()
become(*request, streams)
words = request[0]
del request, streams, next_request, become, requests
if words[0] == "-m":
    import runpy
    sys.argv, sys.path[0] = words[1:], os.getcwd()
    runpy._run_module_as_main(words[1])
else:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        source, name, sys.argv, sys.path[0] = words[1], "<string>", ["-c", *words[2:]], ""
    else:
        name = os.path.abspath(words[0])
        sys.argv, sys.path[0] = words, os.path.dirname(name)
        main.__file__ = name
        with open(name) as file:
            source = file.read()
    exec(compile(source, name, "exec"), vars(main))
"""


class Server:
    """A process with PyTorch loaded, and with `modules`."""

    def __init__(self, *modules: str) -> None:
        self._requests, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            command = [sys.executable, "-c", _SERVER, str(far.fileno()), *modules]
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command,
                env=variables,
                pass_fds=[far.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        self._is_ready = False
        self._codes: dict[int, int] = {}

    def fork(self, request: Sequence[object], streams: Sequence[int]) -> int:
        """Start a program whose standard streams are the descriptors `streams`; returns its process
        ID.
        """
        if not self._is_ready:
            assert self._requests.recv(100) == b"ready"
            self._is_ready = True
        socket.send_fds(self._requests, [json.dumps(request).encode()], streams)
        while True:
            pid, code = json.loads(self._requests.recv(100))
            if code is None:
                self._codes.pop(pid, None)  # of an earlier process with the same ID
                return int(pid)
            self._codes[pid] = code

    def exit_code(self, pid: int, timeout: float) -> int | None:
        """Return the exit code of the program `pid`; None if it has not ended within `timeout`
        seconds.
        """
        deadline = time.monotonic() + timeout
        while pid not in self._codes:
            self._requests.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                ended, self._codes[ended] = json.loads(self._requests.recv(100))
            except TimeoutError:
                return None
            finally:
                self._requests.settimeout(None)
        return self._codes[pid]

    def close(self) -> None:
        """End the process, and what its forks have left behind."""
        self._requests.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_servers: list[Server] = []  # one at most


def load() -> None:
    """Start the process that the tests of this process share; it loads PyTorch while they go on."""
    if not _servers:
        _servers.append(Server())


def unload() -> None:
    """End it."""
    if _servers:
        _servers.pop().close()


class WarmProcess:
    """A running ``python WORDS``, used as `subprocess.Popen`.

    Attributes:
        pid: its process ID.
        returncode: its exit code, negative for a signal; None while it runs.
        stdout, stderr: what it writes.
    """

    def __init__(self, request: Sequence[object], stdin: int, stdout: int, stderr: int) -> None:
        load()
        self._server = _servers[0]
        self.pid = self._server.fork(request, [stdin, stdout, stderr])
        self.returncode: int | None = None
        self.stdout: TextIO | None = None
        self.stderr: TextIO | None = None

    def poll(self) -> int | None:
        """Return its exit code, or None."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return its exit code when it has ended; raises subprocess.TimeoutExpired after `timeout`
        seconds.
        """
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def read_until(self, pattern: str) -> str:
        """Return what it writes to standard output up to a line with `pattern`."""
        assert self.stdout is not None
        seen = ""
        for line in self.stdout:
            seen += line
            if re.search(pattern, line):
                return seen
        raise AssertionError(
            f"no line with {pattern!r} in:\n{seen}\n{self.stderr.read() if self.stderr else ''}"
        )

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return all that it still writes, once it has ended."""
        assert self.stdout is not None and self.stderr is not None
        with ThreadPoolExecutor(2) as threads:
            texts = [threads.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return texts[0].result(), texts[1].result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self.kill()
        self.wait(60.0)
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def popen(
    words: Sequence[object],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
) -> WarmProcess:
    """Start ``python WORDS`` with pipes for what it writes.

    Args:
        words: ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...``.
        cwd: its working directory; this process's if None.
        env: its environment; this process's if None.
        start_new_session: whether it leads a session of its own.
    """
    (out, out_end), (err, err_end), null = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDONLY)
    try:
        process = WarmProcess(_request(words, cwd, env, start_new_session), null, out_end, err_end)
    finally:
        for end in (out_end, err_end, null):
            os.close(end)
    process.stdout, process.stderr = os.fdopen(out), os.fdopen(err)
    return process


def run(
    words: Sequence[object],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` with `stdin` to its end, otherwise as `popen`.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds; it and all others are
            killed.
    """
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(stdin)
        given.seek(0)
        process = WarmProcess(
            _request(words, cwd, env, False), given.fileno(), out.fileno(), err.fileno()
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            unload()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(
            ["python", *map(str, words)], code, out.read(), err.read()
        )


def _request(
    words: Sequence[object], cwd: Path | None, env: Mapping[str, str] | None, new_session: bool
) -> tuple[object, ...]:
    variables = dict(os.environ if env is None else env)
    return [str(word) for word in words], str(cwd or Path.cwd()), variables, new_session
