"""Whatever a batch is made of, its tensors are found, and the rest stays as it is."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from lockstep.data.nested import map_tensors, narrow, split
from lockstep.errors import ConfigError

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
    """Like what models of Transformers and Diffusers return: items are fields as well, and there is no update()."""

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
        ConfigError, match=r"gradient_accumulation_steps: expected 1, or batches .* their 6 samples .* shape \[1, 6\]"
    ):
        split((last, X), 6, 2)
    assert split((last, X), 6, 1)[0][1] == 6
