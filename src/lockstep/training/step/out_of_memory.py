"""The error of a device whose memory is full, with what was computed and what to try."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ... import devices
from ...communicator import Communicator
from ...errors import LockstepError

_CPU = "DefaultCPUAllocator: can't allocate memory"


class OutOfMemoryError(LockstepError, torch.OutOfMemoryError):
    """The memory of a device does not suffice; handlers of torch's own error get it as well."""


@contextmanager
def explaining_out_of_memory(
    comm: Communicator, purpose: str, advice: Callable[[], str]
) -> Iterator[None]:
    """Raise an `OutOfMemoryError` for torch's within a `with` block.

    Args:
        comm: communicator over the workers.
        purpose: what is computed, such as "step 3, with 128 of the 256 samples of the global
            batch".
        advice: returns what to try, full sentences; called when the memory is full.

    Raises:
        OutOfMemoryError: names the rank, the device, `purpose`, the memory and the advice.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise explained(error, comm, purpose, advice()) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch has raised `error` because the memory of a device is full."""
    full = isinstance(error, torch.OutOfMemoryError) or _CPU in str(error)
    return full and not isinstance(error, OutOfMemoryError)


def explained(
    error: RuntimeError, comm: Communicator, purpose: str, advice: str
) -> OutOfMemoryError:
    """Return the error to raise in place of torch's; see `explaining_out_of_memory`."""
    full = comm.device if isinstance(error, torch.OutOfMemoryError) else torch.device("cpu")
    where = f"rank {comm.rank}: {full} is out of memory in {purpose}"
    return OutOfMemoryError(f"{where} ({_asked(error)}{_taken(full)}). {advice}")


def _asked(error: BaseException) -> str:
    match = re.search(r"[Tt]ried to allocate ([0-9.]+ [A-Za-z]+)", str(error))
    return f"{match[1]} more were asked for" if match else "no more could be allocated"


def _taken(device: torch.device) -> str:
    memory = devices.memory_of(device)
    if memory is None:
        return ""
    taken, free, total = memory
    others = max(0, total - free - taken)
    return f"; {_size(taken)} of {_size(total)} are this process's, {_size(others)} those of others"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
