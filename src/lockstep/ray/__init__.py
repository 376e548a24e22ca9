"""Runs a function in the workers of a new job on a Ray cluster, with the signature and the reports
of `launch`.

Experimental: may change in any release.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from .. import arguments
from ..errors import ConfigError, InterruptedRunError, LockstepError
from ..interruption import install
from ..launcher import attach_report, check_process, check_settings
from ..launcher.worker_options import SAVE_GRACE

__all__ = ["launch"]

T = TypeVar("T")

_MAX_WORKERS = 1 << 16


def launch(
    fn: Callable[..., T],
    *args: object,
    workers: int | tuple[int, int] = 2,
    resources: Mapping[str, float] | None = None,
    threads: int | None = None,
    grace: float = SAVE_GRACE,
    **kwargs: object,
) -> T:
    """Run ``fn(*args, **kwargs)`` on every rank of a new job on a Ray cluster and return the result
    of rank 0.

    As `lockstep.launch`, but over the nodes of the cluster: an actor on each of them, all in one
    placement group, reserves the resources of its workers and starts them as processes, as
    `lockstep run` does on a host. In the function ``lockstep.init()`` (or ``torch.distributed``)
    finds its rank in torchrun's environment variables; workers on one host share memory. Each sees
    its own GPUs only. The lines of all ranks are printed here, with the rank in front. Without a
    connection to a cluster ``ray.init()`` is called, which reads RAY_ADDRESS or starts Ray on this
    host.

    Where the function uses Ray's API, its process connects to the cluster as a driver of its own,
    in the namespace of this one. Handles of actors may be passed; an ``ObjectRef`` is refused: pass
    the object.

    With ``workers=(2, 8)`` the job is elastic: it begins with as many workers as there are free
    resources for, at most 8; it goes on, in the step in which it was, when workers or nodes are
    lost, and uses nodes that are added. Below 2 workers it waits.

    Ctrl-C and SIGTERM are forwarded to the workers, which then have `grace` seconds to finish their
    step, save and exit; a second signal kills them at once. Signals are handled only if this is
    called from the main thread. No actor and no placement group remains, however this ends.

    Args:
        fn: the function to run; pickled by value, so that it may be a lambda or a closure.
        args: its positional arguments.
        workers: their number, or the least and the most of them.
        resources: that Ray reserves for each worker, such as ``{"CPU": 2, "GPU": 1}``; if None one
            CPU, and one GPU as well if the cluster has any.
        threads: intra-op threads of PyTorch per worker; as many as the CPUs of a worker if None.
        grace: seconds after a signal until workers that are still running are killed.
        kwargs: its keyword arguments. Those named as a setting here can be bound with
            `functools.partial`.

    Raises:
        ConfigError: Ray is not installed, a setting is invalid, the cluster can never hold so many
            workers, or the function or an argument cannot be pickled (the message names it).
        WorkerError: a worker raised an exception or died; if several did, the first one.
        DesyncError, RankLostError, StallError: the ranks are desynchronised, or wait for one that
            died or stalled.
        LockstepError: a subclass such as ConfigError, if all workers raised the same error: then it
            is not specific to one worker, and the error of the first worker, with its traceback, is
            the cause.
        InterruptedRunError: the workers shut down cleanly after a signal, or this process received
            SIGTERM.
        KeyboardInterrupt: this process received SIGINT and the workers reported nothing else.
        LockstepError: Ray ends, this process is a worker itself, or workers cannot be started.
    """
    check_settings(fn, threads, grace)
    limits = _limits(workers)
    check_process()
    arguments.require_package("ray", "lockstep.ray", "ray")
    from ..launcher.worker_status import pickle_call, unpickle
    from .driver import run_job
    from .resources import Placement, check_resources, connect, default_resources

    with _noted_handles() as handles:
        call = pickle_call(fn, args, kwargs)  # before anything is started
    needs = check_resources(resources)
    connect()
    place = Placement(default_resources() if needs is None else needs, threads, grace)
    try:
        value = run_job(call, workers if isinstance(workers, int) else limits, place, bool(handles))
    except LockstepError as error:
        attach_report(error)
        if isinstance(error, InterruptedRunError):
            install()
        raise
    result: T = None if value is None else unpickle(value)  # type: ignore[assignment]
    return result


def _limits(workers: object) -> tuple[int, int]:
    """Return the least and the most workers.

    Raises:
        ConfigError: there are none, or it is no number of workers.
    """
    limits = workers if isinstance(workers, tuple | list) else (workers, workers)
    try:
        least, most = (
            arguments.whole("workers", limit, least=1, most=_MAX_WORKERS) for limit in limits
        )
    except ValueError:  # one is invalid, or there are not two
        least = 1
        most = 0
    if least > most:
        expected = (
            "a whole number of at least 1, or the least and the most workers of an elastic job, "
            "such as (2, 8)"
        )
        raise ConfigError("workers", expected, workers)
    return least, most


@contextmanager
def _noted_handles() -> Iterator[list[object]]:
    """Give a list of the handles of actors that are pickled meanwhile, and refuse references to
    objects.

    A handle can be rebuilt in a process that is connected to the cluster. A reference that Ray does
    not pickle itself has lost its owner: whoever waits for the object waits for ever.
    """
    import ray
    from ray.actor import ActorHandle

    handles: list[object] = []

    def note(handle: Any) -> Any:
        handles.append(handle)
        return handle.__reduce__()

    def refuse(reference: Any) -> Any:
        raise TypeError("an ObjectRef does not arrive in a worker; pass the value of ray.get(...)")

    before = {kind: copyreg.dispatch_table.get(kind) for kind in (ActorHandle, ray.ObjectRef)}
    copyreg.dispatch_table[ActorHandle] = note
    copyreg.dispatch_table[ray.ObjectRef] = refuse
    try:
        yield handles
    finally:
        for kind, reducer in before.items():
            if reducer is None:
                del copyreg.dispatch_table[kind]
            else:
                copyreg.dispatch_table[kind] = reducer
