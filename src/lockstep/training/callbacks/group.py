"""The callbacks of one run, told of each moment together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from ... import recorder
from ...errors import ConfigError
from .base import Callback, Row
from .checkpoints import Checkpoints

if TYPE_CHECKING:
    from ..step import StepResult
    from ..trainer import Trainer

__all__ = ["CallbackGroup"]


class CallbackGroup:
    """Those of `callbacks` that run on this rank.

    Args:
        callbacks: in the order in which they are told, but for `Checkpoints`: those come last, as the others may
            change what is saved.
        rank: 0 has them all, the others only those with `every_rank`.

    Raises:
        ConfigError: for what is no callback, a class of them say.
    """

    def __init__(self, callbacks: Iterable[Callback], rank: int) -> None:
        ordered = sorted(map(_checked, callbacks), key=lambda callback: isinstance(callback, Checkpoints))
        self._members = [callback for callback in ordered if callback.every_rank or rank == 0]

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """A step has been made."""
        for member in self._members:
            with _waited_for(member):
                member.on_step(trainer, result)

    def on_loss(self, trainer: Trainer, result: StepResult, loss: float) -> None:
        """The loss of a step has arrived."""
        for member in self._members:
            with _waited_for(member):
                member.on_loss(trainer, result, loss)

    def on_epoch(self, trainer: Trainer, row: Row) -> None:
        """An epoch has been made and evaluated."""
        for member in self._members:
            with _waited_for(member):
                member.on_epoch(trainer, row)

    @contextmanager
    def running(self, trainer: Trainer) -> Iterator[None]:
        """Call `on_start` of each now and `on_end` at the end, whatever ends it."""
        error: BaseException | None = None

        def end(member: Callback) -> None:
            # What goes wrong at the end must not hide what went wrong before.
            with nullcontext() if error is None else suppress(Exception), _waited_for(member):
                member.on_end(trainer, error)

        with ExitStack() as stack:
            try:
                for member in self._members:
                    with _waited_for(member):
                        member.on_start(trainer)
                    stack.callback(end, member)
                yield
            except BaseException as raised:
                error = raised
                raise


def _waited_for(member: Callback) -> AbstractContextManager[None]:
    """Around what `member` does: the other ranks are meant to wait for what only rank 0 does."""
    return nullcontext() if member.every_rank else recorder.alone()


def _checked(callback: Any) -> Callback:
    if isinstance(callback, Callback):
        return callback
    if isinstance(callback, type):
        name = callback.__name__
        raise ConfigError(
            "callbacks", "instances of Callback", found=f"the class {name}", hint=f"Make one of it: {name}(...)."
        )
    raise ConfigError("callbacks", "instances of Callback", found=f"one of type {type(callback).__name__}")
