"""The order between data and its announcement: nothing to do on x86, two cycles of a lock everywhere else."""

from __future__ import annotations

import importlib.util
import platform
from types import ModuleType, TracebackType

import pytest

from lockstep.transports.shm import fence as real


class CountingLock:
    """Notes when it is taken and given back."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __enter__(self) -> None:
        self.events.append("take")

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.events.append("give")


def module_for(machine: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy of the module as it is on such a machine."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    spec = importlib.util.spec_from_file_location("fence_copy", real.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "armv8l", "ppc64le", "riscv64", "s390x", ""])
def test_elsewhere_a_lock_is_taken_and_given_back_twice(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_for(machine, monkeypatch)
    lock = CountingLock()
    monkeypatch.setattr(module, "_lock", lock)
    module.fence()
    assert lock.events == ["take", "give"] * 2


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "i686"])
def test_on_x86_nothing_is_done(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_for(machine, monkeypatch)
    lock = CountingLock()
    monkeypatch.setattr(module, "_lock", lock)
    module.fence()
    assert lock.events == []
