"""The variable by which cuBLAS is told how much memory its kernels work in."""

from __future__ import annotations

import os

__all__ = ["cublas_workspace", "set_cublas_workspace"]

_NAME = "CUBLAS_WORKSPACE_CONFIG"


def cublas_workspace() -> str | None:
    """The value that is set, or None."""
    return os.environ.get(_NAME)


def set_cublas_workspace(value: str | None) -> None:
    """Set it, or remove it with None. cuBLAS looks at it when it makes a handle, torch at each operation."""
    if value is None:
        os.environ.pop(_NAME, None)
    elif os.environ.get(_NAME) != value:
        os.environ[_NAME] = value
