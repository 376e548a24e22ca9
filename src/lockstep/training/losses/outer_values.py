"""What a loss or a metric keeps outside of itself: lists, numbers and tensors that its calls
change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..settings import Variable, variables_of


class OuterValues:
    """The lists, numbers and tensors that a function reaches by name: global ones, those around it,
    and those of its object.

    A list to which a metric appends has the outputs of this worker's parts only: `changed` names
    it, for a message to the user. It would have those of the comparisons by halves as well, which
    `restored` takes back.

    Args:
        fn: the function, a method, or an object that is called.

    Attributes:
        changed: the names of those that calls have changed, as far as seen.
    """

    def __init__(self, fn: Any) -> None:
        reached = [variable for variable in _reached_by(fn) if _mark(variable.read()) is not None]
        self._variables = {variable.name: variable for variable in reached}
        self._marks: dict[str, Any] = {}
        self.changed: list[str] = []

    def before_call(self) -> None:
        """Remember the values before a call."""
        self._marks = {name: _mark(variable.read()) for name, variable in self._variables.items()}

    def after_call(self) -> None:
        """Add the names of the values that the call has changed to `changed`."""
        for name, variable in self._variables.items():
            if name not in self.changed and _mark(variable.read()) != self._marks.get(name):
                self.changed.append(name)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore after a `with` block the values that calls change."""
        values = {name: self._variables[name].read() for name in self.changed}
        copies = {
            name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)
        }
        lengths = {name: len(value) for name, value in values.items() if isinstance(value, list)}
        try:
            yield
        finally:
            for name, value in values.items():
                if name in lengths:
                    del value[lengths[name] :]
                if name in copies:
                    with torch.no_grad():
                        value.copy_(copies[name])
                self._variables[name].assign(value)


def _reached_by(fn: Any) -> Iterator[Variable]:
    """Yield the variables of a function, and the attributes of its object; none of a module."""
    while isinstance(fn, partial):
        fn = fn.func
    if isinstance(fn, torch.nn.Module):
        return
    is_object = callable(fn) and not hasattr(fn, "__code__")
    owner = getattr(fn, "__self__", fn if is_object else None)
    function: Any = type(fn).__call__ if is_object else fn
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        return
    yield from variables_of(function)
    attributes = getattr(owner, "__dict__", {})
    if isinstance(attributes, dict) and not isinstance(owner, torch.nn.Module):
        for name in attributes:
            yield Variable(
                name, partial(attributes.get, name), partial(attributes.__setitem__, name)
            )


def _mark(value: Any) -> Any:
    """Return what tells whether a value has changed; None for values of other types."""
    if isinstance(value, list):
        return id(value), len(value)
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else (id(value), value._version)
    return (value,) if isinstance(value, (int, float)) else None
