"""What a run leaves in its folder beside checkpoints and what its callbacks write."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from .. import atomic
from ..checkpoint import save_weights
from ..errors import ConfigError, LockstepError
from .callbacks import Callback
from .options import TrainOptions
from .trainer import Trainer

__all__ = ["RunFolder"]


class RunFolder(Callback):
    """Writes every option as it was resolved, and at last the results; rank 0 does the writing.

    Args:
        options: with `out`, the folder.
    """

    def __init__(self, options: TrainOptions) -> None:
        self._options, self._out = options, Path(str(options.out))
        self._epochs_before: int | None = None  # done when this process began

    def on_start(self, trainer: Trainer) -> None:
        """Write `config.yaml`: not before a checkpoint that is gone on from has been accepted."""
        import yaml

        self._epochs_before = len(trainer.history)
        resolved = {"workers": str(trainer.comm.size), "device": trainer.comm.device.type}
        text = yaml.safe_dump({**self._options.as_dict(), **resolved}, sort_keys=False)
        try:
            atomic.write_text(self._out / _CONFIG, _HEAD + text)
        except OSError as error:
            raise ConfigError("out", "a folder that can be written", found=f"{self._out} ({error.strerror})") from None

    @contextmanager
    def removed_for_nothing(self, trainer: Trainer) -> Iterator[None]:
        """Remove the folders that were made for a run which fails and leaves nothing but its configuration in them."""
        try:
            yield
        except BaseException:
            if trainer.comm.rank == 0 and not self._holds_something():
                if self._out in trainer.made_folders:
                    shutil.rmtree(self._out, ignore_errors=True)
                for parent in reversed(trainer.made_folders):
                    with suppress(OSError):  # another run may have come to live in it
                        parent.rmdir()
            raise

    def _holds_something(self) -> bool:
        """Whether something is in the folder that nobody can make again from its configuration."""
        try:
            return any(path != self._out / _CONFIG and not path.is_dir() for path in self._out.rglob("*"))
        except OSError:
            return True

    def write_results(self, trainer: Trainer) -> dict[str, Any]:
        """Write the trained weights and `result.json`; returns what the latter holds. Called by every worker.

        Raises:
            LockstepError: on every worker, when they cannot be written.
        """
        result = _results(trainer, self._epochs_before or 0)
        weights = trainer.step.strategy.model_state(trainer.model, trainer.comm.rank == 0)
        out = self._out

        def write() -> None:
            try:
                save_weights(weights, out / "model.safetensors")
                atomic.write_json(out / "result.json", result)
            except OSError as error:
                raise LockstepError(f"{out}: the results could not be written: {error.strerror or error}") from None

        trainer.comm.on_rank0(write)
        return result


_CONFIG = "config.yaml"
_HEAD = """\
# Every option of this run, as it was resolved. To make the run again, in a new folder:
# lockstep train --config THIS_FILE
"""


def _results(trainer: Trainer, epochs_before: int) -> dict[str, Any]:
    strategy = trainer.step.strategy
    named = trainer.comm.allgather_object([_device_name(device) for device in strategy.devices])
    strategy.sync_buffers()
    history = trainer.history
    last = history[-1]
    # How fast earlier epochs were is another matter: they may have had other workers.
    here = history[epochs_before:] or history
    return {
        "test_accuracy": last.get("test_accuracy"),
        "test_loss": last.get("test_loss"),
        "train_loss": last["train_loss"],
        "epochs": len(history),
        "seconds_per_epoch": statistics.median(row["seconds"] for row in here),
        "samples_per_second": statistics.median(row["samples_per_second"] for row in here),
        "workers": trainer.comm.size,
        "devices": [name for names in named for name in names],
        "global_batch": trainer.global_batch,
        "torch": str(torch.__version__),
        "fingerprint": strategy.fingerprint(trainer.model, trainer.optimizer),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
