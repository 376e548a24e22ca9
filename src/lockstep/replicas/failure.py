"""The error of a replica, with where it was and what it was given."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import LockstepError
from .spread import leaves

__all__ = ["ReplicaError", "describe", "shapes_of"]


class ReplicaError(LockstepError, RuntimeError):
    """The computation on one of several replicas failed; its cause is the exception that it raised.

    Attributes:
        replica: its number, from 0.
        device: where it was.
    """

    def __init__(self, message: str, replica: int = 0, device: str = "") -> None:
        super().__init__(message, replica, device)
        self.message, self.replica, self.device = message, replica, device

    def __str__(self) -> str:
        return self.message


def describe(error: BaseException, replica: int, replicas: int, device: object, shapes: str) -> ReplicaError:
    """What replica `replica` of `replicas` says that was given tensors of `shapes`, see `shapes_of`."""
    said = f"{type(error).__name__}: {error}"
    return ReplicaError(f"replica {replica} of {replicas} on {device}, given {shapes}: {said}", replica, str(device))


def shapes_of(inputs: Any) -> str:
    """The shapes and dtypes of all tensors in a tree."""
    return ", ".join(_shape(tensor) for _, tensor in leaves(inputs)) or "no tensors"


def _shape(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
