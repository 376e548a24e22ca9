"""What a loss or a metric keeps outside of itself: lists, numbers and tensors that its calls
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType
from typing import Any

import torch

__all__ = ["OuterValues"]


class OuterValues:
    """The lists, numbers and tensors that a function reaches by name: global ones, those around it,
    and those of its object.

    A list to which a metric appends has the outputs of this worker's parts only, and those of the
    comparisons as well. The first is said, and the second is undone.

    Args:
        fn: the function, a method, or an object that is called.
    """

    def __init__(self, fn: Any) -> None:
        self._places = dict(_places(fn))
        self._marks: dict[str, Any] = {}
        self.changed: list[str] = []

    def before_call(self) -> None:
        """Remember the values before a call."""
        self._marks = {name: _mark(get()) for name, (get, _) in self._places.items()}

    def after_call(self) -> None:
        """Add the names of the values that the call has changed to `changed`."""
        for name, (get, _) in self._places.items():
            if name not in self.changed and _mark(get()) != self._marks.get(name):
                self.changed.append(name)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore after a `with` block the values that calls change."""
        kept = {name: self._places[name][0]() for name in self.changed}
        copies = {
            name: value.clone() for name, value in kept.items() if isinstance(value, torch.Tensor)
        }
        lengths = {name: len(value) for name, value in kept.items() if isinstance(value, list)}
        try:
            yield
        finally:
            for name, value in kept.items():
                if name in lengths:
                    del value[lengths[name] :]
                if name in copies:
                    with torch.no_grad():
                        value.copy_(copies[name])
                self._places[name][1](value)


_Place = tuple[Callable[[], Any], Callable[[Any], None]]  # how to get the value, and how to set it


def _places(fn: Any) -> Iterator[tuple[str, _Place]]:
    while isinstance(fn, partial):
        fn = fn.func
    if isinstance(fn, torch.nn.Module):
        return  # its state is that of a module
    is_object = callable(fn) and not hasattr(fn, "__code__")
    owner = getattr(fn, "__self__", fn if is_object else None)
    function = type(fn).__call__ if is_object else fn
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    yield from _in_mapping(function.__globals__, code.co_names)
    attributes = getattr(owner, "__dict__", {})
    if isinstance(attributes, dict) and not isinstance(owner, torch.nn.Module):
        yield from _in_mapping(attributes, tuple(attributes))
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if _mark_of_cell(cell) is not None:
            yield (
                name,
                (partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")),
            )


def _in_mapping(values: dict[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, _Place]]:
    for name in names:
        if _mark(values.get(name)) is not None:
            yield name, (partial(values.get, name), partial(values.__setitem__, name))


def _mark_of_cell(cell: CellType) -> Any:
    try:
        return _mark(cell.cell_contents)
    except ValueError:  # it is empty
        return None


def _mark(value: Any) -> Any:
    """Return what tells whether a value has changed; None for values of other types."""
    if isinstance(value, list):
        return id(value), len(value)
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else (id(value), value._version)
    return (value,) if isinstance(value, (int, float)) else None
