"""The scheduler: which one has given this node, and whether the nodes of the job reach each
other.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from .. import environment, messages
from ..environment.schedulers import find_node
from ..errors import ConfigError
from ..launcher.options import JobOptions
from ..messages import Integer
from . import this_host
from .findings import Problem, Section

if TYPE_CHECKING:
    from ..stores import Store

# in which the nodes of a job begin their examinations: their images are pulled, Python has started
_NODES_S = 30.0


@dataclass(frozen=True, slots=True)
class _Place:
    """This process among those of the job that examine it: one on each node, or one for each rank.

    Attributes:
        scheduler: who has started them, for the report.
        number, count: of this one, and how many there are.
        what: "node" or "rank".
        address, port: where they meet; None if they meet elsewhere, or there is only one.
    """

    scheduler: str
    number: int
    count: int
    what: str
    address: str
    port: int | None


def examine_cluster(limit: float = _NODES_S) -> Section:
    """Examine the scheduler's variables, the address of the first node, its port, and the versions
    of all nodes.

    The last two need the other nodes: they are examined if `lockstep doctor` runs on all of them at
    the same time.

    Args:
        limit: seconds to wait for the other nodes.
    """
    section = Section("cluster")
    try:
        place = _find_place()
    except ConfigError as error:
        section.add(
            "scheduler",
            "its variables are incomplete",
            Problem(str(error), error.hint or "Correct it."),
        )
        return section
    if place is None:  # nobody has started this process
        return section
    section.add("scheduler", _describe(place))
    if place.port is not None and _add_address(section, place):
        _add_nodes(section, place, limit)
    return section


def _find_place() -> _Place | None:
    from .. import bootstrap

    variables = environment.variables()
    try:
        world = environment.find_world()
    except ConfigError:
        return None  # the examination of the job says what is wrong
    if world.source == "slurm":
        meeting = bootstrap.find_rendezvous(world, variables)
        address = meeting.host
        port = meeting.port if meeting.kind == "tcp" else None
        if meeting.kind == "address":
            address = variables["MASTER_ADDR"]
            port = int(variables["MASTER_PORT"])
        return _Place("Slurm", world.rank, world.world_size, "rank", address, port)
    if environment.under_launcher():
        return None  # the launchers have met already
    node = find_node(variables, socket.getfqdn())
    if node is None:
        return None
    port = (node.port or JobOptions(()).master_port) if node.nodes > 1 else None
    return _Place(node.scheduler, node.node, node.nodes, "node", node.address, port)


def _describe(place: _Place) -> str:
    where = f", which meet at {place.address}:{place.port}" if place.port is not None else ""
    start = (
        "; on each node: lockstep run --nodes auto"
        if place.what == "node" and place.count > 1
        else ""
    )
    return f"{place.scheduler}: {place.what} {place.number} of {place.count}{where}{start}"


def _add_address(section: Section, place: _Place) -> bool:
    """Examine the name of the first node, and return whether it can be resolved."""
    fix = (
        "Set MASTER_ADDR and MASTER_PORT for all nodes: an address of the first node, and a free "
        "port there."
    )
    try:
        address = str(socket.getaddrinfo(place.address, None)[0][4][0])
    except (OSError, UnicodeError):
        if place.what == "node":
            fix = (
                "On Kubernetes the pods need a headless service as their subdomain; else give "
                "--master-addr."
            )
        section.add(
            "first node",
            "unknown here",
            Problem(f"the first node, {place.address}, has no address here", fix),
        )
        return False
    section.add("first node", f"{place.address} is {address}", good=True)
    return True


class _Node(msgspec.Struct, frozen=True):
    """What a node says about itself: its number, its host's name, and versions by package."""

    number: Integer
    host: str
    versions: dict[str, str]


def _add_nodes(section: Section, place: _Place, limit: float) -> None:
    """Meet the other nodes as a job would, and compare versions."""
    mine = _Node(place.number, socket.gethostname(), this_host.versions())
    where = f"{place.address}:{place.port}"
    try:
        store = _open_store(place, limit)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        section.add("port", f"{where}: not reached", _unreachable(place, where, reason))
        return
    nodes = _exchange(store, place, mine, limit)
    late = [number for number in range(place.count) if number not in nodes]
    if late and place.number == 0:
        numbers = ", ".join(map(str, late))
        fix = (
            "Run `lockstep doctor` on all nodes at the same time; if it does, let connections to "
            f"{where} through."
        )
        problem = Problem(
            f"{place.what} {numbers} of {place.count} did not come to {where} within {limit:g} s",
            fix,
        )
        section.add("port", f"{where}: this is where it listens", problem)
    else:
        reached = "all others have come" if place.number == 0 else "reached from here"
        section.add("port", f"{where}: {reached}", good=True)
    text, problems = compare_nodes(nodes, place.what)
    section.add("versions", text, good=not problems)
    section.problems += problems


def _open_store(place: _Place, limit: float) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ..stores import serve_store

    assert place.port is not None
    if place.number == 0:
        return serve_store(place.address, place.port, timedelta(seconds=limit), several_hosts=True)
    return TCPStore(place.address, place.port, timeout=timedelta(seconds=limit))


def _unreachable(place: _Place, where: str, reason: str) -> Problem:
    if place.number == 0:
        port = "MASTER_ADDR and MASTER_PORT" if place.what == "rank" else "--master-port"
        return Problem(
            f"{where} cannot be listened at: {reason}",
            f"Another program uses it: set {port} on all nodes.",
        )
    fix = (
        "Run `lockstep doctor` on all nodes at the same time; if it does, let connections to that "
        "port through."
    )
    return Problem(f"{where}, on the first node, is not reached from here: {reason}", fix)


def _exchange(store: Store, place: _Place, mine: _Node, limit: float) -> dict[int, _Node]:
    """Return what the nodes say that have come in time: the first one knows all, the others it and
    themselves.
    """
    deadline = time.monotonic() + limit
    others = range(1, place.count) if place.number == 0 else [0]
    store.set(f"doctor/{place.number}", messages.encode(mine))
    nodes = {mine.number: mine}
    for number in others:
        text = _wait(store, f"doctor/{number}", deadline)
        with suppress(ValueError):
            if text is not None:
                nodes[number] = messages.decode(text, _Node)
    if place.number:
        store.set(f"doctor/{place.number}/read", "")
    else:
        for number in nodes:  # the store ends with this process
            if number:
                _wait(store, f"doctor/{number}/read", deadline)
    return nodes


def _wait(store: Store, key: str, deadline: float) -> bytes | None:
    """Return the value of `key`; None if it is not there in time."""
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return store.get(key)


def compare_nodes(nodes: Mapping[int, _Node], what: str) -> tuple[str, list[Problem]]:
    """Return the line about the versions of the nodes, and a problem for each one that differs from
    the first (pure).

    Args:
        nodes: what the nodes say, by their numbers.
        what: "node" or "rank".
    """
    first = nodes.get(0)
    if first is None:
        return "unknown", []
    problems = [
        Problem(
            f"{what} {node.number} ({node.host}) has {name} {node.versions.get(name, 'missing')}, "
            f"{what} 0 ({first.host}) {version}",
            f"Install {name} {version} on {node.host}, or let the job use one Python that all "
            "nodes see.",
        )
        for node in nodes.values()
        for name, version in first.versions.items()
        if this_host.must_match(name, node.versions.get(name, ""))
        != this_host.must_match(name, version)
    ]
    if problems:
        return f"differ between {what}s", problems
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    return f"{versions} on {len(nodes)} {what}s" if len(nodes) > 1 else versions, problems
