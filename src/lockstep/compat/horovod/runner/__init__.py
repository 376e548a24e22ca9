"""``horovod.run``: runs a function on several ranks, for programs and notebooks that start a job
themselves.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lockstep
from lockstep.errors import ConfigError
from lockstep.hosts import parse_hosts

from ..as_horovod import enter

__all__ = ["run"]

_LOCAL_NAMES = ("localhost", "127.0.0.1", socket.gethostname())
_REJECTED = ("hostfile", "host_discovery_script", "executable")
_IGNORED = (
    "min_num_proc",
    "max_num_proc",
    "min_np",
    "max_np",
    "slots",
    "reset_limit",
    "cooldown_range",
    "start_timeout",
    "ssh_port",
    "ssh_identity_file",
    "disable_cache",
    "output_filename",
    "verbose",
    "use_gloo",
    "use_mpi",
    "mpi_args",
    "network_interface",
    "network_interfaces",
)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``func(*args, **kwargs)`` on `num_proc` ranks on this host, and return their results in
    rank order.

    The function and its results are pickled by cloudpickle. The function calls ``hvd.init()``
    itself.

    Args:
        func: the function to run.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks.
        np: the former name of `num_proc`.
        hosts: ``localhost:4`` or None; functions are not sent to other hosts.
        options: further options of Horovod. They are accepted and ignored, except those that select
            other hosts or another executable.

    Raises:
        ConfigError: a ValueError, for such an option, for one that Horovod does not have, and as
            `lockstep.launch`.
        WorkerError: as `lockstep.launch`, for the rank that failed first.
    """
    hint = "`lockstep horovodrun` starts programs on several hosts."
    if hosts is not None and any(
        host.name not in _LOCAL_NAMES for host in parse_hosts(hosts, "hosts")
    ):
        raise ConfigError("hosts", "this host, on which the ranks of a function run", hosts, hint)
    for name in _REJECTED:
        if options.get(name) is not None:
            raise ConfigError(
                name, "None: the ranks of a function run on this host", options[name], hint
            )
    for name in set(options) - {*_REJECTED, *_IGNORED}:
        raise ConfigError("options", "those of horovod.run", found=f"{name}={options[name]!r}")
    workers = num_proc if np is None else np
    results: list[Any] = lockstep.launch(
        _run_rank, func, tuple(args), dict(kwargs or {}), workers=workers
    )
    return results


def _run_rank(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    from .. import torch as hvd

    enter()
    result = func(*args, **kwargs)
    hvd.shutdown()  # the function may have left some ranks joined, or shut down on some ranks only
    hvd.init()
    results = hvd.allgather_object(result)
    hvd.shutdown()
    return results
