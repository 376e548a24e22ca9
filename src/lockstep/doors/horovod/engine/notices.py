"""What ranks tell each other beside their rounds, when one of these does not end: through the job's store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import distributed_c10d as c10d

from lockstep import Communicator
from lockstep.store_exchange import present

from .request import KEY_BYTES

__all__ = ["Notices"]

T = TypeVar("T")

# The process that holds the store may be the one that does not answer.
_PATIENCE_S = 3.0


class Notices:
    """A board on which every rank says what it waits for, and the first that gives up says why.

    Nothing of it raises: without the store ranks only know less of each other.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._rank, self._size = comm.rank, comm.size
        group: Any = comm.group
        self._prefix = f"lockstep-horovod/{group.group_name}"
        self._origin: Any = c10d._get_default_store()
        self._store: Any = None
        self._said = b""
        self._fails = False

    def say(self, keys: Iterable[bytes]) -> None:
        """Let the others know which operations this rank waits for."""
        text = b"".join(sorted(keys))
        if text != self._said:
            self._said = text
            self._try(lambda store: store.set(str(self._rank), text.hex() or "-"), None)

    def waiting(self) -> dict[int, set[bytes]]:
        """What each rank waits for, as far as it has said so."""
        return self._try(self._read, {})

    def blame(self, text: str) -> str:
        """Say why this rank gives up; what was said first, by whomever."""
        return self._try(lambda store: _first(store, text), text)

    def reason(self) -> str:
        """Why a rank has given up; "" where none has said so."""
        return self._try(lambda store: _first(store, ""), "")

    def _read(self, store: Any) -> dict[int, set[bytes]]:
        found = {}
        for rank, value in present(store, [str(rank) for rank in range(self._size)]).items():
            data = bytes.fromhex(value.decode().removeprefix("-"))
            found[int(rank)] = {data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)}
        return found

    def _try(self, ask: Callable[[Any], T], otherwise: T) -> T:
        """What `ask` finds in the store, in a thread of its own that may never come back."""
        found: list[T] = []

        def work() -> None:
            try:
                found.append(ask(self._open()))
            except (RuntimeError, ValueError):
                self._fails = True

        if self._fails:
            return otherwise
        thread = threading.Thread(target=work, name="lockstep horovod store", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        self._fails = self._fails or thread.is_alive()
        return found[0] if found else otherwise

    def _open(self) -> Any:
        if self._store is None:
            store = self._origin
            if hasattr(store, "clone"):  # a connection of its own: that of the program may be in a call that waits
                store = store.clone()
                store.set_timeout(timedelta(seconds=_PATIENCE_S))
            self._store = c10d.PrefixStore(self._prefix, store)
        return self._store

    def close(self) -> None:
        """Let go of the store."""
        self._fails, self._store, self._origin = True, None, None


def _first(store: Any, text: str) -> str:
    if text and store.add("gave up", 1) == 1:
        store.set("reason", text)
        return text
    return str(store.get("reason").decode()) if text or store.check(["reason"]) else ""
