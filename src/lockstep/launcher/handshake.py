"""How two launchers of a job meet: each proves to the other that it knows the job's key, and says
what it is.

Who is dialled begins with a challenge, a number that no other connection has; who dials answers
with a number of its own. Both show a code over the two (HMAC, RFC 2104), of which nobody learns the
key, and which is worth nothing on another connection.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

import msgspec

from ..job.messages import HostDescription
from ..messages import Integer, List, Tagged

__all__ = [
    "ANY_HOST",
    "Challenge",
    "HostEntry",
    "HostHello",
    "HostRefused",
    "HostWelcome",
    "is_proof",
    "new_nonce",
    "prove",
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


class Challenge(Tagged, frozen=True):
    """The first message, of who was dialled: a number that no other connection has."""

    nonce: str


class HostHello(Tagged, frozen=True):
    """The answer of who dials.

    Attributes:
        proof: that it knows the job's key.
        nonce: a number of its own.
        node: the number that its host wants in the job; `ANY_HOST` for any.
        description: of its host; None for one that is known, or only asks.
        host: in an elastic job, its host as the others are to know it.
        to: the number of the host that is dialled; `ANY_HOST` for any.
    """

    proof: str = ""
    nonce: str = ""
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


def new_nonce() -> str:
    """Return a number that no other connection has, as text."""
    return secrets.token_hex(16)


def prove(key: str, side: Literal["dials", "answers"], challenge: str, hello: str) -> str:
    """Return what shows that one side of a connection knows the key.

    Args:
        key: of the job.
        side: which.
        challenge: the nonce of the challenge.
        hello: that of the hello.
    """
    return hmac.new(key.encode(), f"{side} {challenge} {hello}".encode(), "sha256").hexdigest()


def is_proof(
    proof: str, key: str, side: Literal["dials", "answers"], challenge: str, hello: str
) -> bool:
    """Return whether `proof` is what `prove` returns for the other arguments."""
    expected = prove(key, side, challenge, hello)
    return hmac.compare_digest(proof.encode(errors="replace"), expected.encode())
