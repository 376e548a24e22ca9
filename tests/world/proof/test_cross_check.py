"""The cross-check on two and three workers: healthy ones pass, and flipped bits are found and mended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigError
from support import bit_flips
from support.bit_flips import BitFlip, Outcome
from support.pool import Pool


def runs(
    pool: Pool, workers: int, flip: BitFlip | None, every: int | None = 4, **options: Any
) -> list[Outcome]:
    return pool.run(bit_flips.run, flip, every, workers=workers, init=False, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("make", [bit_flips.mlp, bit_flips.convolutional, bit_flips.normed])
def test_healthy_workers_pass_at_every_step_with_the_same_bits(
    pool: Pool, workers: int, make: Any
) -> None:
    plain = runs(pool, workers, None, None, make=make)
    checked = runs(pool, workers, None, 1, make=make)
    assert {each.fingerprint for each in (*plain, *checked)} == {plain[0].fingerprint}
    for each in checked:
        assert each.faults == []
        assert each.checked_passes == bit_flips.STEPS


def test_fp16_passes_as_well(pool: Pool) -> None:
    plain = runs(pool, 2, None, None, precision="fp16")
    checked = runs(pool, 2, None, 1, precision="fp16")
    assert checked[0].faults == []
    assert checked[0].fingerprint == plain[0].fingerprint


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_weight_that_flips_once_is_found_in_the_same_step_and_mended(
    pool: Pool, workers: int, seed: int
) -> None:
    flip = BitFlip.drawn(seed, workers)
    flip.kind, flip.is_persistent = "weight", False
    healthy = runs(pool, workers, None, None)
    for each in runs(pool, workers, flip):
        ((step, kind, ranks, places, is_persistent, parameter),) = each.faults
        assert (step, kind, ranks, is_persistent) == (flip.step, "weights", (flip.rank,), False)
        assert parameter in dict(bit_flips.mlp().named_parameters())
        assert len(places) == 1
        assert each.end == "done"
        assert each.fingerprint == healthy[0].fingerprint


def test_a_fault_is_in_the_ledger_of_the_run(pool: Pool, tmp_path: Path) -> None:
    flip = BitFlip.drawn(0, 2)
    flip.kind, flip.is_persistent = "weight", False
    run_dir = tmp_path / "run"
    for each in runs(pool, 2, flip, run_dir=run_dir):
        assert each.end == "done"
    ledger = lockstep.ledger(run_dir)
    assert ledger.faults == [(flip.step, flip.rank)]
    assert ledger.steps["step"].tolist() == list(range(bit_flips.STEPS))


def test_a_fault_that_ends_the_job_is_in_the_ledger_too(pool: Pool, tmp_path: Path) -> None:
    flip = BitFlip(
        "gradient", rank=2, is_persistent=True, step=3, shard=0, place=1, element=3, bit=22
    )
    run_dir = tmp_path / "run"
    (step,) = {each.faults[0].step for each in runs(pool, 3, flip, run_dir=run_dir)}
    assert lockstep.ledger(run_dir).faults == [(step, 2)]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", ["output", "gradient"])
def test_a_pass_that_is_wrong_once_is_repeated(pool: Pool, workers: int, kind: str) -> None:
    flip = BitFlip.drawn(1, workers)
    flip.kind, flip.is_persistent, flip.step, flip.bit = kind, False, 4, 29
    flip.rank = 1
    local = bit_flips.VIRTUAL_WORKERS // workers
    flip.shard = local + 1 % local  # the pass of rank 1 that is checked in step 4, with K = 4
    healthy = runs(pool, workers, None, None)
    for each in runs(pool, workers, flip):
        ((step, what, ranks, _, is_persistent, _),) = each.faults
        assert (step, what, ranks, is_persistent) == (4, "gradient", (1,), False)
        assert each.end == "done"
        assert each.fingerprint == healthy[0].fingerprint


def test_who_is_wrong_again_ends_the_job_by_name(pool: Pool) -> None:
    flip = BitFlip(
        "gradient", rank=2, is_persistent=True, step=3, shard=0, place=1, element=3, bit=22
    )
    for each in runs(pool, 3, flip):
        assert (each.end, each.ranks) == ("faulty worker", (2,))
        assert [(fault.ranks, fault.is_persistent) for fault in each.faults] == [((2,), True)]
        assert str(each.faults[-1]).startswith("rank 2 (host ")


def test_of_two_workers_that_differ_again_and_again_either_may_be_wrong(pool: Pool) -> None:
    flip = BitFlip(
        "gradient", rank=1, is_persistent=True, step=3, shard=0, place=1, element=3, bit=22
    )
    for each in runs(pool, 2, flip):
        assert (each.end, set(each.ranks)) == ("faulty worker", {0, 1})
        assert "it cannot be known which" in str(each.faults[-1])


def test_a_weight_that_flips_again_ends_the_job(pool: Pool) -> None:
    """It flips in each of three passes; with two it would be as before at the end of the step."""
    flip = BitFlip(
        "weight", rank=1, is_persistent=True, step=5, shard=0, place=0, element=7, bit=20
    )
    for each in runs(pool, 2, flip):
        assert (each.end, each.ranks) == ("faulty worker", (1,))
        assert [fault.step for fault in each.faults] == [5, 5]


def test_a_weight_that_flips_back_within_a_step_is_found_in_a_checked_pass(pool: Pool) -> None:
    flip = BitFlip(
        "weight", rank=1, is_persistent=True, step=5, shard=0, place=0, element=7, bit=20
    )
    for each in runs(pool, 3, flip):
        assert (each.end, each.ranks) == ("faulty worker", (1,))
        assert {(fault.step, fault.kind, fault.ranks) for fault in each.faults} == {
            (8, "gradient", (1,))
        }


def refused(**options: Any) -> str:
    comm = lockstep.init("cpu")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError) as raised:
        lockstep.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), 8 * comm.size, callbacks=[], **options
        )
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_check": 10}, "cross_check: expected virtual_workers with it, got 10"),
        (
            {"cross_check": 10, "virtual_workers": 4, "sync_batchnorm": True},
            "cross_check: expected none with sync_batchnorm, got 10",
        ),
        (
            {"cross_check": 0, "virtual_workers": 4},
            "cross_check: expected a whole number of at least 1, got 0",
        ),
        (
            {"on_spike": "skip", "strategy": "replicas", "devices": ["cpu", "cpu"]},
            "strategy: expected a strategy whose steps can be undone",
        ),
    ],
)
def test_what_is_refused(pool: Pool, options: dict[str, Any], message: str) -> None:
    assert all(
        text.startswith(message) for text in pool.run(refused, **options, workers=2, init=False)
    )
