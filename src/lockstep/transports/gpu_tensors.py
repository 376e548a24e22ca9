"""Tensors on a GPU over a group for the CPU: through memory of the GPU that all ranks map, or through the host's.

NCCL refuses two ranks on one GPU. A group "cpu:shm,cuda:shm" takes them: each rank copies its values into an area of
the GPU's memory that the others have mapped by CUDA's handles for other processes (CUDA C++ Programming Guide,
"Interprocess Communication"), and reads theirs. Where memory cannot be mapped (several GPUs, several hosts, a system
without these handles), and for what has no such form, tensors pass through pinned memory of the host.
"""

# torch's stubs lack some of the names of torch.distributed, and the types of its CUDA events
# mypy: disable-error-code="attr-defined,no-untyped-call"

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from .. import messages
from ..errors import LockstepError
from ..stores import read_message
from .runtime.c10d import AllgatherOptions
from .runtime.reduce_ops import ReduceFn, reduce_fn_for
from .runtime.tensor_arguments import Tensors, contiguous_for, copy_back, flatten, split_dense_per_rank
from .runtime.work import CPUWork
from .shm.signatures import KINDS, dtype_number, mismatch_error, signature_of

__all__ = ["AREA", "Fences", "GpuTensors", "MappedCollectives"]

_log = logging.getLogger(__name__)

AREA = 32 << 20
"""Bytes of each rank's area: two halves, so that a rank may write one while others read the other."""

_GOODBYE_S = 5.0  # for which a rank waits at the end for others that may still read its area


# --- Through the host -------------------------------------------------------------------------------------------------

_READ_AND_WRITTEN = ("allreduce", "allreduce_coalesced", "reduce", "broadcast")  # their first argument
_ONLY_READ = ("send",)


def _through_host(
    group: Any, device: torch.device, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> CPUWork:
    """Call `method` of a group for the CPU with copies of the tensors, and copy back what it has written."""
    written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def staged(value: Any, is_first: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [staged(each, is_first) for each in value]
        if not isinstance(value, torch.Tensor) or _is_on_host(value):
            return value
        is_output = is_first and name not in _ONLY_READ
        copy = _host_copy(value, read=not is_output or name in _READ_AND_WRITTEN)
        if is_output:
            written.append((value, copy))
        return copy

    staged_args = [staged(value, number == 0) for number, value in enumerate(args)]
    _wait_for(device)  # for the copies, and with them for all that was to write or read these tensors
    inner = method(*staged_args, **kwargs)
    work = _then(inner, lambda: _copy_to_device(written), [tensor for tensor, _ in written], device)
    group.replace_in_batch(inner, work)
    return work


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def _host_copy(tensor: torch.Tensor, read: bool) -> torch.Tensor:
    """Return a tensor like this one on the host, with its values if they are to be `read`."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return tensor.cpu()
    pinned = tensor.device.type == "cuda"
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
    if read:
        copy.copy_(tensor, non_blocking=True)
    return copy


def _copy_to_device(written: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, copy in written:
            tensor.detach().copy_(copy)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _then(inner: CPUWork, then: Callable[[], None], result: list[torch.Tensor], device: torch.device) -> CPUWork:
    """Return a work that completes when `inner` has, and `then` has been called."""
    ended = threading.Event()

    def wait(_: CPUWork, timeout: float | None) -> None:
        inner.wait(timedelta(seconds=timeout) if timeout else None)
        ended.wait()

    work = CPUWork(result, wait, device)
    work.get_source = inner.source_rank

    def finish(completed: CPUWork) -> None:
        error = completed.exception()
        try:
            if error is None:
                then()
        except BaseException as failed:  # every way to end is the work's
            error = failed
        run_callbacks = work.finish(error)
        ended.set()
        if run_callbacks is not None:
            run_callbacks()

    inner.add_done_callback(finish)
    return work


# --- Through memory that all ranks map --------------------------------------------------------------------------------


class Fences(Protocol):
    """Order what the streams of several ranks do in one half of the areas, without waiting on the host.

    Ranks meet on the host between `written` and `before_reading`, so each has recorded what the others wait for.
    """

    def before_writing(self, half: int) -> None:
        """Let the stream wait until all ranks have read what was in this half."""

    def written(self, half: int) -> None:
        """Note that this rank's area is written once the stream gets here."""

    def before_reading(self, half: int) -> None:
        """Let the stream wait until all ranks have written their areas."""

    def has_read(self, half: int) -> None:
        """Note that this rank has read the others' areas once the stream gets here."""


Meet = Callable[[list[int]], list[list[int]]]
"""Exchanges a list of numbers, of the same length on all ranks, on the host: the lists of all ranks, in rank order."""

Read = Callable[[int, list[torch.Tensor]], None]
"""(start, areas): reads the published bytes from `start` on, of which each rank's are at the start of its area."""


class MappedCollectives:
    """Collectives in which each rank publishes bytes in its area, and reads what it wants of the others'.

    Args:
        areas: the areas of all ranks, 1-d tensors of AREA bytes; or of another even number of 16 bytes.
        rank: this rank.
        meet: exchanges numbers on the host.
        fences: order the streams.

    Attributes:
        size: the number of ranks.
    """

    def __init__(self, areas: Tensors, rank: int, meet: Meet, fences: Fences) -> None:
        self._halves = [area.view(2, -1).unbind() for area in areas]
        self.size, self._rank, self._half_size = len(areas), rank, areas[0].numel() // 2
        self._meet, self._fences, self._rounds = meet, fences, 0

    def all_reduce(self, tensor: torch.Tensor, reduce_fn: ReduceFn) -> None:
        """Reduce `tensor` over all ranks, in place."""
        flat = flatten(tensor.detach())
        length = self._half_size // flat.element_size()

        def read(start: int, areas: list[torch.Tensor]) -> None:
            chunk = flat[start // flat.element_size() :][:length]
            if chunk.numel():
                reduce_fn([area[: chunk.nbytes].view(flat.dtype) for area in areas], chunk)

        self._publish("all_reduce", flat, read)
        copy_back(flat, tensor.detach())

    def reduce_scatter(self, output: torch.Tensor, inputs: Tensors, reduce_fn: ReduceFn) -> None:
        """Reduce `inputs[i]` over all ranks into rank i's `output`; the inputs have one size."""
        result, published = flatten(output.detach()), _joined(inputs)
        begin = self._rank * result.nbytes

        def read(start: int, areas: list[torch.Tensor]) -> None:
            a, b = max(start, begin), min(start + self._half_size, begin + result.nbytes)
            if a < b:
                parts = [area[a - start : b - start].view(result.dtype) for area in areas]
                reduce_fn(parts, result.view(torch.uint8)[a - begin : b - begin].view(result.dtype))

        self._publish("reduce_scatter", published, read)
        copy_back(result, output.detach())

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's `tensor` to every rank."""
        flat = flatten(tensor.detach())
        wanted = {} if self._rank == root else {root: flat}
        self._exchange("broadcast", flat if self._rank == root else flat[:0], flat.nbytes, wanted)
        copy_back(flat, tensor.detach())

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor) -> None:
        """Copy rank i's `tensor` to every rank's `outputs[i]`; sizes may differ between ranks."""
        flats = [flatten(output.detach()) for output in outputs]
        self._exchange("all_gather", flatten(tensor.detach()), 0, dict(enumerate(flats)))
        for flat, output in zip(flats, outputs, strict=True):
            copy_back(flat, output.detach())

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> None:
        """Copy rank i's `inputs[j]` to rank j's `outputs[i]`; sizes may differ everywhere."""
        flats, sizes = [flatten(output.detach()) for output in outputs], [part.nbytes for part in inputs]
        self._exchange("all_to_all", _joined(inputs), 0, dict(enumerate(flats)), sizes)
        for flat, output in zip(flats, outputs, strict=True):
            copy_back(flat, output.detach())

    def _exchange(
        self,
        kind: str,
        published: torch.Tensor,
        agreed: int,
        wanted: dict[int, torch.Tensor],
        sizes: list[int] | None = None,
    ) -> None:
        """Publish a flat tensor, and fill those that are `wanted` of each rank.

        Args:
            kind: the collective.
            published: what this rank publishes.
            agreed: a number of bytes that must be the same on all ranks.
            wanted: flat tensors by source. With `sizes`, they are the sources' parts for this rank, else all of theirs.
            sizes: the bytes of the parts that `published` consists of, one for each rank.
        """
        flats = {source: flat.view(torch.uint8) for source, flat in wanted.items()}
        begins = dict.fromkeys(flats, 0)

        def check(numbers: list[list[int]]) -> None:
            for source, flat in flats.items():
                theirs = numbers[source]
                begins[source] = 0 if sizes is None else sum(theirs[: self._rank])
                found = theirs[-1] if sizes is None else theirs[self._rank]
                if found != flat.numel():
                    code, dtype = KINDS[kind], dtype_number(published.dtype)
                    expected = signature_of(code, dtype, 0, flat.numel())
                    other = signature_of(code, dtype, 0, found)
                    raise mismatch_error(self._rank, source, other, expected, range(self.size))

        def read(start: int, areas: list[torch.Tensor]) -> None:
            for source, flat in flats.items():
                begin = begins[source]
                a, b = max(start, begin), min(start + self._half_size, begin + flat.numel())
                if a < b:
                    flat[a - begin : b - begin].copy_(areas[source][a - start : b - start])

        self._publish(kind, published, read, agreed, sizes, check)

    def _publish(
        self,
        kind: str,
        published: torch.Tensor,
        read: Read,
        agreed: int | None = None,
        sizes: list[int] | None = None,
        check: Callable[[list[list[int]]], None] | None = None,
    ) -> None:
        """Publish a flat tensor in as many rounds as the rank with most bytes needs, and `read` after each."""
        signature = signature_of(
            KINDS[kind], dtype_number(published.dtype), 0, published.nbytes if agreed is None else agreed
        )
        data, start, most = published.view(torch.uint8), 0, 1
        while start < most:
            half, self._rounds = self._rounds % 2, self._rounds + 1
            piece = data[start : start + self._half_size]
            self._fences.before_writing(half)
            if piece.numel():
                self._halves[self._rank][half][: piece.numel()].copy_(piece)
            self._fences.written(half)
            met = self._meet([signature, *(sizes or [0] * self.size), data.numel()])
            self._compare(signature, [theirs[0] for theirs in met])
            numbers = [theirs[1:] for theirs in met]
            if check is not None:
                check(numbers)
            most = max(theirs[-1] for theirs in numbers)
            self._fences.before_reading(half)
            read(start, [halves[half] for halves in self._halves])
            self._fences.has_read(half)
            start += self._half_size

    def _compare(self, mine: int, signatures: list[int]) -> None:
        for other, found in enumerate(signatures):
            if found != mine:
                raise mismatch_error(self._rank, other, found, mine, range(self.size))


def _joined(parts: Tensors) -> torch.Tensor:
    """Return the parts one after another, 1-d: the tensor itself of which they are the parts, if there is one."""
    flats = [flatten(part.detach()) for part in parts]
    end = flats[0].data_ptr()
    for flat in flats:
        if flat.data_ptr() != end or flat.untyped_storage().data_ptr() != flats[0].untyped_storage().data_ptr():
            return torch.cat(flats)
        end += flat.nbytes
    return flats[0].as_strided((sum(flat.numel() for flat in flats),), (1,))


# --- CUDA -------------------------------------------------------------------------------------------------------------


class _Shared(msgspec.Struct, frozen=True):
    """A rank's area and events, as another process opens them; one without a `storage` cannot share it."""

    gpu: str
    storage: tuple[int, bytes, int, int, bytes, int, bytes, bool] | None = None
    written: tuple[bytes, bytes] = (b"", b"")
    has_read: tuple[bytes, bytes] = (b"", b"")
    problem: str = ""


class _EventFences:
    """Fences by CUDA events that other processes can wait for; of each kind one for each half.

    Args:
        device: the device.
        rank: this rank.
        written: the events of all ranks, in rank order.
        has_read: likewise.
    """

    def __init__(
        self, device: torch.device, rank: int, written: Sequence[Sequence[Any]], has_read: Sequence[Sequence[Any]]
    ) -> None:
        self._device, self._rank, self._written, self._has_read = device, rank, written, has_read

    def before_writing(self, half: int) -> None:
        self._wait_for(self._has_read, half)

    def written(self, half: int) -> None:
        self._written[self._rank][half].record(torch.cuda.current_stream(self._device))

    def before_reading(self, half: int) -> None:
        self._wait_for(self._written, half)

    def has_read(self, half: int) -> None:
        self._has_read[self._rank][half].record(torch.cuda.current_stream(self._device))

    def _wait_for(self, events: Sequence[Sequence[Any]], half: int) -> None:
        stream = torch.cuda.current_stream(self._device)
        for of_rank in events:
            stream.wait_event(of_rank[half])


def _new_events() -> tuple[Any, Any]:
    return torch.cuda.Event(interprocess=True), torch.cuda.Event(interprocess=True)


class _Area:
    """This rank's area and events.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes = torch.empty(AREA, dtype=torch.uint8, device=device)
        self.written, self.has_read = _new_events(), _new_events()

    def shared(self, gpu: str) -> _Shared:
        """Return what other processes need to open it."""
        storage = self.bytes.untyped_storage()._share_cuda_()
        return _Shared(gpu, storage, _handles(self.written), _handles(self.has_read))


def _handles(events: tuple[Any, Any]) -> tuple[bytes, bytes]:
    return events[0].ipc_handle(), events[1].ipc_handle()


def _map_areas(group: Any, device: torch.device, meet: Meet) -> MappedCollectives | None:
    """Open the areas of all ranks; None on all ranks, with a line in the log, where one of them cannot."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    area, mine = None, _Shared(gpu)
    try:
        area = _Area(device)
        mine = area.shared(gpu)
    except RuntimeError as error:  # a system without these handles, or an allocator whose memory has none
        mine = _Shared(gpu, problem=str(error).splitlines()[0])
    rank, size = group.rank(), group.size()
    key = f"gpu-area/{device.index}"
    group.store.set(f"{key}/{rank}", messages.encode(mine))
    shared = [
        read_message(group.store.get(f"{key}/{each}"), _Shared, f"the GPU memory of rank {each}")
        for each in range(size)
    ]
    problem = next((each.problem for each in shared if each.problem), "")
    if any(each.gpu != gpu for each in shared):
        problem = "the ranks have several GPUs, which NCCL is for"
    mapped = None
    if not problem and area is not None:
        try:
            mapped = _open(area, shared, rank, device, meet)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
    if all(theirs[0] for theirs in meet([int(mapped is not None)])):
        return mapped
    if rank == 0:
        reason = problem or "another rank could not map it"
        _log.warning("shm: tensors on %s pass through the host's memory: %s", device, reason)
    return None


def _open(area: _Area, shared: Sequence[_Shared], rank: int, device: torch.device, meet: Meet) -> MappedCollectives:
    areas, written, has_read = [], [], []
    for other, each in enumerate(shared):
        if other == rank:
            areas.append(area.bytes)
            written.append(area.written)
            has_read.append(area.has_read)
            continue
        assert each.storage is not None
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *each.storage[1:])
        areas.append(torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[:AREA])
        written.append(_opened_events(each.written, device))
        has_read.append(_opened_events(each.has_read, device))
    return MappedCollectives(areas, rank, meet, _EventFences(device, rank, written, has_read))


def _opened_events(handles: Sequence[bytes], device: torch.device) -> tuple[Any, ...]:
    return tuple(torch.cuda.Event.from_ipc_handle(device, handle) for handle in handles)


class _QueuedWork(CPUWork):
    """The work of a collective that is in a stream of the device when its call returns.

    Args:
        result: the tensors that it writes.
        device: their device.
    """

    def __init__(self, result: list[torch.Tensor], device: torch.device) -> None:
        super().__init__(result)
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for the collective, if it is another one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the result, whose callbacks run in streams that wait for it."""
        if self._stream is None:
            return super().get_future()
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            future.set_result(self.result())
        return future


# --- c10d's calls -----------------------------------------------------------------------------------------------------


class GpuTensors:
    """The calls of a group for the CPU with tensors on one device.

    Args:
        group: the group.
        device: the device of the tensors.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._mapped: MappedCollectives | None = None
        self._may_map = group.is_on_one_host and device.type == "cuda"

    def run(self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CPUWork:
        """Run the call `name` of the group, whose form for the CPU is `method`.

        A collective through mapped memory is in the current stream when the call returns, synchronous or not; one
        through the host's memory has ended if it is synchronous.
        """
        call = _MAPPED.get(name)
        if call is None or _is_sparse(args[0]) or not self._is_mapped():
            return _through_host(self._group, self._device, name, method, args, kwargs)
        with torch.no_grad():
            result = call(self._mapped, *args, **kwargs)
        work = _QueuedWork(list(result), self._device)
        self._group.replace_in_batch(None, work)
        return work

    def close(self) -> None:
        """Drop the areas when all ranks have read them, or do not answer."""
        if self._mapped is None:
            return
        with suppress(LockstepError, RuntimeError):
            _wait_for(self._device)
            self._meet([0], _GOODBYE_S)
        self._mapped, self._may_map = None, False

    def _is_mapped(self) -> bool:
        """Return whether the ranks have mapped each other's areas; the first call on each rank tries to."""
        if self._may_map and self._mapped is None:
            self._mapped = _map_areas(self._group, self._device, self._meet)
            self._may_map = self._mapped is not None
        return self._mapped is not None

    def _meet(self, numbers: list[int], seconds: float = 0.0) -> list[list[int]]:
        everyone = torch.empty(self._group.size(), len(numbers), dtype=torch.int64)
        options = AllgatherOptions()
        options.asyncOp = False
        options.timeout = timedelta(seconds=seconds)  # 0 is the group's
        self._group.allgather([list(everyone.unbind())], [torch.tensor(numbers)], options).wait()
        met: list[list[int]] = everyone.tolist()
        return met


def _is_sparse(tensors: Any) -> bool:
    first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
    return isinstance(first, torch.Tensor) and first.layout is not torch.strided


# Each function has the arguments of c10d's call after the first one, and returns the tensors that are written.


def _all_reduce(mapped: MappedCollectives, tensors: Tensors, opts: Any = None) -> Tensors:
    op = (opts or dist.AllreduceOptions()).reduceOp
    for tensor in tensors:
        mapped.all_reduce(tensor, reduce_fn_for(op, tensor.dtype))
    return tensors


def _broadcast(mapped: MappedCollectives, tensors: Tensors, opts: Any) -> Tensors:
    for tensor in tensors:
        mapped.broadcast(tensor, opts.rootRank)
    return tensors


def _all_gather(mapped: MappedCollectives, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Tensors:
    for parts, tensor in zip(outputs, inputs, strict=True):
        mapped.all_gather(parts, tensor)
    return [part for parts in outputs for part in parts]


def _all_gather_single(
    mapped: MappedCollectives, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
) -> Tensors:
    whole = contiguous_for(output)
    mapped.all_gather(_parts(whole, mapped.size, "output"), tensor)
    copy_back(whole, output)
    return [output]


def _reduce_scatter_single(
    mapped: MappedCollectives, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
) -> Tensors:
    op = (opts or dist.ReduceScatterOptions()).reduceOp
    mapped.reduce_scatter(output, _parts(tensor, mapped.size, "input"), reduce_fn_for(op, output.dtype))
    return [output]


def _all_to_all(mapped: MappedCollectives, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Tensors:
    mapped.all_to_all(outputs, inputs)
    return outputs


def _all_to_all_single(
    mapped: MappedCollectives,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: Any = None,
) -> Tensors:
    whole = contiguous_for(output)
    outputs = _parts(whole, mapped.size, "output", output_splits)
    mapped.all_to_all(outputs, _parts(tensor, mapped.size, "input", input_splits))
    copy_back(whole, output)
    return [output]


def _parts(tensor: torch.Tensor, ranks: int, argument: str, splits: Sequence[int] = ()) -> list[torch.Tensor]:
    return split_dense_per_rank(tensor.detach(), ranks, argument, splits)


# by c10d's names; what is not here passes through the host
_MAPPED: dict[str, Callable[..., Tensors]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "all_gather_single": _all_gather_single,
    "_allgather_base": _all_gather_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "_reduce_scatter_base": _reduce_scatter_single,
    "alltoall": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "alltoall_base": _all_to_all_single,
}
