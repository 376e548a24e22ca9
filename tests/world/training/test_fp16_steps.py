"""With fp16 the same steps are skipped however a global batch is divided, and no more than on one
device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import Callback, Checkpoints
from lockstep.data.loader import Loader
from lockstep.parallel.replicas_strategy import Replicas
from lockstep.parallel.sharded import Sharded
from lockstep.training.step.train_step import TrainStep
from support.gradient_ways import WAYS, check_way, way
from support.pool import Pool

Scales = list[int]
LENGTHS = (3, 60, 200)  # tokens of a sample, so that parts of a batch count very different numbers


def regression() -> TensorDataset:
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) * 3)


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 150),
        nn.GELU(),
        nn.LayerNorm(150),
        nn.Linear(150, 150),
        nn.GELU(),
        nn.Linear(150, 1),
    )


def sequences() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (48, 200), generator=generator)
    for number, row in enumerate(labels):
        row[LENGTHS[number % 3] :] = -100
    return TensorDataset(torch.randint(0, 9, (48, 200), generator=generator), labels)


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 12), nn.Linear(12, 5))


def per_token(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = nn.functional.cross_entropy(
        output.flatten(0, 1).float(), target.flatten(), reduction="sum"
    )
    return loss, (target != -100).sum()


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "mean": (regression, dense, nn.MSELoss()),
    "count": (sequences, tagger, per_token),
}


def made(
    kind: str, momentum: float = 0.0
) -> tuple[TensorDataset, nn.Module, torch.optim.Optimizer]:
    data, make, _ = KINDS[kind]
    torch.manual_seed(0)
    model = make()
    rate = 0.5 if kind == "count" else 1e-4
    return data(), model, torch.optim.SGD(model.parameters(), rate, momentum=momentum)


def scales(kind: str, strategy: str = "message", **options: Any) -> tuple[Scales, list[float]]:
    """Return the exponents of the gradient scale after each step, and the losses."""
    comm = lockstep.init("cpu")
    data, model, optimizer = made(kind)
    chosen = {
        "replicas": lambda: Replicas(comm, ["cpu", "cpu"]),
        "sharded": lambda: Sharded(comm),
    }.get(strategy)
    options |= {"precision": "fp16", "max_grad_norm": 50.0}
    with way("ddp" if strategy == "ddp" else "message"):
        step = TrainStep(model, optimizer, KINDS[kind][2], strategy=chosen and chosen(), **options)
    if strategy in WAYS and not options.get("virtual_workers"):
        check_way(step.strategy, strategy)
    loader = Loader(
        data, 16, comm=comm, shuffle=False, virtual_workers=options.get("virtual_workers")
    )
    found, losses = [], []
    for epoch in range(3):
        for batch in loader.epoch(epoch):
            losses.append(float(step(batch)))
            found.append(int(step.precision.state_dict()["scale"]).bit_length() - 1)
    return found, losses


def scales_of_torch(kind: str) -> Scales:
    """Return those of a GradScaler on the mean, on one device."""
    data, model, optimizer = made(kind)
    scaler, found = torch.amp.GradScaler("cpu"), []
    loss_fn = KINDS[kind][2]
    for _ in range(3):
        for start in range(0, len(data), 16):
            inputs, targets = data[start : start + 16]
            with torch.autocast("cpu", torch.float16):
                result = loss_fn(model(inputs), targets)
            loss = result[0] / result[1] if isinstance(result, tuple) else result
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 50.0)
            scaler.step(optimizer)
            scaler.update()
            found.append(int(scaler.get_scale()).bit_length() - 1)
    return found


@pytest.mark.leaks("a device mesh outlives its job, and its group with it")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [*WAYS, "replicas", "sharded"])
def test_the_same_steps_are_skipped_at_any_number_of_workers(
    pool: Pool, kind: str, strategy: str
) -> None:
    expected, losses = pool.run(scales, kind, strategy, workers=1)[0]
    assert expected == pool.run(scales_of_torch, kind, workers=1)[0]
    if kind == "mean":
        assert min(expected) < 15  # some are skipped
    sizes = (2,) if strategy == "replicas" else (2, 3, 4)
    for size in sizes:
        for found, others in pool.run(scales, kind, strategy, workers=size):
            assert found == expected
            assert others == pytest.approx(losses, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_steps_are_skipped_with_accumulation_and_virtual_workers(
    pool: Pool, kind: str
) -> None:
    expected, losses = pool.run(scales, kind, workers=1)[0]
    for size, options in (
        (1, {"gradient_accumulation_steps": 4}),
        (2, {"gradient_accumulation_steps": 3}),
        (1, {"virtual_workers": 4}),
    ):
        for found, others in pool.run(scales, kind, **options, workers=size):
            assert found == expected
            assert others == pytest.approx(losses, rel=0.02)
    equal = [pool.run(scales, kind, virtual_workers=4, workers=size)[0] for size in (1, 3)]
    assert equal[0] == equal[1]


def first_step(**options: Any) -> dict[str, float]:
    """Return the statistics of batch norm and the draws after a first step."""
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    step = TrainStep(model, optimizer, nn.MSELoss(), strategy=None, **options)
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    loader = Loader(
        TensorDataset(inputs, inputs.sum(1, keepdim=True)), 16, comm=comm, shuffle=False
    )
    for batch in loader.epoch(0):
        loss = float(step(batch))
    assert isinstance(model[1], nn.BatchNorm1d)
    assert model[1].running_mean is not None
    assert model[1].num_batches_tracked is not None
    return {
        "batches": float(model[1].num_batches_tracked),
        "mean": float(model[1].running_mean.sum()),
        "draw": float(torch.rand(1)),
        "loss": loss,
    }


def test_the_passes_that_count_leave_no_trace(pool: Pool) -> None:
    for size in (1, 2):
        expected = pool.run(first_step, workers=size)[0]
        found = pool.run(first_step, precision="fp16", workers=size)[0]
        assert found["batches"] == expected["batches"]
        assert found["draw"] == expected["draw"]
        assert found["mean"] == pytest.approx(expected["mean"], rel=0.05)
        assert found["loss"] == pytest.approx(expected["loss"], rel=0.05)


def resumed(folder: Path, epochs: int, kind: str) -> tuple[Scales, list[float]]:
    """Return the gradient scales, and the losses of all epochs, of a run that goes on from its
    newest checkpoint.
    """
    lockstep.init("cpu")
    data, model, optimizer = made(kind)
    found: Scales = []

    class Watch(Callback):
        every_rank = True

        def on_train_step_end(self, trainer: Any, result: Any) -> None:
            found.append(int(trainer.step.precision.state_dict()["scale"]).bit_length() - 1)

    trainer = lockstep.Trainer(
        model,
        optimizer,
        KINDS[kind][2],
        16,
        precision="fp16",
        run_dir=folder,
        callbacks=[Watch(), Checkpoints()],
    )
    rows = trainer.fit(data, epochs, resume="latest")
    return found, [row["train_loss"] for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_skips_what_one_that_was_not_interrupted_does(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    expected, losses = pool.run(resumed, tmp_path / "whole", 3, kind, workers=1)[0]
    first, _ = pool.run(resumed, tmp_path / "parts", 1, kind, workers=2)[0]
    rest, others = pool.run(resumed, tmp_path / "parts", 3, kind, workers=3)[0]
    assert first + rest == expected
    assert others == pytest.approx(losses, rel=0.02)
