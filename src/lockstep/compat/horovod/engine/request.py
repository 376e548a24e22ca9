"""Requests for operations, and the message table, which tracks the ranks that have submitted each
request.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..common.exceptions import HorovodInternalError

KEY_BYTES = 8

RequestMessage = tuple[bytes, bytes]
"""What a rank sends to the other ranks about a request: (key, digest of the signature)."""

JOIN: RequestMessage = (bytes(KEY_BYTES), bytes(KEY_BYTES))
"""The message of a rank that joins: from then on, until all ranks have joined, it submits no
requests.
"""

JOIN_KEY = JOIN[0]


@dataclass(frozen=True)
class Response:
    """An operation that all ranks execute in this cycle.

    Attributes:
        key: the key of the request; JOIN_KEY when all ranks have joined.
        signatures: digest of the signature, by rank, for the ranks that have submitted the request.
            For JOIN_KEY: all ranks, in the order in which they have joined.
        joined: the ranks that have joined and have not submitted the request.
    """

    key: bytes
    signatures: dict[int, bytes]
    joined: tuple[int, ...] = ()

    @property
    def has_mismatch(self) -> bool:
        """Whether the ranks have submitted different signatures under one name."""
        return len(set(self.signatures.values())) > 1


class MessageTable:
    """The ranks that have submitted each request.

    The table is the same on every rank, because every rank adds the same messages in the same
    order.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._submitted: dict[bytes, dict[int, bytes]] = {}
        self._joined: dict[int, bytes] = {}

    def add(self, messages: Sequence[Sequence[RequestMessage]]) -> list[Response]:
        """Add the messages of one cycle.

        Args:
            messages: the messages of each rank, by rank.

        Returns:
            The responses to the requests that all ranks have submitted, in the same order on every
            rank.
        """
        touched: dict[bytes, None] = {}
        any_joined = False
        for rank, rank_messages in enumerate(messages):
            for key, signature in rank_messages:
                if key == JOIN_KEY:
                    self._joined[rank] = signature
                    any_joined = True
                else:
                    self._submitted.setdefault(key, {})[rank] = signature
                    touched[key] = None
        candidates = list(self._submitted) if any_joined else touched
        responses = [self._pop_response(key) for key in candidates if self._is_ready(key)]
        if len(self._joined) == self._size:
            responses.append(Response(JOIN_KEY, self._joined))
            self._joined = {}
        return responses

    def _is_ready(self, key: bytes) -> bool:
        signatures = self._submitted[key]
        return len(signatures) + sum(rank not in signatures for rank in self._joined) == self._size

    def _pop_response(self, key: bytes) -> Response:
        signatures = self._submitted.pop(key)
        return Response(
            key, signatures, tuple(rank for rank in sorted(self._joined) if rank not in signatures)
        )

    def waiting_ranks(self, key: bytes) -> list[int]:
        """Return the ranks that have submitted the request `key` and wait for it."""
        return sorted(self._submitted.get(key, ()))

    def missing_ranks(self, key: bytes) -> list[int]:
        """Return the ranks that have neither joined nor, as far as this rank knows, submitted the
        request `key`.
        """
        signatures = self._submitted.get(key, {})
        return [
            rank
            for rank in range(self._size)
            if rank not in signatures and rank not in self._joined
        ]


Average, Sum, Adasum, Min, Max, Product = range(6)
OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")

Signature = tuple[tuple[str, Any], ...]
"""What must be the same on all ranks, as pairs (label, value)."""


@functools.lru_cache(maxsize=1 << 14)
def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=KEY_BYTES).digest()


@dataclass(eq=False)
class Request:
    """An operation that this rank has submitted.

    Attributes:
        kind: the operation: "allreduce", "allgather" and so on.
        name: identifies the operation, together with `kind`, among all ranks.
        inputs: the input tensors, detached.
        outputs: the tensors to fill, for operations whose outputs have the shapes of the inputs;
            may be the inputs.
        options: further arguments of the operation, by name.
        signature: what must be the same on all ranks.
        urgent: whether the background thread negotiates the request at once, and not only when a
            thread waits for it or enough bytes are pending.
        result: the result of the operation, once it has succeeded.
        error: the error of the operation, once it has failed.
        done: whether the operation has completed.
        submitted_at: when it was submitted, on the monotonic clock.
        inputs_ready: CUDA event after which the inputs can be read; None on the CPU.
        result_ready: CUDA event after which the result can be read; None on the CPU.
    """

    kind: str
    name: str
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    options: dict[str, Any] = field(default_factory=dict)
    signature: Signature = ()
    urgent: bool = True
    result: Any = None
    error: BaseException | None = None
    done: bool = False
    submitted_at: float = 0.0
    inputs_ready: Any = None
    result_ready: Any = None

    def fail(self, cause: BaseException | str) -> None:
        """Complete the request with a `HorovodInternalError` that states `cause`."""
        self.error = internal_error(f"{self.kind} {self.name!r}", cause)
        self.done = True

    @property
    def key(self) -> bytes:
        """A digest of kind and name."""
        return _digest(self.kind, self.name) if self.kind != "join" else JOIN_KEY

    @property
    def message(self) -> RequestMessage:
        """What this rank sends to the other ranks about the request."""
        return (self.key, _digest(self.signature)) if self.kind != "join" else JOIN


def internal_error(what: str, cause: BaseException | str) -> HorovodInternalError:
    """Return the error of the operation `what`, chained to `cause` if that is an exception."""
    if isinstance(cause, str):
        return HorovodInternalError(f"{what}: {cause}")
    error = HorovodInternalError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
