"""Names for things that are imported only when asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError, unknown_name

__all__ = ["Registry", "import_object", "import_path_here"]


def import_path_here() -> None:
    """Let ``package.module:name`` find modules of the current folder, as ``python script.py`` would."""
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds text
        sys.path.insert(0, os.getcwd())  # noqa: PTH109


def import_object(argument: str, target: str) -> Any:
    """Import ``package.module:attribute``.

    Raises:
        ConfigError: naming `argument`, when the module or the attribute is not there.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigError(argument, "package.module:name", target)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                argument,
                "package.module:name of a module that can be imported",
                target,
                f"There is no module {error.name!r} on the import path; run from the folder that holds it.",
            ) from None
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise unknown_name(argument, part, known)
        found = getattr(found, part)
    return found


class Registry:
    """A kind of part (models, data sets, strategies, …), each known by a short name.

    Args:
        argument: the argument or option that holds such a name; errors name it.
        targets: name → ``"package.module:attribute"``.
        open_ended: whether ``package.module:attribute`` of the user's own is accepted as well.
    """

    def __init__(self, argument: str, targets: Mapping[str, str], open_ended: bool = False) -> None:
        self.argument, self.targets, self.open_ended = argument, dict(targets), open_ended

    def names(self) -> list[str]:
        """The short names, in the order in which they were given."""
        return list(self.targets)

    def check(self, name: str) -> str:
        """`name` itself, if it is known or has the open form.

        Raises:
            ConfigError: with the near names, when it is neither.
        """
        if name in self.targets or (self.open_ended and ":" in name):
            return name
        raise unknown_name(self.argument, name, self.targets, "package.module:factory" if self.open_ended else "")

    def load(self, name: str) -> Any:
        """The object behind `name`, imported now."""
        return import_object(self.argument, self.targets.get(self.check(name), name))
