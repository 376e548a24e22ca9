"""The order of the samples of sharded files: blocks, lanes and shuffle windows (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..parallel.shards import bounds, mix

Integers = NDArray[np.int64]

# part of the keys of permutations, so that those of one seed are independent
_BLOCKS = 1
_WINDOWS = 2
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """What an order depends on, beside the sizes of the blocks.

    Attributes:
        global_batch_size: samples in a step, over all workers.
        seed: seed of the shuffling.
        epoch: the epoch.
        shuffle: False for the order of the blocks as they are.
        shuffle_window: samples among which the order is random, over all lanes.
        lanes: number of places in the shuffled sequence of blocks from which each batch takes
            samples.
    """

    global_batch_size: int
    seed: int
    epoch: int
    shuffle: bool
    shuffle_window: int
    lanes: int


class StreamOrder:
    """The order of an epoch over samples that lie in blocks, in which each part of a batch needs
    few blocks at a time.

    The blocks are shuffled, and the sequence of their samples is cut into contiguous *lanes*. Each
    global batch takes the same number of samples from each lane (as nearly as the batch size
    allows), lane after lane. So a contiguous part of every batch, such as that of one worker, comes
    from the same lanes throughout the epoch: workers read different blocks. A *window* is a fixed
    number of steps; within it, the samples of each lane are shuffled.

    Every sample occurs once. The order depends on the settings and the sizes of the blocks alone.
    It takes memory for the blocks and for the current window, and none for the samples.

    Args:
        sizes: number of samples in each block, int64 of shape (blocks,), all at least 1.
        settings: what else the order depends on.

    Attributes:
        samples: number of samples in the epoch.
        lanes: number of lanes: at most one for each sample of a batch; 1 without shuffling.
        window_steps: number of steps in a window.
    """

    def __init__(self, sizes: Integers, settings: OrderSettings) -> None:
        self._settings = settings
        self.samples = int(sizes.sum())
        self._batch = settings.global_batch_size
        self._full_steps, self._rest = divmod(self.samples, self._batch)
        self.lanes = min(settings.lanes, self._batch) if settings.shuffle else 1
        self.window_steps = (
            max(1, settings.shuffle_window // self._batch) if settings.shuffle else 1
        )
        self._blocks = np.arange(len(sizes), dtype=np.int64)
        if settings.shuffle:
            self._blocks = _permutation(mix((settings.seed, _BLOCKS, settings.epoch)), len(sizes))
        self._ends = np.cumsum(sizes[self._blocks])  # in the shuffled sequence of samples
        firsts = np.cumsum(sizes) - sizes  # the number of the first sample of each block
        self._shifts = firsts[self._blocks] - (self._ends - sizes[self._blocks])
        self._lane_starts = [
            self._full_steps * _edge(self._batch, self.lanes, lane)
            for lane in range(self.lanes + 1)
        ]
        self._lane_starts = [
            start + _edge(self._rest, self.lanes, lane)
            for lane, start in enumerate(self._lane_starts)
        ]
        self._permutations: dict[int, tuple[int, Integers]] = {}

    def batch_size(self, step: int) -> int:
        """Return the number of samples of the global batch of `step`."""
        return self._batch if step < self._full_steps else self._rest

    def window(self, step: int) -> int:
        """Return the number of the window that `step` lies in."""
        return step // self.window_steps

    def part(self, step: int, low: int, high: int) -> Integers:
        """Return the samples [low, high) of the global batch of `step`: int64, shape (high -
        low,).
        """
        size = self.batch_size(step)
        parts = [
            self._lane_part(step, lane, low, high, size) for lane in self._lanes_of(size, low, high)
        ]
        places = np.concatenate(parts) if parts else self._ends[:0]  # in the shuffled sequence
        return places + self._shifts[np.searchsorted(self._ends, places, side="right")]

    def blocks(self, step: int, low: int, high: int) -> Integers:
        """Return the blocks, each once, of which [low, high) of a batch has samples in the window
        of `step`.
        """
        size = self.batch_size(step)
        blocks = []
        for lane in self._lanes_of(size, low, high):
            start, stop = self._window_range(lane, self.window(step))
            if not self._settings.shuffle:
                stop = start + high
                start += low
            first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
            blocks.append(self._blocks[first : last + 1])
        return np.unique(np.concatenate(blocks)) if blocks else self._blocks[:0]

    def cuts(self, step: int, low: int, high: int, parts: int) -> list[tuple[int, int]]:
        """Divide [low, high) of a batch into contiguous `parts`, between lanes if there are enough
        of them.
        """
        size = self.batch_size(step)
        lanes = self._lanes_of(size, low, high)
        if len(lanes) < parts:
            return [
                (low + start, low + stop)
                for start, stop in (bounds(high - low, parts, part) for part in range(parts))
            ]
        inner = [
            _edge(size, self.lanes, lanes[bounds(len(lanes), parts, part)[0]])
            for part in range(1, parts)
        ]
        edges = [low, *inner, high]
        return list(pairwise(edges))

    def _lanes_of(self, size: int, low: int, high: int) -> range:
        """Return the lanes of samples [low, high) of a batch of `size`."""
        if low >= high:
            return range(0)
        # lane of sample i: the last one with edge(lane) <= i
        return range(_lane_at(size, self.lanes, low), _lane_at(size, self.lanes, high - 1) + 1)

    def _lane_part(self, step: int, lane: int, low: int, high: int, size: int) -> Integers:
        """Return the places in the shuffled sequence of the samples in [low, high) that `lane`
        gives to a batch.
        """
        first = _edge(size, self.lanes, lane)
        last = _edge(size, self.lanes, lane + 1)
        start, stop = self._window_range(lane, self.window(step))
        # by earlier steps of the window
        taken = self._taken(lane, step) + self._lane_starts[lane] - start
        begin = taken + max(low, first) - first
        end = taken + min(high, last) - first
        if not self._settings.shuffle:
            return np.arange(start + begin, start + end)
        return start + self._permuted(lane, self.window(step), stop - start)[begin:end]

    def _window_range(self, lane: int, window: int) -> tuple[int, int]:
        """Return the half-open range of places in the shuffled sequence of a window of `lane`."""
        start = self._lane_starts[lane]
        first = window * self.window_steps
        return start + self._taken(lane, first), start + self._taken(
            lane, first + self.window_steps
        )

    def _taken(self, lane: int, step: int) -> int:
        """Return the number of samples that batches before `step` have taken from `lane`."""
        per_batch = _edge(self._batch, self.lanes, lane + 1) - _edge(self._batch, self.lanes, lane)
        if step <= self._full_steps:
            return step * per_batch
        return self._lane_starts[lane + 1] - self._lane_starts[lane]

    def _permuted(self, lane: int, window: int, size: int) -> Integers:
        known = self._permutations.get(lane)
        if known is None or known[0] != window:
            key = mix((self._settings.seed, _WINDOWS, self._settings.epoch, lane, window))
            known = self._permutations[lane] = window, _permutation(key, size)
        return known[1]


def _edge(size: int, lanes: int, lane: int) -> int:
    """Return where `lane` begins in a batch of `size`."""
    return lane * size // lanes


def _lane_at(size: int, lanes: int, place: int) -> int:
    """Return the lane of a sample of a batch of `size`: the last lane that begins at or before
    it.
    """
    return ((place + 1) * lanes - 1) // size


def _permutation(key: int, n: int) -> Integers:
    """Return a permutation of `n` numbers that depends on `key` alone, in any version of NumPy.

    It sorts the numbers by the outputs of SplitMix64 from state `key` (source: see `mix`).
    """
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable").astype(np.int64)
