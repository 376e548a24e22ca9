"""The settings of objects: the plain values in their attributes, which a program may change while
it trains.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

_MOST = 64  # entries of a dict or list that is looked into
_MOST_OBJECTS = 4096  # looked into from one root: a bound, for what refers to everything
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))
_OPAQUE = (torch.Tensor, torch.Generator, np.ndarray, type, types.ModuleType)
_OWN = __name__.partition(".")[0]
_INSTALLED = ("site-packages", "dist-packages")  # folders of libraries

NONE = object()
"""In the place of a setting: there is none, or what is there is no setting."""


@dataclass(frozen=True)
class Holder:
    """Something that has settings: the attributes of an object, a dict, a list, or what a function
    reads.

    Attributes:
        path: how messages name it, e.g. ``train.transform``.
        read: returns its entries, as a copy: by name, or a list.
        kind: the class of an object, whose attributes count where the object has none; None for
            others.
        ignored: names of entries that are no settings.
        is_set_in_training: whether training changes its entries itself, such as a learning rate by
            a schedule.
        names: of the entries, where `read` returns a list of them that is to be known by name.
    """

    path: str
    read: Callable[[], Any]
    kind: type | None = None
    ignored: frozenset[str] = frozenset()
    is_set_in_training: bool = False
    names: tuple[str, ...] = ()

    @property
    def entries(self) -> dict[Any, Any] | None:
        """The dict of which `read` returns a copy; None where it does something else."""
        owner = getattr(self.read, "__self__", None)
        return owner if isinstance(owner, dict) else None

    def settings(self, entries: Any) -> dict[Any, Any]:
        """Return the settings among the entries that `read` returned, by name or index."""
        pairs: Iterable[tuple[Any, Any]]
        if isinstance(entries, list):
            pairs = zip(self.names, entries, strict=True) if self.names else enumerate(entries)
        else:
            pairs = entries.items()
        return {key: setting_of(value) for key, value in pairs if key not in self.ignored}

    def name_of(self, key: Any) -> str:
        """Return how messages name an entry."""
        if not self.path:
            return str(key)
        return f"{self.path}[{key!r}]" if self.kind is None else f"{self.path}.{key}"


# what torch itself keeps in a module, and the module's mode
_IN_MODULES = frozenset(vars(nn.Module()))


def holders_of(path: str, root: Any, excluded: tuple[type, ...] = ()) -> list[Holder]:
    """Return all that has settings and that an object refers to, itself included.

    Besides modules these are functions, dicts and lists of up to 64 entries, and what
    `_has_settings` says. Parameters and buffers of modules are no settings, and what a metric with
    a state counts, see `lockstep.training.evaluate.Metric`, is none.

    Args:
        path: the name of `root` in messages.
        root: any object: a module, a data set, a function.
        excluded: classes of objects that are left out as well.
    """
    holders: list[Holder] = []
    in_place: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    queue: list[tuple[str, Any]] = [(path, root)]
    for path, reachable in queue:  # which grows
        value = reachable.__self__ if inspect.ismethod(reachable) else reachable
        if isinstance(value, torch.Tensor):
            in_place[path] = value
        if id(value) in seen or isinstance(value, excluded) or len(seen) > _MOST_OBJECTS:
            continue
        seen.add(id(value))
        if value is not root and not _has_settings(value):
            continue
        for holder in _holders(path, value):
            holders.append(holder)
            entries = holder.read()
            pairs = enumerate(entries) if isinstance(entries, list) else entries.items()
            inner = [
                (key, part)
                for key, part in pairs
                if key not in holder.ignored and not isinstance(part, _PLAIN)
            ]
            queue += [(holder.name_of(key), part) for key, part in inner]
    return [
        *holders,
        Holder("", lambda: {name: setting_of(tensor) for name, tensor in in_place.items()}),
    ]


def _holders(path: str, value: Any) -> Iterator[Holder]:
    if isinstance(value, functools.partial):
        yield Holder(path, functools.partial(list, (value.func, *value.args)))
        yield Holder(path, value.keywords.copy)
    elif inspect.isfunction(value):
        yield Holder(path, functools.partial(_read_by, value), type(value))
    elif isinstance(value, dict) and len(value) <= _MOST:
        yield Holder(path, value.copy)
    elif isinstance(value, (list, tuple)) and len(value) <= _MOST:
        yield Holder(path, functools.partial(list, value))
    elif isinstance(value, nn.Module):
        if value._modules:  # first: by these paths the program knows its layers
            yield Holder(path, value._modules.copy, type(value))
        yield Holder(path, vars(value).copy, type(value), _IN_MODULES)
    elif hasattr(value, "__dict__"):
        yield Holder(path, vars(value).copy, type(value))


def _has_settings(value: Any) -> bool:
    """Return whether an object to which another refers may be one that decides what training
    computes.

    That is data, a function, or an object that can be called or has no methods, such as a transform
    or a namespace of options. Others, such as loggers, progress bars and files, are what a callback
    uses for its output.
    """
    kind = type(value)
    of_library = f"{getattr(value, '__module__', None) or kind.__module__}.".startswith(
        (f"{_OWN}.", "torch._")
    )
    if of_library and not kind.__module__.startswith((f"{_OWN}.data.", f"{_OWN}.models.")):
        return False
    # those of libraries read what libraries keep, such as counters of a compiler
    if inspect.isfunction(value):
        return not any(folder in value.__code__.co_filename for folder in _INSTALLED)
    if isinstance(value, (dict, list, tuple, functools.partial)):
        return True
    is_metric = all(callable(getattr(kind, name, None)) for name in ("reset", "update", "compute"))
    if isinstance(value, _OPAQUE) or is_metric:
        return False
    if callable(value) or hasattr(kind, "__getitem__") or isinstance(value, Dataset):
        return True
    methods = [
        name
        for base in kind.__mro__
        for name, method in vars(base).items()
        if inspect.isfunction(method)
    ]
    return not any(not name.startswith("_") for name in methods)


class Variable(NamedTuple):
    """A variable that a function reads.

    Attributes:
        name: its name.
        read: returns its value.
        assign: assigns another value to it.
    """

    name: str
    read: Callable[[], Any]
    assign: Callable[[Any], None]


def variables_of(function: types.FunctionType) -> Iterator[Variable]:
    """Yield the variables with a value that a function reads: global ones, and those around it."""
    variables = function.__globals__
    for name in function.__code__.co_names:
        if name in variables:
            read = functools.partial(variables.get, name)
            yield Variable(name, read, functools.partial(variables.__setitem__, name))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        read = functools.partial(getattr, cell, "cell_contents")
        try:
            read()
        except ValueError:  # a variable without a value yet
            continue
        yield Variable(name, read, functools.partial(setattr, cell, "cell_contents"))


def _read_by(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of the variables that a function reads, by name."""
    return {variable.name: variable.read() for variable in variables_of(function)}


class Identity(NamedTuple):
    """What tells an object, or its contents, from another one, without a reference to it.

    Attributes:
        shown: how messages show it.
        number: the object's identity, or a checksum.
        version: the version of a tensor, which changes when it is changed in place.
    """

    shown: str
    number: int
    version: int = 0


def setting_of(value: Any) -> Any:
    """Return what two settings are compared by; `NONE` for a value that is none.

    Plain values and short lists of them are compared by value, tensors by identity and version,
    arrays and what can be called, such as a transform, by identity.
    """
    if isinstance(value, (*_PLAIN, Identity)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        return Identity("a tensor", id(value), 0 if value.is_inference() else value._version)
    if isinstance(value, np.ndarray):
        return Identity("an array", id(value))
    if isinstance(value, (list, tuple)):
        return (
            tuple(value)
            if len(value) <= _MOST and all(isinstance(item, _PLAIN) for item in value)
            else NONE
        )
    return (
        Identity(getattr(value, "__name__", type(value).__name__), id(value))
        if callable(value)
        else NONE
    )


def described(before: Any, after: Any) -> str:
    """Return how a setting has changed, as a message shows it."""
    shown = [_shown(setting) for setting in (before, after)]
    return "another value" if shown[0] == shown[1] else " -> ".join(shown)


def _shown(setting: Any) -> str:
    if isinstance(setting, Identity):
        return setting.shown
    text = repr(setting)
    return text if len(text) <= 60 else f"{text[:57]}..."
