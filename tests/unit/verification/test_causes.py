"""The verdict on a difference: which cause is named for which records of two runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lockstep.verification.analysis import analyse
from lockstep.verification.causes import batch_growth, cause_of, follows_batch
from lockstep.verification.comparison import Difference, compare
from lockstep.verification.held import Held
from lockstep.verification.records import RunRecord, StepRecord, TensorRecord


def tensor(*values: float) -> TensorRecord:
    return TensorRecord(repr(values), len(values), math.hypot(*values), values)


def step(
    number: int = 0,
    gradient: Sequence[float] = (1.0, 2.0),
    samples: Sequence[str] = "abcd",
    lr: float = 0.1,
    weight: float = 1.0,
    passes: int = 1,
    targets: int = 0,
    buffer: float | None = None,
) -> StepRecord:
    buffers = {} if buffer is None else {"norm.running_mean": tensor(buffer)}
    gradients = {"w": tensor(*gradient)}
    rates = ({"lr": str(lr)},)
    return StepRecord(
        *(0, number, rates, {"w": tensor(weight)}, gradients, buffers, tuple(samples)),
        passes,
        targets,
    )


def ranks(*steps: StepRecord, **flags: bool) -> list[RunRecord]:
    """Return the records of a run whose ranks have one step each."""
    return [RunRecord(rank, len(steps), (each,), **flags) for rank, each in enumerate(steps)]


def cause(one: list[RunRecord], other: list[RunRecord]) -> tuple[str, str]:
    difference = compare(one[0], other[0]).difference
    assert difference is not None
    verdict = cause_of(one, other, difference)
    return verdict.cause, f"{verdict.evidence} {verdict.remedy}"


ONE = ranks(step())


@pytest.mark.parametrize(
    ("factor", "said"),
    [(2.0, "a sum over the workers"), (0.5, "reduction='sum'"), (3.0, "a factor")],
)
def test_a_gradient_that_is_a_multiple(factor: float, said: str) -> None:
    half = step(gradient=(factor, 2 * factor), samples="ab")
    name, text = cause(ONE, ranks(half, replace_samples(half, "cd")))
    assert name == "gradient scale" and f"{factor:.4g} times as large" in text and said in text


def replace_samples(record: StepRecord, samples: str) -> StepRecord:
    from msgspec import structs

    return structs.replace(record, samples=tuple(samples))


def test_accumulated_passes_explain_a_multiple() -> None:
    half = step(gradient=(0.5, 1.0), samples="ab", passes=2)
    name, text = cause(ranks(step(passes=4)), ranks(half, replace_samples(half, "cd")))
    assert name == "gradient scale" and "4 forward passes a step on 1 worker and 2 on" in text


def test_a_mean_over_uneven_parts() -> None:
    parts = ranks(
        step(gradient=(3.0, 1.0), samples="ab", targets=11),
        step(gradient=(3.0, 1.0), samples="cd", targets=4),
    )
    name, text = cause(ranks(step(targets=15)), parts)
    assert name == "gradient scale" and "11 and 4 targets" in text


def test_samples_come_before_gradients() -> None:
    same = step(gradient=(3.0, 1.0))
    name, text = cause(ONE, ranks(same, same))
    assert name == "data order" and "train on the same 4 samples" in text
    other = ranks(step(gradient=(3.0, 1.0), samples="ab"), step(samples="xy"))
    name, text = cause(ONE, other)
    assert name == "data order" and "2 of 4 samples on 1 worker are among the 4" in text


def test_a_global_batch_that_grows() -> None:
    other = ranks(step(gradient=(3.0, 1.0)), step(samples="efgh"))
    assert batch_growth(ONE, other) == (4, 8)
    name, text = cause(ONE, other)
    assert name == "global batch" and "4 samples on 1 worker and 8 on 2 workers" in text


def test_a_learning_rate_that_is_multiplied() -> None:
    half = step(samples="ab", lr=0.2)
    other = ranks(half, replace_samples(half, "cd"))
    name, text = cause(ONE, other)
    assert name == "learning rate" and "multiplied by 2" in text
    difference = compare(ONE[0], other[0]).difference
    assert difference is not None and "scaled with the global batch" in str(
        follows_batch(ONE, other, difference)
    )


def test_a_schedule_that_moves_twice_a_step() -> None:
    rates = (0.1, 0.09, 0.081, 0.0729)
    one = [RunRecord(0, 1, tuple(step(number, lr=lr) for number, lr in enumerate(rates)))]
    other = [RunRecord(rank, 2, (step(), step(1, lr=0.081))) for rank in range(2)]
    difference = compare(one[0], other[0]).difference
    assert difference is not None
    verdict = cause_of(one, other, difference)
    assert verdict.cause == "learning-rate steps"
    assert "as 1 worker has it at step 2: the schedule moves 2 times a step" in verdict.evidence


def test_weights_buffers_and_losses() -> None:
    half = step(samples="ab", weight=2.0)
    assert cause(ONE, ranks(half, replace_samples(half, "cd")))[0] == "initial weights"
    one = ranks(step(buffer=1.0))
    half = step(samples="ab", buffer=1.5)
    assert cause(one, ranks(half, replace_samples(half, "cd")))[0] == "buffers"
    half = step(gradient=(3.0, 1.0), samples="ab")
    name, text = cause(ONE, ranks(half, replace_samples(half, "cd")))
    assert name == "loss" and "in-batch negatives" in text


# --- Further runs -----------------------------------------------------------------------------------


class Script:
    """Stands in for the runs of a script: what they give depends on what is held."""

    def __init__(self, **flags: bool) -> None:
        self.flags = flags
        self.held: list[Held] = []

    def __call__(self, workers: int, held: Held, name: str) -> list[RunRecord]:
        self.held.append(held)
        if workers == 1:
            return ranks(step(), divides_batches=True, **self.flags)
        wrong = self.flags.get("has_dropout", False) and not held.dropout
        grows = (
            self.flags.get("has_draws", False) and not held.batch_parts
        )  # stands for a batch a worker
        gradient = (3.0, 1.0) if wrong or grows else (1.0, 2.0)
        parts = ("abcd", "efgh") if grows else ("ab", "cd")
        steps = [step(gradient=gradient, samples=part) for part in parts]
        return ranks(*steps, divides_batches=True, **self.flags)


def test_a_right_script_has_no_verdict() -> None:
    script = Script()
    assert analyse(script, (1, 2)).verdict is None
    assert script.held == [Held()] * 3


def test_a_batch_of_each_worker_is_no_fault() -> None:
    script = Script(has_draws=True)
    analysis = analyse(script, (1, 2))
    assert analysis.verdict is None and script.held[-1] == Held(batch_parts=2)
    assert "a step has 4 on 1 worker and 8 on 2 workers" in analysis.notes[0]


def test_dropout_is_the_cause_if_without_it_nothing_differs() -> None:
    script = Script(has_dropout=True)
    verdict = analyse(script, (1, 2)).verdict
    assert verdict is not None and verdict.cause == "random draws"
    assert "With no dropout, all steps agree" in verdict.evidence
    assert script.held[-1] == replace(Held(), dropout=True)


def test_a_script_that_differs_from_itself_is_not_seeded() -> None:
    drawn = iter((1.0, 2.0, 3.0))

    def run(workers: int, held: Held, name: str) -> list[RunRecord]:
        return ranks(*[step(gradient=(next(drawn), 1.0))] * workers)

    verdict = analyse(run, (1, 2)).verdict
    assert verdict is not None and verdict.cause == "seeds"


def test_the_difference_has_no_scale_without_a_common_factor() -> None:
    assert math.isnan(Difference(0, 0, "gradient").scale)
