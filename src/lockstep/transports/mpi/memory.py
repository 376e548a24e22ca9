"""The memory of tensors as MPI wants it: in one piece, by its address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..shm.moving import flat_of
from .library import load

__all__ = ["gathered", "room_for", "sizes_of", "span"]


def span(flat: torch.Tensor) -> Any:
    """The bytes of `flat`, which is dense; who hands them to MPI keeps `flat` until MPI is done."""
    return load().buffer.fromaddress(flat.data_ptr(), flat.numel() * flat.element_size())


def sizes_of(parts: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """The bytes of each part, and where it begins when they lie one behind another."""
    sizes = [part.numel() * part.element_size() for part in parts]
    return sizes, [sum(sizes[:i]) for i in range(len(sizes))]


def gathered(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements of `parts` in order: a view where they lie so in memory, otherwise a copy."""
    flats = [flat_of(part) for part in parts]
    view = _together(flats)
    if view is not None:
        return view
    # as bytes, which can be joined whatever their dtype
    return torch.cat([flat.view(torch.uint8) for flat in flats]).view(flats[0].dtype)


def room_for(outputs: Sequence[torch.Tensor], apart_from: torch.Tensor | None = None) -> torch.Tensor:
    """Memory for all elements of `outputs`: their own where they lie one behind another, otherwise new.

    Args:
        outputs: tensors of one dtype.
        apart_from: what the room must not be in; MPI does not read and write in the same place.
    """
    view = _together([output.view(-1) for output in outputs]) if all(map(_is_dense, outputs)) else None
    if view is None or (apart_from is not None and _shares(view, apart_from)):
        return outputs[0].new_empty(sum(output.numel() for output in outputs))
    return view


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both lie in one storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def _together(flats: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat view of what lies one behind another in one storage."""
    filled = [flat for flat in flats if flat.numel()] or list(flats[:1])
    end = filled[0].data_ptr()
    for flat in filled:
        if flat.data_ptr() != end or not _shares(flat, filled[0]) or not flat.is_contiguous():
            return None
        end += flat.numel() * flat.element_size()
    return filled[0].as_strided((sum(flat.numel() for flat in filled),), (1,))
