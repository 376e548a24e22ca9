"""`lockstep.prepare`: loops that keep their own forward and backward passes train alike at any
number of workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from support.outcome import RanksFailedError
from support.pool import Pool

SAMPLES, FEATURES, CLASSES, BATCH = 29, 6, 3, 8


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


def classifier(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 16), *layers, nn.Tanh(), nn.Linear(16, CLASSES))


def close(models: list[list[torch.Tensor]], tolerance: float = 1e-5) -> bool:
    return all(
        torch.allclose(ours, theirs, atol=tolerance)
        for other in models[1:]
        for ours, theirs in zip(models[0], other, strict=True)
    )


def weights(*models: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for model in models for tensor in model.state_dict().values()]


def on_workers(
    pool: Pool, loop: Callable[..., Any], *args: Any, counts: tuple[int, ...] = (1, 2, 3)
) -> list[Any]:
    """The results of `loop` on each number of workers; those of all ranks of a job must be
    equal.
    """
    results = []
    for workers in counts:
        ranks = pool.run(loop, *args, workers=workers, backend="shm")
        assert all(
            torch.equal(a, b) for other in ranks for a, b in zip(ranks[0], other, strict=True)
        )
        results.append(ranks[0])
    return results


def same_bits(results: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for other in results for a, b in zip(results[0], other, strict=True)
    )


def check_equal(
    results: list[list[torch.Tensor]], virtual_workers: int | None, tolerance: float = 1e-5
) -> None:
    """Check that the results agree; with virtual workers, in every bit."""
    assert close(results, tolerance)
    assert virtual_workers is None or same_bits(results)


def train(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loader: Iterable[Any],
    epochs: int = 1,
    zero_grad: bool = True,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
) -> None:
    """The loop of everybody, with and without Lockstep."""
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for _ in range(epochs):
        for inputs, targets in loader:
            for optimizer in optimizers if zero_grad else ():
                optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            before_step()
            for optimizer in optimizers:
                optimizer.step()
            after_step()


# --- the loop of everybody
# ----------------------------------------------------------------------------------


def plain_loop(epochs: int = 3) -> list[torch.Tensor]:
    """The loop on one device, without Lockstep, over the order of samples that Lockstep uses."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, lockstep.Loader(data(), BATCH), epochs)
    return weights(model)


def prepared_loop(
    virtual_workers: int | None = None, *layers: nn.Module, batch: int = BATCH, **options: Any
) -> list[torch.Tensor]:
    model = classifier(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), batch, shuffle=True, drop_last=bool(layers))
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, virtual_workers=virtual_workers, **options
    )
    train(model, optimizer, loader, epochs=3)
    return weights(model)


def test_the_loop_trains_as_on_one_device(pool: Pool) -> None:
    assert same_bits([pool.run(plain_loop, workers=1)[0], pool.run(prepared_loop, workers=1)[0]])
    results = on_workers(pool, prepared_loop)
    assert close(results)


# 29 samples in batches of 8: the last batch has 5, so that some of 7 shards, and of 3 workers with
# 12, have none
@pytest.mark.parametrize("virtual_workers", [3, 7, 12])
def test_virtual_workers_give_the_same_bits(pool: Pool, virtual_workers: int) -> None:
    results = on_workers(pool, prepared_loop, virtual_workers)
    assert same_bits(results)
    assert close([results[0], pool.run(plain_loop, workers=1)[0]])


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(16), nn.Dropout(0.5)])
def test_batch_norm_and_dropout_give_the_same_bits(pool: Pool, layer: nn.Module) -> None:
    results = on_workers(pool, functools.partial(prepared_loop, batch=12), 6, layer)
    assert same_bits(results)


def test_buffers_and_replicas_stay_equal_without_virtual_workers(pool: Pool) -> None:
    on_workers(pool, prepared_loop, None, nn.BatchNorm1d(16), counts=(2, 3))


def last_batch_of_one(virtual_workers: int | None) -> list[torch.Tensor]:
    """The last batch of an epoch has one sample, so that other workers have none."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.utils.data.Subset(data(), range(9)), 8)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, virtual_workers=virtual_workers
    )
    train(model, optimizer, loader, epochs=2)
    return weights(model)


@pytest.mark.parametrize("virtual_workers", [None, 3, 6])
def test_a_worker_without_samples_takes_part(pool: Pool, virtual_workers: int | None) -> None:
    results = on_workers(pool, last_batch_of_one, virtual_workers)
    check_equal(results, virtual_workers)


# --- accumulation, clipping, schedules, counts
# --------------------------------------------------------------


def accumulating(virtual_workers: int | None) -> list[torch.Tensor]:
    """A step for every two batches; the second of the last pair is smaller."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), BATCH)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, virtual_workers=virtual_workers
    )
    for _ in range(2):
        for number, batch in enumerate(loader.batches()):
            for inputs, targets in optimizer.shards(batch):
                (F.cross_entropy(model(inputs), targets) / 2).backward()
                if number % 2:
                    optimizer.step()
            if number % 2:
                optimizer.zero_grad()
    return weights(model)


def accumulating_plainly() -> list[torch.Tensor]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for number, (inputs, targets) in enumerate(DataLoader(data(), BATCH)):
            (F.cross_entropy(model(inputs), targets) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("virtual_workers", [None, 6])
def test_gradients_of_several_batches_add_up(pool: Pool, virtual_workers: int | None) -> None:
    results = on_workers(pool, accumulating, virtual_workers)
    assert close([*results, pool.run(accumulating_plainly, workers=1)[0]], 1e-6)
    assert virtual_workers is None or same_bits(results)


def without_zero_grad() -> list[torch.Tensor]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = lockstep.prepare(model, optimizer, DataLoader(data(), BATCH))
    train(model, optimizer, loader, zero_grad=False)
    return weights(model)


def test_gradients_that_are_never_zeroed_add_up_as_on_one_device(pool: Pool) -> None:
    assert close(on_workers(pool, without_zero_grad), 1e-6)


def with_everything(virtual_workers: int | None) -> list[torch.Tensor]:
    """Clipping, a schedule, the mean loss of each step, and zero_grad after the step."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, loader, scheduler = lockstep.prepare(
        model,
        optimizer,
        DataLoader(data(), BATCH, shuffle=True),
        scheduler,
        virtual_workers=virtual_workers,
        max_grad_norm=0.2,
    )
    losses, norms = [], []
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        mean = optimizer.step(loss=loss)
        optimizer.zero_grad()
        scheduler.step()
        if mean is not None:
            losses.append(mean)
            norms.append(optimizer.grad_norm)
    assert len(losses) == len(loader) == 4
    assert scheduler.get_last_lr() == [0.05 * 0.9**4]
    assert min(norms) > 0.2
    return [*weights(model), torch.stack(losses)]


@pytest.mark.parametrize("virtual_workers", [None, 6])
def test_clipping_schedule_and_loss_are_those_of_the_global_batch(
    pool: Pool, virtual_workers: int | None
) -> None:
    results = on_workers(pool, with_everything, virtual_workers)
    check_equal(results, virtual_workers)


def mean_over_tokens(virtual_workers: int | None) -> list[torch.Tensor]:
    """Samples have 1 to 6 tokens that count; the loss is the mean over the tokens of the batch."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, DataLoader(data(), BATCH), virtual_workers=virtual_workers
    )
    losses = []
    for inputs, targets in loader:
        counts = torch.arange(FEATURES) <= targets[:, None]
        errors = (model(inputs[..., None])[..., 0] - 1) ** 2 * counts
        tokens = counts.sum()
        loss = errors.sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        losses.append(optimizer.step(loss=loss, count=tokens))
    return [*weights(model), torch.stack([loss for loss in losses if loss is not None])]


@pytest.mark.parametrize("virtual_workers", [None, 6])
def test_a_count_weighs_the_parts(pool: Pool, virtual_workers: int | None) -> None:
    results = on_workers(pool, mean_over_tokens, virtual_workers)
    check_equal(results, virtual_workers, 1e-6)


# --- several models and optimizers
# --------------------------------------------------------------------------


def gan(virtual_workers: int | None, by_optimizer: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, FEATURES))
    judge = nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    for_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    for_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
    loader = DataLoader(data(), 24, shuffle=True, drop_last=True)
    generator, judge, for_generator, for_judge, loader = lockstep.prepare(
        generator, judge, for_generator, for_judge, loader, virtual_workers=virtual_workers
    )

    def train_judge(real: torch.Tensor) -> None:
        fake = generator(torch.randn(len(real), 2)).detach()
        for_judge.zero_grad()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()).backward()
        for_judge.step()

    def train_generator(real: torch.Tensor) -> None:
        for_generator.zero_grad()
        F.softplus(-judge(generator(torch.randn(len(real), 2)))).mean().backward()
        for_generator.step()

    for _ in range(4):
        if by_optimizer:
            for batch in loader.batches():
                for real, _ in for_judge.shards(batch):
                    train_judge(real)
                for real, _ in for_generator.shards(batch):
                    train_generator(real)
        else:
            for real, _ in loader:
                train_judge(real)
                train_generator(real)
    return weights(generator, judge)


def test_a_gan_gives_the_same_bits(pool: Pool) -> None:
    before = weights(nn.Linear(2, 8))
    results = on_workers(pool, gan, 6, True)
    assert same_bits(results) and not close([before, results[0][:2]])


def test_an_unchanged_gan_needs_a_loop_for_each_optimizer_only_with_several_shards(
    pool: Pool,
) -> None:
    on_workers(pool, gan, None, False, counts=(1, 2))
    three = on_workers(pool, gan, 3, False, counts=(3,))
    assert len(three[0]) == 13
    with pytest.raises(
        RanksFailedError, match=r"no backward pass after an optimizer's step within one shard"
    ) as info:
        pool.run(gan, 3, False, workers=1)
    assert "optimizer.shards(batch)" in str(info.value)


def two_optimizers(virtual_workers: int | None) -> list[torch.Tensor]:
    """One loss, and an optimizer for each of two parts of the model."""
    model = classifier()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[-1].parameters(), lr=0.01)
    model, first, second, loader = lockstep.prepare(
        model, first, second, DataLoader(data(), BATCH), virtual_workers=virtual_workers
    )
    train(model, [first, second], loader)
    return weights(model)


@pytest.mark.parametrize("virtual_workers", [None, 6])
def test_two_optimizers_step_together(pool: Pool, virtual_workers: int | None) -> None:
    results = on_workers(pool, two_optimizers, virtual_workers)
    check_equal(results, virtual_workers)


def policy_gradient(virtual_workers: int) -> list[torch.Tensor]:
    """Reinforcement learning without a data set: each worker plays its share of the episodes."""
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    lockstep.prepare(model, optimizer, virtual_workers=virtual_workers)
    for _ in range(5):
        for episodes in optimizer.shards(12):
            losses = []
            for _ in range(episodes.start, episodes.stop):
                distribution = torch.distributions.Categorical(logits=model(torch.rand(4)))
                action = distribution.sample()
                losses.append(-distribution.log_prob(action) * (1.0 if action == 0 else -1.0))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    return weights(model)


def test_episodes_are_divided_among_the_workers(pool: Pool) -> None:
    results = on_workers(pool, policy_gradient, 6)
    assert same_bits(results) and results[0][1][0] > 0.1


# --- evaluation, precision, a later start
# -------------------------------------------------------------------


def evaluated(virtual_workers: int | None) -> list[int]:
    model, loader = lockstep.prepare(
        classifier(), DataLoader(data(), 2), virtual_workers=virtual_workers
    )
    with torch.no_grad():
        return [len(model(inputs)) for inputs, _ in loader]


@pytest.mark.parametrize("virtual_workers", [None, 6])
def test_without_gradients_each_sample_is_on_one_worker(
    pool: Pool, virtual_workers: int | None
) -> None:
    assert sum(sum(sizes) for sizes in pool.run(evaluated, virtual_workers, workers=2)) == SAMPLES


def dtypes() -> tuple[torch.dtype, torch.dtype]:
    model = classifier()
    inside = []
    model[0].register_forward_hook(lambda _m, _i, output: inside.append(output.dtype))
    model, optimizer, loader = lockstep.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data(), BATCH), precision="bf16"
    )
    inputs, targets = next(iter(loader))
    output = model(inputs)
    F.cross_entropy(output, targets).backward()
    optimizer.step()
    return inside[0], output.dtype


def test_bf16_is_used_within_the_model(pool: Pool) -> None:
    assert pool.run(dtypes, workers=1) == [(torch.bfloat16, torch.float32)]


def resumed_in_the_middle(stop: int | None) -> list[torch.Tensor]:
    model = classifier(nn.Dropout(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_loader = DataLoader(data(), BATCH, shuffle=True)
    model, optimizer, loader = lockstep.prepare(model, optimizer, data_loader, virtual_workers=4)

    def train(limit: int | None) -> None:
        steps = 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            steps += optimizer.step(loss=torch.zeros(())) is not None
            if limit is not None and steps == limit:
                break

    train(stop)
    if stop is not None:
        loader.load_state_dict(loader.state_dict())
        train(None)
    return weights(model)


def test_a_loop_resumes_from_a_saved_position(pool: Pool) -> None:
    whole, first = (pool.run(resumed_in_the_middle, stop, workers=2)[0] for stop in (None, 2))
    assert same_bits([whole, first])


# --- what is refused
# ----------------------------------------------------------------------------------------


def prepared(*others: Any, **options: Any) -> Any:
    model = classifier()
    return lockstep.prepare(model, torch.optim.SGD(model.parameters(), 0.1), *others, **options)


def clipped_by_hand() -> None:
    model, optimizer, loader = prepared(DataLoader(data(), BATCH))
    clip = functools.partial(nn.utils.clip_grad_norm_, model.parameters(), 0.1)
    train(model, optimizer, loader, zero_grad=False, before_step=clip)


def clipped_by_hand_outside_of_a_loader() -> None:
    model, optimizer = prepared()
    F.cross_entropy(model(data().tensors[0]), data().tensors[1]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def stepped_in_shards(is_chosen: Callable[[int], bool]) -> None:
    model, optimizer, loader = prepared(DataLoader(data(), BATCH), virtual_workers=4)
    for number, (inputs, targets) in enumerate(loader):
        F.cross_entropy(model(inputs), targets).backward()
        if is_chosen(number):
            optimizer.step()


def stepped_in_some_shards() -> None:
    stepped_in_shards(lambda number: number % 3 == 0)


def stepped_in_the_last_shard_only() -> None:
    stepped_in_shards(lambda number: number % 2 == 1)


def unknown_scheduler() -> None:
    model, optimizer, loader = prepared(DataLoader(data(), BATCH), virtual_workers=4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, loader, after_step=scheduler.step)


def accumulated_over_shards() -> None:
    model, optimizer, loader = prepared(DataLoader(data(), BATCH), virtual_workers=4)
    train(model, optimizer, loader, zero_grad=False)


def learning_rate_of_one_rank() -> None:
    model, optimizer, loader = prepared(DataLoader(data(), BATCH))

    def change_on_rank_1() -> None:
        if lockstep.init().rank:
            optimizer.param_groups[0]["lr"] = 0.5

    train(model, optimizer, loader, before_step=change_on_rank_1)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (
            clipped_by_hand,
            "gradients: expected gradients that are not changed between backward.. and step",
        ),
        (
            clipped_by_hand_outside_of_a_loader,
            "gradients: expected gradients that are not changed between backward",
        ),
        (
            stepped_in_some_shards,
            "step: expected a step of the optimizer in each shard of a batch, or in none",
        ),
        (
            stepped_in_the_last_shard_only,
            "step: expected a step of the optimizer in each shard of a batch, or in none",
        ),
        (unknown_scheduler, "Give the scheduler to lockstep.prepare"),
        (
            accumulated_over_shards,
            "expected optimizer.zero_grad.. in each shard, or after the step",
        ),
        (
            learning_rate_of_one_rank,
            "'lr' of parameter group 0 of the optimizer is 0.1 on rank 0 and 0.5 on rank 1",
        ),
    ],
)
def test_loops_with_other_results_than_on_one_device_are_refused(
    pool: Pool, loop: Callable[[], None], message: str
) -> None:
    with pytest.raises(RanksFailedError, match=message):
        pool.run(loop, workers=2)
