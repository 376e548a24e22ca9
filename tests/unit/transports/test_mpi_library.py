"""The backend "mpi4py" says what to do where there is no mpi4py, or an MPI that cannot serve
threads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from lockstep.errors import ConfigError
from lockstep.transports.mpi.library import load_mpi


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    load_mpi.cache_clear()
    yield
    load_mpi.cache_clear()


def mpi4py(monkeypatch: pytest.MonkeyPatch, **names: object) -> None:
    """Replace mpi4py by a module with these names only."""
    module = ModuleType("mpi4py")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "mpi4py", module)


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        ConfigError, match=r"cannot be imported .*pip install 'lockstep-train\[mpi\]'"
    ):
        load_mpi()


def test_without_an_mpi_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py's own error then is a RuntimeError."""

    class NoLibrary(ModuleType):
        def __getattr__(self, name: str) -> object:
            if name == "MPI":
                raise RuntimeError("cannot load MPI library")
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "mpi4py", NoLibrary("mpi4py"))
    with pytest.raises(
        ConfigError, match=r"cannot load MPI library.*pip install 'lockstep-train\[mpi\]'"
    ):
        load_mpi()


@pytest.mark.parametrize(
    ("level", "name"), [(0, "single"), (1, "funneled"), (2, "serialized"), (3, "")]
)
def test_the_level_of_threads(monkeypatch: pytest.MonkeyPatch, level: int, name: str) -> None:
    levels = {
        "THREAD_SINGLE": 0,
        "THREAD_FUNNELED": 1,
        "THREAD_SERIALIZED": 2,
        "THREAD_MULTIPLE": 3,
    }
    mpi = SimpleNamespace(**levels, Query_thread=lambda: level)
    mpi4py(monkeypatch, MPI=mpi)
    if not name:
        assert load_mpi() is mpi
        return
    with pytest.raises(ConfigError, match=f"thread_level: expected multiple.*got '{name}'"):
        load_mpi()
