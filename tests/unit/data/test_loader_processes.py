"""Loader processes: they live from epoch to epoch, serve one caller at a time, and leave nothing
behind.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info
from torch.utils.data._utils import worker

from lockstep.communicator import Communicator
from lockstep.data import fetching
from lockstep.data.device_copies import pinned, to_device
from lockstep.data.fetching import Fetcher, Samples
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError, DataError
from lockstep.topology import World

ALONE = Communicator.at(World(), torch.device("cpu"))


class Who(Dataset[int]):
    """Every sample is the number of the process that fetched it."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def _loader_processes() -> list[multiprocessing.process.BaseProcess]:
    """This process's children but for the pool's workers, which other tests may have started."""
    return [child for child in multiprocessing.active_children() if child.name != "pool worker"]


def pids(loader: Loader, epoch: int) -> set[int]:
    return {pid for batch in loader.epoch(epoch) for pid in batch.data.tolist()}


def test_the_same_processes_serve_every_epoch() -> None:
    loader = Loader(Who(), 4, num_workers=2, comm=ALONE)
    first = pids(loader, 0)
    assert len(first) == 2 and os.getpid() not in first
    assert pids(loader, 1) == first
    loader.close()


def test_an_epoch_that_was_left_in_the_middle_leaves_nothing_to_the_next() -> None:
    dataset = TensorDataset(torch.arange(24))
    loader = Loader(dataset, 4, num_workers=2, comm=ALONE)
    left, following = loader.epoch(0), loader.epoch(1)
    next(left)
    found = [next(following)]
    with pytest.raises(
        ConfigError, match=r"one epoch at a time .* before the last batch of epoch 0"
    ):
        next(left)
    found += following
    expected = Loader(dataset, 4, comm=ALONE).epoch(1)
    assert [batch.data[0].tolist() for batch in found] == [
        batch.data[0].tolist() for batch in expected
    ]
    loader.close()


def test_without_processes_epochs_do_not_disturb_each_other() -> None:
    loader = Loader(TensorDataset(torch.arange(24)), 4, comm=ALONE)
    pairs = list(zip(loader.epoch(0), loader.epoch(1), strict=True))
    for epoch in (0, 1):
        assert (
            torch.cat([pair[epoch].indices for pair in pairs]).tolist()
            == loader.order(epoch).tolist()
        )


def test_the_position_is_that_of_the_epoch_last_iterated() -> None:
    loader = Loader(TensorDataset(torch.arange(24)), 4, comm=ALONE)
    outer, inner = loader.epoch(2), loader.epoch(0)
    next(outer), next(inner), next(inner)
    assert loader.position == (0, 2)
    next(outer)
    assert loader.position == (2, 2)


def test_close_ends_the_processes_though_an_epoch_is_held() -> None:
    loader = Loader(Who(), 4, num_workers=2, comm=ALONE)
    held = loader.epoch(0)
    next(held)
    assert len(_loader_processes()) == 2
    loader.close()
    assert _loader_processes() == []
    with pytest.raises(ConfigError, match="or close"):
        next(held)
    assert os.getpid() not in pids(loader, 0)  # and can be used again
    loader.close()
    loader.close()


def test_a_loader_that_is_collected_as_a_part_of_a_cycle_ends_its_processes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python ends the queues of a cycle first; the processes then looked after 5 s each."""
    monkeypatch.setattr(worker, "MP_STATUS_CHECK_INTERVAL", 1000.0)  # they look for no end
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 20.0)
    loader = Loader(Who(), 4, num_workers=2, comm=ALONE)
    cycle: list[object] = [loader]
    cycle.append(cycle)
    pids(loader, 0)
    processes = _loader_processes()
    assert len(processes) == 2
    del loader, cycle
    gc.collect()
    assert [process.exitcode for process in processes] == [0, 0]


class Damaged(Who):
    def __getitem__(self, index: int) -> int:
        raise RuntimeError("damaged")


def test_close_ends_the_processes_though_an_error_is_held() -> None:
    loader = Loader(Damaged(), 4, num_workers=1, comm=ALONE)
    with pytest.raises(DataError, match="damaged") as held:
        list(loader.epoch(0))
    loader.close()
    assert _loader_processes() == []
    assert held.traceback


def test_ctrl_c_is_left_to_the_parent() -> None:
    loader = Loader(Who(), 4, num_workers=2, comm=ALONE)
    epoch = loader.epoch(0)
    next(epoch), next(epoch)  # one of each process: both have begun
    for process in _loader_processes():
        os.kill(process.pid or 0, signal.SIGINT)
    assert len(list(epoch)) == 4
    loader.close()


def test_what_processes_are_started_with_can_be_sent_to_them() -> None:
    init = partial(fetching._prepare_process, new_group=True)
    for part in (init, Samples(TensorDataset(torch.arange(3)), None)):
        pickle.dumps(part)


def test_a_signal_to_the_process_group_is_left_to_the_parent() -> None:
    loader = Loader(Who(), 4, num_workers=1, comm=ALONE)
    for _ in loader.epoch(0):
        (process,) = _loader_processes()
        assert os.getpgid(process.pid or 0) == process.pid != os.getpgrp()
    loader.close()


def test_below_a_launcher_they_stay_in_the_workers_group(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SimpleNamespace(pid=os.getpid())
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: launcher)
    loader = Loader(Who(), 4, num_workers=1, comm=ALONE)
    for _ in loader.epoch(0):
        (process,) = _loader_processes()
        assert os.getpgid(process.pid or 0) == os.getpgrp()
    loader.close()


ORPHANED = """
import multiprocessing, os, signal, sys, torch
multiprocessing.set_start_method(sys.argv[1])
from lockstep.communicator import Communicator
from lockstep.data.loader import Loader
from lockstep.topology import World

loader = Loader(torch.arange(24), 4, num_workers=1, comm=Communicator.at(World(), torch.device("cpu")))
for _ in loader.epoch(0):
    print(multiprocessing.active_children()[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_they_end_though_the_parent_could_not_end_them(method: str) -> None:
    program = subprocess.run(
        [sys.executable, "-c", ORPHANED, method], stdout=subprocess.PIPE, text=True, check=False
    )
    assert program.returncode == -signal.SIGKILL
    # They look for their parent every few seconds; reading all of the output has waited for the
    # last one that held it.
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(program.stdout)).status() == psutil.STATUS_ZOMBIE


def outside_of_modules(source: str) -> dict[str, Any]:
    """What `source` defines in a main module that no other process can import."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    return names


DEFINITIONS = """
class Numbers:
    def __init__(self, numbers):
        self.numbers = numbers
    def __len__(self):
        return len(self.numbers)
    def __getitem__(self, index):
        return self.numbers[index]

def pairs(numbers):
    return [int(number) for number in numbers]
"""


@pytest.mark.parametrize("of_main", ["Numbers", "pairs"])
def test_a_class_or_function_of_the_main_module_is_sent_by_value(
    of_main: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[torch.Tensor] = []

    def share(tensor: torch.Tensor) -> tuple[Any, ...]:
        shared.append(tensor)
        return torch.tensor, (tensor.tolist(),)

    # torch's reducer would open a descriptor for a process that does not come
    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.Tensor, share)  # type: ignore[attr-defined]
    found = outside_of_modules(DEFINITIONS)
    numbers = torch.arange(6)
    dataset = found["Numbers"](numbers) if of_main == "Numbers" else TensorDataset(numbers)
    batches = Samples(dataset, found["pairs"] if of_main == "pairs" else None)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        ForkingPickler.dumps(batches.dataset if of_main == "Numbers" else batches.collate)
    sent = ForkingPickler.loads(ForkingPickler.dumps(batches))
    assert len(sent.dataset) == 6
    assert sent.by_sample and sent.in_tensors == batches.in_tensors
    inside = sent.dataset.numbers if of_main == "Numbers" else sent.dataset.tensors[0]
    assert torch.equal(inside, numbers)
    assert any(tensor is numbers for tensor in shared)


def test_what_can_be_found_by_name_is_sent_by_name() -> None:
    sent = ForkingPickler.loads(ForkingPickler.dumps(Samples(Who(), None)))
    assert type(sent.dataset) is Who
    assert b"cloudpickle" not in bytes(ForkingPickler.dumps(Samples(Who(), None)))


@pytest.mark.parametrize(("processes", "prefetch"), [(1, 1), (2, 2), (2, 5), (3, 4), (4, 8)])
def test_no_more_steps_are_in_flight_than_allowed(
    monkeypatch: pytest.MonkeyPatch, processes: int, prefetch: int
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(fetching, "DataLoader", lambda *_, **options: given.update(options) or [])
    list(Fetcher(Who(), None, processes, prefetch, pin=False).fetch([]))
    # torch's own bound is so many for each process
    assert given["num_workers"] == processes
    assert processes <= processes * given["prefetch_factor"] <= prefetch


def test_by_default_two_are_in_flight_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        fetching, "DataLoader", lambda *_, **options: given.update(options) or iter([None] * 6)
    )
    list(Loader(Who(), 4, num_workers=3, comm=ALONE).epoch(0))
    assert given["prefetch_factor"] == 2


def test_only_dense_memory_of_the_host_is_pinned() -> None:
    there, sparse = torch.empty(2, device="meta"), torch.eye(2).to_sparse()
    for tensor in (there, sparse):
        with pytest.raises(RuntimeError):
            tensor.pin_memory()
        assert pinned(tensor) is tensor


class Recorded:
    """Stands for a CUDA stream or event."""

    def __init__(self, *_: object) -> None:
        pass

    def record(self, stream: Recorded) -> None:
        pass

    def wait_event(self, event: Recorded) -> None:
        pass


def test_one_batch_is_copied_ahead_of_the_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in (("Stream", Recorded), ("Event", Recorded), ("current_stream", Recorded)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    begun: list[int] = []
    source = (begun.append(number) or number for number in range(4))
    arriving = to_device(source, torch.device("cuda"))
    assert [(data, len(begun)) for data in arriving] == [(0, 2), (1, 3), (2, 4), (3, 4)]


class Dies(Dataset[Any]):
    """A data set whose sample 17 ends the loader process that loads it."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self.end = end

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 17 and get_worker_info() is not None:
            self.end()
        return torch.zeros(1)


# torch's handler of SIGCHLD raises an error wherever this process is. Where that is in a callback of
# the garbage collector, as hypothesis has one, the error is lost there, and the loader finds out
# itself a little later.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.leaks("what a process was sending when it was killed stays open")
@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL .*want of memory"),
        (lambda: os._exit(3), "ended with exit code 3 .*samples.$"),
    ],
)
def test_a_process_that_dies_is_named(end: Callable[[], Any], how: str) -> None:
    message = rf"^loader process [01] of 2 \(PID \d+\) {how}"
    with (
        Loader(Dies(end), 8, num_workers=2, comm=ALONE) as loader,
        pytest.raises(DataError, match=message),
    ):
        list(loader)


CRASHES = """
import ctypes, torch, lockstep
class Crashes(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return ctypes.string_at(0)
list(lockstep.Loader(Crashes(), 4, num_workers=1))
"""


def test_a_process_that_crashes_says_where(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CRASHES)
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert "was killed by SIGSEGV while it loaded samples" in ended.stderr
    assert "Fatal Python error: Segmentation fault" in ended.stderr
    assert 'program.py", line 7 in __getitem__' in ended.stderr
