"""Loops with `lockstep.prepare` in which parts of a batch were weighted wrongly, or refused
although they are right.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from support.outcome import RanksFailedError
from support.pool import Pool

FEATURES, CLASSES, BATCH = 5, 3, 12
Tensors = list[torch.Tensor]


def data(samples: int = 48, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def weights(model: nn.Module) -> Tensors:
    return [p.detach() for p in model.parameters()]


def check_alike(
    pool: Pool, loop: Any, *args: Any, exact: bool = False, counts: tuple[int, ...] = (1, 2, 3)
) -> None:
    """Check that a loop returns the same on all ranks of each number of workers."""
    results = [
        ours for workers in counts for ours in pool.run(loop, *args, workers=workers, backend="shm")
    ]
    for theirs in results[1:]:
        for a, b in zip(results[0], theirs, strict=True):
            assert torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-5)


# --- counts
# -------------------------------------------------------------------------------------------------


def detection(virtual_workers: int | None) -> Tensors:
    """Losses of all places, divided by the number of objects; many parts have no object."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, labels = data().tensors
    objects = (torch.arange(48) % BATCH == 7).float()
    loader = DataLoader(TensorDataset(inputs, labels, objects), BATCH)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, virtual_workers=virtual_workers
    )
    losses = []
    for x, y, found in loader:
        optimizer.zero_grad()
        scores, count = model(x), found.sum()
        places = F.cross_entropy(scores, y, reduction="none").sum() / count.clamp(min=1)
        loss = places + 0.5 * ((scores.square().mean(1) * found).sum() / max(1, int(count)))
        loss.backward()
        mean = optimizer.step(loss=loss, count=count)
        losses += [mean] if optimizer.stepped else []
    return [*weights(model), torch.stack(losses)]


@pytest.mark.parametrize("virtual_workers", [None, 6])
def test_the_sum_of_a_part_that_counts_nothing_is_not_lost(
    pool: Pool, virtual_workers: int | None
) -> None:
    check_alike(pool, detection, virtual_workers, exact=virtual_workers is not None)


def test_the_sums_of_parts_are_those_of_one_device(pool: Pool) -> None:
    for ours, theirs in zip(detection(None), pool.run(detection, 6, workers=2)[0], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def means_of_labels(virtual_workers: int | None) -> Tensors:
    """Means over labels, divided once more; of many parts no label counts, and their means are no
    numbers.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, labels = data().tensors
    labels = labels.where(torch.arange(48) % BATCH == 7, -100)
    loader = DataLoader(TensorDataset(inputs, labels), BATCH)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, virtual_workers=virtual_workers
    )
    for x, y in loader:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step(count=(y >= 0).sum())
    assert all(p.isfinite().all() for p in model.parameters())
    return weights(model)


@pytest.mark.parametrize("virtual_workers", [None, 6])
def test_a_mean_that_is_divided_once_more_is_a_mean(
    pool: Pool, virtual_workers: int | None
) -> None:
    check_alike(pool, means_of_labels, virtual_workers, exact=virtual_workers is not None)


# --- two loaders
# --------------------------------------------------------------------------------------------


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def half_labelled(
    how: str, virtual_workers: int | None, labelled: int = BATCH, unlabelled: int = 24
) -> Tensors:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [
        DataLoader(data(), labelled, drop_last=True, shuffle=True),
        DataLoader(data(100, seed=1), unlabelled, drop_last=True, shuffle=True),
    ]
    prepared = lockstep.prepare(model, optimizer, *loaders, virtual_workers=virtual_workers)
    model, optimizer, first, second = prepared
    losses = []
    others = forever(second)
    for _ in range(2):
        pairs = (
            zip(first, second, strict=False)
            if how == "zip"
            else ((batch, next(others)) for batch in first)
        )
        for (x, y), (u, _) in pairs:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + model(u).square().mean()
            loss.backward()
            mean = optimizer.step(loss=loss)
            losses += [mean] if optimizer.stepped else []
    assert len(losses) == 8
    return [*weights(model), torch.stack(losses)]


@pytest.mark.parametrize("how", ["zip", "next"])
@pytest.mark.parametrize("virtual_workers", [None, 6])
def test_two_loaders_give_the_parts_of_one_step(
    pool: Pool, how: str, virtual_workers: int | None
) -> None:
    check_alike(pool, half_labelled, how, virtual_workers, exact=virtual_workers is not None)


def test_two_loaders_that_divide_their_batches_into_other_shares_are_refused(pool: Pool) -> None:
    with pytest.raises(
        RanksFailedError,
        match=r"loader: expected a second loader .* same shares.*8 of its 16 samples",
    ):
        pool.run(half_labelled, "zip", None, 9, 16, workers=2)


def evaluating_within_a_body() -> Tensors:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = DataLoader(data(), BATCH), DataLoader(data(10, seed=1), 4)
    model, optimizer, loader, held_out = lockstep.prepare(model, optimizer, *loaders)
    seen = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            seen.append(
                lockstep.init().allreduce(torch.tensor(sum(len(inputs) for inputs, _ in held_out)))
            )
    return [*weights(model), torch.stack(seen)]


def test_an_evaluation_may_be_within_a_body(pool: Pool) -> None:
    check_alike(pool, evaluating_within_a_body)


# --- sharpness-aware minimisation
# -----------------------------------------------------------------------------


class Ascent(torch.optim.Optimizer):
    """Moves the weights up the gradient by a distance of `rho`, until `restore`."""

    def __init__(self, params: Any, rho: float) -> None:
        super().__init__(params, {"rho": rho})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        for p in parameters:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / norm))

    @torch.no_grad()
    def restore(self, *_: Any) -> None:
        for p, state in self.state.items():
            p.copy_(state["before"])


def sharpness_aware(in_one_body: bool, virtual_workers: int | None) -> Tensors:
    model = network()
    ascent, optimizer = Ascent(model.parameters(), 0.5), torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(ascent.restore)
    objects = model, ascent, optimizer, DataLoader(data(), BATCH)
    model, ascent, optimizer, loader = lockstep.prepare(*objects, virtual_workers=virtual_workers)
    for batch in loader.batches():
        groups = [(ascent, optimizer)] if in_one_body else [(ascent,), (optimizer,)]
        for group in groups:
            for x, y in group[0].shards(batch):
                for each in group:
                    each.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    each.step()
    return weights(model)


@pytest.mark.parametrize(
    ("in_one_body", "virtual_workers"), [(True, None), (False, None), (False, 4)]
)
def test_an_optimizer_that_is_prepared_may_move_the_weights_between_two_passes(
    pool: Pool, in_one_body: bool, virtual_workers: int | None
) -> None:
    check_alike(
        pool, sharpness_aware, in_one_body, virtual_workers, exact=virtual_workers is not None
    )


def forgotten(reduces: bool) -> Tensors:
    """An optimizer that was not given to prepare, in a loop that may sum the gradients itself."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, loader = lockstep.prepare(model, DataLoader(data(), BATCH))
    comm = lockstep.init()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters() if reduces else ():
            p.grad = comm.allreduce(p.grad) / comm.size
        optimizer.step()
    return weights(model)


def test_an_optimizer_that_was_forgotten_is_noticed_unless_the_loop_sums_the_gradients(
    pool: Pool,
) -> None:
    check_alike(pool, forgotten, True)
    with pytest.raises(
        RanksFailedError,
        match=r"optimizer: expected a step of optimizers that were given .* one of SGD",
    ):
        pool.run(forgotten, False, workers=2)


# --- norms
# --------------------------------------------------------------------------------------------------


def measured() -> Tensors:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(40), BATCH)
    model, optimizer, loader = lockstep.prepare(model, optimizer, loader, max_grad_norm=math.inf)
    norms = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert torch.allclose(optimizer.grad_norm, total)
        norms.append(optimizer.grad_norm)
    return [*weights(model), torch.stack(norms)]


def test_the_norm_is_measured_without_clipping(pool: Pool) -> None:
    check_alike(pool, measured)


# --- forward passes that change parameters
# --------------------------------------------------------------------


class ActNorm(nn.Module):
    """Scales features by the statistics of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.is_new = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.is_new:
            self.is_new = False
            with torch.no_grad():
                self.scale.copy_(1 / inputs.std(0))
        return inputs * self.scale


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, FEATURES, max_norm=1.0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.table((inputs[:, 0] * 5).long().abs())


def changing(layer: type[nn.Module], how: str, called_before: bool = False) -> Tensors:
    torch.manual_seed(0)
    model = nn.Sequential(layer(), network())
    if called_before:
        with torch.no_grad():
            model(data().tensors[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "trainer":
        trainer = lockstep.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), global_batch_size=BATCH, callbacks=[]
        )
        trainer.fit(data(), epochs=1)
        return weights(model)
    model, optimizer, loader = lockstep.prepare(model, optimizer, DataLoader(data(), BATCH))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("how", ["trainer", "prepare"])
def test_forward_passes_that_change_parameters_are_named(pool: Pool, how: str) -> None:
    said = r"got one that changes 0\.scale, of ActNorm: .*call the model once before the training"
    with pytest.raises(RanksFailedError, match=said):
        pool.run(changing, ActNorm, how, workers=2)
    said = r"got one that changes 0\.table\.weight, of Embedding: .*Leave max_norm out"
    with pytest.raises(RanksFailedError, match=said):
        pool.run(changing, Words, how, workers=2)


@pytest.mark.parametrize("how", ["trainer", "prepare"])
def test_layers_that_are_initialised_before_train_alike(pool: Pool, how: str) -> None:
    check_alike(pool, changing, ActNorm, how, True)
    changing(Words, how)  # one worker makes it of the whole batch


# --- what is said
# ---------------------------------------------------------------------------------------------


def counted_by_hand(prepared: bool) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    model = network()
    loader: Any = lockstep.Loader(data(), BATCH, shuffle=False)
    if prepared:
        model, loader = lockstep.prepare(model, loader)
    for _ in range(2):
        with torch.no_grad():
            for inputs, _ in loader:
                model(inputs)
    for _ in lockstep.Loader(data(), BATCH):
        pass  # with gradients, as in a training
    lockstep.evaluate(model, lockstep.Loader(data(), BATCH, shuffle=False), F.cross_entropy)
    logging.getLogger("lockstep").removeHandler(handler)
    return [line for line in lines if "a loop without gradients" in line]


@pytest.mark.parametrize("prepared", [True, False])
def test_rank_0_says_once_that_a_loop_without_gradients_sees_a_part(
    pool: Pool, prepared: bool
) -> None:
    said = [
        len(lines)
        for workers in (1, 2)
        for lines in pool.run(counted_by_hand, prepared, workers=workers)
    ]
    assert said == [0, 1, 0]
