"""A node's word to the others that it lives, and its ear for them, in a thread beside the job."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["SILENCE_S", "Pulse"]

SILENCE_S = 10.0
"""Seconds without a word after which a node counts as lost."""

_PERIOD_S = 0.25


class Pulse:
    """Speaks and listens until `stop`.

    It has a connection of its own to the store: one that waits for an answer keeps all others on it waiting, and where
    the first host has vanished without a word, it waits for many minutes, whatever the store's time limit.

    Args:
        address, port: of the store.
        node: this node's number, 0 ≤ node < nodes.
        nodes: how many nodes there are.

    Attributes:
        round: how many times some node has started its workers afresh.
        is_cut: whether the store can no longer be reached.
        interruption: what a node has said of a signal that it was sent, "" where none has.
        failures: what nodes had announced of their workers' failures when that was first heard of.
    """

    def __init__(self, address: str, port: int, node: int, nodes: int) -> None:
        self.round = 0
        self.is_cut = False
        self.interruption = ""
        self.failures: list[str] = []
        self._why = ""
        self._answered = time.monotonic()
        self._address, self._port, self._node, self._nodes = address, port, node, nodes
        self._store: TCPStore
        self._heard: dict[int, tuple[int, float]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep pulse", daemon=True)
        self._thread.start()

    def why(self) -> str:
        """The reason for which the job cannot go on, as far as the nodes are concerned; "" while it can."""
        self.is_cut = self.is_cut or time.monotonic() - self._answered > SILENCE_S
        return self._why or (f"the first host ({self._address}) does not answer any more" if self.is_cut else "")

    def stop(self) -> None:
        """Say nothing more. A question that is under way may still wait for its answer."""
        self._stopping.set()
        self._thread.join(2 * _PERIOD_S)

    def _run(self) -> None:
        try:
            limit = timedelta(seconds=SILENCE_S)
            self._store = TCPStore(self._address, self._port, is_master=False, timeout=limit)
            self._store.set(f"name/{self._node}", socket.gethostname())
            words = 0
            while not self._stopping.wait(_PERIOD_S):
                words += 1
                self._store.set(f"alive/{self._node}", str(words))
                self._why = self._why or self._listen()
                self._answered = time.monotonic()
        except Exception:  # torch has another exception for it in each version
            self.is_cut = True

    def _listen(self) -> str:
        self.round = int(self._store.add("round", 0))
        if not self.interruption and self._store.check(["interruption"]):
            self.interruption = self._store.get("interruption").decode()
        if int(self._store.add("failures", 0)):
            keys = [f"failure/{node}" for node in range(self._nodes)]
            self.failures = [self._store.get(key).decode() for key in keys if self._store.check([key])]
            return "another host's workers have failed"
        others = [node for node in range(self._nodes) if node != self._node] if self._node == 0 else []
        silent = [self._name(node) for node in others if self._is_silent(node)]
        return f"nothing was heard of {', '.join(silent)} for {SILENCE_S:.0f} s" if silent else ""

    def _name(self, node: int) -> str:
        key = f"name/{node}"
        return self._store.get(key).decode() if self._store.check([key]) else f"node {node}"

    def _is_silent(self, node: int) -> bool:
        now, key = time.monotonic(), f"alive/{node}"
        spoken = self._store.check([key])
        if not spoken and int(self._store.add("round/0/nodes", 0)) < self._nodes:
            return False  # it may not be there yet: the first meeting has its own time limit
        words = int(self._store.get(key)) if spoken else 0
        if self._heard.get(node, (-1, 0.0))[0] != words:
            self._heard[node] = (words, now)
        return now - self._heard[node][1] > SILENCE_S
