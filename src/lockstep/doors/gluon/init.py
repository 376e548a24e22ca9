"""First values of weights; biases are zero, scales of normalisation one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import init

__all__ = ["Constant", "Initializer", "MSRAPrelu", "Normal", "One", "Uniform", "Xavier", "Zero"]

Initializer = Callable[[torch.Tensor], object]
"""Fills a weight in place."""


class Normal:
    """The normal distribution with standard deviation `sigma`.

    With Gluon's own 0.01 small networks with several layers learn nothing for some epochs; `Xavier` does better.
    """

    def __init__(self, sigma: float = 0.01) -> None:
        self.sigma = sigma

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight`."""
        init.normal_(weight, std=self.sigma)


class Uniform:
    """The uniform distribution from -scale to scale; what `initialize` takes when nothing is said."""

    def __init__(self, scale: float = 0.07) -> None:
        self.scale = scale

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight`."""
        init.uniform_(weight, -self.scale, self.scale)


class Constant:
    """One value everywhere."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight`."""
        init.constant_(weight, self.value)


class Zero(Constant):
    """Zero everywhere."""

    def __init__(self) -> None:
        super().__init__(0.0)


class One(Constant):
    """One everywhere."""

    def __init__(self) -> None:
        super().__init__(1.0)


class Xavier:
    """Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010."""

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight`, of two dimensions or more."""
        init.xavier_uniform_(weight)


class MSRAPrelu:
    """He et al., "Delving deep into rectifiers", 2015."""

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight`, of two dimensions or more."""
        init.kaiming_normal_(weight)
