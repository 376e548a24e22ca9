"""Where the workers of one machine meet: a store on the loopback interface, served by the launcher."""

from __future__ import annotations

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

__all__ = ["OneMachine"]

HOST = "127.0.0.1"


class OneMachine(RendezvousHandler):
    """The rendezvous of an agent that is alone, at a port that the system picks.

    PyTorch's static rendezvous must be told a port, and one that was found free may be taken by the time it is used.
    Here the store that the workers connect to has held its port from the start.
    """

    def __init__(self) -> None:
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)

    def get_backend(self) -> str:
        """The name of this kind of rendezvous."""
        return "one-machine"

    @property
    def use_agent_store(self) -> bool:
        """Yes: the workers use the store as clients, rank 0 serves no other."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """This agent as number 0 of 1."""
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(HOST, self.store.port))

    def is_closed(self) -> bool:
        """Never: there is nobody to close it for."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """None: no other agent can join."""
        return 0

    def get_run_id(self) -> str:
        """The same for all runs, as they share nothing."""
        return "lockstep"

    def shutdown(self) -> bool:
        """Nothing to do; the store ends with this object."""
        return True
