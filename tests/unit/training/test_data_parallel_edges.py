"""What a model on several devices does with unusual layers and inputs, and what it says when it
cannot.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence

from lockstep import DataParallel
from lockstep.errors import ConfigError, LockstepError
from lockstep.replicas import ReplicaError, scatter

TWO = ["cpu"] * 2


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model: nn.Module = nn.utils.weight_norm(nn.Linear(6, 4))  # type: ignore[no-untyped-call]
    model(torch.zeros(1, 6))  # leaves a tensor with a graph in the layer
    return model


@pytest.mark.parametrize(
    "make",
    [
        old_weight_norm,
        lambda: parametrizations.weight_norm(nn.Linear(6, 4)),
        lambda: parametrizations.orthogonal(nn.Linear(6, 4)),
    ],
    ids=["old weight norm", "weight norm", "orthogonal"],
)
def test_weights_that_are_computed(make: Callable[[], nn.Module]) -> None:
    found = []
    for wrap in (lambda model: model, lambda model: DataParallel(model, TWO)):
        torch.manual_seed(0)
        model = make()
        outputs = wrap(model)(torch.randn(5, 6))
        outputs.square().sum().backward()
        found.append([outputs.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[0], found[1])


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ValueError("no gradient of this")


class BrokenBackward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = Broken.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return output


def test_a_failure_in_the_backward_pass_names_device_and_shapes() -> None:
    outputs = DataParallel(BrokenBackward(6, 4), TWO)(torch.randn(5, 6))
    with pytest.raises(
        ReplicaError,
        match=r"replica 0 of 2 on cpu, given \[3, 6\] float32: ValueError: no gradient",
    ):
        outputs.sum().backward()


class Counted(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), torch.ones(len(x))


def test_outputs_without_a_graph_stay_without() -> None:
    outputs, counts = DataParallel(Counted(6, 4), TWO)(torch.randn(5, 6))
    assert outputs.requires_grad and not counts.requires_grad


JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"x": pack_sequence([torch.ones(3), torch.ones(2)])},
            r"a packed sequence at \['x'\]. Pack it inside",
        ),
        ([torch.eye(4), torch.eye(4).to_sparse()], r"a tensor of layout torch.sparse_coo at \[1\]"),
        (JAGGED, "a nested tensor at its top"),
    ],
    ids=["packed", "sparse", "nested"],
)
def test_batches_whose_samples_do_not_lie_side_by_side(batch: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"batch: expected tensors that can be cut, got {said}"):
        scatter(batch, TWO)
    with pytest.raises(
        ConfigError, match=said.replace(r"at \[", r"at .*\[").replace("its top", ".*")
    ):
        DataParallel(nn.Identity(), TWO)(batch)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_compiled_script_is_refused() -> None:
    script = torch.jit.script(nn.Linear(6, 4))
    with pytest.raises(
        ConfigError, match=r"module: expected modules in Python, got a RecursiveScript.* at .*layer"
    ):
        DataParallel(Holds(script), TWO)(torch.randn(5, 6))


class Holds(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.feature_dropout(x[:, :, None], 0.5, True),
        lambda x: torch.dropout_(x.clone(), 0.5, True),
        lambda x: torch.rrelu_(-x, 0.1, 0.9, True),
        torch._standard_gamma,
        lambda x: nn.functional.fractional_max_pool2d(
            x.view(-1, 1, 8, 8), 2, 4, return_indices=True
        )[1],
    ],
    ids=["feature dropout", "dropout in place", "rrelu in place", "gamma", "fractional pooling"],
)
def test_random_functions_with_less_usual_names(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    parallel = DataParallel(Draws(), TWO)
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        found.append(parallel(torch.ones(4, 64)))
        before = torch.get_rng_state()
    torch.manual_seed(0)
    torch.randint(2**62, ())  # all that was drawn from the caller's generator
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_is_random_in_a_backward_pass_is_refused_with_its_line() -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(
                lambda y: nn.functional.dropout(super(Again, self).forward(y)),
                x,
                use_reentrant=False,
            )

    with pytest.raises(
        LockstepError,
        match=r"replica 0 of 2 on cpu, given .* dropout: random numbers are drawn again",
    ):
        DataParallel(Again(6, 4), TWO)(torch.randn(5, 6)).sum().backward()
