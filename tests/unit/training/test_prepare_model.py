"""Changes to a model keep its parameters, its names and its answers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.communicator import Communicator
from lockstep.errors import ConfigError
from lockstep.parallel.sync_batchnorm import SyncBatchNorm, WorkerExchange, convert
from lockstep.topology import World
from lockstep.training.formats import COMPILE_MODES
from lockstep.training.prepare_model import prepare_model

ALONE = Communicator.at(World(), torch.device("cpu"))
ONE_OF_TWO = Communicator.at(World(0, 2, 0, 2), torch.device("cpu"))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.leaks("the compiler keeps threads, processes and variables of its own")
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    " " in sys.prefix, reason="torch's compiler cannot link from a path with a space"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_model_is_compiled_and_the_same(compiler: None) -> None:
    plain, compiled = (
        nn.Sequential(nn.Linear(8, 4), nn.ReLU()) for _ in range(2)
    )  # the compiler takes its time
    compiled.load_state_dict(plain.state_dict())
    before = list(compiled.parameters())
    prepared = prepare_model(compiled, ALONE, compile_model=True)
    x = torch.randn(5, 8)
    torch.testing.assert_close(prepared(x), plain(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert prepared.state_dict().keys() == plain.state_dict().keys()
    assert all(a is b for a, b in zip(before, prepared.parameters(), strict=True))


def test_the_mode_of_the_compiler_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: asked.append(options) or function
    )
    prepare_model(nn.Linear(2, 2), ALONE, compile_model=True)
    prepare_model(
        nn.Linear(2, 2),
        ALONE,
        compile_model=True,
        compile_mode="reduce-overhead",
        fixed_shapes=True,
    )
    assert asked == [
        {"dynamic": None, "mode": "default"},
        {"dynamic": False, "mode": "reduce-overhead"},
    ]
    with pytest.raises(
        ConfigError, match=r"compile_mode: expected default, reduce-overhead, .*, got 'fast'"
    ):
        prepare_model(nn.Linear(2, 2), ALONE, compile_model=True, compile_mode="fast")
    with pytest.raises(ConfigError, match='compile_mode: expected "default" without compile_model'):
        prepare_model(nn.Linear(2, 2), ALONE, compile_mode="reduce-overhead")


def test_the_modes_are_those_that_torch_knows() -> None:
    assert set(COMPILE_MODES) <= {
        "default",
        *torch._inductor.list_mode_options(),
    }  # newer ones have more


def test_a_copy_of_a_compiled_model_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: function
    )  # what it is given is what matters here
    model = prepare_model(convert(net(), ONE_OF_TWO), ALONE, compile_model=True).eval()
    twin = copy.deepcopy(model)
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(twin(x), model(x))
    before = model(x)
    with torch.no_grad():
        for p in twin[1].parameters():  # type: ignore[index]
            p.zero_()
    # behind a batch norm that gives zeros, the last layer's bias is all that is left
    torch.testing.assert_close(twin(x), twin[4].bias.expand(5, 4))  # type: ignore[index]
    torch.testing.assert_close(model(x), before)


def test_channels_last_converts_weights_and_inputs() -> None:
    seen: list[bool] = []
    model = prepare_model(net(), ALONE, channels_last=True)
    model[0].register_forward_pre_hook(  # type: ignore[index]
        lambda _, inputs: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(model(x), net()(x))
    assert seen == [True]
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]


def test_synchronised_batch_norm_keeps_parameters_and_buffers() -> None:
    model = net()
    before = {
        name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    changed = prepare_model(model, ONE_OF_TWO, sync_batchnorm=True)
    assert isinstance(changed[1], SyncBatchNorm)  # type: ignore[index]
    assert {
        name: id(tensor) for name, tensor in [*changed.named_parameters(), *changed.named_buffers()]
    } == before
    assert changed.state_dict().keys() == net().state_dict().keys()


def test_alone_batch_norm_stays_as_it_is() -> None:
    assert type(prepare_model(net(), ALONE, sync_batchnorm=True)[1]) is nn.BatchNorm2d  # type: ignore[index]


def test_in_evaluation_it_is_ordinary_batch_norm() -> None:
    plain = net().eval()
    plain[1].running_mean.normal_()  # type: ignore[index]
    plain[1].running_var.uniform_(0.5, 2)  # type: ignore[index]
    x = torch.randn(5, 3, 8, 8)
    expected = plain(x)
    torch.testing.assert_close(convert(plain, ONE_OF_TWO)(x), expected)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm3d(4, momentum=None)]
)
def test_alone_its_mathematics_are_those_of_torch(layer: nn.Module) -> None:
    torch.manual_seed(0)
    shape = {"BatchNorm1d": (6, 4), "BatchNorm2d": (6, 4, 3, 3), "BatchNorm3d": (6, 4, 2, 2, 2)}[
        type(layer).__name__
    ]
    ours = convert(type(layer)(4, affine=layer.affine, momentum=layer.momentum), ONE_OF_TWO)  # type: ignore[operator]
    ours.exchange = WorkerExchange(ALONE)  # type: ignore[assignment]
    for _ in range(2):
        x = torch.randn(shape, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        weights = torch.randn(shape)
        expected, got = layer(x), ours(y)
        (expected * weights).sum().backward()
        (got * weights).sum().backward()
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(y.grad, x.grad)
    for (name, a), (_, b) in zip(layer.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)
    for (name, a), (_, b) in zip(layer.named_buffers(), ours.named_buffers(), strict=True):
        torch.testing.assert_close(b, a, msg=name)


def test_synchronised_batch_norm_names_an_input_without_channels() -> None:
    with pytest.raises(ValueError, match=r"at least 2 dimensions, got shape \[3\]"):
        SyncBatchNorm(3).eval()(torch.ones(3))
