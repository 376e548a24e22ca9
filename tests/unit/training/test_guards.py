"""Guards of a training step: what they see and decide between the passes and the update, on all paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import lockstep
from lockstep.communicator import Communicator
from lockstep.data.loader import Batch
from lockstep.errors import ConfigError, DataError, DivergedError, LockstepError
from lockstep.parallel.distributed import Distributed
from lockstep.parallel.replicas_strategy import Replicas
from lockstep.topology import World
from lockstep.training.step.guards import Decision, Guard, PendingStep
from lockstep.training.step.train_step import TrainStep

CPU = torch.device("cpu")


class Recording(Guard):
    """Decides as it is told, attempt by attempt, and notes what it was asked."""

    name = "recording"

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = list(decisions)
        self.events: list[str] = []
        self.pending: list[PendingStep] = []
        self.norms: list[float] = []

    def before_passes(self, step: int, batch: Batch) -> None:
        self.events.append(f"before {step}")

    def before_update(self, pending: PendingStep) -> Decision:
        self.events.append(f"pending {pending.step}.{pending.attempt}")
        self.norms.append(float(pending.gradient_norm))
        self.pending.append(pending)
        return self.decisions.pop(0) if self.decisions else Decision.GO

    def after_step(self, pending: PendingStep) -> None:
        error = "" if pending.error is None else f" {type(pending.error).__name__}"
        self.events.append(f"after {pending.step} {pending.decision.name}{error}")

    def state_dict(self) -> dict[str, Any]:
        return {"asked": len(self.norms)}

    def load_state_dict(self, state: Any) -> None:
        self.events.append(f"loaded {state['asked']}")


def model_with_buffers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 4))


def batch(value: float | None = None, virtual_workers: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 3, generator=generator)
    if value is not None:
        inputs[:] = value
    labels = torch.arange(8) % 4
    data: Any = (inputs, labels)
    if virtual_workers is not None:
        data = [(inputs[i : i + 2], labels[i : i + 2]) for i in range(0, 8, 2)]
    return Batch(data, torch.arange(8), 8, 8, 0, 0, virtual_workers)


def make(*guards: Guard, **options: Any) -> TrainStep:
    model = options.pop("model", None) or model_with_buffers()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    loss_fn = options.pop("loss_fn", nn.CrossEntropyLoss())
    strategy = Distributed(Communicator.at(World(), CPU))
    step = TrainStep(model, optimizer, loss_fn, strategy=strategy, **options)
    step.guards = guards
    return step


def fingerprint(step: TrainStep) -> str:
    return lockstep.fingerprint(step.model, step.optimizer)


OPTIONS = [
    {},
    {"gradient_accumulation_steps": 2},
    {"virtual_workers": 4},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"precision": "fp16", "virtual_workers": 4},
    {"max_grad_norm": 0.1},
]
NAMES = [
    "plain",
    "accumulated",
    "virtual workers",
    "bf16",
    "fp16",
    "fp16, virtual workers",
    "clipped",
]


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_a_step_with_guards_has_the_same_bits_also_if_it_is_repeated(
    options: dict[str, Any],
) -> None:
    given = [batch(virtual_workers=options.get("virtual_workers")) for _ in range(3)]
    plain = make(**options)
    guarded = make(Recording(), **options)
    repeated = make(Recording(Decision.GO, Decision.REPEAT, Decision.REPEAT), **options)
    for each in given:
        losses = [float(step(each)) for step in (plain, guarded, repeated)]
        assert losses[0] == losses[1] == losses[2]
    assert fingerprint(plain) == fingerprint(guarded) == fingerprint(repeated)
    assert plain.precision.state_dict() == repeated.precision.state_dict()
    (guard,) = repeated.guards
    assert isinstance(guard, Recording)
    assert guard.events[2:] == [
        "after 0 GO",
        *("before 1", "pending 1.0", "pending 1.1", "pending 1.2", "after 1 GO"),
        *("before 2", "pending 2.0", "after 2 GO"),
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_a_skipped_step_changes_nothing_and_counts(options: dict[str, Any]) -> None:
    given = batch(virtual_workers=options.get("virtual_workers"))
    step = make(Recording(Decision.GO, Decision.SKIP), **options)
    step(given)
    before = fingerprint(step), step.precision.state_dict()
    result = step.run(given)
    assert result.is_skipped
    assert (fingerprint(step), step.precision.state_dict()) == before
    assert step.steps_done == 2
    assert not step.run(given).is_skipped
    assert fingerprint(step) != before[0]


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_a_guard_sees_the_gradient_of_the_mean_neither_scaled_nor_clipped(
    options: dict[str, Any],
) -> None:
    def half_counts(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        return nn.functional.cross_entropy(output, target, reduction="sum"), 0.5 * len(target)

    model = nn.Linear(3, 4)
    inputs, labels = batch().data
    nn.functional.cross_entropy(model(inputs), labels, reduction="sum").div(4).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    guard = Recording()
    step = make(guard, model=model, loss_fn=half_counts, **options)
    seen: list[torch.Tensor] = []
    guard.before_update = lambda pending: (  # type: ignore[method-assign]
        seen.append(torch.cat([g.flatten().clone() for g in pending.gradients])) or Decision.GO
    )
    step(batch(virtual_workers=options.get("virtual_workers")))
    tolerance = 1e-6 if options.get("precision", "fp32") == "fp32" else 2e-2
    torch.testing.assert_close(seen[0], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=NAMES[:4])
def test_a_loss_that_is_not_finite_reaches_the_guards_which_may_skip_it(
    options: dict[str, Any],
) -> None:
    bad = batch(float("nan"), options.get("virtual_workers"))
    ending, skipping = Recording(), Recording(Decision.SKIP)
    step = make(ending, **options)
    before = fingerprint(step)
    with pytest.raises(DivergedError, match="the loss is nan at step 0"):
        step(bad)
    assert ending.events == ["before 0", "pending 0.0", "after 0 GO DivergedError"]
    step = make(skipping, **options)
    result = step.run(bad)
    assert result.is_skipped
    result.check()
    assert fingerprint(step) == before
    assert skipping.events == ["before 0", "pending 0.0", "after 0 SKIP"]


def test_a_loss_that_counts_nothing_is_an_error_of_the_data() -> None:
    guard = Recording()
    nothing = Batch((torch.ones(8, 3), torch.full((8,), -100)), torch.arange(8), 8, 8, 0, 0)
    with pytest.raises(DataError, match="something that the loss counts"):
        make(guard)(nothing)
    assert guard.events == ["before 0"]


def test_after_a_guard_that_repeats_the_others_are_not_asked_and_one_that_skips_is_enough() -> None:
    first, second = Recording(Decision.REPEAT, Decision.GO, Decision.SKIP), Recording()
    step = make(first, second)
    assert not step.run(batch()).is_skipped
    assert second.events == ["before 0", "pending 0.1", "after 0 GO"]
    assert step.run(batch()).is_skipped
    assert second.events[-1] == "after 1 SKIP"


def test_an_error_of_a_guard_ends_the_step_and_all_are_told() -> None:
    class Ending(Guard):
        def before_update(self, pending: PendingStep) -> Decision:
            raise LockstepError("enough")

    other = Recording()
    step = make(Ending(), other)
    before = [p.detach().clone() for p in step.model.parameters()]
    with pytest.raises(LockstepError, match="enough"):
        step(batch())
    assert other.events == ["before 0", "after 0 GO LockstepError"]
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))
    assert step.steps_done == 0


def test_the_state_of_guards_is_in_that_of_the_step() -> None:
    step, other = make(Recording()), make(Recording())
    step(batch())
    other.load_state_dict(step.state_dict())
    (guard,) = other.guards
    assert isinstance(guard, Recording)
    assert guard.events == ["loaded 1"]
    assert "guards" not in make().state_dict()
    make().load_state_dict(step.state_dict())  # a training without the guard


def test_what_is_seen_beside_the_loss() -> None:
    guard = Recording()
    step = make(guard)
    step(batch())
    (pending,) = guard.pending
    statistics = [b for b in step.model.buffers() if b.is_floating_point()]
    assert pending.measured.buffers_norm == pytest.approx(float(torch.cat(statistics).norm()))
    assert pending.measured.loss == pytest.approx(float(pending.loss))
    assert not pending.has_overflowed
    assert pending.count == 8
    assert pending.learning_rate == 0.1


def test_buffers_that_come_during_the_training_are_seen() -> None:
    guard = Recording()
    step = make(guard)
    step(batch())
    step.model.register_buffer("late", torch.full((4,), 50.0))
    step(batch())
    before, after = (float(pending.buffers_norm) for pending in guard.pending)
    assert before < 100 < after


def test_each_buffer_counts_once_in_the_order_of_the_model() -> None:
    shared = nn.BatchNorm1d(3, affine=False)
    model = nn.ModuleDict({"called": model_with_buffers()})
    model["beside"] = nn.Sequential(nn.Sequential(shared, nn.BatchNorm1d(2, affine=False)), shared)
    model["beside"].register_module("missing", None)
    model["beside"].register_buffer("same", shared.running_mean)
    model.forward = model["called"].forward
    guard = Recording()
    make(guard, model=model)(batch())
    expected = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    assert list(map(id, guard.pending[0].floating_buffers())) == list(map(id, expected))


def test_a_batch_that_the_model_changes_cannot_be_repeated() -> None:
    class InPlace(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))

    with pytest.raises(ConfigError, match="model: expected passes that do not change the batch"):
        make(Recording(Decision.REPEAT), model=InPlace(3, 4))(batch())


def test_a_strategy_that_cannot_undo_a_step_is_refused() -> None:
    class Looking(Recording):
        may_undo = False

    model = nn.Linear(3, 4)
    strategy = Replicas(Communicator.at(World(), CPU), ["cpu", "cpu"])
    step = TrainStep(model, SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), strategy=strategy)
    with pytest.raises(
        ConfigError, match=r"strategy: expected a strategy whose steps can be undone.*got replicas"
    ):
        step.guards = [Recording()]
    step.guards = [Looking()]
    step(batch())
