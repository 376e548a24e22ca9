"""Registries: short names of models, data sets and strategies, which are imported when they are
used.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError, unknown_name

__all__ = ["Registry", "import_object", "import_path_here"]


def import_path_here() -> None:
    """Add the current folder to the import path, so that ``package.module:name`` finds the user's
    modules.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds text
        sys.path.insert(0, os.getcwd())  # noqa: PTH109


def import_object(argument: str, target: str) -> Any:
    """Import ``package.module:attribute``.

    Raises:
        ConfigError: the module or the attribute does not exist; names `argument`.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigError(argument, "package.module:name", target)
    try:
        obj: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                argument,
                "package.module:name of a module that can be imported",
                target,
                f"There is no module {error.name!r} on the import path; run from the folder that "
                "contains it.",
            ) from None
        raise
    for part in attribute.split("."):
        if not hasattr(obj, part):
            known = (
                [name for name in vars(obj) if not name.startswith("_")]
                if hasattr(obj, "__dict__")
                else []
            )
            raise unknown_name(argument, part, known)
        obj = getattr(obj, part)
    return obj


class Registry:
    """Short names of the components of one kind (models, data sets, strategies, …).

    Args:
        argument: the argument or option that takes such a name, for errors.
        targets: name → ``"package.module:attribute"``.
        open_ended: also accept ``package.module:attribute`` as a name, for the user's own
            components.
    """

    def __init__(self, argument: str, targets: Mapping[str, str], open_ended: bool = False) -> None:
        self.argument = argument
        self.targets = dict(targets)
        self.open_ended = open_ended

    def names(self) -> list[str]:
        """Return the short names, in the order in which they were registered."""
        return list(self.targets)

    def check(self, name: str) -> str:
        """Check that `name` is registered or, if allowed, has the form
        ``package.module:attribute``; return it.

        Raises:
            ConfigError: it is neither; suggests similar names.
        """
        if name in self.targets or (self.open_ended and ":" in name):
            return name
        raise unknown_name(
            self.argument, name, self.targets, "package.module:factory" if self.open_ended else ""
        )

    def load(self, name: str) -> Any:
        """Import and return the object registered as `name`."""
        return import_object(self.argument, self.targets.get(self.check(name), name))
