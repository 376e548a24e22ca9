"""Messages that a worker sends to itself."""

from __future__ import annotations

import torch

from ..errors import ConfigError, TransportError

__all__ = ["Loopback", "Receive"]


class Receive:
    """A receive from oneself, under way or ended; torch.distributed's works have the same methods.

    Args:
        room: what the message is copied to.
        rank: who this is, for errors.
    """

    def __init__(self, room: torch.Tensor, rank: int) -> None:
        self.room, self._rank, self._ended = room, rank, False

    def take(self, message: torch.Tensor) -> None:
        """Copy the message."""
        if message.numel() != self.room.numel() or message.dtype != self.room.dtype:
            expected = f"the size and dtype of the message ({message.numel()} × {message.dtype})"
            raise ConfigError("tensor", expected, found=f"{self.room.numel()} × {self.room.dtype} on rank {self._rank}")
        self.room.copy_(message.view(self.room.shape))
        self._ended = True

    def is_completed(self) -> bool:
        """Whether the message has come."""
        return self._ended

    def wait(self) -> None:
        """Nothing, or an error: nobody else can send the message while this worker waits."""
        if not self._ended:
            raise TransportError(f"rank {self._rank} waits for a message from itself that it has not sent")


class Loopback:
    """Keeps messages until they are received, and receives until their message comes, in order for each tag."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._messages: list[tuple[int, torch.Tensor]] = []
        self._receives: list[tuple[int, Receive]] = []

    def send(self, message: torch.Tensor, tag: int) -> None:
        """Hand `message` to the receive that waits for it, or keep a copy."""
        for number, (wanted, receive) in enumerate(self._receives):
            if wanted == tag:
                del self._receives[number]
                receive.take(message)
                return
        self._messages.append((tag, message.clone()))

    def receive(self, room: torch.Tensor, tag: int) -> Receive:
        """Take the oldest message with `tag`, or wait for it."""
        receive = Receive(room, self._rank)
        for number, (found, message) in enumerate(self._messages):
            if found == tag:
                receive.take(message)
                del self._messages[number]
                return receive
        self._receives.append((tag, receive))
        return receive
