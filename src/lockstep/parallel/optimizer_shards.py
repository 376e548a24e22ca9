"""An optimizer whose state is divided among the workers: each updates the tensors that it owns, and
gives their new values to the others.

In an elastic job each tensor has a second owner, on another host if there is one. It gets the same
gradient and makes the same update, so that nothing is lost with one of the two.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: memory optimizations toward training trillion
parameter models", SC 2020, stages 1 and 2. Here owners have whole tensors, so that every kernel
computes what it computes without owners, bit for bit.
"""

from __future__ import annotations

import hashlib
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
from ..errors import ConfigError, MismatchError, TransportError, counted
from ..flight_recorder import named
from .fingerprints import checksum as checksum_of_one
from .fingerprints import combined_checksum, kind_of, state_entries
from .gradient_buckets import ALONE, BUCKET, Bucket, flat_memory, group_parameters
from .optimizer_parts import hyperparameters_of, part_of, refused_part, set_part

_PIECE = 16 << 20  # bytes of state that are given to other workers at once

DIVISION = "shard_optimizer_division"
"""The attribute of a divided optimizer that says who has which part, an `OptimizerShards`. Copies
and pickles do not have it.
"""


class LostStateError(TransportError):
    """All workers that had the optimizer's state of a tensor are lost."""


class OptimizerShards:
    """Which worker updates which parameter, and what the workers give each other for that.

    Optimizers skip parameters that have no gradient. So all workers keep the optimizer as it is,
    with all parameters in its groups; each has gradients, and thereby state, of its own ones only.

    Args:
        parameters: the parameters of the model, in the same order on every worker.
        comm: communicator over the workers.
        has_second_owners: whether the state of each parameter is kept by two workers.

    Attributes:
        parameters: the parameters.
        owner_of: the rank of the owner of each.
        second_owner_of: the rank of the second one; -1 where there is none.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        has_second_owners: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.has_second_owners = has_second_owners
        self._comm = comm
        self.owner_of: dict[torch.Tensor, int] = {}
        self.second_owner_of: dict[torch.Tensor, int] = {}
        self._values: list[_Values] = []
        self._copies: list[_GradientCopy] = []
        self._copied: list[nn.Parameter] = []
        # The parameters, by number, whose state this worker has as the last update has left it.
        self._held: set[int] = set()
        self._owned: set[int] = set()  # those of them whose first owner it is
        if comm.is_joining:  # it gets its part when it becomes a member
            self._set_owners([-1] * len(self.parameters), [-1] * len(self.parameters))
            return
        owners = assign_owners(self._costs(), comm.size)
        seconds = [-1] * len(owners)
        if has_second_owners and comm.size > 1:
            hosts = comm.allgather_object(comm.node)
            seconds = assign_second_owners(self._costs(), owners, seconds, hosts)
        self._set_owners(owners, seconds)
        self._held = {number for number, p in enumerate(self.parameters) if self.holds(p)}
        self._owned = {number for number, owner in enumerate(owners) if owner == comm.rank}

    def _costs(self) -> list[int]:
        return [p.nbytes if p.requires_grad else 0 for p in self.parameters]

    def _set_owners(self, owners: Sequence[int], seconds: Sequence[int]) -> None:
        self.owner_of = dict(zip(self.parameters, owners, strict=True))
        self.second_owner_of = dict(zip(self.parameters, seconds, strict=True))
        self._values = []
        self._copies = []
        self._copied = []

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether this worker is the first owner of a parameter."""
        return self.owner_of[parameter] == self._comm.rank

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether this worker updates a parameter, as its first or second owner."""
        rank = self._comm.rank
        return rank in (self.owner_of[parameter], self.second_owner_of[parameter])

    def check_same(self, parameters: Sequence[nn.Parameter]) -> None:
        """Check that parameters are those that have owners.

        Raises:
            ConfigError: otherwise.
        """
        if set(map(id, self.parameters)) != set(map(id, parameters)):
            raise ConfigError(
                "model",
                "the parameters that it had before the first step, with shard_optimizer",
                found="others",
                hint="Give the optimizer all parameters from the beginning, and freeze those that "
                "are trained later; or make a new Trainer, or TrainStep.",
            )

    def is_of(self, parameters: Sequence[nn.Parameter], comm: Communicator) -> bool:
        """Return whether these are the owners of parameters among the workers of a communicator."""
        is_same = set(map(id, self.parameters)) == set(map(id, parameters))
        return is_same and comm is self._comm

    def divide(self, optimizer: Optimizer, has_equal_bits: bool) -> None:
        """Leave an optimizer the state of this worker's parameters alone, from now on also when a
        state is loaded; called by all workers.

        It, its copies and what its ``state_dict()`` returns say whose part they have, see
        `lockstep.parallel.optimizer_parts`.

        Args:
            optimizer: with the whole state of all parameters, or the part that this worker is to
                have.
            has_equal_bits: whether the training guarantees equal bits, so that the workers' states
                are compared bit by bit.

        Raises:
            ConfigError: on all workers, if the state is divided already, and one of them has
                another part than it is to have.
            MismatchError: on all workers, if they begin with other states: nobody would notice, as
                all get the values of the owners.
        """
        if not self._comm.is_joining:
            self._check_before(optimizer, has_equal_bits)
        if DIVISION not in vars(optimizer):
            optimizer.register_load_state_dict_post_hook(_keep_part)
            optimizer.register_state_dict_pre_hook(_keep_part)
        vars(optimizer)[DIVISION] = self
        self.forget_others(optimizer)

    def _check_before(self, optimizer: Optimizer, has_equal_bits: bool) -> None:
        """Check what state the workers have before the first step, see `divide`."""
        part = part_of(optimizer.param_groups)
        is_other = part is not None and part != self._part(optimizer)
        has_all = part is None
        state = _digest_of_state(optimizer, has_equal_bits) if has_all else ""
        with named("state of the optimizer"):
            by_rank = self._comm.allgather_object((part if is_other else None, has_all, state))
        for theirs, _, _ in by_rank:
            if theirs is not None:
                raise refused_part(
                    theirs,
                    "the whole state of all parameters, or the part of it that each worker is to "
                    "have",
                )
        for rank, beginning in enumerate(by_rank):
            if beginning != by_rank[0]:
                raise MismatchError(
                    f"the workers' optimizers differ: the state that rank {rank} has before the "
                    "first step is not that of rank 0. Load the same state on every rank, also "
                    "those parts of it that other workers update."
                )

    def forget_others(self, optimizer: Optimizer) -> None:
        """Drop the state of tensors that other workers update, which some optimizers make at once,
        and note which part is left.

        It is called again when the optimizer is given further parameters.
        """
        set_part(optimizer, self._part(optimizer))
        for number, p in enumerate(self.parameters):
            if number not in self._held:
                optimizer.state.pop(p, None)

    def _part(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what describes the part of an optimizer's state that this worker has."""
        held = {id(self.parameters[number]) for number in self._held}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return {
            "worker": f"rank {self._comm.rank} of {counted(self._comm.size, 'worker')}",
            "parameters": [number for number, p in enumerate(parameters) if id(p) in held],
        }

    def gradient_norms(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the 2-norm of the gradient of each parameter that is trained; called by all
        workers.

        One worker computes each. The others add zeros to it, which changes no bit of a norm.
        """
        trained = [p for p in parameters if p.requires_grad]
        owned = {
            number: p.grad
            for number, p in enumerate(trained)
            if p.grad is not None and self.owns(p)
        }
        dtype = torch.float32
        for p in trained:
            dtype = torch.promote_types(dtype, p.dtype)
        norms = torch.zeros(len(trained), dtype=dtype, device=self._comm.device)
        if owned:
            computed = torch._foreach_norm(list(owned.values()))
            norms[list(owned)] = torch.stack([norm.to(dtype) for norm in computed])
        with named("norms of gradients"):
            return self._comm.allreduce(norms)

    def clip(
        self, parameters: Sequence[nn.Parameter], norms: torch.Tensor, max_norm: float
    ) -> torch.Tensor:
        """Scale all gradients down together, as `precision.clip` does with the same bits; returns
        their joint norm before.

        Args:
            parameters: all parameters of the optimizer.
            norms: of `gradient_norms`.
            max_norm: the largest norm that is left as it is.
        """
        trained = [p for p in parameters if p.requires_grad]
        if len({(p.dtype, p.device) for p in trained}) > 1:
            # torch's norm of the whole is that of the norms, group by group
            tensors: Any = [[p.detach() for p in trained]]
            groups = _group_tensors_by_device_and_dtype(tensors, with_indices=True)
            norms = norms[[number for _, numbers in groups.values() for number in numbers]]
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        with_gradients = [p for p in trained if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(with_gradients, max_norm, norm)
        return norm

    def copy_gradients(self) -> None:
        """Give the gradients of each parameter from its owner to the second owner, where a step
        leaves them to the owner alone; called by all workers.
        """
        comm = self._comm
        if not self.has_second_owners or comm.size == 1:
            return
        trained = [p for p in self.parameters if p.requires_grad]
        if list(map(id, trained)) != list(map(id, self._copied)):
            pairs = {p: (self.owner_of[p], self.second_owner_of[p]) for p in trained}
            self._copied = trained
            self._copies = [
                _GradientCopy(Bucket(group, 1), *pairs[group[0]], comm)
                for group in group_parameters(trained, BUCKET, ALONE, pairs)
            ]
        with named("gradients for second owners"):
            for copy in self._copies:
                copy.receive()
            for copy in self._copies:
                copy.send()
            for copy in self._copies:
                copy.finish()

    def drop_gradients(self) -> None:
        """Drop the gradients of parameters that other workers update, where a step gives them to
        all.
        """
        for p in self.parameters:
            if not self.holds(p):
                p.grad = None

    @torch.no_grad()
    def give_out(self) -> None:
        """Give the new values of each parameter from its owner to all; called by all workers."""
        if self._comm.size == 1:
            return
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
                held = optimizer.state[parameters[number]] if owner == comm.rank else {}
                values: dict[str, Any] = {}
                for name, entry in entries.items():
                    if isinstance(entry, _TensorEntry):
                        values[name] = self._give(held.get(name), entry, owner, wanted)
                    else:
                        values[name] = entry
                state[number] = values
        return {**without_state(optimizer), "state": state if wanted else {}}

    def _described(
        self, parameters: Sequence[nn.Parameter], optimizer: Optimizer
    ) -> list[tuple[int, int, dict[str, Any]]]:
        """Return (number, owner, entries) of each parameter that has state, in one order on all
        workers; tensors are only described.
        """
        described = [
            (number, self._comm.rank, self._entries(optimizer, p))
            for number, p in enumerate(parameters)
            if self.owns(p) and p in optimizer.state
        ]
        by_rank = self._comm.allgather_object(described)
        return sorted((entry for theirs in by_rank for entry in theirs), key=lambda entry: entry[0])

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
        """Return an optimizer's whole state dict without the state of tensors that others
        update.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        others = {number for number, p in enumerate(parameters) if not self.holds(p)}
        kept = {
            number: entries for number, entries in state["state"].items() if number not in others
        }
        return {**state, "state": kept}

    def checksum(self, optimizer: Optimizer) -> torch.Tensor:
        """Return `checksum_of` of the tensors of the whole state, in the order of the parameters
        and of their names.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        described = [
            (number, name, kind_of(value), int(checksum_of_one(value)))
            for number, (p, entries) in enumerate(
                zip(parameters, state_entries(optimizer), strict=True)
            )
            if self.owns(p)
            for name, value in entries
            if isinstance(value, torch.Tensor)
        ]
        by_rank = self._comm.allgather_object(described)
        whole = sorted(
            (entry for theirs in by_rank for entry in theirs), key=lambda entry: entry[:2]
        )
        sums = torch.tensor([entry[3] for entry in whole], dtype=torch.int64)
        return combined_checksum([entry[2] for entry in whole], sums)

    def finish_update(self) -> None:
        """Give out the values of an update in the place of workers that were lost before all had
        them; called by all workers.

        Raises:
            LostStateError: see `find_owners`.
        """
        self.find_owners()
        self.give_out()

    def find_owners(self) -> None:
        """Choose, after workers were lost, an owner for each parameter among those that have its
        state, so that values can be given out.

        Raises:
            LostStateError: on all workers, if nobody has the state of a parameter.
        """
        self._holdings()

    def regroup(self, optimizer: Optimizer, leaving: bool = False) -> None:
        """Choose owners for the communicator's present workers, such that little state changes
        hands, and hand it over.

        A worker that gets a part has all of it before anybody lets go what it has given, so that
        another loss in between loses nothing more.

        Args:
            optimizer: with the state that this worker has.
            leaving: whether this worker is about to leave, and is to keep nothing; it counts
                only if another worker stays.

        Raises:
            LostStateError: see `find_owners`.
        """
        comm = self._comm
        holders, hosts, leave = self._holdings(leaving)
        stay = [rank for rank in range(comm.size) if not leave[rank]] or [0]
        place = {rank: number for number, rank in enumerate(stay)}
        before = [[place[rank] for rank in of_tensor if rank in place] for of_tensor in holders]
        copies = 2 if self.has_second_owners else 1
        after = [
            [stay[number] for number in of_tensor]
            for of_tensor in reassign(self._costs(), before, [hosts[rank] for rank in stay], copies)
        ]
        self._hand_over(optimizer, holders, after)
        comm.barrier()  # everybody has what it gets
        self._set_owners(
            [of_tensor[0] for of_tensor in after],
            [of_tensor[1] if len(of_tensor) > 1 else -1 for of_tensor in after],
        )
        self._held = {number for number in self._held if comm.rank in after[number]}
        self._owned = {number for number in self._held if comm.rank == after[number][0]}
        self.forget_others(optimizer)

    def _holdings(self, leaving: bool = False) -> tuple[list[list[int]], list[int], list[bool]]:
        """Return the ranks that have the state of each parameter, its owner first, the host of each
        worker, and which ones leave; the first that has its state is its owner from here on.
        """
        comm = self._comm
        is_owner = {number: number in self._owned for number in sorted(self._held)}
        by_rank = comm.allgather_object((comm.node, leaving, is_owner))
        holders: list[list[int]] = [[] for _ in self.parameters]
        for owners_first in (True, False):
            for rank, (_, _, theirs) in enumerate(by_rank):
                for number, was_owner in theirs.items():
                    if was_owner is owners_first:
                        holders[number].append(rank)
        lost = sum(not of_tensor for of_tensor in holders)
        if lost:
            parameters = counted(lost, "parameter")
            raise LostStateError(
                f"all workers that had the optimizer's state of {parameters} were lost"
            )
        self._set_owners([of_tensor[0] for of_tensor in holders], [-1] * len(holders))
        self._owned = {number for number, ranks in enumerate(holders) if ranks[0] == comm.rank}
        return holders, [node for node, _, _ in by_rank], [leaves for _, leaves, _ in by_rank]

    def _hand_over(
        self, optimizer: Optimizer, holders: list[list[int]], after: list[list[int]]
    ) -> None:
        """Send the state of each parameter from the first worker that has it to those that are to
        have it.
        """
        comm = self._comm
        moves = [
            (number, holders[number][0], rank)
            for number, ranks in enumerate(after)
            for rank in ranks
            if rank not in holders[number]
        ]
        sent = {number for number, source, _ in moves if source == comm.rank}
        described = {number: self._entries(optimizer, self.parameters[number]) for number in sent}
        entries: dict[int, dict[str, Any]] = {}
        for theirs in comm.allgather_object(described):
            entries |= theirs
        with named("optimizer state for other owners"):
            for number, source, target in moves:
                if comm.rank == source:
                    state = optimizer.state.get(self.parameters[number], {})
                    for name, entry in entries[number].items():
                        if isinstance(entry, _TensorEntry):
                            self._send(state[name], target)
                elif comm.rank == target:
                    state = {}
                    for name, entry in entries[number].items():
                        is_tensor = isinstance(entry, _TensorEntry)
                        state[name] = self._receive(entry, number, source) if is_tensor else entry
                    optimizer.state.pop(self.parameters[number], None)
                    if state:
                        optimizer.state[self.parameters[number]] = state
                    self._held.add(number)

    def _entries(self, optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter; tensors are only described."""
        return {
            name: _TensorEntry(tuple(value.shape), value.dtype, value.device.type == "cpu")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in optimizer.state.get(parameter, {}).items()
        }

    def _send(self, tensor: torch.Tensor, target: int) -> None:
        flat = tensor.detach().to(self._comm.device).contiguous().view(-1)
        for piece in _pieces_of(flat):
            self._comm.send(piece, target)

    def _receive(self, entry: _TensorEntry, number: int, source: int) -> torch.Tensor:
        parameter = self.parameters[number]
        flat = torch.empty(math.prod(entry.shape), dtype=entry.dtype, device=self._comm.device)
        for piece in _pieces_of(flat):
            self._comm.recv(piece, source)
        tensor = flat.view(entry.shape)
        if entry.is_on_cpu:
            tensor = tensor.cpu()
        if entry.shape != tuple(parameter.shape) or parameter.is_contiguous():
            return tensor
        return torch.empty_like(parameter, dtype=entry.dtype, device=tensor.device).copy_(tensor)


def divided(
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
    comm: Communicator,
    has_second_owners: bool,
    has_equal_bits: bool,
) -> OptimizerShards:
    """Divide an optimizer's state among the workers; called by all of them.

    Another training of the same optimizer takes over the division of the one before, which the
    workers of an elastic job have changed when there were others of them.

    Args:
        optimizer: the optimizer.
        parameters: those that are divided, in the same order on every worker.
        comm: communicator over the workers.
        has_second_owners: whether the state of each parameter is kept by two workers.
        has_equal_bits: see `OptimizerShards.divide`.

    Raises:
        ConfigError, MismatchError: see `OptimizerShards.divide`.
    """
    earlier: OptimizerShards | None = vars(optimizer).get(DIVISION)
    if earlier is not None and earlier.is_of(parameters, comm):
        return earlier
    shards = OptimizerShards(parameters, comm, has_second_owners)
    shards.divide(optimizer, has_equal_bits)
    return shards


def _keep_part(optimizer: Optimizer) -> None:
    """Leave an optimizer its part, before its state is read, and after one was loaded."""
    division: OptimizerShards = vars(optimizer)[DIVISION]
    division.forget_others(optimizer)


def without_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict without the state of parameters, the same on all workers."""
    state = optimizer.state_dict()
    groups = [
        {**hyperparameters_of(group), "params": group["params"]} for group in state["param_groups"]
    ]
    return {**state, "state": {}, "param_groups": groups}


def _digest_of_state(optimizer: Optimizer, with_bits: bool) -> str:
    """Return a digest of an optimizer's state: of which parameters there is some, its names and
    kinds, whole numbers and texts; and the bits of plain tensors and other numbers, if `with_bits`.

    Rounding may have made them others on some worker, where equal bits are not guaranteed.
    """
    digest = hashlib.sha256()
    for number, entries in enumerate(state_entries(optimizer)):
        for name, value in entries:
            content: Any = type(value).__name__
            if type(value) is torch.Tensor and value.layout is torch.strided:
                content = kind_of(value), int(checksum_of_one(value)) if with_bits else 0
            elif isinstance(value, (int, str)) or (with_bits and isinstance(value, float)):
                content = value
            digest.update(repr((number, name, content)).encode())
    return digest.hexdigest()


def _pieces_of(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a 1-d tensor that are sent at once."""
    length = _PIECE // flat.element_size()
    return [flat[start : start + length] for start in range(0, flat.numel(), length)]


class _TensorEntry(NamedTuple):
    """A tensor in an optimizer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool


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


class _GradientCopy:
    """The gradients of parameters of one owner, for their second owner.

    Args:
        bucket: the parameters.
        owner: the rank of their owner.
        second: that of the second one.
        comm: communicator over the workers.
    """

    def __init__(self, bucket: Bucket, owner: int, second: int, comm: Communicator) -> None:
        self._bucket = bucket
        self._owner = owner
        self._second = second
        self._comm = comm
        parameters = bucket.parameters
        self._is_alone = len(parameters) == 1 and flat_memory(parameters[0].detach()) is not None
        self._request: Any = None

    def receive(self) -> None:
        """Start to receive them, at the second owner."""
        if self._comm.rank != self._second:
            return
        first = self._bucket.parameters[0]
        if self._is_alone:
            first.grad = torch.empty_like(first)
            memory = flat_memory(first.grad)
        else:
            memory = torch.empty(self._bucket.numel, dtype=first.dtype, device=first.device)
            for p, view in zip(self._bucket.parameters, self._bucket.views(memory), strict=True):
                p.grad = view.data
        assert memory is not None
        self._request = self._comm.irecv(memory, self._owner)

    def send(self) -> None:
        """Start to send them, at the owner."""
        if self._comm.rank != self._owner:
            return
        first = self._bucket.parameters[0]
        gradients: Any = [p.grad for p in self._bucket.parameters]
        memory = self._bucket.memory_of(gradients) if self._is_alone else None
        if memory is None and self._is_alone:
            memory = flat_memory(torch.empty_like(first).copy_(gradients[0]))
        elif memory is None:
            memory = torch.zeros(self._bucket.numel, dtype=first.dtype, device=first.device)
            torch._foreach_copy_(self._bucket.views(memory), gradients)
        assert memory is not None
        self._request = self._comm.isend(memory, self._second)

    def finish(self) -> None:
        """Wait until they have been sent, or have come."""
        if self._request is not None:
            self._request.wait()
            self._request = None


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


def assign_second_owners(
    costs: Sequence[int], owners: Sequence[int], before: Sequence[int], hosts: Sequence[int]
) -> list[int]:
    """Return the rank of the second owner of each tensor: on another host than its owner if there
    is one, and such that all have about as much.

    Args:
        costs: of each tensor.
        owners: the rank of its owner.
        before: the rank that is its second owner so far, and stays it if it can; -1 if there is
            none.
        hosts: the host of each worker, at least two workers.
    """
    workers = len(hosts)

    def may_be(rank: int, owner: int) -> bool:
        is_other_host = hosts[rank] != hosts[owner] or len(set(hosts)) == 1
        return rank != owner and is_other_host

    seconds = [
        rank if rank >= 0 and may_be(rank, owner) else -1
        for rank, owner in zip(before, owners, strict=True)
    ]
    loads = [0] * workers
    for cost, rank in zip(costs, seconds, strict=True):
        if rank >= 0:
            loads[rank] += cost
    largest_first = sorted(range(len(costs)), key=lambda number: -costs[number])
    for number in largest_first:
        if seconds[number] < 0:
            allowed = [rank for rank in range(workers) if may_be(rank, owners[number])]
            seconds[number] = min(allowed, key=lambda rank: loads[rank])
            loads[seconds[number]] += costs[number]
    for number in largest_first:  # as long as it lowers the greater of two loads
        high = seconds[number]
        allowed = [rank for rank in range(workers) if may_be(rank, owners[number])]
        low = min(allowed, key=lambda rank: loads[rank])
        if 0 < costs[number] < loads[high] - loads[low]:
            seconds[number] = low
            loads[high] -= costs[number]
            loads[low] += costs[number]
    return seconds


def reassign(
    costs: Sequence[int], holders: Sequence[Sequence[int]], hosts: Sequence[int], copies: int
) -> list[list[int]]:
    """Return the owners of each tensor for other workers than before, such that little changes
    hands.

    A tensor stays with the first worker that has it, orphans go to whoever has least, the largest
    first. Then, as long as it lowers the greatest load, the largest possible tensor goes from the
    most loaded worker to the least loaded one.

    Args:
        costs: of each tensor.
        holders: the ranks, among the present workers, of those that have it, its owner first.
        hosts: the host of each worker.
        copies: the number of owners that a tensor is to have, 1 or 2, if there are so many workers.
    """
    workers = len(hosts)
    owners = [ranks[0] if ranks else -1 for ranks in holders]
    loads = [0] * workers
    for cost, owner in zip(costs, owners, strict=True):
        if owner >= 0:
            loads[owner] += cost
    orphans = [number for number, owner in enumerate(owners) if owner < 0]
    for number in sorted(orphans, key=lambda number: -costs[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    while True:
        high = loads.index(max(loads))
        low = loads.index(min(loads))
        room = loads[high] - loads[low]
        fitting = [
            number
            for number, owner in enumerate(owners)
            if owner == high and 0 < costs[number] < room
        ]
        if not fitting:
            break
        number = max(fitting, key=lambda number: costs[number])
        owners[number] = low
        loads[high] -= costs[number]
        loads[low] += costs[number]
    if copies == 1 or workers == 1:
        return [[owner] for owner in owners]
    before = [
        next((rank for rank in ranks if rank != owner), -1)
        for ranks, owner in zip(holders, owners, strict=True)
    ]
    seconds = assign_second_owners(costs, owners, before, hosts)
    return [[owner, second] for owner, second in zip(owners, seconds, strict=True)]
