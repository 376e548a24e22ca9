"""Handles of asynchronous operations, and checks of their tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep import arguments
from lockstep.errors import ConfigError

from ..common.process_sets import ProcessSet, checked_process_set
from ..engine.engine import Engine
from ..engine.request import Request, Signature

__all__ = [
    "check_dimensions",
    "checked_group",
    "checked_tensor",
    "poll",
    "run",
    "single_result",
    "submit",
    "synchronize",
    "tensor_signature",
]

_numbers = itertools.count(1)
Postprocess = Callable[[Any], Any]

_pending: dict[int, tuple[Engine, Request, Postprocess]] = {}


def submit(process_set: ProcessSet, request: Request, postprocess: Postprocess) -> int:
    """Submit `request`, and return a handle whose `synchronize` returns ``postprocess(result)``."""
    engine = checked_process_set(process_set).engine
    request.name = request.name or engine.name_for(request.kind)
    engine.submit(request)
    handle = next(_numbers)
    _pending[handle] = (engine, request, postprocess)
    return handle


def run(process_set: ProcessSet, request: Request) -> Any:
    """Submit `request`, wait for it and return its result."""
    engine = checked_process_set(process_set).engine
    request.name = request.name or engine.name_for(request.kind)
    return engine.run(request)


def poll(handle: int) -> bool:
    """Return whether an asynchronous operation has completed, so that `synchronize` would return at
    once.

    Args:
        handle: the handle of the operation; True is returned for one that has been synchronized or
            does not exist.
    """
    if handle not in _pending:
        return True
    engine, request, _ = _pending[handle]
    return engine.poll(request)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation, and return its result.

    Args:
        handle: the handle of the operation; None is returned for one that has been synchronized or
            does not exist.

    Raises:
        HorovodInternalError: the operation could not be executed.
    """
    if handle not in _pending:
        return None
    engine, request, postprocess = _pending.pop(handle)
    return postprocess(engine.wait(request))


def checked_tensor(tensor: Any, argument: str = "tensor") -> torch.Tensor:
    """Check that `tensor` is a dense tensor, and return it detached.

    Raises:
        ConfigError: it is not.
    """
    checked: torch.Tensor = arguments.instance(argument, tensor, torch.Tensor, "a tensor")
    if checked.layout is not torch.strided:
        hint = "hvd.sparse_allreduce_async reduces sparse tensors."
        raise ConfigError(argument, "a dense tensor", found=str(checked.layout), hint=hint)
    return checked.detach() if checked.requires_grad else checked


def checked_group(tensors: Any) -> list[torch.Tensor]:
    """Check that `tensors` is a non-empty list of dense tensors on one device, and return them
    detached.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence) or not tensors:
        found = type(tensors).__name__ if tensors != [] else "an empty one"
        raise ConfigError("tensors", "a list of tensors", found=found)
    detached = [checked_tensor(tensor, f"tensors[{index}]") for index, tensor in enumerate(tensors)]
    devices = {tensor.device for tensor in detached}
    if len(devices) > 1:
        raise ConfigError(
            "tensors", "tensors on one device", found=", ".join(sorted(map(str, devices)))
        )
    return detached


def check_dimensions(tensor: torch.Tensor) -> None:
    """Check that `tensor` has at least one dimension.

    Raises:
        ConfigError: it has none.
    """
    if not tensor.dim():
        raise ConfigError(
            "tensor", "at least one dimension", found="none", hint="Use tensor.reshape(1)."
        )


def tensor_signature(tensors: Sequence[torch.Tensor], skip_dims: int = 0) -> Signature:
    """Return the part of a request's signature that describes its tensors: dtypes, shapes and
    device type.

    Args:
        tensors: the tensor of an operation, or those of a grouped one.
        skip_dims: how many leading dimensions may differ between ranks: 0 or 1.
    """
    label = "shape but for the first dimension" if skip_dims else "shape"
    # torch creates an object for each `device`
    device = "cpu" if tensors[0].is_cpu else tensors[0].device.type
    if len(tensors) == 1:
        (tensor,) = tensors
        return ("dtype", tensor.dtype), (label, tuple(tensor.shape[skip_dims:])), ("device", device)
    dtypes = tuple(tensor.dtype for tensor in tensors)
    shapes = tuple(tuple(tensor.shape[skip_dims:]) for tensor in tensors)
    return ("dtype", dtypes), (label, shapes), ("device", device)


def single_result(results: Sequence[Any]) -> Any:
    """Return the result of an operation on one tensor."""
    return results[0]
