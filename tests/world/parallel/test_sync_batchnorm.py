"""Batch norm over all shards of a step gives the same bits at any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError
from lockstep.training.prepare_model import prepare_model
from lockstep.training.step.train_step import TrainStep
from support.pool import Pool
from support.sharded import Augmented, adamw, pictures, run, runs


class Residual(nn.Module):
    """Two normalised layers, with a way past the second, and dropout between meetings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.second, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None)
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(8 * 13 * 13, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.drop(self.one(self.first(x)).relu())
        return self.out(self.drop(self.two(self.second(x)).relu() + x).flatten(1))


class Flat(nn.Module):
    """Whose batch norm gets a single value for each channel from a shard of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm, self.out = nn.Linear(784, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.norm(self.line(x.flatten(1))).relu())


class Added(Flat):
    """Parameters that autograd gives one tensor as their gradients, and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(10)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + (self.a + self.b) + self.c.sum()


def synchronised(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: prepare_model(make(), lockstep.init("cpu"), sync_batchnorm=True)


CASES: list[dict[str, Any]] = [
    {"make": synchronised(Residual), "data": Augmented(), "epochs": 2},
    {
        "make": synchronised(Residual),
        "virtual_workers": 7,
        "global_batch_size": 16,
        "optimizer": adamw,
        "max_grad_norm": 0.1,
    },
    {"make": synchronised(Residual), "precision": "bf16"},
    {"make": synchronised(Flat), "virtual_workers": 12, "global_batch_size": 12},
]


def trained(several: list[dict[str, Any]]) -> Any:
    """Of this module, so that what is passed to it can be."""
    return runs(several)


def test_the_bits_are_those_of_one_worker(pool: Pool) -> None:
    alone = pool.run(trained, CASES, workers=1)[0]
    for workers in (2, 3):
        assert pool.run(trained, CASES, workers=workers) == [alone] * workers


@pytest.mark.parametrize("make", [Flat, Added])
def test_it_is_batch_norm_over_the_whole_batch(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make()
    inputs, labels = pictures(12).tensors
    expected = F.cross_entropy(plain(inputs), labels)
    expected.backward()
    torch.manual_seed(0)
    model = synchronised(make)()
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), 0.0), F.cross_entropy, virtual_workers=5
    )
    torch.testing.assert_close(
        step(next(Loader(pictures(12), 12, virtual_workers=5).epoch(0))).float(), expected.detach()
    )
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    for mine, its in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, its)


def test_each_shard_draws_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(synchronised(Residual), steps=1)
    monkeypatch.setattr("lockstep.parallel.joint_passes.set_generator_states", lambda _: None)
    assert run(synchronised(Residual), steps=1) != expected


class Sometimes(Flat):
    """Leaves batch norm out where the first label's picture is dark."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.line(x.flatten(1))
        return self.out(self.norm(x) if float(x.detach().sum()) > 0 else x)


class Counting(Flat):
    """Changes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(x)


class Failing(Flat):
    """Fails in the third shard alone, while others wait for it."""

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) == 2:
            raise KeyError("the third")
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "options", "error", "said"),
    [
        (
            Sometimes,
            {},
            ConfigError,
            "batch norm over all shards in every shard's pass, got some without it",
        ),
        (Counting, {}, ConfigError, "no layer but batch norm that changes buffers"),
        (Failing, {"virtual_workers": 3, "global_batch_size": 8}, KeyError, "the third"),
        (
            lambda: nn.BatchNorm1d(3),
            {},
            ConfigError,
            "a module that has batch norm in it, got BatchNorm1d",
        ),
        (Flat, {"precision": "fp16"}, ConfigError, "precision: expected fp32 or bf16"),
    ],
)
def test_what_is_refused(
    make: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        run(synchronised(make), **options)


def test_a_worker_without_samples_is_refused(pool: Pool) -> None:
    def refused() -> None:
        with pytest.raises(
            ConfigError, match="at least 6 samples in each batch, one for each worker"
        ):
            run(
                synchronised(Flat), data=pictures(17), global_batch_size=12, virtual_workers=7
            )  # 12, and then 5

    pool.run(refused, workers=3)
