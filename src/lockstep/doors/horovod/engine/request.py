"""One operation that this rank has asked for, and what all ranks must agree on about it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..common.exceptions import HorovodInternalError
from .table import JOIN, Record

__all__ = ["KEY_BYTES", "OP_NAMES", "Adasum", "Average", "Form", "Max", "Min", "Product", "Request", "Sum", "broken"]

Average, Sum, Adasum, Min, Max, Product = range(6)
OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")

KEY_BYTES = 8

Form = tuple[tuple[str, Any], ...]


@functools.lru_cache(maxsize=1 << 14)
def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=KEY_BYTES).digest()


@dataclass(eq=False)
class Request:
    """An operation under way.

    Attributes:
        kind: the verb: "allreduce", "allgather" and so on.
        name: by which ranks find out that they mean the same.
        inputs: tensors, without gradients.
        outputs: what is filled, for verbs whose outputs have the shapes of the inputs; may be the inputs.
        options: what else the verb needs to know, by name.
        form: what all ranks must have alike, as (label, value).
        result: what the verb gives, when it has ended well.
        error: what it ended with, if not well.
        done: whether it has ended.
        asked: when it was submitted, on the monotonic clock.
        wakes: whether a thread sees to it at once, or only when somebody waits or there is enough to do.
        events: when the inputs are ready and when the result is, on a GPU; None where that is so at once.
    """

    kind: str
    name: str
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    options: dict[str, Any] = field(default_factory=dict)
    form: Form = ()
    wakes: bool = True
    result: Any = None
    error: BaseException | None = None
    done: bool = False
    asked: float = 0.0
    events: tuple[Any, Any] = (None, None)

    def fail(self, cause: BaseException | str) -> None:
        """End it with an error that says what has broken the connection."""
        self.error, self.done = broken(f"{self.kind} {self.name!r}", cause), True

    @property
    def key(self) -> bytes:
        """Stands for kind and name."""
        return _digest(self.kind, self.name) if self.kind != "join" else JOIN[0]

    @property
    def record(self) -> Record:
        """What other ranks are told of it: the key, and what stands for the form."""
        return (self.key, _digest(self.form)) if self.kind != "join" else JOIN


def broken(what: str, cause: BaseException | str) -> HorovodInternalError:
    """The error for `what`, which comes from `cause`."""
    if isinstance(cause, str):
        return HorovodInternalError(f"{what}: {cause}")
    error = HorovodInternalError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
