"""Checks of the tensors of a call before anything is sent, and tensors as flat memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ConfigError

Tensors = Sequence[torch.Tensor]


class NotOnCPUError(Exception):
    """A tensor is on `device`; the group passes the call on to the backend for that device, if it
    has one.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.device = device


def dense(tensors: Tensors) -> list[torch.Tensor]:
    """Return the tensors without autograd, sharing their memory.

    Raises:
        ConfigError: for one that is not dense.
        NotOnCPUError: for one on another device.
    """
    for tensor in tensors:
        if not tensor.is_cpu:
            raise NotOnCPUError(tensor.device)
        if tensor.layout is not torch.strided:
            raise ConfigError("tensor", "a dense tensor", found=str(tensor.layout))
    return [_without_autograd(t) if t.requires_grad or t.is_inference() else t for t in tensors]


def _without_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias that may be written in place in any thread, in whatever mode of autograd."""
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def check_same_dtype(tensors: Tensors) -> None:
    """Raise ConfigError unless all tensors have one dtype."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise ConfigError("tensors", f"one dtype ({tensors[0].dtype})", found=str(tensor.dtype))


def split_per_rank(
    tensor: torch.Tensor, ranks: int, argument: str, splits: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Return `tensor` split along its first dimension, one part per rank: by `splits`, or evenly.

    The parts are views where `tensor` is contiguous (see `contiguous_for`), otherwise of a copy.

    Raises:
        ConfigError: when it cannot be split so.
    """
    return split_dense_per_rank(dense([tensor])[0], ranks, argument, splits)


def split_dense_per_rank(
    tensor: torch.Tensor, ranks: int, argument: str, splits: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Do the same as `split_per_rank` with a dense tensor on any device."""
    whole = tensor.contiguous()
    if not splits:
        if whole.numel() % ranks:
            raise ConfigError(
                argument, f"a number of elements divisible by {ranks} ranks", whole.numel()
            )
        flat = whole.view(-1)
        return list(flat.view(ranks, -1).unbind()) if whole.numel() else [flat] * ranks
    if (
        len(splits) != ranks
        or sum(splits) != (whole.shape[0] if whole.dim() else 1)
        or min(splits) < 0
    ):
        raise ConfigError(
            f"{argument} split sizes",
            f"{ranks} that add up to {tuple(whole.shape)[:1]}",
            list(splits),
        )
    return list(torch.split(whole, list(splits)))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is not empty, and its memory holds its elements in order, on the
    CPU.
    """
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
        and tensor.numel() > 0
    )


def contiguous_for(output: torch.Tensor) -> torch.Tensor:
    """Return `output` itself where it is contiguous, otherwise a new tensor of its shape, to be
    copied back.
    """
    return (
        output
        if output.is_contiguous()
        else torch.empty_like(output, memory_format=torch.contiguous_format)
    )


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of `tensor` in order, shape (numel,): a view where it is contiguous,
    otherwise a copy.
    """
    # lazily conjugated or negated: its bytes are not its values yet
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.contiguous().view(-1)
    # a single element is contiguous whatever its stride is, but not to `view(dtype)`
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,), flat.storage_offset())


def copy_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `flat` into `tensor` unless it is a view of it."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
