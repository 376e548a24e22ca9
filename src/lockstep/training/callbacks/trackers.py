"""Callbacks that send losses and metrics to experiment trackers: Weights & Biases, and MLflow."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ... import arguments
from ...errors import ConfigError
from .base import Callback, Row, TrainingContext

if TYPE_CHECKING:
    from ..step.step_result import StepResult

_log = logging.getLogger(__name__)


class _Tracker(Callback):
    """What both have in common: which values are sent, and that a run goes on when a tracker fails.

    Args:
        every_steps: steps between two values of ``loss/train``.
        config: values to store with the run, besides those that the trainer knows.

    Raises:
        ConfigError: if the package is not installed, or for an invalid argument.
    """

    package = ""

    def __init__(self, every_steps: int, config: Mapping[str, Any] | None) -> None:
        arguments.require_package(self.package, f"{type(self).__name__}()", extra=self.package)
        self._every = arguments.whole("every_steps", every_steps, least=1)
        if config is not None:
            arguments.instance("config", config, Mapping, "a dict of values to store with the run")
        self._config = dict(config or {})
        self._run_id = ""
        self._has_failed = False
        self._is_open = False

    @property
    def run_id(self) -> str:
        """The tracker's name of the run; "" before `fit`. A resumed run goes on with it."""
        return self._run_id

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Begin a run of the tracker, or go on with that of the checkpoint."""
        known = {
            "global_batch_size": trainer.global_batch_size,
            "epochs": trainer.epochs,
            "total_steps": trainer.total_steps,
            "workers": trainer.comm.size,
            "optimizer": type(trainer.optimizer).__name__,
            "lr": float(
                trainer.optimizer.param_groups[0].get(
                    "initial_lr", trainer.optimizer.param_groups[0]["lr"]
                )
            ),
        }
        with self._tolerating():
            self._run_id = self._open(trainer, {**known, **self._config})
            self._is_open = True

    def on_loss(self, trainer: TrainingContext, result: StepResult, loss: float) -> None:
        """Send the loss of a step, and the norm of its gradient."""
        if (result.step + 1) % self._every == 0:
            norm = {} if result.grad_norm is None else {"gradient_norm": float(result.grad_norm)}
            self._send_if_open({"loss/train": loss, **norm}, result.step + 1)

    def on_row(self, trainer: TrainingContext, row: Row) -> None:
        """Send all columns of the row."""
        self._send_if_open(
            {name: value for name, value in row.items() if name != "step"}, int(row["step"])
        )

    def on_train_end(self, trainer: TrainingContext, error: BaseException | None) -> None:
        """End the run of the tracker, as failed after an error."""
        if self._is_open:
            with self._tolerating():
                self._close(error)
        self._is_open = False

    def state_dict(self) -> dict[str, Any]:
        """Return the tracker's name of the run."""
        return {"run_id": self._run_id} if self._run_id else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that run."""
        self._run_id = str(state["run_id"])

    def _send_if_open(self, values: dict[str, float], step: int) -> None:
        if self._is_open:
            with self._tolerating():
                self._send(values, step)

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        """Log the first failure of the tracker as a warning: the training does not depend on it."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            if not self._has_failed:
                name = type(self).__name__
                text = f"{type(error).__name__}: {error}"
                _log.warning("%s failed, and the training continues without it: %s", name, text)
            self._has_failed = True

    def _open(self, trainer: TrainingContext, config: dict[str, Any]) -> str:
        raise NotImplementedError

    def _send(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _close(self, error: BaseException | None) -> None:
        raise NotImplementedError


class WandB(_Tracker):
    """Sends losses and metrics to Weights & Biases, from rank 0.

    During an epoch: ``loss/train``, and ``gradient_norm`` if the trainer has `max_grad_norm`; then
    all columns of each row of the history under their names. If that fails, a warning is logged
    once and the training continues.

    Args:
        project: the project's name.
        name: the run's name; W&B chooses one when None.
        mode: "online", "offline" (files in the run directory, for ``wandb sync``) or "disabled";
            when None, that of the environment variable WANDB_MODE, or "online".
        every_steps: steps between two values of ``loss/train``.
        config: values to store with the run, besides those that the trainer knows.
        **options: further arguments of ``wandb.init``, such as ``tags``.

    Raises:
        ConfigError: if the package wandb is not installed, or for an invalid argument.
    """

    package = "wandb"

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        mode: str | None = None,
        every_steps: int = 10,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(every_steps, config)
        if mode is not None:
            arguments.choice("mode", mode, ("online", "offline", "disabled"))
        self._options = {"project": project, "name": name, "mode": mode, **options}
        self._run: Any = None

    def _open(self, trainer: TrainingContext, config: dict[str, Any]) -> str:
        import wandb

        where = {} if trainer.run_dir is None else {"dir": str(trainer.run_dir)}
        again = {"id": self._run_id, "resume": "allow"} if self._run_id else {}
        self._run = wandb.init(config=config, **{**where, **self._options, **again})
        return str(self._run.id)

    def _send(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def _close(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=int(error is not None))


class MLflow(_Tracker):
    """Sends losses and metrics to MLflow, from rank 0.

    During an epoch: ``loss/train``, and ``gradient_norm`` if the trainer has `max_grad_norm`; then
    all columns of each row of the history under their names. They are sent in the background; if
    that fails, a warning is logged once and the training continues.

    Args:
        experiment: the experiment's name, which is made if there is none.
        name: the run's name; MLflow chooses one when None.
        tracking_uri: of the server or database, such as "sqlite:///mlflow.db"; when None, that of
            the environment variable MLFLOW_TRACKING_URI, or MLflow's default.
        every_steps: steps between two values of ``loss/train``.
        config: values to store with the run as parameters, besides those that the trainer knows.

    Raises:
        ConfigError: if the package mlflow is not installed, or for an invalid argument.
    """

    package = "mlflow"

    def __init__(
        self,
        experiment: str = "Default",
        name: str | None = None,
        tracking_uri: str | None = None,
        every_steps: int = 10,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every_steps, config)
        self._experiment = experiment
        self._name = name
        self._uri = tracking_uri
        self._client: Any = None
        self._sent: deque[Any] = deque(maxlen=1000)  # to be waited for at the end
        # the step up to which another worker may have sent values before it was lost
        self._doubtful = -1

    def _open(self, trainer: TrainingContext, config: dict[str, Any]) -> str:
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
            self._doubtful = trainer.step.steps_done
            return self._run_id
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = (
            self._client.create_experiment(self._experiment)
            if experiment is None
            else experiment.experiment_id
        )
        run_id = str(self._client.create_run(number, run_name=self._name).info.run_id)
        params = [Param(name, str(value)) for name, value in config.items()]
        self._client.log_batch(run_id, params=params)
        return run_id

    def _send(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        if step <= self._doubtful:
            values = {name: value for name, value in values.items() if not self._has(name, step)}
        now = round(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value in values.items()]
        self._sent.append(self._client.log_batch(self._run_id, metrics=metrics, synchronous=False))

    def _has(self, name: str, step: int) -> bool:
        """Return whether the run has a value of this step."""
        return any(
            metric.step == step for metric in self._client.get_metric_history(self._run_id, name)
        )

    def _close(self, error: BaseException | None) -> None:
        try:
            for sent in self._sent:
                sent.wait()
        finally:
            self._sent.clear()
            stopped = (
                isinstance(error, KeyboardInterrupt)
                or type(error).__name__ == "InterruptedRunError"
            )
            if error is None:
                status = "FINISHED"
            else:
                status = "KILLED" if stopped else "FAILED"
            self._client.set_terminated(self._run_id, status)
