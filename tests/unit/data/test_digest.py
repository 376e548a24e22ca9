"""Digests of samples: equal for equal values in any process, other for other values; nothing random
is moved on.
"""

from __future__ import annotations

import enum
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.differences import differences
from lockstep.data.digest import digest_of
from lockstep.data.same_data import SameData, places
from lockstep.data.sample_digests import DigestRequest, SampleDigests
from lockstep.data.sample_draws import preserve_own_generators

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


@dataclass
class Row:
    values: torch.Tensor
    name: str


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Opaque:
    """Its repr has an address."""


class Picture:
    """As an image of PIL: its attributes say nothing."""

    def __init__(self, pixels: Any) -> None:
        self._hidden = pixels

    @property
    def __array_interface__(self) -> Any:
        return self._hidden.__array_interface__


def alike(one: Any, other: Any) -> bool:
    return all(each.only_rounded for each in differences(digest_of(one), digest_of(other)))


def is_refused(one: Any, other: Any) -> bool:
    return any(each.is_refused for each in differences(digest_of(one), digest_of(other)))


PAIRS: dict[str, tuple[Callable[[], Any], Any]] = {
    "tensor": (lambda: torch.arange(6.0), torch.arange(6.0) + 1),
    "shape": (lambda: torch.arange(6.0), torch.arange(6.0).view(2, 3)),
    "dtype": (lambda: torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    "integers": (lambda: torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 6])),
    "bfloat16": (lambda: torch.arange(6).bfloat16(), torch.arange(1, 7).bfloat16()),
    "complex": (lambda: torch.arange(6).cfloat(), torch.arange(6).cfloat() * 1j),
    "booleans": (lambda: torch.tensor([True, False]), torch.tensor([True, True])),
    "sparse": (lambda: torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    "empty": (lambda: torch.zeros(0), torch.zeros(1)),
    "one hot": (lambda: torch.eye(2000)[7], torch.eye(2000)[8]),
    "infinite": (
        lambda: torch.tensor([0.0, -torch.inf, 1.0]),
        torch.tensor([0.0, 1.0, -torch.inf]),
    ),
    "array": (lambda: np.arange(5), np.arange(1, 6)),
    "text array": (lambda: np.array(["a", "b"]), np.array(["a", "c"])),
    "object array": (
        lambda: np.array([[1], "x"], dtype=object),
        np.array([[2], "x"], dtype=object),
    ),
    "read-only array": (
        lambda: np.broadcast_to(np.float32(3), (4,)),
        np.broadcast_to(np.float32(4), (4,)),
    ),
    "number": (lambda: 3, 4),
    "float": (lambda: 0.1, 0.2),
    "numpy number": (lambda: np.float32(0.5), np.float32(0.6)),
    "text": (lambda: "yes", "no"),
    "none": (lambda: None, 0),
    "pair": (lambda: (torch.ones(2), 1), (torch.ones(2), 2)),
    "dict": (lambda: {"a": 1, "b": torch.ones(2)}, {"a": 1, "b": torch.zeros(2)}),
    "set": (lambda: {"a", "b"}, {"a", "c"}),
    "list of tokens": (lambda: list(range(500)), [*range(499), 0]),
    "list of floats": (lambda: [0.5] * 500, [0.5] * 499 + [0.75]),
    "list of texts": (lambda: [str(n) for n in range(500)], [str(n) for n in range(499)] + ["x"]),
    "named tuple": (lambda: Point(1, 2), Point(1, 3)),
    "dataclass": (lambda: Row(torch.ones(1), "a"), Row(torch.zeros(1), "a")),
    "attributes": (lambda: Plain(torch.ones(2)), Plain(torch.zeros(2))),
    "slots": (lambda: Slotted(1), Slotted(2)),
    "enumeration": (lambda: (Colour.RED, 1), (Colour.RED, 2)),
    "image": (
        lambda: Picture(np.arange(12, dtype=np.uint8)),
        Picture(np.arange(1, 13, dtype=np.uint8)),
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_equal_values_have_the_same_digest_and_others_have_not(case: str) -> None:
    make, other = PAIRS[case]
    assert digest_of(make()) == digest_of(make())
    assert not alike(make(), other)


SAME: dict[str, tuple[Any, Any]] = {
    "addresses": (Opaque(), Opaque()),
    "addresses in attributes": (Plain(Opaque()), Plain(Opaque())),
    "the order of a dict": ({"a": 1, "b": 2}, OrderedDict(b=2, a=1)),
    "the order of a set": ({"a", "b", "c"}, {"c", "b", "a"}),
    "the folder of a file": ("/data/rank0/7.png", "/data/rank1/7.png"),
    "a path": (Path("/scratch/0/x"), Path("/scratch/1/x")),
    "functions": (lambda: 1, lambda: 1),
    "rounding": (torch.linspace(0, 1, 3000), torch.linspace(0, 1, 3000) * (1 + 3e-7)),
    "rounding of float64": (1 / 3, 1 / 3 * (1 + 1e-15)),
    "another decoder of images": (
        torch.arange(4096).remainder(251).to(torch.uint8),
        torch.arange(4096).remainder(251).add(torch.arange(4096) % 2).to(torch.uint8),
    ),
    "not a number": (torch.tensor([torch.nan, 1.0]), -torch.tensor([torch.nan, -1.0])),
}


@pytest.mark.parametrize("case", SAME)
def test_what_is_no_difference_of_the_data(case: str) -> None:
    assert alike(*SAME[case])


OF_AN_OBJECT = [
    "slots",
    "number",
    "float",
    "text",
    "list of tokens",
    "list of floats",
    "none",
    "enumeration",
    "set",
]


def test_values_in_attributes_of_objects_may_differ_and_arrays_may_not() -> None:
    for case, (make, other) in PAIRS.items():
        assert is_refused(make(), other) == (case != "slots")
        if case in OF_AN_OBJECT:
            assert not is_refused((1, Plain(make())), (1, Plain(other)))
    for case in ("tensor", "integers", "array", "image", "sparse"):
        make, other = PAIRS[case]
        assert is_refused((1, Plain(make())), (1, Plain(other)))
    assert not is_refused(
        Plain({0: torch.ones(2)}), Plain({1: torch.ones(2)})
    )  # what each process has kept


def test_a_path_may_differ_where_arrays_agree() -> None:
    image = torch.ones(9)
    paths = [f"{Path(__file__).parent}/{name}.png" for name in "ab"]
    assert not is_refused((paths[0], image), (paths[1], image))
    assert not is_refused((Path(paths[0]), image), (Path(paths[1]), image))
    assert is_refused((paths[0], image, 1), (paths[1], image, 2))
    assert is_refused(
        (paths[0], torch.tensor(1)), (paths[1], torch.tensor(1))
    )  # a label says nothing of an image
    assert is_refused((paths[0], image), (paths[1], image + 1))
    assert is_refused(("/m/01yrx", image), ("/m/0bt9lr", image))


def test_large_tensors_and_a_default_dtype_make_no_difference() -> None:
    large = torch.zeros(5_000_000)
    assert not alike(large, large + 1)
    torch.set_default_dtype(torch.float64)
    try:
        assert digest_of(torch.ones(5000, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_object_that_leads_to_itself_ends() -> None:
    one: Any = Plain(None)
    one.value = {"self": one, "others": [one] * 5}
    assert digest_of(one)


def test_an_object_that_cannot_be_looked_into_is_no_error() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ValueError(name)

    digest_of((1, Broken()))


def test_places() -> None:
    assert places(5, 32) == (0, 1, 2, 3, 4)
    chosen = places(10**9, 32)
    assert len(set(chosen)) == 32
    assert {0, 10**9 - 1} < set(chosen)
    assert max(chosen) < 10**9
    later = [places(10**9, 6, number) for number in range(1, 4)]
    assert len({index for each in later for index in each}) == 18
    assert places(10**9, 0, 1) == ()


def test_reading_ends_when_the_time_is_up_and_passes_over_exceptions() -> None:
    def read(index: int) -> Any:
        if index == 1:
            raise OSError("no such file")
        return index

    found = DigestRequest(0, (0, 1, 2), (2, 2, 1), 60.0).read_with(read)
    assert {index: len(digests) for index, digests in found.samples.items()} == {0: 2, 1: 0, 2: 1}
    found = DigestRequest(0, (0, 2), (2, 1), -1.0).read_with(read)
    assert isinstance(found, SampleDigests)
    assert {index: len(digests) for index, digests in found.samples.items()} == {0: 1}


class WithGenerators:
    def __init__(self) -> None:
        self.transforms = [
            Plain(torch.Generator().manual_seed(1)),
            {"np": np.random.default_rng(1)},
        ]
        self.old, self.plain = np.random.RandomState(1), random.Random(1)

    def draw(self) -> list[float]:
        first, second = self.transforms
        return [
            float(torch.rand((), generator=first.value)),  # type: ignore[union-attr]
            float(second["np"].random()),  # type: ignore[index]
            float(self.old.rand()),
            self.plain.random(),
        ]


def test_generators_of_a_data_set_are_where_they_were() -> None:
    dataset, untouched = WithGenerators(), WithGenerators()
    with preserve_own_generators(torch.utils.data.Subset(dataset, [0])):  # type: ignore[arg-type]
        dataset.draw()
    assert dataset.draw() == untouched.draw()


class Two:
    """A communicator of two ranks that find the same."""

    rank, size = 0, 2

    def allgather_object(self, value: Any) -> list[Any]:
        return [value, value]


def samples_read(sample_s: float, epochs: int) -> list[int]:
    """Return how many samples are compared at each epoch if reading one takes `sample_s`."""
    asked: list[int] = []

    def read(request: DigestRequest) -> SampleDigests:
        asked[-1] = len(request.indices)
        return SampleDigests(
            {index: [digest_of(index)] for index in request.indices}, 0.0, sample_s
        )

    same: Any = SameData(Two(), "data", read)  # type: ignore[arg-type]
    for epoch in range(epochs):
        asked.append(0)
        same.check({}, 10_000, epoch)
    return asked


def test_later_comparisons_take_a_small_share_of_the_time() -> None:
    assert samples_read(0.0001, 4) == [32, 6, 6, 6]
    slow = samples_read(10.0, 20)  # of epochs of hardly any time
    assert slow[:2] == [32, 6]
    assert sum(slow[2:]) == 0
    assert 3 <= sum(samples_read(0.004, 20)[2:]) <= 6
