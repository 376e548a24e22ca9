"""What goes wrong between ranks is said on all of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep.compat.horovod.torch as hvd
from lockstep.errors import ConfigError

MISMATCHES = {
    "shape": lambda r: hvd.allreduce(torch.ones(2 + r), name="x"),
    "dtype": lambda r: hvd.allreduce(
        torch.ones(2, dtype=[torch.float32, torch.float64][r]), name="x"
    ),
    "op": lambda r: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Max][r], name="x"),
    "prescale_factor": lambda r: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + r, name="x"),
    "postscale_factor": lambda r: hvd.allreduce(torch.ones(2), postscale_factor=1.0 + r, name="x"),
    "root rank": lambda r: hvd.broadcast(torch.ones(2), r, name="x"),
    "shape but for the first dimension": lambda r: hvd.allgather(torch.ones(2, 1 + r), name="x"),
    "ranks": lambda r: hvd.add_process_set([r]),
    "shape of one in a group": lambda r: hvd.grouped_allreduce(
        [torch.ones(1), torch.ones(1 + r)], name="x"
    ),
    "number in a group": lambda r: hvd.grouped_allreduce([torch.ones(1)] * (2 + r), name="x"),
    "rows for all to all": lambda r: hvd.alltoall(torch.ones(2, 1 + r), name="x"),
    "reducescatter": lambda r: hvd.reducescatter(torch.ones(2 + r), name="x"),
}


def test_mismatches_are_errors_on_all_ranks_and_name_both_values(pool: Any) -> None:
    def body() -> dict[str, str]:
        hvd.init()
        found = {}
        for what, call in MISMATCHES.items():
            with pytest.raises(hvd.HorovodInternalError) as caught:
                call(hvd.rank())
            found[what] = str(caught.value)
            assert hvd.allreduce(torch.ones(1)).item() == 1.0  # and all goes on
        hvd.shutdown()
        return found

    first, second = pool.run(body, backend="shm")
    assert first == second
    for what in list(MISMATCHES)[:8]:
        assert f"the ranks do not agree on {what}: " in first[what]
    assert (
        first["shape"]
        == "allreduce 'x': the ranks do not agree on shape: (2,) on rank 0, (3,) on rank 1"
    )
    assert first["dtype"].endswith("float32 on rank 0, float64 on rank 1")
    assert first["op"].endswith("Sum on rank 0, Max on rank 1")
    assert first["prescale_factor"].endswith("1.0 on rank 0, 2.0 on rank 1")
    assert first["root rank"].endswith("0 on rank 0, 1 on rank 1")
    assert first["shape of one in a group"].endswith(
        "((1,), (1,)) on rank 0, ((1,), (2,)) on rank 1"
    )


def test_a_name_twice_at_once(pool: Any) -> None:
    def body() -> list[str]:
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(1), name="x") if hvd.rank() == 0 else None
        messages = []
        if handle is not None:
            with pytest.raises(ValueError, match="a name that no pending allreduce has") as caught:
                hvd.allreduce_async(torch.ones(1), name="x")
            messages.append(str(caught.value))
        hvd.barrier()
        if handle is None:
            handle = hvd.allreduce_async(torch.ones(1), name="x")
        assert hvd.synchronize(handle).item() == 1.0
        hvd.shutdown()
        return messages

    assert [len(messages) for messages in pool.run(body)] == [1, 0]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_leaves_ends_what_the_others_wait_for(pool: Any, backend: str) -> None:
    def body() -> str:
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            pending = hvd.allreduce_async(torch.ones(1), name="nobody else's")
            hvd.shutdown()
            with pytest.raises(hvd.HorovodInternalError, match="shut down on this rank"):
                hvd.synchronize(pending)
            return ""
        with pytest.raises(hvd.HorovodInternalError, match="allreduce 'x': ") as caught:
            hvd.allreduce(torch.ones(1), name="x")
        assert caught.value.__cause__ is not None
        with pytest.raises(
            hvd.HorovodInternalError, match="can no longer reach the others: "
        ) as again:
            hvd.allreduce(torch.ones(1))
        assert str(caught.value.__cause__) in str(again.value)  # the cause is not hidden
        hvd.shutdown()
        return str(caught.value)

    first, _ = pool.run(body, backend=backend)
    assert first


def test_what_is_in_flight_at_shutdown_ends(pool: Any) -> None:
    def body() -> list[str]:
        hvd.init()
        begun = hvd.allreduce_async(torch.ones(1), name=f"{hvd.rank()}")
        hvd.barrier()
        hvd.shutdown()
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(begun)
        return [thread.name for thread in threading.enumerate() if "horovod" in thread.name]

    assert pool.run(body, backend="shm") == [[], []]


def test_process_sets(pool: Any) -> None:
    def body() -> dict[str, Any]:
        pair = hvd.ProcessSet([2, 0])
        hvd.init(process_sets=[pair])
        rank, found = hvd.rank(), {}
        found["pair"] = (pair.process_set_id, pair.ranks, pair.size(), pair.included())
        if pair.included():
            found["rank"] = pair.rank()
            x = torch.tensor([float(rank)])
            found["sum"] = hvd.allreduce(x, op=hvd.Sum, process_set=pair).item()
            found["root"] = hvd.broadcast(x, 2, process_set=pair).item()
            found["gather"] = hvd.allgather(x, process_set=pair).tolist()
            found["object"] = hvd.broadcast_object(rank, 2, process_set=pair)
            found["objects"] = hvd.allgather_object(rank, process_set=pair)
            hvd.barrier(pair)
            with pytest.raises(
                ConfigError, match="root_rank: expected a global rank of the process set"
            ):
                hvd.broadcast(x, 1, process_set=pair)
        else:
            with pytest.raises(ConfigError, match=r"process_set: expected one with this rank, 1"):
                hvd.allreduce(torch.ones(1), process_set=pair)
        with pytest.raises(ConfigError, match="ranks that no other process set has"):
            hvd.add_process_set([0, 2])
        late = hvd.add_process_set([1, 2])
        found["late"] = (
            hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=late).item() if rank else None
        )
        found["removed"] = (
            hvd.remove_process_set(late),
            hvd.remove_process_set(late),
            late.process_set_id,
        )
        found["global"] = (
            hvd.remove_process_set(hvd.global_process_set),
            hvd.global_process_set.ranks,
        )
        with pytest.raises(ConfigError, match="process_set: expected one that has been added"):
            hvd.allreduce(torch.ones(1), process_set=late)
        hvd.shutdown()
        found["id after"] = pair.process_set_id
        assert dist.get_rank() == rank
        return found

    answers = pool.run(body, workers=3, backend="shm")
    for rank, found in enumerate(answers):
        assert found["pair"] == (1, [0, 2], 2, rank != 1)
        assert found["late"] == (2.0 if rank else None)
        assert found["removed"] == (True, False, None)
        assert found["global"] == (False, [0, 1, 2])
        assert found["id after"] is None
        if rank != 1:
            assert found["rank"] == rank // 2
            assert (found["sum"], found["root"], found["gather"]) == (2.0, 2.0, [0.0, 2.0])
            assert (found["object"], found["objects"]) == (2, [0, 2])
