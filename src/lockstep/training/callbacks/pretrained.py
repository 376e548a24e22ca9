"""A callback that saves a model in the form of its own library, as those of Hugging Face do."""

from __future__ import annotations

from ...errors import OUTPUT_FAILED, ConfigError, LockstepError
from ...system import atomic_files
from .base import Callback, TrainingContext


class Pretrained(Callback):
    """Saves the model with its own ``save_pretrained`` when the run ends, for ``from_pretrained``
    to load.

    Rank 0 writes it into the folder `pretrained` of the run directory, beside the checkpoints, in
    the place of an earlier one. Weights that are sharded are gathered first. Of a model of PEFT
    these are the adapters.

    A `Trainer` without `callbacks=` has it if its model has ``save_pretrained``.

    Raises:
        ConfigError: when `fit` starts, for a model without ``save_pretrained``, or without a run
            directory.
        LockstepError: on every worker, if the files cannot be written.
    """

    every_rank = True
    needs_run_dir = True

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Check that the model can be saved."""
        if not hasattr(trainer.model, "save_pretrained"):
            kind = type(trainer.model).__name__
            raise ConfigError(
                "callbacks",
                "Pretrained() for a model with save_pretrained() only",
                found=f"a {kind}",
            )

    def on_train_end(self, trainer: TrainingContext, error: BaseException | None) -> None:
        """Save the model, unless the run has failed."""
        if error is not None or trainer.run_dir is None:
            return
        trainer.step.strategy.sync_buffers()
        weights = trainer.step.strategy.model_state(trainer.model, trainer.comm.rank == 0)
        folder = trainer.run_dir

        def write() -> None:
            try:
                with atomic_files.folder(folder / "pretrained") as part:
                    trainer.model.save_pretrained(str(part), state_dict=weights)  # type: ignore[operator]
            except OSError as failure:
                reason = failure.strerror or failure
                failed = LockstepError(
                    f"{folder / 'pretrained'}: the model could not be saved: {reason}"
                )
                failed.exit_code = OUTPUT_FAILED
                raise failed from None

        trainer.comm.on_rank0(write)
