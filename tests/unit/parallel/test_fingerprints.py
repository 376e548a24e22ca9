"""Two fingerprints are the same exactly when the models are bit for bit the same."""

from __future__ import annotations

import copy
import hashlib
import re
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.parallel.fingerprints import (
    checksum,
    checksum_of,
    fingerprint,
    mix_bits,
    plain_names,
)


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Adam's state after one step, filled in by hand so that no arithmetic of torch is in it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.full_like(parameter, number + 0.5),
            "exp_avg_sq": torch.full_like(parameter, number + 0.25),
        }
    return optimizer


class Wrapper(nn.Module):
    """Holds a model under the name that a real wrapper gives it."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.add_module(name, model)


def test_a_fingerprint_is_64_hexadecimal_digits_and_repeatable() -> None:
    model = make_model()
    found = fingerprint(model, make_optimizer(model))
    assert re.fullmatch(r"[0-9a-f]{64}", found)
    other = make_model()
    assert fingerprint(other, make_optimizer(other)) == found
    assert fingerprint(model) != found


def test_a_fingerprint_is_the_same_in_every_version() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, -2.0]])
    stream = (
        b"lockstep fingerprint 1\n"
        b'["dict", 1]\n["str", "weight"]\n["tensor", "torch.float32", [1, 2]]\n'
        + struct.pack("<2f", 1.0, -2.0)
    )
    assert fingerprint(model) == hashlib.sha256(stream).hexdigest()


@pytest.mark.parametrize(
    "name", ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
)
@pytest.mark.parametrize("position", [0, -1])
def test_one_bit_of_any_parameter_or_buffer_changes_it(name: str, position: int) -> None:
    model = make_model()
    before = fingerprint(model)
    model.state_dict()[name].view(-1).view(torch.uint8)[position] ^= 1
    assert fingerprint(model) != before


def test_a_counter_among_the_buffers_changes_it() -> None:
    model = make_model()
    before = fingerprint(model)
    model.state_dict()["1.num_batches_tracked"] += 1
    assert fingerprint(model) != before


def test_zero_and_minus_zero_differ() -> None:
    model = nn.Linear(1, 1)
    model.weight.data.fill_(0.0)
    before = fingerprint(model)
    model.weight.data.fill_(-0.0)
    assert fingerprint(model) != before


def rename(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(model[0], nn.Identity(), model[1])


def reshape(model: nn.Sequential) -> nn.Module:
    model[0].weight.data = model[0].weight.data.reshape(3, 4)
    return model


def retype(model: nn.Sequential) -> nn.Module:
    model[1].num_batches_tracked = model[1].num_batches_tracked.view(torch.float64)
    return model


def swap(model: nn.Sequential) -> nn.Module:
    model[1].weight.data, model[1].bias.data = model[1].bias.data, model[1].weight.data
    return model


@pytest.mark.parametrize("change", [rename, reshape, retype, swap])
def test_names_shapes_dtypes_and_positions_change_it(
    change: Callable[[nn.Sequential], nn.Module],
) -> None:
    assert fingerprint(change(make_model())) != fingerprint(make_model())


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq"])
def test_the_state_of_the_optimizer_changes_it(key: str) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    before = fingerprint(model, optimizer)
    optimizer.state[model[1].bias][key].view(-1)[0] += 1
    assert fingerprint(model, optimizer) != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 2.0),
        (1, 2),
        (1, 1.0),
        (None, 0),
        (False, 0),
        ([1, 2], [12]),
        ("a", "b"),
        ([[1], 2], [[1, 2]]),
    ],
)
def test_plain_values_in_the_state_change_it(one: Any, other: Any) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    optimizer.state[model[0].bias]["extra"] = one
    before = fingerprint(model, optimizer)
    optimizer.state[model[0].bias]["extra"] = other
    assert fingerprint(model, optimizer) != before


def test_the_order_of_making_the_state_does_not_matter() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    before = fingerprint(model, optimizer)
    state = {
        parameter: dict(reversed(entry.items()))
        for parameter, entry in reversed(optimizer.state.items())
    }
    optimizer.state.clear()
    optimizer.state.update(state)
    assert next(iter(optimizer.state)) is model[1].bias
    assert fingerprint(model, optimizer) == before


def test_the_learning_rate_is_not_part_of_it() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    before = fingerprint(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    assert fingerprint(model, optimizer) == before


def test_the_layout_in_memory_does_not_matter() -> None:
    model, other = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2)
    other.load_state_dict(model.state_dict())
    other = other.to(memory_format=torch.channels_last)
    assert not other.weight.is_contiguous()
    assert fingerprint(other) == fingerprint(model)


@pytest.mark.parametrize(
    "names", [["module"], ["_orig_mod"], ["module", "_orig_mod"], ["_orig_mod", "module"]]
)
def test_wrappers_do_not_matter(names: list[str]) -> None:
    model: nn.Module = make_model()
    before = fingerprint(model)
    for name in reversed(names):
        model = Wrapper(name, model)
    assert fingerprint(model) == before


def test_the_real_wrappers_do_not_matter() -> None:
    model = make_model()
    before = fingerprint(model)
    assert fingerprint(nn.DataParallel(model)) == before
    assert fingerprint(torch.compile(model, backend="eager")) == before
    model[0] = torch.compile(model[0], backend="eager")
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.uint16, torch.complex64], ids=str
)
def test_tensors_of_all_types_and_shapes_are_covered(dtype: torch.dtype) -> None:
    model = nn.Module()
    for name, shape in (("scalar", ()), ("none", (0, 2)), ("some", (2, 3))):
        model.register_buffer(name, torch.ones(shape).to(dtype))
    before = fingerprint(model)
    model.some[1, 2] = 0
    after = fingerprint(model)
    assert after != before
    model.scalar.zero_()
    assert fingerprint(model) not in (before, after)


def test_conjugate_views_count_as_what_they_stand_for() -> None:
    model, other = nn.Module(), nn.Module()
    value = torch.complex(torch.ones(2), torch.ones(2))
    model.register_buffer("value", value.conj())
    other.register_buffer("value", value.conj().resolve_conj())
    assert fingerprint(model) == fingerprint(other)


def test_parameters_that_state_dict_leaves_out_are_covered() -> None:
    class Forgetful(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {}

    model = Forgetful(2, 2)
    before = fingerprint(model)
    model.weight.data += 1
    assert fingerprint(model) != before


def test_the_model_stays_as_it_was() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    before = copy.deepcopy(model.state_dict())
    fingerprint(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "value", [torch.ones(2, device="meta"), torch.ones(2).to_sparse()], ids=["meta", "sparse"]
)
def test_a_tensor_without_plain_values_is_named(value: Tensor) -> None:
    model = nn.Sequential(nn.Module())
    model[0].register_buffer("table", value)
    with pytest.raises(ConfigError, match=r"^model\.0\.table: expected a plain dense tensor, got "):
        fingerprint(model)


def test_an_object_in_the_state_is_named() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    optimizer.state[model[0].bias]["extra"] = [{1, 2}]
    with pytest.raises(
        ConfigError, match=r"^optimizer\.1\.extra\.0: expected .*, got an object of type set"
    ):
        fingerprint(model, optimizer)


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        ([], []),
        (["a", "b.c"], ["a", "b.c"]),
        (["module.a", "module.b"], ["a", "b"]),
        (["module.module.a"], ["a"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["a.module.b"], ["a.module.b"]),
        (["module"], ["module"]),
        (["modules.a"], ["modules.a"]),
        (["_orig_mod.a", "_orig_mod.b"], ["a", "b"]),
        (["a._orig_mod.b", "c"], ["a.b", "c"]),
        (["_orig_mod.module.b", "_orig_mod.module.a"], ["b", "a"]),
        (["module._orig_mod.a"], ["a"]),
    ],
    ids=str,
)
def test_plain_names_are_those_of_the_bare_model(names: list[str], plain: list[str]) -> None:
    assert list(plain_names({name: number for number, name in enumerate(names)}).items()) == [
        (name, number) for number, name in enumerate(plain)
    ]


def test_plain_names_that_would_be_the_same_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^state_dict: expected names that differ"):
        plain_names({"_orig_mod.a": 1, "a": 2})


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(4, 6), (7, 5), (1,)])
def test_a_checksum_depends_on_values_signs_and_positions(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(2)
    values = (10 * torch.randn(shape, generator=generator)).to(dtype)
    others = [~values if dtype is torch.bool else -values]
    if values.numel() > 1:
        changed = values.clone()
        changed.view(-1)[-1] = 0
        others += [values.flip(0), values.flip(1), changed, values.reshape(shape[::-1])]
    found = {int(checksum_of([each])) for each in (values, *others)}
    assert len(found) == 1 + len(others) - sum(
        torch.equal(each, values) for each in others if each.shape == values.shape
    )
    assert all(0 <= number < 1 << 62 for number in found)
    assert int(checksum_of([values.t().contiguous().t()]) if values.dim() > 1 else 0) in {*found, 0}
    assert checksum_of([values, others[0]]) != checksum_of([others[0], values])


def test_a_checksum_of_large_tensors_goes_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    whole = checksum(values)
    assert whole == mix_bits(values.view(torch.int64), torch.arange(500)).sum()
    monkeypatch.setattr("lockstep.parallel.fingerprints._CHUNK", 64)
    assert checksum(values) == whole
