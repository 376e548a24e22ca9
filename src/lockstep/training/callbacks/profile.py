"""A callback that records chosen steps with the profiler of torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

from ... import arguments
from ...errors import ConfigError
from .base import Callback, TrainingContext
from .writing import WriteGuard

if TYPE_CHECKING:
    from ...data.loader import Batch
    from ..step.step_result import StepResult

_ROWS = 30  # operations in the table


class Profile(Callback):
    """Records consecutive steps with `torch.profiler`, on each rank.

    Each rank writes into the folder `profile` of the run directory: `rank-0-step-10.json.gz`, a
    trace for ui.perfetto.dev or chrome://tracing, and `rank-0-step-10.txt`, a table of the
    operations that took longest. Other steps are not slowed down. If the files cannot be written, a
    warning is logged and the training continues.

    Args:
        steps: the steps, from 1, which follow one another; such as ``range(10, 13)``. The first
            steps of a run are slower than others.
        memory: whether to record the memory of tensors as well.

    Raises:
        ConfigError: for steps that do not follow one another; when `fit` starts, without a run
            directory, or if the run ends before them.
    """

    every_rank = True
    needs_run_dir = True

    def __init__(self, steps: Iterable[int] = range(10, 13), memory: bool = False) -> None:
        numbers = (
            list(steps)
            if isinstance(steps, Iterable) and not isinstance(steps, (str, bytes))
            else []
        )
        first = numbers[0] if numbers else 0
        if (
            not isinstance(first, int)
            or first < 1
            or numbers != list(range(first, first + len(numbers)))
        ):
            raise ConfigError(
                "steps", "steps from 1 that follow one another, such as range(10, 13)", steps
            )
        arguments.flag("memory", memory)
        self._first = numbers[0]
        self._last = numbers[-1]
        self._memory = memory
        self._write_guard = WriteGuard()
        self._profiler: Any = None

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Check that the run has the steps, unless it resumes after them."""
        if trainer.total_steps is not None and self._last > trainer.total_steps:
            raise ConfigError(
                "steps", f"at most {trainer.total_steps}, the steps of the run", self._last
            )

    def on_train_step_start(self, trainer: TrainingContext, batch: Batch) -> None:
        """Begin with the first of the steps."""
        if trainer.step.steps_done + 1 == self._first and self._profiler is None:
            activities = {ProfilerActivity.CPU, *_activities(trainer.comm.device)}
            self._profiler = torch.profiler.profile(
                activities=activities, profile_memory=self._memory
            )
            self._profiler.start()

    def on_train_step_end(self, trainer: TrainingContext, result: StepResult) -> None:
        """End with the last one, and write the files."""
        if trainer.step.steps_done >= self._last:
            self._end(trainer)

    def on_train_end(self, trainer: TrainingContext, error: BaseException | None) -> None:
        """Write what there is, if the run ends between them."""
        self._end(trainer)

    def _end(self, trainer: TrainingContext) -> None:
        profiler = self._profiler
        self._profiler = None
        if profiler is None or trainer.run_dir is None:
            return
        profiler.stop()
        folder = Path(trainer.run_dir) / "profile"
        with self._write_guard.to(folder):
            folder.mkdir(exist_ok=True)
            name = f"rank-{trainer.comm.rank}-step-{self._first}"
            profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
            by = (
                "self_device_time_total"
                if _activities(trainer.comm.device)
                else "self_cpu_time_total"
            )
            table = profiler.key_averages().table(sort_by=by, row_limit=_ROWS)
            (folder / f"{name}.txt").write_text(table)


def _activities(device: torch.device) -> set[ProfilerActivity]:
    """Return the profiler's name of what the device does, where torch can record that."""
    activities = {getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.PrivateUse1)}
    there: set[ProfilerActivity] = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    return activities & there if device.type != "cpu" else set()
