"""One worker's place in a communicator, and the checks of what it passes to a verb."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from ..errors import ConfigError
from ..topology import World
from .flat import DTYPES, MAX_DIMS, as_bytes, flat
from .loopback import Loopback
from .place import carriers_of, device_of, world_of

__all__ = ["Member"]


class Member:
    """Who this worker is; see `Communicator`."""

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ConfigError("group", "a process group that this process is in", group)
        self._take_place(world_of(group), device_of(group) if device is None else torch.device(device), group)

    @classmethod
    def at(cls, world: World, device: torch.device, group: dist.ProcessGroup | None = None) -> Self:
        """The communicator of a worker whose place and device are known already."""
        made = cls.__new__(cls)
        made._take_place(world, device, group)
        return made

    def _take_place(self, world: World, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.world, self.device, self.group = replace(world, device=str(device)), device, group
        self._owned = False  # whether the group was made for this communicator alone
        self._carriers = carriers_of(group)
        self._loopback = Loopback(self.rank)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, device={str(self.device)!r})"

    @property
    def rank(self) -> int:
        """This worker's number, 0 ≤ rank < size."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.world.world_size

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its machine, 0 ≤ local_rank < local_size."""
        return self.world.local_rank

    @property
    def local_size(self) -> int:
        """The number of workers on this machine."""
        return self.world.local_world_size

    @property
    def node(self) -> int:
        """This machine's number, 0 ≤ node < nodes."""
        return self.world.node

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return self.world.nodes

    def _connected(self) -> dist.ProcessGroup:
        """The process group; without this, a call with None would go to all workers of the job."""
        if self.group is None:
            raise self._error("communicator", "one that has a process group", "one without, or that was freed")
        return self.group

    def _error(self, argument: str, expected: str, got: object, hint: str = "") -> ConfigError:
        return ConfigError(argument, expected, found=f"{got} on rank {self.rank} of {self.size}", hint=hint)

    def _moved(self, plain: torch.Tensor) -> torch.Tensor:
        """What travels of a contiguous tensor, in one dimension, sharing its memory.

        The bytes, which every backend carries; where the group carries any dtype, the elements, so that it can see
        that the ranks have one.
        """
        if plain.is_cpu and getattr(self.group, "moves_any_dtype", False):
            return flat(plain.detach())
        return as_bytes(plain)

    def _side(self) -> torch.device:
        """Where shapes and pickled objects travel: the CPU, but for backends such as NCCL alone."""
        return torch.device("cpu") if not self._carriers or "cpu" in self._carriers else self.device

    def _check_tensor(self, argument: str, tensor: Any) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            hint = "The verbs that end in _object take any value that can be pickled."
            raise self._error(argument, "a tensor", type(tensor).__name__, hint)
        if self._carriers and tensor.device.type not in self._carriers:
            kinds = " or ".join(self._carriers)
            raise self._error(argument, f"a tensor on a device that the group carries ({kinds})", tensor.device)
        if tensor.layout is not torch.strided:
            raise self._error(argument, "a dense tensor", tensor.layout)
        if tensor.dtype not in DTYPES:
            raise self._error(argument, "a dtype of plain numbers", tensor.dtype)
        if tensor.dim() > MAX_DIMS:
            raise self._error(argument, f"at most {MAX_DIMS} dimensions", tensor.dim())
        return tensor

    def _check_rank(self, argument: str, rank: Any) -> int:
        found = self._whole(argument, rank)
        if not 0 <= found < self.size:
            raise self._error(argument, f"a rank of this communicator, 0 to {self.size - 1}", rank)
        return found

    def _whole(self, argument: str, number: Any) -> int:
        try:
            return operator.index(number)
        except TypeError:
            raise self._error(argument, "a whole number", repr(number)) from None

    def _check_alike(self, argument: str, tensors: Any, like: torch.Tensor | None = None) -> list[torch.Tensor]:
        """`tensors` as a list of one for each rank, all of one dtype and on one device (of `like`, if given)."""
        if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
            raise self._error(argument, f"a list of {self.size} tensors", type(tensors).__name__)
        if len(tensors) != self.size:
            raise self._error(argument, f"{self.size} tensors, one for each rank", len(tensors))
        for number, tensor in enumerate(tensors):
            self._check_tensor(f"{argument}[{number}]", tensor)
            self._check_like(f"{argument}[{number}]", tensor, tensors[0] if like is None else like)
        return list(tensors)

    def _check_like(self, argument: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            expected = f"{like.dtype} on {like.device}, as the others"
            raise self._error(argument, expected, f"{tensor.dtype} on {tensor.device}")

    def _check_shape(self, argument: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
        if tuple(tensor.shape) != tuple(shape):
            raise self._error(argument, f"the shape {tuple(shape)}", tuple(tensor.shape))

    def _parts(self, argument: str, data: Any, counts: Sequence[int] | None) -> list[torch.Tensor]:
        """One part for each rank: a list of them, or a tensor dealt out along its first dimension."""
        if not isinstance(data, torch.Tensor):
            if counts is not None:
                raise self._error("counts", f"none beside a list of {argument}", list(counts))
            return self._check_alike(argument, data)
        self._check_tensor(argument, data)
        if data.dim() == 0:
            raise self._error(argument, "a first dimension to deal out", "a tensor without dimensions")
        if counts is None:
            return list(torch.tensor_split(data, self.size))
        rows = [self._whole("counts", count) for count in counts]
        if len(rows) != self.size or min(rows) < 0 or sum(rows) != len(data):
            raise self._error("counts", f"{self.size} numbers of rows that add up to {len(data)}", rows)
        return list(torch.split(data, rows))
