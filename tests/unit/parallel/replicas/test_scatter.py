"""Batches are cut into a part for each device and put together again."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.replicas import Engine, as_devices, gather, replicate, scatter

TWO = ["cpu", "cpu"]


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@dataclass(frozen=True)
class Record:
    name: str
    values: torch.Tensor


def batch(samples: int) -> dict[str, Any]:
    rows = torch.arange(samples * 2).reshape(samples, 2)
    return {
        "pair": Pair(rows, rows[:, 0]),
        "more": [OrderedDict(x=rows + 1), (rows + 2, "text")],
        "record": Record("r", rows + 3),
        "scale": torch.tensor(0.5),
    }


def test_the_first_parts_take_the_rest() -> None:
    first, second = scatter([torch.zeros(17, 2), torch.zeros(15, 3)], TWO)
    assert [list(t.shape) for t in (*first, *second)] == [[9, 2], [8, 3], [8, 2], [7, 3]]


def test_nested_types_are_kept_and_come_back() -> None:
    whole = batch(5)
    parts = scatter(whole, ["cpu"] * 3)
    part = parts[1]
    assert isinstance(part["pair"], Pair)
    assert isinstance(part["more"][0], OrderedDict)
    assert part["more"][1][1] == "text"
    assert part["record"].name == "r"
    assert part["scale"] == 0.5
    assert part["pair"].image.tolist() == [[4, 5], [6, 7]]
    back = gather(parts)
    assert torch.equal(back["pair"].image, whole["pair"].image)
    assert torch.equal(back["more"][1][0], whole["more"][1][0])
    assert torch.equal(back["record"].values, whole["record"].values)
    assert back["scale"].tolist() == [0.5] * 3


def test_parts_on_the_same_device_are_views() -> None:
    whole = torch.zeros(4)
    scatter(whole, TWO)[1].fill_(1)
    assert whole.tolist() == [0, 0, 1, 1]


def test_another_dimension() -> None:
    whole = torch.arange(6).reshape(2, 3)
    parts = scatter(whole, TWO, dim=1)
    assert [part.tolist() for part in parts] == [[[0, 1], [3, 4]], [[2], [5]]]
    assert torch.equal(gather(parts, dim=1), whole)


def test_the_last_parts_of_few_samples_are_empty() -> None:
    assert [list(part.shape) for part in scatter(torch.zeros(1, 2), ["cpu"] * 3)] == [
        [1, 2],
        [0, 2],
        [0, 2],
    ]


def test_gradients_flow_back_through_gather() -> None:
    parts = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    (gather(parts) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert [part.grad.tolist() for part in parts if part.grad is not None] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([], "at least one device"),
        ("cpu", "a list of devices"),
        (["cpu", "nowhere"], "a device"),
        (["cuda:97"], "available devices"),
        ([None], "a device"),
    ],
)
def test_devices_that_cannot_be_used(devices: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        as_devices(devices)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="numbers are accelerators")
def test_numbers_without_an_accelerator() -> None:
    with pytest.raises(ConfigError, match="There is no accelerator"):
        as_devices([0, 1])


def test_every_cpu_is_the_cpu() -> None:
    assert as_devices(["cpu:1", torch.device("cpu")]) == [torch.device("cpu")] * 2


@pytest.mark.parametrize("dim", [None, "0", 0.0, True])
def test_a_dimension_that_is_no_whole_number(dim: Any) -> None:
    data = torch.zeros(4, 2)
    for call in (
        lambda: scatter(data, TWO, dim),
        lambda: gather([data, data], dim=dim),
        lambda: Engine(nn.Linear(2, 1), TWO, dim),
    ):
        with pytest.raises(ConfigError, match="dim: expected a whole number"):
            call()


def test_a_tensor_without_that_dimension() -> None:
    with pytest.raises(ConfigError, match=r"shape \[3\]"):
        scatter(torch.zeros(3), TWO, dim=1)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], r"\['b'\] where part 0 has \['a'\]"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], r"\[1, 2\], \[1, 3\]"),
        ([], "at least one part"),
    ],
)
def test_parts_that_do_not_fit(parts: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gather(parts)


def test_mappings_are_joined_by_key() -> None:
    joined = gather(
        [{"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)}]
    )
    assert joined["b"].tolist() == [1, 1]


def test_copies_are_independent() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    first, second = replicate([weight, torch.ones(1, requires_grad=True)], TWO)
    with torch.no_grad():
        first[0].zero_()
    assert weight.tolist() == [1, 1] == second[0].tolist()
    assert isinstance(first[0], torch.nn.Parameter)
    assert first[1].requires_grad
    assert first[1].is_leaf
    assert first[0].grad is None


def test_a_copy_of_a_module_keeps_tied_weights_and_hooks() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    (copied,) = replicate(model, ["cpu"])
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    copied(torch.zeros(1, 2))
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight is not model[0].weight
    assert seen == [1]


def test_a_module_without_shapes_is_refused() -> None:
    with warnings.catch_warnings():  # some versions of torch say that these are new
        warnings.simplefilter("ignore")
        model = torch.nn.LazyLinear(2)
    with pytest.raises(ConfigError, match="weight without one"):
        replicate(model, TWO)
