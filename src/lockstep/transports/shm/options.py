"""What can be chosen about the shared memory of a group."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ShmOptions"]


@dataclass(frozen=True, slots=True)
class ShmOptions:
    """Options of one group, for ``init_process_group("shm", pg_options=ShmOptions(...))`` and `new_group`.

    Attributes:
        size: the most bytes of shared memory that the group takes on a machine; None for LOCKSTEP_SHM_SIZE, or else
            64 MiB, or 4 MiB a rank if that is more. What is never written takes no memory.
    """

    size: int | None = None
