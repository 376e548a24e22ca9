"""`Communicator`: MPI-style operations over one process group of torch.distributed."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
import torch.distributed as dist
from typing_extensions import Self

from .. import arguments, flight_recorder
from ..topology import World
from . import collectives, point_to_point
from .call_arguments import (
    MAX_DIMS,
    Arguments,
    TensorSpec,
    copy_back,
    dense,
    dense_buffer,
    wire_view,
)
from .collectives import Op, Tensors, blocking_all_reduce, output_tensors, reduction_for
from .groups import backends_of, device_of, make_group, world_among, world_of
from .objects import (
    error_to_send,
    first_message,
    joined,
    length_of_rest,
    pickled,
    rest_of,
    unpickle_all,
    unpickled,
    wait_for_rank0,
)
from .point_to_point import check_any_source, check_message, message_view, with_polling
from .requests import Request

T = TypeVar("T")

# Names in torch.distributed and MPI of attributes of a communicator.
_OTHER_NAMES = {
    "world_size": "size",
    "local_world_size": "local_size",
    "get_size": "size",
    "get_world_size": "size",
    "get_rank": "rank",
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
    "bcast": "broadcast",
    "num_processes": "size",
    "process_index": "rank",
    "local_process_index": "local_rank",
    "is_main_process": "rank == 0",
    "wait_for_everyone": "barrier",
    "main_process_first": "rank0_first",
}


class Communicator:
    """The workers of a process group, seen from one of them; the operations are MPI's.

    Every worker must call the collectives in the same order. Ranks, of peers and of roots too, are
    those of this communicator. A single worker has no process group; every operation then does the
    obvious without one.

    Arguments that can be seen to be wrong on this rank (a number of parts, a dtype, a device, a
    rank) raise a ConfigError that names the argument, its value and the rank, before anything is
    sent. Gradients are not transferred.

    **Collectives.** Parts may have any shapes, so these are MPI's forms with a "v" as well: the
    ranks exchange the shapes first. Where every rank passes `out`, the tensors to be filled, the
    shapes are known and are not exchanged: that is faster. The forms whose names begin with "i"
    (`iallreduce`, `isend`) return a `Request` as soon as the operation has started, after an
    exchange of shapes where there is one; `Request.wait` returns the result. Until then the tensors
    must not be touched.

    **Reductions.** An operation is "sum", "mean", "product", "min" or "max" of numbers, of which
    complex ones have "sum" and "mean" and integers have no "mean"; "and", "or" and "xor" are
    bitwise on integers and logical on bools. Shape and dtype are the same on all ranks. Sums of
    integers wrap around as torch's own do.

    **Point to point.** Messages from one rank to another with one tag arrive in the order in which
    they were sent. A tensor to be received has as many elements as the one that is sent, and its
    dtype. Messages to oneself are kept until they are received.

    **Objects.** The methods whose names end in `_object` pickle values on one rank and unpickle
    them on others, which can run any code: they are for the ranks of one job, which trust each
    other. A value that cannot be pickled is a ConfigError before anything is sent. A rank gets its
    own values back as they are, not as copies.

    **Rank 0.** In `on_rank0` and `rank0_first`, rank 0 may take as long as it needs: the others
    wait for as long as it lives, whatever time limits the group and the watchdog have.

    **Groups.** The communicators that `split` and `dup` make are context managers that destroy
    their group at the end.

    Args:
        group: a process group of torch.distributed that this process is in; that of all workers
            when None, and when there is none either, this process is a single worker.
        device: where this worker computes; by default its GPU where the group has a backend for
            GPUs, else the CPU.

    Attributes:
        world: this worker's rank, size and host.
        device: where it computes.
        group: the process group, in which ranks are the same; None for a single worker.

    Raises:
        ConfigError: for a group that this process is not in.
    """

    is_joining: bool = False
    """Whether this worker of an elastic job has not been in a group yet; always False in other
    jobs.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
    ) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None:
            arguments.instance(
                "group", group, dist.ProcessGroup, "a process group that this process is in"
            )
        self._set_up(
            world_of(group), device_of(group) if device is None else torch.device(device), group
        )

    @classmethod
    def at(cls, world: World, device: torch.device, group: dist.ProcessGroup | None = None) -> Self:
        """Return the communicator of a worker whose `world` and device are known already.

        Args:
            world: rank and size of the worker, and where it runs.
            device: the worker's device.
            group: the process group; None for a single worker, or for the default group.
        """
        communicator = cls.__new__(cls)
        communicator._set_up(world, device, group)
        return communicator

    def _set_up(self, world: World, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.world = replace(world, device=str(device))
        self.device = device
        self.group = group
        self._owns_group = False  # whether the group was made for this communicator alone
        self._arguments = Arguments(self.rank, self.size, device, backends_of(group))
        # c10d's options of the all-reduces that have been called with tensors on the CPU and that
        # send these as they are, by dtype and operation
        self._in_place: dict[tuple[torch.dtype, str], Any] = {}
        self._self_messages = point_to_point.SelfMessages(self.rank)

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            known = f"; its name here is {_OTHER_NAMES[name]!r}" if name in _OTHER_NAMES else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{known}",
                name=name,
                obj=self,
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank={self.rank}, size={self.size}, "
            f"device={str(self.device)!r})"
        )

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
        """This worker's number among those of its host, 0 ≤ local_rank < local_size."""
        return self.world.local_rank

    @property
    def local_size(self) -> int:
        """The number of workers on this host."""
        return self.world.local_world_size

    @property
    def node(self) -> int:
        """This host's number, 0 ≤ node < nodes."""
        return self.world.node

    @property
    def nodes(self) -> int:
        """The number of hosts."""
        return self.world.nodes

    def _connected(self) -> dist.ProcessGroup:
        """Return the process group; without this check, a call with None would go to all workers of
        the job.
        """
        if self.group is None:
            raise self._arguments.error(
                "communicator", "one that has a process group", "one without, or that was freed"
            )
        return self.group

    def barrier(self) -> None:
        """Return when every worker has called it."""
        self._barrier(async_op=False).wait()

    def ibarrier(self) -> Request[None]:
        """Start `barrier`; the request completes when every worker has called it."""
        return self._barrier(async_op=True)

    def _barrier(self, async_op: bool) -> Request[None]:
        if self.size == 1:
            return Request.completed(None)
        # without a backend for the CPU, it is one of the device's
        numbers = None if self._arguments.control_device.type == "cpu" else [self.device.index]
        work = dist.barrier(group=self._connected(), async_op=async_op, device_ids=numbers)
        return Request([work], lambda: None)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Copy `tensor` of rank `root` into every worker's `tensor`, in place, and return it.

        Shape and dtype are the same on all ranks.

        Args:
            tensor: on rank `root` the values, on the others where they go.
            root: the rank that has the values.
        """
        return self._broadcast(tensor, root, async_op=False).wait()

    def ibroadcast(self, tensor: torch.Tensor, root: int = 0) -> Request[torch.Tensor]:
        """Start `broadcast`."""
        return self._broadcast(tensor, root, async_op=True)

    def _broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Request[torch.Tensor]:
        self._arguments.check_tensor("tensor", tensor)
        root = self._arguments.check_rank("root", root)
        if self.size == 1:
            return Request.completed(tensor)
        plain = dense(tensor) if self.rank == root else dense_buffer(tensor)
        group = self._connected()
        work = dist.broadcast(
            wire_view(plain, group), group=group, async_op=async_op, group_src=root
        )
        return Request([work], lambda: copy_back(plain, tensor) if self.rank != root else tensor)

    def scatter(
        self,
        parts: torch.Tensor | Tensors | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return this rank's part of what rank `root` passes.

        Args:
            parts: on rank `root`, a tensor for each rank, or one tensor to be split along its first
                dimension, as evenly as possible, the first ranks getting the longer parts; ignored
                on the others.
            root: the rank that has the parts.
            counts: the number of rows for each rank, where one tensor is not to be split evenly.
            out: filled and returned; on every rank or on none.
        """
        return self._scatter(parts, root, counts, out, async_op=False).wait()

    def iscatter(
        self,
        parts: torch.Tensor | Tensors | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> Request[torch.Tensor]:
        """Start `scatter`."""
        return self._scatter(parts, root, counts, out, async_op=True)

    def _scatter(
        self,
        parts: torch.Tensor | Tensors | None,
        root: int,
        counts: Sequence[int] | None,
        out: torch.Tensor | None,
        async_op: bool,
    ) -> Request[torch.Tensor]:
        root = self._arguments.check_rank("root", root)
        held = self._arguments.split("parts", parts, counts) if self.rank == root else []
        if out is not None:
            self._arguments.check_tensor("out", out)
        if held and out is not None:
            self._arguments.check_out(out, held[root])
        if out is not None:
            result = out
        elif self.size == 1:
            result = TensorSpec.of(held[0]).empty(self.device)
        else:
            spec = collectives.broadcast_spec(self._connected(), self._arguments, root, held)
            result = spec.empty(self.device)
        received = [result if rank == root else None for rank in range(self.size)]
        return self._exchange(
            held or [None] * self.size, received, result.device, lambda: result, async_op
        )

    def gather(
        self, tensor: torch.Tensor, root: int = 0, *, out: Tensors | None = None
    ) -> list[torch.Tensor] | None:
        """Return the tensors of all ranks on rank `root`, in rank order; None on the others.

        Args:
            tensor: this rank's; of one dtype everywhere.
            root: the rank that gets them.
            out: on rank `root`, a tensor for each rank to be filled, and an empty list on the
                others; or None on all.
        """
        return self._gather(tensor, root, out, async_op=False).wait()

    def igather(
        self, tensor: torch.Tensor, root: int = 0, *, out: Tensors | None = None
    ) -> Request[list[torch.Tensor] | None]:
        """Start `gather`."""
        return self._gather(tensor, root, out, async_op=True)

    def _gather(
        self, tensor: torch.Tensor, root: int, out: Tensors | None, async_op: bool
    ) -> Request[list[torch.Tensor] | None]:
        self._arguments.check_tensor("tensor", tensor)
        root = self._arguments.check_rank("root", root)
        outputs = [spec for (spec,) in self._all_specs([tensor])] if out is None else out
        result = output_tensors(self._arguments, tensor, outputs) if self.rank == root else None
        received: list[torch.Tensor | None] = [None] * self.size if result is None else list(result)
        sent = [tensor if rank == root else None for rank in range(self.size)]
        return self._exchange(sent, received, tensor.device, lambda: result, async_op)

    def allgather(self, tensor: torch.Tensor, *, out: Tensors | None = None) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in rank order, on every rank.

        Args:
            tensor: this rank's; of one dtype everywhere.
            out: a tensor for each rank, filled and returned; on every rank or on none.
        """
        return self._allgather(tensor, out, async_op=False).wait()

    def iallgather(
        self, tensor: torch.Tensor, *, out: Tensors | None = None
    ) -> Request[list[torch.Tensor]]:
        """Start `allgather`."""
        return self._allgather(tensor, out, async_op=True)

    def _allgather(
        self, tensor: torch.Tensor, out: Tensors | None, async_op: bool
    ) -> Request[list[torch.Tensor]]:
        self._arguments.check_tensor("tensor", tensor)
        outputs = [spec for (spec,) in self._all_specs([tensor])] if out is None else out
        result = output_tensors(self._arguments, tensor, outputs)
        if self.size == 1:
            result[0].detach().copy_(tensor.detach())
            return Request.completed(list(result))
        return collectives.share_with_all(self._connected(), tensor, result, async_op)

    def alltoall(
        self,
        parts: torch.Tensor | Tensors,
        *,
        counts: Sequence[int] | None = None,
        out: Tensors | None = None,
    ) -> list[torch.Tensor]:
        """Return every rank's part for this rank, in rank order.

        Args:
            parts: a tensor for each rank, or one tensor split as by `scatter`; of one dtype
                everywhere.
            counts: as for `scatter`.
            out: a tensor for each rank, filled and returned; on every rank or on none.
        """
        return self._alltoall(parts, counts, out, async_op=False).wait()

    def ialltoall(
        self,
        parts: torch.Tensor | Tensors,
        *,
        counts: Sequence[int] | None = None,
        out: Tensors | None = None,
    ) -> Request[list[torch.Tensor]]:
        """Start `alltoall`."""
        return self._alltoall(parts, counts, out, async_op=True)

    def _alltoall(
        self,
        parts: torch.Tensor | Tensors,
        counts: Sequence[int] | None,
        out: Tensors | None,
        async_op: bool,
    ) -> Request[list[torch.Tensor]]:
        sent = self._arguments.split("parts", parts, counts)
        kept = sent[self.rank]
        outputs = [specs[self.rank] for specs in self._all_specs(sent)] if out is None else out
        result = output_tensors(self._arguments, kept, outputs)
        return self._exchange(sent, result, kept.device, lambda: result, async_op)

    def _exchange(
        self,
        sent: Sequence[torch.Tensor | None],
        received: Sequence[torch.Tensor | None],
        device: torch.device,
        get_result: Callable[[], T],
        async_op: bool,
    ) -> Request[T]:
        """Send `sent[i]` to rank i while `received[i]` is filled from there; None stands for no
        part.
        """
        if self.size > 1:
            return collectives.exchange(
                self._connected(), sent, received, device, get_result, async_op
            )
        if sent[0] is not None and received[0] is not None:
            received[0].detach().copy_(sent[0].detach())
        return Request.completed(get_result())

    def _all_specs(self, parts: Tensors) -> list[list[TensorSpec]]:
        """Return the specs of all ranks' `parts`."""
        if self.size == 1:
            return [[TensorSpec.of(part) for part in parts]]
        return collectives.gather_specs(self._connected(), self._arguments, parts)

    def allreduce(self, tensor: torch.Tensor, op: Op = "sum") -> torch.Tensor:
        """Reduce `tensor` over all workers, in place on each, and return it.

        Args:
            tensor: this rank's values, which the result replaces; of one shape and dtype on all
                ranks.
            op: "sum", "mean", "product", "min" or "max"; of whole numbers also "and", "or", "xor".
        """
        # Most are of one plain tensor on the CPU that is sent as it is. For these the checks of
        # `_allreduce` come down to a few attributes, and no request and no options are made.
        if type(tensor) is torch.Tensor and type(op) is str and tensor.is_cpu:
            options = self._in_place.get((tensor.dtype, op))
            if (
                options is not None
                and tensor.layout is torch.strided
                and tensor.is_contiguous()
                and tensor.dim() <= MAX_DIMS
                and not tensor.is_neg()
                and not tensor.requires_grad
            ):
                flat = tensor if tensor.dim() == 1 else tensor.view(-1)
                work = self._connected().allreduce([flat], options)
                if work is not None:
                    work.wait()
                return tensor
        return self._allreduce(tensor, op, async_op=False).wait()

    def iallreduce(self, tensor: torch.Tensor, op: Op = "sum") -> Request[torch.Tensor]:
        """Start `allreduce`."""
        return self._allreduce(tensor, op, async_op=True)

    def _allreduce(self, tensor: torch.Tensor, op: Op, async_op: bool) -> Request[torch.Tensor]:
        how = reduction_for(self._arguments, op, self._arguments.check_tensor("tensor", tensor))
        if self.size == 1:
            return Request.completed(tensor)
        if tensor.is_cpu and how.sends_as_is(tensor.dtype):
            self._in_place[tensor.dtype, op] = blocking_all_reduce(how.c10d_op)
        packed = how.pack(tensor)
        work = dist.all_reduce(packed, how.c10d_op, group=self._connected(), async_op=async_op)
        return Request([work], lambda: how.unpack_into(tensor, packed, self.size))

    def reduce(self, tensor: torch.Tensor, op: Op = "sum", root: int = 0) -> torch.Tensor | None:
        """Reduce `tensor` over all workers, in place on rank `root`, and return it there; None on
        the others.

        The tensors of the others stay as they are.

        Args:
            tensor: this rank's values; of one shape and dtype on all ranks.
            op: as of `allreduce`.
            root: the rank that gets the result.
        """
        return self._reduce(tensor, op, root, async_op=False).wait()

    def ireduce(
        self, tensor: torch.Tensor, op: Op = "sum", root: int = 0
    ) -> Request[torch.Tensor | None]:
        """Start `reduce`."""
        return self._reduce(tensor, op, root, async_op=True)

    def _reduce(
        self, tensor: torch.Tensor, op: Op, root: int, async_op: bool
    ) -> Request[torch.Tensor | None]:
        how = reduction_for(self._arguments, op, self._arguments.check_tensor("tensor", tensor))
        root = self._arguments.check_rank("root", root)
        if self.size == 1:
            return Request.completed(tensor)
        packed = how.pack(tensor)
        if self.rank != root and packed.data_ptr() == tensor.data_ptr():
            packed = packed.clone()  # backends use it as working memory
        work = dist.reduce(
            packed, op=how.c10d_op, group=self._connected(), async_op=async_op, group_dst=root
        )
        is_root = self.rank == root
        size = self.size
        return Request([work], lambda: how.unpack_into(tensor, packed, size) if is_root else None)

    def reduce_scatter(
        self,
        parts: torch.Tensor | Tensors,
        op: Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return this rank's part, reduced over all workers.

        Args:
            parts: a tensor for each rank, of the same shapes on all ranks, or one tensor to be
                split along its first dimension as by `scatter`; they stay as they are.
            op: the operation.
            counts: the number of rows for each rank, where one tensor is not to be split evenly.
            out: filled and returned, instead of a new tensor.
        """
        return self._reduce_scatter(parts, op, counts, out, async_op=False).wait()

    def ireduce_scatter(
        self,
        parts: torch.Tensor | Tensors,
        op: Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> Request[torch.Tensor]:
        """Start `reduce_scatter`."""
        return self._reduce_scatter(parts, op, counts, out, async_op=True)

    def _reduce_scatter(
        self,
        parts: torch.Tensor | Tensors,
        op: Op,
        counts: Sequence[int] | None,
        out: torch.Tensor | None,
        async_op: bool,
    ) -> Request[torch.Tensor]:
        held = self._arguments.split("parts", parts, counts)
        own_part = held[self.rank]
        how = reduction_for(self._arguments, op, own_part)
        if out is None:
            result = torch.empty(own_part.shape, dtype=own_part.dtype, device=own_part.device)
        else:
            result = self._arguments.check_out(out, own_part)
        if self.size == 1:
            result.detach().copy_(own_part.detach())
            return Request.completed(result)
        return collectives.reduce_scatter(self._connected(), self.rank, held, how, result, async_op)

    def send(self, tensor: torch.Tensor, dest: int, tag: int = 0) -> None:
        """Send `tensor` to rank `dest`; when this returns, it may be changed again.

        A message may wait for its receiver: two ranks that send to each other first may wait for
        ever. See `sendrecv`.

        Args:
            tensor: the values.
            dest: the rank that receives them.
            tag: a number by which the receiver tells messages apart.
        """
        self.isend(tensor, dest, tag).wait()

    def recv(self, tensor: torch.Tensor, source: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `source`, or from any other rank; return the rank it came
        from.

        Args:
            tensor: where the values go; of the shape and dtype that were sent.
            source: the rank that sends; any when None.
            tag: the sender's number.
        """
        return self.irecv(tensor, source, tag).wait()

    def isend(self, tensor: torch.Tensor, dest: int, tag: int = 0) -> Request[None]:
        """Start `send`; `tensor` must not be changed before the request has completed.

        Args:
            tensor: the values.
            dest: the rank that receives them.
            tag: a number by which the receiver tells messages apart.
        """
        dest = check_message(self._arguments, tensor, "dest", dest, tag)
        if dest == self.rank:
            self._self_messages.send(dense(tensor), tag)
            return Request.completed(None)
        group = self._connected()
        data = message_view(dense(tensor), group)
        work = dist.isend(data, group=group, tag=tag, group_dst=dest)
        return Request([with_polling(work, data)], point_to_point.keep_alive(data))

    def irecv(self, tensor: torch.Tensor, source: int | None = None, tag: int = 0) -> Request[int]:
        """Start `recv`; the request gives the rank that the message came from.

        Args:
            tensor: where the values go; of the shape and dtype that were sent.
            source: the rank that sends; any when None.
            tag: the sender's number.
        """
        if source is None:
            peer = check_any_source(self._arguments, tensor, tag)
        else:
            peer = check_message(self._arguments, tensor, "source", source, tag)
        buffer = dense_buffer(tensor)
        if peer == self.rank:
            work: Any = self._self_messages.receive(buffer, tag)
        else:
            group = self._connected()
            work = dist.irecv(message_view(buffer, group), group=group, tag=tag, group_src=peer)

        def finish() -> int:
            copy_back(buffer, tensor)
            return work._source_rank() if peer is None else peer

        return Request([with_polling(work, buffer)], finish)

    def sendrecv(
        self,
        tensor: torch.Tensor,
        dest: int,
        out: torch.Tensor,
        source: int | None = None,
        tag: int = 0,
    ) -> int:
        """Send `tensor` to `dest` while receiving into `out` from `source`; return the rank that
        `out` came from.

        Either rank may be this one.

        Args:
            tensor: the values to send.
            dest: the rank that receives them.
            out: where the values received go.
            source: the rank that sends them; any when None.
            tag: the number of both messages.
        """
        dest = check_message(self._arguments, tensor, "dest", dest, tag)
        if source is None or self.rank in (source, dest):
            receiving = self.irecv(out, source, tag)
            self.send(tensor, dest, tag)
            return receiving.wait()
        source = check_message(self._arguments, out, "source", source, tag)
        group = self._connected()
        data = message_view(dense(tensor), group)
        buffer = dense_buffer(out)
        receive = dist.P2POp(
            dist.irecv, message_view(buffer, group), group=group, tag=tag, group_peer=source
        )
        send = dist.P2POp(dist.isend, data, group=group, tag=tag, group_peer=dest)
        # in one batch, as NCCL would run one after the other
        for work in dist.batch_isend_irecv([receive, send]):
            work.wait()
        copy_back(buffer, out)
        return source

    def send_object(self, value: object, dest: int, tag: int = 0) -> None:
        """Send a picklable value to rank `dest`, which calls `recv_object`.

        Args:
            value: the value, which is pickled.
            dest: the rank that receives it.
            tag: a number by which the receiver tells messages apart.
        """
        data = pickled(self._arguments, value)
        dest = check_message(self._arguments, data, "dest", dest, tag)
        self.send(torch.tensor([len(data)], device=data.device), dest, tag)
        self.send(data, dest, tag)

    def recv_object(self, source: int | None = None, tag: int = 0) -> Any:
        """Return the next value sent by rank `source`, or by any rank. It is unpickled: only
        trusted ranks send.

        Args:
            source: the rank that sends; any when None.
            tag: the sender's number.
        """
        length = torch.zeros(1, dtype=torch.int64, device=self._arguments.control_device)
        sender = self.recv(length, source, tag)
        data = torch.empty(int(length), dtype=torch.uint8, device=self._arguments.control_device)
        self.recv(data, sender, tag)
        return unpickled(data)

    def broadcast_object(self, value: T | None, root: int = 0) -> T:
        """Return the value that rank `root` passed, on every worker; the others' is ignored. It
        must be picklable.

        Args:
            value: on rank `root` the value.
            root: the rank that has it.
        """
        root = self._arguments.check_rank("root", root)
        if self.size == 1:
            return cast("T", value)
        data = pickled(self._arguments, value) if self.rank == root else None
        device = self._arguments.control_device
        message = self.broadcast(first_message(data, device), root)
        length = length_of_rest(message)
        rest = (
            torch.empty(length, dtype=torch.uint8, device=device) if data is None else rest_of(data)
        )
        if length:
            self.broadcast(rest, root)
        return cast("T", value) if data is not None else cast("T", unpickled(joined(message, rest)))

    def scatter_object(self, values: Sequence[T] | None, root: int = 0) -> T:
        """Return the element of rank `root`'s `values` for this rank; they are ignored on the
        others.

        Args:
            values: on rank `root`, a value for each rank.
            root: the rank that has them.
        """
        root = self._arguments.check_rank("root", root)
        if self.rank != root:
            received: T = unpickled(self.scatter(None, root))
            return received
        held = self._arguments.check_values(values)
        if self.size > 1:
            self.scatter([pickled(self._arguments, value) for value in held], root)
        return cast("T", held[root])

    def gather_object(self, value: T, root: int = 0) -> list[T] | None:
        """Return every worker's `value` on rank `root`, in rank order; None on the others.

        Args:
            value: this rank's value, which must be picklable.
            root: the rank that gets them.
        """
        root = self._arguments.check_rank("root", root)
        if self.size == 1:
            return [value]
        gathered = self.gather(pickled(self._arguments, value), root)
        return None if gathered is None else unpickle_all(gathered, self.rank, value)

    def allgather_object(self, value: T) -> list[T]:
        """Return every worker's `value`, in rank order, on every worker. It must be picklable.

        Args:
            value: this rank's value.
        """
        if self.size == 1:
            return [value]
        data = pickled(self._arguments, value)
        device = self._arguments.control_device
        message = first_message(data, device)
        messages = self.allgather(
            message, out=[torch.empty_like(message) for _ in range(self.size)]
        )
        lengths = [length_of_rest(first) for first in messages]
        rests = [torch.empty(length, dtype=torch.uint8, device=device) for length in lengths]
        if any(lengths):
            self.allgather(rest_of(data), out=rests)
        gathered = [joined(*parts) for parts in zip(messages, rests, strict=True)]
        return unpickle_all(gathered, self.rank, value)

    def alltoall_object(self, values: Sequence[T]) -> list[T]:
        """Return the elements of every rank's `values` for this rank, in rank order.

        Args:
            values: a value for each rank, which must be picklable.
        """
        held = self._arguments.check_values(values)
        if self.size == 1:
            return held
        received = self.alltoall([pickled(self._arguments, value) for value in held])
        return unpickle_all(received, self.rank, held[self.rank])

    def on_rank0(self, fn: Callable[[], T]) -> T:
        """Run `fn` on rank 0 alone and return its result, which must be picklable, on every worker.

        An exception on rank 0 is raised on every worker, so that none waits for a result that never
        arrives: itself on rank 0, and a copy on the others or, where it cannot be sent or would end
        a program silently, a WorkerError with its name and text.

        Args:
            fn: a function without arguments.
        """
        if self.size == 1:
            return fn()
        sent: bytes | None = None
        raised: BaseException | None = None
        if self.rank == 0:
            try:
                with flight_recorder.solo_section():
                    sent = pickle.dumps((True, fn()))
            except BaseException as error:
                raised = error
                sent = error_to_send(error)
        wait_for_rank0(self._connected(), self.rank == 0, "on_rank0")
        succeeded, value = pickle.loads(self.broadcast_object(sent))
        if raised is not None:
            raise raised
        if not succeeded:
            raise value
        result: T = value
        return result

    @contextmanager
    def rank0_first(self) -> Iterator[None]:
        """Run the body on rank 0, and when it has ended there, on the others (to make a folder, to
        download).

        When the body raises on rank 0, the others raise the same, as from `on_rank0`, in place of
        running theirs. The body must not communicate.
        """
        if self.rank == 0:
            yield from self._run_rank0_first()
            return
        wait_for_rank0(self._connected(), False, "rank0_first")
        error = self.broadcast_object(b"")
        if error:
            raise pickle.loads(error)[1]
        yield

    def _run_rank0_first(self) -> Iterator[None]:
        if self.size == 1:
            yield
            return
        try:
            with flight_recorder.solo_section():
                yield
        except BaseException as error:
            wait_for_rank0(self._connected(), True, "rank0_first")
            self.broadcast_object(error_to_send(error))
            raise
        wait_for_rank0(self._connected(), True, "rank0_first")
        self.broadcast_object(b"")

    @overload
    def split(self, color: int, key: int = 0) -> Self: ...
    @overload
    def split(self, color: int | None, key: int = 0) -> Self | None: ...
    def split(self, color: int | None, key: int = 0) -> Self | None:
        """Return the communicator of the workers with the same `color`, ordered by `key`, then by
        rank.

        Every worker must call it. Those that pass None get none.

        Args:
            color: a whole number that workers of one new communicator have in common; None for
                none.
            key: the order in it; equal keys are ordered by rank.

        Raises:
            ConfigError: for a color that is no whole number, or a key.
        """
        color = None if color is None else self._arguments.check_integer("color", color)
        key = self._arguments.check_integer("key", key)
        if self.group is None and self.size == 1:
            return None if color is None else type(self).at(self.world, self.device)
        group = self._connected()
        calls = self.allgather_object((color, key, self.node, uuid.uuid4().hex))
        if color is None:
            return None
        members = sorted(
            (rank for rank in range(self.size) if calls[rank][0] == color),
            key=lambda rank: calls[rank][1],
        )
        world = world_among(
            [calls[rank][2] for rank in members], members.index(self.rank), self.world.source
        )
        ranks = dist.get_process_group_ranks(group)
        # the name is unique: it does not depend on how many groups each rank has made before
        name = f"lockstep/{calls[members[0]][3]}"
        part = type(self).at(
            world, self.device, make_group([ranks[rank] for rank in members], name, group)
        )
        part._owns_group = True
        return part

    def dup(self) -> Self:
        """Return a communicator of the same workers, whose messages and collectives are separate
        from this one's.
        """
        return self.split(0, self.rank)

    def free(self) -> None:
        """Destroy the process group, when every worker has called this.

        Raises:
            ConfigError: for a communicator that neither `split` nor `dup` has made.
        """
        if self.group is None and self.size == 1:
            return
        if not self._owns_group:
            raise self._arguments.error("communicator", "one made by split or dup", repr(self))
        if self.group is not None:
            self.barrier()
            self._destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._owns_group or self.group is None:
            return
        if error is None:
            self.free()
        else:  # the others may never arrive
            self._destroy()

    def _destroy(self) -> None:
        group = self.group
        self.group = None
        with suppress(ValueError):  # the program has destroyed it, or all groups
            dist.destroy_process_group(group)
