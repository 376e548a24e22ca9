"""Copies of batches to the device that computes with them, and the page-locked memory they are made
from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .. import devices
from ..parallel.nested import map_tensors, tensors_of


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in page-locked memory; a sparse tensor, or one on a device, is returned
    unchanged.
    """
    return (
        tensor.pin_memory() if tensor.device.type == "cpu" and _has_one_memory(tensor) else tensor
    )


def _has_one_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is not made of several others, as sparse and nested ones are."""
    return tensor.layout == torch.strided and not tensor.is_nested


def to_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copy each of `batches` to `device`; where it has streams, this overlaps with computing on the
    previous batch.
    """
    if device.type == "cpu":
        return iter(batches)
    if devices.has_streams(device):
        return _overlapped(batches, device)
    return (map_tensors(lambda tensor: tensor.to(device), data) for data in batches)


def _overlapped(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    stream = devices.new_stream(device)
    pending: tuple[Any, Any] | None = None

    def copy_ahead(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True) if _has_one_memory(tensor) else tensor

    def wait_for_copy(data: Any, copied: Any) -> Any:
        consumer = devices.current_stream(device)
        consumer.wait_event(copied)

        def hand_over(tensor: torch.Tensor) -> torch.Tensor:
            if not _has_one_memory(tensor):
                return tensor.to(device)
            # The allocator must not reuse this memory for the copy stream while the consumer reads
            # it.
            tensor.record_stream(consumer)
            return tensor

        return map_tensors(hand_over, data)

    for data in batches:
        tensors = tensors_of(data)
        # made there, as by `ImageSet.to`
        if tensors and all(tensor.device == device for tensor in tensors):
            if pending is not None:
                yield wait_for_copy(*pending)
                pending = None
            yield data
            continue
        with devices.in_stream(device, stream):
            moved = map_tensors(copy_ahead, data)
        copied = devices.record_event(device, stream)
        if pending is not None:
            yield wait_for_copy(*pending)
        pending = moved, copied
    if pending is not None:
        yield wait_for_copy(*pending)
