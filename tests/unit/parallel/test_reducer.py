"""The reducer with an exchange of another kind: what is sent when, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.parallel.gradient_buckets import Bucket, Gradients
from lockstep.parallel.reducer import Reducer
from lockstep.topology import World


class Doubled:
    """Another worker with the same gradients: notes the sizes of the gradients that are sent, and
    doubles them.
    """

    sent: list[list[int]]

    def __init__(self, bucket: Bucket) -> None:
        self.parameters = bucket.parameters

    def start(self, partial_sums: list[tuple[Any, Gradients]]) -> None:
        ((_, self.gradients),) = partial_sums
        self.sent.append([p.numel() for p in self.parameters])

    def add_up(self) -> None:
        pass

    def wait(self) -> Gradients:
        pairs = zip(self.parameters, self.gradients, strict=True)
        return [
            torch.zeros_like(p) if gradient is None else gradient.mul_(2) for p, gradient in pairs
        ]


@pytest.fixture
def sent() -> list[list[int]]:
    Doubled.sent = []
    return Doubled.sent


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in sizes]


def reducer_of(trained: list[nn.Parameter], *groups: list[nn.Parameter]) -> Reducer:
    alone = lockstep.Communicator.at(World(), torch.device("cpu"))
    reducer = Reducer(alone, 1, one_pass=False, exchange=Doubled)
    reducer.begin(trained, groups or [[p] for p in trained])
    return reducer


def test_gradients_are_sent_when_they_are_complete_and_the_others_at_the_end(
    sent: list[list[int]],
) -> None:
    a, b, _ = trained = parameters(1, 2, 3)
    reducer = reducer_of(trained)
    reducer.open(0, passes=2)
    (a.sum() + b.sum()).backward()
    assert not sent
    assert not reducer.is_sending
    a.sum().backward()
    assert sent == [[1]]
    assert reducer.is_sending
    kept = a.grad
    reducer.close()
    assert sent == [[1], [2], [3]]
    reducer.finish()
    assert not reducer.is_sending
    assert [p.grad.tolist() for p in trained if p.grad is not None] == [
        [4.0],
        [2.0, 2.0],
        [0.0] * 3,
    ]
    assert a.grad is kept


def test_a_bucket_need_not_wait_for_those_before_it_and_goes_whole(sent: list[list[int]]) -> None:
    a, b, c = trained = parameters(1, 2, 3)
    reducer = reducer_of(trained, [a, c], [b])
    for _ in range(2):
        sent.clear()
        reducer.open(0, passes=1)
        b.sum().backward()
        c.sum().backward()
        assert sent == [[2]]
        a.sum().backward()
        assert sent == [[2], [1, 3]]
        reducer.close()
        reducer.finish()
        reducer.begin(trained)


def test_a_gradient_after_the_last_pass(sent: list[list[int]]) -> None:
    (a,) = trained = parameters(1)
    reducer = reducer_of(trained)
    further: list[bool] = []
    reducer.open(0, passes=1, on_further_pass=lambda: further.append(True))
    a.sum().backward()
    assert not further
    a.sum().backward()
    assert further == [True]
    assert sent == [[1]]
    reducer.begin(trained)  # drops the step
    reducer.open(0, passes=1)
    a.sum().backward()
    assert sent == [[1], [1]]
    with pytest.raises(ValueError, match="one backward pass for each shard"):
        a.sum().backward()


def test_other_parameters_and_none_any_more(sent: list[list[int]]) -> None:
    a, b = parameters(1, 2)
    reducer = reducer_of([a])
    reducer.open(0, passes=1)
    reducer.begin([b], [[b]])
    reducer.open(0, passes=1)
    (a.sum() + b.sum()).backward()
    assert sent == [[2]]
    reducer.abandon()
    b.sum().backward()
    assert sent == [[2]]
