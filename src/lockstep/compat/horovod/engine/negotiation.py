"""Negotiation: the messages in which ranks announce their requests, and how requests for one
operation differ.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lockstep import Communicator
from lockstep.errors import ranks_in_words

from .request import KEY_BYTES, RequestMessage, Signature

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"


# The dtypes that every CPU backend sums. For others `Communicator` knows what each backend
# supports.
SUMMABLE_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


class RawCollectives:
    """Blocking collectives on contiguous CPU tensors.

    They call the process group directly. The functions of `torch.distributed` take some 5 µs more,
    to look up the group and to check all arguments.

    Args:
        comm: the ranks; a communicator of one rank has no group.
    """

    def __init__(self, comm: Communicator) -> None:
        self._group: Any = comm.group
        self._sum_options = dist.AllreduceOptions()
        self._gather_options = c10d.AllgatherOptions()
        self._sum_options.asyncOp = self._gather_options.asyncOp = False

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum `tensor`, whose dtype is one of SUMMABLE_DTYPES, over the ranks, in place."""
        if self._group is not None:
            _wait(self._group.allreduce([tensor], self._sum_options))

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Fill ``outputs[i]`` with the `tensor` of rank i."""
        _wait(self._group.allgather([outputs], [tensor], self._gather_options))

    def close(self) -> None:
        """Drop the reference to the group, whose connections are closed with the last reference."""
        self._group = None


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def negotiation_device(comm: Communicator) -> torch.device:
    """Return the device of the negotiation messages: the CPU if the group of `comm` has a CPU
    backend.
    """
    if comm.size == 1 or "cpu" not in dist.get_backend_config(comm.group):
        return comm.device
    return torch.device("cpu")


_COUNT = struct.Struct("<q")
_MESSAGE_BYTES = 2 * KEY_BYTES

# Room for 63 requests. An all-gather of that size takes no longer than one of a single byte; the
# requests of a model with more parameters are announced in several cycles.
_FRAME_BYTES = _COUNT.size + 63 * _MESSAGE_BYTES


class NegotiationMessages:
    """Exchanges the messages of a cycle: one frame of fixed size per rank, so that one all-gather
    suffices.

    Args:
        comm: the ranks; only the engine may use its process group.
        device: the device of the frames.
        collectives: the collectives of `comm`.
    """

    max_messages = (_FRAME_BYTES - _COUNT.size) // _MESSAGE_BYTES

    def __init__(
        self, comm: Communicator, device: torch.device, collectives: RawCollectives
    ) -> None:
        on_cpu = device.type == "cpu"
        self._comm = comm
        self._collectives = collectives
        self._frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        self._frame_view: Any = memoryview(self._frame.numpy())  # type: ignore[arg-type]
        self._gathered = torch.zeros(comm.size * _FRAME_BYTES, dtype=torch.uint8, device=device)
        self._gathered_frames = list(torch.split(self._gathered, _FRAME_BYTES))
        self._gathered_view: Any = memoryview(self._gathered.numpy()) if on_cpu else None  # type: ignore[arg-type]
        self._device_frame = self._frame if on_cpu else torch.zeros_like(self._frame, device=device)

    def exchange(self, messages: Sequence[RequestMessage]) -> list[list[RequestMessage]]:
        """Send `messages`, at most `max_messages`, and return those of every rank, by rank; blocks
        for all ranks.
        """
        data = b"".join(
            [_COUNT.pack(len(messages)), *[key + signature for key, signature in messages]]
        )
        self._frame_view[: len(data)] = data
        if self._gathered_view is None:
            self._device_frame.copy_(self._frame)
            dist.all_gather(self._gathered_frames, self._device_frame, group=self._comm.group)
            received = self._gathered.cpu().numpy().tobytes()
        else:
            self._collectives.gather(self._gathered_frames, self._frame)
            received = self._gathered_view.tobytes()
        return [_unpack_frame(received, start) for start in range(0, len(received), _FRAME_BYTES)]


def _unpack_frame(received: bytes, start: int) -> list[RequestMessage]:
    (count,) = _COUNT.unpack_from(received, start)
    first = start + _COUNT.size
    offsets = range(first, first + count * _MESSAGE_BYTES, _MESSAGE_BYTES)
    return [
        (received[at : at + KEY_BYTES], received[at + KEY_BYTES : at + _MESSAGE_BYTES])
        for at in offsets
    ]


def mismatch_message(kind: str, name: str, signatures: Mapping[int, Signature]) -> str:
    """Return a sentence that names the first label whose value differs, and the value on each rank.

    Args:
        kind: the operation.
        name: its name.
        signatures: the signature on each rank; not all of them are equal.
    """
    for label in dict.fromkeys(
        label for signature in signatures.values() for label, _ in signature
    ):
        ranks: dict[str, list[int]] = {}
        for rank, signature in signatures.items():
            ranks.setdefault(_value_text(dict(signature).get(label)), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(
                f"{value} on {ranks_in_words(members)}" for value, members in ranks.items()
            )
            return f"{kind} {name!r}: the ranks do not agree on {label}: {values}"
    return f"{kind} {name!r}: the ranks do not agree"


def missing_ranks_message(kind: str, name: str, joined: Sequence[int]) -> str:
    """Return a sentence for an operation that cannot run, because the ranks `joined` do not take
    part.
    """
    verb = "has" if len(joined) == 1 else "have"
    who = f"{ranks_in_words(joined)} {verb} joined"
    return f"{kind} {name!r} needs all ranks, but {who}. Only all-reduces run without them"


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        items = ", ".join(_value_text(item) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    return str(value).removeprefix("torch.")
