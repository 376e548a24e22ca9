"""What a loss is a mean over, and the state that it has, at several numbers of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError
from support.pool import Pool


class Scaled(nn.Module):
    """A loss in units of its own running mean, of which only training steps are a part."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.factor = nn.Parameter(torch.rand(()), requires_grad=False)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = (output - target).square().mean(1)
        scaled = losses / self.mean * self.factor
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * losses.detach().mean()
        return scaled


def samples() -> list[Any]:
    inputs = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
    return list(zip(inputs, 3 * inputs.sum(1, keepdim=True), strict=True))


def make(loss: Any, folder: str | None = None, **options: Any) -> lockstep.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    callbacks = [] if folder is None else [lockstep.callbacks.Checkpoints()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return lockstep.Trainer(
        model, optimizer, loss, 8, run_dir=folder, callbacks=callbacks, **options
    )


@pytest.mark.parametrize("kind", ["module", "function"])
def test_the_buffers_of_a_loss_are_those_of_virtual_workers(pool: Pool, kind: str) -> None:
    def train(kind: str) -> Any:
        torch.manual_seed(lockstep.init().rank + 5)  # rank 0's loss is that of all workers
        loss = Scaled()
        trainer = make(loss if kind == "module" else lambda o, t: loss(o, t), virtual_workers=4)
        rows = [row["train_loss"] for row in trainer.fit(samples(), epochs=2)]
        return rows, float(loss.mean), trainer.model.weight.tolist()

    one, two = (pool.run(train, kind, workers=workers) for workers in (1, 2))
    assert two[0] == two[1]
    if kind == "module":  # of a module that is called, the parameters are left alone
        assert two[0] == one[0]


def test_validation_leaves_the_training_alone(pool: Pool) -> None:
    def train() -> Any:
        found = []
        for held_out in (None, samples()[:8]):
            torch.manual_seed(0)
            trainer = make(Scaled())
            found.append(
                [row["train_loss"] for row in trainer.fit(samples(), epochs=2, validate=held_out)]
            )
        return found

    for without, validated in pool.run(train, workers=2):
        assert without == validated


def test_the_state_of_a_loss_is_resumed(pool: Pool, tmp_path: Path) -> None:
    def train(folder: str, epochs: int, resume: str | None) -> Any:
        torch.manual_seed(0 if resume is None else 1)  # another process draws other parameters
        loss = Scaled()
        trainer = make(loss, folder)
        trainer.fit(samples(), epochs=epochs, resume=resume)
        return [row["train_loss"] for row in trainer.history], float(loss.mean), float(loss.factor)

    undisturbed = pool.run(train, str(tmp_path / "a"), 3, None, workers=2)
    pool.run(train, str(tmp_path / "b"), 2, None, workers=2)
    assert pool.run(train, str(tmp_path / "b"), 3, "latest", workers=2) == undisturbed


def test_replicas_refuse_a_loss_that_changes_a_buffer(pool: Pool) -> None:
    def train() -> str:
        with pytest.raises(ConfigError) as caught:
            make(Scaled(), strategy="replicas", devices=["cpu", "cpu"]).fit(samples(), epochs=1)
        return str(caught.value)

    assert (
        "a loss that changes no buffer, with strategy='replicas'" in pool.run(train, workers=1)[0]
    )


def test_a_loss_is_refused_at_the_step_that_shows_it_on_every_worker(pool: Pool) -> None:
    def train() -> Any:
        inputs = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
        labels = torch.randint(0, 3, (48,), generator=torch.Generator().manual_seed(0))
        labels[32] = -100  # the first sample of step 4: only rank 0 has it
        torch.manual_seed(0)
        model = nn.Linear(5, 3)

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(output, target)

        step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
        with lockstep.Loader(TensorDataset(inputs, labels), 8, shuffle=False) as loader:
            batches = loader.epoch(0)
            for _ in range(4):
                step(next(batches))
            before = model.weight.detach().clone()
            with pytest.raises(ConfigError) as caught:
                step(next(batches))
        return step.steps_done, str(caught.value), torch.equal(model.weight, before)

    for workers in (1, 2):
        found = pool.run(train, workers=workers)
        assert found == found[:1] * workers
        done, message, is_unchanged = found[0]
        assert done == 4 and is_unchanged and "of rank 0 " in message


def test_outputs_that_are_padded_by_batch(pool: Pool) -> None:
    def measure() -> Any:
        def pad(batch: Any) -> Any:
            inputs, labels = zip(*batch, strict=True)
            return pad_sequence(inputs, batch_first=True), pad_sequence(
                labels, batch_first=True, padding_value=-100
            )

        class Scores(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 2)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return self.layer(inputs).transpose(1, 2)

        torch.manual_seed(0)
        lengths = [1 + number * 5 % 7 for number in range(17)]
        data = [(torch.rand(length, 3), torch.randint(2, (length,))) for length in lengths]
        model = Scores()
        loader = DataLoader(data, batch_size=4, collate_fn=pad)
        right = lockstep.whole_set(lambda o, t: (o.argmax(1) == t)[t != -100].float().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = lockstep.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), 4, callbacks=[], metrics={"right": right}
        )
        outputs = trainer.predict(loader)
        valid = [outputs[number, :, :length] for number, length in enumerate(lengths)]
        return (
            trainer.evaluate(loader)["right"],
            list(outputs.shape),
            torch.cat([each.flatten() for each in valid]),
        )

    (alone,) = pool.run(measure, workers=1)
    for found in pool.run(measure, workers=3):
        assert found[:2] == alone[:2]
        torch.testing.assert_close(found[2], alone[2])
