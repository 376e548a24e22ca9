"""Functions that run in threads of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lockstep.errors import ConfigError

__all__ = ["execute_function_multithreaded", "in_thread", "on_event"]


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start ``target(*args)`` in a thread.

    Args:
        target: what to call; its result is dropped.
        args: its positional arguments.
        name: of the thread.
        daemon: whether the process may end before the thread.
        silent: whether exceptions of `target` are dropped; otherwise `threading.excepthook` shows them.

    Raises:
        ConfigError: a ValueError, where `args` is no tuple.
    """
    _check_tuple(args)

    def call() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls ``func(*args)`` when `event` is set.

    Args:
        event: what to wait for.
        func: what to call.
        args: its positional arguments.
        stop: ends the thread without a call, once it is set.
        check_stop_interval_s: how often `stop` is looked at, in seconds.
        daemon: whether the process may end before the thread; one that may not needs `stop`.
        silent: as for `in_thread`.

    Raises:
        ConfigError: a ValueError, for wrong arguments.
    """
    _check_tuple(args)
    if event is None:
        raise ConfigError("event", "a threading.Event", event)
    if stop is None and not daemon:
        raise ConfigError("stop", "a threading.Event for a thread that is no daemon", stop)

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call ``fn(*args)`` for each `args` of `args_list`, in threads.

    Args:
        fn: what to call.
        args_list: the positional arguments of each call.
        block_until_all_done: whether to wait for the results; if not, the threads are daemons.
        max_concurrent_executions: so many calls run at a time, at the most.

    Returns:
        Where it waits, what each call has returned, by its place in `args_list`; otherwise None.

    Raises:
        Exception: what a call has raised, where it waits.
    """
    if not args_list:
        return {} if block_until_all_done else None
    workers = min(max_concurrent_executions, len(args_list))

    def call_all() -> dict[int, Any]:
        with ThreadPoolExecutor(workers) as threads:
            return dict(enumerate(threads.map(lambda args: fn(*args), args_list)))

    if block_until_all_done:
        return call_all()
    in_thread(call_all)
    return None


def _check_tuple(args: Any) -> None:
    if not isinstance(args, tuple):
        raise ConfigError("args", "a tuple; (arg,) for one argument", args)
