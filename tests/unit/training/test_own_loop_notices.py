"""What `lockstep.prepare` notices in the body of a loop on one worker, and what it lets pass."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError

SAMPLES, FEATURES, CLASSES, BATCH = 22, 6, 5, 8


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


class Loop:
    """A prepared model, optimizer and loader, and a loop over them."""

    def __init__(self, *others: Any, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(3)
        model = model or nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        others = tuple(other(self.optimizer, model) for other in others)
        objects = lockstep.prepare(
            model, self.optimizer, DataLoader(data(), BATCH), *others, **options
        )
        self.model, self.optimizer, self.loader, *self.others = objects

    def run(
        self,
        loss: Callable[..., torch.Tensor] = F.cross_entropy,
        *,
        before_step: Callable[[], object] = lambda: None,
        after_step: Callable[[], object] = lambda: None,
        **step: Any,
    ) -> list[torch.Tensor]:
        """Train an epoch; returns the losses."""
        losses = []
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            value = loss(self.model(inputs), targets)
            value.backward()
            before_step()
            mean = self.optimizer.step(loss=value, **step)
            after_step()
            assert (mean is not None) == self.optimizer.stepped
            losses += [] if mean is None else [mean]
        return losses

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


# --- schedulers and averages
# --------------------------------------------------------------------------------


def of_class(kind: type[Any], **options: Any) -> Callable[..., Any]:
    return lambda optimizer, _model: kind(optimizer, **options)


class Halving(lr_scheduler.LRScheduler):
    """A scheduler of one's own, whose `step` does all by itself."""

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] /= 2 if self.last_epoch % 8 == 0 and self.last_epoch else 1


SCHEDULERS = [
    of_class(
        lr_scheduler.StepLR, step_size=8, gamma=0.5
    ),  # by value: changes in a batch's last shard only
    of_class(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4),
    of_class(Halving),
    lambda optimizer, _: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
    lambda optimizer, _: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 2)]),
]


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("made_before", [True, False])
def test_a_scheduler_that_was_not_given_is_noticed_where_it_steps(
    make: Callable[..., Any], made_before: bool
) -> None:
    torch.manual_seed(3)
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(optimizer, model) if made_before else None
    loader = lockstep.prepare(model, optimizer, DataLoader(data(), BATCH), virtual_workers=4)[2]
    scheduler = scheduler or make(optimizer, model)
    with pytest.raises(
        ConfigError,
        match=r"scheduler.* once a global batch.*Give the scheduler to lockstep.prepare",
    ):
        for inputs, targets in loader:
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


def test_a_scheduler_that_was_not_given_may_step_between_epochs_and_where_the_step_is_done() -> (
    None
):
    loop = Loop(virtual_workers=4)
    by_epoch = lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
    loop.run()
    by_epoch.step()
    by_step = lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
    loop.run(after_step=lambda: by_step.step() if loop.optimizer.stepped else None)
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


def test_a_scheduler_that_was_not_given_may_step_where_no_worker_has_several_shards() -> None:
    loop = Loop()
    scheduler = lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
    loop.run(after_step=scheduler.step)
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_that_was_given_steps_once_a_batch_and_can_be_saved(
    make: Callable[..., Any],
) -> None:
    loop = Loop(make, virtual_workers=4)
    (scheduler,) = loop.others
    loop.run(after_step=scheduler.step)
    plain = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    expected = make(plain, None)
    for _ in loop.loader.batches():
        plain.step()
        expected.step()
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(plain.param_groups[0]["lr"])
    saved = io.BytesIO()
    torch.save(scheduler.state_dict(), saved)
    assert scheduler.state_dict().keys() == expected.state_dict().keys()
    assert type(scheduler) is type(expected)


def test_a_prepared_scheduler_keeps_its_class_and_can_be_copied_and_pickled() -> None:
    (scheduler,) = Loop(of_class(lr_scheduler.StepLR, step_size=8), virtual_workers=4).others
    assert type(scheduler) is lr_scheduler.StepLR
    assert type(pickle.loads(pickle.dumps(scheduler))) is lr_scheduler.StepLR
    assert type(copy.deepcopy(scheduler)) is lr_scheduler.StepLR


def test_learning_rates_set_by_hand_are_compared_over_the_shards_of_a_batch() -> None:
    loop = Loop(virtual_workers=4)
    group = loop.optimizer.param_groups[0]

    def decay() -> None:
        group["weight_decay"] += 0.1

    with pytest.raises(
        ConfigError,
        match=r"weight_decay: .*'weight_decay' of parameter group 0 is 0.0 in one shard",
    ):
        loop.run(after_step=decay)
    group["weight_decay"] = 0.0
    loop = Loop(virtual_workers=4)
    group = loop.optimizer.param_groups[0]
    rates = iter([0.3] * 4 + [0.2] * 4 + [0.1] * 4)  # a function of the batch, set in each turn
    loop.run(before_step=lambda: group.update(lr=next(rates)))
    assert group["lr"] == 0.1


def average(optimizer: Any, model: nn.Module, **options: Any) -> AveragedModel:
    return AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), **options
    )


def test_an_average_that_was_not_given_is_noticed_where_it_is_updated() -> None:
    loop = Loop(virtual_workers=4)
    of_it, of_another = average(None, loop.model), average(None, other := nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"average: .*Give the average to lockstep.prepare"):
        loop.run(after_step=lambda: of_it.update_parameters(loop.model))
    loop = Loop(virtual_workers=4)
    of_it = average(None, loop.model)
    loop.run(after_step=lambda: of_another.update_parameters(other))
    loop.run(
        after_step=lambda: of_it.update_parameters(loop.model) if loop.optimizer.stepped else None
    )
    of_it.update_parameters(loop.model)
    assert int(of_it.n_averaged) == 4 and int(of_another.n_averaged) == 12


def test_an_average_that_was_given_is_updated_once_a_batch() -> None:
    loop = Loop(average, virtual_workers=4)
    (of_it,) = loop.others
    loop.run(after_step=lambda: of_it.update_parameters(loop.model))
    assert int(of_it.n_averaged) == 3
    with pytest.raises(ConfigError, match="at least one module"):
        lockstep.prepare(of_it)


# --- gradients
# ----------------------------------------------------------------------------------------------


def clip_head(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.model[2].parameters(), 0.01)


def clamp_data(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.grad.data.clamp_(-1e-3, 1e-3)


def replace_one(loop: Loop) -> None:
    loop.model[2].bias.grad = loop.model[2].bias.grad.clamp(-1e-3, 1e-3)


@pytest.mark.parametrize("virtual_workers", [None, 4])
@pytest.mark.parametrize("change", [clip_head, clamp_data, replace_one])
def test_gradients_changed_by_hand_are_noticed(
    change: Callable[[Loop], None], virtual_workers: int | None
) -> None:
    loop = Loop(virtual_workers=virtual_workers)
    with pytest.raises(
        ConfigError, match=r"gradients: .*not changed.*max_grad_norm= of lockstep.prepare"
    ):
        loop.run(before_step=lambda: change(loop))


def test_gradients_changed_between_batches_are_noticed_while_they_accumulate() -> None:
    for virtual_workers in (None, 4):
        loop = Loop(virtual_workers=virtual_workers)
        batches = iter(loop.loader.batches())
        for inputs, targets in loop.optimizer.shards(next(batches)):
            F.cross_entropy(loop.model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
        with pytest.raises(ConfigError, match=r"gradients: .*not changed"):
            next(loop.optimizer.shards(next(batches)))


def test_gradients_may_be_read_removed_zeroed_and_set() -> None:
    loop = Loop()
    first, last = loop.model[0], loop.model[2]

    def look() -> None:
        assert nn.utils.get_total_norm([p.grad for p in loop.model.parameters()]) > 0
        first.bias.grad = None
        last.bias.grad.zero_()

    before = loop.weights()
    loop.run(before_step=look)
    after = loop.weights()
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [
        False,
        True,
        False,
        True,
    ]
    for inputs, targets in loop.loader:
        loop.optimizer.zero_grad()
        loss = F.cross_entropy(loop.model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(loop.model.parameters()))
        for p, gradient in zip(loop.model.parameters(), gradients, strict=True):
            p.grad = gradient
        loop.optimizer.step()


def by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


WAYS_TO_ZERO = [nn.Module.zero_grad, by_hand, in_place]


@pytest.mark.parametrize("zero", WAYS_TO_ZERO)
@pytest.mark.parametrize("virtual_workers", [None, 4])
def test_each_way_to_zero_gradients_is_that_of_the_optimizer(
    zero: Callable[[nn.Module], None], virtual_workers: int | None
) -> None:
    """Two optimizers, as in DCGAN: passes of the second one reach the parameters of the first."""

    def train(zero: Callable[[nn.Module], object] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        generator, judge = nn.Linear(4, 4), nn.Linear(4, 1)
        for_generator, for_judge = (
            torch.optim.Adam(generator.parameters()),
            torch.optim.Adam(judge.parameters()),
        )
        loader = DataLoader(TensorDataset(torch.randn(14, 4)), 4)
        objects = (generator, judge, for_generator, for_judge, loader)
        loader = lockstep.prepare(*objects, virtual_workers=virtual_workers)[-1]
        steps: Any = [(for_judge, judge), (for_generator, generator)]
        for batch in loader.batches():
            for optimizer, model in steps:
                for (real,) in optimizer.shards(batch):
                    _ = optimizer.zero_grad() if zero is None else zero(model)
                    fake = generator(torch.randn_like(real))
                    loss = judge(fake).pow(2).mean()
                    if model is judge:
                        loss = judge(real).pow(2).mean() + (judge(fake.detach()) - 1).pow(2).mean()
                    loss.backward()
                    optimizer.step()
        return [p.detach() for model in (generator, judge) for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(zero), train(None), strict=True))


@pytest.mark.parametrize("zero", WAYS_TO_ZERO)
@pytest.mark.parametrize("virtual_workers", [None, 4])
def test_each_way_to_zero_accumulated_gradients_between_batches_is_that_of_the_optimizer(
    zero: Callable[[nn.Module], None], virtual_workers: int | None
) -> None:
    def train(zero: Callable[[nn.Module], object] | None) -> list[torch.Tensor]:
        loop = Loop(virtual_workers=virtual_workers)
        for number, batch in enumerate(loop.loader.batches()):
            for inputs, targets in loop.optimizer.shards(batch):
                F.cross_entropy(loop.model(inputs), targets).backward()
                if number:
                    loop.optimizer.step()
            if number != 1:  # the gradients of the first batch are dropped
                _ = loop.optimizer.zero_grad() if zero is None else zero(loop.model)
            else:
                loop.optimizer.zero_grad()
        return loop.weights()

    assert all(torch.equal(a, b) for a, b in zip(train(zero), train(None), strict=True))


# --- losses
# -------------------------------------------------------------------------------------------------


def one_hot(targets: torch.Tensor) -> torch.Tensor:
    return F.one_hot(targets, CLASSES).float()


SUMS: list[Callable[..., torch.Tensor]] = [
    lambda output, targets: F.cross_entropy(output, targets, reduction="sum"),
    lambda output, targets: F.mse_loss(output, one_hot(targets), reduction="sum"),
    lambda output, targets: F.l1_loss(output, one_hot(targets), reduction="sum"),
    lambda output, targets: F.binary_cross_entropy_with_logits(
        output, one_hot(targets), reduction="sum"
    ),
    lambda output, targets: F.kl_div(output.log_softmax(1), one_hot(targets), reduction="sum"),
    lambda output, targets: ((output - one_hot(targets)) ** 2).sum(),
    lambda output, targets: (output - one_hot(targets)).abs().sum(1).sum(),
    lambda output, targets: -output.log_softmax(1).gather(1, targets[:, None]).sum(),
    lambda output, targets: F.cross_entropy(output, targets)
    + F.mse_loss(output, one_hot(targets), reduction="sum"),
]


@pytest.mark.parametrize("loss", SUMS)
def test_a_loss_that_is_a_sum_is_refused_on_one_worker(loss: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"loss: expected a mean over the samples .* got a sum"):
        Loop().run(loss)


MEANS: list[Callable[..., torch.Tensor]] = [
    F.cross_entropy,
    lambda output, targets: F.cross_entropy(output, targets, reduction="sum") / len(targets),
    lambda output, targets: F.mse_loss(output, one_hot(targets), reduction="sum")
    * (1 / output.numel()),
    lambda output, targets: (
        F.cross_entropy(output, targets, reduction="none") / len(targets)
    ).sum(),
    lambda output, targets: (
        F.cross_entropy(output, targets, reduction="none")
        * torch.full((len(output),), 1 / len(output))
    ).sum(),
    lambda output, targets: (output - one_hot(targets)).pow(2).sum(1).mean(),
    lambda output, targets: F.binary_cross_entropy_with_logits(
        output, one_hot(targets), weight=torch.full_like(output, 1 / len(output)), reduction="sum"
    ),
    lambda output, targets: sum(
        [F.cross_entropy(output, targets), output.pow(2).mean()], torch.zeros(())
    ),
    lambda output, targets: torch.stack([F.cross_entropy(output, targets)] * len(output)).sum()
    / len(output),
    lambda output, targets: F.cross_entropy(output, targets)
    + F.triplet_margin_loss(output, output + 1, output * 2),
]


@pytest.mark.parametrize("loss", MEANS)
@pytest.mark.parametrize("virtual_workers", [None, 2])
def test_losses_that_are_means_pass(
    loss: Callable[..., torch.Tensor], virtual_workers: int | None
) -> None:
    Loop(virtual_workers=virtual_workers).run(loss)


def test_sums_of_the_weights_pass_even_with_as_many_rows_as_samples() -> None:
    model = nn.Sequential(
        nn.Linear(FEATURES, BATCH), nn.Linear(BATCH, BATCH), nn.Linear(BATCH, CLASSES)
    )

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inner = model[1].weight
        decay = torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()
        orthogonal = (inner.T @ inner - torch.eye(BATCH)).pow(2).sum()
        near = F.mse_loss(inner, torch.zeros(BATCH, BATCH), reduction="sum")
        return (
            F.cross_entropy(output, targets)
            + decay
            + orthogonal
            + near
            + sum(p.abs().sum() for p in model.parameters())
        )

    Loop(model=model).run(loss)


def test_a_sum_whose_gradients_are_not_used_passes() -> None:
    """As in the fast gradient sign method: the first pass is for the gradient of the inputs."""
    for zero in (nn.Module.zero_grad, by_hand, in_place, None):
        loop = Loop()
        for inputs, targets in loop.loader:
            moved = inputs.requires_grad_()
            F.cross_entropy(loop.model(moved), targets, reduction="sum").backward()
            assert moved.grad is not None
            _ = loop.optimizer.zero_grad() if zero is None else zero(loop.model)
            F.cross_entropy(loop.model(inputs + moved.grad.sign()), targets).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def similarity(output: torch.Tensor) -> torch.Tensor:
    unit = F.normalize(output, dim=1)
    return unit @ unit.T


def off_diagonal(output: torch.Tensor) -> torch.Tensor:
    return similarity(output)[~torch.eye(len(output), dtype=torch.bool)]


COMPARISONS: list[Callable[..., torch.Tensor]] = [
    lambda output, _: F.cross_entropy(similarity(output) / 0.5, torch.arange(len(output))),
    lambda output, _: off_diagonal(output).pow(2).mean(),
    lambda output, targets: F.cross_entropy(output, targets) + 0.01 * output.mean(0).pow(2).sum(),
    lambda output, targets: 1
    - 2 * (output.sigmoid() * one_hot(targets)).sum() / (output.sigmoid().sum() + len(output)),
]


@pytest.mark.parametrize("loss", COMPARISONS)
def test_a_loss_that_compares_samples_is_refused_on_one_worker(
    loss: Callable[..., torch.Tensor],
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"loss: .* samples of a part of the batch depend on each other.*whole_batch",
    ):
        Loop().run(loss)


def test_virtual_workers_may_compare_the_samples_of_their_shards() -> None:
    Loop(virtual_workers=2).run(COMPARISONS[0])


def views(
    model: nn.Module, interleaved: bool
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    def two(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pair = torch.stack([inputs, 2 * inputs], int(interleaved)).flatten(0, 1)
        output = model(pair)
        return (output[::2], output[1::2]) if interleaved else output.chunk(2)

    return two


@pytest.mark.parametrize("interleaved", [True, False])
def test_two_views_of_a_sample_may_be_compared_with_each_other(interleaved: bool) -> None:
    loop = Loop()
    two = views(loop.model, interleaved)
    for inputs, _ in loop.loader:
        loop.optimizer.zero_grad()
        first, second = two(inputs)
        (1 - F.cosine_similarity(first, second)).mean().backward()
        loop.optimizer.step()
    with pytest.raises(ConfigError, match="depend on each other"):
        for inputs, _ in loop.loader:
            loop.optimizer.zero_grad()
            first, second = two(inputs)
            F.cross_entropy(first @ second.T, torch.arange(len(first))).backward()
            loop.optimizer.step()


def test_batch_norm_between_two_models_and_sequences_first_pass() -> None:
    first, second = (
        nn.Linear(FEATURES, 4),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)),
    )
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    first, second, optimizer, loader = lockstep.prepare(
        first, second, optimizer, DataLoader(data(), BATCH)
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(second(first(inputs)), targets).backward()
        optimizer.step()
    loop = Loop()
    for inputs, _ in loop.loader:
        loop.optimizer.zero_grad()
        output = loop.model(
            inputs.expand(len(inputs), *inputs.shape)
        )  # (time, sample, feature), as many of each
        (output[1:] - output[:-1]).pow(2).mean().backward()  # smooth in time
        loop.optimizer.step()


# --- counts
# -------------------------------------------------------------------------------------------------


def test_a_batch_in_which_nothing_counts_is_refused_before_the_update() -> None:
    for virtual_workers in (None, 4):
        loop = Loop(virtual_workers=virtual_workers)
        before = loop.weights()
        with pytest.raises(
            ConfigError,
            match=r"count: expected something that counts in each global batch, got a count",
        ):
            loop.run(lambda output, _: output.sum() * 0 / 0, count=torch.zeros(()))
        assert all(torch.equal(a, b) for a, b in zip(before, loop.weights(), strict=True))


def test_counts_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="count: expected a number, got one that requires a gradient"
    ):
        Loop().run(count=torch.ones((), requires_grad=True))
    loop = Loop()
    with pytest.raises(
        ConfigError, match="count: expected no gradients of earlier batches in a step with count="
    ):
        for number, (inputs, targets) in enumerate(loop.loader):
            F.cross_entropy(loop.model(inputs), targets).backward()
            if number:
                loop.optimizer.step(count=len(inputs))


# --- the whole batch
# ----------------------------------------------------------------------------------------


def test_the_whole_batch_is_for_a_body_without_virtual_workers() -> None:
    with pytest.raises(ConfigError, match="whole_batch: expected a call in the body of a loop"):
        lockstep.whole_batch(torch.zeros(2, 2))
    loop = Loop()
    for inputs, _ in loop.loader:
        assert torch.equal(lockstep.whole_batch(inputs), inputs)
        with pytest.raises(
            ConfigError, match=r"output: expected 8 rows.*got 16\. Call it for each view"
        ):
            lockstep.whole_batch(torch.cat([inputs, inputs]))
        with pytest.raises(ConfigError, match=r"count: expected none with lockstep\.whole_batch"):
            loop.optimizer.step(count=1)
        break
    for inputs, _ in Loop(virtual_workers=2).loader:
        with pytest.raises(
            ConfigError, match="virtual_workers: expected none in a loop that uses the whole batch"
        ):
            lockstep.whole_batch(inputs)
