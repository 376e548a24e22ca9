"""Repeated operations take one collective per cycle, and no wait for a rank is endless."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep.compat.horovod.torch as hvd


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def test_a_repeated_operation_takes_one_collective(pool: Any) -> None:
    def body() -> dict[str, Any]:
        hvd.init()
        engine, rank, found = hvd.global_process_set.engine, hvd.rank(), {}
        exchanged = []
        exchange = engine._messages.exchange
        engine._messages.exchange = lambda messages: exchanged.append(messages) or exchange(
            messages
        )

        def talks(call: Any) -> tuple[list[Any], int]:
            before = len(exchanged)
            return [call(number) for number in range(5)], len(exchanged) - before

        def tensor(*shape: int) -> torch.Tensor:
            return torch.full(shape, float(rank + 1))

        found["small"] = talks(
            lambda n: hvd.allreduce_(tensor(3) * n, op=hvd.Sum, name="x").tolist()
        )
        found["other name"] = talks(lambda n: hvd.allreduce(tensor(3)).tolist())
        found["sliced"] = talks(
            lambda n: hvd.allreduce(torch.ones(3, 2)[:, 0] * n, op=hvd.Sum)[0].item()
        )
        found["half"] = talks(lambda n: hvd.allreduce(tensor(2).half()).tolist())
        found["large"] = talks(lambda n: hvd.allreduce(tensor(1 << 15), op=hvd.Sum).sum().item())
        found["whole"] = talks(lambda n: hvd.allreduce(torch.tensor([2 * rank + 1])).item())
        found["gathered"] = talks(lambda n: hvd.allgather(tensor(rank)).tolist())
        found["barriers"] = talks(lambda n: hvd.barrier())
        hvd.shutdown()
        return found

    for found in pool.run(body, workers=3, backend="shm"):
        assert found["small"] == ([[6.0 * number] * 3 for number in range(5)], 2)
        assert found["other name"] == ([[2.0] * 3] * 5, 2)
        assert found["sliced"] == ([3.0 * number for number in range(5)], 2)
        assert found["half"] == ([[2.0, 2.0]] * 5, 2)
        assert found["large"] == ([6.0 * (1 << 15)] * 5, 2)
        assert found["whole"] == ([3] * 5, 2)
        assert found["gathered"] == ([[2.0, 3.0, 3.0]] * 5, 2)
        assert found["barriers"] == ([None] * 5, 2)


def test_ranks_that_submit_something_else_than_predicted(pool: Any) -> None:
    """After operations that all ranks have confirmed, one comes with another name, order, form, or
    joins.
    """

    def body() -> list[Any]:
        hvd.init()
        rank, found = hvd.rank(), []

        def predicted() -> None:
            for _ in range(3):
                assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="x").tolist() == [3.0, 3.0]
            assert hvd.global_process_set.engine._response_cache.has_prediction

        predicted()
        names = ["a", "b"] if rank != 1 else ["b", "a"]
        begun = {
            name: hvd.allreduce_async(torch.full((2,), ord(name) * 1.0), name=name)
            for name in names
        }
        found.append([hvd.synchronize(begun[name])[0].item() for name in "ab"])
        predicted()
        with pytest.raises(hvd.HorovodInternalError, match="do not agree on shape") as caught:
            hvd.allreduce(torch.ones(2 if rank else 1), name="x")
        found.append(str(caught.value))
        predicted()
        sent = torch.ones(2)
        if rank != 2:
            found.append(hvd.allreduce_(sent, op=hvd.Sum, name="x").tolist())
            found.append(hvd.allreduce_(sent, op=hvd.Sum, name="x").tolist())
        found.append(hvd.join() in range(3))
        predicted()
        hvd.shutdown()
        return found if rank != 2 else [*found[:2], [2.0, 2.0], [4.0, 4.0], *found[2:]]

    first, *others = pool.run(body, workers=3, backend="shm")
    assert first[0] == [97.0, 98.0]
    assert first[2:] == [[2.0, 2.0], [4.0, 4.0], True]
    assert all(other == first for other in others)


def test_the_failure_of_one_rank_is_reported_to_the_others(pool: Any) -> None:
    def body() -> str:
        hvd.init()
        if hvd.rank() == 1:

            def fail(*_: Any) -> None:
                raise MemoryError("none left")

            hvd.global_process_set.engine._message_table.add = fail
        with pytest.raises(hvd.HorovodInternalError) as caught:
            for _ in range(2):
                hvd.broadcast(torch.ones(1), 0, name="x")
        hvd.shutdown()
        return str(caught.value)

    first, second = pool.run(body, backend="shm")
    assert "rank 1 gave up" in first
    assert "MemoryError: none left" in second


def test_the_rank_that_has_left_is_named_by_all(pool: Any) -> None:
    """Not the one that has given up because of it."""

    def body() -> str:
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            hvd.shutdown()
            return ""
        if hvd.rank() == 2:
            store().wait(["over"])
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="x")
        store().set("over", "")
        hvd.shutdown()
        return str(caught.value)

    first, _, third = pool.run(body, workers=3, backend="shm")
    for text in (first, third):
        assert "rank 1 has left" in text


def test_shutting_down_calls_back_the_thread_that_waits(pool: Any) -> None:
    """Nobody else comes, or leaves."""

    def body() -> list[str]:
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 0:
            engine = hvd.global_process_set.engine
            begun = hvd.allreduce_async(torch.ones(1), name="x")
            while not engine._in_cycle:
                hvd.poll(begun)
            hvd.shutdown()
            with pytest.raises(hvd.HorovodInternalError, match="shut down on this rank"):
                hvd.synchronize(begun)
            store().set("over", "")
            return [thread.name for thread in threading.enumerate() if "horovod" in thread.name]
        store().wait(["over"])
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="x")
        hvd.shutdown()
        return [str(caught.value)]

    first, (second,) = pool.run(body, backend="shm")
    assert first == []
    assert "rank 0" in second


def test_again_and_again(pool: Any) -> None:
    def body() -> tuple[int, int]:
        counts = []
        for number in range(6):
            hvd.init(process_sets=[[0]])
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
            if number % 2 == 0:
                hvd.allreduce_async(torch.ones(1), name=f"{hvd.rank()}")  # nobody ever waits for it
                hvd.barrier()
            hvd.shutdown()
            gc.collect()
            dist.barrier()
            counts.append((len([*Path("/proc/self/fd").iterdir()]), threading.active_count()))
        return counts[1], counts[-1]

    for early, late in pool.run(body, backend="shm"):
        assert late[0] < early[0] + 4  # one each time would be a leak
        assert late[1] < early[1] + 4


def test_a_forked_child_is_no_rank(pool: Any) -> None:
    def body() -> Any:
        hvd.init()
        child = os.fork()
        if child == 0:
            there = hvd.is_initialized()
            hvd.shutdown()
            os._exit(int(there))
        _, status = os.waitpid(child, 0)
        found = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.shutdown()
        return os.waitstatus_to_exitcode(status), found

    assert pool.run(body, backend="shm") == [(0, 2.0)] * 2
