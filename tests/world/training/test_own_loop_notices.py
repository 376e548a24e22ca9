"""Loops with `lockstep.prepare` whose numbers depended on the number of workers: they are alike, or
say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from support.outcome import RanksFailedError
from support.pool import Pool

SAMPLES, FEATURES, BATCH = 29, 6, 8


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(
        inputs,
        (torch.arange(SAMPLES) % 5 < 2).float(),
        torch.randn(SAMPLES, 4, generator=generator),
    )


def network(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), *layers, nn.Tanh(), nn.Linear(8, 4))


def on_workers(
    pool: Pool,
    loop: Callable[..., list[torch.Tensor]],
    *args: Any,
    counts: tuple[int, ...] = (1, 2, 3),
) -> list[list[torch.Tensor]]:
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


def check_equal(results: list[list[torch.Tensor]], exact: bool, tolerance: float = 1e-5) -> None:
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert (
                torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, atol=tolerance)
            )


# --- parts that count nothing
# -------------------------------------------------------------------------------


def masked(virtual_workers: int | None) -> list[torch.Tensor]:
    """The mean over samples that count; of some parts none does, so that their mean is no
    number.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, _, targets = data().tensors
    counted = (torch.arange(SAMPLES) % BATCH < 3).float()
    loader = DataLoader(TensorDataset(inputs, counted, targets), BATCH)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, virtual_workers=virtual_workers
    )
    losses = []
    for x, mask, y in loader:
        optimizer.zero_grad()
        loss = ((model(x) - y).square().mean(1) * mask).sum() / mask.sum()
        loss.backward()
        mean = optimizer.step(loss=loss, count=mask.sum())
        losses += [mean] if optimizer.stepped else []
    assert len(losses) == 4
    return [*(p.detach() for p in model.parameters()), torch.stack(losses)]


@pytest.mark.parametrize("virtual_workers", [None, 6])
def test_a_part_that_counts_nothing_adds_nothing(pool: Pool, virtual_workers: int | None) -> None:
    results = on_workers(pool, masked, virtual_workers)
    assert all(tensor.isfinite().all() for tensor in results[0])
    check_equal(results, virtual_workers is not None)


def nothing_counts() -> None:
    model = network()
    model, optimizer, loader = lockstep.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data(), 8)
    )
    for x, *_ in loader:
        (model(x).sum() * 0 / 0).backward()
        optimizer.step(count=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_in_which_nothing_counts_is_an_error_on_all_ranks(pool: Pool, workers: int) -> None:
    with pytest.raises(RanksFailedError, match=f"{workers} of {workers} ranks failed") as info:
        pool.run(nothing_counts, workers=workers)
    assert "count: expected something that counts in each global batch" in str(info.value)


# --- averages
# -----------------------------------------------------------------------------------------------


def averaged(virtual_workers: int | None, use_buffers: bool) -> list[torch.Tensor]:
    model = network(nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    loader = DataLoader(data(), 12, drop_last=True)
    objects = lockstep.prepare(model, optimizer, loader, average, virtual_workers=virtual_workers)
    model, optimizer, loader, average = objects
    for _ in range(2):
        for x, _, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)
    assert int(average.n_averaged) == 4
    statistics = zip(average.module.buffers(), model.buffers(), strict=True)
    assert use_buffers or all(torch.equal(ours, theirs) for ours, theirs in statistics)
    return [tensor.detach().double() for tensor in average.state_dict().values()]


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_and_their_buffers_are_those_of_the_whole_batch(
    pool: Pool, use_buffers: bool
) -> None:
    check_equal(on_workers(pool, averaged, 6, use_buffers), exact=True)
    on_workers(pool, averaged, None, use_buffers, counts=(2,))


# --- accumulation
# -------------------------------------------------------------------------------------------


def dropping(how: str, virtual_workers: int | None) -> list[torch.Tensor]:
    """Gradients of a first batch are dropped in each body; on three workers one has no sample of
    the last batch.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.utils.data.Subset(data(), range(10)), 8)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, virtual_workers=virtual_workers
    )
    for number, batch in enumerate(loader.batches()):
        for x, _, y in optimizer.shards(batch):
            if number:
                _ = (
                    model.zero_grad(set_to_none=how == "none")
                    if how != "optimizer"
                    else optimizer.zero_grad()
                )
            F.mse_loss(model(x), y).backward()
            if number:
                optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("virtual_workers", [None, 6])
def test_gradients_dropped_by_the_model_are_dropped_on_a_worker_without_samples_too(
    pool: Pool, virtual_workers: int | None
) -> None:
    results = [
        each
        for how in ("optimizer", "none", "zeros")
        for each in on_workers(pool, dropping, how, virtual_workers)
    ]
    check_equal(results, virtual_workers is not None)


# --- losses of the whole batch
# ------------------------------------------------------------------------------


def without_marked(samples: list[Any]) -> Any:
    """A collate function that leaves samples out: parts have other numbers of rows than they were
    cut for.
    """
    return torch.utils.data.default_collate(
        [sample for sample in samples if not sample[1]] or samples[:1]
    )


def contrastive(samples: int, own_rows: bool, collate: Any = None) -> list[torch.Tensor]:
    """In-batch negatives, of the whole batch on each worker or of its own rows against all
    columns.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(torch.utils.data.Subset(data(), range(samples)), BATCH, collate_fn=collate)
    model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for batch in loader.batches():
            for x, _, y in optimizer.shards(batch):
                optimizer.zero_grad()
                first, second = model(torch.cat([x, x + 0.1 * y[:, :1]])).chunk(2)
                columns = lockstep.whole_batch(F.normalize(second, dim=1))
                labels = torch.arange(len(columns))
                rows = F.normalize(first, dim=1)
                if own_rows:
                    place = lockstep.whole_batch(torch.full((len(x), 1), lockstep.init().rank))[
                        :, 0
                    ]
                    labels = labels[place == lockstep.init().rank]
                    rows = rows[: len(labels)]
                else:
                    rows = lockstep.whole_batch(rows)
                loss = F.cross_entropy(rows @ columns.T / 0.5, labels)
                loss.backward()
                mean = optimizer.step(loss=loss)
                losses.append(mean)
    return [*(p.detach() for p in model.parameters()), torch.stack(losses)]


# 9 samples in batches of 8: in the last one two of three workers have none
@pytest.mark.parametrize("samples", [SAMPLES, 9])
@pytest.mark.parametrize("own_rows", [False, True])
def test_in_batch_negatives_of_the_whole_batch_give_the_same_numbers(
    pool: Pool, samples: int, own_rows: bool
) -> None:
    results = on_workers(pool, contrastive, samples, own_rows)
    check_equal(results, exact=False)
    assert results[0][-1].max() > 0.5


def test_the_whole_batch_is_what_was_collated(pool: Pool) -> None:
    check_equal(
        on_workers(pool, contrastive, 24, False, without_marked, counts=(1, 2)), exact=False
    )


# --- what is said
# -------------------------------------------------------------------------------------------


def with_lines(loss: Any, batch: int = 8, rate: float = 0.1) -> list[str]:
    """Train two epochs with a loss; returns what was said."""
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    model = network()
    model, optimizer, loader = lockstep.prepare(
        model, torch.optim.SGD(model.parameters(), rate), DataLoader(data(), batch)
    )
    try:
        for _ in range(2):
            for x, _, y in loader:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
    finally:
        logging.getLogger("lockstep").removeHandler(handler)
    return lines


def by_fixed_number(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, y, reduction="sum") / 8


def by_twice_the_samples(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((output - y) ** 2).sum() / (2 * len(y))


def halved(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.5 * ((output - y) ** 2).sum() / len(y)


def test_rank_0_says_at_the_start_what_a_step_is(pool: Pool) -> None:
    said, *others = pool.run(with_lines, halved, workers=2)
    assert said == [
        "lockstep.prepare() on 2 workers: a global batch of 8 samples, 4 for each worker; SGD with "
        "learning rate 0.1; each loss must be a mean over the samples of its part, or over what "
        "optimizer.step(count=...) counts"
    ]
    assert others == [[]]
    assert pool.run(with_lines, by_fixed_number, workers=1) == [[]]


def test_a_sum_divided_by_the_samples_of_the_whole_batch(pool: Pool) -> None:
    """Where the number may be a factor times the samples of the part it is said; a part of another
    size decides.
    """
    with pytest.raises(RanksFailedError, match="divided by 8 in a part of 3 samples"):
        pool.run(with_lines, by_fixed_number, workers=3)
    with pytest.raises(RanksFailedError, match=r"divided by 8 in a part of [123] samples"):
        pool.run(with_lines, by_fixed_number, workers=2)  # in the last batch
    said, *others = pool.run(with_lines, by_twice_the_samples, workers=2)
    assert "divided by 8, the samples of the whole batch; this worker's part has 4" in said[1]
    assert len(said) == 2
    assert others == [[]]


def without_loader(different: bool) -> tuple[list[str], list[torch.Tensor]]:
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    model = network()
    model, optimizer = lockstep.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    inputs, _, targets = data().tensors
    begin = lockstep.init().rank if different else 0
    for start in (begin, begin + 8):
        optimizer.zero_grad()
        F.mse_loss(model(inputs[start : start + 8]), targets[start : start + 8]).backward()
        optimizer.step()
        assert optimizer.stepped
    logging.getLogger("lockstep").removeHandler(handler)
    return lines, [p.detach() for p in model.parameters()]


def test_rank_0_says_once_that_all_workers_repeat_the_same_batches(pool: Pool) -> None:
    repeated = [lines for lines, _ in pool.run(without_loader, False, workers=2)]
    assert [len(lines) for lines in repeated] == [2, 0]
    assert "given no loader, and all 2 workers have computed the same gradients" in repeated[0][1]
    different = [lines for lines, _ in pool.run(without_loader, True, workers=2)]
    assert [len(lines) for lines in different] == [1, 0]
    assert pool.run(without_loader, False, workers=1)[0][0] == []


def own_weight_decay() -> None:
    model = network()
    model, optimizer, loader = lockstep.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data(), 8)
    )
    for x, _, y in loader:
        F.mse_loss(model(x), y).backward()
        optimizer.param_groups[0]["weight_decay"] = 0.1 * lockstep.init().rank
        optimizer.step()


def test_hyperparameters_set_by_hand_are_compared_over_the_ranks(pool: Pool) -> None:
    with pytest.raises(
        RanksFailedError,
        match=r"'weight_decay' of parameter group 0 .* is 0.0 on rank 0 and 0.1 on rank",
    ):
        pool.run(own_weight_decay, workers=2)
