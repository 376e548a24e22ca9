"""Checksums of tensors that any single bit that flips changes, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..parallel.fingerprints import INTEGERS, mix_bits

__all__ = ["BitSums", "bit_sum"]


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a dense tensor's bits, as whole numbers of 64 bits, modulo 2^64.

    Any single bit that flips changes it. Values that trade places may not, as `checksum_of` would
    notice, which takes ten times as long; a fault does not sort.

    Returns:
        0-dim tensor of int64 on the device of the tensor, which nothing waits for.
    """
    return _as_integers(tensor).sum()


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as whole numbers; a view, if its memory is contiguous."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.contiguous().view(-1)
    size = flat.element_size()
    is_wide = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    return flat.view(torch.int64 if is_wide else INTEGERS[size])


class BitSums:
    """One checksum of several tensors on one device, whose values are read again and again.

    Args:
        tensors: at least one; each of them keeps its shape, and may be changed in place.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._places = torch.arange(len(self._tensors), device=self._tensors[0].device)
        self._look()

    def _look(self) -> None:
        """Keep views of the tensors' memory: making one takes longer than adding up few values."""
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        views = [_as_integers(tensor) for tensor in self._tensors]
        self._views = [
            view if view.data_ptr() == address else None
            for view, address in zip(views, self._addresses, strict=True)
        ]

    def total(self) -> torch.Tensor:
        """Return a checksum of all tensors; any single bit that flips in one of them changes it.

        Returns:
            0-dim tensor of int64 on their device, which nothing waits for.
        """
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            self._look()
        pairs = zip(self._tensors, self._views, strict=True)
        sums = [bit_sum(tensor) if view is None else view.sum() for tensor, view in pairs]
        return mix_bits(torch.stack(sums), self._places).sum()
