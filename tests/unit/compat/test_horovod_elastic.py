"""Elastic states and samplers of Horovod, in one process: what is saved, restored, and called
when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.compat.horovod.common.elastic import HostUpdateResult, ObjectState, run_fn
from lockstep.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from lockstep.compat.horovod.engine import regrouping
from lockstep.compat.horovod.engine.regrouping import ElasticTraining, current_training
from lockstep.compat.horovod.torch.elastic import sampler as sampler_module
from lockstep.compat.horovod.torch.elastic.sampler import ElasticSampler
from lockstep.elastic.membership import View
from lockstep.errors import InterruptedRunError, LockstepError


def state(**values: Any) -> ObjectState:
    return ObjectState(lambda value: value, lambda: 0, **values)


# --- states
# -------------------------------------------------------------------------------------------------


def test_restore_undoes_what_came_after_the_last_commit() -> None:
    kept = state(epoch=0, seen=[1])
    kept.epoch = 1
    kept.seen.append(2)
    kept.restore()
    assert (kept.epoch, kept.seen) == (0, [1])
    kept.seen.append(3)
    kept.commit()
    kept.seen.append(4)
    kept.restore()
    kept.seen.append(5)
    kept.restore()
    assert kept.seen == [1, 3]


def test_sync_takes_what_rank_0_has_and_saves_it() -> None:
    kept = ObjectState(lambda value: dict.fromkeys(value, "of rank 0"), lambda: 1, a=1)
    kept.sync()
    kept.a = 2
    kept.restore()
    assert kept.a == "of rank 0"


def test_sync_sends_what_there_is_now() -> None:
    kept = state(batch=0)
    kept.batch = 7
    kept.sync()
    assert kept.batch == 7


@pytest.mark.parametrize(
    ("updates", "skips"),
    [
        ([HostUpdateResult.removed], True),
        ([HostUpdateResult.added], False),
        ([HostUpdateResult.removed, HostUpdateResult.added], False),
    ],
)
def test_updates_of_hosts_interrupt_once(updates: list[int], skips: bool) -> None:
    kept = state()
    kept.check_host_updates()
    for time, update in enumerate(updates, 1):
        kept.on_hosts_updated(time, update)
    with pytest.raises(HostsUpdatedInterrupt) as found:
        kept.commit()
    assert found.value.skip_sync is skips
    kept.commit()


def test_an_old_update_does_not_count() -> None:
    kept = state()
    kept.on_hosts_updated(5, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        kept.check_host_updates()
    kept.on_hosts_updated(4, HostUpdateResult.added)
    kept.check_host_updates()


# --- run
# --------------------------------------------------------------------------------------------------


class Noted(ObjectState):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        super().__init__(lambda value: value, lambda: 0, step=0)
        self.register_reset_callbacks([lambda: self.calls.append("callback")])

    def sync(self) -> None:
        self.calls.append("sync")
        super().sync()

    def restore(self) -> None:
        self.calls.append("restore")
        super().restore()

    def reset(self) -> None:
        self.calls.append("reset")


def run(
    errors: list[Exception], commit: bool = True, reset: Callable[[], None] = lambda: None
) -> list[str]:
    """The calls of a training that ends, each time it is called, with the next of `errors`, and at
    last well.
    """
    kept = Noted()

    def train(kept: Noted, word: str) -> str:
        kept.calls.append(word)
        if commit:
            kept.commit()
        kept.step += 1
        if errors:
            raise errors.pop(0)
        return "result"

    assert run_fn(train, reset)(kept, "train") == "result"
    return kept.calls


def test_run_calls_once_where_nothing_happens() -> None:
    assert run([]) == ["sync", "train"]


def test_after_an_internal_error_the_state_is_restored_and_sent_again() -> None:
    again = ["restore", "reset", "callback", "sync", "train"]
    assert run([HorovodInternalError("lost"), HorovodInternalError("lost")]) == [
        "sync",
        "train",
        *again,
        *again,
    ]


@pytest.mark.parametrize("skip_sync", [False, True])
def test_after_an_update_of_hosts_nothing_is_restored(skip_sync: bool) -> None:
    sync = [] if skip_sync else ["sync"]
    assert run([HostsUpdatedInterrupt(skip_sync)]) == [
        "sync",
        "train",
        "reset",
        "callback",
        *sync,
        "train",
    ]


def test_other_errors_end_the_training() -> None:
    with pytest.raises(KeyError):
        run([KeyError("other")])


def test_a_failure_that_comes_again_from_the_same_commit_is_raised() -> None:
    with pytest.raises(HorovodInternalError, match="second"):
        run([HorovodInternalError("first"), HorovodInternalError("second")], commit=False)


def test_where_the_job_cannot_be_made_anew_the_failure_is_raised() -> None:
    def reset() -> None:
        raise OSError("no way")

    with pytest.raises(HorovodInternalError, match=r"first\. The job cannot continue .*: no way"):
        run([HorovodInternalError("first")], reset=reset)


# --- in an elastic job
# --------------------------------------------------------------------------------------


class Client:
    """A membership that does what a test tells it."""

    def __init__(self) -> None:
        self.members: tuple[int, ...] = (0, 1)
        self.wants_to_regroup = self.leaving = self.is_over = False
        self.stop_signal = 0
        self.generation = 1
        self.completes = [True]
        self.calls: list[Any] = []

    def enter(self, fit: int, most: int, folder: str) -> None:
        self.calls.append(("enter", fit))

    def complete(self) -> bool:
        self.calls.append("complete")
        return self.completes.pop(0)

    def leave(self) -> None:
        self.leaving = True

    def wait_for_lease(self) -> None:
        """Return at once, as in a job on one host."""


class Job:
    """Stands in for the communicator of an elastic job."""

    def __init__(self, kept: Noted, views: list[View]) -> None:
        self.client, self.trainings, self.kept, self.views = Client(), 0, kept, views
        self.commits: list[Any] = []
        self.is_joining, self.keeps_values = False, True

    def note_result(self, training: int, result: object) -> None:
        assert self.keeps_values

    def forget_results(self, training: int) -> None:
        """None is kept."""

    def publish_results(self) -> None:
        """None is kept."""

    def regroup_until(
        self,
        commit: Any,
        adapt: Any,
        reason: str = "",
        at_boundary: bool = False,
        check: Any = None,
    ) -> None:
        self.commits.append(commit())
        self.kept.calls.append("boundary" if at_boundary else f"regroup after {reason}")
        view = self.views.pop(0)
        self.client.members, self.client.wants_to_regroup = tuple(view.members), False
        self.client.is_over = False
        adapt(view)


def view(*members: int) -> View:
    return View(1, members, (0,) * len(members), ((0, 1),) * len(members), members[0])


def run_elastic(
    errors: list[Exception | str], views: list[View], commit: bool = True, **client: Any
) -> tuple[list[str], Job]:
    """The calls of a training in an elastic job; see `run`. A text is what the job wants at the
    next commit.
    """
    kept = Noted()
    job: Any = Job(kept, views)
    vars(job.client).update(client)

    def train(kept: Noted) -> str:
        kept.calls.append("train")
        kept.step += 1
        if commit:
            kept.commit()
        if errors:
            error = errors.pop(0)
            if isinstance(error, Exception):
                raise error
            setattr(job.client, error, 15)
            kept.check_host_updates()
        return "result"

    def elastic() -> ElasticTraining:
        return ElasticTraining(
            job, lambda: kept.calls.append("stop"), lambda: kept.calls.append("start")
        )

    try:
        assert run_fn(train, lambda: None, elastic)(kept) == "result"
    finally:
        assert current_training() is None
    return kept.calls, job


GONE = [
    "restore",
    "stop",
    "regroup after lost",
    "stop",
    "start",
    "reset",
    "callback",
    "sync",
    "train",
]


def test_in_an_elastic_job_the_ranks_that_are_left_regroup() -> None:
    calls, job = run_elastic([HorovodInternalError("lost")], [view(1)])
    assert calls == ["sync", "train", *GONE]
    assert job.client.calls == [("enter", 0), "complete"]
    assert job.commits == [(0, 1)]


def test_losses_at_the_same_commit_are_no_error_that_repeats() -> None:
    lost = [HorovodInternalError("lost") for _ in range(3)]
    calls, _ = run_elastic([*lost], [view(1, 2, 3), view(1, 2), view(2)], commit=False)
    assert calls == ["sync", "train", *GONE, *GONE, *GONE]
    with pytest.raises(HorovodInternalError, match="lost"):
        run_elastic([*lost], [view(0, 1), view(0, 1)], commit=False)


def test_where_ranks_join_nothing_is_restored_and_the_state_is_sent() -> None:
    calls, _ = run_elastic(["wants_to_regroup"], [view(0, 1, 2)])
    again = ["stop", "boundary", "stop", "start", "reset", "callback", "sync", "train"]
    assert calls == ["sync", "train", *again]


def test_a_rank_that_is_alone_regroups_at_a_commit_when_it_is_told_to() -> None:
    calls, _ = run_elastic(["is_over"], [view(0, 1)])
    reason = "the ranks of the job have changed"
    assert calls == ["sync", "train", *(each.replace("lost", reason) for each in GONE)]


def test_another_launcher_that_leads_is_no_error_that_repeats() -> None:
    calls, _ = run_elastic(["is_over"] * 3, [view(0, 1)] * 3, commit=False)
    assert calls.count("train") == 4


def test_a_rank_that_has_returned_begins_again_if_one_is_lost_before_the_others_have() -> None:
    calls, job = run_elastic([], [view(0)], completes=[False, True])
    reason = "a rank was lost before all ranks had completed the training"
    assert calls == ["sync", "train", *(each.replace("lost", reason) for each in GONE)]
    assert job.client.calls.count("complete") == 2


def test_a_signal_to_the_job_ends_the_training_at_a_commit() -> None:
    with pytest.raises(InterruptedRunError, match="stopped by SIGTERM after commit 1"):
        run_elastic(["stop_signal"], [])


def test_a_rank_that_joins_has_no_state_before_the_first_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regrouping, "_has_state", True)
    kept = Noted()
    job: Any = Job(kept, [view(0, 2), view(0, 2)])
    job.is_joining = True
    regrouping.join_if_late(job)
    assert (job.commits, job.trainings) == ([()], 0)
    job.is_joining = False
    with ElasticTraining(job, lambda: None, lambda: None) as training:
        training.regroup()
        training.note_sync()
        job.views = [view(2)]
        training.regroup()
    assert job.commits == [(), (), (0, 1)]


def test_a_rank_that_joins_counts_commits_as_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that have trained longer would always be ahead of it, and none of them could leave."""
    monkeypatch.setattr(regrouping, "_has_state", True)
    kept = Noted()
    first = View(5, (1, 2), (0, 0), ((0, 7), ()), 1)
    job: Any = Job(kept, [first, View(6, (1, 2, 3), (0, 0, 0), ((0, 9), (0, 9), ()), 1)])
    job.is_joining = True
    regrouping.join_if_late(job)
    job.is_joining = False

    def train(kept: Noted) -> str:
        kept.commit()
        job.client.wants_to_regroup = kept._commits == 8
        kept.commit()
        return "result"

    run_fn(train, lambda: None, lambda: ElasticTraining(job, lambda: None, lambda: None))(kept)
    assert job.commits == [(), (0, 9)]
    assert kept._commits == 11


def test_a_rank_without_the_state_is_not_the_first() -> None:
    job: Any = Job(Noted(), [View(2, (2, 3), (0, 0), ((), (0, 1)), 3)])
    with (
        pytest.raises(LockstepError, match="were lost before it had the training's state"),
        ElasticTraining(job, lambda: None, lambda: None) as training,
    ):
        training.regroup()


# --- the sampler
# --------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    def of(rank: int, size: int) -> None:
        monkeypatch.setattr(sampler_module, "rank", lambda: rank)
        monkeypatch.setattr(sampler_module, "size", lambda: size)

    of(0, 1)
    return of


def shares(
    ranks: Callable[[int, int], None], size: int, make: Callable[[], ElasticSampler]
) -> list[list[int]]:
    found = []
    for rank in range(size):
        ranks(rank, size)
        one = make()
        found.append(list(one))
        assert len(found[-1]) == len(one)
    return found


@pytest.mark.parametrize(("length", "size"), [(10, 2), (11, 4), (1, 4), (0, 2)])
def test_ranks_share_all_samples_evenly(
    ranks: Callable[[int, int], None], length: int, size: int
) -> None:
    found = shares(ranks, size, lambda: ElasticSampler(range(length)))
    assert {index for share in found for index in share} == set(range(length))
    assert {len(share) for share in found} == {-(-length // size)}


def test_the_order_is_that_of_seed_and_epoch(ranks: Callable[[int, int], None]) -> None:
    assert list(ElasticSampler(range(20), shuffle=False)) == list(range(20))
    one, other = ElasticSampler(range(20), seed=1), ElasticSampler(range(20))
    assert list(one) != list(range(20))
    other.set_epoch(1)
    assert list(one) == list(other)
    other.set_epoch(2)
    assert list(one) != list(other)


def test_samples_that_are_done_are_assigned_to_no_worker(ranks: Callable[[int, int], None]) -> None:
    ranks(1, 2)
    two = ElasticSampler(range(12))
    order = list(two.remaining_indices)
    list(two)
    two.record_batch(0, 2)
    assert two.get_indices(0, 2) == [order[1], order[3]]
    assert two.processed_indices == set(order[:4])  # rank 0 has done its batch too
    two.record_indices([order[7]])
    saved = two.state_dict()

    def going_on() -> ElasticSampler:
        made = ElasticSampler(range(12))
        made.load_state_dict(saved)
        return made

    found = shares(ranks, 3, going_on)
    assert sorted({index for share in found for index in share}) == sorted(
        set(order[4:]) - {order[7]}
    )
    ranks(0, 1)
    three = going_on()
    list(three)
    three.record_batch(2, 1)  # the third of what was left
    assert three.processed_indices == {*order[:7], order[7]}
    three.set_epoch(1)
    assert three.processed_indices == set()
    assert len(three) == 12


def test_states_of_either_kind_are_read(ranks: Callable[[int, int], None]) -> None:
    one = ElasticSampler(range(6), shuffle=False)
    one.load_state_dict({"epoch": 0, "processed_indices": {0, 5}})
    assert list(one) == [1, 2, 3, 4]
    one.load_state_dict({"epoch": 0, "processed_num": 4})
    assert list(one) == [4, 5]
