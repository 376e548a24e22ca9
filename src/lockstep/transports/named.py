"""What c10d keeps in a group's backends and asks them for; a group that is written in Python has to do it itself."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined,override,misc"

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .c10d import Store
from .shm.work import ShmWork

__all__ = ["NamedGroup"]


class NamedGroup(dist.ProcessGroup):
    """A process group that is its own backend."""

    store: Store
    backend = "shm"
    moves_any_dtype = False  # whether all that only moves data does so for every dtype of plain numbers
    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False
    device_options: Any = None  # what the user has given for the backend of another device, see `by_device`
    _name = _description = ""
    _batch: list[ShmWork] | None = None

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        """The name that `init_process_group` knows."""
        return self.backend

    def getGroupName(self) -> str:  # noqa: N802 - c10d's name
        """The name under which torch finds the group again."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - c10d's name
        """Called when the group is made."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - c10d's name
        """What the group is for, as its maker says."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - c10d's name
        """Called when the group is made."""
        self._description = description

    def get_group_store(self) -> Store:
        """Where the ranks met."""
        return self.store

    def sums_in_rank_order(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a sum over all ranks of such tensors is ((x0 + x1) + x2) + …, each addition rounded to `dtype`: no.

        Only a group that adds so itself says yes: whoever needs one order of additions relies on it.
        """
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether tensors can be made in memory of the backend's own: no."""
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        try:
            config = dist.BackendConfig(dist.Backend(dist.get_backend_config(self)))
        except (RuntimeError, ValueError, TypeError):  # not among c10d's groups, or no longer
            return [torch.device("cpu")]
        kinds = config.get_device_backend_map()
        return [torch.device(kind) for kind, name in kinds.items() if _is_here(kind, name, self.backend)]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device | None = None) -> ShmWork:
        works, self._batch = self._batch or [], None
        return ShmWork.all_of(works)

    def _note(self, work: ShmWork) -> ShmWork:
        if self._batch is not None:
            self._batch.append(work)
        return work


def _is_here(kind: str, name: str, own: str) -> bool:
    """Whether the backend `name` carries what is on devices of this kind; a group's `own` carries the CPU's only."""
    return kind == "cpu" or (name != own and getattr(torch, kind).is_available())
