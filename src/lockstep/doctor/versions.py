"""The versions of what a run is made of."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version

from .report import Problem, Section

__all__ = ["NAMES", "examine_versions", "here"]

_OLDEST = {"python": (3, 10), "torch": (2, 9)}
_PACKAGES = {"lockstep": "lockstep-train", "torch": "torch", "numpy": "numpy", "mpi4py": "mpi4py"}

NAMES = ("python", "torch", "lockstep")
"""What must be the same on all machines of a job."""


def here() -> dict[str, str]:
    """The versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found


def examine_versions() -> Section:
    """Python, torch, Lockstep, numpy, and the libraries that torch is built with."""
    section = Section("versions")
    for name, text in here().items():
        section.add(name, text, _too_old(name, text))
    section.add("system", f"{platform.system()} {platform.release()} ({platform.machine()})")
    for name, text in _built_with().items():
        section.add(name, text)
    return section


def _too_old(name: str, text: str) -> Problem | None:
    oldest = _OLDEST.get(name)
    if oldest is None or tuple(map(int, re.findall(r"\d+", text)[:2])) >= oldest:
        return None
    least = ".".join(map(str, oldest))
    return Problem(f"{name} is {text}", f"Install {name} {least} or newer, as Lockstep needs it.")


def _built_with() -> dict[str, str]:
    import torch

    found = {}
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
