"""Where the agents of a job's nodes, and then its workers, meet: a store that node 0's launcher serves."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from threading import Event, Thread

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ..errors import LockstepError
from ..store_exchange import present
from ..stores import LOOPBACK, serve_store
from .failure import Failure
from .pulse import Pulse

__all__ = ["LOOPBACK", "Meeting", "one_machine"]

_POLL_S = 0.02
_LEAVE_S = 2.0
_NOTE_S = 0.5


class Meeting(RendezvousHandler):
    """The rendezvous of agents whose number and order is known from the start.

    PyTorch's static rendezvous cannot meet again when workers are started afresh, and its dynamic one numbers the nodes
    as they come. Here a node that starts its workers afresh opens the next round, and the others follow.

    Args:
        store: served by node 0, reached by all; it has held its port from the start.
        address: the name or number by which all reach it.
        node: this node's number, 0 ≤ node < nodes.
        nodes: how many nodes there are.
        run_id: a name that no other job has.

    Attributes:
        round: how many times workers have been started afresh; -1 before the first.
        stopping: set when this node waits for the others no longer.
        ahead: nanoseconds by which the clock of this node is ahead of the one that all agree on.
    """

    def __init__(self, store: TCPStore, address: str, node: int = 0, nodes: int = 1, run_id: str = "lockstep") -> None:
        self.store, self.address, self.node, self.nodes = store, address, node, nodes
        self.round = -1
        self.ahead = 0
        self.stopping = Event()
        self._run_id = run_id
        self._workers_store = store
        self._pulse: Pulse | None = None

    def get_backend(self) -> str:
        """The name of this kind of rendezvous."""
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """Yes: the workers use the store as clients, rank 0 serves no other."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """This node's place in the next round."""
        current = self._count("round")
        if current == self.round:
            self.store.compare_set("round", str(current), str(current + 1))
            current += 1
        self.round = current
        if self.node == 0:
            self.store.set(f"round/{current}/port", str(self._serve_workers().port))
        self._join()
        port = int(self.store.get(f"round/{current}/port"))
        agents = PrefixStore(f"round/{current}", self.store)
        return RendezvousInfo(agents, self.node, self.nodes, RendezvousStoreInfo(self.address, port))

    def num_nodes_waiting(self) -> int:
        """Not 0 when another node has opened the next round."""
        return int(self._pulse is not None and self._pulse.round > self.round)

    def finish(self) -> None:
        """Wait until the workers of all nodes have finished, or some have failed, or this node is `stopping`."""
        if self.nodes == 1:
            return
        self.store.add("done", 1)
        while self._count("done") < self.nodes and not self._count("failures") and not self.stopping.is_set():
            time.sleep(_POLL_S)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Exchange words with the other nodes during the body; `keep_in_touch` says what was heard."""
        if self.nodes == 1:
            yield
            return
        # the first node's own store has the address at which it listens, if it is not the one that others use
        address = self.store.host if self.node == 0 else self.address
        self._pulse = Pulse(address, self.store.port, self.node, self.nodes)
        try:
            yield
        finally:
            self._pulse.stop()
            if not self._pulse.is_cut:
                self._leave()

    def keep_in_touch(self) -> str:
        """Why the job cannot go on, as far as the other nodes are concerned; "" while it can."""
        return self._pulse.why() if self._pulse is not None else ""

    def first_failure(self, own: Failure | None, seconds: float) -> Failure | None:
        """The first failure of all nodes' workers; every node that has not been interrupted calls this at its end.

        Args:
            own: that of this node's workers, which the others are told.
            seconds: how long to wait for the others.
        """
        if self._pulse is None or self._pulse.is_cut:
            return own
        with suppress(Exception):  # the first node is gone, and the store with it
            if own is not None:
                self.announce(own)
            self._end()
            if self._count("failures"):
                self.wait_for([f"ended/{node}" for node in range(self.nodes)], seconds)
            return Failure.first(self.failures())
        return own

    def note_interruption(self, number: int) -> None:
        """Tell all nodes that this one was sent the signal `number`, before its workers are told and leave.

        Where the first node has vanished this gives up soon: nobody who wants to end a job may have to wait.
        """
        if self._pulse is not None:
            note = Thread(target=self._note, args=(f"{socket.gethostname()} {number}",), daemon=True)
            note.start()
            note.join(_NOTE_S)

    def interruption(self) -> tuple[str, int] | None:
        """The host that was interrupted first, and the signal; None where none was."""
        if self._pulse is None:
            return None
        words = self._pulse.interruption
        with suppress(Exception):  # the first node is gone, and the store with it
            if not words and not self._pulse.is_cut and self.store.check(["interruption"]):
                words = self.store.get("interruption").decode()
        host, _, number = words.partition(" ")
        return (host, int(number)) if words else None

    def announce(self, failure: Failure) -> None:
        """Tell all nodes that this one's workers have failed for good."""
        self.store.set(f"failure/{self.node}", json.dumps(asdict(failure)))
        self.store.add("failures", 1)

    def failures(self) -> list[Failure]:
        """What the nodes have announced."""
        keys = [f"failure/{node}" for node in range(self.nodes)]
        return [Failure(**json.loads(text)) for text in present(self.store, keys).values()]

    def heard(self) -> list[Failure]:
        """The failures of other nodes because of which the job cannot go on; asks nobody."""
        return [Failure(**json.loads(text)) for text in (self._pulse.failures if self._pulse is not None else ())]

    def wait_for(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all `keys` are in the store and say whether they are; a signal can interrupt it."""
        deadline = time.monotonic() + seconds
        while not self.store.check(list(keys)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def is_closed(self) -> bool:
        """Never: there is nobody to close it for."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do; the store ends with this object."""
        return True

    def _serve_workers(self) -> TCPStore:
        """The store for this round's workers: another each time, as they would find what the last have left in it."""
        if self.round > 0:
            self._workers_store = serve_store(self.address, several_hosts=self.nodes > 1)
        return self._workers_store

    def _join(self) -> None:
        """Wait for all nodes here, where it can be given up; the agent then does not have to."""
        here = self.store.add(f"round/{self.round}/nodes", 1)
        while here < self.nodes:
            if self._count("done"):
                raise LockstepError("workers cannot be started afresh, as another host's have finished already")
            if self.stopping.wait(_POLL_S):
                raise LockstepError("the other hosts are not waited for any more")
            here = self._count(f"round/{self.round}/nodes")

    def _note(self, words: str) -> None:
        with suppress(Exception):  # the first node is gone, and the store with it
            self.store.compare_set("interruption", "", words)

    def _end(self) -> None:
        self.store.compare_set(f"ended/{self.node}", "", "yes")

    def _leave(self) -> None:
        with suppress(Exception):  # the first node is gone, and the store with it
            self._end()  # an interrupted node has not said so
            self.store.add("left", 1)
            if self.node == 0:  # the store must outlive the others' last question
                self._wait_for_all("left", _LEAVE_S)

    def _count(self, key: str) -> int:
        return int(self.store.add(key, 0))

    def _wait_for_all(self, key: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._count(key) < self.nodes and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def one_machine() -> Meeting:
    """The meeting of an agent that is alone, at a port of the loopback interface that the system picks.

    A port that was found free may be taken by the time it is used; this store has held its own from the start.
    """
    return Meeting(serve_store(), LOOPBACK)
