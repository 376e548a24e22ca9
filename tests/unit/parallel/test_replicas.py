"""Several devices in one process give what one gives: losses, checkpoints, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import environment
from lockstep.communicator import init
from lockstep.errors import ConfigError, DivergedError, InterruptedRunError
from lockstep.parallel.replicas_strategy import Replicas, default_devices
from lockstep.parallel.sync_batchnorm import SyncBatchNorm
from lockstep.replicas import ReplicaError
from lockstep.training.callbacks import Callback
from lockstep.training.step.step_result import StepResult
from lockstep.training.trainer import Trainer

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


def samples(n: int = 100) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 4, (n,), generator=generator)
    inputs = torch.randn(n, 6, generator=generator).double() + labels[:, None]
    labels[::7] = -100  # does not count, so that a mean is over fewer labels than samples
    return TensorDataset(inputs, labels)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4))


def make(
    devices: list[str] | None = None,
    model: Callable[[], nn.Module] = plain,
    loss_fn: Any = None,
    **options: Any,
) -> Trainer:
    """A trainer whose last batch of an epoch has 4 of 16 samples; without devices on one alone."""
    init("cpu")
    torch.manual_seed(0)
    made = model().double()
    chosen = {} if devices is None else {"strategy": "replicas", "devices": devices}
    return Trainer(
        made,
        torch.optim.AdamW(made.parameters(), 0.01),
        loss_fn or nn.CrossEntropyLoss(),
        16,
        **{"callbacks": [], **chosen, **options},
    )


def results(trainer: Trainer, epochs: int = 2, **given: Any) -> list[list[float]]:
    rows = trainer.fit(samples(), epochs, validate=samples(50), **given)
    return [
        [row.get(name, 0.0) for name in ("train_loss", "val_loss", "val_accuracy")] for row in rows
    ]


def values(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 3},
    "clip": {"max_grad_norm": 0.01},
    "a mean": {"loss_fn": lambda output, target: output.square().mean()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("devices", [["cpu"], TWO, THREE], ids=len)
def test_any_number_of_devices_gives_the_answer_of_one(
    devices: list[str], options: dict[str, Any]
) -> None:
    several, alone = make(devices, **options), make(**options)
    assert_close(results(several), results(alone))
    assert_close(values(several), values(alone))


def test_class_weights_and_a_forward_of_the_users_own() -> None:
    kinds: set[tuple[bool, int]] = set()

    def forward(model: nn.Module, data: Any) -> tuple[Any, Any]:
        output = model(data[0])
        kinds.add((torch.is_autocast_enabled("cpu"), len(output)))
        return output, data[1]

    def loss_fn() -> nn.Module:
        return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64))

    several = make(TWO, loss_fn=loss_fn(), forward=forward, precision="bf16")
    found = results(several, 1)
    # autocast holds in the replicas' threads; an epoch ends with 4 samples, the evaluation with 2
    assert kinds == {(True, 8), (True, 2), (True, 1)}
    assert_close(found, results(make(loss_fn=loss_fn()), 1))  # which leaves float64 as it is


def test_batch_norm_has_the_statistics_of_each_part_and_their_average() -> None:
    trainer = make(TWO, with_batch_norm)
    norm: Any = trainer.model[1]
    batch = next(trainer.loader(samples()).epoch(0))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    loss = trainer.step(batch)
    torch.manual_seed(0)
    copies = [with_batch_norm().double() for _ in range(2)]
    parts = []
    for copy, inputs in zip(copies, batch.data[0].chunk(2), strict=True):
        copy.load_state_dict(before)
        parts.append(copy(inputs))
    assert_close(loss, nn.functional.cross_entropy(torch.cat(parts), batch.data[1]).detach())
    means = torch.stack([copy[1].running_mean for copy in copies])  # type: ignore[index]
    assert_close(norm.running_mean, means.mean(0))
    assert int(norm.num_batches_tracked) == 1


def test_dropout_differs_between_replicas_and_repeats_to_the_bit() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            mask = nn.functional.dropout(torch.ones_like(inputs))
            masks.append(mask)
            return self.layer(inputs * mask)

    masks: list[torch.Tensor] = []
    trainer = make(TWO, Seen)
    trainer.step(next(trainer.loader(samples()).epoch(0)))
    assert masks[0].shape == masks[1].shape and not torch.equal(masks[0], masks[1])
    runs = []
    for _ in range(2):
        trainer = make(TWO, with_dropout)
        runs.append((results(trainer), values(trainer)))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def test_parameters_may_be_frozen_between_steps() -> None:
    runs = []
    for devices in (TWO, None):
        trainer = make(devices)
        loader = trainer.loader(samples())
        first: Any = trainer.model[0]
        losses = []
        for batch in loader.epoch(0):
            first.requires_grad_(batch.step % 2 == 0)
            losses.append(float(trainer.step(batch)))
        runs.append((losses, values(trainer)))
    assert_close(runs[0], runs[1])


def test_fewer_samples_than_devices() -> None:
    class NeedsSamples(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            assert len(inputs)
            return super().forward(inputs)

    trainer, alone = (
        make(["cpu"] * 5, lambda: NeedsSamples(6, 4)),
        make(model=lambda: NeedsSamples(6, 4)),
    )
    assert_close(results(trainer, 1), results(alone, 1))


# --- checkpoints and ends
# -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then"),
    [(THREE, None), (None, TWO), (TWO, THREE)],
    ids=["to one", "from one", "other"],
)
def test_a_checkpoint_resumes_under_another_strategy(
    tmp_path: Path, first: list[str] | None, then: list[str] | None
) -> None:
    begun = make(first, run_dir=tmp_path / "begun")
    results(begun, 1)
    saved = begun.save()
    resumed = make(then)
    found = results(resumed, 2, resume=saved)
    whole = make()
    assert_close(found, results(whole, 2))
    assert_close(values(resumed), values(whole))


def test_a_signal_saves_a_checkpoint_from_which_training_resumes(tmp_path: Path) -> None:
    import signal

    class Interrupt(Callback):
        def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
            if result.step == 2:
                signal.raise_signal(signal.SIGTERM)

    trainer = make(TWO, run_dir=tmp_path, callbacks=[Interrupt()])
    with pytest.raises(InterruptedRunError) as caught:
        results(trainer)
    assert caught.value.checkpoint is not None
    assert_close(results(make(TWO), 2, resume=caught.value.checkpoint), results(make()))


def test_a_loss_that_is_not_finite_stops_before_the_update() -> None:
    trainer = make(TWO)
    with torch.no_grad():
        trainer.model[0].weight[0, 0] = float("nan")  # type: ignore[index]
    before = values(trainer)
    with pytest.raises(DivergedError, match="the loss is nan at step 0 "):
        results(trainer)
    torch.testing.assert_close(values(trainer), before, rtol=0, atol=0, equal_nan=True)


# --- evaluation
# ---------------------------------------------------------------------------------------------


def test_an_evaluation_runs_on_all_replicas_in_evaluation_mode() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append((len(inputs), self.training, torch.is_grad_enabled()))
            return self.layer(inputs)

    seen: list[tuple[int, bool, bool]] = []
    trainer = make(
        TWO,
        Sizes,
        metrics={"largest": lambda output, target: (output.max(1).values.sum(), len(target))},
    )
    found = trainer.evaluate(samples(21))
    assert sorted(seen) == [
        (2, False, False),
        (3, False, False),
        (8, False, False),
        (8, False, False),
    ]
    assert trainer.model.training
    alone = make(model=Sizes, metrics=trainer.metrics).evaluate(samples(21))
    assert_close(found, alone)


# --- what cannot be
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": []}, "devices: expected at least one device"),
        ({"devices": "cpu"}, "devices: expected a list of devices"),
        ({"devices": ["cpu", "meta"]}, "devices: expected devices that compute, got cpu, meta"),
        ({"devices": ["meta", "cpu"]}, "devices: expected devices that compute"),
        (
            {"devices": TWO, "virtual_workers": 4},
            "virtual_workers: expected none with strategy='replicas', got 4",
        ),
        ({"devices": TWO, "threads": 4}, "threads: expected none without virtual workers"),
        (
            {"devices": TWO, "strategy": "distributed"},
            "devices: expected none without strategy='replicas', got",
        ),
        (
            {"devices": TWO, "strategy": "replica"},
            "strategy: expected one of .*Did you mean replicas",
        ),
        (
            {"devices": TWO, "model": lambda: nn.SyncBatchNorm(6)},
            "model: .*got SyncBatchNorm at its top",
        ),
        (
            {"devices": TWO, "model": lambda: nn.Sequential(nn.Identity(), SyncBatchNorm(6))},
            "SyncBatchNorm at 1",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(**options)


def test_batches_that_cannot_be_cut() -> None:
    trainer = make(TWO, forward=lambda model, data: (model(data["x"].T), data["y"]))
    batch = next(trainer.loader(samples(16)).epoch(0))
    inputs, labels = batch.data
    object.__setattr__(batch, "data", {"x": inputs.T, "y": labels})
    with pytest.raises(
        ConfigError,
        match=r"their 16 samples in the first dimension, got shape \[6, 16\] at \['x'\]",
    ):
        trainer.step(batch)


def test_a_failure_names_the_device_and_the_shapes_and_what_is_known_stays_what_it_is() -> None:
    def broken(model: nn.Module, data: Any) -> Any:
        raise KeyError("no such thing")

    with pytest.raises(
        ReplicaError, match=r"replica 0 of 2 on cpu, given \[8, 6\] float64, \[8\] int64: KeyError"
    ):
        results(make(TWO, forward=broken))
    with pytest.raises(ConfigError, match="as many outputs as the labels need"):
        results(make(TWO, lambda: nn.Linear(6, 3)))


# --- which devices
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("global_batch_size", "expected"), [(256, 4), (64, 2), (16, 1), (None, 4)])
def test_a_replica_for_each_core_that_has_enough_to_do(
    monkeypatch: pytest.MonkeyPatch, global_batch_size: int | None, expected: int
) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 4)
    assert default_devices(init("cpu"), global_batch_size) == [torch.device("cpu")] * expected
    if global_batch_size is not None:
        made = make(None, strategy="replicas")
        assert len(made.step.strategy.devices) == 1  # of its 16 samples


@pytest.mark.parametrize(
    ("index", "workers", "expected"), [(0, 1, [0, 1, 2, 3]), (1, 2, [1, 3]), (3, 4, [3])]
)
def test_workers_share_the_accelerators(
    monkeypatch: pytest.MonkeyPatch, index: int, workers: int, expected: list[int]
) -> None:
    class Comm:
        device = torch.device("cuda", index)
        world = lockstep.World(
            world_size=workers, rank=index % workers, local_rank=index, local_world_size=workers
        )

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    comm: Any = Comm()
    assert [device.index for device in default_devices(comm)] == expected
    with pytest.raises(
        ConfigError,
        match=f"devices: expected cuda:{index}, this worker's own, as the first device, got",
    ):
        Replicas(comm, ["cpu", "cpu"])
