"""Samples that a collate function leaves out, and lists in batches: the same numbers at any number
of workers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from support.outcome import RanksFailedError
from support.pool import Pool

Result = tuple[list[float], list[float], float, list[float]]
X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
MISSING = (
    0,
    1,
    2,
    3,
    4,
    17,
)  # so that parts lose different shares, and one of four parts loses everything


def samples() -> list[Any]:
    return [
        None if number in MISSING else (X[number], X[number].sum(0, keepdim=True) + 1)
        for number in range(32)
    ]


def without_missing(found: list[Any]) -> Any:
    present = [sample for sample in found if sample is not None]
    return torch.utils.data.default_collate(present) if present else None


def single(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().flatten()


def fitted(loss_fn: Any = None, normed: bool = False, **options: Any) -> Result:
    """Return losses, validation losses, a metric and the weights."""
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        if normed
        else nn.Linear(3, 1)
    )
    model = lockstep.prepare_model(model.double() if normed else model, comm, sync_batchnorm=normed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = lockstep.Trainer(
        model,
        optimizer,
        loss_fn or nn.MSELoss(),
        16,
        callbacks=[],
        metrics={"error": lambda output, target: (output - target).abs().mean()},
        forward=(lambda m, data: (m(data[0].double()), data[1].double())) if normed else None,
        **options,
    )
    data = DataLoader(samples(), batch_size=16, collate_fn=without_missing)  # type: ignore[arg-type]
    rows = trainer.fit(data, epochs=2, validate=data)
    state = {name: value for name, value in model.state_dict().items() if "tracked" not in name}
    return (
        [row["train_loss"] for row in rows],
        [row["val_loss"] for row in rows],
        rows[-1]["val_error"],
        [value for tensor in state.values() for value in tensor.flatten().tolist()],
    )


def expect(found: Result, wanted: Result) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_parts_count_what_was_collated(pool: Pool) -> None:
    wanted = pool.run(fitted, workers=1)[0]
    assert wanted[0][0] == pytest.approx(float(first_loss()), rel=1e-5)
    for size, options in (
        (2, {}),
        (4, {}),
        (1, {"gradient_accumulation_steps": 3}),
        (2, {"loss_fn": single}),
        (2, {"strategy": "replicas", "devices": ["cpu", "cpu"]}),
        (1, {"virtual_workers": 4}),
    ):
        for found in pool.run(fitted, **options, workers=size):
            expect(found, wanted)
    equal = [pool.run(fitted, virtual_workers=4, workers=size)[0] for size in (1, 2, 3)]
    assert equal[0] == equal[1] == equal[2]


def first_loss() -> torch.Tensor:
    """Return the loss of the first epoch, computed by hand."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    total = torch.zeros(())
    for start in (0, 16):
        inputs, targets = without_missing(samples()[start : start + 16])
        loss = nn.functional.mse_loss(model(inputs), targets)
        total += loss.detach() * len(inputs)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
    return total / (32 - len(MISSING))


def running_mean() -> list[float]:
    comm = lockstep.init("cpu")
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0), nn.Linear(3, 1))
    trainer = lockstep.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.0), nn.MSELoss(), 32, callbacks=[]
    )
    loader = lockstep.Loader(samples(), 32, comm=comm, collate_fn=without_missing, shuffle=False)
    trainer.fit(loader, epochs=1)
    found = model[0].running_mean
    assert isinstance(found, torch.Tensor)
    return found.tolist()


def test_running_statistics_count_what_was_collated(pool: Pool) -> None:
    wanted = X[[number for number in range(32) if number not in MISSING]].mean(0).tolist()
    for size in (1, 2, 3):
        for found in pool.run(running_mean, workers=size):
            assert found == pytest.approx(wanted, rel=1e-5)


def test_synchronised_batch_norm_counts_what_was_collated(pool: Pool) -> None:
    wanted = pool.run(fitted, normed=True, workers=1)[0]
    for found in pool.run(fitted, normed=True, workers=2):
        expect(found, wanted)


# --- lists
# --------------------------------------------------------------------------------------------------

CLASSES = {"cat": 0, "dog": 1, "owl": 2}


def named(strategy: str = "distributed", devices: Any = None, **options: Any) -> list[float]:
    """Return the losses of a training whose labels are strings."""
    lockstep.init("cpu")
    torch.manual_seed(0)
    data = [
        {"x": torch.randn(4) + 3 * (number % 3), "label": list(CLASSES)[number % 3]}
        for number in range(24)
    ]
    model = nn.Linear(4, 3)

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]), torch.tensor([CLASSES[name] for name in batch["label"]])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = lockstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        16,
        forward=forward,
        callbacks=[],
        strategy=strategy,
        devices=devices,
        **options,
    )
    return [row["train_loss"] for row in trainer.fit(data, epochs=3)]


def test_strings_are_split_where_tensors_are(pool: Pool) -> None:
    wanted = pool.run(named, workers=1)[0]
    for size, options in (
        (1, {"gradient_accumulation_steps": 4}),
        (2, {"gradient_accumulation_steps": 2}),
        (1, {"strategy": "replicas", "devices": ["cpu", "cpu", "cpu"]}),
        (2, {"virtual_workers": 4}),
    ):
        for found in pool.run(named, **options, workers=size):
            assert found == pytest.approx(wanted, rel=1e-4)


# --- parts that count nothing
# -----------------------------------------------------------------------------------------


def masked_mean(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over what is not masked, which is no number where all is, times its count."""
    mask = target[:, 1]
    mean = ((output[:, 0] - target[:, 0]).square() * mask).sum() / mask.sum()
    return mean * mask.sum(), mask.sum()


def masked(shown: int, **options: Any) -> list[float]:
    lockstep.init("cpu")
    torch.manual_seed(0)
    target = torch.stack([X.sum(1), (torch.arange(32) % 16 < shown).float()], 1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = lockstep.Trainer(model, optimizer, masked_mean, 16, callbacks=[], **options)
    loader = lockstep.Loader(
        list(zip(X, target, strict=True)),
        16,
        shuffle=False,
        virtual_workers=options.get("virtual_workers"),
    )
    return [row["train_loss"] for row in trainer.fit(loader, epochs=2)]


def test_a_part_that_counts_nothing_contributes_zeros(pool: Pool) -> None:
    wanted = pool.run(masked, 4, workers=1)[0]
    for size, options in (
        (2, {}),
        (3, {}),
        (1, {"gradient_accumulation_steps": 4}),
        (1, {"virtual_workers": 4}),
        (1, {"strategy": "replicas", "devices": ["cpu", "cpu"]}),
    ):
        for found in pool.run(masked, 4, **options, workers=size):
            assert found == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(
        RanksFailedError, match="expected a global batch with something that the loss counts"
    ):
        pool.run(masked, 0, workers=2)


# --- loops of one's own
# -----------------------------------------------------------------------------------------------


def own_loop(accumulates: bool = False, **options: Any) -> list[float]:
    """Return the mean losses and the weights."""
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    data = DataLoader(samples(), batch_size=16, collate_fn=without_missing)  # type: ignore[arg-type]
    model, optimizer, loader = lockstep.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, **options
    )
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        for number, batch in enumerate(loader.batches()):
            for inputs, targets in optimizer.shards(batch):
                if not accumulates:
                    optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                if not accumulates or number == 1:
                    mean = optimizer.step(loss=loss)
                    found += [] if mean is None else [float(mean)]
    return [*found, *model.weight.flatten().tolist()]


def test_a_loop_of_ones_own_counts_what_was_collated(pool: Pool) -> None:
    wanted = pool.run(own_loop, workers=1)[0]
    assert len(wanted) == 7
    for size in (2, 3):
        for found in pool.run(own_loop, workers=size):
            assert found == pytest.approx(wanted, rel=1e-5)
    equal = [pool.run(own_loop, virtual_workers=3, workers=size)[0] for size in (1, 2, 3)]
    assert equal[0] == pytest.approx(wanted, rel=1e-5)
    assert equal[0] == equal[1] == equal[2]
    for size in (1, 2):
        with pytest.raises(
            RanksFailedError,
            match="a collate function that keeps all samples of batches whose grad",
        ):
            pool.run(own_loop, accumulates=True, workers=size)


def own_loop_with_an_empty_shard(second_batch: bool) -> list[float]:
    """Of the first or the second batch of 16 in four shards, the second shard loses all of its
    samples.
    """
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def collate(found: list[int]) -> torch.Tensor:
        return X[
            [
                number
                for number in found
                if number not in range(4 + 16 * second_batch, 8 + 16 * second_batch)
            ]
        ]

    loader = lockstep.Loader(
        list(range(32)),  # type: ignore[arg-type]
        16,
        virtual_workers=4,
        shuffle=False,
        collate_fn=collate,
        comm=comm,
    )
    model, optimizer, data = lockstep.prepare(model, optimizer, loader, virtual_workers=4)
    means: list[float] = []
    for inputs in data:
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        mean = optimizer.step(loss=loss)
        if mean is not None:
            means.append(float(mean))
        if optimizer.stepped:
            optimizer.zero_grad()
    return [*means, *(value for p in model.parameters() for value in p.flatten().tolist())]


@pytest.mark.parametrize("second_batch", [False, True])
def test_a_shard_between_others_that_loses_all_of_its_samples(
    pool: Pool, second_batch: bool
) -> None:
    wanted = pool.run(own_loop_with_an_empty_shard, second_batch, workers=1)[0]
    assert len(wanted) == 2 + 4
    torch.manual_seed(0)
    kept = X[:16] if second_batch else torch.cat([X[:4], X[8:16]])
    first = (nn.Linear(3, 1)(kept) - kept.sum(1, keepdim=True)).square().mean()
    assert wanted[0] == pytest.approx(first.item())
    for size in (2, 3):
        assert pool.run(own_loop_with_an_empty_shard, second_batch, workers=size) == [wanted] * size
