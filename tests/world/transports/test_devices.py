"""Groups such as "cpu:shm,cuda:nccl": what is not on the CPU goes to the backend of its device.

The device is "meta", which every host has, and its backend notes what it is asked to do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.communicator import Communicator
from support import recorder
from support.faults import attempt
from support.hosts import pretending
from support.pool import Pool
from support.recorder import CALLS, Recorder, meta, world


def start(backends: str = "cpu:shm,meta:recorder") -> None:
    if not hasattr(dist.Backend, "RECORDER"):
        dist.Backend.register_backend("recorder", Recorder, devices=["meta"])
    recorder.GROUPS.clear()
    dist.init_process_group(backends)


def check_calls() -> None:
    assert recorder.GROUPS == [], "a backend is made when it is first needed"
    for name, call in CALLS.items():
        call()
        assert recorder.GROUPS[0].calls[-1] == name
    assert len(recorder.GROUPS) == 1
    # as C++ calls it: through the base class, and what overrides it
    count = len(recorder.GROUPS[0].calls)
    dist.ProcessGroup.allreduce(world(), [meta()], dist.AllreduceOptions()).wait()
    assert len(recorder.GROUPS[0].calls) == count + 1


def check_cpu() -> None:
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.eq(dist.get_world_size()).all()
    dist.ProcessGroup.allreduce(world(), [total], dist.AllreduceOptions()).wait()
    assert total.eq(dist.get_world_size() ** 2).all()


@pytest.mark.parametrize("placement", ["AA", "AB"])
def test_tensors_of_another_device_go_to_its_backend(pool: Pool, placement: str) -> None:
    def body() -> list[str]:
        with pretending(placement):
            start()
        check_cpu()
        check_calls()
        check_cpu()
        dist.destroy_process_group()
        ended: list[str] = recorder.GROUPS[0].ended
        recorder.GROUPS.clear()
        return ended

    assert pool.run(body, init=False) == [["shutdown"]] * 2


@pytest.mark.parametrize("placement", ["AA", "AB"])
def test_without_a_backend_for_it_the_error_shows_how_to_name_one(
    pool: Pool, placement: str
) -> None:
    def body() -> None:
        with pretending(placement):
            start("shm")
        for name, call in CALLS.items():
            ended = attempt(call)
            assert ended.kind == "ConfigError", (name, ended)
            assert (
                "got 'meta'. Make the group with \"cpu:shm,meta:...\" to name a backend for it."
                in ended.text
            )
        check_cpu()

    pool.run(body, init=False)


def test_a_backend_that_cannot_stand_beside_shm_is_refused(pool: Pool) -> None:
    def body() -> None:
        start("cpu:shm,meta:nowhere")
        ended = attempt(lambda: dist.all_reduce(meta()))
        assert ended.kind == "ConfigError"
        assert "nccl, gloo or a plain plug-in beside the one for the CPU" in ended.text
        check_cpu()

    pool.run(body, init=False)


def test_the_usual_pair_starts_on_a_host_without_its_second_device(pool: Pool) -> None:
    def body() -> str:
        dist.init_process_group("cpu:shm,cuda:nccl")
        check_cpu()
        return str(dist.get_backend_config())

    assert pool.run(body, init=False) == ["cpu:shm,cuda:nccl"] * 2


def test_gloo_for_another_device_is_called_by_the_names_that_it_has(pool: Pool) -> None:
    """As a backend it lacks the newer ones; it is put into a group of c10d's, which translates."""
    from lockstep.transports.device_groups import OPERATIONS
    from lockstep.transports.runtime.c10d import backend_as_group

    def body() -> list[str]:
        gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        group = backend_as_group(gloo, dist.HashStore(), "cpu")
        out, tensor = torch.zeros(4), torch.ones(4)
        group.all_gather_single(out, tensor).wait()
        assert out.equal(tensor)
        return [name for name in OPERATIONS if not hasattr(group, name)]

    assert pool.run(body, workers=1, init=False) == [[]]


class Together(dist.ProcessGroup):
    """As NCCL: messages that are not begun as one would wait for ever."""

    supports_coalescing = True
    calls: list[str] = []  # noqa: RUF012 - of this process

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.is_open = False

    def _start_coalescing(self, device: torch.device) -> None:
        self.is_open = True
        self.calls.append("start")

    def _end_coalescing(self, device: torch.device) -> recorder.Done:
        self.is_open = False
        self.calls.append("end")
        return recorder.Done()

    def send(self, tensors: Any, rank: int, tag: int = 0) -> None:
        assert self.is_open, "a send that begins alone"
        self.calls.append("send")

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> None:
        assert self.is_open, "a receive that begins alone"
        self.calls.append("recv")


@pytest.mark.parametrize("placement", ["AA", "AB"])
def test_messages_on_another_device_are_begun_as_one(pool: Pool, placement: str) -> None:
    def body() -> tuple[list[str], list[str]]:
        dist.Backend.register_backend("together", Together, devices=["meta"])
        try:
            with pretending(placement):
                dist.init_process_group("cpu:shm,meta:together")
            other = 1 - dist.get_rank()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, meta(), other), dist.P2POp(dist.isend, meta(), other)]
            ):
                work.wait()
            calls, Together.calls = Together.calls, []
            Communicator(device="meta").sendrecv(meta(), other, meta(), other)
            ours, Together.calls = Together.calls, []
            # what is on the CPU is shm's, and begins at once
            out = torch.zeros(4)
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, out, other), dist.P2POp(dist.isend, torch.ones(4), other)]
            ):
                work.wait()
            assert out.eq(1).all()
            assert Together.calls == []
            return calls, ours
        finally:
            dist.Backend.backend_list.remove("together")
            del dist.Backend.TOGETHER, dist.Backend._plugins["TOGETHER"]

    expected = ["start", "recv", "send", "end"]
    assert pool.run(body, init=False) == [(expected, expected)] * 2


def test_the_backend_of_a_group_is_that_of_the_device(pool: Pool) -> None:
    def body() -> tuple[str, str, str]:
        start()
        group = world()
        before = type(group._get_backend(torch.device("meta"))).__name__
        at = type(group._get_backend(torch.device("meta", 0))).__name__
        return before, at, type(group._get_backend(torch.device("cpu"))).__name__

    assert pool.run(body, init=False) == [("ShmGroup", "Recorder", "ShmGroup")] * 2


class Nccl(Recorder):
    """In place of NCCL's."""

    class Options:
        """What can be chosen."""

        _timeout = group_name = global_ranks_in_group = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options)
        self.given = options


def test_options_of_nccl_reach_it(pool: Pool) -> None:
    def body() -> tuple[bool, str, list[int]]:
        before = getattr(dist, "ProcessGroupNCCL", None)
        dist.ProcessGroupNCCL = Nccl  # type: ignore[misc]
        try:
            options = Nccl.Options()
            recorder.GROUPS.clear()
            dist.init_process_group("cpu:shm,meta:nccl", pg_options=options)
            dist.all_reduce(meta())
            (made,) = recorder.GROUPS
            recorder.GROUPS.clear()
            given = made.given  # type: ignore[attr-defined]
            assert given._timeout == world().timeout
            return given is options, given.group_name, given.global_ranks_in_group
        finally:
            if before is None:
                del dist.ProcessGroupNCCL
            else:
                dist.ProcessGroupNCCL = before  # type: ignore[misc]

    assert pool.run(body, init=False) == [(True, "0", [0, 1])] * 2


def test_options_of_nobody_are_refused(pool: Pool) -> None:
    def body() -> str:
        return attempt(
            lambda: dist.init_process_group("cpu:shm,meta:nccl", pg_options=object())
        ).text

    for said in pool.run(body, init=False):
        assert (
            "expected lockstep.transports.ShmOptions, or those of NCCL for the GPUs beside it, "
            "got object" in said
        )


def test_a_group_is_made_with_a_device_id(pool: Pool) -> None:
    """torch asks the new group for that device's backend before it knows the group."""

    def body() -> tuple[str, object]:
        accelerator = torch.accelerator
        before = accelerator.current_accelerator, accelerator.device_count
        accelerator.current_accelerator = lambda *_: torch.device("cuda")  # type: ignore[assignment]
        accelerator.device_count = lambda: 1
        try:
            dist.init_process_group("cpu:shm,cuda:nccl", device_id=torch.device("cuda", 0))
        finally:
            accelerator.current_accelerator, accelerator.device_count = before
        check_cpu()
        return type(world()).__name__, world().bound_device_id

    assert pool.run(body, init=False) == [("ShmGroup", None)] * 2
