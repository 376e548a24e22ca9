"""Training a PyTorch model on one device, then many, then many machines, with the same script and the same answer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .transports.register import register

if TYPE_CHECKING:
    from . import data, models, replicas
    from .communicator import Communicator, init, wait_all
    from .data.loader import Batch, Loader
    from .data_parallel import DataParallel
    from .errors import DesyncError, LockstepError, RankLostError, StallError
    from .fingerprints import fingerprint
    from .hybrid import export, hybridize
    from .launchers import launch
    from .pipelining import pipeline
    from .randomness import seed_shard
    from .reductions.ordered import OrderedReducer
    from .topology import World
    from .training import callbacks
    from .training.evaluate import evaluate
    from .training.prepare import prepare_model
    from .training.schedules import make_schedule
    from .training.step import TrainStep
    from .training.trainer import Trainer
    from .transports.shm.options import ShmOptions

__all__ = [
    "Batch",
    "Communicator",
    "DataParallel",
    "DesyncError",
    "Loader",
    "LockstepError",
    "OrderedReducer",
    "RankLostError",
    "ShmOptions",
    "StallError",
    "TrainStep",
    "Trainer",
    "World",
    "callbacks",
    "data",
    "evaluate",
    "export",
    "fingerprint",
    "hybridize",
    "init",
    "launch",
    "make_schedule",
    "models",
    "pipeline",
    "prepare_model",
    "replicas",
    "seed_shard",
    "wait_all",
]

# Where each public name lives: "module:attribute", or a module. They are imported when first used, so that
# `import lockstep` costs next to nothing. No module of the package itself may have the name of a function in this
# list: importing it would put the module in the function's place.
_HOMES = {
    "Batch": "data.loader:Batch",
    "Communicator": "communicator:Communicator",
    "DataParallel": "data_parallel:DataParallel",
    "DesyncError": "errors:DesyncError",
    "Loader": "data.loader:Loader",
    "LockstepError": "errors:LockstepError",
    "OrderedReducer": "reductions.ordered:OrderedReducer",
    "RankLostError": "errors:RankLostError",
    "ShmOptions": "transports.shm.options:ShmOptions",
    "StallError": "errors:StallError",
    "TrainStep": "training.step:TrainStep",
    "Trainer": "training.trainer:Trainer",
    "World": "topology:World",
    "callbacks": "training.callbacks",
    "data": "data",
    "evaluate": "training.evaluate:evaluate",
    "export": "hybrid:export",
    "fingerprint": "fingerprints:fingerprint",
    "hybridize": "hybrid:hybridize",
    "init": "communicator:init",
    "launch": "launchers:launch",
    "make_schedule": "training.schedules:make_schedule",
    "models": "models",
    "pipeline": "pipelining:pipeline",
    "prepare_model": "training.prepare:prepare_model",
    "replicas": "replicas",
    "seed_shard": "randomness:seed_shard",
    "wait_all": "communicator:wait_all",
}

register()  # init_process_group("shm") works from here on


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version  # a third of the time that the rest takes

        try:
            return version("lockstep-train")
        except PackageNotFoundError:  # used from a source folder that is not installed
            return "0+unknown"
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, attribute = _HOMES[name].partition(":")
    module = importlib.import_module(f".{home}", __name__)
    globals()[name] = found = getattr(module, attribute) if attribute else module
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
