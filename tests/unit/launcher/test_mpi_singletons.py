"""A program that uses MPI in workers that MPI has not started is refused, one that only imports it
is not.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.launcher.worker_process import mpi_singletons
from lockstep.launcher.worker_process.mpi_singletons import _SingletonModule, _WatchingLoader


class Loader:
    def __init__(self, size: int) -> None:
        self.size = size

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.COMM_WORLD, module.COMM_SELF = SimpleNamespace(Get_size=lambda: self.size), "self"


def module_of(size: int, monkeypatch: pytest.MonkeyPatch, workers: int = 2) -> Any:
    monkeypatch.setattr(
        mpi_singletons, "find_world", lambda: SimpleNamespace(world_size=workers, rank=0)
    )
    monkeypatch.setattr(mpi_singletons, "records_dir", lambda: None)
    module: Any = type(mpi_singletons)("mpi4py.MPI")
    _WatchingLoader(Loader(size)).exec_module(module)
    return module


def access(module: Any, file: str) -> Any:
    names: dict[str, Any] = {"module": module}
    exec(compile("found = module.COMM_WORLD", file, "exec"), names)
    return names["found"]


def test_the_program_is_told_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(1, monkeypatch)
    assert module.COMM_SELF == "self"
    with pytest.raises(
        LockstepError, match=r"one rank in each of the 2 workers\. `mpiexec -n 2 python "
    ):
        access(module, "/home/me/train.py")


def test_a_library_may_use_it_which_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = module_of(1, monkeypatch)
    for _ in range(2):
        assert access(module, "/usr/lib/python3/site-packages/h5py/x.py").Get_size() == 1
    assert capsys.readouterr().err.count("uses mpi4py: MPI.COMM_WORLD has one rank") == 1
    assert access(module, mpi_singletons.__file__).Get_size() == 1  # Lockstep's own transport
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size, workers", [(2, 2), (1, 1)])
def test_a_job_of_mpi_or_of_one_worker_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, size: int, workers: int
) -> None:
    module = module_of(size, monkeypatch, workers)
    assert isinstance(module, _SingletonModule) == (size == 1)
    assert access(module, "/home/me/train.py").Get_size() == size
