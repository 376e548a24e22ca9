"""The ledger that a run keeps: the same on any number of workers, and compared at a resume."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import DivergedError
from lockstep.proof.ledger import StepValues, ledger
from lockstep.training.callbacks import Callback, Checkpoints
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.runs import At, images, make

COLUMNS = StepValues._fields


def train(folder: Path, steps: int, *callbacks: Callback, data: Any = None, **options: Any) -> Any:
    resume = options.pop("resume", None)
    trainer = make(folder, [*callbacks, Checkpoints("4steps")], **options)
    trainer.fit(data or images(), max_steps=steps, resume=resume)
    return trainer


def columns(folder: Path) -> list[Any]:
    return [ledger(folder).steps[name].tolist() for name in COLUMNS]


def keeps_a_ledger(folder: Path, steps: int, **options: Any) -> None:
    train(folder, steps, **options)


def test_a_run_keeps_a_ledger(tmp_path: Path) -> None:
    trainer = train(tmp_path / "a", 12, virtual_workers=4, max_grad_norm=0.5, fingerprint_every=5)
    found = ledger(tmp_path / "a")
    assert found.steps["step"].tolist() == list(range(12))
    assert found.steps["count"].tolist() == [16, 16, 16, 16, 3] * 2 + [16, 16]
    assert len(set(found.steps["samples"].tolist())) == 12
    assert (found.steps["gradient_norm"] > 0.5).any()  # before clipping
    assert found.steps["learning_rate"].tolist() == [0.01] * 12
    assert found.fingerprints["step"].tolist() == [5, 10]
    start = found.starts[0]
    assert start.parameters == sum(p.numel() for p in trainer.model.parameters())
    assert start.data.samples == 67
    assert len(start.data.digests) == 32
    assert start.virtual_workers == 4
    assert start.hyperparameters[0]["lr"] == 0.01


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_it_has_the_same_bits_on_any_number_of_workers(
    pool: Pool, tmp_path: Path, workers: int
) -> None:
    train(tmp_path / "one", 10, virtual_workers=4, fingerprint_every=5)
    options = {"virtual_workers": 4, "fingerprint_every": 5}
    pool.run(keeps_a_ledger, tmp_path / "many", 10, workers=workers, **options)
    one, many = ledger(tmp_path / "one"), ledger(tmp_path / "many")
    assert columns(tmp_path / "one") == columns(tmp_path / "many")
    for name in ("parameters", "buffers", "optimizer", "rates"):
        assert one.fingerprints[name].tolist() == many.fingerprints[name].tolist()
    assert many.steps["workers"].tolist() == [workers] * 10


def test_without_virtual_workers_the_samples_are_the_same(pool: Pool, tmp_path: Path) -> None:
    train(tmp_path / "one", 6)
    pool.run(keeps_a_ledger, tmp_path / "two", 6, workers=2)
    one, two = ledger(tmp_path / "one").steps, ledger(tmp_path / "two").steps
    assert one["samples"].tolist() == two["samples"].tolist()
    assert one["count"].tolist() == two["count"].tolist()


def test_running_statistics_are_measured(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4))
    with_norm = Trainer(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        nn.CrossEntropyLoss(),
        16,
        run_dir=tmp_path / "b",
        callbacks=[],
    )
    with_norm.fit(images(), max_steps=3)
    norms = ledger(tmp_path / "b").steps["buffers_norm"].tolist()
    assert norms[0] != norms[1] > 0
    assert norms[2] == np.float32(
        torch.nn.utils.get_total_norm([net[2].running_mean, net[2].running_var])
    )


def test_a_resume_computes_steps_again_and_finds_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "a", 8, virtual_workers=4)
    whole = columns(tmp_path / "a")
    _forget_checkpoint(tmp_path / "a", 8)
    with (tmp_path / "a" / "ledger.bin").open("ab") as file:
        file.write(b"\x07" * 37)
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "a", 8, virtual_workers=4, resume="latest")
    assert "37 bytes of a torn end were cut off the ledger" in caplog.text
    assert "another result" not in caplog.text
    found = ledger(tmp_path / "a")
    assert columns(tmp_path / "a") == whole
    assert found.recomputed["step"].tolist() == [4, 5, 6, 7]
    assert [Path(start.resumed).name for start in found.starts] == ["", "step-0000000004"]


@pytest.mark.parametrize(
    "changed",
    [
        {"data": images(seed=6)},
        {"lr": 0.02},
    ],
    ids=["data", "learning rate"],
)
def test_a_resume_that_computes_something_else_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any]
) -> None:
    train(tmp_path / "a", 8, virtual_workers=4)
    _forget_checkpoint(tmp_path / "a", 8)
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "a", 8, virtual_workers=4, resume="latest", **changed)
    said = [
        record.getMessage() for record in caplog.records if "another result" in record.getMessage()
    ]
    assert len(said) == 1
    expected = (
        "step 4: the learning rate was 0.01, and is 0.02"
        if "lr" in changed
        else "step 4: the loss was"
    )
    assert expected in said[0]


def _forget_checkpoint(folder: Path, step: int) -> None:
    """As if the process had been killed before it was written."""
    path = folder / "checkpoints" / f"step-{step:010}"
    path.rename(folder / f"lost-{step}")


def test_a_run_without_one_has_no_files_of_it(tmp_path: Path) -> None:
    train(tmp_path / "a", 2, ledger=False)
    assert not list((tmp_path / "a").glob("ledger*"))


def test_a_full_disk_is_a_warning_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = os.write

    def full(descriptor: int, data: bytes) -> int:
        return 20 if len(data) == 64 else written(descriptor, data)

    def fill() -> None:
        monkeypatch.setattr(os, "write", full)

    with caplog.at_level(logging.WARNING):
        trainer = train(tmp_path / "a", 6, At(2, lambda _: fill()))
    assert trainer.step.steps_done == 6
    said = [
        record.getMessage()
        for record in caplog.records
        if "the ledger cannot be written" in record.getMessage()
    ]
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert ledger(tmp_path / "a").steps["step"].tolist() == [0, 1, 2]


def test_a_second_fit_goes_on_in_the_same_ledger(tmp_path: Path) -> None:
    trainer = make(tmp_path / "a", [])
    trainer.fit(images(), 1)
    trainer.fit(images(), 2)
    found = ledger(tmp_path / "a")
    assert found.steps["step"].tolist() == list(range(10))
    assert [start.fit for start in found.starts] == [0, 1]


def test_the_record_of_a_loss_that_is_not_finite_is_there(tmp_path: Path) -> None:
    data = images()
    data.tensors[0][int(_order()[20])] = torch.nan
    with pytest.raises(DivergedError):
        train(tmp_path / "a", 6, data=data)
    found = ledger(tmp_path / "a")
    assert found.steps["step"].tolist() == [0, 1]
    assert np.isnan(found.steps["loss"][1])


def _order() -> torch.Tensor:
    return lockstep.Loader(images(), 16).order(0)
