"""The models have the shapes and sizes that the tutorials give them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigError
from lockstep.models import MODELS, build


def convolution(before: int, after: int, kernel: int) -> int:
    return before * after * kernel * kernel + after


def linear(before: int, after: int) -> int:
    return before * after + after


def residual(before: int, after: int, shortcut: bool) -> int:
    body = convolution(before, after, 3) + convolution(after, after, 3) + 4 * after
    return body + (convolution(before, after, 1) if shortcut else 0)


EXPECTED = {
    "mlp": linear(784, 256) + linear(256, 128) + linear(128, 10),
    # W1 (20,1,3,3), W2 (50,20,5,5), W3 (800,128), W4 (128,10), each with its bias
    "lenet": convolution(1, 20, 3) + convolution(20, 50, 5) + linear(800, 128) + linear(128, 10),
    "convnet": convolution(1, 64, 3)
    + convolution(64, 128, 3)
    + linear(14 * 14 * 128, 1024)
    + linear(1024, 10),
    "resnet18": convolution(1, 64, 3)
    + 2 * 64
    + 2 * residual(64, 64, False)
    + sum(
        residual(a, b, True) + residual(b, b, False) for a, b in ((64, 128), (128, 256), (256, 512))
    )
    + linear(512, 10),
}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


IMAGE_MODELS = [name for name in MODELS.names() if name != "gpt"]  # which test_transformer.py tests


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_sizes(name: str) -> None:
    assert parameters(build(name, 10, (1, 28, 28))) == EXPECTED[name]


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize(("shape", "classes"), [((1, 28, 28), 10), ((3, 32, 32), 7)])
def test_shapes(name: str, shape: tuple[int, ...], classes: int) -> None:
    assert build(name, classes, shape)(torch.zeros(2, *shape)).shape == (2, classes)


def test_lenet_is_the_tutorials_function() -> None:
    torch.manual_seed(0)
    model = lockstep.models.lenet()
    w1, b1, w2, b2, w3, b3, w4, b4 = model.parameters()
    x = torch.randn(3, 1, 28, 28)
    h1 = torch.nn.functional.avg_pool2d(torch.relu(torch.nn.functional.conv2d(x, w1, b1)), 2)
    h2 = torch.nn.functional.avg_pool2d(
        torch.relu(torch.nn.functional.conv2d(h1, w2, b2)), 2
    ).reshape(3, -1)
    expected = torch.relu(h2 @ w3.T + b3) @ w4.T + b4
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("name", ["lenet", "convnet"])
def test_images_that_are_too_small(name: str) -> None:
    with pytest.raises(ConfigError, match=f"for {name}, got 1×1"):
        build(name, 10, (1, 1, 1))


def make_plain() -> nn.Module:
    return nn.Linear(4, 2)


def make_shaped(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(shape[0], classes)


def make_greedy(width: int) -> nn.Module:
    return nn.Linear(width, 2)


def make_nothing() -> None:
    return None


def test_factories_of_the_users() -> None:
    assert parameters(build(f"{__name__}:make_plain", 3, (7,))) == 10
    assert parameters(build(f"{__name__}:make_shaped", 3, (7,))) == 24


@pytest.mark.parametrize(
    ("factory", "said"), [("make_greedy", "width"), ("make_nothing", "NoneType")]
)
def test_factories_that_cannot_be_used(factory: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(f"{__name__}:{factory}", 3, (7,))
