"""Random numbers of replicas: different on each replica, and reproducible from one seed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ... import devices
from ...errors import LockstepError
from ..shards import mix

# All threads share the generators of a device, so only one thread at a time may seed them and draw.
_LOCK = threading.RLock()

_ALWAYS = {
    *(
        "bernoulli",
        "bernoulli_",
        "binomial",
        "cauchy_",
        "exponential_",
        "geometric_",
        "gumbel_softmax",
        "log_normal_",
    ),
    *(
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "random_",
    ),
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    *("_sample_dirichlet", "_standard_gamma"),
    *(
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "randperm",
        "uniform_",
    ),
}
# Function → position of its argument `training`.
_IN_TRAINING = {
    **dict.fromkeys(("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout"), 2),
    **dict.fromkeys(
        ("alpha_dropout_", "dropout_", "feature_alpha_dropout_", "feature_dropout_"), 2
    ),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), 2),
    **dict.fromkeys(("rrelu", "rrelu_"), 3),
}
# Functions that apply dropout inside, with the probability among their arguments.
_WITH_PROBABILITY = frozenset(
    ("gru", "lstm", "multi_head_attention_forward", "rnn_relu", "rnn_tanh")
)


class Seed:
    """One seed for all replicas of a forward pass, drawn from the CPU's generator when first
    needed.
    """

    def __init__(self) -> None:
        self._value: int | None = None

    def value(self) -> int:
        """Return the seed, the same for every caller."""
        with _LOCK:
            if self._value is None:
                self._value = int(torch.randint(2**62, ()))
            return self._value


class SeparateDraws(TorchFunctionMode):
    """A mode of the calling thread in which each random function draws from (seed, replica, number
    of the call).

    The states of the generators are restored. Functions called with an explicit generator use that
    one.

    Args:
        seed: the seed that the replicas share.
        replica: the number of the replica that the thread computes.
        device: the device of its tensors.
    """

    def __init__(self, seed: Seed, replica: int, device: torch.device) -> None:
        super().__init__()
        self._seed = seed
        self._replica = replica
        self._calls = 0
        generator = devices.generator_of(device)
        self._generators = [torch.default_generator, *([] if generator is None else [generator])]

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
        with _LOCK:
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


class NoDraws(TorchFunctionMode):
    """A mode for backward passes that refuses random functions: they cannot repeat the draws of the
    forward pass.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` unless it is random.

        Raises:
            LockstepError: if it is random.
        """
        keywords = kwargs or {}
        if is_random(func, args, keywords):
            raise LockstepError(
                f"{func.__name__}: random numbers are drawn again in a backward pass, and would "
                "differ from those of the forward pass. On several replicas, use "
                "torch.utils.checkpoint for parts without dropout only."
            )
        return func(*args, **keywords)


def is_random(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of a function of torch draws from the default generators."""
    name = getattr(func, "__name__", "")
    if name in _ALWAYS:
        return kwargs.get("generator") is None
    if name in _IN_TRAINING:
        position = _IN_TRAINING[name]
        return bool(kwargs.get("training", args[position] if len(args) > position else True))
    if name in _WITH_PROBABILITY:
        fractions = [value for value in (*args, *kwargs.values()) if isinstance(value, float)]
        return kwargs.get("training", True) and any(fraction > 0 for fraction in fractions)
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0)
    return False
