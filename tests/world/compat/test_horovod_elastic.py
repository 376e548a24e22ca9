"""Elastic states and the timeline of Horovod's interface, on several ranks."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep.compat.horovod.torch as hvd


def test_sync_commit_and_restore(pool: Any) -> None:
    def body() -> dict[str, Any]:
        hvd.init()
        torch.manual_seed(hvd.rank())
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank()))
        for _ in range(1 + hvd.rank()):
            model(torch.ones(2, 3) * torch.arange(2)[:, None]).sum().backward()
            optimizer.step()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, last_epoch=-1)
        sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
        state = hvd.elastic.TorchState(
            model, optimizer, schedule=schedule, sampler=sampler, seen=[hvd.rank()]
        )
        state.sync()

        def now() -> list[Any]:
            steps = [float(each["step"]) for each in optimizer.state_dict()["state"].values()]
            sums = [float(value.double().sum()) for value in model.state_dict().values()]
            return [
                sums,
                steps,
                optimizer.param_groups[0]["lr"],
                schedule.last_epoch,
                list(state.seen),
                list(sampler),
            ]

        found: dict[str, Any] = {"synced": now()}
        sampler.record_indices([hvd.rank()])  # each rank knows of its own alone
        state.seen.append(7)
        state.commit()
        sampler.set_epoch(3)
        optimizer.zero_grad()
        model(torch.ones(2, 3) * torch.arange(2)[:, None]).sum().backward()
        optimizer.step()
        schedule.step()
        state.seen.clear()
        found["changed"] = now()
        state.restore()
        found["restored"] = now()
        state.model = other = nn.Linear(1, 1)
        found["replaced"] = state.model is other
        state.sync()
        found["other"] = float(other.weight.detach())
        hvd.shutdown()
        return found

    one, other = pool.run(body, backend="shm")
    assert one["synced"][:5] == other["synced"][:5]
    assert one["synced"][1:5] == [[1.0] * 4, 0.1, 0, [0]]
    assert (one["synced"][5], other["synced"][5]) == ([0, 2, 4, 6], [1, 3, 5, 7])
    assert one["changed"][0] != one["synced"][0]
    for found in (one, other):
        assert found["restored"][:4] == found["synced"][:4]
        assert found["restored"][4] == [0, 7]
        assert found["replaced"]
    assert (one["restored"][5], other["restored"][5]) == ([2, 4, 6], [3, 5, 7])
    assert one["other"] == other["other"]


def test_a_training_continues_after_a_failed_operation_and_new_hosts(pool: Any) -> None:
    def body() -> list[str]:
        hvd.init()
        said: list[str] = []

        @hvd.elastic.run
        def train(state: Any) -> str:
            said.append(f"from {state.step}")
            while state.step < 6:
                if state.step == 3 and len(said) == 1:
                    hvd.allreduce(torch.ones(1 + hvd.rank()), name="odd")
                if state.step == 5 and len(said) == 3:
                    state.on_hosts_updated(1, 2)
                    state.check_host_updates()
                state.total += hvd.allreduce(torch.ones(1), op=hvd.Sum, name="one").item()
                state.step += 1
                if state.step == 2:
                    state.commit()
            return f"{state.total:g} on {hvd.size()}"

        state = hvd.elastic.ObjectState(step=0, total=0.0)
        state.register_reset_callbacks([lambda: said.append(f"reset at {state.step}")])
        said.append(train(state))
        hvd.shutdown()
        return said

    for said in pool.run(body, backend="shm"):
        assert said == ["from 0", "reset at 2", "from 2", "reset at 5", "from 5", "12 on 2"]


def test_where_a_rank_is_killed_the_others_get_its_number_and_keep_their_last_commit(
    pool: Any,
) -> None:
    def body() -> tuple[str, list[int]]:
        hvd.init()
        calls: list[int] = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            calls.append(state.step)
            while True:
                state.step += 1
                if state.step == 2 and hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                hvd.allreduce(torch.ones(1), name="gradients")
                state.commit()

        state = hvd.elastic.ObjectState(step=0)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            train(state)
        assert caught.value.__cause__ is None  # one traceback
        assert caught.value.__suppress_context__
        hvd.shutdown()
        return str(caught.value), [*calls, state.step]

    left, killed = pool.outcomes(body, backend="shm")
    assert (killed.ending, killed.exit_code) == ("died", -signal.SIGKILL)
    assert left.ending == "returned", left.trace
    said, steps = left.value
    assert said.startswith("allreduce 'gradients': RankLostError: ")
    assert "the process of rank 1 " in said
    assert "The job cannot continue without all of its workers. Lost ones are replaced in" in said
    assert said.count("the process of rank 1 ") == 1 and ".." not in said.replace("...", "")
    assert "--elastic 2:4" in said
    assert steps == [0, 1]  # called once, and back at the commit after the first step


def test_a_timeline_has_a_lane_for_each_rank_and_a_row_for_each_tensor(
    pool: Any, tmp_path: Path
) -> None:
    def body(path: str) -> None:
        os.environ["HOROVOD_TIMELINE"] = path
        hvd.init()
        some = hvd.add_process_set([0, 1])
        for _ in range(2):
            hvd.allreduce(torch.ones(2, 3), op=hvd.Sum, name="weights")
        if some.included():
            hvd.broadcast(torch.ones(1, dtype=torch.int64), 0, name="count", process_set=some)
        hvd.shutdown()
        del os.environ["HOROVOD_TIMELINE"]

    began = time.time()
    pool.run(body, str(tmp_path / "new" / "trace.json"), workers=3, backend="shm")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["trace.json"]
    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    rows = {
        event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"
    }
    assert list(rows)[3:] == [
        "add_process_set, unnamed",
        "allreduce.weights",
        "broadcast.count of ranks 0, 1",
    ]
    assert list(rows.values()) == list(range(6))
    start = next(
        event["args"] for event in events if event["name"] == "start_time_since_epoch_in_micros"
    )
    assert began * 1e6 < start["start_time_since_epoch_in_micros"] < time.time() * 1e6
    assert "CYCLE_START" not in {event["name"] for event in events}
    phases = [
        event
        for event in events
        if event["pid"] == rows["allreduce.weights"] and event["ph"] != "M"
    ]
    assert [event["name"] for event in phases] == [
        "NEGOTIATE_ALLREDUCE",
        "0",
        "1",
        "2",
        "ALLREDUCE",
    ] * 2
    for negotiate, *ticks, done in (phases[:5], phases[5:]):
        moments = sorted(tick["ts"] for tick in ticks)
        assert (moments[0], moments[-1]) == (negotiate["ts"], done["ts"])
        assert done["args"]["signature"] == "op Sum, dtype torch.float32, shape (2, 3), device cpu"
    sums = [event for event in events if event["name"].startswith("allreduce weights")]
    assert sorted(event["pid"] for event in sums) == [0, 0, 1, 1, 2, 2]
    assert {event["name"] for event in sums} == {
        "allreduce weights (op Sum, dtype torch.float32, shape (2, 3), device cpu)"
    }
    assert all("test_horovod_elastic.py" in event["args"]["call site"] for event in sums)
    numbers = sorted(
        {event["args"]["number"] for event in sums}
    )  # by which operations of several ranks are one
    assert len(numbers) == 2 and numbers[1] == numbers[0] + 1 > 1
    sent = [event for event in events if event["name"].startswith("broadcast count")]
    assert sorted(event["pid"] for event in sent) == [0, 1]
    assert {event["args"]["group"] for event in sent} == {"ranks 0, 1"}


def test_a_timeline_can_be_started_and_stopped(pool: Any, tmp_path: Path) -> None:
    def body(folder: str) -> None:
        hvd.init()
        hvd.stop_timeline()  # does nothing
        for name in ("a.json", "b.json.gz"):
            hvd.start_timeline(f"{folder}/{name}")
            hvd.allreduce(torch.ones(1), name=f"in {name}")
            if not os.fork():  # a process of the program's own, which ends in its way
                hvd.stop_timeline()
                os._exit(0)
            os.wait()
            hvd.barrier()  # all of them have ended
            assert not Path(folder, name).exists()
            hvd.barrier()
            hvd.stop_timeline()
            assert hvd.rank() or Path(folder, name).exists()  # a program reads it then
            hvd.allreduce(torch.ones(1), name="in none")
        hvd.shutdown()

    pool.run(body, str(tmp_path), backend="shm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json.gz"]
    for name, opened in (("a.json", open), ("b.json.gz", gzip.open)):
        with opened(tmp_path / name, "rt") as file:
            text = file.read()
        assert text.count(f"allreduce in {name}") == 2
        assert text.count("allreduce in") == 2


def test_a_timeline_ends_the_one_before_and_marks_the_rounds_of_the_ranks(
    pool: Any, tmp_path: Path
) -> None:
    def body(folder: str) -> None:
        hvd.init()
        for name in ("a.json", "b.json", "b.json"):
            hvd.start_timeline(f"{folder}/{name}", mark_cycles=name == "a.json")
            hvd.allreduce(torch.ones(1), name=f"in {name}")
        hvd.shutdown()

    pool.run(body, str(tmp_path), backend="shm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    first, last = (
        json.loads((tmp_path / name).read_text())["traceEvents"] for name in ("a.json", "b.json")
    )
    marks = [event["ts"] for event in first if event["name"] == "CYCLE_START"]
    done = [event["ts"] + event["dur"] for event in first if event["name"] == "ALLREDUCE"]
    assert len(done) == 1
    assert marks
    assert 0 <= marks[0] < done[0]  # the round in which the ranks have told each other of it
    assert not [event for event in last if event["name"] == "CYCLE_START"]
    assert (
        len([event for event in last if event["name"] == "ALLREDUCE"]) == 1
    )  # the second of this name
