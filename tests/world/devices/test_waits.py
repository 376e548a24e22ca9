"""No step waits for the device: what it computes is read when later steps have been queued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data.loader import Loader
from lockstep.training.callbacks import Callback, GradientNoise
from lockstep.training.check_schedule import is_due
from lockstep.training.evaluate import accuracy, evaluate
from support import toy_device
from support.pool import Pool

# The steps at which nothing is compared, so that none has a reason to wait.
QUIET = [step for step in range(40, 62) if not is_due(step)]
SAMPLES = 16 * 64


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=draws)
    return TensorDataset(x, (x.sum(1) > 0).long())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
    )


class Waits:
    """Counts the waits between two steps."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def note(self, step: int, passes: int = 1) -> None:
        """Count those since the last call, if this one of so many passes for each update has no
        reason to wait.
        """
        if step in QUIET and not is_due(step // passes):
            self.seen += toy_device.WAITS
        toy_device.WAITS.clear()


class Watch(Callback):
    every_rank = True

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def on_train_step_end(self, trainer: Any, result: Any) -> None:
        self.waits.note(result.step)


def start(make_model: Callable[[], nn.Module]) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    toy_device.register()
    comm = lockstep.init()
    trained = make_model()
    return comm, trained, torch.optim.AdamW(trained.parameters(), 0.01)


def trainer(
    options: dict[str, Any],
    make: Callable[[], list[Any]] = list,
    make_model: Callable[[], nn.Module] = model,
) -> dict[str, int]:
    waits = Waits()
    _, trained, optimizer = start(make_model)
    lockstep.Trainer(
        trained, optimizer, nn.CrossEntropyLoss(), 16, callbacks=[*make(), Watch(waits)], **options
    ).fit(data(), 1)
    return dict(waits.seen)


def train_step(
    options: dict[str, Any], make_model: Callable[[], nn.Module] = model
) -> dict[str, int]:
    waits = Waits()
    _, trained, optimizer = start(make_model)
    step = lockstep.TrainStep(trained, optimizer, nn.CrossEntropyLoss(), **options)
    loader = Loader(data(), 16, virtual_workers=options.get("virtual_workers"))
    for number, batch in enumerate(loader.epoch(0)):
        step(batch)
        waits.note(number)
    return dict(waits.seen)


def own_loop(
    options: dict[str, Any], accumulation: int = 1, make_model: Callable[[], nn.Module] = model
) -> dict[str, int]:
    waits = Waits()
    comm, trained, optimizer = start(make_model)
    turns = accumulation * options.get("virtual_workers", comm.size) // comm.size
    loader = DataLoader(data(), 16, shuffle=True)
    trained, optimizer, loader = lockstep.prepare(trained, optimizer, loader, **options)
    for number, (inputs, labels) in enumerate(loader):
        nn.functional.cross_entropy(trained(inputs), labels).backward()
        if number % accumulation == accumulation - 1:
            optimizer.step()
            optimizer.zero_grad()
        waits.note(number, turns)
    return dict(waits.seen)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 1.0},
    {"precision": "bf16"},
    {"gradient_accumulation_steps": 2},
    {"virtual_workers": 4},
    {"schedule": lambda step: 1 / (step + 1)},
]


def name_of(options: Any) -> str | None:
    return ("-".join(options) or "plain") if isinstance(options, dict) else None


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("path", [trainer, train_step])
def test_a_step_waits_for_nothing(
    toy_pool: Pool, path: Callable[..., Any], options: dict[str, Any], workers: int
) -> None:
    assert (
        toy_pool.run(path, options, workers=workers, init=False, env=toy_device.ONE_EACH)
        == [{}] * workers
    )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("options", "accumulation"),
    [
        ({}, 1),
        ({}, 4),
        ({"max_grad_norm": 1.0}, 1),
        ({"precision": "bf16"}, 1),
        ({"virtual_workers": 4}, 1),
    ],
    ids=name_of,
)
def test_a_turn_of_a_loop_with_prepare_waits_for_nothing(
    toy_pool: Pool, options: dict[str, Any], accumulation: int, workers: int
) -> None:
    found = toy_pool.run(
        own_loop, options, accumulation, workers=workers, init=False, env=toy_device.ONE_EACH
    )
    assert found == [{}] * workers


@pytest.mark.parametrize("workers", [1, 2])
def test_callbacks_that_read_losses_and_gradients_wait_for_nothing(
    toy_pool: Pool, workers: int
) -> None:
    options = {"virtual_workers": 4}  # GradientNoise needs some
    callbacks = [GradientNoise()]
    found = toy_pool.run(
        trainer, options, lambda: callbacks, workers=workers, init=False, env=toy_device.ONE_EACH
    )
    assert found == [{}] * workers


def evaluation(samples: int) -> int:
    toy_device.register()
    comm = lockstep.init()
    inputs, labels = data().tensors
    loader = Loader(TensorDataset(inputs[:samples], labels[:samples]), 16, shuffle=False)
    trained = model().to(comm.device)
    toy_device.WAITS.clear()
    evaluate(trained, loader, nn.CrossEntropyLoss(), {"accuracy": accuracy})
    return sum(count for cause, count in toy_device.WAITS.items() if "event" not in cause)


def test_an_evaluation_waits_as_often_for_few_batches_as_for_many(toy_pool: Pool) -> None:
    """At its end, and where losses and metrics are compared."""
    (few,), (many,) = (
        toy_pool.run(evaluation, 16 * count, workers=1, init=False) for count in (34, 63)
    )
    assert few == many


class Reads(nn.Module):
    """A model that reads a number of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        outputs.mean().item()
        return outputs


@pytest.mark.parametrize("path", [trainer, train_step, own_loop])
def test_a_wait_is_seen(toy_pool: Pool, path: Callable[..., Any]) -> None:
    (found,) = toy_pool.run(path, {}, make_model=Reads, workers=1, init=False)
    assert sum(found.values()) == len(QUIET) and "_local_scalar_dense" in str(found)


def test_fp16_waits_once_in_a_step(toy_pool: Pool) -> None:
    """As torch's scaler reads whether a gradient overflowed."""
    (found,) = toy_pool.run(train_step, {"precision": "fp16"}, workers=1, init=False)
    assert list(found.values()) == [len(QUIET)] and "_local_scalar_dense, precision.py" in str(
        found
    )


class WithBuffer(nn.Module):
    """A model with a buffer that no pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs * self.scale)
        return outputs


@pytest.mark.parametrize(
    ("options", "waits"), [({}, 0), ({"virtual_workers": 4}, len(QUIET))], ids=name_of
)
def test_buffers_beside_batch_norm_are_waited_for_with_virtual_workers(
    toy_pool: Pool, options: dict[str, Any], waits: int
) -> None:
    found = toy_pool.run(
        train_step, options, make_model=WithBuffer, workers=2, init=False, env=toy_device.ONE_EACH
    )
    assert [sum(each.values()) for each in found] == [waits] * 2
