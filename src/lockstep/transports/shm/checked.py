"""What the calls of a group have in common: checks of their arguments, and the short way for plain tensors."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="call-arg,arg-type"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import ConfigError
from ..named import NamedGroup
from .arguments import is_plain, same_dtype
from .compiled import number_of, spans
from .core import Core, limit_of
from .state import compiled_code
from .waiting import Steps
from .work import ShmWork

__all__ = ["CheckedGroup"]

Tensors = Sequence[torch.Tensor]


class CheckedGroup(NamedGroup):
    """A process group on one machine, without its operations."""

    def __init__(self, core: Core) -> None:
        super().__init__(core.rank, core.size)
        self._core, self._compiled = core, core.arena.compiled

    def _at_once(
        self, kind: int, opts: Any, inputs: Tensors, outputs: Tensors, root: int = 0, code: int | None = None
    ) -> ShmWork | None:
        """Carry out a synchronous collective with the compiled part; None where it cannot, for whatever reason.

        Args:
            kind: which; of those in signs.py.
            opts: c10d's options of the call.
            inputs: what this rank gives; one tensor may stand for the equal parts that it consists of.
            outputs: the same of what it gets.
            root: its root, or any rank.
            code: see `_code`, if it reduces.
        """
        if not self._compiled or opts is None or opts.asyncOp:
            return None
        if code is None:
            code = number_of(inputs, outputs)
        elif code < 0:
            return None
        given = _plain_spans(inputs)
        got = given if outputs is inputs else _plain_spans(outputs)
        if given is None or got is None:
            return None
        return self._note(self._core.run_compiled(kind, opts, given, got, (inputs, outputs), root, code))

    def _run(self, what: str, steps: Steps, opts: Any, result: Tensors) -> ShmWork:
        asynchronous = True if opts is None else opts.asyncOp
        return self._note(self._core.run(what, steps, asynchronous, limit_of(opts), list(result)))

    def _code(self, op: Any, tensor: torch.Tensor) -> int:
        """See `compiled_code`; -1 also where there is no compiled part."""
        return compiled_code(op, tensor.dtype) if self._compiled else -1

    def _divides(self, whole: torch.Tensor, part: torch.Tensor, equal: bool = False) -> bool:
        """Whether `whole` consists of a part like `part` for each rank; `equal`: both consist of such parts."""
        size, count = self._core.size, whole.numel()
        fits = count == part.numel() and count % size == 0 if equal else count == part.numel() * size
        return fits and whole.dtype is part.dtype

    def _root(self, opts: Any) -> int:
        return self._peer("root", opts.rootRank, self_too=True)

    def _peer(self, argument: str, rank: int, self_too: bool = False) -> int:
        if not 0 <= rank < self._core.size or (rank == self._core.rank and not self_too):
            other = "" if self_too else f" other than this one ({self._core.rank})"
            raise ConfigError(argument, f"a rank{other} from 0 to {self._core.size - 1}", rank)
        return rank

    def _count(self, argument: str, parts: Tensors) -> None:
        if len(parts) != self._core.size:
            raise ConfigError(argument, f"{self._core.size} tensors, one for each rank", len(parts))

    def _fit(self, argument: str, parts: Tensors, other: str, tensor: torch.Tensor, all_equal: bool = False) -> None:
        """Raise ConfigError unless there is a part for each rank, and this rank's (or `all_equal`) is like `tensor`."""
        self._count(argument, parts)
        same_dtype([tensor, *parts])
        for part in parts if all_equal else [parts[self._core.rank]]:
            if part.numel() != tensor.numel():
                raise ConfigError(argument, f"{tensor.numel()} elements, as in this rank's {other}", part.numel())


def _plain_spans(tensors: Tensors) -> tuple[int, ...] | None:
    """Address and bytes of each tensor, one after the other; None where the bytes of one are not its elements."""
    if len(tensors) == 1:
        tensor = tensors[0]
        return (tensor.data_ptr(), tensor.nbytes) if is_plain(tensor) else None
    return spans(tensors) if all(map(is_plain, tensors)) else None
