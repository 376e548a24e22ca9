"""Gradients of weights that are computed after the passes: the same bits as autograd's, and only
where nothing else looks at them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.data.loader import Batch
from lockstep.parallel import gradient_buckets, weight_gradients
from lockstep.parallel.shards import bounds
from lockstep.parallel.weight_gradients import Product, Sum, Value, WeightGradients, formed
from lockstep.training.step import torch_calls


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take small weights as large ones, of several blocks."""
    monkeypatch.setattr(weight_gradients, "LARGE", 64)
    monkeypatch.setattr(weight_gradients, "_BLOCK", 2048)
    # A test before in this process may have called prepare(), which replaces it for good.
    monkeypatch.setattr(torch.autograd, "backward", torch_calls._backward)
    weight_gradients._blocks_have_same_bits.cache_clear()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Value]:
    """What the gradients were computed from that no pass has computed."""
    found: list[Value] = []

    def note(value: Value, weight: torch.Tensor) -> torch.Tensor:
        found.append(value)
        return formed(value, weight)

    monkeypatch.setattr(gradient_buckets, "formed", note)
    return found


def test_a_sum_by_blocks_has_the_bits_of_the_sum_of_products() -> None:
    weight = torch.empty(100, 24)
    parts = [(torch.randn(rows, 100), torch.randn(rows, 24)) for rows in (1, 2, 3, 5)]
    a, b, c, d = (gradient.t() @ inputs for gradient, inputs in parts)
    p, q, r, s = (Product(*part) for part in parts)
    assert torch.equal(formed(p, weight), a)
    assert torch.equal(formed(Sum(Sum(p, q), Sum(r, s)), weight), (a + b) + (c + d))
    assert torch.equal(formed(Sum(p, Sum(b, Sum(r, s))), weight), a + (b + (c + d)))
    assert formed(a, weight) is a


class Layers(nn.Module):
    """A network with a convolution, and linear layers for inputs of two and three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(1, 2, 3, padding=1)
        self.rows = nn.Linear(8, 30)
        self.first = nn.Linear(2 * 8 * 30, 50)
        self.sometimes = nn.Linear(50, 50)
        self.last = nn.Linear(50, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = torch.tanh(self.rows(torch.tanh(self.before(x)))).flatten(1)
        hidden = nn.functional.dropout(torch.tanh(self.first(features)), 0.3, self.training)
        if float(x[0, 0, 0, 0]) > 0:  # in some shards of a pair and not in others
            hidden = torch.tanh(self.sometimes(hidden))
        output: torch.Tensor = self.last(hidden)
        return output


def trained(samples: int, precision: str) -> str:
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = lockstep.TrainStep(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        virtual_workers=7,
        precision=precision,
        max_grad_norm=0.5,
    )
    images = torch.randn(samples, 1, 8, 8)
    labels = torch.randint(3, (samples,))
    cuts = [bounds(samples, 7, shard) for shard in range(7)]
    parts = [[images[slice(*cut)], labels[slice(*cut)]] for cut in cuts]
    for _ in range(3):
        step(Batch(parts, torch.arange(samples), samples, samples, 0, 0, 7))
    return lockstep.fingerprint(model, optimizer)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("samples", [20, 5])
def test_a_training_has_the_bits_that_autograd_gives_it(
    samples: int, precision: str, computed: list[Value], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = trained(samples, precision)
    assert bool(computed) == (precision == "fp32")
    monkeypatch.setattr(weight_gradients, "LARGE", 1 << 60)
    assert trained(samples, precision) == later


def test_a_shape_whose_blocks_have_other_bits_is_left_to_autograd(
    computed: list[Value], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(20, "fp32")
    assert computed
    computed.clear()
    form = weight_gradients._form_block
    monkeypatch.setattr(
        weight_gradients, "_form_block", lambda *args: (form(*args), args[2].mul_(1 + 1e-7))
    )
    weight_gradients._blocks_have_same_bits.cache_clear()
    assert trained(20, "fp32") == expected
    assert not computed


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def plain(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = layer(x).sum()
    return total


def penalised(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    output = torch.tanh(layer(leaf)).sum()
    (slope,) = torch.autograd.grad(output, leaf, create_graph=True)
    return output + slope.square().sum()


def recomputed(layer: nn.Linear, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    output: Any = checkpoint(lambda y: torch.tanh(layer(y)), leaf, use_reentrant=reentrant)
    total: torch.Tensor = output.sum()
    return total


def packed(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(), torch.from_numpy):
        return torch.tanh(layer(x)).sum()


OTHERS: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "used twice": lambda layer, x: layer(torch.tanh(layer(x))).sum(),
    "used elsewhere": lambda layer, x: layer(x).sum() + layer.weight.square().sum(),
    "used elsewhere, transposed": lambda layer, x: layer(x).sum() + (x @ layer.weight.t()).sum(),
    "a gradient of a gradient": penalised,
    "a function of its own": lambda layer, x: Doubled.apply(layer(x)).sum(),  # type: ignore[no-untyped-call]
    "a checkpoint": lambda layer, x: recomputed(layer, x, reentrant=False),
    "a reentrant checkpoint": lambda layer, x: recomputed(layer, x, reentrant=True),
    "packed tensors": packed,
    "a scaled product": lambda layer, x: (
        torch.addmm(layer.bias, x, layer.weight.t(), alpha=2).sum()
    ),
    "many rows": lambda layer, x: layer(x.repeat(weight_gradients.MOST_ROWS, 1)).sum(),
    "not used": lambda layer, x: layer.bias.sum(),
}


def backward(layer: nn.Linear, loss: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """Whether the gradient of the weight was left out, and the gradient."""
    products: list[Product] = []
    leaves = WeightGradients().leaves_of(
        loss, list(layer.parameters()), lambda _, product: products.append(product)
    )
    torch.autograd.backward(loss, inputs=leaves or None)
    if products:
        assert layer.weight.grad is None
        (product,) = products
        return True, formed(product, layer.weight)
    return False, layer.weight.grad


def square() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(20, 20)


def assert_left_to_autograd(
    layer: nn.Linear, compute: Callable[[nn.Linear, torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(3, 20)
    compute(layer, x).backward()  # type: ignore[no-untyped-call]
    expected = layer.weight.grad
    layer.zero_grad()
    is_left_out, gradient = backward(layer, compute(layer, x))
    assert not is_left_out
    assert (gradient is None) == (expected is None)
    if gradient is not None and expected is not None:
        assert torch.equal(gradient, expected)


def test_what_is_left_out() -> None:
    layer = square()
    x = torch.randn(3, 20)
    is_left_out, gradient = backward(layer, plain(layer, x))
    assert is_left_out
    assert layer.bias.grad is not None
    layer.zero_grad()
    plain(layer, x).backward()  # type: ignore[no-untyped-call]
    assert gradient is not None
    assert layer.weight.grad is not None
    assert torch.equal(gradient, layer.weight.grad)


@pytest.mark.parametrize("name", OTHERS)
def test_the_gradient_of_other_uses_is_left_to_autograd(name: str) -> None:
    assert_left_to_autograd(square(), OTHERS[name])


def test_layers_of_other_kinds_are_left_to_autograd() -> None:
    seen: list[torch.Tensor] = []
    hooked = square()
    hooked.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    assert_left_to_autograd(hooked, plain)
    assert len(seen) == 2
    frozen_bias = square()
    frozen_bias.bias.requires_grad_(False)
    assert_left_to_autograd(frozen_bias, plain)
    assert_left_to_autograd(square().double(), lambda layer, x: plain(layer, x.double()))
    without_bias = nn.Linear(20, 20, bias=False)
    assert_left_to_autograd(without_bias, plain)


def test_inputs_may_be_overwritten_after_the_pass() -> None:
    layer = square()
    x = torch.randn(3, 20)
    plain(layer, x).backward()  # type: ignore[no-untyped-call]
    expected = layer.weight.grad
    layer.zero_grad()
    products: list[Product] = []
    loss = plain(layer, x)
    leaves = WeightGradients().leaves_of(
        loss, list(layer.parameters()), lambda _, product: products.append(product)
    )
    torch.autograd.backward(loss, inputs=leaves)
    x.zero_()
    assert expected is not None
    assert torch.equal(formed(products[0], layer.weight), expected)


def test_a_pass_leaves_no_graph_behind() -> None:
    class Mark:
        pass

    layer = square()
    gc.disable()
    try:
        for completes in (True, False):
            gradients = WeightGradients()
            loss = plain(layer, torch.randn(3, 20))
            mark = Mark()
            node: Any = loss.grad_fn
            while node.name() != "AddmmBackward0":
                node = node.next_functions[0][0]
            node.metadata["mark"] = mark
            del node
            alive = weakref.ref(mark)
            leaves = gradients.leaves_of(
                loss, list(layer.parameters()), lambda weight, product: None
            )
            if completes:
                torch.autograd.backward(loss, inputs=leaves)
            else:
                gradients.forget()
            del loss, mark
            assert alive() is None
    finally:
        gc.enable()


def test_a_reducer_is_freed_with_its_last_reference() -> None:
    layer = square()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    step = lockstep.TrainStep(layer, optimizer, nn.CrossEntropyLoss(), virtual_workers=4)
    parts = [[torch.randn(2, 20), torch.randint(20, (2,))] for _ in range(4)]
    step(Batch(parts, torch.arange(8), 8, 8, 0, 0, 4))
    strategy: Any = step.strategy
    reducer = weakref.ref(strategy._prepared[0])
    gc.disable()
    try:
        strategy.regroup(layer)  # as in an elastic job, where each group has one of its own
        assert reducer() is None
    finally:
        gc.enable()
