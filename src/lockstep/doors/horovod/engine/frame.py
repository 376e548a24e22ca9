"""The small message in which ranks tell each other what they ask for."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep import Communicator

from .calls import Calls
from .request import KEY_BYTES
from .table import Record

__all__ = ["Frames"]

_HEAD = struct.Struct("<q")
_RECORD = 2 * KEY_BYTES

# Room for 63 operations. An all-gather of so much takes no longer than one of a byte; a model with more parameters
# tells of them in several rounds.
_BYTES = _HEAD.size + 63 * _RECORD


class Frames:
    """One frame for each rank, always of the same size, so that nobody needs to know what the others are going to say.

    Args:
        comm: who tells each other; nobody else uses its process group.
        device: where the frames travel.
        calls: the collectives of `comm`.
    """

    most = (_BYTES - _HEAD.size) // _RECORD

    def __init__(self, comm: Communicator, device: torch.device, calls: Calls) -> None:
        self._comm, self._calls = comm, calls
        self._own = torch.zeros(_BYTES, dtype=torch.uint8)
        self._view: Any = memoryview(self._own.numpy())  # type: ignore[arg-type]
        self._all = torch.zeros(comm.size * _BYTES, dtype=torch.uint8, device=device)
        self._parts = list(torch.split(self._all, _BYTES))
        self._heard: Any = memoryview(self._all.numpy()) if device.type == "cpu" else None  # type: ignore[arg-type]
        self._sent = self._own if device.type == "cpu" else torch.zeros_like(self._own, device=device)

    def exchange(self, records: Sequence[Record]) -> list[list[Record]]:
        """Tell `records`, at most `most`; what every rank has told, by rank. Returns when every rank has called it."""
        data = b"".join([_HEAD.pack(len(records)), *[key + form for key, form in records]])
        self._view[: len(data)] = data
        if self._heard is None:
            self._sent.copy_(self._own)
            dist.all_gather(self._parts, self._sent, group=self._comm.group)
            told = self._all.cpu().numpy().tobytes()
        else:
            self._calls.gather(self._parts, self._own)
            told = self._heard.tobytes()
        return [_records(told, start) for start in range(0, len(told), _BYTES)]


def _records(told: bytes, start: int) -> list[Record]:
    (count,) = _HEAD.unpack_from(told, start)
    first = start + _HEAD.size
    places = range(first, first + count * _RECORD, _RECORD)
    return [(told[at : at + KEY_BYTES], told[at + KEY_BYTES : at + _RECORD]) for at in places]
