"""Training a PyTorch model on one device, then many, then many machines, with the same script and the same answer."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import data, models
    from .communicator import Communicator, init
    from .data.loader import Batch, Loader
    from .errors import LockstepError
    from .fingerprints import fingerprint
    from .launch import launch
    from .topology import World
    from .training import callbacks
    from .training.evaluate import evaluate
    from .training.prepare import prepare_model
    from .training.schedules import make_schedule
    from .training.step import TrainStep
    from .training.trainer import Trainer

__all__ = [
    "Batch",
    "Communicator",
    "Loader",
    "LockstepError",
    "TrainStep",
    "Trainer",
    "World",
    "callbacks",
    "data",
    "evaluate",
    "fingerprint",
    "init",
    "launch",
    "make_schedule",
    "models",
    "prepare_model",
]

# Where each public name lives. They are imported when first used: `import lockstep` costs next to nothing.
_HOMES = {
    "Batch": "data.loader",
    "Communicator": "communicator",
    "Loader": "data.loader",
    "LockstepError": "errors",
    "TrainStep": "training.step",
    "Trainer": "training.trainer",
    "World": "topology",
    "callbacks": "training.callbacks",
    "data": "data",
    "evaluate": "training.evaluate",
    "fingerprint": "fingerprints",
    "init": "communicator",
    "launch": "launch",
    "make_schedule": "training.schedules",
    "models": "models",
    "prepare_model": "training.prepare",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return version("lockstep-train")
        except PackageNotFoundError:  # used from a source folder that is not installed
            return "0+unknown"
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES[name]}", __name__)
    # A module must not have the name of the function in it: importing it would put it in the function's place.
    found = module if _HOMES[name].rpartition(".")[2] == name else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
