"""Verbs for values of any kind, which travel pickled."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch

from .moving import Moving
from .point_to_point import PointToPoint

__all__ = ["Objects"]

T = TypeVar("T")


class Objects(Moving, PointToPoint):
    """The verbs whose names end in `_object`.

    Values are pickled by one rank and unpickled by others, which can run any code: they are for the ranks of one job,
    which trust each other. A value that cannot be pickled is a ConfigError before anything is sent. A rank gets its
    own values back as they are, not as copies.
    """

    def send_object(self, value: object, dest: int, tag: int = 0) -> None:
        """Send a picklable value to rank `dest`, which calls `recv_object`."""
        data = self._pickled(value)
        dest = self._check_message(data, "dest", dest, tag)
        self.send(torch.tensor([len(data)], device=data.device), dest, tag)
        self.send(data, dest, tag)

    def recv_object(self, source: int | None = None, tag: int = 0) -> Any:
        """The next value sent by rank `source`, or by any other rank. It is unpickled: only trusted ranks send."""
        length = torch.zeros(1, dtype=torch.int64, device=self._side())
        sender = self.recv(length, source, tag)
        data = torch.empty(int(length), dtype=torch.uint8, device=self._side())
        self.recv(data, sender, tag)
        return _unpickled(data)

    def broadcast_object(self, value: T | None, root: int = 0) -> T:
        """What rank `root` passed, on every worker; `value` of the others is ignored. It must be picklable."""
        root = self._check_rank("root", root)
        if self.size == 1:
            return cast("T", value)
        own = self._pickled(value) if self.rank == root else None
        length = self.broadcast(torch.tensor([0 if own is None else len(own)], device=self._side()), root)
        data = torch.empty(int(length), dtype=torch.uint8, device=self._side()) if own is None else own
        self.broadcast(data, root)
        return cast("T", value) if own is not None else cast("T", _unpickled(data))

    def scatter_object(self, values: Sequence[T] | None, root: int = 0) -> T:
        """The element of rank `root`'s `values` for this rank; they are ignored on the others."""
        root = self._check_rank("root", root)
        if self.rank != root:
            received: T = _unpickled(self.scatter(None, root))
            return received
        held = self._check_values(values)
        if self.size > 1:
            self.scatter([self._pickled(value) for value in held], root)
        return held[root]

    def gather_object(self, value: T, root: int = 0) -> list[T] | None:
        """On rank `root`, every worker's `value`, in rank order; None on the others."""
        root = self._check_rank("root", root)
        if self.size == 1:
            return [value]
        gathered = self.gather(self._pickled(value), root)
        return None if gathered is None else self._unpickle_all(gathered, value)

    def allgather_object(self, value: T) -> list[T]:
        """Every worker's `value`, in rank order, on every worker. It must be picklable."""
        return [value] if self.size == 1 else self._unpickle_all(self.allgather(self._pickled(value)), value)

    def alltoall_object(self, values: Sequence[T]) -> list[T]:
        """What every rank's `values` have for this rank, in rank order."""
        held = self._check_values(values)
        if self.size == 1:
            return held
        return self._unpickle_all(self.alltoall([self._pickled(value) for value in held]), held[self.rank])

    def _check_values(self, values: Sequence[T] | None) -> list[T]:
        if not isinstance(values, Sequence) or len(values) != self.size:
            got = len(values) if isinstance(values, Sequence) else type(values).__name__
            raise self._error("values", f"a list of {self.size} values, one for each rank", got)
        return list(values)

    def _pickled(self, value: object) -> torch.Tensor:
        try:
            data = bytearray(pickle.dumps(value))
        except Exception as error:
            raise self._error("value", "one that can be pickled", f"{type(value).__name__} ({error})") from error
        return torch.frombuffer(data, dtype=torch.uint8).to(self._side())

    def _unpickle_all(self, gathered: Sequence[torch.Tensor], own: T) -> list[T]:
        return [own if rank == self.rank else _unpickled(data) for rank, data in enumerate(gathered)]


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(memoryview(data.cpu().numpy()))  # type: ignore[arg-type]
