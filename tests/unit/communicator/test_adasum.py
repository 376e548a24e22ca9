"""The pairwise rule of Adasum, and its use by one worker."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.communicator.adasum import _cuts, adasum_, combine
from lockstep.errors import ConfigError

vectors = st.lists(
    st.floats(-100, 100, width=32, allow_subnormal=False), min_size=3, max_size=3
).map(torch.tensor)


def test_orthogonal_vectors_are_summed() -> None:
    assert combine(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])).tolist() == [3.0, 4.0]


def test_equal_vectors_give_their_mean() -> None:
    assert combine(torch.tensor([3.0, -1.0]), torch.tensor([3.0, -1.0])).tolist() == [3.0, -1.0]


def test_parallel_vectors_give_their_mean() -> None:
    assert combine(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])).tolist() == [2.0, 4.0]


def test_by_hand() -> None:
    a, b = (
        torch.tensor([1.0, 0.0], dtype=torch.float64),
        torch.tensor([1.0, 1.0], dtype=torch.float64),
    )
    # a·b = 1, ‖a‖² = 1, ‖b‖² = 2
    torch.testing.assert_close(combine(a, b), 0.5 * a + 0.75 * b)


@settings(deadline=None)
@given(vectors, vectors, st.sampled_from([0.125, 2.0, 1024.0]))
def test_does_not_depend_on_scale(a: torch.Tensor, b: torch.Tensor, factor: float) -> None:
    torch.testing.assert_close(
        combine(a * factor, b * factor), combine(a, b) * factor, rtol=1e-4, atol=1e-4
    )


@settings(deadline=None)
@given(vectors, vectors)
def test_is_symmetric(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(combine(a, b), combine(b, a))


def test_zeros_change_nothing() -> None:
    a = torch.tensor([1.0, 2.0])
    assert combine(a, torch.zeros(2)).tolist() == combine(torch.zeros(2), a).tolist() == [1.0, 2.0]


def test_coefficient_is_one_where_the_squared_norm_underflows() -> None:
    tiny = torch.tensor([1e-80], dtype=torch.float64)  # its square is 1e-160
    assert combine(tiny, tiny).item() == pytest.approx(2e-80, abs=0)
    small = torch.tensor([1e-76], dtype=torch.float64)
    assert combine(small, small).item() == pytest.approx(1e-76, abs=0)


def test_one_much_smaller_than_the_other() -> None:
    # the factor of b is -5e39, which float32 does not hold
    found = combine(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1e-40]))
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5]))


def test_half_types_do_not_overflow_on_the_way() -> None:
    a = torch.full((100,), 60000.0, dtype=torch.float16)
    assert torch.equal(combine(a, a), a)  # a·a is far beyond float16
    assert combine(a, a).dtype is torch.float16


def test_refuses_whole_numbers_and_other_shapes() -> None:
    with pytest.raises(ConfigError, match="b: expected the shape and dtype"):
        combine(torch.ones(2), torch.ones(3))
    with pytest.raises(ConfigError, match=r"tensors\[0\]: expected a tensor of float16"):
        adasum_([torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ConfigError, match=r"tensors\[1\]: expected torch.float32 on cpu"):
        adasum_([torch.ones(2), torch.ones(2).double()])


def test_alone_nothing_changes() -> None:
    x = torch.tensor([1.0, 2.0])
    adasum_([x])
    adasum_([])
    assert x.tolist() == [1.0, 2.0]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 5))
def test_parts_of_ranks_hold_every_element_once(sizes: list[int], ranks: int) -> None:
    edges = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    each, rest = divmod(sum(sizes), ranks)
    found, start = [0] * len(sizes), 0
    for rank in range(ranks):
        length = each + (rank < rest)
        for number, begin, end in _cuts(edges, start, length):
            assert edges[number] <= start + begin < start + end <= edges[number + 1]
            found[number] += end - begin
        start += length
    assert found == sizes
