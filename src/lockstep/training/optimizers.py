"""LARS and LAMB: optimizers for large batches, whose learning rate adapts to each parameter's
norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import arguments
from ..errors import ConfigError


class _LayerwiseOptimizer(Optimizer):
    """Updates parameters that it adapts its rate to, and the others, apart from each other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; returns what `closure` returns, if it is given.

        Args:
            closure: computes the gradients anew, and returns the loss.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameters, adapts in _split(group):
                self._update(parameters, group, adapts)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any], adapts: bool) -> None:
        """Update parameters of `group`, all of which have gradients."""
        raise NotImplementedError


class LARS(_LayerwiseOptimizer):
    """SGD with momentum and layer-wise adaptive rate scaling.

    For each parameter w with gradient g:

        rate = trust * |w| / (|g| + weight_decay * |w|)          # 1 where |w| or |g| is 0
        v    = momentum * v + lr * rate * (g + weight_decay * w)
        w    = w - v

    Source: You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017, Algorithm
    1.

    Args:
        params: parameters, or parameter groups, whose values for the arguments below have
            precedence.
        lr: the learning rate, a float above 0; the paper's γ.
        momentum: from 0 to below 1.
        weight_decay: 0 or more; the paper's β.
        trust: the trust coefficient, above 0; the paper's η.
        adapt_vectors: whether parameters of fewer than two dimensions, such as biases and those of
            norms, are treated in the same way. By default their rate is 1, without weight decay, as
            is usual.

    Raises:
        ConfigError: for an invalid value.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt_vectors: bool = False,
    ) -> None:
        if not isinstance(lr, Tensor):
            arguments.number("lr", lr, above=0, finite=True)
        arguments.number("momentum", momentum, least=0, below=1)
        arguments.number("weight_decay", weight_decay, least=0, finite=True)
        arguments.number("trust", trust, above=0, finite=True)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, {**defaults, "adapt_vectors": adapt_vectors})

    def _update(self, parameters: list[Tensor], group: dict[str, Any], adapts: bool) -> None:
        gradients = [_gradient(p) for p in parameters]
        decay = group["weight_decay"]
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in parameters]
        if adapts:
            weights = _norms(parameters)
            slopes = _norms(gradients)
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
            sums = torch._foreach_add(slopes, weights, alpha=decay)
            rates = _ratios(torch._foreach_mul(weights, group["trust"]), list(sums), slopes)
            gradients = list(torch._foreach_mul(gradients, rates))
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, torch._foreach_mul(gradients, group["lr"]))
        torch._foreach_sub_(parameters, momenta)


class LAMB(_LayerwiseOptimizer):
    """Adam with decoupled weight decay, whose update of each parameter is scaled to the parameter's
    norm.

    For each parameter w with gradient g, at its step t:

        m = beta1 * m + (1 - beta1) * g;      v = beta2 * v + (1 - beta2) * g²
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * φ(|w|) / |u| * u                    # with a factor of 1 where |w| or |u| is 0

    where φ limits the norm to `limits`. Source: You et al., "Large batch optimization for deep
    learning: training BERT in 76 minutes", 2019, Algorithm 2.

    Args:
        params: parameters, or parameter groups, whose values for the arguments below have
            precedence.
        lr: the learning rate, a float above 0.
        betas: the decay of the averages of gradients and of their squares, each from 0 to below 1.
        eps: above 0.
        weight_decay: 0 or more; the paper's λ.
        limits: the least and the greatest value of φ.
        adapt_vectors: whether parameters of fewer than two dimensions, such as biases and those of
            norms, are treated in the same way. By default their factor is 1, without weight decay,
            as is usual.

    Raises:
        ConfigError: for an invalid value.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        limits: tuple[float, float] = (0.0, float("inf")),
        adapt_vectors: bool = False,
    ) -> None:
        if not isinstance(lr, Tensor):
            arguments.number("lr", lr, above=0, finite=True)
        arguments.number("beta1", betas[0], least=0, below=1)
        arguments.number("beta2", betas[1], least=0, below=1)
        arguments.number("eps", eps, above=0, finite=True)
        arguments.number("weight_decay", weight_decay, least=0, finite=True)
        if not 0 <= limits[0] <= limits[1] or limits[1] == 0:
            raise ConfigError(
                "limits", "the least and the greatest norm, 0 <= least <= greatest", limits
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "limits": limits,
        }
        super().__init__(params, {**defaults, "adapt_vectors": adapt_vectors})

    def _update(self, parameters: list[Tensor], group: dict[str, Any], adapts: bool) -> None:
        states = [self._begun(p) for p in parameters]
        (beta1, beta2) = group["betas"]
        gradients = [_gradient(p) for p in parameters]
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        steps = [int(state["step"]) for state in states]  # on the host, as Adam's
        roots = torch._foreach_sqrt(
            torch._foreach_div(squares, [1 - beta2**step for step in steps])
        )
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(
            torch._foreach_div(means, [1 - beta1**step for step in steps]), roots
        )
        if adapts:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            norms = _norms(list(updates))
            weights = _norms(parameters)
            limited = [weight.clamp(*group["limits"]) for weight in weights]
            updates = torch._foreach_mul(updates, _ratios(limited, norms, weights))
        torch._foreach_sub_(parameters, torch._foreach_mul(updates, group["lr"]))

    def _begun(self, p: Tensor) -> dict[str, Any]:
        """Return a parameter's state, one step further."""
        state: dict[str, Any] = self.state[p]
        if "step" not in state:
            state |= {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        state["step"] += 1
        return state


def _split(group: dict[str, Any]) -> list[tuple[list[Tensor], bool]]:
    """Return the parameters with gradients that are adapted to, and the others; without empty
    lists.
    """
    tensors_by_kind: dict[bool, list[Tensor]] = {True: [], False: []}
    for p in group["params"]:
        if p.grad is not None:
            tensors_by_kind[p.ndim > 1 or group["adapt_vectors"]].append(p)
    return [(parameters, adapts) for adapts, parameters in tensors_by_kind.items() if parameters]


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    if p.grad.is_sparse:
        raise ConfigError("params", "parameters with dense gradients", found="a sparse one")
    return p.grad


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the 2-norms; of a tensor that is sharded over workers, that of the whole."""
    norms = torch._foreach_norm(tensors)
    return [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]


def _ratios(
    above: Iterable[Tensor], below: Iterable[Tensor], other: Iterable[Tensor]
) -> list[Tensor]:
    """Return above / below, and 1 where one of these or the third is 0; the device is not waited
    for.
    """
    return [
        torch.where((a > 0) & (b > 0) & (c > 0), a / b, torch.ones_like(a))
        for a, b, c in zip(above, below, other, strict=True)
    ]
