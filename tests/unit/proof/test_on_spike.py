"""What a training does about a spike, on one worker: it stops, skips, goes back, and resumes as it was."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import ConfigError, DivergedError
from lockstep.proof.ledger import SKIPPED
from lockstep.proof.on_spike import SpikeGuard

STEPS, BATCH = 60, 8


def data(*spoiled: int, value: float = 1e4) -> TensorDataset:
    """Samples in the order of steps, without a shuffle; those of some steps are spoiled."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * STEPS, 6, generator=generator)
    labels = (inputs.sum(1) > 0).long()
    for step in spoiled:
        inputs[BATCH * step] = value
        labels[BATCH * step] = 1 - labels[BATCH * step]
    return TensorDataset(inputs, labels)


def trainer(on_spike: Any = None, **options: Any) -> lockstep.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    options = {"callbacks": [], **options}
    return lockstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), BATCH, on_spike=on_spike, **options
    )


def fit(run: lockstep.Trainer, samples: TensorDataset, **options: Any) -> list[Any]:
    loader = lockstep.Loader(
        samples, BATCH, shuffle=False, virtual_workers=run.step.strategy.virtual_workers
    )
    return run.fit(loader, epochs=1, **options)


def guard_of(run: lockstep.Trainer) -> SpikeGuard:
    (guard,) = (each for each in run.step.guards if isinstance(each, SpikeGuard))
    return guard


def state(run: lockstep.Trainer) -> str:
    return lockstep.fingerprint(run.model, run.optimizer)


def test_the_training_stops_before_the_update() -> None:
    run = trainer("stop")
    with pytest.raises(
        DivergedError, match=r"step 40 has a spike: the norm of the buffers is .* above the usual"
    ):
        fit(run, data(40))
    reference = trainer()
    fit(reference, data(), max_steps=40)
    pairs = zip(run.model.parameters(), reference.model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert run.step.steps_done == 40


@pytest.mark.parametrize("value", [1e4, float("nan")])
def test_a_skipped_step_leaves_no_trace_but_counts(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    run, other = trainer("skip"), trainer("skip")
    with caplog.at_level(logging.WARNING):
        history = fit(run, data(40, value=value))
    fit(other, data(40, value=-3e4))  # another spoiled sample in its place
    assert state(run) == state(other)
    assert run.step.steps_done == STEPS
    assert guard_of(run).left_out[0][:2] == (40, 40)
    assert history[-1]["left_out"] == 1
    assert "step 40 is left out of the training: in step 40 the " in caplog.text
    assert torch.isfinite(torch.tensor(history[-1]["train_loss"]))


@pytest.mark.parametrize("action", ["skip", "rollback", "stop"])
def test_what_was_left_out_is_in_the_ledger(action: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = trainer(lockstep.OnSpike(action, copy_every=16), run_dir=run_dir)
    if action == "stop":
        with pytest.raises(DivergedError):
            fit(run, data(40))
    else:
        fit(run, data(40))
    ledger = lockstep.ledger(run_dir)
    skipped = ledger.steps["step"][(ledger.steps["flags"] & SKIPPED) > 0]
    assert skipped.tolist() == ([] if action == "stop" else [40])
    assert ledger.rollbacks == ([(40, 32)] if action == "rollback" else [])
    assert len(ledger.steps) == (41 if action == "stop" else STEPS)
    assert ledger.spikes()[0][0] == 40


def test_rolling_back_leaves_out_all_steps_since_the_copy() -> None:
    run = trainer(lockstep.OnSpike("rollback", copy_every=16))
    history = fit(run, data(40))
    ((first, step, what),) = guard_of(run).left_out
    assert (first, step) == (32, 40)
    assert what.startswith("the ")
    assert history[-1]["left_out"] == 9
    # by hand: the steps before the copy, then those after the spike, with their own numbers
    hand = trainer()
    loader = lockstep.Loader(data(40), BATCH, shuffle=False)
    for number, batch in enumerate(loader.epoch(0)):
        if 32 <= number <= 40:
            hand.step.steps_done += 1
        else:
            hand.step.run(batch)
    assert state(run) == state(hand)


def test_a_copy_from_before_the_first_step_restores_an_optimizer_without_state() -> None:
    run = trainer(lockstep.OnSpike("rollback", copy_every=1000))
    fit(run, data(12, value=float("nan")), max_steps=13)
    assert not run.optimizer.state
    assert state(run) == state(trainer())


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_never_more_than_the_limit_in_a_row(action: str) -> None:
    spoiled = data(40, 41, 42, value=float("nan"))
    run = trainer(lockstep.OnSpike(action, limit=3))
    assert fit(run, spoiled)[-1]["left_out"] == 3
    with pytest.raises(
        DivergedError, match=r"step 42 has a spike: .*2 steps before it .* in a row \(40, 41\)"
    ):
        fit(trainer(lockstep.OnSpike(action, limit=2)), spoiled)


@pytest.mark.parametrize("action", ["skip", "rollback"])
@pytest.mark.parametrize("saved", [37, 41])
def test_a_run_that_resumes_decides_as_one_that_was_not_interrupted(
    action: str, saved: int, tmp_path: Path
) -> None:
    callbacks: list[Any] = [lockstep.callbacks.Checkpoints(f"{saved}steps")]
    spoiled = data(40, 42, 50)
    whole = trainer(action, run_dir=tmp_path / "whole", callbacks=callbacks)
    rows = fit(whole, spoiled)
    part = trainer(action, run_dir=tmp_path / "part", callbacks=callbacks)
    fit(part, spoiled, max_steps=saved)
    rest = trainer(action, run_dir=tmp_path / "part", callbacks=callbacks)
    more = fit(rest, spoiled, resume="latest")
    assert state(rest) == state(whole)
    assert guard_of(rest).left_out == guard_of(whole).left_out
    assert sum(row["left_out"] for row in more) == sum(row["left_out"] for row in rows) > 0


def test_healthy_steps_have_the_same_bits() -> None:
    plain, guarded = trainer(), trainer("rollback")
    history = fit(plain, data())
    fit(guarded, data())
    assert state(plain) == state(guarded)
    assert "left_out" not in history[-1]


def test_overflows_of_fp16_are_none() -> None:
    run = trainer("skip", precision="fp16")
    fit(run, data())
    assert guard_of(run).left_out == []


@pytest.mark.parametrize(
    ("on_spike", "message"),
    [
        ("ignore", "on_spike: expected stop, skip or rollback, got 'ignore'"),
        (3, "on_spike: expected one of stop, skip, rollback, or lockstep.OnSpike"),
    ],
)
def test_arguments(on_spike: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        trainer(on_spike)
    assert message in str(raised.value)
    for options in ({"copy_every": 0}, {"limit": -1}, {"rule": 3}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            lockstep.OnSpike("skip", **options)
