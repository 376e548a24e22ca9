"""LARS and LAMB against the papers' rules, written down number by number."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.training.optimizers import LAMB, LARS


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in model().parameters()]


def norm(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def lars(
    w: list[float], g: list[float], v: list[float], adapts: bool, **of: Any
) -> tuple[list[float], list[float]]:
    decay, rate = of["weight_decay"] if adapts else 0.0, 1.0
    if adapts and norm(w) and norm(g):
        rate = of["trust"] * norm(w) / (norm(g) + decay * norm(w))
    v = [
        of["momentum"] * vi + of["lr"] * rate * (gi + decay * wi)
        for wi, gi, vi in zip(w, g, v, strict=True)
    ]
    return [wi - vi for wi, vi in zip(w, v, strict=True)], v


def lamb(
    w: list[float], g: list[float], kept: Any, adapts: bool, **of: Any
) -> tuple[list[float], Any]:
    (beta1, beta2), decay = of["betas"], of["weight_decay"] if adapts else 0.0
    t, m, s = kept
    t += 1
    m = [beta1 * mi + (1 - beta1) * gi for mi, gi in zip(m, g, strict=True)]
    s = [beta2 * si + (1 - beta2) * gi * gi for si, gi in zip(s, g, strict=True)]
    u = [
        mi / (1 - beta1**t) / (math.sqrt(si / (1 - beta2**t)) + of["eps"]) + decay * wi
        for wi, mi, si in zip(w, m, s, strict=True)
    ]
    factor = (
        min(max(norm(w), of["limits"][0]), of["limits"][1]) / norm(u)
        if adapts and norm(w) and norm(u)
        else 1.0
    )
    return [wi - of["lr"] * factor * ui for wi, ui in zip(w, u, strict=True)], (t, m, s)


LARS_OPTIONS = {"lr": 0.7, "momentum": 0.8, "weight_decay": 0.05, "trust": 0.02}
LAMB_OPTIONS = {
    "lr": 0.05,
    "betas": (0.8, 0.95),
    "eps": 1e-5,
    "weight_decay": 0.1,
    "limits": (0.2, 1.5),
}


@pytest.mark.parametrize("adapt_vectors", [False, True])
@pytest.mark.parametrize(("kind", "options"), [(LARS, LARS_OPTIONS), (LAMB, LAMB_OPTIONS)])
def test_updates_are_those_of_the_paper(
    kind: Any, options: dict[str, Any], adapt_vectors: bool
) -> None:
    trained = model()
    with torch.no_grad():
        trained[2].weight.zero_()
    weights = [p.detach().flatten().tolist() for p in trained.parameters()]
    adapts = [adapt_vectors or p.ndim > 1 for p in trained.parameters()]
    kept: list[Any] = [
        [0.0] * len(w) if kind is LARS else (0, [0.0] * len(w), [0.0] * len(w)) for w in weights
    ]
    optimizer = kind(trained.parameters(), **options, adapt_vectors=adapt_vectors)
    rule: Any = lars if kind is LARS else lamb
    for step in range(4):
        for number, (p, g) in enumerate(zip(trained.parameters(), gradients(step), strict=True)):
            p.grad = torch.zeros_like(p) if step == 1 and number == 2 else g
            weights[number], kept[number] = rule(
                weights[number], p.grad.flatten().tolist(), kept[number], adapts[number], **options
            )
        optimizer.step()
    for p, w in zip(trained.parameters(), weights, strict=True):
        assert p.detach().flatten().tolist() == pytest.approx(w, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize(("kind", "options"), [(LARS, LARS_OPTIONS), (LAMB, LAMB_OPTIONS)])
def test_a_saved_state_goes_on_with_the_same_bits(kind: Any, options: dict[str, Any]) -> None:
    def run(trained: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            for p, g in zip(trained.parameters(), gradients(step), strict=True):
                p.grad = g
            optimizer.step()

    straight, half = model(), model()
    run(straight, kind(straight.parameters(), **options), range(6))
    first = kind(half.parameters(), **options)
    run(half, first, range(3))
    second = kind(half.parameters(), **options)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(half, second, range(3, 6))
    assert all(
        torch.equal(a, b) for a, b in zip(straight.parameters(), half.parameters(), strict=True)
    )


def test_parameters_without_gradient_are_left_alone() -> None:
    trained = model()
    before = copy.deepcopy(trained.state_dict())
    trained[0].weight.grad = torch.ones_like(trained[0].weight)
    LAMB(trained.parameters(), 0.1).step()
    changed = [
        name for name, value in trained.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert changed == ["0.weight"]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (LARS, {"lr": 0.0}, "lr: expected a finite number above 0, got 0.0"),
        (
            LARS,
            {"lr": 0.1, "momentum": 1.0},
            "momentum: expected a number from 0 to below 1, got 1.0",
        ),
        (LARS, {"lr": 0.1, "trust": -1.0}, "trust: "),
        (LAMB, {"betas": (0.9, 1.0)}, "beta2: expected a number from 0 to below 1, got 1.0"),
        (
            LAMB,
            {"weight_decay": -0.1},
            "weight_decay: expected a finite number of at least 0, got -0.1",
        ),
        (LAMB, {"limits": (2.0, 1.0)}, "limits: expected the least and the greatest norm"),
    ],
)
def test_what_is_refused(kind: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(model().parameters(), **options)
