"""Symbols: called with one instead of an array, a model returns its program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Symbol", "var"]


@dataclass(frozen=True, repr=False)
class Symbol:
    """The name of an input, or the program of a model that has been called with one.

    Attributes:
        name: the name of the input or of the model.
        program: the `torch.export.ExportedProgram` of the model; None for an input.
    """

    name: str
    program: Any = None

    def __repr__(self) -> str:
        return f"<Symbol {self.name}>"


def var(name: str) -> Symbol:
    """Return a symbol for the input `name`."""
    return Symbol(name)
