"""The signature of a collective: its operation, shapes, dtypes, reduce op and root, as text and as
a digest.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from ..flight_recorder import CallSignature
from .call_sites import digest

__all__ = ["OPERATIONS", "Signatures"]

_REDUCTIONS = {
    hash(getattr(ReduceOp, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_MAX_SHOWN = 3

Key = tuple[Hashable, ...]


def _of(tensor: torch.Tensor) -> Key:
    return tensor.shape, tensor.dtype


def _all_of(tensors: Sequence[torch.Tensor]) -> Key:
    if len(tensors) == 1:
        return _of(tensors[0])
    return tuple(_of(tensor) for tensor in tensors)


# Keys: for each of c10d's methods, what of its arguments must be equal on all ranks. What may
# differ between ranks is left out: the splits of an all-to-all, and what only the root of a gather
# has.


def _reduced(tensors: Any, opts: Any = None, *_: Any) -> Key:
    reduce_op = ReduceOp.SUM if opts is None else opts.reduceOp
    # its hash is a call of pybind11, which a small all-reduce notices
    op = _SUM if reduce_op is ReduceOp.SUM else hash(reduce_op)
    if len(tensors) == 1:
        tensor = tensors[0]
        return (tensor.shape, tensor.dtype), op
    return _all_of(tensors), op


def _rooted(tensors: Any, opts: Any, *_: Any) -> Key:
    return _all_of(tensors), ("root", opts.rootRank)


def _reduced_to(tensors: Any, opts: Any, *_: Any) -> Key:
    return _all_of(tensors), hash(opts.reduceOp), ("root", opts.rootRank)


def _gathered(outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Key:
    return tuple(_all_of(parts) for parts in outputs), ()


def _second(output: Any, tensor: Any, *_: Any) -> Key:
    return (_of(tensor),) if isinstance(tensor, torch.Tensor) else (_all_of(tensor),)


def _second_rooted(outputs: Any, inputs: Any, opts: Any, *_: Any) -> Key:
    return _all_of(inputs), ("root", opts.rootRank)


def _first_rooted(outputs: Any, inputs: Any, opts: Any, *_: Any) -> Key:
    return _all_of(outputs), ("root", opts.rootRank)


def _scattered(outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Key:
    parts = tuple(_all_of(part) for part in inputs)
    return parts, hash(opts.reduceOp) if opts is not None else _SUM


def _second_reduced(output: Any, tensor: Any, opts: Any = None, *_: Any) -> Key:
    return *_second(output, tensor), hash(opts.reduceOp) if opts is not None else _SUM


def _kind(outputs: Any, *_: Any) -> Key:
    first = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return (first.dtype,)


def _nothing(*_: Any) -> Key:
    return ()


_SUM = hash(ReduceOp.SUM)

OPERATIONS: dict[str, tuple[str, Callable[..., Key]]] = {
    "allreduce": ("all_reduce", _reduced),
    "allreduce_coalesced": ("all_reduce", _reduced),
    "reduce": ("reduce", _reduced_to),
    "broadcast": ("broadcast", _rooted),
    "allgather": ("all_gather", _gathered),
    "allgather_coalesced": ("all_gather", _second),
    "all_gather_single": ("all_gather_into_tensor", _second),
    "_allgather_base": ("all_gather_into_tensor", _second),
    "all_gather_single_coalesced": ("all_gather_into_tensor", _second),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", _second),
    "gather": ("gather", _second_rooted),
    "scatter": ("scatter", _first_rooted),
    "reduce_scatter": ("reduce_scatter", _scattered),
    "reduce_scatter_single": ("reduce_scatter_tensor", _second_reduced),
    "_reduce_scatter_base": ("reduce_scatter_tensor", _second_reduced),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", _second_reduced),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", _second_reduced),
    "alltoall": ("all_to_all", _kind),
    "all_to_all_single": ("all_to_all_single", _kind),
    "alltoall_base": ("all_to_all_single", _kind),
    "barrier": ("barrier", _nothing),
}
"""For each of c10d's methods, the name of the operation and its key; some have two names, as torch
renamed them.
"""


class Signatures:
    """A cache of the signatures of calls.

    Args:
        intern: returns the number of a text in the flight recorder's text table.
    """

    def __init__(self, intern: Callable[[str], int]) -> None:
        self._intern = intern
        self._known: dict[Hashable, CallSignature] = {}

    def lookup(self, operation: str, key: Key, name: str) -> CallSignature:
        """Return the signature of a call with that `key`; see `OPERATIONS`."""
        full_key = (operation, key, name)
        signature = self._known.get(full_key)
        return signature if signature is not None else self._new(operation, key, name, full_key)

    def clear(self) -> None:
        """Clear the cache, as the texts may be overwritten."""
        self._known.clear()

    def _new(self, operation: str, key: Key, name: str, full_key: Hashable) -> CallSignature:
        text = describe_call(operation, key)
        signature = CallSignature(digest(f"{operation} {key} {name}"), text, self._intern(text))
        self._known[full_key] = signature
        return signature


def describe_call(operation: str, key: Key) -> str:
    """Return ``all_reduce(float32[10, 4], sum)``."""
    parts: list[str] = []
    for part in key:
        parts += _parts_as_text(part)
    if len(parts) > _MAX_SHOWN + 2:
        parts = [*parts[:_MAX_SHOWN], f"… {len(parts) - _MAX_SHOWN - 1} more", parts[-1]]
    return f"{operation}({', '.join(parts)})"


def _parts_as_text(part: Hashable) -> list[str]:
    if isinstance(part, torch.dtype):
        return [str(part).removeprefix("torch.")]
    if isinstance(part, int):
        return [_REDUCTIONS.get(part, "another reduce op")]
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], torch.Size):
        return [f"{str(part[1]).removeprefix('torch.')}{list(part[0])}"]
    if isinstance(part, tuple) and len(part) == 2 and part[0] in ("root", "to", "from", "tag"):
        return [f"{part[0]}={part[1]}"]
    if isinstance(part, tuple):
        return [text for inner in part for text in _parts_as_text(inner)]
    return [str(part)]
