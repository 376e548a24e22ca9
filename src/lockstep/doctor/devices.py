"""The devices that torch can compute on."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from .machine import size
from .report import Problem, Section

__all__ = ["examine_devices"]

_DRIVER = Path("/proc/driver/nvidia/version")


def examine_devices() -> Section:
    """Every GPU with its memory and load, and the driver."""
    import torch

    section = Section("devices")
    driver = _driver()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        text, problem = _gpu(torch, index)
        section.add(f"cuda:{index}", text, problem)
    if driver:
        section.add("driver", driver, None if count else _unused(torch, driver))
    if torch.backends.mps.is_available():
        section.add("mps", "Apple GPU, for one worker")
    if not section.facts:
        section.add("GPU", "none that torch can use; workers compute on the CPU")
    return section


def _gpu(torch: Any, index: int) -> tuple[str, Problem | None]:
    properties = torch.cuda.get_device_properties(index)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        fix = "Look for other programs on it with nvidia-smi, or leave it out with CUDA_VISIBLE_DEVICES."
        return f"{properties.name}, {reason}", Problem(f"cuda:{index} cannot be used: {reason}", fix)
    load = ""
    with suppress(Exception):  # it needs NVIDIA's own Python package
        load = f", {torch.cuda.utilization(index)} % busy"
    used = f"{size(total - free)} used of {size(total)}"
    return f"{properties.name}, {used}{load}, capability {properties.major}.{properties.minor}", None


def _driver() -> str:
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", _DRIVER.read_text())
    except OSError:
        return ""
    return f"NVIDIA {found[1]}" if found else "NVIDIA"


def _unused(torch: Any, driver: str) -> Problem:
    if torch.version.cuda is None:
        fix = "Install a build of torch with CUDA: https://pytorch.org/get-started/locally/"
        return Problem(f"there is a GPU ({driver}), but torch {torch.__version__} is built without CUDA", fix)
    fix = "Check CUDA_VISIBLE_DEVICES, that nvidia-smi works, and that the driver is new enough for this CUDA."
    return Problem(f"there is a GPU ({driver}), but torch (CUDA {torch.version.cuda}) cannot use it", fix)
