"""Random numbers of replicas: other ones on each, and the same ones again from the same seed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import LockstepError
from ..shards import mix

__all__ = ["DrawsApart", "DrawsRefused", "Seed"]

# The generators of a device belong to all threads: who draws first gets the first numbers, so threads take turns.
_TURN = threading.RLock()

_ALWAYS = {
    *("bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "gumbel_softmax", "log_normal_"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "multinomial", "normal", "normal_", "poisson", "random_"),
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    *("_sample_dirichlet", "_standard_gamma"),
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "uniform_"),
}
# Where the argument is that says whether it is training, if not given by its name.
_IN_TRAINING = {
    **dict.fromkeys(("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout"), 2),
    **dict.fromkeys(("alpha_dropout_", "dropout_", "feature_alpha_dropout_", "feature_dropout_"), 2),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), 2),
    **dict.fromkeys(("rrelu", "rrelu_"), 3),
}
# Those that drop out inside, with a share given as a fraction among their arguments.
_WITH_SHARE = frozenset(("gru", "lstm", "multi_head_attention_forward", "rnn_relu", "rnn_tanh"))


class Seed:
    """One number for all replicas of a forward pass, drawn from the CPU's generator if one of them asks for it."""

    def __init__(self) -> None:
        self._value: int | None = None

    def value(self) -> int:
        """The same for every caller, whoever comes first."""
        with _TURN:
            if self._value is None:
                self._value = int(torch.randint(2**62, ()))
            return self._value


class DrawsApart(TorchFunctionMode):
    """While it is active in a thread, each random function draws from (seed, replica, number of the call).

    The generators are left as they were found. Functions that are given a generator use that.

    Args:
        seed: shared by the replicas.
        replica: whose thread it is.
        device: where its tensors are.
    """

    def __init__(self, seed: Seed, replica: int, device: torch.device) -> None:
        super().__init__()
        self._seed, self._replica, self._calls = seed, replica, 0
        self._generators = [torch.default_generator, *_generators_of(device)]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, with generators seeded for this call if it is random."""
        keywords = kwargs or {}
        if not is_random(func, args, keywords):
            return func(*args, **keywords)
        with _TURN:
            key = mix((self._seed.value(), self._replica, self._calls))
            self._calls += 1
            states = [generator.get_state() for generator in self._generators]
            try:
                for generator in self._generators:
                    generator.manual_seed(key >> 1)
                return func(*args, **keywords)
            finally:
                for generator, state in zip(self._generators, states, strict=True):
                    generator.set_state(state)


class DrawsRefused(TorchFunctionMode):
    """Around a backward pass: what was drawn in the forward pass cannot be drawn again."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` unless it is random."""
        keywords = kwargs or {}
        if is_random(func, args, keywords):
            raise LockstepError(
                f"{func.__name__}: drawn anew in a backward pass, where it would not be what it was in the forward "
                "pass. On several replicas torch.utils.checkpoint can be used for parts without dropout only."
            )
        return func(*args, **keywords)


def is_random(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function of torch draws from the default generators."""
    name = getattr(func, "__name__", "")
    if name in _ALWAYS:
        return kwargs.get("generator") is None
    if name in _IN_TRAINING:
        position = _IN_TRAINING[name]
        return bool(kwargs.get("training", args[position] if len(args) > position else True))
    if name in _WITH_SHARE:
        shares = [value for value in (*args, *kwargs.values()) if isinstance(value, float)]
        return kwargs.get("training", True) and any(share > 0 for share in shares)
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0)
    return False


def _generators_of(device: torch.device) -> list[torch.Generator]:
    generators = (
        () if device.type in ("cpu", "meta") else getattr(torch.get_device_module(device), "default_generators", ())
    )
    return [generators[device.index]] if generators else []
