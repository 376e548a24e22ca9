"""Notices gradients as a backward pass leaves them, and when one comes twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..errors import ConfigError
from .buckets import Bucket

__all__ = ["Arrivals"]


class Arrivals:
    """Watches the gradients of one shard's backward pass.

    Hooks are there for a worker's last shard alone, as they cost something for each parameter and pass.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._order: list[nn.Parameter] = []
        self._before: list[int] = []

    @staticmethod
    def refuse_other_hooks(parameters: Sequence[nn.Parameter]) -> None:
        """See that nobody else acts on gradients as they come; called while this one does not listen.

        Raises:
            ConfigError: when someone does: what lies there is a shard's, or the sum of a pair, as workers have them.
        """
        if any(p._post_accumulate_grad_hooks for p in parameters):
            raise ConfigError(
                "parameters",
                "none with a hook of register_post_accumulate_grad_hook()",
                found="one, which would see the gradients of one shard or of two, depending on the number of workers",
                hint="Use register_hook(), which sees each shard's, or change gradients before the optimizer's step.",
            )

    def listen(self, buckets: Sequence[Bucket], ready: Callable[[], None]) -> None:
        """Count off each bucket's `waiting`, and call `ready` whenever one has become complete."""
        self._order = []
        for bucket in buckets:
            hook = partial(self._arrived, bucket, ready)
            for p in bucket.parameters:
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _arrived(self, bucket: Bucket, ready: Callable[[], None], parameter: nn.Parameter) -> None:
        if not bucket.waiting:
            raise _several()
        self._order.append(parameter)
        bucket.waiting -= 1
        if not bucket.waiting:
            ready()

    def stop(self) -> list[nn.Parameter]:
        """Listen no more; returns the parameters in the order in which their gradients came."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self._order

    def expect(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note how the gradients of `parameters` are before a pass that adds to them."""
        self._before = [-1 if p.grad is None else p.grad._version for p in parameters]

    def check_one_pass(self, parameters: Sequence[nn.Parameter]) -> None:
        """See that to no gradient noted by `expect` more than one has been added since.

        Raises:
            ConfigError: for one; the sum of three would depend on which two were added first.
        """
        for p, before in zip(parameters, self._before, strict=False):
            if p.grad is not None and before >= 0 and p.grad._version > before + 1:
                raise _several()


def _several() -> ConfigError:
    return ConfigError(
        "backward",
        "one backward pass for each shard",
        found="several, or one that comes by a parameter more than once",
        hint="Add up the losses and call backward() once; use torch.utils.checkpoint with use_reentrant=False.",
    )
