"""The communicator's examples run alone and under a launcher."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import lockstep
from support.examples import EXAMPLES, alone, together
from support.pool import Pool


@pytest.mark.parametrize("workers", [1, 3])
def test_array_work_of_parts_that_are_not_even(pool: Pool, workers: int) -> None:
    result = f"workers {workers}  sum 28  squares [0, 1, 4, 9, 16, 25, 36, 49]\n"
    assert together(pool, "array_work.py", workers=workers) == [""] * (workers - 1) + [result]


def test_rank0_first(pool: Pool, tmp_path: Path) -> None:
    assert (
        alone(pool, "rank0_first.py", str(tmp_path / "alone")) == "rank 0 of 1 uses {'lr': 0.1}\n"
    )
    together(pool, "rank0_first.py", str(tmp_path / "together"), workers=3)
    written = [path.read_text() for path in sorted((tmp_path / "together").glob("*.log"))]
    assert written == [f"rank {rank} of 3 uses {{'lr': 0.1}}\n" for rank in range(3)]


def gradients_by_hand(program: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of one step at a learning rate of 1 over an uneven batch: by how much the program moves, and
    ought to.
    """
    example = runpy.run_path(program)
    torch.manual_seed(3)
    model, images, labels = (
        torch.nn.Linear(4, 3),
        torch.randn(7, 4),
        torch.tensor([0, 1, 2, 0, 1, 2, 0]),
    )
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    expected = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = example["train_step"](lockstep.init(device="cpu"), model, images, labels, lr=1.0)
    assert loss > 0
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)], expected


def test_mpi_by_hand_steps_along_the_mean_over_all_samples(pool: Pool) -> None:
    for workers in (1, 3):
        for found, expected in pool.run(
            gradients_by_hand, str(EXAMPLES / "mpi_by_hand.py"), workers=workers
        ):
            torch.testing.assert_close(found, expected)


def test_mpi_by_hand(pool: Pool) -> None:
    first, second = (
        shown.splitlines() for shown in together(pool, "mpi_by_hand.py", "2", workers=2)
    )
    assert second == []
    assert [line.split("  ")[0] for line in first] == ["epoch 1", "epoch 2"]
    assert float(first[-1].split()[-1].removesuffix("%")) > 40
