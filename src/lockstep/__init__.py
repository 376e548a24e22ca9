"""Train a PyTorch model on one device, on several, or on several hosts, with the same script and
the same result.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from .error_lines import show_warnings
from .errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DesyncError,
    DivergedError,
    FaultyWorkerError,
    InterruptedRunError,
    LockstepError,
    MismatchError,
    RankLostError,
    StallError,
    TransportError,
    WorkerError,
)
from .other_names import PACKAGE_NAMES, hint_in
from .transports.backend import register

if TYPE_CHECKING:
    from . import (
        callbacks,
        data,
        elastic,
        invariance,
        models,
    )
    from .communicator import Communicator, init, synchronize
    from .compilation import export
    from .data.loader import Loader
    from .launcher import launch
    from .parallel import replicas
    from .parallel.fingerprints import fingerprint
    from .pipelining import pipeline
    from .proof.blame import blame
    from .proof.diff import diff
    from .proof.ledger import ledger
    from .proof.on_spike import OnSpike
    from .proof.replay import replay
    from .topology import World
    from .training.data_parallel import DataParallel
    from .training.evaluate import evaluate, predict, whole_set
    from .training.optimizers import LAMB, LARS
    from .training.prepare_model import prepare_model
    from .training.prepared.prepare import prepare
    from .training.prepared.whole_batch import whole_batch
    from .training.schedules import make_schedule
    from .training.step.train_step import TrainStep
    from .training.trainer import Trainer

__version__ = "0.2.0"

__all__ = [
    "LAMB",
    "LARS",
    "CheckpointError",
    "Communicator",
    "ConfigError",
    "DataError",
    "DataParallel",
    "DesyncError",
    "DivergedError",
    "FaultyWorkerError",
    "InterruptedRunError",
    "Loader",
    "LockstepError",
    "MismatchError",
    "OnSpike",
    "RankLostError",
    "StallError",
    "TrainStep",
    "Trainer",
    "TransportError",
    "WorkerError",
    "World",
    "blame",
    "callbacks",
    "compat",
    "data",
    "diff",
    "elastic",
    "evaluate",
    "export",
    "fingerprint",
    "init",
    "invariance",
    "launch",
    "ledger",
    "make_schedule",
    "models",
    "pipeline",
    "predict",
    "prepare",
    "prepare_model",
    "ray",
    "replay",
    "replicas",
    "synchronize",
    "whole_batch",
    "whole_set",
]

# Public name → "module:attribute", or a module. They are imported at the first use, so that `import
# lockstep` is fast. No module directly in the package may have the name of a function in this list:
# importing the module would replace it.
_LAZY = {
    "LAMB": "training.optimizers:LAMB",
    "LARS": "training.optimizers:LARS",
    "Communicator": "communicator:Communicator",
    "DataParallel": "training.data_parallel:DataParallel",
    "Loader": "data.loader:Loader",
    "OnSpike": "proof.on_spike:OnSpike",
    "TrainStep": "training.step.train_step:TrainStep",
    "Trainer": "training.trainer:Trainer",
    "World": "topology:World",
    "blame": "proof.blame:blame",
    "callbacks": "callbacks",
    "compat": "compat",
    "data": "data",
    "diff": "proof.diff:diff",
    "elastic": "elastic",
    "evaluate": "training.evaluate:evaluate",
    "export": "compilation:export",
    "fingerprint": "parallel.fingerprints:fingerprint",
    "init": "communicator:init",
    "invariance": "invariance",
    "launch": "launcher:launch",
    "ledger": "proof.ledger:ledger",
    "make_schedule": "training.schedules:make_schedule",
    "models": "models",
    "pipeline": "pipelining:pipeline",
    "predict": "training.evaluate:predict",
    "prepare": "training.prepared.prepare:prepare",
    "prepare_model": "training.prepare_model:prepare_model",
    "ray": "ray",
    "replay": "proof.replay:replay",
    "replicas": "replicas",
    "synchronize": "communicator:synchronize",
    "whole_batch": "training.prepared.whole_batch:whole_batch",
    "whole_set": "training.evaluate:whole_set",
}

# Here, and not in the first of a dozen modules that import it, so that there is one message, which
# says what to do.
if importlib.util.find_spec("fcntl") is None:
    raise ImportError(
        "lockstep: expected Linux (or macOS, where it is not tested), got a Python without the "
        f"module fcntl, for {sys.platform!r}. On Windows, install Python and Lockstep inside WSL "
        "2 and run the program there."
    )

show_warnings()
register()  # the backends for init_process_group: "shm" and the others


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        hint = hint_in(PACKAGE_NAMES, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    module_name, _, attribute = _LAZY[name].partition(":")
    module = importlib.import_module(f".{module_name}", __name__)
    globals()[name] = value = getattr(module, attribute) if attribute else module
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
