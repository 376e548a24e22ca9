"""Reads lists of devices, in which one device may stand several times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ConfigError

__all__ = ["Device", "all_devices", "as_device", "as_devices"]

Device = torch.device | str | int
"""A device, its name, or the number of an accelerator."""


def as_devices(devices: Iterable[Device], argument: str = "devices") -> list[torch.device]:
    """Each of `devices` as a torch.device with its index; "cpu:1" and the like are the CPU.

    Args:
        devices: at least one; the same may come several times, e.g. ``["cpu", "cpu"]``, ``[0, 1]``.
        argument: how errors call the list.

    Raises:
        ConfigError: when it is no list, is empty, or names a device that is not there.
    """
    if isinstance(devices, (str, torch.device, int)) or not isinstance(devices, Iterable):
        raise ConfigError(argument, 'a list of devices, e.g. ["cpu", "cpu"]', devices)
    found = [as_device(device, argument) for device in devices]
    if not found:
        raise ConfigError(argument, "at least one device", found="an empty list")
    return found


def as_device(device: Device, argument: str = "device") -> torch.device:
    """`device` as a torch.device with its index.

    Raises:
        ConfigError: when it is none, or not there.
    """
    kind = _accelerator()
    if isinstance(device, int) and not isinstance(device, bool):
        if kind is None:
            raise ConfigError(argument, 'devices by name, e.g. ["cpu", "cpu"]', device, "No accelerator is there.")
        device = torch.device(kind, device)
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(argument, 'a device, e.g. "cpu" or "cuda:0"', device, reason) from None
    if found.type in ("cpu", "meta"):
        return torch.device(found.type)
    count = torch.accelerator.device_count() if found.type == kind else 0
    index = torch.accelerator.current_device_index() if found.index is None and count else found.index or 0
    if index >= count:
        there = ", ".join(["cpu", *(f"{kind}:{number}" for number in range(count))])
        raise ConfigError(argument, f"devices that are there ({there})", got=str(found))
    return torch.device(found.type, index)


def all_devices() -> list[torch.device]:
    """Every accelerator, or the CPU once where there is none."""
    kind = _accelerator()
    if kind is None:
        return [torch.device("cpu")]
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def _accelerator() -> str | None:
    found: Any = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else str(found.type)
