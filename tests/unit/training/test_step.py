"""One update on one worker: what it refuses, what it saves, and gradients that nobody computed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.communicator import Communicator
from lockstep.data.loader import Batch
from lockstep.errors import ConfigError, DataError, DivergedError
from lockstep.parallel.buffers import Buffers
from lockstep.parallel.distributed import Distributed
from lockstep.parallel.replicas.copies import ReplicaCopies
from lockstep.parallel.strategy import Strategy
from lockstep.topology import World
from lockstep.training.step.precision import Precision, scale_gradients
from lockstep.training.step.step_result import StepNumbers, StepResult
from lockstep.training.step.train_step import TrainStep

CPU = torch.device("cpu")
LABELS = torch.tensor([0, 1, 2, 3])


def batch(inputs: torch.Tensor | None = None, labels: torch.Tensor = LABELS) -> Batch:
    data = (torch.ones(4, 3) if inputs is None else inputs, labels)
    return Batch(data, torch.arange(4), 4, 4, 0, 0)


def make(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> TrainStep:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    loss_fn = options.pop("loss_fn", nn.CrossEntropyLoss())
    return TrainStep(
        model, optimizer, loss_fn, strategy=Distributed(Communicator.at(World(), CPU)), **options
    )


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(ConfigError, match=r"optimizer: .* LBFGS, whose step needs a closure"):
        make(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_other_optimizers_are_not(kind: Any) -> None:
    model = nn.Linear(3, 4)
    optimizer = kind(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a wrapper around the optimizer's step
    make(model, optimizer)(batch())


def test_a_frozen_parameter_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    make(model, torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5))(batch())
    assert model[0].weight.grad is None
    assert torch.equal(model[0].weight, before)


def test_more_passes_than_samples() -> None:
    one, many = (nn.Linear(3, 4) for _ in range(2))
    many.load_state_dict(one.state_dict())
    inputs = torch.randn(4, 3)
    losses = [
        float(make(one)(batch(inputs))),
        float(make(many, gradient_accumulation_steps=7)(batch(inputs))),
    ]
    assert losses[0] == pytest.approx(losses[1])
    torch.testing.assert_close(one.weight, many.weight)


def test_nothing_is_updated_by_a_loss_that_is_not_finite_or_counts_nothing() -> None:
    model = nn.Linear(3, 4)
    before = model.weight.detach().clone()
    step = make(model)
    with pytest.raises(DivergedError, match=r"the loss is nan at step 0 with learning rate 0\.1"):
        step(batch(torch.full((4, 3), float("nan"))))
    with pytest.raises(
        DataError, match="step 0: expected a global batch with something that the loss counts"
    ):
        step(batch(labels=torch.full((4,), -100)))
    assert torch.equal(model.weight, before)
    assert step.steps_done == 0


def test_a_result_may_be_read_at_any_time() -> None:
    def result(loss: float, count: float) -> StepResult:
        return StepResult(
            3, StepNumbers(torch.tensor(loss), torch.tensor(count), torch.zeros(())), 0.1
        )

    result(1.0, 4.0).check()
    with pytest.raises(DivergedError, match="inf at step 3"):
        result(float("inf"), 4.0).check()
    with pytest.raises(DataError, match="step 3"):
        result(float("nan"), 0.0).check()


def test_the_gradient_scale_of_fp16_is_saved_and_restored() -> None:
    step = make(nn.Linear(3, 4), precision="fp16")
    for _ in range(3):
        step(batch())
    overflow = make(nn.Linear(3, 4), precision="fp16")
    overflow.precision.load_state_dict({**step.state_dict()["precision"], "scale": 2.0**40})
    overflow(batch())  # gradients of this size overflow, and the scale is halved
    saved = overflow.state_dict()["precision"]
    assert saved["scale"] == 2.0**39
    assert step.state_dict()["precision"]["_growth_tracker"] == 3

    after = make(nn.Linear(3, 4), precision="fp16")
    after.load_state_dict(overflow.state_dict())
    assert after.steps_done == 1
    assert after.state_dict() == overflow.state_dict()
    loss = torch.ones((), requires_grad=True)
    after.precision.backward(loss, 0.5)
    assert loss.grad == 2.0**38


def test_other_formats_have_no_scale_and_take_none() -> None:
    for name in ("fp32", "bf16"):
        precision = Precision(name, CPU)
        precision.load_state_dict(Precision("fp16", CPU).state_dict())
        assert precision.state_dict() == {}


def test_gradients_of_several_formats_are_multiplied() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    gradients = [torch.full((2,), 3.0, dtype=dtype) for dtype in dtypes]
    scale_gradients(gradients, torch.tensor(1 / 3, dtype=torch.float64))
    for gradient, dtype in zip(gradients, dtypes, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, torch.ones(2, dtype=dtype))


def test_elsewhere_the_factor_stays_on_the_device_and_has_the_gradients_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[tuple[torch.dtype, torch.dtype]] = set()

    def record(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
        seen.update((gradient.dtype, factor.dtype) for gradient in gradients)

    monkeypatch.setattr(torch, "_foreach_mul_", record)
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    there = [torch.empty(2, dtype=dtype, device="meta") for dtype in dtypes]
    # reading a value of the device meta is an error
    scale_gradients(there, torch.empty((), dtype=torch.float64, device="meta"))
    assert seen == {(dtype, torch.promote_types(dtype, torch.float32)) for dtype in dtypes}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"gradient_accumulation_steps": 2.0},
            "gradient_accumulation_steps: expected a whole number",
        ),
        (
            {"gradient_accumulation_steps": True},
            "gradient_accumulation_steps: expected a whole number",
        ),
        ({"max_grad_norm": "1"}, "max_grad_norm: expected a number above 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm: expected a number above 0"),
        ({"schedule": "cosine"}, "schedule: expected a function .* 'cosine'. .*make_schedule"),
        ({"loss_fn": 1}, "loss_fn: expected a function"),
        ({"model": None}, "model: expected a torch.nn.Module, got NoneType"),
        ({"optimizer": None}, "optimizer: expected a torch.optim.Optimizer, got NoneType"),
    ],
)
def test_arguments_of_other_kinds_are_refused(options: dict[str, Any], said: str) -> None:
    model = nn.Linear(3, 4)
    given: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "loss_fn": nn.MSELoss(),
    }
    with pytest.raises(ConfigError, match=said):
        TrainStep(**{**given, **options}, strategy=Distributed(Communicator.at(World(), CPU)))


def test_a_schedule_that_gives_no_number_is_refused() -> None:
    step = make(nn.Linear(3, 4), schedule=lambda _: None)
    with pytest.raises(
        ConfigError, match="schedule: expected a number as the factor of step 0, got None"
    ):
        step(batch())


def test_a_group_added_later_is_scheduled_clipped_and_corrected() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[1].parameters(), 1.0)
    step = make(model, optimizer, schedule=lambda number: 1 / (1 + number), max_grad_norm=1e-3)
    step(batch())
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.5})
    before = [p.detach().clone() for p in model.parameters()]
    step(batch(labels=torch.tensor([0, 1, -100, -100])))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert float(gradients.norm()) == pytest.approx(1e-3, rel=1e-3)
    assert all(
        float((p.detach() - old).abs().max()) < 1e-3
        for p, old in zip(model.parameters(), before, strict=True)
    )


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize(
    ("loss_fn", "passes"), [(mean_square, 0), (lambda o, t: (o.square().sum(), 4), 1)]
)
def test_gradients_of_a_mean_over_samples_are_not_multiplied_by_1(
    monkeypatch: pytest.MonkeyPatch, loss_fn: Any, passes: int
) -> None:
    """On a device, where to ask for the factor would wait for it; "meta" is one that every host
    has.
    """
    calls: list[int] = []
    monkeypatch.setattr(
        "lockstep.training.step.train_step.scale_gradients",
        lambda gradients, _: calls.append(len(gradients)),
    )
    model = nn.Linear(3, 4, device="meta")
    optimizer, comm = (
        torch.optim.SGD(model.parameters(), 0.1),
        Communicator.at(World(), torch.device("meta")),
    )
    step = TrainStep(model, optimizer, loss_fn, strategy=Strategy(comm))
    step.run(batch(torch.ones(4, 3, device="meta"), LABELS.to("meta")))
    assert calls == [2] * passes


def test_workers_whose_losses_count_different_things_are_found() -> None:
    """Some have taken theirs for a mean over samples without a look at the device."""
    numbers = StepNumbers(torch.tensor(1.0), torch.tensor(6.0), torch.zeros(()))
    result = StepResult(3, numbers, 0.1, samples=4)
    with pytest.raises(
        ConfigError, match="over the same on all workers, got one over 6 of 4 samples at step 3"
    ):
        result.check()
    replace(result, on_hand=numbers._replace(counted=torch.tensor(4.0))).check()


class Kernels(TorchDispatchMode):
    """Counts what is calculated."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


VIEWS = {"split_with_sizes", "view", "detach", "slice", "empty_like", "split"}


def test_running_statistics_travel_by_few_kernels() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(n) for n in (3, 5, 7, 2)))
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.copy_(torch.rand(buffer.shape) * 9)
    buffers = Buffers(model, saves=False)
    buffers.begin()
    averaged = [b for b in model.buffers() if b.is_floating_point()]
    counters = [b for b in model.buffers() if not b.is_floating_point()]
    expected = torch.cat(
        [*((b.double() * 0.3) for b in averaged), *(b.double().reshape(1) for b in counters)]
    )
    with Kernels() as kernels:
        sums = buffers.of_shard(0.3, first=True, last=True)
        buffers.set(sums)
    assert sums.equal(expected)
    assert torch.cat(averaged).equal(expected[: -len(counters)].float())
    assert [int(b) for b in counters] == expected[-len(counters) :].long().tolist()
    assert len([name for name in kernels.names if name not in VIEWS]) == 6, kernels.names


def test_buffers_of_replicas_travel_by_few_kernels() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(8)))
    model.register_buffer("mask", torch.tensor([-0.0, 1.0]))
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.copy_(torch.rand(buffer.shape) * 9 - 4)
    before = [buffer.clone() for buffer in model.buffers()]
    mirrors = ReplicaCopies(model, [CPU, CPU])
    mirrors.update(2)
    with Kernels() as kernels:
        replicas = mirrors.update(2)
    assert len([name for name in kernels.names if name not in VIEWS]) <= 4, kernels.names
    for replica in replicas:
        for old, new in zip(before, replica.buffers(), strict=True):
            assert new._version == 0  # nothing has been written to it so far
            assert (
                new.view(torch.uint8).equal(old.view(torch.uint8)) if old.dim() else new.equal(old)
            )
    changed = [
        (a * 2, b * 3)
        for a, b in zip(*(list(replica.buffers()) for replica in replicas), strict=True)
    ]
    for values, *news in zip(changed, *(replica.buffers() for replica in replicas), strict=True):
        for value, new in zip(values, news, strict=True):
            new.copy_(value)
    with Kernels() as kernels:
        mirrors.merge_buffers([0.7, 0.3])
    assert len([name for name in kernels.names if name not in VIEWS]) <= 6, kernels.names
    for (a, b), (name, own) in zip(changed, model.named_buffers(), strict=True):
        is_average = "running" in name
        assert own.equal(a.clone().add_(b - a, alpha=0.3) if is_average else a), name


def test_a_learning_rate_on_a_device_is_not_read_by_the_step() -> None:
    step = make(nn.Linear(3, 4))
    # reading a value of the device meta is an error
    step.optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    assert isinstance(step._begin(0), torch.Tensor)
    numbers = StepNumbers(torch.ones(()), torch.ones(()), torch.zeros(()))
    assert StepResult(0, numbers, torch.tensor(0.5)).lr == 0.5


def test_a_result_has_its_numbers_on_the_host_and_makes_tensors_when_they_are_read() -> None:
    result = StepResult(3, StepNumbers(1.5, 6.0, 0.0), 0.1)
    assert result.on_hand == (1.5, 6.0, 0.0)
    assert (result.loss.dtype, result.loss.shape, float(result.loss)) == (torch.float64, (), 1.5)
    assert (float(result.count), float(result.stop)) == (6.0, 0.0)
    with pytest.raises(AttributeError, match="step"):
        result.step = 4
    other = pickle.loads(pickle.dumps(replace(result, grad_norm=torch.tensor(2.0))))
    assert (other.step, other.on_hand, other.lr, float(other.grad_norm)) == (
        3,
        result.on_hand,
        0.1,
        2.0,
    )
    assert "loss=1.5" in repr(other)


def test_a_step_on_the_cpu_has_a_result_of_numbers() -> None:
    result = make(nn.Linear(3, 4)).run(batch())
    assert all(isinstance(number, float) for number in result.on_hand)
    assert result.marks is None and result.replicas is None
