"""What torch's modules for accelerators have and have not: each is used for what it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import devices
from lockstep.devices import Memory
from lockstep.training.in_flight import HostCopy

XPU, MPS, CPU = torch.device("xpu", 1), torch.device("mps"), torch.device("cpu")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What stands for torch.xpu, with nothing in it."""
    empty = SimpleNamespace()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: empty)
    for function in (devices._has_streams, devices._pins_memory):
        function.cache_clear()
    return empty


@pytest.fixture(autouse=True)
def forgets() -> Any:
    yield
    for function in (devices._has_streams, devices._pins_memory):
        function.cache_clear()


def test_what_torch_knows() -> None:
    assert [devices.is_known(kind) for kind in ("cuda", "xpu", "mps")] == [True] * 3
    assert [devices.is_known(kind) for kind in ("cpu", "meta", "cuda:1", "gpu", "", "vulkan")] == [
        False
    ] * 6
    assert devices.known_names() == ["cuda", "mps", "xpu"]


def test_streams_are_used_where_a_module_has_all_of_them(module: SimpleNamespace) -> None:
    assert not devices.has_streams(XPU)
    devices._has_streams.cache_clear()
    for name in ("Event", "Stream", "current_stream", "stream"):
        setattr(module, name, None)
    assert devices.has_streams(XPU) and not devices.has_streams(CPU)


def test_memory_that_cannot_be_page_locked_is_done_without(
    module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no allocator")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    assert (
        not devices.pins_memory(XPU)
        and not devices.pins_memory(MPS)
        and not devices.pins_memory(CPU)
    )
    devices._pins_memory.cache_clear()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    assert devices.pins_memory(XPU) and not devices.pins_memory(MPS)


def test_without_streams_numbers_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_streams", lambda device: False)
    assert HostCopy(torch.tensor([1.0, 2.0])).read() == [1.0, 2.0]


def test_memory_is_what_a_module_says(
    module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace())
    assert (
        devices.memory_of(XPU) is None
        and devices.peak_memory(XPU) is None
        and devices.memory_of(CPU) is None
    )
    devices.reset_peak_memory(XPU)
    module.mem_get_info = lambda device: (3, 8)
    module.memory_reserved = lambda device: 4
    assert devices.memory_of(XPU) == Memory(4, 3, 8)

    def fail(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("the device is lost")

    module.mem_get_info = fail
    assert devices.memory_of(XPU) is None
    monkeypatch.setattr(
        torch, "accelerator", SimpleNamespace(max_memory_allocated=lambda device: 7)
    )  # a function that newer versions of torch have
    assert devices.peak_memory(XPU) == 7


def test_a_generator_is_seeded_where_it_is(module: SimpleNamespace) -> None:
    seeded: list[tuple[str, int]] = []
    module.manual_seed = lambda key: seeded.append(("current", key))
    devices.seed(XPU, 5)
    assert devices.generator_of(XPU) is None
    module.init = lambda: None
    module.default_generators = [
        SimpleNamespace(
            manual_seed=lambda key, number=number: seeded.append((f"number {number}", key))
        )
        for number in range(2)
    ]
    devices.seed(XPU, 6)
    devices.seed(CPU, 7)
    assert seeded == [("current", 5), ("number 1", 6)]
    assert devices.generator_of(XPU) is module.default_generators[1]


def test_float64_and_bf16_are_used_where_they_are(
    module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=False)
    )
    assert [devices.has_float64(device) for device in (CPU, XPU, MPS)] == [True, False, False]
    assert devices.supports_bf16(XPU) and devices.supports_bf16(CPU)
    module.is_bf16_supported = lambda: False
    assert not devices.supports_bf16(XPU)


def test_backends_are_those_that_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.backend_of(torch.device("cuda")) == "nccl"
    assert devices.backend_of(CPU) is None and devices.backend_of(MPS) is None
    registered = {"npu": "hccl"}
    monkeypatch.setattr(torch.distributed.Backend, "default_device_backend_map", registered)
    assert devices.backend_of(SimpleNamespace(type="npu")) == "hccl"  # type: ignore[arg-type]
    assert devices.backend_of(XPU) is None
    assert devices.bound_to(XPU, "cpu:shm,xpu:xccl") is None
    assert devices.bound_to(torch.device("cuda", 1), "cpu:shm,cuda:nccl") == torch.device("cuda", 1)


def test_an_apple_gpu_is_waited_for_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    devices.synchronize(MPS)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: MPS)
    devices.synchronize_used()
    devices.synchronize(CPU)
    assert waited == ["mps", "mps"]
