"""Workers find each other, and what one does alone reaches all."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.communicator import Communicator, initialization, pick_device
from lockstep.communicator.initialization import claim_gpu
from lockstep.errors import ConfigError
from lockstep.topology import World
from support.pool import Pool


def place() -> tuple[int, int, str, bool]:
    comm = lockstep.init("cpu")
    assert lockstep.init() is comm
    assert comm.group is dist.group.WORLD
    assert comm.world == World(comm.rank, 3, comm.rank, 3, 0, 1, "torchrun", "cpu")
    return comm.rank, comm.size, comm.world.source, comm.device == torch.device("cpu")


@pytest.mark.parametrize("init", [True, False], ids=["group is there", "group is made"])
def test_a_group_of_the_programs_is_used_and_else_one_is_made(pool: Pool, init: bool) -> None:
    assert pool.run(place, workers=3, init=init) == [
        (rank, 3, "torchrun", True) for rank in range(3)
    ]


def test_alone_nothing_is_set_up() -> None:
    comm = lockstep.init("cpu")
    assert (comm.rank, comm.size, comm.group, dist.is_initialized()) == (0, 1, None, False)
    tensor = torch.ones(2)
    assert comm.allreduce(tensor) is tensor
    assert comm.broadcast(tensor) is tensor
    assert comm.broadcast_object("x") == "x"
    assert comm.allgather_object("x") == ["x"]
    assert comm.on_rank0(lambda: 3) == 3
    comm.barrier()
    with comm.rank0_first():
        pass


def test_another_device_the_second_time_is_an_error() -> None:
    lockstep.init("cpu")
    with pytest.raises(ConfigError, match="cpu, as in the first call"):
        lockstep.init("mps")


def again() -> list[int]:
    sizes = [lockstep.init("cpu").size]
    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return [*sizes, lockstep.init("cpu").size]


def test_a_new_group_is_noticed(pool: Pool) -> None:
    assert pool.run(again, workers=2) == [[2, 1], [2, 1]]


def verbs() -> tuple[list[float], list[float], Any, Any]:
    comm = lockstep.init("cpu")
    total = comm.allreduce(torch.tensor([1.0, comm.rank]))
    wait = comm.iallreduce(torch.tensor([2.0])).wait
    sent = comm.broadcast(torch.full((2,), float(comm.rank)), root=2)
    assert wait().item() == 6
    comm.barrier()
    named = comm.broadcast_object({"rank": comm.rank}, root=1)
    return total.tolist(), sent.tolist(), named, comm.allgather_object((comm.rank, "x" * comm.rank))


def test_verbs(pool: Pool) -> None:
    everywhere = ([3.0, 3.0], [2.0, 2.0], {"rank": 1}, [(0, ""), (1, "x"), (2, "xx")])
    assert pool.run(verbs, workers=3) == [everywhere] * 3


def alone_on_rank0(folder: Path) -> tuple[str, str]:
    comm = lockstep.init("cpu")
    made = comm.on_rank0(lambda: f"made by {comm.rank}")
    with pytest.raises(FileNotFoundError) as caught:
        comm.on_rank0((folder / "no" / "such").mkdir)
    return made, str(caught.value)


def test_what_rank_0_gets_or_raises_reaches_all(pool: Pool, tmp_path: Path) -> None:
    (made, error), other = pool.run(alone_on_rank0, tmp_path, workers=2)
    assert (made, error) == other
    assert made == "made by 0"
    assert "no/such" in error


class TwoReasonsError(Exception):
    """Comes out of a pickle with an error of its own, like many exceptions with arguments of their
    own.
    """

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class ForgetfulError(Exception):
    """Comes out of a pickle with another text."""

    def __init__(self, text: str = "nothing") -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:
        return ForgetfulError, ()


@contextmanager
def importable(*classes: type) -> Iterator[None]:
    """Classes are pickled by where they can be imported from, which a function that was sent here
    has not.
    """
    sys.modules["of_this_test"] = module = ModuleType("of_this_test")
    for each in classes:
        each.__module__ = module.__name__
        setattr(module, each.__name__, each)
    try:
        yield
    finally:
        del sys.modules["of_this_test"]


def raise_on_rank0(kind: str) -> tuple[str, str]:
    def fail() -> Any:
        if kind == "lock":
            raise RuntimeError("held by", threading.Lock())
        if kind == "result":
            return threading.Lock()
        if kind == "exit":
            raise SystemExit("all done")
        if kind == "interrupt":
            raise KeyboardInterrupt
        raise TwoReasonsError("this", "that") if kind == "arguments" else ForgetfulError("lost")

    comm = lockstep.init("cpu")
    try:
        with importable(TwoReasonsError, ForgetfulError):
            comm.on_rank0(fail)
    except BaseException as error:
        # and the workers can still talk
        assert comm.allgather_object(comm.rank) == list(range(comm.size))
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("lock", "RuntimeError", "held by"),
        ("result", "TypeError", "cannot pickle '_thread.lock' object"),
        ("exit", "SystemExit", "all done"),
        ("interrupt", "KeyboardInterrupt", ""),
        ("arguments", "TwoReasonsError", "this and that"),
        ("forgetful", "ForgetfulError", "lost"),
    ],
)
def test_whatever_rank_0_raises_reaches_all(pool: Pool, kind: str, name: str, text: str) -> None:
    own, *others = pool.run(raise_on_rank0, kind, workers=3)
    assert own[0] == name and text in own[1]
    for theirs in others:
        # the same error, or where it cannot be sent, one that tells of it
        assert theirs == own or (
            theirs[0] == "WorkerError" and f"rank 0: {name}: " in theirs[1] and text in theirs[1]
        )
    assert kind == "result" or others[0][0] == "WorkerError"


def first(folder: Path) -> bool:
    comm = lockstep.init("cpu")
    with comm.rank0_first():
        was_there = (folder / "made").exists()
        if comm.rank == 0:
            (folder / "made").mkdir()
    return was_there


def test_rank_0_first(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(first, tmp_path, workers=3) == [False, True, True]


def first_fails(kind: str) -> tuple[str, str, bool]:
    """Rank 0 raises in the body; the others must not go on as if it had been run."""
    comm, ran = lockstep.init("cpu"), False
    try:
        with comm.rank0_first():
            ran = True
            if comm.rank == 0:
                raise (
                    KeyboardInterrupt
                    if kind == "interrupt"
                    else FileNotFoundError(2, "nothing there", "data")
                )
    except BaseException as error:
        # and the workers can still talk
        assert comm.allgather_object(comm.rank) == list(range(comm.size))
        return type(error).__name__, str(error), ran
    return "", "", ran


def test_what_rank_0_raises_first_reaches_all(pool: Pool) -> None:
    missing = "[Errno 2] nothing there: 'data'"
    assert pool.run(first_fails, "missing", workers=3) == [
        ("FileNotFoundError", missing, True),
        ("FileNotFoundError", missing, False),
        ("FileNotFoundError", missing, False),
    ]
    own, other = pool.run(first_fails, "interrupt", workers=2)
    assert own == ("KeyboardInterrupt", "", True)
    assert other == ("WorkerError", "rank 0: KeyboardInterrupt: ", False)


def second_fails() -> None:
    comm = lockstep.init("cpu")
    with pytest.raises(ZeroDivisionError) if comm.rank else nullcontext(), comm.rank0_first():
        if comm.rank:
            raise ZeroDivisionError
    assert comm.allgather_object(comm.rank) == [0, 1]


def test_an_error_of_another_rank_is_its_own(pool: Pool) -> None:
    pool.run(second_fails, workers=2)


def incomplete() -> str:
    with pytest.raises(ConfigError) as caught:
        lockstep.init("cpu")
    return str(caught.value)


def test_ranks_without_a_rendezvous(pool: Pool) -> None:
    (said,) = pool.run(incomplete, workers=1, init=False, env={"MASTER_PORT": None})
    assert "MASTER_ADDR and MASTER_PORT" in said


@pytest.mark.parametrize(
    ("device", "world", "gpus", "said"),
    [
        (
            "gpu",
            World(),
            0,
            "auto, cpu, cuda, mps, xpu or another accelerator that torch knows, got 'gpu'",
        ),
        (
            "cuda:1",
            World(),
            0,
            "takes the device of its local rank; for GPUs, CUDA_VISIBLE_DEVICES chooses",
        ),
        ("cuda", World(), 0, "no GPU that torch can use"),
        ("xpu", World(), 0, "no device of this type that torch can use"),
        ("mps", World(), 0, "mps needs an Apple GPU, and one worker"),
        (
            "auto",
            World(1, 2, 1, 2),
            1,
            "as it has GPUs \\(1\\), got 2 workers \\(this is rank 1\\)",
        ),
    ],
)
def test_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, device: str, world: World, gpus: int, said: str
) -> None:
    have_gpus(monkeypatch, gpus, [])
    with pytest.raises(ConfigError, match=said):
        pick_device(device, world)


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    have_gpus(monkeypatch, 4, chosen)
    assert pick_device("auto", World(3, 8, 3, 4)) == torch.device("cuda", 3)
    assert chosen == [3]


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int, chosen: list[int]) -> None:
    """Let this host have so many GPUs, and note the numbers of those that become the current
    one.
    """
    found = torch.device("cuda") if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)


def test_workers_share_gpus_if_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    have_gpus(monkeypatch, 2, chosen)
    for local_rank in range(4):
        device = pick_device("cuda", World(local_rank, 4, local_rank, 4), shares_gpus=True)
        assert device == torch.device("cuda", local_rank % 2)
    assert chosen == [0, 1, 0, 1]
    with pytest.raises(
        ConfigError, match=r"init_process_group\('gloo'\) before lockstep.init\('cuda'\)"
    ):
        pick_device("cuda", World(3, 4, 3, 4))


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_worker_that_sees_one_gpu_alone_takes_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A program around the worker has left it one, by the local rank."""
    chosen: list[int] = []
    have_gpus(monkeypatch, 1, chosen)
    monkeypatch.setenv(name, "3")
    assert pick_device("auto", World(3, 8, 3, 4)) == torch.device("cuda", 0)
    assert chosen == [0]
    monkeypatch.setenv(name, "0,1")  # of which the host has but one
    with pytest.raises(ConfigError, match="as it has GPUs"):
        pick_device("auto", World(3, 8, 3, 4))


def test_two_workers_that_see_the_same_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store, living, ended = (
        dist.HashStore(),
        os.getppid(),
        2**22 + 1,
    )  # no process has a number as high as the second
    claim_gpu(store, 0, "GPU-a")
    claim_gpu(store, 0, "GPU-a")  # the same process once more, in a group that is made again
    claim_gpu(store, 1, "GPU-b")
    monkeypatch.setattr(os, "getpid", lambda: ended)
    with pytest.raises(
        ConfigError, match=r"own for each worker on a node, got GPU GPU-a on rank 0 and on rank 5"
    ):
        claim_gpu(store, 5, "GPU-a")
    claim_gpu(store, 6, "GPU-c")
    monkeypatch.setattr(os, "getpid", lambda: living)
    claim_gpu(store, 7, "GPU-c")  # a worker in the place of one that has ended
    monkeypatch.setattr(os, "getpid", lambda: ended)
    with pytest.raises(ConfigError, match="on rank 7 and on rank 8"):
        claim_gpu(store, 8, "GPU-c")


def test_the_process_group_gets_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's communicators are formed at once then, on this device, where that is not left to the
    first tensor.
    """
    given: list[dict[str, Any]] = []
    uuids: list[str] = []
    have_gpus(monkeypatch, 1, [])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-a")
    )
    monkeypatch.setattr(
        initialization.dist, "init_process_group", lambda *_, **options: given.append(options)
    )
    monkeypatch.setattr(initialization.bootstrap, "open_store", lambda *_: None)
    monkeypatch.setattr(initialization.watchdog, "install", lambda *_: None)
    monkeypatch.setattr(initialization.atexit, "register", lambda _: None)
    monkeypatch.setattr(initialization.distributed_c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(
        initialization, "claim_gpu", lambda _, rank, uuid: uuids.append(f"{uuid} of rank {rank}")
    )
    initialization._join(World(1, 2, 1, 2), torch.device("cuda", 0), "gloo", None)
    initialization._join(World(1, 2, 1, 2), torch.device("cpu"), "gloo", None)
    assert [options["device_id"] for options in given] == [torch.device("cuda", 0), None]
    assert uuids == ["GPU-a of rank 1"]


def test_a_part_of_a_group_that_is_bound_to_a_device_is_made_by_its_members_alone(
    pool: Pool,
) -> None:
    """From a bound group torch would split NCCL's communicators, in which all of its ranks have to
    take part.
    """

    def body() -> tuple[list[object], str]:
        helper = initialization.distributed_c10d._new_process_group_helper
        seen: list[object] = []

        def noting(*args: Any, **options: Any) -> Any:
            seen.append(dist.group.WORLD.bound_device_id)
            return helper(*args, **options)

        comm = lockstep.init("cpu")
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        initialization.distributed_c10d._new_process_group_helper = noting
        try:
            part = comm.split(0 if comm.rank == 0 else None)
            if part is not None:
                part.free()
            return seen, str(dist.group.WORLD.bound_device_id)
        finally:
            initialization.distributed_c10d._new_process_group_helper = helper
            dist.group.WORLD.bound_device_id = None

    assert pool.run(body) == [([None], "cuda:0"), ([], "cuda:0")]


def test_the_repr_of_a_communicator_names_its_rank() -> None:
    assert "rank=1, size=2" in repr(Communicator.at(World(1, 2, 1, 2), torch.device("cpu")))


def test_rank_0_names_a_torch_that_was_not_tried_once(pool: Pool) -> None:
    def body() -> str:
        errors = io.StringIO()
        untried = mock.patch.object(torch, "__version__", "9.1.0")
        with (
            untried,
            mock.patch.object(initialization, "_has_noted_torch", False),
            redirect_stderr(errors),
        ):
            lockstep.init("cpu")
            lockstep.init("cpu")
            initialization._default = None  # a program may destroy its group and make another
            lockstep.init("cpu")
        return errors.getvalue()

    first, other = pool.run(body, workers=2)
    assert re.fullmatch(r"lockstep: torch 9\.1 has not been tried with Lockstep [^\n]*\n", first)
    assert other == ""
