"""Collectives through shared memory: without reduction, with one, and the sum of sparse tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from ...errors import ConfigError
from ..runtime.backoff import Steps
from ..runtime.reduce_ops import ReduceFn
from ..runtime.tensor_arguments import Tensors, copy_back, flatten
from .chunk_buffers import ChunkBuffers
from .memory_layout import HEADER
from .native import run_collective


def barrier(buffers: ChunkBuffers) -> Steps:
    """Wait until all ranks have arrived."""
    tick = buffers.rank_states.post()
    yield from buffers.rank_states.wait_for_all(tick)


def broadcast(buffers: ChunkBuffers, tensor: torch.Tensor, root: int) -> Steps:
    """Copy rank `root`'s `tensor` to every rank's, in place. The root continues once its data is in
    the buffers.
    """
    flat = flatten(tensor)
    if buffers.is_native:
        yield from run_collective(buffers, "broadcast", [flat], [flat], root)
    else:
        yield from _broadcast(buffers, flat, root)
    if buffers.rank != root:
        copy_back(flat, tensor)


def gather(buffers: ChunkBuffers, outputs: Tensors, tensor: torch.Tensor, root: int) -> Steps:
    """Copy rank i's `tensor` into `outputs[i]` of rank `root`; all tensors have the same number of
    elements.
    """
    flat = flatten(tensor)
    flats = [flatten(output) for output in outputs]
    if buffers.is_native:
        yield from run_collective(buffers, "gather", [flat], flats, root)
    else:
        yield from _gather(buffers, flats, flat, root)
    _copy_all_back(flats, outputs)


def scatter(buffers: ChunkBuffers, tensor: torch.Tensor, inputs: Tensors, root: int) -> Steps:
    """Copy `inputs[i]` of rank `root` into rank i's `tensor`; all tensors have the same number of
    elements.
    """
    flat = flatten(tensor)
    flats = [flatten(part) for part in inputs]
    if buffers.is_native:
        yield from run_collective(buffers, "scatter", flats, [flat], root)
    else:
        yield from _scatter(buffers, flat, flats, root)
    copy_back(flat, tensor)


def all_gather(buffers: ChunkBuffers, outputs: Tensors, tensor: torch.Tensor) -> Steps:
    """Copy rank i's `tensor` into every rank's `outputs[i]`; sizes may differ between ranks."""
    flat = flatten(tensor)
    flats = [flatten(output) for output in outputs]
    if buffers.is_native:
        yield from run_collective(buffers, "all_gather", [flat], flats)
    else:
        yield from _all_gather(buffers, flats, flat)
    _copy_all_back(flats, outputs)


def all_to_all(buffers: ChunkBuffers, outputs: Tensors, inputs: Tensors) -> Steps:
    """Copy rank i's `inputs[j]` into rank j's `outputs[i]`; sizes may differ everywhere."""
    sources = [flatten(part) for part in inputs]
    targets = [flatten(output) for output in outputs]
    if buffers.is_native:
        yield from run_collective(buffers, "all_to_all", sources, targets)
    else:
        plain = [_bytes(flat) for flat in targets], [_bytes(flat) for flat in sources]
        yield from _all_to_all(buffers, *plain, sources[0].dtype)
    _copy_all_back(targets, outputs)


# The same in Python, without the native extension; all tensors are flat.


def _broadcast(buffers: ChunkBuffers, flat: torch.Tensor, root: int) -> Steps:
    rank_states = buffers.rank_states
    rank = buffers.rank
    length = buffers.chunk // flat.element_size()
    for start in range(0, flat.numel(), length):
        chunk = flat[start : start + length]
        yield from buffers.claim_half(
            "broadcast", flat.dtype, flat.nbytes, 1, ends_reading=True, writes=rank == root
        )
        slot = buffers.slots((chunk.numel(),), chunk.dtype)[root]
        if rank == root:
            slot.copy_(chunk)
        else:
            yield from rank_states.wait_for(root, rank_states.state.tick + 1)
            buffers.check_signature(root, flat.nbytes)
            chunk.copy_(slot)
        rank_states.post()


def _gather(buffers: ChunkBuffers, outputs: Tensors, flat: torch.Tensor, root: int) -> Steps:
    rank_states = buffers.rank_states
    length = buffers.chunk // flat.element_size()
    for start in range(0, flat.numel(), length):
        chunk = flat[start : start + length]
        yield from buffers.claim_half(
            "gather", flat.dtype, flat.nbytes, 1, ends_reading=True, writes=buffers.rank != root
        )
        slots = buffers.slots((chunk.numel(),), chunk.dtype)
        if buffers.rank == root:
            for source, out in enumerate(outputs):
                if source != root:
                    yield from rank_states.wait_for(source, rank_states.state.tick + 1)
                    buffers.check_signature(source, flat.nbytes)
                out[start : start + length].copy_(chunk if source == root else slots[source])
        else:
            slots[buffers.rank].copy_(chunk)
        rank_states.post()


def _scatter(buffers: ChunkBuffers, flat: torch.Tensor, inputs: Tensors, root: int) -> Steps:
    rank_states = buffers.rank_states
    length = buffers.chunk // flat.element_size()
    for start in range(0, flat.numel(), length):
        chunk = flat[start : start + length]
        yield from buffers.claim_half(
            "scatter", flat.dtype, flat.nbytes, 1, ends_reading=True, writes=buffers.rank == root
        )
        slots = buffers.slots((chunk.numel(),), chunk.dtype)
        if buffers.rank == root:
            for target, part in enumerate(inputs):
                if target != root:
                    slots[target].copy_(part[start : start + length])
            # last, as the output may be one of the inputs
            chunk.copy_(inputs[root][start : start + length])
        else:
            yield from rank_states.wait_for(root, rank_states.state.tick + 1)
            buffers.check_signature(root, flat.nbytes)
            chunk.copy_(slots[buffers.rank])
        rank_states.post()


def _all_gather(buffers: ChunkBuffers, outputs: Tensors, mine: torch.Tensor) -> Steps:
    rank_states = buffers.rank_states
    rank = buffers.rank
    length = buffers.chunk // mine.element_size()
    for start in range(0, max(flat.numel() for flat in outputs), length):
        yield from buffers.claim_half("all_gather", mine.dtype, mine.nbytes, 1, ends_reading=False)
        chunk = mine[start : start + length]
        buffers.slots((chunk.numel(),), chunk.dtype)[rank].copy_(chunk)
        tick = rank_states.post()
        yield from rank_states.wait_for_all(tick)
        for source, flat in enumerate(outputs):
            buffers.check_signature(source, flat.nbytes)
            out = flat[start : start + length]
            out.copy_(chunk if source == rank else buffers.slots((out.numel(),), out.dtype)[source])


def _all_to_all(
    buffers: ChunkBuffers, outputs: Tensors, inputs: Tensors, dtype: torch.dtype
) -> Steps:
    """Exchange the bytes of tensors of `dtype` all-to-all.

    A slot begins with a header: the most bytes that its rank sends to any rank, and then the bytes
    that it sends to each. No rank knows the sizes of all: the first chunk's headers show how many
    chunks there are.
    """
    rank_states = buffers.rank_states
    rank = buffers.rank
    size = buffers.size
    sizes = [part.numel() for part in inputs]
    data_offset = -(-(size + 1) * 8 // HEADER) * HEADER
    piece_bytes = (buffers.chunk - data_offset) // size // HEADER * HEADER
    start = 0
    most = max(sizes)
    while start == 0 or start < most:
        yield from buffers.claim_half("all_to_all", dtype, 0, 1, ends_reading=False)
        buffers.write_sizes([max(sizes), *sizes])
        for target, part in enumerate(inputs):
            piece = part[start : start + piece_bytes]
            if target != rank and piece.numel():
                buffers.slots((piece.numel(),), torch.uint8, data_offset + target * piece_bytes)[
                    rank
                ].copy_(piece)
        tick = rank_states.post()
        yield from rank_states.wait_for_all(tick)
        for source, out in enumerate(outputs):
            buffers.check_signature(source, 0)
            header = buffers.read_sizes(source, size + 1)
            most = max(most, header[0])
            if header[1 + rank] != out.numel():
                raise buffers.size_mismatch(source, header[1 + rank], out.numel())
            piece = out[start : start + piece_bytes]
            if source != rank and piece.numel():
                piece.copy_(
                    buffers.slots((piece.numel(),), torch.uint8, data_offset + rank * piece_bytes)[
                        source
                    ]
                )
        start += piece_bytes
    outputs[rank].copy_(inputs[rank])


def _copy_all_back(flats: Tensors, tensors: Tensors) -> None:
    for flat, tensor in zip(flats, tensors, strict=True):
        copy_back(flat, tensor)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


# Up to this many bytes over all ranks each rank sums everything itself, which needs one tick, not
# two.
_ONE_TICK_BYTES = 32 << 10
_ALIGN = 64  # bytes; slices begin on a cache line, so that no two ranks write into one


def all_reduce(
    buffers: ChunkBuffers, tensor: torch.Tensor, reduce_fn: ReduceFn, dtype_code: int = -1
) -> Steps:
    """Reduce `tensor` over all ranks, in place, any shape and strides; every rank gets the same
    bits.

    Args:
        buffers: through which the ranks exchange it.
        tensor: this rank's values, and then the result.
        reduce_fn: the reduction.
        dtype_code: see `native_sum_code`; -1 where the native extension does not do it. It takes
            the same ticks and gives the same bits, so ranks with and without it work together.
    """
    if dtype_code >= 0 and tensor.numel():
        flat = flatten(tensor)
        yield from run_collective(buffers, "all_reduce", [flat], [flat], 0, dtype_code)
        copy_back(flat, tensor)
        return
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes * (buffers.size - 1) <= _ONE_TICK_BYTES and nbytes <= buffers.chunk:
        yield from _all_reduce_whole(buffers, tensor, reduce_fn)
        return
    flat = flatten(tensor)
    length = buffers.chunk // flat.element_size()
    for start in range(0, flat.numel(), length):
        yield from _all_reduce_sliced(buffers, flat[start : start + length], flat.nbytes, reduce_fn)
    copy_back(flat, tensor)


def _all_reduce_whole(buffers: ChunkBuffers, tensor: torch.Tensor, reduce_fn: ReduceFn) -> Steps:
    rank_states = buffers.rank_states
    yield from buffers.claim_half("all_reduce", tensor.dtype, tensor.nbytes, 1, ends_reading=False)
    slots = buffers.slots(tensor.shape, tensor.dtype)
    slots[buffers.rank].copy_(tensor)
    tick = rank_states.post()
    if not rank_states.all_reached(tick):
        yield from rank_states.wait_for_all(tick)
    buffers.check_all_signatures(tensor.nbytes)
    reduce_fn(slots[:-1], tensor)


def _all_reduce_sliced(
    buffers: ChunkBuffers, flat: torch.Tensor, nbytes: int, reduce_fn: ReduceFn
) -> Steps:
    """Let each rank reduce its own slice; its own data of that slice never goes through shared
    memory.
    """
    rank_states = buffers.rank_states
    rank = buffers.rank
    yield from buffers.claim_half("all_reduce", flat.dtype, nbytes, 2, ends_reading=False)
    slots = buffers.slots((flat.numel(),), flat.dtype)
    begin, end = _bounds(flat, buffers.size, rank)
    mine = slots[rank]
    result = slots[-1]
    for a, b in ((0, begin), (end, flat.numel())):
        if a < b:
            mine[a:b].copy_(flat[a:b])
    tick = rank_states.post()
    yield from rank_states.wait_for_all(tick)
    buffers.check_all_signatures(nbytes)
    if begin < end:
        own_slice = flat[begin:end]
        reduce_fn(
            [own_slice if i == rank else slots[i][begin:end] for i in range(buffers.size)],
            own_slice,
        )
        result[begin:end].copy_(own_slice)
    tick = rank_states.post()
    yield from rank_states.wait_for_all(tick)
    for a, b in ((0, begin), (end, flat.numel())):
        if a < b:
            flat[a:b].copy_(result[a:b])


def reduce(
    buffers: ChunkBuffers,
    tensor: torch.Tensor,
    root: int,
    reduce_fn: ReduceFn,
    dtype_code: int = -1,
) -> Steps:
    """Reduce `tensor` over all ranks into rank `root`'s, in place; the others' tensors stay as they
    are.
    """
    flat = flatten(tensor)
    if dtype_code >= 0:
        yield from run_collective(buffers, "reduce", [flat], [flat], root, dtype_code)
    else:
        length = buffers.chunk // flat.element_size()
        for start in range(0, flat.numel(), length):
            yield from _reduce_chunk(
                buffers, flat[start : start + length], flat.nbytes, root, reduce_fn
            )
    if buffers.rank == root:
        copy_back(flat, tensor)


def _reduce_chunk(
    buffers: ChunkBuffers, flat: torch.Tensor, nbytes: int, root: int, reduce_fn: ReduceFn
) -> Steps:
    rank_states = buffers.rank_states
    yield from buffers.claim_half("reduce", flat.dtype, nbytes, 3, ends_reading=True)
    slots = buffers.slots((flat.numel(),), flat.dtype)
    slots[buffers.rank].copy_(flat)
    tick = rank_states.post()
    yield from rank_states.wait_for_all(tick)
    buffers.check_all_signatures(nbytes)
    begin, end = _bounds(flat, buffers.size, buffers.rank)
    if begin < end:
        reduce_fn([slot[begin:end] for slot in slots[:-1]], slots[-1][begin:end])
    tick = rank_states.post()
    if buffers.rank == root:
        yield from rank_states.wait_for_all(tick)
        flat.copy_(slots[-1])
    rank_states.post()


def reduce_scatter(
    buffers: ChunkBuffers,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    reduce_fn: ReduceFn,
    dtype_code: int = -1,
) -> Steps:
    """Reduce `inputs[i]` over all ranks into rank i's `output`; sizes may differ between i, not
    between ranks.
    """
    result = flatten(output)
    parts = [flatten(part) for part in inputs]
    if dtype_code >= 0:
        yield from run_collective(buffers, "reduce_scatter", parts, [result], 0, dtype_code)
    else:
        yield from _reduce_scatter(buffers, result, parts, reduce_fn)
    copy_back(result, output)


def _reduce_scatter(
    buffers: ChunkBuffers, result: torch.Tensor, parts: Sequence[torch.Tensor], reduce_fn: ReduceFn
) -> Steps:
    length = buffers.chunk // buffers.size // _ALIGN * _ALIGN // result.element_size()
    nbytes = sum(part.nbytes for part in parts)
    for start in range(0, max(part.numel() for part in parts), length):
        yield from buffers.claim_half("reduce_scatter", result.dtype, nbytes, 1, ends_reading=False)
        chunk = [part[start : start + length] for part in parts]
        yield from _reduce_scatter_chunk(
            buffers, result[start : start + length], chunk, length, nbytes, reduce_fn
        )


def _reduce_scatter_chunk(
    buffers: ChunkBuffers,
    out: torch.Tensor,
    parts: Sequence[torch.Tensor],
    stride: int,
    nbytes: int,
    reduce_fn: ReduceFn,
) -> Steps:
    rank_states = buffers.rank_states
    rank = buffers.rank
    slots = buffers.slots((stride * buffers.size,), out.dtype)
    for target, part in enumerate(parts):
        if target != rank and part.numel():
            slots[rank][target * stride : target * stride + part.numel()].copy_(part)
    tick = rank_states.post()
    yield from rank_states.wait_for_all(tick)
    buffers.check_all_signatures(nbytes)
    if out.numel():
        begin = rank * stride
        end = rank * stride + out.numel()
        reduce_fn(
            [parts[rank] if i == rank else slots[i][begin:end] for i in range(buffers.size)], out
        )


def _bounds(flat: torch.Tensor, ranks: int, rank: int) -> tuple[int, int]:
    """Return the slice of `flat` that `rank` reduces."""
    step = _ALIGN // flat.element_size()
    per = -(-flat.numel() // ranks)
    per = -(-per // step) * step
    return min(rank * per, flat.numel()), min((rank + 1) * per, flat.numel())


def all_reduce_sparse(buffers: ChunkBuffers, tensor: torch.Tensor, op: Any) -> Steps:
    """Sum the sparse COO `tensor` over all ranks, in place; the result is coalesced.

    Raises:
        ConfigError: for another operation than SUM.
    """
    if op != ReduceOp.SUM:
        raise ConfigError("op", "SUM, the only one for sparse tensors", found=str(op))
    return _sum_sparse(buffers, tensor)


def _sum_sparse(buffers: ChunkBuffers, tensor: torch.Tensor) -> Steps:
    mine = tensor.detach().coalesce()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(buffers.size)]
    yield from all_gather(buffers, counts, torch.tensor([mine._nnz()]))
    lengths = [int(count) for count in counts]
    indices = [torch.empty((mine.sparse_dim(), length), dtype=torch.int64) for length in lengths]
    values = [
        torch.empty((length, *mine.values().shape[1:]), dtype=mine.dtype) for length in lengths
    ]
    yield from all_gather(buffers, indices, mine.indices())
    yield from all_gather(buffers, values, mine.values())
    parts = [
        torch.sparse_coo_tensor(i, v, mine.shape, check_invariants=False)
        for i, v in zip(indices, values, strict=True)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    with torch.no_grad():
        tensor.copy_(total.coalesce())
