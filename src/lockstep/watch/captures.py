"""Whether a device's work is being captured into a graph, during which nobody may ask what a device has done."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .replacing import Replaced

__all__ = ["Captures"]


class Captures:
    """The captures of this process.

    In CUDA's default mode a capture fails if any thread queries an event meanwhile. Torch's own watchdog of NCCL
    changes its thread's mode for that, which cannot be done in Python: here questions wait until no capture is open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # no capture begins while somebody asks
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()  # a graph that is dropped is captured no more

    @property
    def are_open(self) -> bool:
        """Whether a graph is being captured; what is called then may not run now."""
        return len(self._open) > 0

    def ask(self, question: Callable[[], bool]) -> bool:
        """What `question` answers, which asks a device; False while a graph is being captured."""
        with self._lock:
            return not self.are_open and question()

    def replacements(self) -> list[Replaced]:
        """What has to be replaced in torch, while the session lasts, to know of captures."""
        kinds = (torch.cuda.CUDAGraph, getattr(torch.xpu, "XPUGraph", None), getattr(torch.accelerator, "Graph", None))
        made = []
        for kind in filter(None, kinds):
            made += [Replaced(kind, "capture_begin", self._begin), Replaced(kind, "capture_end", self._end)]
        return made

    def _begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._open.add(graph)
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                self._close(graph)
                raise

        return begin

    def _end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self._close(graph)

        return end

    def _close(self, graph: Any) -> None:
        with self._lock:
            self._open.discard(graph)
