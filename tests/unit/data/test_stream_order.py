"""The order of sharded files: every sample once, the same at any number of workers, few blocks at a
time.
"""

from __future__ import annotations

import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.stream_order import OrderSettings, StreamOrder
from lockstep.parallel.shards import bounds

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def order(sizes: Any, global_batch_size: int, **options: Any) -> StreamOrder:
    chosen = {"seed": 0, "epoch": 0, "shuffle": True, "shuffle_window": 100, "lanes": 8, **options}
    return StreamOrder(
        np.asarray(sizes, dtype=np.int64), OrderSettings(global_batch_size, **chosen)
    )


def batches(found: StreamOrder, global_batch_size: int) -> list[list[int]]:
    steps = range(-(-found.samples // global_batch_size))
    return [found.part(step, 0, found.batch_size(step)).tolist() for step in steps]


@settings(deadline=None)
@given(
    sizes=SIZES,
    global_batch_size=st.integers(1, 60),
    shuffle=st.booleans(),
    window=st.integers(1, 300),
    lanes=st.integers(1, 40),
)
def test_every_sample_once(
    sizes: list[int], global_batch_size: int, shuffle: bool, window: int, lanes: int
) -> None:
    found = order(sizes, global_batch_size, shuffle=shuffle, shuffle_window=window, lanes=lanes)
    whole = batches(found, global_batch_size)
    assert {len(batch) for batch in whole[:-1]} <= {global_batch_size}
    samples = [sample for batch in whole for sample in batch]
    assert (sorted(samples) if shuffle else samples) == list(range(sum(sizes)))


@settings(deadline=None)
@given(
    sizes=SIZES,
    global_batch_size=st.integers(1, 60),
    shuffle=st.booleans(),
    workers=st.integers(1, 8),
    processes=st.integers(1, 4),
)
def test_parts_of_a_batch_and_the_blocks_that_they_need(
    sizes: list[int], global_batch_size: int, shuffle: bool, workers: int, processes: int
) -> None:
    whole, found = (
        batches(order(sizes, global_batch_size, shuffle=shuffle), global_batch_size),
        None,
    )
    block_of = np.repeat(np.arange(len(sizes)), sizes)
    for step in reversed(range(len(whole))):  # at any step first, in any order
        found = found or order(sizes, global_batch_size, shuffle=shuffle)
        dealt = []
        for worker in range(workers):
            low, high = bounds(len(whole[step]), workers, worker)
            cuts = found.cuts(step, low, high, processes)
            assert len(cuts) == processes and cuts[0][0] == low and cuts[-1][1] == high
            for cut in cuts:
                part = found.part(step, *cut)
                assert set(block_of[part]) <= set(found.blocks(step, *cut).tolist())
                dealt += part.tolist()
        assert dealt == whole[step]


def test_seed_and_epoch_choose_the_order() -> None:
    found = {
        str(batches(order([7] * 20, 16, seed=seed, epoch=epoch), 16))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(found) == 4


def test_the_order_is_that_of_earlier_versions() -> None:
    """What a seed stands for may not change: runs are resumed in mid-epoch, and compared with
    earlier ones.
    """
    few = order([5, 3, 4], 4, lanes=2, shuffle_window=8, seed=3)
    assert batches(few, 4) == [[8, 10, 5, 4], [9, 11, 3, 2], [0, 1, 6, 7]]
    many = order([100] * 30, 64, lanes=16, shuffle_window=640, seed=7, epoch=1)
    numbers = np.concatenate([np.asarray(batch) for batch in batches(many, 64)])
    assert zlib.crc32(numbers.astype("<i8").tobytes()) == 2813280160


def test_samples_of_a_window_are_shuffled_among_blocks() -> None:
    """Neighbours in a file, which may be alike, are seldom neighbours in a batch."""
    whole = batches(order([50] * 40, 40, lanes=20, shuffle_window=800), 40)
    assert all(len({sample // 50 for sample in batch}) >= 18 for batch in whole)
    numbers = np.concatenate([np.asarray(batch) for batch in whole])
    assert (np.diff(numbers) == 1).mean() < 0.03


def reads(found: StreamOrder, global_batch_size: int, worker: int, workers: int) -> int:
    """The number of blocks that a worker reads in an epoch, if it keeps those of the current
    window.
    """
    count, kept = 0, set[int]()
    for step in range(-(-found.samples // global_batch_size)):
        part = bounds(found.batch_size(step), workers, worker)
        needed = set(found.blocks(step, *part).tolist())
        count += len(needed - kept)
        kept = needed
    return count


def amplification(workers: int, global_batch_size: int, lanes: int) -> float:
    """The number of blocks that all workers read in an epoch, by the number of blocks."""
    found = order([50] * 2000, global_batch_size, lanes=lanes, shuffle_window=2000)
    return sum(reads(found, global_batch_size, worker, workers) for worker in range(workers)) / 2000


@pytest.mark.parametrize(
    ("workers", "global_batch_size", "most"),
    [
        # read twice is little more than the blocks at the edges of lanes
        *((workers, 64, 1.02) for workers in (1, 2, 4, 8)),
        # and, where the number of workers does not divide that of lanes, a lane for each border
        # between workers
        *((3, 64, 1.08), (2, 100, 1.04), (8, 100, 1.25)),
    ],
)
def test_workers_read_different_blocks(workers: int, global_batch_size: int, most: float) -> None:
    assert 1 <= amplification(workers, global_batch_size, 32) < most


def test_without_lanes_each_worker_would_read_everything() -> None:
    assert amplification(4, 64, 1) == pytest.approx(4, rel=0.05)


def test_a_step_far_ahead_takes_no_memory_for_samples() -> None:
    sizes = np.full(2000, 500_000)  # 10⁹ samples
    order([3], 2)
    tracemalloc.start()
    try:
        found = order(sizes, 1000, shuffle_window=20_000, lanes=32)
        assert len(found.part(999_000, 0, 1000)) == 1000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_500_000
