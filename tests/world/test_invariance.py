"""With shards, training gives the same bits at any number of workers, and each ingredient of it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.data.loader import Batch, Loader
from lockstep.errors import ConfigError
from lockstep.fingerprints import fingerprint
from lockstep.training.callbacks import Callback
from lockstep.training.step import StepResult, TrainStep
from lockstep.training.trainer import Trainer
from support.pool import Pool
from support.sharded import Augmented, adamw, busy, momentum, named, pictures, run, runs

COLOURED = pictures(9, (3, 32, 32))


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
            self.often, self.never, self.out = nn.Linear(784, 16), nn.Linear(3, 3), nn.Linear(784, 10)
            self.back = nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.flatten(1)
            found = self.out(flat)
            return found + self.back(self.often(flat)) if float(x[0, 0, 0, 0]) > 0 else found

    return Skipping()


KNOWN: list[dict[str, Any]] = [
    {"make": named(name), "optimizer": optimizer, **({"data": COLOURED, "global_batch": 8} if coloured else {})}
    for name, coloured in (("mlp", False), ("lenet", False), ("convnet", False), ("resnet18", True))
    for optimizer in (momentum, adamw)
]
OTHERS: list[dict[str, Any]] = [
    {"make": busy, "data": Augmented()},
    {"make": busy, "shards": 7, "global_batch": 16},
    {"make": busy, "shards": 12, "global_batch": 24, "data": pictures(53), "loss_fn": tokens},
    {"make": busy, "clip_norm": 0.05, "schedule": clipped, "optimizer": adamw},
    {"make": busy, "precision": "bf16"},
    {"make": busy, "precision": "fp16"},
    {"make": busy, "optimizer": lambda p: torch.optim.AdamW(p, 1e-3, fused=True)},
    {"make": busy, "optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True)},
    {"make": busy, "optimizer": lambda p: torch.optim.Adam(p, 1e-3, foreach=True)},
    {"make": part_of_the_time},
    {"make": lambda: named("lenet")().to(memory_format=torch.channels_last), "clip_norm": 0.01},
]


def trained(several: list[dict[str, Any]]) -> Any:
    """Of this module, so that what is passed to it can be."""
    return runs(several)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Any:
    return pool.run(trained, [*KNOWN, *OTHERS], workers=1)[0]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_bits_are_those_of_one_worker(pool: Pool, alone: Any, workers: int) -> None:
    for found in pool.run(trained, [*KNOWN, *OTHERS], workers=workers):
        for ours, expected, arguments in zip(found, alone, [*KNOWN, *OTHERS], strict=True):
            assert ours == expected, arguments


@pytest.mark.parametrize("workers", [2, 3])
def test_the_bits_over_shared_memory(pool: Pool, alone: Any, workers: int) -> None:
    found = pool.run(trained, OTHERS[:3], workers=workers, backend="shm")
    assert found == [alone[len(KNOWN) : len(KNOWN) + 3]] * workers


def test_three_workers_whose_sum_in_rank_order_is_the_tree(pool: Pool) -> None:
    options = {"make": busy, "shards": 6}
    expected = pool.run(run, workers=1, **options)
    assert pool.run(run, workers=3, backend="shm", **options) == expected * 3


def test_as_many_workers_as_shards(pool: Pool) -> None:
    options = {"make": busy, "shards": 4}
    assert pool.run(run, workers=4, **options) == pool.run(run, workers=1, **options) * 4


def test_another_number_of_shards_gives_other_bits(pool: Pool, alone: Any) -> None:
    assert pool.run(run, workers=1, make=busy, data=Augmented(), shards=4)[0] != alone[len(KNOWN)]


def test_augmentation_in_loader_processes(alone: Any) -> None:
    assert run(busy, data=Augmented(), num_workers=1) == alone[len(KNOWN)]


# --- what it is made of --------------------------------------------------------------------------------------


def without_key_of_dropout() -> None:
    import lockstep.training.shard_passes as passes

    passes.seed_shard = lambda *_: None  # type: ignore[assignment]


def without_key_of_augmentation() -> None:
    import lockstep.data.fetch as fetch

    fetch.seed_draws = lambda *_: None


def left_fold() -> None:
    from lockstep.tree import TreeSum

    def push(self: Any, node: Any, value: Any) -> None:
        if self._held:
            value = self._add(self._held.pop()[1], value)
        self._held.append(((0, 64), value))

    TreeSum.push = push  # type: ignore[method-assign]


def mean_of_means() -> None:
    from lockstep.training.shard_passes import ShardPasses

    parts_before, forward_before = ShardPasses._parts, ShardPasses._forward

    def parts(self: ShardPasses, batch: Batch) -> Any:
        self.size = batch.size * self._strategy.comm.size  # type: ignore[attr-defined]
        ShardPasses._forward = staticmethod(  # type: ignore[method-assign]
            lambda loss, precision, part, _, own: forward_before(loss, precision, part, self.size, own)  # type: ignore[attr-defined]
        )
        return parts_before(self, batch)

    ShardPasses._parts = parts  # type: ignore[method-assign]


def statistics_of_rank_0() -> None:
    from lockstep.strategies.shard_buffers import ShardBuffers

    ShardBuffers.take = lambda *_: None  # type: ignore[method-assign]


def whatever_order_the_transport_has() -> None:
    from lockstep.reductions.exchange import Places

    Places.is_plain_sum = lambda *_: True  # type: ignore[method-assign]


def buffers_as_the_last_shard_left_them() -> None:
    from lockstep.strategies.shard_buffers import ShardBuffers

    ShardBuffers.restore = lambda _: None  # type: ignore[method-assign]


def disturbed(change: Any, **arguments: Any) -> tuple[str, list[float]]:
    """`run` in a process in which one thing has been taken out; it is put back afterwards."""
    import lockstep.data.fetch as fetch
    import lockstep.reductions.exchange as exchange
    import lockstep.strategies.shard_buffers as buffers
    import lockstep.training.shard_passes as passes
    import lockstep.tree as tree

    places = [passes, passes.ShardPasses, fetch, tree.TreeSum, exchange.Places, buffers.ShardBuffers]
    before = [dict(vars(place)) for place in places]
    try:
        change()
        return run(**arguments)
    finally:
        for place, attributes in zip(places, before, strict=True):
            for name, value in attributes.items():
                if not name.startswith("__") and vars(place)[name] is not value:
                    setattr(place, name, value)


@pytest.mark.parametrize(
    ("change", "workers", "options"),
    [
        (without_key_of_dropout, 2, {}),
        (without_key_of_augmentation, 2, {"data": Augmented()}),
        (left_fold, 2, {"make": named("lenet")}),
        (mean_of_means, 3, {"make": named("lenet")}),
        (statistics_of_rank_0, 2, {}),
        (buffers_as_the_last_shard_left_them, 2, {}),
        (whatever_order_the_transport_has, 3, {"make": named("lenet"), "shards": 3}),
        (lambda: None, 2, {"make": named("lenet"), "shards": None}),  # one pass for each rank
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_without_one_ingredient_the_bits_differ(pool: Pool, change: Any, workers: int, options: dict[str, Any]) -> None:
    arguments = {"make": busy, "data": pictures(), **options}
    one, several = (pool.run(disturbed, change, workers=size, **arguments)[0][0] for size in (1, workers))
    assert one != several


def test_another_number_of_threads_gives_other_bits() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 4000), nn.LayerNorm(4000), nn.Linear(4000, 10))

    one = run(wide, clip_norm=0.01, steps=1)
    assert run(wide, clip_norm=0.01, steps=1, threads=2) != one
    assert torch.get_num_threads() == 1


# --- a run that goes on --------------------------------------------------------------------------------------


class Until(Callback):
    """Saves after a step, and ends the run there."""

    every_rank = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self.step:
            trainer.save()
            raise KeyboardInterrupt


def fit(out: Path | None, until: int | None = None, **options: Any) -> tuple[str, Any]:
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = busy()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    callbacks = [] if until is None else [Until(until)]
    shards = options.pop("shards", 8)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), 12, out=out, callbacks=callbacks, shards=shards)
    try:
        trainer.fit(Augmented(40), 3, validate=pictures(31), **options)
    except KeyboardInterrupt:
        return "", []
    times = ("seconds", "samples_per_second")
    return fingerprint(model, optimizer), [{k: v for k, v in r.items() if k not in times} for r in trainer.history]


def test_a_run_that_goes_on_with_other_numbers_of_workers(pool: Pool, tmp_path: Path) -> None:
    straight = pool.run(fit, None, workers=1)[0]
    pool.run(fit, tmp_path, 2, workers=4)  # in the middle of the first of three epochs
    pool.run(fit, tmp_path, 5, resume="latest", workers=2)
    found = pool.run(fit, tmp_path, resume="latest", workers=3)
    assert found == [straight] * 3  # its evaluations as well, to the last bit


# --- refusals ------------------------------------------------------------------------------------------------


def test_more_workers_than_shards(pool: Pool) -> None:
    def refused() -> str:
        with pytest.raises(ConfigError) as caught:
            TrainStep(nn.Linear(1, 1), momentum(nn.Linear(1, 1).parameters()), F.mse_loss, shards=2)
        with pytest.raises(ConfigError, match="shards: expected at least one for each of 3 workers, got 2"):
            Loader(pictures(), 12, shards=2)
        return str(caught.value)

    assert pool.run(refused, workers=3)[2].startswith("shards: expected at least one for each of 3 workers, got 2")


def test_a_batch_that_is_cut_by_workers(pool: Pool) -> None:
    def refused() -> None:
        model = named("lenet")()
        step = TrainStep(model, momentum(model.parameters()), F.cross_entropy, shards=8)
        with pytest.raises(ConfigError, match="batch: expected one in 8 shards, got one in none"):
            step(next(Loader(pictures(), 12).epoch(0)))
        with pytest.raises(ConfigError, match="batch: expected one in 8 shards, got one in 4"):
            step(next(Loader(pictures(), 12, shards=4).epoch(0)))

    pool.run(refused, workers=2)


def test_workers_under_other_conditions(pool: Pool) -> None:
    def refused() -> None:
        model = named("lenet")()
        threads = 1 + lockstep.init("cpu").rank
        with pytest.raises(ConfigError, match="workers: expected the same threads on all, got 1 on rank 0, 2 on 1"):
            TrainStep(model, momentum(model.parameters()), F.cross_entropy, shards=8, threads=threads)

    pool.run(refused, workers=2)


def test_a_loader_with_other_shards_than_the_trainer() -> None:
    model = named("lenet")()
    trainer = Trainer(model, momentum(model.parameters()), nn.CrossEntropyLoss(), 12, callbacks=[], shards=8)
    with pytest.raises(ConfigError, match="shards: expected 8, the trainer's, got None"):
        trainer.fit(Loader(pictures(), 12), 1)
