"""How two launchers of a job meet: each proves to the other that it knows the job's key, and says
what it is.

Each side chooses a number that no other connection has. Who is dialled begins with its own; who
dials answers with its own and what it is. Both show a code over the two (HMAC, RFC 2104), of which
nobody learns the key, and which is worth nothing on another connection.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

import msgspec
from msgspec import structs

from ..job.messages import HostDescription
from ..messages import Integer, List, Tagged

__all__ = [
    "ANY_HOST",
    "Handshake",
    "HostEntry",
    "HostHello",
    "HostRefused",
    "HostWelcome",
]

ANY_HOST = -1
"""In place of a host's number: any."""


class HostEntry(msgspec.Struct, frozen=True, array_like=True):
    """A host of an elastic job.

    Attributes:
        number: of the host; no other host of the job has had it.
        name: its name.
        address, port: where its launcher listens.
        slots: the most workers to run on it.
    """

    number: Integer
    name: str
    address: str
    port: Integer
    slots: Integer


class HostHello(Tagged, frozen=True):
    """The first message of each side: of who was dialled its number alone, and then that of who
    dials.

    Attributes:
        nonce: a number that no other connection has.
        proof: that the sender knows the job's key.
        node: the number that its host wants in the job; `ANY_HOST` for any.
        description: of its host; None for one that is known, or only asks.
        host: in an elastic job, its host as the others are to know it.
        to: the number of the host that is dialled; `ANY_HOST` for any.
    """

    nonce: str = ""
    proof: str = ""
    node: Integer = ANY_HOST
    description: HostDescription | None = None
    host: HostEntry | None = None
    to: Integer = ANY_HOST


class HostWelcome(Tagged, frozen=True):
    """The host takes part.

    Attributes:
        proof: of who was dialled that it knows the job's key.
        sent_at_ns: when this was sent, on the clock of its host, in a job of fixed size.
        number: of a host that joins an elastic job.
        leader: who leads that.
        hosts: of that job, as far as they are known.
        spec: what that job runs, as JSON.
    """

    proof: str = ""
    sent_at_ns: Integer = 0
    number: Integer = ANY_HOST
    leader: Integer = ANY_HOST
    hosts: List[HostEntry] = ()
    spec: str = ""


class HostRefused(Tagged, frozen=True):
    """The host cannot take part, or the hosts cannot run the program together.

    Attributes:
        reason: why.
        ask: which other host to ask, which leads an elastic job.
        proof: as in `HostWelcome`, if the host that was dialled takes part no more.
        is_number: whether the reason is that another host has its number.
    """

    reason: str
    ask: HostEntry | None = None
    proof: str = ""
    is_number: bool = False


class Handshake:
    """One side of the handshake on one connection.

    Args:
        key: of the job.

    Attributes:
        nonce: the number of this side.
        other: that of the other side; "" until it has come.
    """

    def __init__(self, key: str) -> None:
        self.nonce = secrets.token_hex(16)
        self.other = ""
        self._key = key

    def begin(self) -> HostHello:
        """Return the first message of who was dialled."""
        return HostHello(self.nonce)

    def answer(self, first: object, hello: HostHello) -> HostHello:
        """Return the answer of who has dialled to the first message: `hello`, with the proof.

        Raises:
            OSError: that is no such message.
        """
        if not isinstance(first, HostHello) or not first.nonce or self.other:
            raise OSError("another program listens there")
        self.other = first.nonce
        proof = self._code("dials", self.other, self.nonce)
        return structs.replace(hello, nonce=self.nonce, proof=proof)

    def check(self, hello: object) -> HostHello:
        """Return the answer of who has dialled, who knows the key.

        Raises:
            OSError: it is a stranger.
        """
        if not isinstance(hello, HostHello) or not self._is_code(
            hello.proof, "dials", self.nonce, hello.nonce
        ):
            raise OSError("a stranger")
        self.other = hello.nonce
        return hello

    @property
    def proof(self) -> str:
        """What shows that this side, which was dialled, knows the key."""
        return self._code("answers", self.nonce, self.other)

    def has_proved(self, answer: object) -> bool:
        """Return whether an answer of who was dialled shows that it knows the key."""
        return (
            isinstance(answer, HostWelcome | HostRefused)
            and bool(self.other)
            and self._is_code(answer.proof, "answers", self.other, self.nonce)
        )

    def _code(self, side: Literal["dials", "answers"], dialled: str, dials: str) -> str:
        """Return what shows that one side knows the key, over the numbers of both."""
        return hmac.new(
            self._key.encode(), f"{side} {dialled} {dials}".encode(), "sha256"
        ).hexdigest()

    def _is_code(
        self, code: str, side: Literal["dials", "answers"], dialled: str, dials: str
    ) -> bool:
        expected = self._code(side, dialled, dials)
        return hmac.compare_digest(code.encode(errors="replace"), expected.encode())
