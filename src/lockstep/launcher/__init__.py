"""Run a function in several worker processes of this host."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import TypeVar, cast

from .. import arguments, environment, interruption, other_names
from ..activity import in_notebook
from ..environment.variable_table import DISPLAY
from ..errors import (
    DesyncError,
    InterruptedRunError,
    LockstepError,
    RankLostError,
    StallError,
    unexpected_argument,
)
from ..network import VirtualNetwork, parse_network
from ..system.job_folders import temporary_job_folder
from .host_requirements import check_loopback
from .options import check_network
from .worker_options import SAVE_GRACE, WorkerOptions

__all__ = ["attach_report", "check_process", "check_settings", "launch", "run_on_workers"]

T = TypeVar("T")

MAX_WORKERS = 120
"""More than any host has cores for; multiprocessing's fork server passes at most 255 descriptors on
to a worker.
"""


def launch(
    fn: Callable[..., T],
    *args: object,
    workers: int = 2,
    threads: int | None = None,
    grace: float = SAVE_GRACE,
    network: str | VirtualNetwork | None = None,
    **kwargs: object,
) -> T:
    """Run ``fn(*args, **kwargs)`` on every rank of a new job on this host and return the result of
    rank 0.

    Every worker is a separate process in which ``lockstep.init()`` (or ``torch.distributed``) finds
    its rank in torchrun's environment variables. The function may be a lambda, a closure, or
    defined in a script or notebook: it is pickled by value together with its arguments, and the
    main module is not run again in the workers. That takes cloudpickle, of the extra "launch";
    without it both have to come from modules that can be imported. Tensors on a device arrive on
    the CPU, in both directions. Workers write to this process's standard output and standard error;
    in a notebook, into the cell.

    Workers are forked from multiprocessing's fork server. The first call starts it with PyTorch
    loaded; together with multiprocessing's resource tracker it lives as long as this process. No
    other process remains.

    Ctrl-C and SIGTERM are forwarded to the workers, which then have `grace` seconds to finish their
    step, save and exit; a second signal kills them at once. Signals are handled only if this is
    called from the main thread. Workers never outlive this process.

    Args:
        fn: the function to run.
        args: its positional arguments.
        workers: number of worker processes, 1 to 120.
        threads: intra-op threads of PyTorch per worker; usable cores / workers if None.
        grace: seconds after a signal until workers that are still running are killed.
        network: an emulated network between the workers, which are put on its virtual hosts: a text
            such as ``"4 hosts, 25Gbit, 50us"``, or a `lockstep.network.VirtualNetwork`.
        kwargs: its keyword arguments. Those named as a setting here can be bound with
            `functools.partial`.

    Raises:
        ConfigError: a setting is invalid, this host has too little memory for the workers, or the
            function or an argument cannot be pickled (the message names it).
        WorkerError: a worker raised an exception or died; if several did, the first one.
        DesyncError, RankLostError, StallError: the ranks are desynchronised, or wait for one that
            died or stalled.
        LockstepError: a subclass such as ConfigError, if all workers raised the same error: then it
            is not specific to one worker, and the error of the first worker, with its traceback, is
            the cause.
        InterruptedRunError: the workers shut down cleanly after a signal, or this process received
            SIGTERM.
        KeyboardInterrupt: this process received SIGINT and the workers reported nothing else.
        LockstepError: this process is a worker itself, or workers cannot be started.
        TypeError: an argument that the function does not have is one of `launch` under another
            name, as `nprocs` is.

    Examples:
        >>> import lockstep
        >>> def rank_and_size():
        ...     comm = lockstep.init()
        ...     return comm.rank, comm.size
        >>> lockstep.launch(rank_and_size, workers=2)
        (0, 2)
    """
    check_settings(fn, threads, grace)
    arguments.whole("workers", workers, least=1, most=MAX_WORKERS)
    _check_names(fn, kwargs)
    emulated = parse_network(network) if isinstance(network, str) else network
    if emulated is not None:
        expected = 'a text such as "4 hosts, 25Gbit, 50us", or a VirtualNetwork'
        arguments.instance("network", emulated, VirtualNetwork, expected)
    check_network(emulated, workers)
    cores = environment.usable_cores()
    emulated = None if emulated is None else emulated.resolved(workers, cores)
    options = WorkerOptions(
        workers, threads or max(1, cores // workers), grace, exit_grace=grace, network=emulated
    )
    return run_on_workers(options, fn, *args, **kwargs)


def run_on_workers(
    options: WorkerOptions, fn: Callable[..., T], *args: object, **kwargs: object
) -> T:
    """Do what `launch` does, with any options that workers have; only their number is checked."""
    arguments.whole("workers", options.workers, least=1, most=MAX_WORKERS)
    check_process()
    from .worker_process import fork_server

    fork_server.check_memory(options.workers)
    fork_server.start_fork_server()  # first, so that it loads PyTorch while this process continues
    with interruption.deferred_signals():
        from ..stores import loopback_variables
        from . import fixed_host, host_workers, links, pulse, supervisor, worker_status
        from .output import log_multiplexer, worker_output

    name = supervisor.program_name(sys.argv)
    program = " ".join([name, *sys.argv[1:2]]) if name == "lockstep" else name

    with temporary_job_folder() as folder, ExitStack() as stack:
        call = folder / "call"
        value = folder / "value"
        call.write_bytes(worker_status.pickle_call(fn, args, kwargs))
        if in_notebook():
            shown = log_multiplexer.NotebookOutput()
            stack.enter_context(environment.with_variables({DISPLAY.name: "notebook"}))
            pipes = worker_output.pipe_output(folder, range(options.workers), shown.write)
            output: worker_output.OutputTarget = stack.enter_context(pipes)
        else:
            output = stack.enter_context(worker_output.inherit_output())
        hosts = stack.enter_context(closing(links.OneHost()))
        setup = host_workers.HostSetup(
            functools.partial(worker_status.run_stored_call, call, value),
            program,
            options,
            pulse.Patience.of(several_hosts=False),
            _log,
            loopback_variables(),
        )
        try:
            fixed_host.FixedHost(setup, hosts, folder, output).run()
        except LockstepError as error:
            attach_report(error)
            if isinstance(error, InterruptedRunError):
                interruption.install()
            raise
        return cast(T, worker_status.unpickle(value.read_bytes()) if value.exists() else None)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def attach_report(error: LockstepError) -> None:
    """Make the watchdog's report on all ranks, if there is one, the text of the error."""
    if not error.report_json:
        return
    from ..watchdog.report import from_json
    from ..watchdog.report_text import as_text

    text = as_text(from_json(error.report_json))
    if isinstance(error, DesyncError | RankLostError | StallError):
        error.message = text
    else:
        error.report_text = text


def check_settings(fn: object, threads: object, grace: object) -> None:
    """Raise ConfigError for an invalid argument of `launch`."""
    arguments.function("fn", fn, "a function or another callable")
    if threads is not None:
        arguments.whole(
            "threads", threads, least=1, expected="a whole number of at least 1, or None"
        )
    arguments.number("grace", grace, least=0, expected="a number of seconds, 0 or more")


def _check_names(fn: Callable[..., object], kwargs: Mapping[str, object]) -> None:
    """Check that no argument that the function does not have is an argument of `launch` under
    another name.

    Raises:
        TypeError: for such an argument; the error says what it is here.
    """
    try:
        # A decorator such as functools.wraps shows the signature of what it calls, not what it
        # takes itself.
        parameters = inspect.signature(fn, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # written in C
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {parameter.name for parameter in parameters}
    for name in kwargs:
        if name not in known and name in other_names.LAUNCH:
            raise unexpected_argument("launch", name, other_names.LAUNCH[name], ())


def check_process() -> None:
    """Raise LockstepError if this process cannot start workers."""
    if environment.is_launched():
        raise LockstepError(
            "launch() starts workers, but this process is already a worker (a launcher's "
            "variables, such as RANK, are set). Call it in the program that is started first, or "
            "call the function itself here."
        )
    check_loopback()
    for descriptor, name in enumerate(("standard input", "standard output", "standard error")):
        try:
            os.fstat(descriptor)
        except OSError:
            hint = (
                "Redirect it to /dev/null instead of closing it: files opened later would be "
                "taken for it."
            )
            raise LockstepError(f"{name} is closed, and workers inherit it. {hint}") from None
