"""A ``python`` for `--remote-python` that costs no import of PyTorch: what it runs is a fork, as in
`warm_python`.

The fork is in the network and has the host name of who has called it, and its streams, folder,
variables and signals.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .warm_python import Server

__all__ = ["remote_python"]

_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
if words[0] != "-m":
    os.execv({python!r}, [{python!r}, *words])
end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
end.connect({path!r})
socket.send_fds(end, [json.dumps([os.getpid(), words, os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
pid = int(end.recv(100))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
for stream in (0, 1, 2):
    os.close(stream)
code = int(end.recv(100) or -9)
os._exit(code) if code >= 0 else os.kill(os.getpid(), signal.SIGKILL)
"""

_FORK = """
import ctypes, os, runpy, signal, sys
libc, caller = ctypes.CDLL(None, use_errno=True), sys.argv[1]
for kind in ("net", "uts"):
    with open(f"/proc/{caller}/ns/{kind}") as namespace:
        assert libc.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
sys.argv = sys.argv[2:]
runpy._run_module_as_main(sys.argv[0])
"""


@contextmanager
def remote_python(folder: Path) -> Iterator[Path]:
    """The path of the program, which lies in `folder` and works as long as this lasts."""
    program, path = folder / "python", str(folder / "forks")
    program.write_text(_CLIENT.format(python=sys.executable, path=path))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(100)
        forks = _Forks(listener)
        thread = threading.Thread(target=forks.run, name="remote python")
        thread.start()
        try:
            yield program
        finally:
            forks.is_over = True
            thread.join()


class _Forks:
    """Starts forks for clients, and tells these how they end; a fork whose client was killed is
    killed.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._server = listener, Server("torch._dynamo")
        self._clients: dict[int, socket.socket] = {}
        self.is_over = False

    def run(self) -> None:
        """Serve until it is over."""
        try:
            while not self.is_over:
                if select.select([self._listener], [], [], 0.02)[0]:
                    self._start(self._listener.accept()[0])
                for pid, client in list(self._clients.items()):
                    self._look_after(pid, client)
        finally:
            self._server.close()
            for client in self._clients.values():
                client.close()

    def _start(self, client: socket.socket) -> None:
        text, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
        caller, (_, *words), folder, variables = json.loads(text)
        pid = self._server.fork(
            [["-c", _FORK, str(caller), *words], folder, variables, True], streams
        )
        for stream in streams:
            os.close(stream)
        self._clients[pid] = client
        with suppress(OSError):  # it has been killed
            client.send(str(pid).encode())

    def _look_after(self, pid: int, client: socket.socket) -> None:
        code = self._server.exit_code(pid, 0.0)
        if code is not None:
            with suppress(OSError):
                client.send(str(code).encode())
            client.close()
            del self._clients[pid]
        elif select.select([client], [], [], 0)[0]:
            os.kill(pid, signal.SIGKILL)
