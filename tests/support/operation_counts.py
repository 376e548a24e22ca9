"""Counts the operations of torch: what a step costs, without a clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Operations"]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch, those of backward passes and of records for a profiler as
    well.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))
