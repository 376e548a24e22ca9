"""The memory fence between data and its counter: nothing on x86, two cycles of a lock everywhere
else.
"""

from __future__ import annotations

import importlib.util
import platform
from types import ModuleType, TracebackType

import pytest

from lockstep.transports.shm import rank_states as real


class CountingLock:
    """Records when it is acquired and released."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __enter__(self) -> None:
        self.events.append("acquire")

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.events.append("release")


def module_for(processor: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy of the module as it is on such a processor."""
    monkeypatch.setattr(platform, "machine", lambda: processor)
    spec = importlib.util.spec_from_file_location(
        "lockstep.transports.shm.fence_copy", real.__file__
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "processor", ["aarch64", "arm64", "armv8l", "ppc64le", "riscv64", "s390x", ""]
)
def test_elsewhere_a_lock_is_acquired_and_released_twice(
    processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_for(processor, monkeypatch)
    lock = CountingLock()
    monkeypatch.setattr(module, "_lock", lock)
    module.memory_fence()
    assert lock.events == ["acquire", "release"] * 2


@pytest.mark.parametrize("processor", ["x86_64", "AMD64", "i686"])
def test_on_x86_nothing_is_done(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_for(processor, monkeypatch)
    lock = CountingLock()
    monkeypatch.setattr(module, "_lock", lock)
    module.memory_fence()
    assert lock.events == []
