"""Collectives in the native extension, where it is installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime.backoff import Steps
from .chunk_buffers import ChunkBuffers
from .signatures import KINDS, dtype_number

_WAITING, _DONE, _MISMATCH = range(3)  # as in _exchange.h
_LARGE = 64 << 10  # as in _exchange.h


def addresses_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the address and bytes of each tensor, one after the other."""
    numbers: list[int] = []
    for tensor in tensors:
        numbers += (tensor.data_ptr(), tensor.nbytes)
    return tuple(numbers)


def dtype_code_of(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Return the number of the dtype of a collective's tensors; 0 where it has none."""
    tensors = inputs or outputs
    return dtype_number(tensors[0].dtype) if tensors else 0


def begin(
    buffers: ChunkBuffers,
    kind: int,
    root: int,
    dtype_code: int,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    spins: int,
    keep_alive: object,
) -> Steps | None:
    """Begin a collective; the steps that are left, or None when it has completed.

    Args:
        buffers: through which the ranks exchange their data.
        kind: a value of KINDS.
        root: its root, or any rank.
        dtype_code: the number of the tensors' dtype, see signatures.py; of a dtype that it can sum,
            if it is a sum.
        inputs: addresses and sizes in bytes of this rank's inputs; one pair may stand for equal
            parts in a row.
        outputs: the same of its outputs.
        spins: how often it polls the counters, whenever it waits, before it yields the core and
            then returns; -1 to return at once.
        keep_alive: has to stay alive until the collective has completed: the owners of those
            addresses.
    """
    outcome = buffers.state.begin(kind, root, dtype_code, spins, inputs, outputs)
    if outcome == _DONE:
        return None
    nbytes = max(sum(inputs[1::2]), sum(outputs[1::2]))
    return _advance(buffers, outcome, buffers.spins // 2 if nbytes >= _LARGE else -1, keep_alive)


def _advance(buffers: ChunkBuffers, outcome: int, spins: int, keep_alive: object) -> Steps:
    # a large one releases the interpreter lock while it spins
    state = buffers.state
    rank_states = buffers.rank_states
    while outcome == _WAITING:
        if state.awaited_rank < 0:
            yield from rank_states.wait_for_all(state.awaited_tick)
        else:
            yield from rank_states.wait_for(state.awaited_rank, state.awaited_tick)
        outcome = state.advance(spins)
    if outcome == _MISMATCH:
        raise rank_states.mismatch_error(
            state.mismatched_rank, state.found_signature, state.expected_signature
        )


def run_collective(
    buffers: ChunkBuffers,
    kind: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    root: int = 0,
    dtype_code: int | None = None,
) -> Steps:
    """Run a collective of flat tensors of one dtype, shape (numel,); `dtype_code`: see
    `native_sum_code`.
    """
    if dtype_code is None:
        dtype_code = dtype_code_of(inputs, outputs)
    addresses = addresses_of(inputs), addresses_of(outputs)
    rest = begin(buffers, KINDS[kind], root, dtype_code, *addresses, -1, (inputs, outputs))
    if rest is not None:
        yield from rest
