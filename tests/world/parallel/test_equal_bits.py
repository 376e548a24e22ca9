"""With virtual workers, training gives the same bits at any number of workers."""

from __future__ import annotations

import contextlib
import io
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.parallel.fingerprints import fingerprint
from lockstep.training.callbacks import Callback
from lockstep.training.step.step_result import StepResult
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.sharded import Augmented, adamw, busy, momentum, named, pictures, run, runs

EXAMPLE = Path(__file__).parents[3] / "examples" / "same_bits.py"
LARGE: dict[str, Any] = {"data": pictures(9, (3, 32, 32)), "global_batch_size": 8}


def tokens(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss that counts some of the labels only, and none of them in some shards."""
    kept = target > 4
    return (F.cross_entropy(output, target, reduction="none") * kept).sum(), kept.sum()


def clipped(step: int) -> float:
    return 0.9**step


def part_of_the_time() -> nn.Module:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.often, self.never, self.out = (
                nn.Linear(784, 16),
                nn.Linear(3, 3),
                nn.Linear(784, 10),
            )
            self.back = nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.flatten(1)
            found = self.out(flat)
            return found + self.back(self.often(flat)) if float(x[0, 0, 0, 0]) > 0 else found

    return Skipping()


def small_gpt() -> nn.Module:
    return lockstep.models.gpt(11, 8, layers=2, heads=2, width=16, dropout=0.1)


def blocks() -> TensorDataset:
    found = torch.randint(11, (22, 9), generator=torch.Generator().manual_seed(0))
    return TensorDataset(found[:, :-1], found[:, 1:])


KNOWN: list[dict[str, Any]] = [
    {"make": named("mlp"), "optimizer": momentum, "steps": 2},
    {"make": named("mlp"), "optimizer": adamw, "steps": 2},
    {"make": named("lenet"), "optimizer": momentum, "steps": 2},
    {"make": named("lenet"), "optimizer": adamw, "steps": 2},
]
# which would take most of the time of this file
LARGER: list[dict[str, Any]] = [
    {"make": named("convnet"), "optimizer": momentum, "steps": 2},
    {"make": named("resnet18"), "optimizer": adamw, "steps": 2, **LARGE},
]
OTHERS: list[dict[str, Any]] = [
    {"make": busy, "data": Augmented()},
    {"make": busy, "virtual_workers": 7, "global_batch_size": 16},
    {
        "make": busy,
        "virtual_workers": 12,
        "global_batch_size": 24,
        "data": pictures(53),
        "loss_fn": tokens,
    },
    {"make": busy, "max_grad_norm": 0.05, "schedule": clipped, "optimizer": adamw},
    {"make": busy, "precision": "bf16"},
    {"make": busy, "precision": "fp16"},
    {"make": busy, "optimizer": lambda p: torch.optim.AdamW(p, 1e-3, fused=True)},
    {"make": busy, "optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True)},
    {"make": busy, "optimizer": lambda p: torch.optim.Adam(p, 1e-3, foreach=True)},
    {"make": part_of_the_time},
    {
        "make": small_gpt,
        "data": blocks(),
        "loss_fn": lockstep.models.next_token_loss,
        "optimizer": adamw,
        "max_grad_norm": 0.1,
    },
    {"make": lambda: named("lenet")().to(memory_format=torch.channels_last), "max_grad_norm": 0.01},
]


def trained(several: list[dict[str, Any]]) -> Any:
    """Of this module, so that what is passed to it can be."""
    return runs(several)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Any:
    return pool.run(trained, [*KNOWN, *OTHERS], workers=1, timeout=300)[0]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_bits_are_those_of_one_worker(pool: Pool, alone: Any, workers: int) -> None:
    # many trainings, which on a busy host take more than the minute after which a rank counts as
    # hung
    for found in pool.run(trained, [*KNOWN, *OTHERS], workers=workers, timeout=300):
        for ours, expected, arguments in zip(found, alone, [*KNOWN, *OTHERS], strict=True):
            assert ours == expected, arguments


def test_the_bits_of_larger_models(pool: Pool) -> None:
    expected = pool.run(trained, LARGER, workers=1, timeout=300)
    assert pool.run(trained, LARGER, workers=3, timeout=300) == expected * 3


@pytest.mark.parametrize("workers", [2, 3])
def test_the_bits_over_shared_memory(pool: Pool, alone: Any, workers: int) -> None:
    found = pool.run(trained, OTHERS[:3], workers=workers, backend="shm")
    assert found == [alone[len(KNOWN) : len(KNOWN) + 3]] * workers


def test_three_workers_whose_sum_in_rank_order_is_the_tree(pool: Pool) -> None:
    options = {"make": busy, "virtual_workers": 6}
    expected = pool.run(run, workers=1, **options)
    assert pool.run(run, workers=3, backend="shm", **options) == expected * 3


def test_as_many_workers_as_shards(pool: Pool) -> None:
    options = {"make": busy, "virtual_workers": 4}
    assert pool.run(run, workers=4, **options) == pool.run(run, workers=1, **options) * 4


def test_another_number_of_shards_gives_other_bits(pool: Pool, alone: Any) -> None:
    assert (
        pool.run(run, workers=1, make=busy, data=Augmented(), virtual_workers=4)[0]
        != alone[len(KNOWN)]
    )


def test_augmentation_in_loader_processes(alone: Any) -> None:
    assert run(busy, data=Augmented(), num_workers=2) == alone[len(KNOWN)]


class Tied(nn.Module):
    """A transformer over words, whose table of words is its last layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(self.table(x)).mean(1))


def sentences() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 50, (37, 8), generator=generator)
    return TensorDataset(words[:, 1:].clone(), words[:, 0].clone())


def test_a_transformer_with_tied_weights_and_fewer_samples_than_shards(pool: Pool) -> None:
    options = {
        "make": Tied,
        "data": sentences(),
        "virtual_workers": 8,
        "global_batch_size": 16,
        "optimizer": adamw,
        "max_grad_norm": 0.1,
    }
    assert pool.run(trained, [options], workers=3) == pool.run(trained, [options], workers=1) * 3


def compiled() -> Any:
    """Shards of 3, 2 and, at the end of the epoch, 1 sample: workers meet these shapes in different
    orders.
    """

    def made() -> nn.Module:
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 10)
        )
        model.compile()  # as a user would, with torch's own rules for shapes
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own imports are deprecated
        import torch._inductor.config as inductor

        inductor.compile_threads = 1  # no processes that the pool would find left behind
        return run(made, virtual_workers=4, global_batch_size=9)


def test_a_compiled_model(pool: Pool) -> None:
    assert pool.run(compiled, workers=4) == pool.run(compiled, workers=1) * 4


def test_the_example_prints_the_same_fingerprint(pool: Pool) -> None:
    def printed() -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(EXAMPLE))
        return said.getvalue().splitlines()[-1] if said.getvalue() else ""

    last = [pool.run(printed, workers=workers)[0].split(maxsplit=1) for workers in (1, 2, 3)]
    assert [size for _, size in last] == ["with 1 worker", "with 2 workers", "with 3 workers"]
    assert len({fingerprint for fingerprint, _ in last}) == 1


# --- a run that goes on
# --------------------------------------------------------------------------------------


class Until(Callback):
    """Saves after a step, and ends the run there."""

    every_rank = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self.step:
            trainer.save()
            raise KeyboardInterrupt


def fit(out: Path | None, until: int | None = None, **options: Any) -> tuple[str, Any]:
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = busy()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    callbacks = [] if until is None else [Until(until)]
    virtual_workers = options.pop("virtual_workers", 8)
    trainer = Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        12,
        run_dir=out,
        callbacks=callbacks,
        virtual_workers=virtual_workers,
    )
    try:
        trainer.fit(Augmented(40), 3, validate=pictures(31), **options)
    except KeyboardInterrupt:
        return "", []
    times = ("seconds", "samples_per_second")
    return fingerprint(model, optimizer), [
        {k: v for k, v in r.items() if k not in times} for r in trainer.history
    ]


def test_a_run_that_resumes_with_other_numbers_of_workers(pool: Pool, tmp_path: Path) -> None:
    straight = pool.run(fit, None, workers=1)[0]
    pool.run(fit, tmp_path, 2, workers=4)  # in the middle of the first of three epochs
    pool.run(fit, tmp_path, 5, resume="latest", workers=2)
    found = pool.run(fit, tmp_path, resume="latest", workers=3)
    assert found == [straight] * 3  # its evaluations as well, to the last bit
