"""Functions that run in threads: `horovod.runner.util.threads`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lockstep import arguments
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
        target: the function to call; its result is discarded.
        args: its positional arguments.
        name: the name of the thread.
        daemon: whether the process may exit before the thread has finished.
        silent: whether exceptions of `target` are discarded; otherwise `threading.excepthook`
            reports them.

    Raises:
        ConfigError: a ValueError, if `args` is not a tuple.
    """
    arguments.instance("args", args, tuple, "a tuple; (arg,) for one argument")

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
        event: the event to wait for.
        func: the function to call.
        args: its positional arguments.
        stop: ends the thread without a call, once it is set.
        check_stop_interval_s: seconds between checks of `stop`.
        daemon: whether the process may exit before the thread has finished; if not, `stop` is
            required.
        silent: as for `in_thread`.

    Raises:
        ConfigError: a ValueError, for invalid arguments.
    """
    arguments.instance("args", args, tuple, "a tuple; (arg,) for one argument")
    if event is None:
        raise ConfigError("event", "a threading.Event", event)
    if stop is None and not daemon:
        raise ConfigError("stop", "a threading.Event for a thread that is not a daemon", stop)

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
        fn: the function to call.
        args_list: the positional arguments of each call.
        block_until_all_done: whether to wait for the results; if not, the threads are daemons.
        max_concurrent_executions: the number of calls that run at a time, at most.

    Returns:
        The result of each call, by its index in `args_list`; None without waiting.

    Raises:
        Exception: the exception of a call, if this function waits.
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
