"""Looks at the tensors of a call before anything of it is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ConfigError

__all__ = ["NotOnCPUError", "contiguous_for", "dense", "is_plain", "pieces", "same_dtype"]


class NotOnCPUError(Exception):
    """A tensor is on `device`, and another backend may know what to do with it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.device = device


def dense(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors without autograd's eyes on them, sharing their memory.

    Raises:
        ConfigError: for one that is not dense.
        NotOnCPUError: for one on another device.
    """
    for tensor in tensors:
        if not tensor.is_cpu:
            raise NotOnCPUError(tensor.device)
        if tensor.layout is not torch.strided:
            raise ConfigError("tensor", "a dense tensor", found=str(tensor.layout))
    return [_plain(tensor) if tensor.requires_grad or tensor.is_inference() else tensor for tensor in tensors]


def same_dtype(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError unless all tensors have one dtype."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise ConfigError("tensors", f"one dtype ({tensors[0].dtype})", found=str(tensor.dtype))


def pieces(tensor: torch.Tensor, ranks: int, argument: str, splits: Sequence[int] | None = None) -> list[torch.Tensor]:
    """`tensor` divided along its first dimension, one piece for each rank: by `splits`, or evenly.

    The pieces are views where `tensor` is contiguous (see `contiguous_for`), otherwise of a copy.

    Raises:
        ConfigError: when it cannot be divided so.
    """
    whole = dense([tensor])[0].contiguous()
    if not splits:
        if whole.numel() % ranks:
            raise ConfigError(argument, f"a number of elements divisible by {ranks} ranks", whole.numel())
        flat = whole.view(-1)
        return list(flat.view(ranks, -1).unbind()) if whole.numel() else [flat] * ranks
    if len(splits) != ranks or sum(splits) != (whole.shape[0] if whole.dim() else 1) or min(splits) < 0:
        raise ConfigError(f"{argument} split sizes", f"{ranks} that add up to {tuple(whole.shape)[:1]}", list(splits))
    return list(torch.split(whole, list(splits)))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of `tensor`, of which there are some, are its elements in order."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
        and tensor.numel() > 0
    )


def contiguous_for(output: torch.Tensor) -> torch.Tensor:
    """`output` itself where it is contiguous, or else a tensor of its shape to be filled instead and copied then."""
    return output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """An alias that may be written in place in any thread, under whatever mode of autograd."""
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
