"""A callback that averages the weights of the training: an exponential moving average, or the mean
of SWA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from ... import arguments
from ...checkpoint.folder import save_weights
from ...checkpoint.names import match_names
from ...errors import ConfigError
from .base import Callback, TrainingContext


class AveragedWeights(Callback):
    """Averages the model's weights over the steps; the training itself does not change.

    The average is the same on every worker and part of each checkpoint. At the end of the run rank
    0 writes it into the run directory, as `averaged.safetensors`. It is computed by
    `torch.optim.swa_utils.AveragedModel`; statistics, such as those of batch norm, are averaged
    like weights; integers, and buffers in formats of 8 bits, are those of the newest model.

    Args:
        decay: that of an exponential moving average, from 0 to below 1: average = decay * average +
            (1 - decay) * weights (Polyak, Juditsky 1992; as used since Tarvainen, Valpola, "Mean
            teachers", 2017). When None, the average is the mean of all models (SWA: Izmailov et
            al., "Averaging weights leads to wider optima", 2018).
        start: the step with whose weights the average begins, from 1.
        every: number of steps between two models that are averaged.
        validate: a data set on which to evaluate the average after each validation of the run. The
            results are in the columns `val_averaged_…` of the history; before `start` they are
            those of the weights.
        results: the names of the results that are added, of the loss and of the trainer's metrics.

    Raises:
        ConfigError: for an invalid argument; when `fit` starts, with strategy="sharded", where no
            worker has whole weights.
    """

    every_rank = True

    def __init__(
        self,
        decay: float | None = 0.999,
        start: int = 1,
        every: int = 1,
        validate: Any = None,
        results: Sequence[str] = ("loss",),
    ) -> None:
        if decay is not None:
            expected = "a number from 0 to below 1, or None for the mean"
            arguments.number("decay", decay, least=0, below=1, expected=expected)
        self._start = arguments.whole("start", start, least=1)
        self._every = arguments.whole("every", every, least=1)
        expected = 'a list of names of results, such as ("loss", "accuracy")'
        self._results = tuple(arguments.texts("results", results, expected))
        self._average = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._data = validate
        self.adds_columns = (
            () if validate is None else tuple(f"val_averaged_{name}" for name in self._results)
        )
        self._averaged: AveragedModel | None = None
        self._loaded: dict[str, Any] = {}

    @property
    def model(self) -> nn.Module:
        """The model with the averaged weights.

        Raises:
            ConfigError: before `fit`.
        """
        if self._averaged is None:
            raise ConfigError(
                "model", "AveragedWeights of a trainer whose fit() has begun", found="none"
            )
        averaged: nn.Module = self._averaged.module
        return averaged

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Begin with the model's weights, or with what a checkpoint has."""
        if trainer.step.strategy.sharded_state:
            expected = 'AveragedWeights() with another strategy than "sharded"'
            raise ConfigError(
                "callbacks", expected, found="that one, in which no worker has whole weights"
            )
        tiny = [name for name, p in trainer.model.named_parameters() if _is_tiny(p)]
        if tiny:
            expected = "AveragedWeights() of parameters of 16 bits or more"
            raise ConfigError(
                "callbacks", expected, found=f"{tiny[0]}, whose format cannot hold an average"
            )
        if self._averaged is None:
            self._averaged = AveragedModel(
                trainer.model, multi_avg_fn=self._fold_in, use_buffers=True
            )
            self._averaged.requires_grad_(False)
        self._load()

    def _fold_in(self, averaged: Any, current: Any, count: Tensor | int) -> None:
        first = averaged[0]  # all have one dtype and device
        if first.is_complex() or (first.is_floating_point() and not _is_tiny(first)):
            self._average(averaged, current, count)
        else:
            torch._foreach_copy_(averaged, current)

    def on_train_step_end(self, trainer: TrainingContext, result: Any) -> None:
        """Fold the weights in, if it is time."""
        done = trainer.step.steps_done - self._start
        if self._averaged is not None and done >= 0 and done % self._every == 0:
            self._averaged.update_parameters(trainer.model)

    def on_validation_end(self, trainer: TrainingContext, results: dict[str, float]) -> None:
        """Add the results of the average."""
        if self._data is None or self._averaged is None:
            return
        has_begun = trainer.step.steps_done >= self._start
        measured = trainer.evaluate(self._data, self.model if has_begun else None)
        for name in self._results:
            arguments.choice(
                "results", name, measured, expected=f"names among {', '.join(measured)}"
            )
            results[f"averaged_{name}"] = measured[name]

    def on_train_end(self, trainer: TrainingContext, error: BaseException | None) -> None:
        """Write the average, unless the run has failed or it has not begun."""
        if error is None and trainer.run_dir is not None and trainer.step.steps_done >= self._start:
            path = trainer.run_dir / "averaged.safetensors"
            trainer.comm.on_rank0(lambda: save_weights(self.model.state_dict(), path))

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of models in it."""
        if self._averaged is None:
            return self._loaded
        return {
            "count": int(self._averaged.n_averaged),
            "model": dict(self._averaged.module.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._loaded = state
        if self._averaged is not None:
            self._load()

    def _load(self) -> None:
        if self._loaded and self._averaged is not None:
            saved = self._loaded["model"]
            ours = self._averaged.module
            # the model may be compiled or wrapped in another way
            renamed = match_names(saved, ours.state_dict())
            ours.load_state_dict({renamed.get(name, name): value for name, value in saved.items()})
            self._averaged.n_averaged.fill_(self._loaded["count"])
            self._loaded = {}


def _is_tiny(tensor: Tensor) -> bool:
    """Return whether a tensor is in a floating format of 8 bits or less, in which torch does not
    calculate.
    """
    return tensor.is_floating_point() and tensor.element_size() < 2
