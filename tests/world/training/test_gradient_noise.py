"""`GradientNoise`: the estimate, from gradients computed by hand, and that it is the same at any
number of workers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import GradientNoise
from lockstep.errors import ConfigError
from lockstep.parallel.shards import bounds
from support.pool import Pool

VIRTUAL_WORKERS, BATCH = 4, 10  # shards of three and of two samples


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 5, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) + torch.randn(24, generator=generator) > 0).long())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def by_hand() -> float:
    """Return the noise scale of an epoch, of three steps, the last of which has a sample for each
    shard.
    """
    model, samples = make_model(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    noise = gradient = 0.0

    def square(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        return sum(
            float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
        )

    for start in range(0, 24, BATCH):
        inputs, targets = samples[start : start + BATCH]
        n = len(inputs)
        shards = [bounds(n, VIRTUAL_WORKERS, shard) for shard in range(VIRTUAL_WORKERS)]
        small = sum(square(inputs[low:high], targets[low:high]) for low, high in shards) / len(
            shards
        )
        inverse = sum(1 / (high - low) for low, high in shards) / len(shards)
        whole = square(inputs, targets)
        # E |G_n|² = |G|² + tr(Σ) / n, solved for both at two sizes
        trace = (small - whole) / (inverse - 1 / n)
        noise, gradient = noise + trace, gradient + whole - trace / n
        optimizer.step()
    return noise / gradient


def train(
    run_dir: Path | None = None, every: int = 1, loss_fn: Any = None, **options: Any
) -> list[float]:
    model = make_model()
    trainer = lockstep.Trainer(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn or nn.CrossEntropyLoss(),
        BATCH,
        run_dir=run_dir,
        callbacks=[GradientNoise(every), *([lockstep.callbacks.CSVLog()] if run_dir else [])],
        **{"virtual_workers": VIRTUAL_WORKERS, **options},
    )
    loader = lockstep.Loader(
        data(), BATCH, shuffle=False, virtual_workers=options.get("virtual_workers", 4)
    )
    return [row["noise_scale"] for row in trainer.fit(loader, 1)]


def test_the_estimate(tmp_path: Path) -> None:
    assert train(tmp_path / "run") == pytest.approx([by_hand()], rel=1e-4)
    assert "noise_scale" in (tmp_path / "run" / "metrics.csv").read_text()


def test_clipping_and_counting_do_not_change_it() -> None:
    def total(output: torch.Tensor, target: torch.Tensor) -> Any:
        return F.cross_entropy(output, target, reduction="sum") / 2, len(target) / 2

    unclipped = train(every=100)  # the first step alone: the next ones have other weights
    assert train(every=100, max_grad_norm=1e-3) == pytest.approx(unclipped, rel=1e-4)
    assert train(every=100, loss_fn=total) == pytest.approx(unclipped, rel=1e-4)


def test_it_is_the_same_at_any_number_of_workers(pool: Pool) -> None:
    found = [pool.run(train, workers=workers) for workers in (1, 2, 3)]
    assert {value for values in found for (value,) in values} == {found[0][0][0]}


def test_passes_that_the_cross_check_repeats_do_not_change_it(pool: Pool) -> None:
    (expected,) = train()
    for workers in (2, 3):
        found = pool.run(train, workers=workers, cross_check=1)
        assert {value for (value,) in found} == {expected}


def test_no_gradient_is_told_from_noise() -> None:
    def without_signal(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() * 0

    assert all(map(math.isnan, train(loss_fn=without_signal)))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"virtual_workers": None}, "got none, or 1"),
        ({"virtual_workers": 1}, "got none, or 1"),
        ({"precision": "fp16"}, "fp16"),
    ],
)
def test_where_there_is_nothing_to_compare_it_is_refused(
    options: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        train(**options)
    with pytest.raises(ConfigError, match="every: expected a whole number of at least 1, got 0"):
        GradientNoise(0)
