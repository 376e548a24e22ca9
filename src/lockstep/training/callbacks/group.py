"""The callbacks of one run, told of each moment together."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from ... import recorder
from ...errors import CheckpointError, ConfigError
from ...packing import pack
from .base import Callback, Row
from .checkpoints import Checkpoints

if TYPE_CHECKING:
    from ..step import StepResult
    from ..trainer import Trainer

__all__ = ["CallbackGroup"]

_log = logging.getLogger(__name__)


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
        self._named, self._speaks = _named(ordered), rank == 0

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The state of each that has some, by name.

        Raises:
            ConfigError: for one that cannot be stored, naming the callback and the place in its state.
        """
        found = {name: member.state_dict() for name, member in self._named.items() if member in self._members}
        for name, state in found.items():
            if not isinstance(state, dict):
                raise ConfigError(f"callbacks.{name}", "a dict from state_dict()", found=f"a {type(state).__name__}")
        held = {name: state for name, state in found.items() if state}
        pack({"callbacks": held})
        return held

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Give each its state; say which is missing, and which belongs to none.

        Raises:
            CheckpointError: when one cannot load its state.
        """
        for name, member in self._named.items():
            if name in saved and member in self._members:
                _load(name, member, copy.deepcopy(saved[name]))
            elif name not in saved and self._speaks and member.state_dict():
                _log.warning("the checkpoint has no state of the callback %s, which begins anew", name)
        for name in saved:
            if name not in self._named and self._speaks:
                _log.warning("the checkpoint has state of a callback %s, which this run does not have", name)

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


def _named(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Each by its class and, for more than one of a class, its place among them."""
    named: dict[str, Callback] = {}
    seen = Counter[str]()
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        named[kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"] = callback
    return named


def _load(name: str, callback: Callback, state: Any) -> None:
    try:
        callback.load_state_dict(state)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the callback {name} cannot load its state from the checkpoint: {what}") from error


def _checked(callback: Any) -> Callback:
    if isinstance(callback, Callback):
        return callback
    if isinstance(callback, type):
        name = callback.__name__
        raise ConfigError(
            "callbacks", "instances of Callback", found=f"the class {name}", hint=f"Make one of it: {name}(...)."
        )
    raise ConfigError("callbacks", "instances of Callback", found=f"one of type {type(callback).__name__}")
