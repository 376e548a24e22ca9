"""Each ingredient of the same bits at any number of workers is needed: without one of them, the
bits differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.data.loader import Batch
from support.pool import Pool
from support.sharded import Augmented, busy, named, pictures, run


def without_key_of_dropout() -> None:
    import lockstep.training.step.virtual_worker_passes as passes

    passes.seed_shard = lambda *_: None  # type: ignore[assignment]


def without_key_of_augmentation() -> None:
    from lockstep.data import fetching

    fetching.seed_draws = lambda *_: None


def left_fold() -> None:
    from lockstep.parallel.tree_sum import TreeSum

    def push(self: Any, node: Any, value: Any) -> None:
        if self._partial_sums:
            value = self._add(self._partial_sums.pop()[1], value)
        self._partial_sums.append(((0, 64), value))

    TreeSum.push = push  # type: ignore[method-assign]


def mean_of_means() -> None:
    from lockstep.training.step.virtual_worker_passes import ShardPasses

    parts_before, run_before = ShardPasses.parts, ShardPasses._run_in_sequence

    def parts(self: ShardPasses, batch: Batch) -> Any:
        self.size = batch.size * self._strategy.comm.size  # type: ignore[attr-defined]
        return parts_before(self, batch)

    def run(self: ShardPasses, step: Any, parts: Any) -> None:
        batch = replace(step.batch, global_size=self.size)  # type: ignore[attr-defined]
        run_before(self, replace(step, batch=batch), parts)

    ShardPasses.parts = parts  # type: ignore[method-assign]
    ShardPasses._run_in_sequence = run  # type: ignore[method-assign]


def statistics_of_rank_0() -> None:
    from lockstep.parallel.buffers import Buffers

    Buffers.set = lambda *_: None  # type: ignore[method-assign]


def whatever_order_the_transport_has() -> None:
    from lockstep.parallel.bucket_exchange import SubtreeLayout

    SubtreeLayout.is_plain_sum = lambda *_: True  # type: ignore[method-assign]


def buffers_as_the_last_shard_left_them() -> None:
    from lockstep.parallel.buffers import Buffers

    Buffers.restore = lambda _: None  # type: ignore[method-assign]


def disturbed(change: Any, **arguments: Any) -> tuple[str, list[float]]:
    """`run` in a process in which one thing has been taken out; it is put back afterwards."""
    import lockstep.data.fetching as fetching
    import lockstep.parallel.bucket_exchange as exchange
    import lockstep.parallel.buffers as buffers
    import lockstep.parallel.tree_sum as tree
    import lockstep.training.step.virtual_worker_passes as passes

    layout = [
        passes,
        passes.ShardPasses,
        fetching,
        tree.TreeSum,
        exchange.SubtreeLayout,
        buffers.Buffers,
    ]
    before = [dict(vars(place)) for place in layout]
    try:
        change()
        return run(**arguments)
    finally:
        for place, attributes in zip(layout, before, strict=True):
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
        (whatever_order_the_transport_has, 3, {"make": named("lenet"), "virtual_workers": 3}),
        (
            lambda: None,
            2,
            {"make": named("lenet"), "virtual_workers": None},
        ),  # one pass for each rank
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_without_one_ingredient_the_bits_differ(
    pool: Pool, change: Any, workers: int, options: dict[str, Any]
) -> None:
    arguments = {"make": busy, "data": pictures(), **options}
    one, several = (
        pool.run(disturbed, change, workers=size, **arguments)[0][0] for size in (1, workers)
    )
    assert one != several


def test_another_number_of_threads_gives_other_bits() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 4000), nn.LayerNorm(4000), nn.Linear(4000, 10)
        )

    one = run(wide, max_grad_norm=0.01, steps=1)
    assert run(wide, max_grad_norm=0.01, steps=1, threads=2) != one
    assert torch.get_num_threads() == 1
