"""Lets a program that imports `horovod` get this door."""

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
"""Holds a package `horovod` that calls `install`, for processes whose PYTHONPATH begins with it."""

_NAME = "horovod"
_DOOR = __package__ or ""


def install() -> None:
    """Let `horovod`, and every module below it that is there, be another name of this door's in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    door = importlib.import_module(_DOOR)
    if sys.modules.get(_NAME) is not door:
        for name in [name for name in sys.modules if name.startswith(f"{_NAME}.")]:
            del sys.modules[name]  # of a Horovod that is installed
        sys.modules[_NAME] = door


def enter() -> None:
    """Make this process a worker as Horovod's programs know it: the door, and the variables of `horovodrun`.

    Processes that it starts find the door too.
    """
    install()
    environment.set_horovod_variables(environment.find_world(), socket.gethostname(), str(FOLDER))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the door's modules under Horovod's names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by Python before its own finders, which find nothing under these names."""
        if fullname != _NAME and not fullname.startswith(f"{_NAME}."):
            return None
        name = _DOOR + fullname.removeprefix(_NAME)
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(name))


class _Loader(importlib.abc.Loader):
    """Loads the module `name`, which is then known by two names."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of the door."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already; Python has just given it the new name's specification."""
        module.__spec__ = self._spec
