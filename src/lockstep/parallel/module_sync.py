"""Synchronisation of a model over the workers before training, and checks that the workers have the
same model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
from torch import nn

from .. import devices
from ..communicator import Communicator
from ..errors import ConfigError, MismatchError

__all__ = [
    "broadcast_tensors",
    "check_same_layout",
    "check_same_tensors",
    "check_same_values",
    "expanded_dimensions",
    "move_module",
    "sync_module",
    "sync_tensors",
]

# Bytes of a message: large enough to amortise its latency, small compared with a model.
_BUCKET = 16 << 20

Entry = tuple[str, tuple[int, ...], str, bool]


def layout(model: nn.Module) -> list[Entry]:
    """Return (name, shape, dtype, requires_grad) of each parameter and buffer, in the model's
    order.
    """
    return _entries([*model.named_parameters(), *model.named_buffers()])


def _entries(named: Iterable[tuple[str, torch.Tensor]]) -> list[Entry]:
    return [
        (name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
        for name, t in named
    ]


def check_same_layout(model: nn.Module, comm: Communicator) -> None:
    """Check that every worker's model has the same parameters and buffers: names, order, shapes,
    dtypes.

    Raises:
        MismatchError: on every worker, naming the first difference and its rank.
    """
    _check_same_entries(layout(model), comm)


def _check_same_entries(local: Sequence[Entry], comm: Communicator) -> None:
    digests = comm.allgather_object(hashlib.sha256(repr(local).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    layouts = comm.allgather_object(local)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    raise MismatchError(
        f"the workers' models differ. {_first_difference(layouts[0], layouts[other], other)} "
        "Build the same model on every rank: the class, its options and the order of its layers "
        "must not depend on the rank."
    )


def _first_difference(ours: Sequence[Entry], theirs: Sequence[Entry], rank: int) -> str:
    for number, (a, b) in enumerate(zip_longest(ours, theirs)):
        if a != b:
            return f"Entry {number} is {_describe(a)} on rank 0 and {_describe(b)} on rank {rank}."
    return f"Ranks 0 and {rank} differ."


def _describe(entry: Entry | None) -> str:
    if entry is None:
        return "missing"
    name, shape, dtype, trained = entry
    return f"{name} {dtype}{list(shape)}{'' if trained else ' (not trained)'}"


def check_same_values(model: nn.Module, comm: Communicator) -> None:
    """Check that every worker's parameters and buffers hold the same bits.

    Raises:
        MismatchError: on every worker, naming the first tensor that differs and its rank.
    """
    check_same_tensors([*model.named_parameters(), *model.named_buffers()], comm)


def check_same_tensors(named: Iterable[tuple[str, torch.Tensor]], comm: Communicator) -> None:
    """Check that the tensors of all workers, which have the same names, hold the same bits.

    Raises:
        MismatchError: on every worker, naming the first tensor that differs and its rank.
    """
    digests_here = []
    for name, tensor in named:
        raw = _bytes(tensor.detach().cpu())
        digests_here.append((name, hashlib.sha256(raw.numpy().data).digest()))
    digests = comm.allgather_object(digests_here)
    for rank, theirs in enumerate(digests):
        for (name, expected), (_, got) in zip(digests[0], theirs, strict=True):
            if expected != got:
                raise MismatchError(
                    f"the workers' models differ: {name} on rank {rank} holds other values than "
                    "on rank 0. Something changed it after rank 0's values were broadcast; change "
                    "parameters on every rank or on none."
                )


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module to the device of this worker; its parameters stay the same objects.

    Raises:
        ConfigError: its owner has put it on an accelerator of another type.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type not in ("cpu", "meta", device.type):
            raise ConfigError(
                "model",
                f"one on {device}, where this worker computes"
                + ("" if device.type == "cpu" else ", or on the CPU"),
                found=f"one on {tensor.device}",
                hint=f'lockstep.init("{tensor.device.type}") at the start of the program chooses '
                "that device.",
            )
    with devices.in_which_parameters_stay(device):
        module.to(device)


def sync_module(model: nn.Module, comm: Communicator) -> None:
    """Broadcast rank 0's values of `model`, and check that all workers have the same model.

    Raises:
        MismatchError: on every worker, naming the first difference.
    """
    if comm.size > 1 and not comm.is_joining:
        check_same_layout(model, comm)
        broadcast_tensors([*model.parameters(), *model.buffers()], comm)
        check_same_values(model, comm)


def sync_tensors(named: Sequence[tuple[str, torch.Tensor]], comm: Communicator) -> None:
    """Broadcast rank 0's values of tensors, and check that all workers have the same ones, as
    `sync_module` does.

    Raises:
        MismatchError: on every worker, naming the first difference.
    """
    if comm.size > 1 and not comm.is_joining:
        _check_same_entries(_entries(named), comm)
        broadcast_tensors([tensor for _, tensor in named], comm)
        check_same_tensors(named, comm)


def broadcast_tensors(tensors: Iterable[torch.Tensor], comm: Communicator) -> None:
    """Broadcast rank 0's values into `tensors`, of any dtype and any strides."""
    for bucket in _buckets(
        [_without_expanded(tensor.detach()) for tensor in tensors if tensor.numel()]
    ):
        # As bytes, because not every backend supports every dtype; in a separate contiguous buffer,
        # because backends ignore strides.
        received = comm.broadcast(torch.cat([_bytes(tensor) for tensor in bucket]))
        pieces = torch.split(
            received, [tensor.numel() * tensor.element_size() for tensor in bucket]
        )
        for tensor, piece in zip(bucket, pieces, strict=True):
            # The clone is aligned for its dtype.
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group `tensors` into buckets of at most `_BUCKET` bytes; a larger tensor is a bucket of its
    own.
    """
    bucket: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and filled + size > _BUCKET:
            yield bucket
            bucket = []
            filled = 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield bucket


def _without_expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without expanded dimensions, in which each element has its own memory."""
    for dimension in expanded_dimensions(tensor):
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def expanded_dimensions(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions in which elements share memory, as `expand()` makes them, and which
    cannot be written.
    """
    if tensor.layout is not torch.strided:
        return []
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [dimension for dimension, (size, stride) in sizes if stride == 0 and size > 1]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the values as a 1-d tensor of bytes."""
    # Always a copy: torch reports a single element with stride 0 as contiguous, but cannot view it
    # as bytes.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
