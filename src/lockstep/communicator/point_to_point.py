"""Messages between two ranks: checks of their arguments, their form on the wire, and messages to
oneself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError, TransportError
from .call_arguments import Arguments, wire_view
from .requests import PolledWork

_MAX_TAG = 2**31 - 1


def check_message(arguments: Arguments, tensor: Any, argument: str, rank: Any, tag: Any) -> int:
    """Return the peer `rank` of a message as an int; raise ConfigError for a bad tensor, rank or
    tag.
    """
    arguments.check_tensor("tensor", tensor)
    if not tensor.is_cpu and arguments.backend_of(tensor) == "gloo" and arguments.size > 1:
        hint = "Send tensor.cpu(), or use a collective."
        raise arguments.error(
            "tensor", "one on the CPU, as Gloo's messages are", tensor.device, hint
        )
    if not 0 <= arguments.check_integer("tag", tag) <= _MAX_TAG:
        raise arguments.error("tag", f"0 to {_MAX_TAG}", tag)
    if tag and arguments.backend_of(tensor) == "nccl":
        raise arguments.error("tag", "0, as NCCL does not tell messages apart", tag)
    return arguments.check_rank(argument, rank)


def check_any_source(arguments: Arguments, tensor: torch.Tensor, tag: int) -> int | None:
    """Return the source of a receive from any rank: None, or this rank where there is no other."""
    check_message(arguments, tensor, "source", arguments.rank, tag)
    if arguments.backend_of(tensor) == "nccl" and arguments.size > 1:
        raise arguments.error("source", "a rank, as NCCL does not receive from any", None)
    return arguments.rank if arguments.size == 1 else None


def message_view(plain: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the contiguous tensor to send; one element for an empty tensor, as Gloo has no empty
    messages.
    """
    data = wire_view(plain, group)
    return data if len(data) else data.new_zeros(1)


def with_polling(work: Any, tensor: torch.Tensor) -> Any:
    """Return `work` in a form that can be polled: Gloo's own completes only in `wait`."""
    return PolledWork(work) if type(work) is dist.Work and tensor.is_cpu else work


def keep_alive(data: torch.Tensor) -> Callable[[], None]:
    """Return a function that returns None, and holds a reference to `data`."""
    return lambda kept=data: None  # type: ignore[misc]


class SelfReceive:
    """A receive from oneself, pending or completed; it has the methods of c10d's works.

    Args:
        buffer: the message is copied to it.
        rank: this rank, for errors.
    """

    def __init__(self, buffer: torch.Tensor, rank: int) -> None:
        self.buffer = buffer
        self._rank = rank
        self._completed = False

    def take(self, message: torch.Tensor) -> None:
        """Copy the message."""
        if message.numel() != self.buffer.numel() or message.dtype != self.buffer.dtype:
            expected = f"the size and dtype of the message ({message.numel()} × {message.dtype})"
            found = f"{self.buffer.numel()} × {self.buffer.dtype} on rank {self._rank}"
            raise ConfigError("tensor", expected, found=found)
        self.buffer.copy_(message.view(self.buffer.shape))
        self._completed = True

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        return self._completed

    def wait(self) -> None:
        """Return, or raise an error: no other rank can send the message while this one waits."""
        if not self._completed:
            raise TransportError(
                f"rank {self._rank} waits for a message from itself that it has not sent"
            )


class SelfMessages:
    """Messages to oneself that are not received yet, and receives without a message, in order for
    each tag.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._messages: list[tuple[int, torch.Tensor]] = []
        self._receives: list[tuple[int, SelfReceive]] = []

    def send(self, message: torch.Tensor, tag: int) -> None:
        """Pass `message` to the receive that waits for it, or keep a copy."""
        for number, (wanted, receive) in enumerate(self._receives):
            if wanted == tag:
                del self._receives[number]
                receive.take(message)
                return
        self._messages.append((tag, message.clone()))

    def receive(self, buffer: torch.Tensor, tag: int) -> SelfReceive:
        """Receive the oldest message with `tag`, now or when it is sent."""
        receive = SelfReceive(buffer, self._rank)
        for number, (message_tag, message) in enumerate(self._messages):
            if message_tag == tag:
                receive.take(message)
                del self._messages[number]
                return receive
        self._receives.append((tag, receive))
        return receive
