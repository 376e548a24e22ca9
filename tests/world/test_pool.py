"""The pool runs functions as ranks, puts everything back, and says what went wrong."""

from __future__ import annotations

import functools
import importlib
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep.communicator
from support import pool as pool_module
from support.pool import Pool, RanksFailedError


@dataclass
class Place:
    rank: int
    size: int
    total: float


def place(extra: float = 0.0) -> Place:
    total = torch.tensor([dist.get_rank() + extra])
    dist.all_reduce(total)
    return Place(dist.get_rank(), dist.get_world_size(), total.item())


def process_id() -> int:
    return os.getpid()


def wait_forever() -> None:
    threading.Event().wait()


@pytest.fixture
def impatient() -> Iterator[Pool]:
    """A pool of its own, for what would take long with the shared one's limits."""
    own = Pool(limit=2, grace=0.5, linger=0.1)
    yield own
    own.close()


# --- what a rank gets
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_runs_exactly_so_many_ranks(pool: Pool, workers: int) -> None:
    places = pool.run(place, workers=workers)
    assert places == [Place(rank, workers, sum(range(workers))) for rank in range(workers)]


def test_arguments_reach_functions_of_any_kind(pool: Pool) -> None:
    offset = 3.0

    def inner(scale: float, *, power: int) -> float:
        return scale * (place(offset).total ** power)

    assert pool.run(inner, 2.0, power=2) == [2.0 * 49.0] * 2
    assert pool.run(functools.partial(inner, 2.0), power=1) == [14.0, 14.0]
    assert pool.run(lambda: os.environ["LOCAL_RANK"]) == ["0", "1"]


def test_processes_are_used_again(pool: Pool) -> None:
    first = pool.run(process_id, workers=3)
    assert pool.run(process_id, workers=2) == first[:2]
    assert os.getpid() not in first


def test_ranks_have_the_variables_of_torchrun(pool: Pool) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    assert pool.run(lambda: [os.environ[name] for name in names]) == [list("02020"), list("12120")]


def test_ranks_see_the_environment_and_folder_of_the_test(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST", "seen")
    monkeypatch.setenv("LOCKSTEP_GONE", "not seen")
    monkeypatch.delenv("PATH")  # the processes were started with it
    monkeypatch.chdir(tmp_path)

    def look() -> tuple[str | None, ...]:
        return (
            *(os.environ.get(f"LOCKSTEP_{name}") for name in ("TEST", "GONE")),
            os.environ.get("PATH"),
            str(Path.cwd()),
        )

    assert pool.run(look, env={"LOCKSTEP_GONE": None}) == [("seen", None, None, str(tmp_path))] * 2


def test_variables_may_differ_between_ranks(pool: Pool) -> None:
    nodes = pool.run(lambda: os.environ["GROUP_RANK"], env=lambda rank: {"GROUP_RANK": str(rank)})
    assert nodes == ["0", "1"]


def test_warnings_are_what_they_are_in_the_test(pool: Pool) -> None:
    def warn() -> str:
        warnings.warn("careful", UserWarning, stacklevel=1)
        return "done"

    assert [outcome.kind for outcome in pool.outcomes(warn)] == ["UserWarning"] * 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "care", UserWarning)
        assert pool.run(warn) == ["done", "done"]


def test_output_of_ranks_is_output_of_the_test(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run(lambda: print("hello from", os.environ["RANK"]))
    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"


def test_a_function_may_make_the_group_itself(pool: Pool) -> None:
    def join() -> Place:
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        return place()

    for workers in (2, 3, 2):
        assert [p.size for p in pool.run(join, workers=workers, init=False)] == [workers] * workers


@pytest.mark.parametrize("init", [True, False])
def test_lockstep_finds_its_rank_in_every_run(pool: Pool, init: bool) -> None:
    def find() -> tuple[int, int, float]:
        job = lockstep.communicator.init(device="cpu")
        return job.rank, job.size, job.allreduce(torch.ones(1)).item()

    for workers in (2, 3, 2):
        found = pool.run(find, workers=workers, init=init)
        assert found == [(rank, workers, float(workers)) for rank in range(workers)]


def test_too_many_ranks_are_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match="expected 1 to 4, got 5"):
        pool.run(place, workers=5)


# --- what a rank leaves
# -------------------------------------------------------------------------------------


def test_every_run_begins_in_the_same_state(pool: Pool, tmp_path: Path) -> None:
    def look() -> tuple[Any, ...]:
        settings = (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.backends.cudnn.benchmark,
        )
        numbers = torch.rand(1).item(), random.random()
        here = Path.cwd(), "LOCKSTEP_TEST" in os.environ, "/nowhere" in sys.path
        return *settings, *numbers, *here, signal.getsignal(signal.SIGTERM), torch.is_grad_enabled()

    def change() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        torch.backends.cudnn.benchmark = True
        torch.set_grad_enabled(False)
        os.chdir(tmp_path)
        os.environ["LOCKSTEP_TEST"] = "changed"
        sys.path.append("/nowhere")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    before = pool.run(look)
    pool.run(change)
    assert pool.run(look) == before
    assert before[0][:3] == (torch.float32, 1, False)


def test_no_part_of_torch_keeps_the_group(impatient: Pool) -> None:
    def use_late() -> None:
        importlib.import_module("torch.distributed.nn.functional")

    impatient.run(use_late)


def test_what_a_rank_leaves_open_is_a_failure(impatient: Pool, tmp_path: Path) -> None:
    def leak() -> None:
        if dist.get_rank() == 1:
            sys.kept = (tmp_path / "kept").open("w")  # type: ignore[attr-defined]

    with pytest.raises(
        RanksFailedError, match=r"left behind: open file descriptor: .*/kept"
    ) as caught:
        impatient.run(leak)
    assert [outcome.failed for outcome in caught.value.outcomes] == [False, True]
    assert impatient.run(lambda: hasattr(sys, "kept")) == [False, False]  # by a fresh process


@pytest.mark.leaks("to check that the mark is heard")
def test_a_mark_excuses_what_a_rank_leaves_open(pool: Pool) -> None:
    def leak() -> None:
        sys.kept = os.pipe()  # type: ignore[attr-defined]

    def close() -> None:
        for number in sys.__dict__.pop("kept"):
            os.close(number)

    pool.run(leak, workers=1)
    pool.run(close, workers=1)


# --- what can go wrong
# --------------------------------------------------------------------------------------


def test_the_first_cause_is_shown_first(pool: Pool) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(RanksFailedError) as caught:
        pool.run(fail, workers=3)
    error = caught.value
    assert (error.first.rank, error.first.kind, error.first.message) == (
        1,
        "ValueError",
        "the cause",
    )
    assert isinstance(error.first.exception, ValueError)
    assert [outcome.ending for outcome in error.outcomes] == ["raised"] * 3
    text = str(error)
    assert text.startswith(
        "test_the_first_cause_is_shown_first.<locals>.fail: 3 of 3 ranks failed, rank 1 first"
    )
    assert text.index("rank 1 (first)") < min(text.index("--- rank 0"), text.index("--- rank 2"))
    assert 'raise ValueError("the cause")' in text


def test_ranks_that_raised_serve_on(pool: Pool) -> None:
    before = pool.run(process_id)
    pool.outcomes(lambda: 1 / 0)
    assert pool.run(process_id) == before


def test_a_failed_assertion_is_explained(pool: Pool) -> None:
    def check() -> None:
        assert dist.get_world_size() == 7

    assert "assert 2 == 7" in pool.outcomes(check)[0].message


def test_an_error_that_cannot_be_pickled_is_reported(pool: Pool) -> None:
    class StubbornError(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__("in the way")

    def fail() -> None:
        raise StubbornError(1, 2)

    outcome = pool.outcomes(fail)[0]
    assert (outcome.kind, outcome.message, outcome.exception) == (
        "StubbornError",
        "in the way",
        None,
    )


def test_a_value_that_cannot_be_sent_is_a_failure(pool: Pool) -> None:
    assert [o.ending for o in pool.outcomes(lambda: sys._getframe())] == ["raised", "raised"]


@pytest.mark.parametrize(
    ("end", "told", "code"),
    [
        (lambda: os._exit(3), "exit code 3", 3),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by signal 9", -9),
    ],
    ids=["exit", "kill"],
)
def test_a_rank_that_dies_is_reported_and_replaced(
    pool: Pool, end: Any, told: str, code: int
) -> None:
    def die() -> None:
        if dist.get_rank() == 1:
            end()
        dist.barrier()

    before = pool.run(process_id, workers=4)
    outcomes = pool.outcomes(die)
    assert (outcomes[1].ending, outcomes[1].message, outcomes[1].exit_code) == ("died", told, code)
    assert outcomes[0].ending == "raised"
    assert RanksFailedError("run", outcomes).first.rank == 1
    assert {*pool.run(process_id, workers=4)} & {*before} == {*before} - {before[1]}


def test_a_rank_that_hangs_is_shown_with_its_stack_and_replaced(pool: Pool) -> None:
    def hang() -> int:
        if dist.get_rank() == 0:
            wait_forever()
        return os.getpid()

    outcomes = pool.outcomes(hang, timeout=1.0)
    assert [outcome.ending for outcome in outcomes] == ["hung", "returned"]
    assert "in wait_forever" in outcomes[0].trace
    assert "no end after 1 s" in outcomes[0].message
    assert outcomes[1].value in pool.run(process_id)
    assert len(pool.run(place)) == 2


def test_a_frozen_rank_is_killed(impatient: Pool) -> None:
    outcome = impatient.outcomes(
        lambda: os.kill(os.getpid(), signal.SIGSTOP), workers=1, timeout=0.5
    )[0]
    assert outcome.ending == "hung"
    assert "does not answer signals" in outcome.trace
    assert impatient.run(lambda: "alive", workers=1) == ["alive"]


def test_others_stop_soon_after_a_failure(impatient: Pool) -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            raise ValueError("the cause")
        wait_forever()

    error = RanksFailedError("run", impatient.outcomes(fail))
    assert [outcome.ending for outcome in error.outcomes] == ["raised", "hung"]
    assert "60 s" not in error.outcomes[1].message
    assert error.first.rank == 0


def test_an_interrupted_run_leaves_no_rank_at_work(
    impatient: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = impatient.run(process_id)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pool_module, "_gather", interrupt)
        impatient.run(wait_forever)
    assert not any(psutil.pid_exists(number) for number in before)
    assert not {*before} & {*impatient.run(process_id)}


def test_a_process_that_died_between_runs_is_replaced(impatient: Pool) -> None:
    before = impatient.run(process_id)
    victim = psutil.Process(before[0])
    victim.kill()
    victim.wait(10)
    after = impatient.run(process_id)
    assert before[0] not in after
    assert before[1] in after


def test_closing_ends_all_processes(impatient: Pool) -> None:
    before = impatient.run(process_id)
    impatient.close()
    assert not any(psutil.pid_exists(number) for number in before)
    assert not impatient.folder.exists()
