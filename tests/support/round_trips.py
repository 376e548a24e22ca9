"""Counts what a program waits for at other hosts: collectives, their pre-flight checks, and
requests to the store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from lockstep import watchdog
from lockstep.flight_recorder import current
from lockstep.system.patching import Replaced
from lockstep.transports.runtime import host_identity
from lockstep.watchdog.monitor import GroupMonitor
from lockstep.watchdog.preflight import PreflightCheck

__all__ = ["RoundTrips", "counted", "on_hosts_of_their_own"]


@dataclass
class RoundTrips:
    """What one rank has waited for, one after the other, and what went on meanwhile.

    Attributes:
        calls: the blocking collectives, without those that are their own checks.
        checks: the all-reduces of the watchdog that were waited for before anything else.
        store: the requests to the job's store; polls of one key count once.
        beside: the checks that went on beside their collectives, and the asynchronous collectives.
        what: all of them but `beside`, by name.
    """

    calls: int = 0
    checks: int = 0
    store: int = 0
    beside: int = 0
    what: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The round trips between hosts, of which each begins when the one before it has ended."""
        return self.calls + self.checks + self.store

    def copy(self) -> RoundTrips:
        return RoundTrips(self.calls, self.checks, self.store, self.beside, list(self.what))

    def since(self, before: RoundTrips) -> RoundTrips:
        """What has been added since `before`, a copy."""
        counts = (
            getattr(self, name) - getattr(before, name)
            for name in ("calls", "checks", "store", "beside")
        )
        return RoundTrips(*counts, self.what[len(before.what) :])


@contextmanager
def counted() -> Iterator[RoundTrips]:
    """Count what this thread waits for during the body, in groups that are watched and have ranks
    on several hosts.
    """
    found, thread, last_request = RoundTrips(), threading.get_ident(), ("", ())

    def entering(original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(self: Any, operation: str, *args: Any, **kwargs: Any) -> Any:
            nonlocal last_request
            last_request = ("", ())
            found.what.append(f"{operation} {current.thread.name}".strip())
            return original(self, operation, *args, **kwargs)

        return enter

    def running(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, pending: Any, call: Any, operation: str) -> Any:
            found.calls += operation != "barrier"
            return original(self, pending, call, operation)

        return run

    def counting(name: str) -> Callable[..., Any]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                setattr(found, name, getattr(found, name) + 1)
                if name == "checks":
                    found.what[-1] = f"check, then {found.what[-1]}"
                return original(*args, **kwargs)

            return call

        return wrap

    def requesting(original: Callable[..., Any]) -> Callable[..., Any]:
        def request(*args: Any, **kwargs: Any) -> Any:
            nonlocal last_request
            key = (original.__name__, args[1:])
            if threading.get_ident() == thread:
                if key != last_request:
                    found.store += 1
                    found.what.append(f"store.{original.__name__}")
                last_request = key
            return original(*args, **kwargs)

        return request

    store = type(dist.distributed_c10d._get_default_store())
    replaced = [
        Replaced(GroupMonitor, "enter", entering),
        Replaced(PreflightCheck, "run", running),
        Replaced(PreflightCheck, "_compare", counting("checks")),
        Replaced(PreflightCheck, "_run_beside", counting("beside")),
        Replaced(PreflightCheck, "start", counting("beside")),
        *(
            Replaced(store, name, requesting)
            for name in ("set", "get", "add", "check", "wait", "multi_get")
        ),
        Replaced(store, "compare_set", requesting),
    ]
    try:
        yield found
    finally:
        for each in reversed(replaced):
            each.undo()


@contextmanager
def on_hosts_of_their_own(backend: str) -> Iterator[None]:
    """Let this rank be watched in a default group whose ranks are on a host each, as far as
    Lockstep knows.
    """
    key = host_identity.host_key
    with ExitStack() as stack:
        stack.callback(setattr, host_identity, "host_key", key)
        host_identity.host_key = lambda: f"{key()} host of rank {os.environ['RANK']}"
        watchdog.install(lambda: host_identity.host_key(), lasting=True)
        stack.callback(watchdog.uninstall)
        dist.init_process_group(backend)
        stack.callback(dist.destroy_process_group)
        yield
