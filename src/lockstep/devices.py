"""Devices beside the CPU: which there are, their streams and events, memory, random numbers and
backends.

Torch has a module for each type of accelerator, such as `torch.cuda`, `torch.xpu` or that of a
package for another one, and they have the same functions. What a module does not have is done
without: a device without streams computes as it is told to, one without page-locked memory is
copied to in the usual way. What CUDA or MPS alone has is named here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

CUBLAS_WORKSPACE = ":4096:8"
"""The value of CUBLAS_WORKSPACE_CONFIG with which cuBLAS sums in a fixed order: a workspace of
fixed size.
"""

_HOST = ("cpu", "meta")


def _module_of(kind: str) -> Any:
    """Return torch's module for a type of device."""
    return torch.get_device_module(kind)


def accelerator() -> str | None:
    """Return the type of the accelerator that torch can use on this host, such as "cuda"; None
    without one.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def known_names() -> list[str]:
    """Return the types of accelerators that torch knows in this process: its own, and that of a
    package, if any.
    """
    of_package = torch._C._get_privateuse1_backend_name()
    return ["cuda", "mps", "xpu", *([] if of_package == "privateuseone" else [of_package])]


def is_known(kind: str) -> bool:
    """Return whether torch has a module for accelerators of this type."""
    if kind in _HOST or ":" in kind:
        return False
    try:
        torch.device(kind)
        return hasattr(_module_of(kind), "is_available")
    except RuntimeError:
        return False


def count(kind: str) -> int:
    """Return the number of accelerators of a type that this process can use."""
    module = _module_of(kind)
    return int(module.device_count()) if module.is_available() else 0


def use(device: torch.device) -> None:
    """Make `device` the current one of the calling thread."""
    _module_of(device.type).set_device(device.index)


def current(kind: str) -> torch.device:
    """Return the current device of a type."""
    return torch.device(kind, _module_of(kind).current_device())


def name_of(device: torch.device) -> str:
    """Return what its maker calls the device, where torch knows it; else its type."""
    name = (
        None if device.type in _HOST else getattr(_module_of(device.type), "get_device_name", None)
    )
    return device.type if name is None else str(name(device))


def uuid_of(device: torch.device) -> str | None:
    """Return what tells the device from all others, where torch knows it."""
    properties = getattr(_module_of(device.type), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def versions_of(device: torch.device) -> dict[str, Any]:
    """Return what the bits of results on an accelerator depend on besides torch: its model, and its
    libraries.
    """
    if device.type != "cuda":
        return {"device name": name_of(device)}
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {"GPU": name_of(device), "CUDA": torch.version.cuda, "cuDNN": cudnn}


def has_float64(device: torch.device) -> bool:
    """Return whether the device computes in float64, as all do but those of Apple and some of
    Intel's.
    """
    if device.type == "xpu":
        return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", True))
    return device.type != "mps"


def supports_bf16(device: torch.device) -> bool:
    """Return whether the device computes in bfloat16; True where torch does not say so."""
    supported = (
        None
        if device.type in _HOST
        else getattr(_module_of(device.type), "is_bf16_supported", None)
    )
    return True if supported is None else bool(supported())


# The types between which torch moves the values of a parameter; to others, `nn.Module.to` makes new
# parameters.
_SAME_PARAMETERS = ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")


@contextmanager
def in_which_parameters_stay(device: torch.device) -> Iterator[None]:
    """Within a `with` block, modules that are moved to the device keep their parameters: an
    optimizer has them.
    """
    if device.type in _SAME_PARAMETERS:
        yield
        return
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@cache
def _has_streams(kind: str) -> bool:
    functions = ("Event", "Stream", "current_stream", "stream")
    return kind not in _HOST and all(hasattr(_module_of(kind), name) for name in functions)


def has_streams(device: torch.device) -> bool:
    """Return whether work is queued on the device, in streams, between which events order it. MPS
    has none.
    """
    return _has_streams(device.type)


@cache
def _pins_memory(kind: str) -> bool:
    if kind in (*_HOST, "mps"):
        return False
    if kind == "cuda":
        return True
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:  # the package for this device has no such memory
        return False
    return True


def pins_memory(device: torch.device) -> bool:
    """Return whether copies from page-locked memory to the device run beside its computation."""
    return _pins_memory(device.type)


def copies_in_background(device: torch.device) -> bool:
    """Return whether copies between the device and the host run while the host and the device go
    on.
    """
    return has_streams(device) and pins_memory(device)


def record_event(device: torch.device, stream: Any = None) -> Any:
    """Return an event that is complete when the device has done what is queued so far.

    Args:
        device: it has streams.
        stream: in which the event is recorded; the current one of the device when None.
    """
    module = _module_of(device.type)
    event = module.Event()
    event.record(module.current_stream(device) if stream is None else stream)
    return event


def new_stream(device: torch.device) -> Any:
    """Return a new stream of a device that has streams."""
    return _module_of(device.type).Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device that has streams."""
    return _module_of(device.type).current_stream(device)


@contextmanager
def in_stream(device: torch.device, stream: Any) -> Iterator[None]:
    """Queue work in a stream of the device within a `with` block."""
    with _module_of(device.type).stream(stream):
        yield


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what is queued; return at once for the CPU."""
    if device.type == "mps":
        torch.mps.synchronize()  # of which there is one
    elif device.type not in _HOST:
        _module_of(device.type).synchronize(device)


def synchronize_used() -> None:
    """Wait for the accelerators that this process has used; a call to another would initialise it,
    at some 0.5 GB.
    """
    kind = accelerator()
    if kind is None:
        return
    module = _module_of(kind)
    if not getattr(module, "is_initialized", bool)() and kind != "mps":
        return
    reserved = getattr(module, "memory_reserved", None)
    for index in range(module.device_count()):
        if reserved is None or reserved(index):
            module.synchronize(*(() if kind == "mps" else (index,)))


class Memory(NamedTuple):
    """The memory of a device, in bytes: what this process has of it, what is free, and all of
    it.
    """

    used: int
    free: int
    total: int


def _memory_function(device: torch.device, name: str, of_accelerator: str) -> Any:
    """Return the function of the device's module, or else the one of `torch.accelerator`, which
    newer versions have.
    """
    function = None if device.type in _HOST else getattr(_module_of(device.type), name, None)
    return getattr(torch.accelerator, of_accelerator, None) if function is None else function


def memory_of(device: torch.device) -> Memory | None:
    """Return the memory of a device; None for the CPU, where torch does not know it, and for one
    that has failed.
    """
    available = _memory_function(device, "mem_get_info", "get_memory_info")
    reserved = _memory_function(device, "memory_reserved", "memory_reserved")
    if device.type in _HOST or available is None or reserved is None:
        return None
    try:
        free, total = available(device)
        return Memory(reserved(device), free, total)
    except RuntimeError:
        return None


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that tensors had in use since `reset_peak_memory`; None where torch
    does not know it.
    """
    function = _memory_function(device, "max_memory_allocated", "max_memory_allocated")
    try:
        return None if device.type in _HOST or function is None else int(function(device))
    except RuntimeError:
        return None


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure `peak_memory` anew."""
    if peak_memory(device) is not None:
        _memory_function(device, "reset_peak_memory_stats", "reset_peak_memory_stats")(device)


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return the global generator of an accelerator; None for the CPU, and where torch shows
    none.
    """
    if device.type in _HOST:
        return None
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = _module_of(device.type)
    generators = getattr(module, "default_generators", ())
    index = module.current_device() if device.index is None else device.index
    return generators[index] if index < len(generators) else None


def seed(device: torch.device, key: int) -> None:
    """Seed the global generator of an accelerator; nothing for the CPU."""
    if device.type in _HOST:
        return
    module = _module_of(device.type)
    if device.index is None or not hasattr(module, "default_generators"):
        module.manual_seed(key)  # that of the current device
        return
    module.init()
    module.default_generators[device.index].manual_seed(key)


def backend_of(device: torch.device) -> str | None:
    """Return the backend of torch.distributed that is registered for tensors on the device; None
    without one.

    None for the CPU, whose backend is chosen, and for MPS: torch names Gloo there, which carries no
    such tensors.
    """
    if device.type in (*_HOST, "mps"):
        return None
    return dist.Backend.default_device_backend_map.get(device.type)


def bound_to(device: torch.device, backends: str) -> torch.device | None:
    """Return the device to which a process group is bound, so that NCCL forms its communicators at
    once.

    Args:
        device: of this worker.
        backends: of the group, as torch.distributed is given them.
    """
    return device if "nccl" in backends else None
