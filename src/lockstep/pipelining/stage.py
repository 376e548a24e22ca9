"""Passes values through the stages of all workers, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..communicator import Communicator

__all__ = ["pass_on", "try_out"]

Values = tuple[torch.Tensor, ...]


def pass_on(module: nn.Module, inputs: torch.Tensor | None, comm: Communicator) -> tuple[Values, Values]:
    """Send one micro-batch through all stages; each worker gets what has come into its own and what leaves it.

    Args:
        module: this worker's stage.
        inputs: needed on rank 0.
        comm: the workers, as many as stages.
    """
    given = (inputs,) if comm.rank == 0 and inputs is not None else _received(comm)
    result = module(*given)
    gives = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if comm.rank < comm.size - 1:
        comm.send_object([(value.shape, value.dtype, value.requires_grad) for value in gives], comm.rank + 1)
        for value in gives:
            comm.send(value.detach(), comm.rank + 1)
    return given, gives


def _received(comm: Communicator) -> Values:
    places = comm.recv_object(comm.rank - 1)
    values = []
    for shape, dtype, trained in places:
        room = torch.empty(shape, dtype=dtype, device=comm.device)
        comm.recv(room, comm.rank - 1)
        values.append(room.requires_grad_(trained))
    return tuple(values)


def try_out(module: nn.Module, inputs: torch.Tensor | None, comm: Communicator) -> tuple[Values, Values]:
    """`pass_on` that leaves no trace: buffers and random numbers are as before."""
    with _unchanged(module, comm.device), torch.enable_grad():
        return pass_on(module, inputs, comm)


@contextmanager
def _unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    places: list[tuple[Any, str, torch.Tensor]] = [
        (layer, name, buffer.clone())
        for layer in module.modules()
        for name, buffer in layer._buffers.items()
        if buffer is not None
    ]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
    for layer, name, before in places:
        layer._buffers[name].copy_(before)
