"""Whatever a batch is made of, its tensors are found, and the rest stays as it is."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.parallel.nested import (
    collated_size,
    cut_lists,
    map_tensors,
    narrow,
    per_sample,
    split,
)

X = torch.arange(6.0)


class Named(NamedTuple):
    x: torch.Tensor
    label: str


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    label: str = "a"


@dataclass
class Made:
    """Its constructor takes other arguments than it has fields."""

    x: torch.Tensor = field(init=False)
    size: int

    def __post_init__(self) -> None:
        self.x = torch.zeros(self.size)


class ReadOnly(Mapping[str, Any]):
    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Encoding(UserDict[str, Any]):
    """Like what tokenizers return: a mapping with something beside its items."""

    words = 7


@dataclass
class Output(OrderedDict[str, Any]):
    """Like what models of Transformers and Diffusers return: items are fields as well, and there is
    no update().
    """

    x: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        if self.x is not None:
            self["x"] = self.x

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)

    def update(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


def made(size: int) -> Made:
    return Made(size)


def encoding() -> Encoding:
    result = Encoding(x=X)
    result.words = 8
    return result


@pytest.mark.parametrize(
    ("tree", "get"),
    [
        (X, lambda t: t),
        ((X, 1), lambda t: t[0]),
        ([X, "a"], lambda t: t[0]),
        ({"x": X, "y": None}, lambda t: t["x"]),
        (OrderedDict(x=X), lambda t: t["x"]),
        (defaultdict(list, x=X), lambda t: t["x"]),
        (encoding(), lambda t: t["x"]),
        (ReadOnly({"x": X}), lambda t: t["x"]),
        (Output(X), lambda t: t["x"]),
        (Output(X), lambda t: t.x),
        (Named(X, "a"), lambda t: t.x),
        (Frozen(X), lambda t: t.x),
        (made(6), lambda t: t.x),
        ({"deep": [Frozen(X), (Named(X, "a"),)]}, lambda t: t["deep"][1][0].x),
    ],
)
def test_every_tensor_is_replaced_and_types_are_kept(tree: Any, get: Any) -> None:
    before = get(tree)
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert type(mapped) is type(tree)
    assert torch.equal(get(mapped), before + 1)
    assert get(tree) is before  # the batch itself is left alone
    assert [len(get(part)) for part in (narrow(tree, 1, 4), narrow(tree, 0, 0))] == [3, 0]


def test_what_is_no_tensor_stays() -> None:
    assert map_tensors(lambda tensor: None, Named(X, "a")).label == "a"
    assert map_tensors(lambda tensor: None, encoding()).words == 8
    assert map_tensors(lambda tensor: None, defaultdict(list, x=X)).default_factory is list
    assert map_tensors(lambda tensor: None, made(6)).size == 6
    assert map_tensors(lambda tensor: None, Frozen) is Frozen  # the class itself
    for other in ("text", b"bytes", 3, None, torch.Size([2, 3])):
        assert map_tensors(lambda tensor: None, other) == other


def test_parts_are_contiguous_and_the_last_may_be_empty() -> None:
    parts = split(Frozen(X[:2]), 2, 3)
    assert [(part.x.tolist(), size) for part, size in parts] == [([0.0], 1), ([1.0], 1), ([], 0)]


def test_what_is_there_for_all_samples_is_not_cut() -> None:
    scale = torch.tensor(2.0)
    assert narrow({"x": X, "scale": scale}, 0, 0)["scale"] is scale
    assert [part["scale"] for part, _ in split({"x": X, "scale": scale}, 6, 2)] == [scale, scale]


def test_a_tensor_with_its_samples_elsewhere_is_not_cut_in_parts() -> None:
    last = X.view(1, 6)
    with pytest.raises(
        ConfigError,
        match=r"gradient_accumulation_steps: expected 1, or batches .* their 6 samples .* shape \[1, 6\]",
    ):
        split((last, X), 6, 2)
    with pytest.raises(ConfigError, match=r"shape \[1, 6\] at \['x'\]\[1\]"):
        split({"x": (X, last)}, 6, 2)
    assert split((last, X), 6, 1)[0][1] == 6


# --- Lists with an item for each sample
# -------------------------------------------------------------------------------

IMAGES = [torch.zeros(3, size, 8) for size in range(1, 7)]
BOXES = [{"boxes": torch.zeros(count, 4), "name": "a"} for count in (1, 3, 2, 6, 1, 2)]


@pytest.mark.parametrize(
    "items",
    [
        list("abcdef"),
        tuple("abcdef"),
        [1, 2.0, None, 4, 5, True],
        np.arange(6),
        np.zeros((6, 2)),
        IMAGES,
        BOXES,
        [torch.tensor(float(number)) for number in range(6)],
        [(torch.zeros(5), "cat")] * 6,
        [np.zeros(3)] * 6,
    ],
)
def test_a_list_as_long_as_the_batch_is_split_as_its_tensors_are(items: Any) -> None:
    batch = {"x": X, "items": items}
    assert per_sample(items, 6)
    parts = [part["items"] for part, _ in split(batch, 6, 4)]
    assert [len(part) for part in parts] == [2, 2, 1, 1]
    assert all(one is other for one, other in zip(parts[1], items[2:4], strict=True)) or isinstance(
        items, np.ndarray
    )
    assert all(type(part) is type(items) for part in parts)
    assert len(narrow(batch, 0, 0, 6)["items"]) == 0
    assert narrow(batch, 0, 3)["items"] is not items or isinstance(items, np.ndarray)


@pytest.mark.parametrize(
    "value",
    [
        ["cat", "dog", "owl"],
        (),
        ["a"] * 5,
        np.zeros(()),
        np.arange(5),
        "abcdef",
        b"abcdef",
        {"a": 1},
        None,
        6,
    ],
)
def test_a_list_of_another_length_is_left_whole(value: Any) -> None:
    for part, _ in split({"x": X, "value": value}, 6, 3):
        assert part["value"] is value or part["value"] == value


def test_structures_of_as_many_tensors_as_samples_are_no_lists_of_samples() -> None:
    inputs, targets = torch.zeros(2, 5), torch.zeros(2, 1)
    for pair in (
        [inputs, targets],
        (inputs, targets),
        ({"x": inputs}, {"x": targets}),
        ([inputs, inputs], targets),
    ):
        first = split(pair, 2, 2)[0][0]
        assert type(first) is type(pair)
        assert len(first) == 2
    images, names = split((IMAGES[:2], ["a", "b"]), 2, 2)[1][0]
    assert (images, names) == ([IMAGES[1]], ["b"])
    images, targets = split((IMAGES[:2], [BOXES[0], BOXES[1]]), 2, 2)[0][0]
    assert (len(images), targets) == (1, [BOXES[0]])
    assert split([inputs, "meta"], 2, 2)[0][0][1] == "meta"
    assert split([(torch.zeros(5), "cat"), (torch.zeros(5), "dog")], 2, 2)[1][0][0][1] == "dog"


def test_lists_of_which_nothing_tells_what_a_sample_is_are_refused_where_they_are_split() -> None:
    ambiguous = [["a", "b"], ["c", "d"]]
    assert split(ambiguous, 2, 1)[0][0] is ambiguous
    with pytest.raises(
        ConfigError, match=r"batch: expected lists .* 2 samples, got 2 lists of 2 items each"
    ):
        split(ambiguous, 2, 2)


def test_only_lists_without_tensors_are_cut_beside_tensors() -> None:
    batch = X, list("abcdef"), IMAGES, np.arange(6)
    tensors, names, images, numbers = cut_lists(batch, 6, 1, 3)
    assert tensors is X
    assert names == ["b", "c"]
    assert all(one is other for one, other in zip(images, IMAGES, strict=True))
    assert numbers.tolist() == [1, 2]
    assert cut_lists(batch, None, 0, 0) is batch


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (None, 0),
        ((torch.zeros(8, 3), torch.zeros(8, 1)), 8),
        ((torch.zeros(5, 3), torch.zeros(5, 1)), 5),
        ((torch.zeros(5, 3), torch.zeros(5, 1), torch.tensor(0.5)), 5),
        ({"x": torch.zeros(5, 3), "names": list("abcde"), "classes": ["a", "b"]}, 5),
        ({"x": np.zeros((5, 3)), "y": torch.zeros(5)}, 5),
        ((["a", "b"], [1, 2]), 2),
        ((IMAGES[:5], BOXES[:5]), 5),
        (([torch.zeros(5, 2), torch.zeros(5, 2)], torch.zeros(5)), 5),
        (([torch.zeros(8, 2), torch.zeros(8, 2)],), 8),
        ((torch.zeros(0, 3), torch.zeros(0)), 0),
        # not known: as many as there were
        ((torch.zeros(20, 8), torch.zeros(20, 8)), 8),  # sequences in the second dimension
        ((torch.zeros(50, 3), torch.zeros(2, 120)), 8),  # nodes and edges
        ("text", 8),
    ],
)
def test_the_samples_of_a_batch_are_counted(batch: Any, size: int) -> None:
    assert collated_size(batch, 8) == size
