"""Numbers for operations under way, to ask about and to wait for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.errors import ConfigError

from ..common.process_sets import ProcessSet, checked_set
from ..engine.engine import Engine
from ..engine.request import Request

__all__ = ["checked", "checked_list", "first", "form_of", "poll", "run", "start", "synchronize"]

_numbers = itertools.count(1)
Finish = Callable[[Any], Any]

_open: dict[int, tuple[Engine, Request, Finish]] = {}


def start(process_set: ProcessSet, request: Request, finish: Finish) -> int:
    """Submit `request`; the handle whose `synchronize` gives what `finish` makes of its result."""
    engine = checked_set(process_set).engine
    request.name = request.name or engine.name_for(request.kind)
    engine.submit(request)
    handle = next(_numbers)
    _open[handle] = (engine, request, finish)
    return handle


def run(process_set: ProcessSet, request: Request) -> Any:
    """Submit `request` and wait for its result."""
    engine = checked_set(process_set).engine
    request.name = request.name or engine.name_for(request.kind)
    return engine.run(request)


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once; also for a handle that is not open.

    Args:
        handle: of an asynchronous operation.
    """
    if handle not in _open:
        return True
    engine, request, _ = _open[handle]
    return engine.poll(request)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation, and return its result; None for a handle that is not open.

    Raises:
        HorovodInternalError: when it could not be carried out.
    """
    if handle not in _open:
        return None
    engine, request, finish = _open.pop(handle)
    return finish(engine.wait(request))


def checked(tensor: Any, where: str = "tensor") -> torch.Tensor:
    """`tensor` without its gradient.

    Raises:
        ConfigError: when it is none, or sparse.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(where, "a tensor", found=type(tensor).__name__)
    if tensor.layout is not torch.strided:
        hint = "hvd.sparse_allreduce_async reduces sparse tensors."
        raise ConfigError(where, "a dense tensor", found=str(tensor.layout), hint=hint)
    return tensor.detach() if tensor.requires_grad else tensor


def checked_list(tensors: Any) -> list[torch.Tensor]:
    """The tensors of a group, without their gradients.

    Raises:
        ConfigError: when there are none, or they are on several devices.
    """
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence) or not tensors:
        raise ConfigError(
            "tensors", "a list of tensors", found=type(tensors).__name__ if tensors != [] else "an empty one"
        )
    found = [checked(tensor, f"tensors[{number}]") for number, tensor in enumerate(tensors)]
    devices = {tensor.device for tensor in found}
    if len(devices) > 1:
        raise ConfigError("tensors", "tensors on one device", found=", ".join(sorted(map(str, devices))))
    return found


def form_of(tensors: Sequence[torch.Tensor], skip: int = 0) -> tuple[tuple[str, Any], ...]:
    """What ranks must have alike about tensors; but for the first `skip` dimensions, if any.

    Args:
        tensors: one, or those of a group.
        skip: 0 or 1.
    """
    what = "shape but for the first dimension" if skip else "shape"
    kind = "cpu" if tensors[0].is_cpu else tensors[0].device.type  # torch makes the latter anew each time
    if len(tensors) == 1:
        only = tensors[0]
        return ("dtype", only.dtype), (what, tuple(only.shape[skip:])), ("device", kind)
    shapes = tuple(tuple(tensor.shape[skip:]) for tensor in tensors)
    return ("dtype", tuple(tensor.dtype for tensor in tensors)), (what, shapes), ("device", kind)


def first(found: Sequence[Any]) -> Any:
    """The result of an operation on one tensor."""
    return found[0]
