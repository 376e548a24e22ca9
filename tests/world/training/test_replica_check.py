"""Workers whose hyperparameters or weights are no longer the same are an error; those that round
otherwise are not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import MismatchError
from lockstep.training.callbacks import Callback, Checkpoints
from lockstep.training.callbacks.base import Row
from lockstep.training.in_flight import StepsInFlight
from lockstep.training.step.step_result import StepResult
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.runs import images, make

SHARDED = pytest.param(
    {"strategy": "sharded"},
    marks=pytest.mark.leaks("a device mesh outlives its job, and its group with it"),
)
EVERYWHERE = [
    {},
    {"virtual_workers": 4},
    {"strategy": "replicas", "devices": ["cpu", "cpu"]},
    {"gradient_accumulation_steps": 2},
]


class OnRank0(Callback):
    """Runs on every rank, but does something on rank 0 alone, after one step."""

    every_rank = True

    def __init__(
        self,
        step: int,
        action: Callable[[Trainer], None],
        later: Callable[[Trainer], None] | None = None,
    ) -> None:
        self.step, self.action, self.later = step, action, later

    def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self.step and trainer.comm.rank == 0:
            self.action(trainer)


class AtEpoch(Callback):
    every_rank = True

    def on_train_epoch_end(self, trainer: Trainer, row: Row) -> None:
        if trainer.comm.rank == 0:
            change_weight(trainer)


def lower(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] *= 0.1


def change_weight(trainer: Trainer, factor: float = 1.5) -> None:
    with torch.no_grad():
        trainer.model[4].weight[1, 3] *= factor  # type: ignore[index]


def with_momentum(parameters: Any, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def refused(callback: Callback, said: str, out: Path | None = None, **options: Any) -> int:
    """The steps that were made until the error came, on every rank."""
    callbacks = [callback] if out is None else [callback, Checkpoints("2steps")]
    trainer = make(out, callbacks, **options)
    with pytest.raises(MismatchError, match=said):
        trainer.fit(images(), 3)
    return trainer.step.steps_done


@pytest.mark.parametrize("options", [*EVERYWHERE, SHARDED])
def test_a_callback_that_on_rank_0_lowers_the_learning_rate(
    pool: Pool, options: dict[str, Any]
) -> None:
    said = r"at step 3: 'lr' of parameter group 0 of the optimizer is 0\.001 on rank 0 and 0\.01 on rank 1\. .*every_rank"
    assert pool.run(refused, OnRank0(2, lower), said, workers=2, **options) == [3, 3]


@pytest.mark.parametrize(
    ("options", "replica_check", "steps"),
    [({}, 1, 3), *((options, 4, 4) for options in EVERYWHERE), ({}, 50, 5)],
)
def test_a_callback_that_on_rank_0_changes_a_weight(
    pool: Pool, options: dict[str, Any], replica_check: int, steps: int
) -> None:
    # a look sees one value of each tensor; all of them are seen at the end of an epoch
    def fill(trainer: Trainer) -> None:
        nn.init.zeros_(trainer.model[4].weight)  # type: ignore[index, arg-type]

    found = refused_on(
        pool,
        OnRank0(2, fill),
        r"4\.weight on rank 1 holds other values than on rank 0",
        replica_check,
        options,
    )
    assert found == [steps, steps]


def refused_on(
    pool: Pool, callback: Callback, said: str, replica_check: int, options: dict[str, Any]
) -> list[int]:
    return pool.run(refused, callback, said, workers=2, replica_check=replica_check, **options)


def test_one_weight_is_seen_at_the_next_checkpoint_before_anything_is_saved(
    pool: Pool, tmp_path: Path
) -> None:
    said = r"4\.weight on rank 1 holds other values than on rank 0, by up to 0\.\d+ of its largest"
    assert pool.run(refused, OnRank0(4, change_weight), said, tmp_path, workers=2) == [5, 5]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] != []
    assert not (tmp_path / "checkpoints/step-0000000006").exists()


def test_one_weight_is_seen_at_the_end_of_an_epoch(pool: Pool) -> None:
    assert pool.run(refused, AtEpoch(), "4.weight on rank 1", workers=2) == [10, 10]


def test_it_can_be_switched_off(pool: Pool) -> None:
    def run() -> int:
        trainer = make(None, [OnRank0(1, lower), OnRank0(2, change_weight)], replica_check=0)
        trainer.fit(images(), 2)
        return trainer.step.steps_done

    assert pool.run(run, workers=2) == [10, 10]


@pytest.mark.parametrize(
    ("options", "is_missing"),
    # without virtual workers rounding may have made other values
    [*((options, True) for options in EVERYWHERE), ({"virtual_workers": 4}, False)],
)
def test_a_state_of_the_optimizer_that_only_rank_0_has(
    pool: Pool, options: dict[str, Any], is_missing: bool
) -> None:
    """As when rank 0 alone loads a checkpoint: its first step would be another than the others'."""

    def run() -> tuple[int, str]:
        trainer = make(None, [], with_momentum, **options)
        rank = trainer.comm.rank
        for p in trainer.model.parameters() if rank == 0 or not is_missing else ():
            trainer.optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 1.0 + rank)
        with pytest.raises(MismatchError) as raised:
            trainer.fit(images(), 3)
        return trainer.step.steps_done, str(raised.value)

    ((steps, said), (other_steps, other_said)) = pool.run(run, workers=2)
    assert steps == other_steps and steps <= 1 and said == other_said
    assert "differ at step 0: the optimizer's state " in said
    expected = (
        "of parameter 0 is momentum_buffer on rank 0 and nothing on rank 1, before the first step"
        if is_missing
        else "on rank 1 holds other values than on rank 0, before the first step"
    )
    assert expected in said


def test_the_same_state_of_the_optimizer_is_fine(pool: Pool) -> None:
    def run() -> int:
        trainer = make(None, [], with_momentum, virtual_workers=4)
        for p in trainer.model.parameters():
            trainer.optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)
        trainer.fit(images(), 1)
        return trainer.step.steps_done

    assert pool.run(run, workers=2) == [5, 5]


def test_what_differs_by_rounding_is_a_warning_and_the_job_continues(pool: Pool) -> None:
    def run() -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("lockstep.training.replica_check")
        log.addHandler(handler)
        try:
            own = OnRank0(2, lambda trainer: change_weight(trainer, 1 + 2e-7))
            trainer = make(None, [own, OnRank0(3, rounded)], replica_check=1)
            trainer.fit(images(), 2)
        finally:
            log.removeHandler(handler)
        assert trainer.step.steps_done == 10
        return said

    def rounded(trainer: Trainer) -> None:
        trainer.optimizer.param_groups[0]["eps"] *= 1 + 1e-15

    on_0, on_1 = pool.run(run, workers=2)
    assert on_1 == []
    assert len(on_0) == 1
    assert "by rounding" not in on_0[0]
    assert on_0[0].startswith(
        ("4.weight on rank 1 holds other values", "'eps' of parameter group 0")
    )


def test_with_shards_equal_bits_are_promised(pool: Pool) -> None:
    def nudge(trainer: Trainer) -> None:
        change_weight(trainer, 1 + 2e-7)

    assert pool.run(
        refused, OnRank0(2, nudge), "4.weight on rank 1", workers=2, virtual_workers=4
    ) == [5, 5]


def test_entries_of_a_scheduler_on_one_rank_are_not_compared(pool: Pool) -> None:
    def note(trainer: Trainer) -> None:
        trainer.optimizer.param_groups[0]["note"] = 1.0

    def run() -> int:
        trainer = make(None, [OnRank0(1, note)], replica_check=1)
        trainer.optimizer.param_groups[0]["rank"] = object()
        trainer.fit(images(), 1)
        return trainer.step.steps_done

    assert pool.run(run, workers=2) == [5, 5]


@pytest.mark.parametrize("what", ["lr", "weight"])
def test_off_the_cpu_it_is_seen_a_few_steps_later_on_all_workers_at_once(
    pool: Pool, what: str
) -> None:
    """Results are looked at late, as where that would wait for the device."""

    def run() -> int:
        trainer = make(None, [OnRank0(2, lower if what == "lr" else fill)], replica_check=1)
        trainer._new_steps_in_flight = lambda: StepsInFlight(torch.device("meta"), 3)  # type: ignore[method-assign]
        step: Any = trainer.step
        step._checked_result = lambda lr, totals, *_: step._unchecked_result(
            lr, totals, trainer._loop.feed.current()
        )
        passes = step._passes
        run_passes = passes.run
        passes.run = lambda *given: torch.as_tensor(run_passes(*given), dtype=torch.float64)
        with pytest.raises(
            MismatchError,
            match="'lr' of parameter group 0" if what == "lr" else "4.weight on rank 1",
        ):
            trainer.fit(images(200), 1)
        return int(step.steps_done)

    def fill(trainer: Trainer) -> None:
        nn.init.zeros_(trainer.model[4].weight)  # type: ignore[index, arg-type]

    first, second = pool.run(run, workers=2)
    assert first == second
    assert first > 4
