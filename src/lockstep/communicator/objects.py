"""Objects of any kind as pickled tensors, and the gate at which all ranks wait for rank 0."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import watchdog
from ..errors import WorkerError
from .call_arguments import Arguments

T = TypeVar("T")


def pickled(arguments: Arguments, value: object) -> torch.Tensor:
    """Return `value` as bytes on the control device; raise ConfigError where it cannot be
    pickled.
    """
    try:
        data = bytearray(pickle.dumps(value))
    except Exception as error:
        raise arguments.error(
            "value", "one that can be pickled", f"{type(value).__name__} ({error})"
        ) from error
    return torch.frombuffer(data, dtype=torch.uint8).to(arguments.control_device)


def unpickled(data: torch.Tensor) -> Any:
    """Return the value in the bytes of `pickled`."""
    return pickle.loads(memoryview(data.cpu().numpy()))  # type: ignore[arg-type]


def unpickle_all(gathered: Sequence[torch.Tensor], rank: int, own_value: T) -> list[T]:
    """Return the values of all ranks; that of `rank`, this one, is `own_value` itself, no copy."""
    return [own_value if other == rank else unpickled(data) for other, data in enumerate(gathered)]


def error_to_send(error: BaseException) -> bytes:
    """Return `error` pickled for other ranks; as a WorkerError where pickling changes its type or
    text.
    """
    with suppress(Exception):
        sent = pickle.dumps((False, error))
        again = pickle.loads(sent)[1]
        # SystemExit and KeyboardInterrupt are for the program in which they are raised
        if isinstance(error, Exception) and type(again) is type(error) and str(again) == str(error):
            return sent
    return pickle.dumps((False, WorkerError(0, type(error).__name__, str(error))))


# A value is sent as one message of this size, with the value's length and first bytes; the rest
# follows as a second one, if there is a rest.
_BYTES = 256
_LENGTH = 8
_ROOM = _BYTES - _LENGTH


def first_message(data: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return the first message with the bytes `data` of `pickled`, to be sent; without any, to be
    received into.
    """
    message = torch.zeros(_BYTES, dtype=torch.uint8)
    if data is not None:
        message[:_LENGTH] = torch.tensor([len(data)]).view(torch.uint8)
        message[_LENGTH : _LENGTH + len(data)] = data[:_ROOM]
    return message.to(device)


def length_of_rest(message: torch.Tensor) -> int:
    """Return how many bytes follow a first message."""
    return max(0, int(message[:_LENGTH].view(torch.int64)) - _ROOM)


def rest_of(data: torch.Tensor) -> torch.Tensor:
    """Return the bytes that follow the first message."""
    return data[_ROOM:]


def joined(message: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a first message and of what followed it, perhaps with more behind it."""
    length = int(message[:_LENGTH].view(torch.int64))
    return torch.cat([message[_LENGTH : _LENGTH + length], rest[: max(0, length - _ROOM)]])


def wait_for_rank0(group: dist.ProcessGroup, is_rank0: bool, purpose: str) -> None:
    """Return when rank 0 of `group` calls this; unlike a collective, it has no time limit."""
    with watchdog.watch_wait(group, purpose) as check:
        if group not in _gates:
            _gates[group] = _Rank0Gate(group)
        _gates[group].pass_through(is_rank0, check)


class _Rank0Gate:
    """A counter in the job's store: how often rank 0 of a group has arrived.

    Args:
        group: of which this process is a rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        # the more ranks poll, the less often each does: some thousand requests a second are no
        # burden to the store
        self._max_sleep_s = max(0.1, dist.get_world_size(group) / 4000)
        name = (
            f"lockstep/rank 0/{dist.get_global_rank(group, 0)}/{getattr(group, 'group_name', '')}"
        )
        # a group of the same name may have been destroyed: every rank has made as many of them
        self._use = self._store.add(f"{name}/{dist.get_rank(group)}", 1)
        self._key = f"{name}/uses/{self._use}"
        self._times = 0

    def pass_through(self, is_rank0: bool, check: Callable[[], None]) -> None:
        """Open the gate on rank 0; on others, wait until it has been opened as often as this rank
        has arrived.

        Args:
            is_rank0: whether this is rank 0.
            check: called during the wait; raises when it is hopeless.
        """
        self._times += 1
        if is_rank0:
            self._store.add(self._key, 1)
            return
        sleep_s = 1e-3
        # a fake store counts no uses
        while self._use and self._store.add(self._key, 0) < self._times:
            check()
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, self._max_sleep_s)


# by group, as c10d keeps its own data of groups
_gates: WeakKeyDictionary[dist.ProcessGroup, _Rank0Gate] = WeakKeyDictionary()
