"""Names in place of arrays: what a model computes, rather than what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Symbol", "var"]


@dataclass(frozen=True, repr=False)
class Symbol:
    """A name; or, if a model was called with one, the program that it stands for.

    Attributes:
        name: of the input, or of the model.
        program: torch's `ExportedProgram` of the model; None for an input.
    """

    name: str
    program: Any = None

    def __repr__(self) -> str:
        return f"<Symbol {self.name}>"


def var(name: str) -> Symbol:
    """An input of that name."""
    return Symbol(name)
