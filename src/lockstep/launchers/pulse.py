"""A node's words to the others, and its ear for them, in a thread beside the job; and whether they live."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .. import environment
from ..heartbeat import Hub, Spoke, address_towards
from ..store_exchange import present

__all__ = ["Pulse"]

_PERIOD_S = 0.25


class Pulse:
    """Speaks and listens until `stop`.

    It has a connection of its own to the store: one that waits for an answer keeps all others on it waiting, and where
    the first host has vanished without a word, it waits for many minutes, whatever the store's time limit. So whether
    nodes live is not asked of the store; see `heartbeat`.

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
        self._address, self._port, self._node, self._nodes = address, port, node, nodes
        limit_s = environment.heartbeat_timeout()
        self._lives: _Nodes | _FirstNode = _Nodes(nodes, limit_s) if node == 0 else _FirstNode(address, node, limit_s)
        self._store: TCPStore
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep pulse", daemon=True)
        self._thread.start()

    def why(self) -> str:
        """The reason for which the job cannot go on, as far as the nodes are concerned; "" while it can."""
        if isinstance(self._lives, _FirstNode):
            self.is_cut = self.is_cut or self._lives.is_gone()
        else:
            self._why = self._why or self._lives.who_is_gone()
        return self._why or (f"the first host ({self._address}) does not answer any more" if self.is_cut else "")

    def stop(self) -> None:
        """Say nothing more. A question that is under way may still wait for its answer."""
        self._stopping.set()
        self._thread.join(2 * _PERIOD_S)
        self._lives.close()

    def _run(self) -> None:
        try:
            self._store = TCPStore(self._address, self._port, is_master=False, timeout=timedelta(seconds=10))
            self._store.set(f"name/{self._node}", socket.gethostname())
            while not self._stopping.wait(_PERIOD_S):
                self._lives.connect(self._store)
                self._why = self._why or self._listen()
        except Exception:  # torch has another exception for it in each version
            self.is_cut = True

    def _listen(self) -> str:
        self.round = int(self._store.add("round", 0))
        if not self.interruption and self._store.check(["interruption"]):
            self.interruption = self._store.get("interruption").decode()
        if not int(self._store.add("failures", 0)):
            return ""
        keys = [f"failure/{node}" for node in range(self._nodes)]
        self.failures = [text.decode() for text in present(self._store, keys).values()]
        return "another host's workers have failed"


class _Nodes:
    """The other nodes, as the first one sees them.

    Args:
        nodes: how many nodes there are.
        limit_s: seconds in which a host must answer.
    """

    def __init__(self, nodes: int, limit_s: float) -> None:
        self._nodes, self._limit_s, self._hub = nodes, limit_s, Hub(limit_s)
        self._names: dict[int, str] = {}
        self._invited: set[int] = set()
        self._beyond_reach: set[int] = set()
        self._since = 0.0  # when all of them were there

    def connect(self, store: TCPStore) -> None:
        """Let those connect that have not."""
        for node in (node for node in range(1, self._nodes) if self._hub.life(node) == "unknown"):
            if node not in self._invited and store.check([f"address/{node}"]):
                self._names[node] = store.get(f"name/{node}").decode()
                self._invited.add(node)
                self._invite(node, store)
            if store.check([f"beyond reach/{node}"]):
                self._beyond_reach.add(node)
        if not self._since and int(store.add("round/0/nodes", 0)) >= self._nodes:
            self._since = time.monotonic()

    def _invite(self, node: int, store: TCPStore) -> None:
        try:
            where = self._hub.open_towards(store.get(f"address/{node}").decode())
        except OSError:
            self._beyond_reach.add(node)
        else:
            store.set(f"door/{node}", f"{self._hub.token} {where}")

    def who_is_gone(self) -> str:
        """What is to be said of those that are; "" as long as there is nothing."""
        self._hub.look()
        lives = {node: self._hub.life(node) for node in range(1, self._nodes)}
        ended = [node for node, life in lives.items() if life == "ended"]
        if ended:
            return f"the launcher on {self._named(ended)} is gone"
        silent = [node for node, life in lives.items() if life == "lost" or self._is_silent(node)]
        return f"nothing was heard of {self._named(silent)} for {self._limit_s:g} s" if silent else ""

    def _is_silent(self, node: int) -> bool:
        """Whether a node has left long ago while this one goes on, or has never spoken though it was there."""
        if self._hub.life(node) == "left":
            return self._hub.seconds(node) > self._limit_s
        never = self._hub.life(node) == "unknown" and node not in self._beyond_reach and self._since > 0
        return never and time.monotonic() - self._since > self._limit_s

    def _named(self, nodes: list[int]) -> str:
        return ", ".join(self._names.get(node, f"node {node}") for node in nodes)

    def close(self) -> None:
        """Leave."""
        self._hub.close()


class _FirstNode:
    """The first node, as another one sees it.

    Args:
        address: of the first one.
        node: number of this one.
        limit_s: seconds in which the first one's host must answer.
    """

    def __init__(self, address: str, node: int, limit_s: float) -> None:
        self._address, self._node, self._limit_s = address, node, limit_s
        self._spoke: Spoke | None = None
        self._has_told = False
        self._answered = time.monotonic()

    def connect(self, store: TCPStore) -> None:
        """Connect to it as soon as it says where; where that is not possible its store has to answer."""
        try:
            self._try_to_connect(store)
        except OSError:
            store.set(f"beyond reach/{self._node}", "")
        self._answered = time.monotonic()

    def _try_to_connect(self, store: TCPStore) -> None:
        if not self._has_told:
            store.set(f"address/{self._node}", address_towards(self._address))
            self._has_told = True
        if self._spoke is None and store.check([f"door/{self._node}"]):
            token, _, where = store.get(f"door/{self._node}").decode().partition(" ")
            self._spoke = Spoke(where, token, self._node, self._limit_s)
        elif self._spoke is not None and self._spoke.has_failed:
            store.set(f"beyond reach/{self._node}", "")

    def is_gone(self) -> bool:
        """Whether it, or its host, is."""
        if self._spoke is not None:
            self._spoke.look()
            if self._spoke.life(0) in ("lives", "ended", "lost"):
                return self._spoke.life(0) != "lives"
        return time.monotonic() - self._answered > self._limit_s

    def close(self) -> None:
        """Leave."""
        if self._spoke is not None:
            self._spoke.close()
