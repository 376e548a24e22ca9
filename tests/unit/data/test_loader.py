"""The loader of one worker, and of the pretended ranks of several."""

from __future__ import annotations

import gc
import tracemalloc
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lockstep.communicator import Communicator
from lockstep.data import fetching
from lockstep.data.batch_samplers import LengthBatchSampler, TokenBatchSampler
from lockstep.data.loader import Batch, Loader
from lockstep.errors import CheckpointError, ConfigError, DataError, MismatchError
from lockstep.topology import World

CPU = torch.device("cpu")


def rank_of(rank: int, size: int) -> Communicator:
    return Communicator.at(World(rank, size, rank, size), CPU)


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n, dtype=torch.float32)[:, None], torch.arange(n))


def joined(parts: Iterable[torch.Tensor]) -> list[int]:
    return torch.cat(list(parts)).tolist()


def batches(
    n: int, global_batch_size: int, size: int, epoch: int = 0, **options: Any
) -> list[list[Batch]]:
    """By step, the parts of all ranks."""
    ranks = [
        Loader(numbers(n), global_batch_size, comm=rank_of(rank, size), **options).epoch(epoch)
        for rank in range(size)
    ]
    return [list(parts) for parts in zip(*ranks, strict=True)]


@settings(deadline=None)
@given(
    n=st.integers(8, 60),
    global_batch_size=st.integers(8, 70),
    size=st.integers(1, 8),
    epoch=st.integers(0, 3),
)
def test_every_sample_once_and_the_same_order_at_any_size(
    n: int, global_batch_size: int, size: int, epoch: int
) -> None:
    alone = [batch.indices.tolist() for (batch,) in batches(n, global_batch_size, 1, epoch)]
    together = [
        joined(part.indices for part in parts)
        for parts in batches(n, global_batch_size, size, epoch)
    ]
    assert together == alone
    assert sorted(chain.from_iterable(together)) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(8, 60), global_batch_size=st.integers(8, 70), size=st.integers(1, 8))
def test_parts_know_their_share(n: int, global_batch_size: int, size: int) -> None:
    for step, parts in enumerate(batches(n, global_batch_size, size)):
        assert {part.global_size for part in parts} == {sum(part.size for part in parts)}
        assert {part.step for part in parts} == {step}
        for part in parts:
            assert part.data[1].tolist() == part.indices.tolist()
            assert part.data[0].shape == (part.size, 1)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return Loader(numbers(50), 10, seed=seed, comm=rank_of(0, 1)).order(epoch).tolist()

    torch.manual_seed(1)
    first = order(0, 0)
    torch.manual_seed(2)
    assert order(0, 0) == first
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # seeds that differ in their high bits only
    assert order(1 << 40, 0) != first


def test_the_order_is_that_of_earlier_versions() -> None:
    """What a seed stands for may not change: runs are resumed in mid-epoch, and compared with
    earlier ones.
    """
    few = Loader(numbers(12), 5, seed=3, comm=rank_of(0, 1))
    assert few.order(0).tolist() == [9, 8, 3, 6, 7, 4, 5, 1, 10, 11, 2, 0]
    assert few.order(1).tolist() == [4, 2, 1, 11, 5, 6, 9, 10, 7, 0, 8, 3]
    many = Loader(numbers(1000), 10, seed=7, comm=rank_of(0, 1)).order(1)
    assert many.dtype == torch.int64
    assert zlib.crc32(many.numpy().tobytes()) == 2752947737
    dealt = joined(part.indices for step in batches(12, 5, 3, seed=3) for part in step)
    assert dealt == few.order(0).tolist()


class Numbered(Dataset[int]):
    """Many samples that take no memory."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_is_held_in_four_bytes_a_sample_of_this_worker(
    monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """Counted are the bytes of Python's objects, and those of the tensors that are there at the
    first batch.
    """
    n, size = 400_000, 4
    monkeypatch.setattr(
        fetching, "DataLoader", lambda batches, sampler, **_: (batches[each] for each in sampler)
    )
    next(
        Loader(Numbered(16), 16, comm=rank_of(1, size)).epoch(0)
    )  # what is imported at the first use counts not
    loader = Loader(Numbered(n), 16, comm=rank_of(1, size), num_workers=num_workers)
    others = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
    tracemalloc.start()
    try:
        running = loader.epoch(0)
        first = next(running)
        python = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, torch.Tensor) and id(each) not in others
    }
    assert first.size == 4
    assert python < 200_000, "as lists of numbers it takes some 40 bytes a sample"
    assert sum(storages.values()) < 4 * n / size + 10_000
    running.close()
    loader.close()


def test_without_shuffling_the_data_sets_order() -> None:
    assert [b.indices.tolist() for (b,) in batches(5, 2, 1, shuffle=False)] == [[0, 1], [2, 3], [4]]


def test_drop_last() -> None:
    assert [b.size for (b,) in batches(23, 5, 1, drop_last=True)] == [5, 5, 5, 5]
    with pytest.raises(ConfigError, match="drop_last"):
        Loader(numbers(4), 5, drop_last=True, comm=rank_of(0, 1))


def test_position_resumes_with_another_number_of_workers() -> None:
    before = [Loader(numbers(31), 6, comm=rank_of(rank, 3)) for rank in range(3)]
    running = [loader.epoch(1) for loader in before]
    seen = [next(epoch).indices.tolist() for _ in range(2) for epoch in running]
    assert before[0].position == (1, 2)

    after = [Loader(numbers(31), 6, comm=rank_of(rank, 2)) for rank in range(2)]
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    rest = [
        batch.indices.tolist()
        for parts in zip(*(x.epoch(1) for x in after), strict=True)
        for batch in parts
    ]
    assert [*chain.from_iterable(seen + rest)] == Loader(numbers(31), 6, comm=rank_of(0, 1)).order(
        1
    ).tolist()
    assert after[0].position == (2, 0)


def test_an_epoch_that_was_left_begins_anew_and_a_loaded_position_counts_once() -> None:
    loader = Loader(numbers(20), 4, comm=rank_of(0, 1))
    next(loader.epoch(0))
    assert len(list(loader.epoch(0))) == 5
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "step": 2})
    assert [len(list(loader.epoch(3))) for _ in range(2)] == [3, 5]


def test_the_position_is_behind_what_was_handed_out_not_behind_what_was_prefetched() -> None:
    loader = Loader(numbers(40), 4, num_workers=2, prefetch=4, comm=rank_of(0, 1))
    epoch = loader.epoch(0)
    next(epoch)
    assert loader.position == (0, 1)
    epoch.close()  # type: ignore[attr-defined]
    loader.close()


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"shuffle": False}, {"global_batch_size": 5}, {"n": 30}]
)
def test_a_position_of_another_loader_is_refused(change: dict[str, Any]) -> None:
    options = {"n": 31, "global_batch_size": 6, **change}
    saved = Loader(numbers(31), 6, comm=rank_of(0, 1)).state_dict()
    other = Loader(
        numbers(options.pop("n")), options.pop("global_batch_size"), comm=rank_of(0, 1), **options
    )
    with pytest.raises(CheckpointError, match="does not fit"):
        other.load_state_dict(saved)


def test_loader_processes_give_the_same_batches_epoch_after_epoch() -> None:
    state = torch.random.get_rng_state()
    loader = Loader(numbers(23), 5, num_workers=2, comm=rank_of(0, 1))
    inline = Loader(numbers(23), 5, comm=rank_of(0, 1))
    for epoch in range(2):
        for ours, theirs in zip(loader.epoch(epoch), inline.epoch(epoch), strict=True):
            torch.testing.assert_close(ours.data, theirs.data)
    loader.close()
    assert torch.equal(state, torch.random.get_rng_state())


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        raise RuntimeError(f"sample {index} is damaged")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_data_set_comes_out(num_workers: int) -> None:
    loader = Loader(Failing(), 5, num_workers=num_workers, shuffle=False, comm=rank_of(0, 1))
    with pytest.raises(DataError, match="sample 0 of Failing: RuntimeError: sample 0 is damaged"):
        list(loader.epoch(0))
    loader.close()


class Whole:
    """Counts how it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 7

    def collated_batch(self, indices: list[int]) -> torch.Tensor:
        self.asked.append(list(indices))
        return torch.tensor(indices)


def test_a_data_set_that_returns_batches_is_called_once_a_step() -> None:
    dataset = Whole()
    loader = Loader(dataset, 3, shuffle=False, comm=rank_of(0, 1))
    assert (
        [batch.data.tolist() for batch in loader.epoch(0)]
        == [[0, 1, 2], [3, 4, 5], [6]]
        == dataset.asked
    )
    # a collate of one's own needs single samples
    loader = Loader(dataset, 3, comm=rank_of(0, 1), collate_fn=list)
    with pytest.raises(DataError, match=r"sample 4 of Whole: TypeError: .* not subscriptable"):
        list(loader.epoch(0))


class Doubled(TensorDataset):
    """Has a method `batch` that means something else, and samples that are not its tensors'
    rows.
    """

    batch = "size"

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


def test_tensors_are_indexed_at_once_and_nothing_else_is() -> None:
    quick = [part.data for (part,) in batches(7, 3, 1)]
    collated = [part.data for (part,) in batches(7, 3, 1, collate_fn=default_collate)]
    assert [type(data) for data in quick] == [type(data) for data in collated]
    torch.testing.assert_close(quick, collated)
    loader = Loader(Doubled(*numbers(3).tensors), 3, shuffle=False, comm=rank_of(0, 1))
    assert next(loader.epoch(0)).data[1].tolist() == [0, 2, 4]


class Unmeasured(Failing):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"global_batch_size": 0},
            "global_batch_size: expected a whole number of at least 1, got 0",
        ),
        ({"global_batch_size": -3}, "got -3"),
        ({"global_batch_size": 2.5}, "got 2.5"),
        ({"global_batch_size": True}, "got True"),
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch": 0}, "prefetch"),
        (
            {"num_workers": 3, "prefetch": 2},
            "prefetch: expected at least 3, one for each of the loader processes, got 2",
        ),
        ({"seed": -1}, "seed"),
        (
            {"dataset": DataLoader(numbers(3))},
            "dataset: expected an iterable data set, got DataLoader",
        ),
        ({"dataset": Unmeasured()}, "a map-style data set"),
        (
            {"dataset": numbers(0)},
            "dataset: expected at least one sample for each of 1 workers, got 0",
        ),
        (
            {"dataset": numbers(2), "size": 3},
            "dataset: expected at least one sample for each of 3 workers, got 2",
        ),
        ({"global_batch_size": 2, "size": 3}, "one sample for each of 3 workers, got 2"),
    ],
)
def test_bad_arguments(options: dict[str, Any], said: str) -> None:
    arguments = {"dataset": numbers(10), "global_batch_size": 5, **options}
    comm = rank_of(0, arguments.pop("size", 1))
    with pytest.raises(ConfigError) as caught:
        Loader(arguments.pop("dataset"), arguments.pop("global_batch_size"), comm=comm, **arguments)
    assert said in str(caught.value)


def ragged(n: int) -> list[Any]:
    return [(torch.zeros(1 + index % 2), index) for index in range(n)]


def test_samples_that_cannot_be_collated_are_named() -> None:
    with pytest.raises(
        DataError,
        match=r"a batch of samples 0, 1, 2, 3, 4 and 3 more of list: .*collate_fn that pads",
    ):
        next(iter(Loader(ragged(8), 8, shuffle=False, comm=rank_of(0, 1))))


def test_a_collate_function_that_fails_is_named_with_its_line() -> None:
    def failing(samples: list[Any]) -> Any:
        raise KeyError("label")

    expected = (
        r"a batch of samples 0, 1 of list: KeyError: 'label', at test_loader.py:\d+ in failing$"
    )
    with pytest.raises(DataError, match=expected):
        next(iter(Loader(ragged(4), 2, shuffle=False, collate_fn=failing, comm=rank_of(0, 1))))


# --- batch samplers
# -------------------------------------------------------------------------------------------


class Fixed:
    """The same batches in each epoch."""

    def __init__(self, batches: Any, length: int | None = None) -> None:
        self.batches, self.length = batches, len(batches) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_a_batch_sampler_yields_the_global_batches() -> None:
    loader = Loader(
        numbers(10), 4, batch_sampler=Fixed([[3, 1, 7], [0], [2, 2, 9, 8]]), comm=rank_of(0, 1)
    )
    assert len(loader) == 3 and loader.order(0).tolist() == [3, 1, 7, 0, 2, 2, 9, 8]
    found = [(batch.indices.tolist(), batch.global_size, batch.step) for batch in loader]
    assert found == [([3, 1, 7], 3, 0), ([0], 1, 1), ([2, 2, 9, 8], 4, 2)]


def test_samplers_that_draw_have_an_order_for_each_seed_and_epoch() -> None:
    sampler = LengthBatchSampler([index % 5 for index in range(40)], 8)

    def order(seed: int, epoch: int) -> list[int]:
        torch.rand(3)  # the program draws other numbers, and need not notice
        before = torch.get_rng_state()
        found = (
            Loader(numbers(40), 8, seed=seed, batch_sampler=sampler, comm=rank_of(0, 1))
            .order(epoch)
            .tolist()
        )
        assert torch.equal(before, torch.get_rng_state())
        return found  # type: ignore[no-any-return]

    assert order(0, 3) == order(0, 3)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@settings(deadline=None)
@given(n=st.integers(1, 200), global_batch_size=st.integers(1, 20), pool=st.integers(1, 4))
def test_batches_by_length_have_every_sample_once(
    n: int, global_batch_size: int, pool: int
) -> None:
    sampler = LengthBatchSampler([index * index % 7 for index in range(n)], global_batch_size, pool)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(chain.from_iterable(batches)) == list(range(n))
    assert sum(len(batch) < global_batch_size for batch in batches) <= 1


def test_batches_by_length_pad_little() -> None:
    lengths = torch.randint(1, 500, (4000,), generator=torch.Generator().manual_seed(0))
    spread = [
        int(lengths[batch].max() - lengths[batch].min())
        for batch in LengthBatchSampler(lengths.tolist(), 16)
    ]
    assert sum(spread) / len(spread) < 25  # of 500: in any order it would be some 440


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=100), tokens=st.integers(30, 200))
def test_batches_by_tokens_have_every_sample_once(lengths: list[int], tokens: int) -> None:
    sampler = TokenBatchSampler(lengths, tokens)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(chain.from_iterable(batches)) == list(range(len(lengths)))
    assert max(map(len, batches)) == sampler.global_batch_size
    assert all(len(batch) * max(lengths[index] for index in batch) <= tokens for batch in batches)


def test_batches_by_tokens_change_with_the_epoch() -> None:
    sampler = TokenBatchSampler([1 + index % 9 for index in range(300)], 50)
    with Loader(
        numbers(300), sampler.global_batch_size, batch_sampler=sampler, comm=rank_of(0, 1)
    ) as loader:
        orders = [loader.order(epoch).tolist() for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("lengths", "tokens", "message"),
    [
        ([3], 0, "global_batch_tokens: expected a whole number of at least 1, got 0"),
        ([[3]], 9, r"lengths: expected one number for each sample, got shape \[1, 1\]"),
        (
            [3, 10],
            9,
            r"lengths: expected numbers from 1 to 9 \(global_batch_tokens\), got 10 tokens in sample 1",
        ),
        ([3, 0], 9, "got 0 tokens in sample 1"),
    ],
)
def test_bad_lengths(lengths: Any, tokens: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenBatchSampler(lengths, tokens)


def test_a_position_with_a_batch_sampler_is_restored() -> None:
    def make() -> Loader:
        sampler = LengthBatchSampler([index % 5 for index in range(40)], 8)
        return Loader(numbers(40), 8, batch_sampler=sampler, comm=rank_of(0, 1))

    first, second = make(), make()
    batches = iter(first.epoch(1))
    seen = [next(batches).indices.tolist() for _ in range(2)]
    second.load_state_dict(first.state_dict())
    assert [batch.indices.tolist() for batch in second] == [
        batch.indices.tolist() for batch in batches
    ]
    assert len(seen) == 2
    with pytest.raises(
        CheckpointError, match="batch_sampler was 'LengthBatchSampler', here it is None"
    ):
        Loader(numbers(40), 8, comm=rank_of(0, 1)).load_state_dict(first.state_dict())


def test_a_sampler_with_a_generator_of_its_own_is_found_out_on_resuming() -> None:
    class Stateful(Fixed):
        def __iter__(self) -> Iterator[Any]:
            self.batches = self.batches[::-1]
            return iter(self.batches)

    sampler = Stateful([[0, 1], [2, 3], [4, 5]])
    loader = Loader(numbers(6), 2, batch_sampler=sampler, comm=rank_of(0, 1))
    next(iter(loader))
    resumed = Loader(numbers(6), 2, batch_sampler=sampler, comm=rank_of(0, 1))
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(
        MismatchError, match="batches of epoch 0 are others than before the run was resumed"
    ):
        next(iter(resumed))


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        (Fixed([[0], [1, 2, 3]]), {}, "batches of 1 to 2 indices .*, got 3 in batch 1 of epoch 0"),
        (Fixed([[0], []]), {}, "got 0 in batch 1"),
        (Fixed([[0], [6]]), {}, "indices from 0 to 5, got 6 in batch 1"),
        (Fixed([[0], [-1]]), {}, "got -1 in batch 1"),
        (Fixed([[0], [1]], 3), {}, "3 batches, its len\\(\\), got 2"),
        (Fixed([0, 1]), {}, "lists of indices, one for each global batch, got int: 0"),
        (Fixed([[0.5]]), {}, "lists of indices"),
        (Fixed([]), {}, "at least one batch in an epoch, got none"),
        ([[0], [1]], {"drop_last": True}, "got drop_last=True"),
        ([[0], [1]], {"shuffle": False}, "got shuffle=False"),
        (iter([[0]]), {}, "an iterable of lists of indices with len"),
    ],
)
def test_bad_batch_samplers(sampler: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"batch_sampler: .*{message}"):
        next(iter(Loader(numbers(6), 2, batch_sampler=sampler, comm=rank_of(0, 1), **options)))


@pytest.mark.parametrize(
    "lengths", [[index % 7 for index in range(50)], [70_000 + index % 7 for index in range(50)]]
)
def test_batches_as_tensors_are_those_that_are_iterated_over(lengths: list[int]) -> None:
    for sampler in (
        LengthBatchSampler(lengths, 8, pool=2),
        TokenBatchSampler([1 + each for each in lengths], 300_000),
    ):
        torch.manual_seed(0)
        as_tensors = [batch.tolist() for batch in sampler.tensors()]
        torch.manual_seed(0)
        order, batches = torch.randperm(50), []
        pools = order.split(16) if isinstance(sampler, LengthBatchSampler) else [order]
        for pool in pools:
            by_length = pool[torch.tensor(lengths)[pool].argsort(stable=True)]
            batches += by_length.split(
                8 if isinstance(sampler, LengthBatchSampler) else sampler._sizes
            )
        expected = [batches[number].tolist() for number in torch.randperm(len(batches))]
        assert as_tensors == expected
