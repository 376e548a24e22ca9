"""What a call of a collective is: its operation, shapes, dtypes, reduction and root, as words and as 64 bits."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from ..recorder import Call
from .places import digest

__all__ = ["KINDS", "Signs"]

_REDUCTIONS = {
    hash(getattr(ReduceOp, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_SHOWN = 3

Key = tuple[Hashable, ...]


def _of(tensor: torch.Tensor) -> Key:
    return tensor.shape, tensor.dtype


def _all_of(tensors: Sequence[torch.Tensor]) -> Key:
    if len(tensors) == 1:
        return _of(tensors[0])
    return tuple(_of(tensor) for tensor in tensors)


# For each of c10d's methods: the name of the operation, and what of its arguments all ranks must have alike. What may
# differ between ranks is left out: the parts of an all-to-all, what the root of a gather alone has.


def _reduced(tensors: Any, opts: Any = None, *_: Any) -> Key:
    return _all_of(tensors), hash(opts.reduceOp) if opts is not None else _SUM


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

KINDS: dict[str, tuple[str, Callable[..., Key]]] = {
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
"""c10d's names of collectives; some have two, as torch renamed them."""


class Signs:
    """Remembers the calls that have been seen.

    Args:
        number: gives the number of a text in the recording.
    """

    def __init__(self, number: Callable[[str], int]) -> None:
        self._number = number
        self._known: dict[Hashable, Call] = {}

    def of(self, operation: str, key: Key, name: str) -> Call:
        """The call with that `key`; see `KINDS`."""
        whole = (operation, key, name)
        found = self._known.get(whole)
        return found if found is not None else self._new(operation, key, name, whole)

    def forget(self) -> None:
        """Numbers of texts are given anew from here on."""
        self._known.clear()

    def _new(self, operation: str, key: Key, name: str, whole: Hashable) -> Call:
        text = in_words(operation, key)
        made = Call(digest(f"{operation} {key} {name}"), text, self._number(text))
        self._known[whole] = made
        return made


def in_words(operation: str, key: Key) -> str:
    """``all_reduce(float32[10, 4], sum)``."""
    words: list[str] = []
    for part in key:
        words += _words(part)
    if len(words) > _SHOWN + 2:
        words = [*words[:_SHOWN], f"… {len(words) - _SHOWN - 1} more", words[-1]]
    return f"{operation}({', '.join(words)})"


def _words(part: Hashable) -> list[str]:
    if isinstance(part, torch.dtype):
        return [str(part).removeprefix("torch.")]
    if isinstance(part, int):
        return [_REDUCTIONS.get(part, "another reduction")]
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], torch.Size):
        return [f"{str(part[1]).removeprefix('torch.')}{list(part[0])}"]
    if isinstance(part, tuple) and len(part) == 2 and part[0] in ("root", "to", "from", "tag"):
        return [f"{part[0]}={part[1]}"]
    if isinstance(part, tuple):
        return [word for inner in part for word in _words(inner)]
    return [str(part)]
