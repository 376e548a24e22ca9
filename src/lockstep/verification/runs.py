"""Runs a user's script for some steps on a number of workers of this host, and returns the records
of its ranks.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from .. import environment
from ..errors import DataError, LockstepError
from ..launcher.quiet_run import in_one_line, last_line, run_quietly
from ..launcher.worker_process.script import Script
from .held import Held
from .recording import StepRecorder, record_file
from .records import RunRecord, TensorRecord


@dataclass(frozen=True)
class _RecordedScript(Script):
    """A script whose steps are recorded.

    Attributes:
        folder: for the records.
        steps: recorded steps of each optimizer.
        held: what is the same at every number of workers.
    """

    folder: str = ""
    steps: int = 5
    held: Held = field(default_factory=Held)

    def run(self) -> None:
        """Run it, and write its record."""
        recorder = StepRecorder(Path(self.folder), self.steps, self.held)
        recorder.install()
        try:
            super().run()
        finally:
            recorder.finish()


def record_run(
    script: Script, workers: int, steps: int, most_workers: int, held: Held | None = None
) -> list[RunRecord]:
    """Run `script` on `workers` processes of this host, and return the record of each rank.

    The script ends before the step after the last recorded one, by an exception that is no
    Exception. What it prints is shown only if it fails.

    Args:
        script: the script.
        workers: their number.
        steps: recorded steps of each optimizer.
        most_workers: of all runs that are compared; all have as many threads a worker.
        held: what is the same at every number of workers.

    Raises:
        ConfigError: if there is no such script.
        LockstepError: if the script fails, in one line with the place; its exit code is that of the
            script.
        DataError: if it ends without a step.
    """
    script.check()
    threads = environment.threads() or max(1, environment.usable_cores() // most_workers)
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as name:
        folder = Path(name)
        recorded = _RecordedScript(
            script.name, script.arguments, script.is_module, "", name, steps, held or Held()
        )
        failure = run_quietly(recorded, workers, threads, folder)
        paths = [record_file(folder, rank) for rank in range(workers)]
        records: list[RunRecord] = [
            msgspec.msgpack.decode(path.read_bytes(), type=RunRecord)
            for path in paths
            if path.exists()
        ]
        if failure is not None:
            raise in_one_line(script, failure, workers)
        if len(records) < workers or not all(record.steps for record in records):
            raise _no_step(script, folder)
        if any(record.workers != workers for record in records):
            raise LockstepError(f"{script.name} changed WORLD_SIZE: expected {workers} workers")
        return _with_gradients_of_all(records)


def _with_gradients_of_all(records: list[RunRecord]) -> list[RunRecord]:
    """Return the records, in which a rank that has the gradients of some parameters only has those
    of the other ranks as well.
    """
    gradients: dict[tuple[int, int], dict[str, TensorRecord]] = {}
    for step in (step for record in records for step in record.steps):
        gradients.setdefault((step.optimizer, step.step), {}).update(step.gradients)
    return [
        replace(
            record,
            steps=tuple(
                replace(step, gradients=gradients[step.optimizer, step.step])
                if step.has_part
                else step
                for step in record.steps
            ),
        )
        for record in records
    ]


def _no_step(script: Script, folder: Path) -> DataError:
    return DataError(
        f"{script.name} ended without a step: expected a script that trains, with an optimizer of "
        f"torch whose step() is called, got {last_line(folder)}"
    )
