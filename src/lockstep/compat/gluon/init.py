"""Initializers of weights; biases are initialised to zero, scales of normalisation layers to
one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import init

__all__ = ["Constant", "Initializer", "MSRAPrelu", "Normal", "One", "Uniform", "Xavier", "Zero"]

Initializer = Callable[[torch.Tensor], object]
"""A function that fills a weight in place."""


class Normal:
    """The normal distribution with mean 0 and standard deviation `sigma`.

    With Gluon's default of 0.01 small networks of several layers learn nothing for some epochs;
    `Xavier` avoids this.
    """

    def __init__(self, sigma: float = 0.01) -> None:
        self.sigma = sigma

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight`."""
        init.normal_(weight, std=self.sigma)


class Uniform:
    """The uniform distribution from -scale to scale; the default of `initialize`."""

    def __init__(self, scale: float = 0.07) -> None:
        self.scale = scale

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight`."""
        init.uniform_(weight, -self.scale, self.scale)


class Constant:
    """A constant value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight`."""
        init.constant_(weight, self.value)


class Zero(Constant):
    """Zeros."""

    def __init__(self) -> None:
        super().__init__(0.0)


class One(Constant):
    """Ones."""

    def __init__(self) -> None:
        super().__init__(1.0)


class Xavier:
    """Uniform initialisation.

    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    2010.
    """

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight`, which has at least two dimensions."""
        init.xavier_uniform_(weight)


class MSRAPrelu:
    """Normal initialisation.

    He et al., "Delving deep into rectifiers", 2015.
    """

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill `weight`, which has at least two dimensions."""
        init.kaiming_normal_(weight)
