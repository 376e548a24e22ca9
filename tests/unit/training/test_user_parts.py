"""A user's model and data that cannot be used are refused in one line, before anything is
started.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.errors import ConfigError, DataError
from lockstep.training.options import TrainOptions
from lockstep.training.training_run import build_model, load_data

MODULE = """
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from lockstep.errors import DataError

def images(n=6): return torch.zeros(n, 1, 4, 4)
def pairs(n=6): return TensorDataset(images(n), torch.arange(n) % 3)
def both(): return pairs(), pairs(3)
def alone(): return pairs()
def as_list(): return [(image, 0) for image in images()]
def without_test(): return pairs(), None

def listed(): return [pairs(), pairs(3)]
def triple(): return pairs(), pairs(), pairs()
def empty(): return pairs(0)
def empty_test(): return pairs(), pairs(0)
def nothing(): return None
def text(): return "data"
def tensors(): return images(), torch.arange(6)
def unlabelled(): return TensorDataset(images())
def objects(): return [("a", object())] * 3
def words(): return [("a", "b")] * 3
def needs_argument(folder): return pairs()
def fails(): raise ValueError()
def fails_with_text(): raise OSError(2, "No such file", "x.npy")
def fails_as_we_do(): raise DataError("x.npy: damaged")
number = 3

class Stream(IterableDataset):
    def __iter__(self): return iter(pairs())
def stream(): return Stream()

class Unread(Dataset):
    def __len__(self): return 3
    def __getitem__(self, index): raise KeyError("image 0")
def unread(): return Unread()

class Named(Dataset):
    classes = 3.5
    def __len__(self): return 3
    def __getitem__(self, index): return torch.zeros(1, 4, 4), 0
def oddly_classed(): return Named()
def floats(): return TensorDataset(images(), torch.zeros(6))

def net(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
def silent(): raise ValueError()
def two_lines(): raise ValueError("one\\ntwo")
class Silent(nn.Module):
    def forward(self, x): raise ValueError()
class Missing(nn.Module):
    def forward(self, x): return self.head(x)
class Assertive(nn.Module):
    def forward(self, x): assert x.shape[1] == 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_parts.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "my_typo.py").write_text("def net(:\n")
    (tmp_path / "my_import.py").write_text("from math import sqroot\n")
    yield
    for name in ("my_parts", "my_typo", "my_import"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("both", (6, 3)), ("alone", (6, None)), ("as_list", (6, None)), ("without_test", (6, None))],
)
def test_good_data(name: str, sizes: tuple[int, int | None]) -> None:
    train, test = load_data(TrainOptions(data=f"my_parts:{name}"))
    assert (len(train), None if test is None else len(test)) == sizes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "listed",
            r"items that are pairs \(input, label\), got one of type TensorDataset in a list",
        ),
        (
            "triple",
            r"a factory that returns \(train, test\), .*got a tuple of 3 from my_parts:triple",
        ),
        ("empty", "at least one sample in each data set, got my_parts:empty, with an empty one"),
        ("empty_test", "at least one sample in each data set, got my_parts:empty_test"),
        (
            "nothing",
            r"a factory that returns \(train, test\), .*got one of type NoneType from my_parts:nothing",
        ),
        ("text", "got one of type str from my_parts:text"),
        ("tensors", r"items that are pairs \(input, label\), got one of type Tensor in a Tensor"),
        ("unlabelled", r"items that are pairs \(input, label\), got one of type tuple"),
        (
            "objects",
            r"data sets with len\(\) and indexing, got TypeError from my_parts:objects: default_collate",
        ),
        ("words", "tensors, arrays or numbers, got a batch of tuple and tuple"),
        (
            "needs_argument",
            "called without arguments, got TypeError from my_parts:needs_argument: .*'folder'",
        ),
        ("fails", "got ValueError from my_parts:fails. --debug shows where."),
        ("fails_with_text", "got FileNotFoundError from my_parts:fails_with_text: .*x.npy"),
        ("number", "got my_parts:number, which is of type int"),
        ("stream", r"each with len\(\) and indexing, got one of type Stream from my_parts:stream"),
        (
            "unread",
            r"data sets with len\(\) and indexing, got KeyError from my_parts:unread: 'image 0'",
        ),
    ],
)
def test_bad_data(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^data: expected .*{said}") as caught:
        load_data(TrainOptions(data=f"my_parts:{name}"))
    assert len(str(caught.value).splitlines()) == 1


def test_an_error_of_our_own_kind_stays_as_it_is() -> None:
    with pytest.raises(DataError, match=r"^x.npy: damaged$"):
        load_data(TrainOptions(data="my_parts:fails_as_we_do"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_typo:net", "SyntaxError from my_typo:net"),
        ("my_import:net", "ImportError from my_import:net: cannot"),
    ],
)
def test_modules_that_cannot_be_imported(name: str, said: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^data: expected a module that can be imported, got {said}"
    ):
        load_data(TrainOptions(data=name))
    with pytest.raises(ConfigError, match=f"^model: expected .*got {said}"):
        model_for(name, "alone")


def model_for(name: str, data: str) -> torch.nn.Module:
    options = TrainOptions(
        model=name if ":" in name else f"my_parts:{name}", data=f"my_parts:{data}"
    )
    return build_model(options, load_data(options)[0])


def test_a_good_model() -> None:
    assert model_for("net", "alone")(torch.zeros(2, 1, 4, 4)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "silent",
            "a factory that returns a torch.nn.Module, got ValueError from my_parts:silent. "
            "--debug shows",
        ),
        ("two_lines", "got ValueError from my_parts:two_lines: one two. --debug"),
        (
            "Silent",
            r"a model for inputs of shape \[2, 1, 4, 4\], got ValueError from my_parts:Silent. --debug",
        ),
        ("Missing", "got AttributeError from my_parts:Missing: .*'head'"),
        ("Assertive", "got AssertionError from my_parts:Assertive. --debug"),
    ],
)
def test_bad_models(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^model: expected .*{said}") as caught:
        model_for(name, "alone")
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("floats", r"expected class labels of dtype torch.int64, .*float32"),
        ("oddly_classed", "expected a data set with known classes and shape, got TypeError"),
    ],
)
def test_data_whose_classes_are_not_known(data: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"data: {message}"):
        model_for("net", data)
