"""Lets programs that import `horovod` import this compatibility layer."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import socket
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from lockstep import environment

__all__ = ["FOLDER", "enter", "install"]

FOLDER = Path(__file__).parent / "importable"
"""A folder for the front of PYTHONPATH; it contains a module `horovod`, which calls `install`."""

_HOROVOD = "horovod"
_PACKAGE = __package__ or ""


def install() -> None:
    """Make `horovod` and its modules other names of this package and its modules in this
    process.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    package = importlib.import_module(_PACKAGE)
    if sys.modules.get(_HOROVOD) is not package:
        for name in [name for name in sys.modules if name.startswith(f"{_HOROVOD}.")]:
            del sys.modules[name]  # modules of an installed Horovod
        sys.modules[_HOROVOD] = package


def enter() -> None:
    """Make this process a worker of `horovodrun`: call `install`, and set the variables that
    `horovodrun` sets.

    The processes that it starts inherit both.
    """
    install()
    environment.set_horovod_variables(environment.find_world(), socket.gethostname(), str(FOLDER))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of this package under Horovod's names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Horovod; None for other modules, and for those that this
        package lacks.
        """
        if fullname != _HOROVOD and not fullname.startswith(f"{_HOROVOD}."):
            return None
        name = _PACKAGE + fullname.removeprefix(_HOROVOD)
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(name))


class _Loader(importlib.abc.Loader):
    """Loads the module `name`, which then has two names."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import and return the module."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec, which Python has replaced; the module has been executed by
        `create_module`.
        """
        module.__spec__ = self._spec
