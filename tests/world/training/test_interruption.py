"""A signal is heard at every place of a run, by all workers at the same one, and costs no more than
a step.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import interruption
from lockstep.communicator import init
from lockstep.errors import InterruptedRunError
from lockstep.training import stop_signals
from lockstep.training.callbacks import Callback, Checkpoints
from lockstep.training.evaluate import accuracy
from lockstep.training.in_flight import LAG
from lockstep.training.step.step_result import StepResult
from lockstep.training.stop_signals import StopSignals
from lockstep.training.stopping import StopRequests
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.runs import fit, images, make, timeless


class Measure:
    """Accuracy, with a signal to one rank at one of the calls; those of comparisons, in float64, do
    not count.
    """

    def __init__(self, call: int, rank: int, number: int = signal.SIGTERM) -> None:
        self.call, self.rank, self.number, self.calls = call, rank, number, 0

    def __call__(self, output: Any, target: Any) -> Any:
        if output.dtype is torch.float32:
            self.calls += 1
            if self.calls == self.call and init().rank == self.rank:
                os.kill(os.getpid(), self.number)
        return accuracy(output, target)


def interrupted(out: Path, call: int, rank: int, samples: int = 31) -> tuple[str, str | None, int]:
    """(message, checkpoint, calls of the metric) of a run that is interrupted in an evaluation."""
    measure = Measure(call, rank)
    trainer = make(out, [Checkpoints("0")], metrics={"accuracy": measure})
    with pytest.raises(InterruptedRunError) as caught:
        trainer.fit(images(), 3, validate=images(samples, seed=6))
    return str(caught.value), caught.value.checkpoint, measure.calls


# 31 samples are two batches: calls 3 and 4 lie in the second evaluation, 5 and 6 in the last
@pytest.mark.parametrize(("workers", "rank"), [(1, 0), (2, 1)])
@pytest.mark.parametrize(("call", "steps", "epoch"), [(3, 10, 2), (4, 10, 2), (6, 15, 3)])
def test_a_run_stopped_in_an_evaluation_makes_it_again(
    pool: Pool, tmp_path: Path, workers: int, rank: int, call: int, steps: int, epoch: int
) -> None:
    straight = pool.run(fit, tmp_path / "straight", workers=workers)
    for message, checkpoint, _ in pool.run(
        interrupted, tmp_path / "run", call, rank, workers=workers
    ):
        assert message.startswith(
            f"stopped by SIGTERM after step {steps} (epoch {epoch} of 3); saved "
        )
        assert checkpoint is not None
        assert checkpoint.endswith(f"step-{steps:010}")
    resumed = pool.run(fit, tmp_path / "run", workers=workers, resume="latest")
    assert [mark for mark, _ in resumed] == [mark for mark, _ in straight]
    assert timeless(resumed[0][1]) == timeless(straight[0][1])


@pytest.mark.parametrize("workers", [1, 2])
def test_an_evaluation_is_left_early(pool: Pool, tmp_path: Path, workers: int) -> None:
    # 640 samples are 40 batches
    calls = [calls for *_, calls in pool.run(interrupted, tmp_path, 3, 0, 640, workers=workers)]
    assert max(calls) <= 3 + 1 + LAG


def test_a_signal_in_an_evaluation_of_a_callbacks_own(pool: Pool, tmp_path: Path) -> None:
    class Evaluate(Callback):
        every_rank = True

        def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
            if result.step == 6:
                trainer.evaluate(images(31))

    def run() -> str:
        with pytest.raises(InterruptedRunError) as caught:
            make(tmp_path, [Evaluate()], metrics={"a": Measure(1, 1)}).fit(images(), 3)
        return str(caught.value)

    assert all(
        "after step 7 (epoch 2 of 3); saved" in message for message in pool.run(run, workers=2)
    )
    straight = pool.run(fit, tmp_path / "straight", epochs=2, workers=2)
    resumed = pool.run(fit, tmp_path, epochs=2, workers=2, resume="latest")
    assert resumed[0][0] == straight[0][0]


def test_evaluation_without_a_run_leaves_signals_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        make(None, [], metrics={"a": Measure(1, 0)}).evaluate(images(31))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_the_launcher_knows_beforehand_that_a_training_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a step may be one long call of C code: the signal handler runs after it, too late to ask the
    # launcher for time
    asked: list[bool] = []
    monkeypatch.setattr(stop_signals, "ask_for_time", lambda: asked.append(True))
    with StopSignals():
        assert asked == [True]


def test_without_a_launcher_sigterm_twice_in_a_moment_is_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # as by srun, to a task that Slurm has told itself
            assert (signals.received, heard) == (signal.SIGTERM, [])
            monkeypatch.setattr(interruption, "_SAME_REQUEST_S", 0.0)
            signal.raise_signal(signal.SIGTERM)  # somebody means it
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stop_request_of_one_rank_gets_the_same_answer_on_all(pool: Pool) -> None:
    def answers() -> tuple[list[bool], bool, tuple[Any, str]]:
        signals = StopSignals()
        stop_requests = StopRequests(init("cpu"), signals)
        heard = []
        for number in range(10):
            if number == 2 and init().rank == 1:
                signals.received = signal.SIGTERM
            heard.append(stop_requests.poll())
        return heard, stop_requests.end_polls(), stop_requests.agree()

    expected = ([number >= 2 + LAG for number in range(10)], True, (signal.SIGTERM, ""))
    assert pool.run(answers, workers=3) == [expected] * 3
