"""``horovod.run``: a function as the ranks of a job, for programs and notebooks that start one themselves."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lockstep
from lockstep.errors import ConfigError
from lockstep.hosts import parse_hosts

from ..as_horovod import enter

__all__ = ["run"]

_HERE = ("localhost", "127.0.0.1", socket.gethostname())
_ELSEWHERE = ("hostfile", "host_discovery_script", "executable")
# fmt: off
_UNUSED = (
    "min_num_proc", "max_num_proc", "min_np", "max_np", "slots", "reset_limit", "cooldown_range", "start_timeout",
    "ssh_port", "ssh_identity_file", "disable_cache", "output_filename", "verbose", "use_gloo", "use_mpi", "mpi_args",
    "network_interface", "network_interfaces",
)
# fmt: on


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
    """What ``func(*args, **kwargs)`` returns on each of `num_proc` ranks on this machine, in rank order.

    The function and what it returns travel by cloudpickle; it calls ``hvd.init()`` itself.

    Args:
        func: what to run.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks.
        np: the name of `num_proc` before.
        hosts: ``localhost:4`` or None; functions do not travel to other machines.
        options: others of Horovod's, which are accepted and not used, but for those that would start the job elsewhere.

    Raises:
        ConfigError: a ValueError, for such an option, for one that Horovod does not have, and as `lockstep.launch`.
        WorkerError: as `lockstep.launch`, for the rank that failed first.
    """
    hint = "`lockstep horovodrun` starts programs on several machines."
    if hosts is not None and any(host.name not in _HERE for host in parse_hosts(hosts, "hosts")):
        raise ConfigError("hosts", "this machine, where the ranks of a function run", hosts, hint)
    for name in _ELSEWHERE:
        if options.get(name) is not None:
            raise ConfigError(name, "None: the ranks of a function run on this machine", options[name], hint)
    for name in set(options) - {*_ELSEWHERE, *_UNUSED}:
        raise ConfigError("options", "those of horovod.run", found=f"{name}={options[name]!r}")
    workers = num_proc if np is None else np
    found: list[Any] = lockstep.launch(_rank, func, tuple(args), dict(kwargs or {}), workers=workers)
    return found


def _rank(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    from .. import torch as hvd

    enter()
    value = func(*args, **kwargs)
    hvd.shutdown()  # the function may have left ranks that have joined, or only some of them in the job
    hvd.init()
    values = hvd.allgather_object(value)
    hvd.shutdown()
    return values
