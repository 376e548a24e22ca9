"""An optimizer whose state is divided among the workers: each updates the tensors that it owns, and
gives their new values to the others.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: memory optimizations toward training trillion
parameter models", SC 2020, stages 1 and 2. Here owners have whole tensors, so that every kernel
computes what it computes without owners, bit for bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ..communicator import Communicator
from ..flight_recorder import named
from .fingerprints import HAS_PART_OF_STATE, combined_checksum, kind_of
from .fingerprints import checksum as checksum_of_one
from .gradient_buckets import ALONE, BUCKET, Bucket, flat_memory, group_parameters

__all__ = ["OptimizerShards", "assign_owners"]

_PIECE = 16 << 20  # bytes of state that are given to other workers at once


class OptimizerShards:
    """Which worker updates which parameter, and what the workers give each other for that.

    Optimizers skip parameters that have no gradient. So all workers keep the optimizer as it is,
    with all parameters in its groups; each has gradients, and thereby state, of its own ones only.

    Args:
        parameters: the parameters of the model, in the same order on every worker.
        comm: communicator over the workers, at least two.

    Attributes:
        parameters: the parameters.
        owner_of: the rank of the owner of each.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Communicator) -> None:
        self.parameters = list(parameters)
        self._comm = comm
        costs = [p.nbytes if p.requires_grad else 0 for p in self.parameters]
        owners = assign_owners(costs, comm.size)
        self.owner_of: dict[torch.Tensor, int] = dict(zip(self.parameters, owners, strict=True))
        self._values: list[_Values] = []

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether this worker updates a parameter."""
        return self.owner_of[parameter] == self._comm.rank

    def forget_others(self, optimizer: Optimizer) -> None:
        """Drop the state of tensors that other workers own: some optimizers make it at once."""
        HAS_PART_OF_STATE.add(optimizer)
        for key in list(optimizer.state):
            if key in self.owner_of and not self.owns(key):
                del optimizer.state[key]

    # --- a step
    # ----------------------------------------------------------------------------------------------

    def gradient_norms(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the 2-norm of the gradient of each parameter that is trained; called by all
        workers.

        One worker computes each. The others add zeros to it, which changes no bit of a norm.
        """
        trained = [p for p in parameters if p.requires_grad]
        own = {number: p.grad for number, p in enumerate(trained) if p.grad is not None}
        dtype = torch.float32
        for p in trained:
            dtype = torch.promote_types(dtype, p.dtype)
        norms = torch.zeros(len(trained), dtype=dtype, device=self._comm.device)
        if own:
            computed = torch._foreach_norm(list(own.values()))
            norms[list(own)] = torch.stack([norm.to(dtype) for norm in computed])
        with named("norms of gradients"):
            return self._comm.allreduce(norms)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale all gradients down together, as `precision.clip` does with the same bits; returns
        their joint norm before. Called by all workers.
        """
        norms = self.gradient_norms(parameters)
        trained = [p for p in parameters if p.requires_grad]
        if len({(p.dtype, p.device) for p in trained}) > 1:
            # torch's norm of the whole is that of the norms, group by group
            tensors: Any = [[p.detach() for p in trained]]
            groups = _group_tensors_by_device_and_dtype(tensors, with_indices=True)
            norms = norms[[number for _, numbers in groups.values() for number in numbers]]
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        own = [p for p in trained if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm

    @torch.no_grad()
    def give_out(self) -> None:
        """Give the new values of each parameter from its owner to all; called by all workers."""
        if not self._values:
            self._values = self._make_messages()
        with named("updated parameters"):
            for message in self._values:
                message.start()
            for message in self._values:
                message.finish()

    def _make_messages(self) -> list[_Values]:
        by_owner: list[list[_Values]] = [[] for _ in range(self._comm.size)]
        for parameters in group_parameters(self.parameters, BUCKET, ALONE, self.owner_of):
            owner = self.owner_of[parameters[0]]
            by_owner[owner].append(_Values(Bucket(parameters, 1), owner, self._comm))
        # One of each owner in turn, so that all have something to send at any time.
        turns = max(map(len, by_owner))
        return [
            messages[turn] for turn in range(turns) for messages in by_owner if turn < len(messages)
        ]

    # --- the state; called by all workers together
    # ----------------------------------------------------------------------------------------------

    def full_state(self, optimizer: Optimizer, wanted: bool = True) -> dict[str, Any]:
        """Return the optimizer's state dict as if it were not divided, with its tensors on the CPU.

        Tensors are given out one at a time, in pieces.

        Args:
            optimizer: with the state of this worker's parameters.
            wanted: whether this worker keeps them; otherwise its result has no state.
        """
        comm = self._comm
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        with named("state of the optimizer"):
            for number, owner, entries in self._described(parameters, optimizer):
                own = optimizer.state[parameters[number]] if owner == comm.rank else {}
                values: dict[str, Any] = {}
                for name, entry in entries.items():
                    if isinstance(entry, _TensorEntry):
                        values[name] = self._give(own.get(name), entry, owner, wanted)
                    else:
                        values[name] = entry
                state[number] = values
        return {**optimizer.state_dict(), "state": state if wanted else {}}

    def _described(
        self, parameters: Sequence[nn.Parameter], optimizer: Optimizer
    ) -> list[tuple[int, int, dict[str, Any]]]:
        """Return (number, owner, entries) of each parameter that has state, in one order on all
        workers; tensors are only described.
        """
        described = [
            (
                number,
                self._comm.rank,
                {
                    name: _TensorEntry(tuple(value.shape), value.dtype)
                    if isinstance(value, torch.Tensor)
                    else value
                    for name, value in optimizer.state[p].items()
                },
            )
            for number, p in enumerate(parameters)
            if self.owns(p) and p in optimizer.state
        ]
        by_rank = self._comm.allgather_object(described)
        return sorted((each for theirs in by_rank for each in theirs), key=lambda each: each[0])

    def _give(
        self, tensor: torch.Tensor | None, entry: _TensorEntry, owner: int, wanted: bool
    ) -> torch.Tensor | None:
        """Give a tensor from its owner to all; None where it is not wanted."""
        comm = self._comm
        size = math.prod(entry.shape)
        flat = torch.empty(0, dtype=entry.dtype)
        if tensor is not None:
            flat = tensor.detach().reshape(-1)
        elif wanted:
            flat = torch.empty(size, dtype=entry.dtype)
        length = _PIECE // entry.dtype.itemsize
        for start in range(0, size, length):
            count = min(length, size - start)
            piece = torch.empty(count, dtype=entry.dtype, device=comm.device)
            if tensor is not None:
                piece.copy_(flat[start : start + count])
            comm.broadcast(piece, owner)
            if tensor is None and wanted:
                flat[start : start + count].copy_(piece)
        if not wanted:
            return None
        return flat.view(entry.shape) if tensor is None else tensor.detach().cpu()

    def own_part(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's whole state dict without the state of tensors that others own."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        others = {number for number, p in enumerate(parameters) if not self.owns(p)}
        kept = {
            number: entries for number, entries in state["state"].items() if number not in others
        }
        return {**state, "state": kept}

    def checksum(self, optimizer: Optimizer) -> torch.Tensor:
        """Return `checksum_of` of the tensors of the whole state, in the order of the parameters
        and of their names.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [
            (number, name, kind_of(value), int(checksum_of_one(value)))
            for number, p in enumerate(parameters)
            if self.owns(p) and p in optimizer.state
            for name, value in sorted(optimizer.state[p].items())
            if isinstance(value, torch.Tensor)
        ]
        by_rank = self._comm.allgather_object(found)
        whole = sorted((each for theirs in by_rank for each in theirs), key=lambda each: each[:2])
        sums = torch.tensor([each[3] for each in whole], dtype=torch.int64)
        return combined_checksum([each[2] for each in whole], sums)


class _TensorEntry(NamedTuple):
    """A tensor in an optimizer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Values:
    """The new values of parameters of one owner.

    Those of a parameter that is alone are sent from where they are, and received there.

    Args:
        bucket: the parameters.
        owner: the rank of their owner.
        comm: communicator over the workers.
    """

    def __init__(self, bucket: Bucket, owner: int, comm: Communicator) -> None:
        self._bucket = bucket
        self._owner = owner
        self._comm = comm
        self._packed: torch.Tensor | None = None
        self._work: Any = None

    def start(self) -> None:
        """Start to send them, or to receive them."""
        parameters = self._bucket.parameters
        first = parameters[0]
        memory = flat_memory(first.detach()) if len(parameters) == 1 else None
        if memory is None:
            memory = torch.empty(self._bucket.numel, dtype=first.dtype, device=first.device)
            self._packed = memory
            if self._comm.rank == self._owner:
                torch._foreach_copy_(self._bucket.views(memory), [*parameters])
        self._work = dist.broadcast(
            memory, group=self._comm.group, group_src=self._owner, async_op=True
        )

    def finish(self) -> None:
        """Wait for them, and set them."""
        self._work.wait()
        if self._packed is not None and self._comm.rank != self._owner:
            torch._foreach_copy_([*self._bucket.parameters], self._bucket.views(self._packed))
        self._packed = None
        self._work = None


def assign_owners(costs: Sequence[int], workers: int) -> list[int]:
    """Return the rank of the owner of each tensor: the largest first, each to the worker that has
    least so far.

    The greatest load is at most 4/3 of the best possible one (Graham, "Bounds on multiprocessing
    timing anomalies", SIAM Journal on Applied Mathematics 1969). Equal costs go in the order of the
    tensors, and of equal loads the lower rank counts, so that all workers compute the same.

    Args:
        costs: of each tensor, such as its bytes.
        workers: number of workers, at least 1.
    """
    loads = [(0, rank) for rank in range(workers)]
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, rank = loads[0]
        owners[number] = rank
        heapq.heapreplace(loads, (load + costs[number], rank))
    return owners
