"""What the docstrings of public names say: each argument is described, and their examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import lockstep
from lockstep.callbacks import Callback

# Modules all of whose names are public. Those of `compat` have the names of other libraries.
MODULES = (
    "lockstep",
    "lockstep.callbacks",
    "lockstep.data",
    "lockstep.elastic",
    "lockstep.invariance",
    "lockstep.models",
    "lockstep.replicas",
)
WITH_EXAMPLES = (
    "Loader",
    "TrainStep",
    "Trainer",
    "evaluate",
    "fingerprint",
    "init",
    "launch",
    "make_schedule",
    "predict",
    "prepare",
    "whole_set",
)


def public_objects() -> Iterator[tuple[str, Any]]:
    """Functions, classes and their methods by name, except hooks that `Callback` describes.

    Exceptions and protocols are not constructed by users.
    """
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            found = getattr(importlib.import_module(module), name)
            if inspect.isclass(found):
                if not (issubclass(found, Exception) or getattr(found, "_is_protocol", False)):
                    yield name, found
                hooks = vars(Callback) if issubclass(found, Callback) else {}
                for member, value in vars(found).items():
                    method = getattr(value, "__func__", value)
                    is_described = member in hooks and found is not Callback
                    if inspect.isfunction(method) and not (member.startswith("_") or is_described):
                        yield f"{name}.{member}", method
            elif inspect.isfunction(found):
                yield name, found


def not_described(found: Any) -> list[str]:
    """The arguments that a docstring does not describe."""
    text = found.__doc__ or ""
    if text.startswith(("See `", "Start `")):  # another method describes them
        return []
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # an exception without a constructor of its own
        return []
    names = [
        parameter.name
        for parameter in parameters
        if parameter.name not in ("self", "cls") and parameter.annotation != "Never"
    ]
    return [
        name
        for name in names
        if not re.search(rf"^ +(\w+, )*\*{{0,2}}{name}(, \w+)*: ", text, re.M)
    ]


def test_every_argument_of_a_public_function_is_described() -> None:
    missing = {name: not_described(found) for name, found in public_objects()}
    assert {name: arguments for name, arguments in missing.items() if arguments} == {}


def test_an_argument_that_is_not_described_is_found() -> None:
    def half(first: int, second: int) -> None:
        """Do something.

        Args:
            first: the first number.
        """

    assert not_described(half) == ["second"]


@pytest.mark.leaks("the fork server of launch() lives on")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(
        getattr(lockstep, name), name, module=False, globs={}
    )
    runner = doctest.DocTestRunner(verbose=False)
    said: list[str] = []
    assert found.examples
    assert runner.run(found, out=said.append).failed == 0, "".join(said)
