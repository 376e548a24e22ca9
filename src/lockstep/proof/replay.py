"""Replays a step of a run: the program itself runs again, up to that step, and is compared with the
ledger.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .. import arguments, environment
from ..checkpoint.folder import CheckpointStore
from ..errors import DataError, LockstepError, counted
from ..training.options import CONFIGS
from .ledger import Difference, Ledger, ledger
from .replaying import ANSWER, Answer, Request
from .starts import TRAIN_COMMAND, kept_variables


@dataclass(frozen=True)
class Shard:
    """A shard of a replayed step; without virtual workers a worker's part of the batch.

    Attributes:
        number: of the shard, or the rank.
        loss: the mean over it.
        gradient_norm: the 2-norm of what it adds to the gradient of the step.
        samples: the numbers of its samples.
    """

    number: int
    loss: float
    gradient_norm: float
    samples: list[int]


@dataclass(frozen=True)
class Replayed:
    """A step that was replayed.

    Attributes:
        step: its number.
        workers: on how many workers.
        checkpoint: from which it was replayed; None if from the beginning.
        compared: number of steps that were compared with the ledger.
        difference: the first value that differs from the ledger; None if all are the same.
        rounding: whether loss and norms were compared within rounding, not bit by bit.
        changed: what is known to have changed since the run, in words.
        shards: what each shard has computed; empty where their passes cannot be run alone.
        losses: the sum of the loss of each sample of the step, by its number.
        gradient_norms: the 2-norm of the gradient of each parameter, before clipping, by name.
        why_no_shards: why there are no shards; "" if there are.
    """

    step: int
    workers: int
    checkpoint: Path | None
    compared: int
    difference: Difference | None
    rounding: bool
    changed: list[str]
    shards: list[Shard] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    gradient_norms: dict[str, float] = field(default_factory=dict)
    why_no_shards: str = ""


def replay(run: str | os.PathLike[str], *, step: int, workers: int | None = None) -> Replayed:
    """Replay a step of a run, and look into it.

    The program of the run is started again with its arguments, folder and environment variables.
    Its `Trainer` resumes from the newest checkpoint before the step, or begins anew, compares each
    step with the ledger, and ends the program in that step. It writes nothing into the run
    directory, and trackers are silent.

    Args:
        run: the run directory.
        step: the step.
        workers: number of workers; when None, one for a run with virtual workers, whose bits are
            the same on any number, and else as many as the run had.

    Raises:
        DataError: the run has no ledger, or its program cannot be run again.
        ConfigError: the ledger has no such step.
        LockstepError: the program has ended before that step.
    """
    planned = PlannedReplay(ledger(run), step, workers)
    return planned.replayed(planned.run("lockstep.proof.probes:look_into"))


class PlannedReplay:
    """A replay that can be started.

    Args:
        read: the ledger of the run.
        step: the step to end with.
        workers: see `replay`.

    Attributes:
        ledger: the ledger.
        step: the step.
        workers: number of workers.
        checkpoint: from which it resumes; None for the beginning.
        seconds: how long the run took for its steps, as the ledger says.
        rounding: whether loss and norms may differ by rounding.

    Raises:
        ConfigError, DataError: see `replay`.
    """

    def __init__(self, read: Ledger, step: int, workers: int | None = None) -> None:
        self.ledger = read
        self.step = arguments.whole("step", step, least=0)
        self.start = read.start_of(step)
        if workers is None:
            workers = 1 if self.start.virtual_workers else max(1, self.start.workers)
        self.workers = arguments.whole("workers", workers, least=1)
        if not self.start.command:
            why = "a notebook, or a program from standard input"
            raise DataError(f"{read.folder}: the program cannot be run again, as it was {why}")
        if not Path(self.start.folder).is_dir():
            raise DataError(
                f"{read.folder}: the program ran in {self.start.folder}, which is not there"
            )
        self.checkpoint, done = _checkpoint_before(read.folder, step)
        again = read.steps[(read.steps["step"] >= done) & (read.steps["step"] <= step)]
        self.seconds = _seconds(again)
        of_beginning = read.starts[int(again["start"][0])] if len(again) else self.start
        self._fit = min(of_beginning.fit, self.start.fit)
        self.rounding = self.start.virtual_workers is None and self.workers != self.start.workers

    def in_words(self) -> str:
        """Return from where it replays, and for how long."""
        origin = (
            "the beginning"
            if self.checkpoint is None
            else f"{self.checkpoint.parent.name}/{self.checkpoint.name}"
        )
        count = (
            self.step + 1 if self.checkpoint is None else self.step + 1 - _step_of(self.checkpoint)
        )
        return (
            f"from {origin} to step {self.step} on {counted(self.workers, 'worker')}: "
            f"{counted(count, 'step')}, "
            f"{_in_time(self.seconds)}"
        )

    def run(
        self,
        probe: str,
        interactive: bool = False,
        needs_finite_weights: bool = False,
        **options: Any,
    ) -> Answer:
        """Run the program, and return what it has found.

        Args:
            probe: `module:function` that looks into the step, see `replaying.Probe`.
            interactive: whether the program has the terminal; otherwise its output is shown only if
                it fails.
            needs_finite_weights: whether the probe is left out if the weights are not finite before
                the step.
            options: for the probe.

        Raises:
            LockstepError: the program has ended before the step.
        """
        with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as name:
            folder = Path(name)
            request = Request(
                run=str(self.ledger.folder.resolve()),
                step=self.step,
                checkpoint="" if self.checkpoint is None else str(self.checkpoint.resolve()),
                trainer=self.start.trainer,
                fit=self._fit,
                rounding=self.rounding,
                probe=probe,
                needs_finite_weights=needs_finite_weights,
                options=options,
                folder=name,
            )
            path = folder / "request.json"
            path.write_bytes(msgspec.json.encode(request))
            variables = self._variables() | environment.replay_variables(path)
            output = folder / "output"
            with output.open("wb") as file:
                streams = (
                    {}
                    if interactive
                    else {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                )
                code = _run(self._command(folder), self.start.folder, variables, streams)
            answer = folder / ANSWER
            if not answer.exists():
                text = output.read_text(errors="replace")
                if environment.debugging():  # else its last error alone is shown
                    sys.stderr.write(text)
                raise self._ended(code, text)
            return msgspec.msgpack.decode(answer.read_bytes(), type=Answer)

    def _variables(self) -> dict[str, str]:
        """Return the environment of the program: as it was, and of this session and its secrets as
        they are now.
        """
        now = environment.variables()
        others, _ = kept_variables(now)
        variables = {
            name: value for name, value in now.items() if name not in others
        } | self.start.variables
        if self.workers == self.start.workers and self.start.threads:
            variables["OMP_NUM_THREADS"] = str(self.start.threads)
        return variables

    def replayed(self, answer: Answer) -> Replayed:
        """Return the answer to the probe `look_into` with what is known of the replay."""
        result = answer.result or {}
        return Replayed(
            step=self.step,
            workers=answer.workers,
            checkpoint=self.checkpoint,
            compared=answer.compared,
            difference=answer.difference,
            rounding=self.rounding,
            changed=answer.changed,
            shards=[Shard(*numbers) for numbers in result.get("shards", ())],
            losses=[(int(index), float(loss)) for index, loss in result.get("losses", ())],
            gradient_norms=result.get("gradient_norms", {}),
            why_no_shards=result.get("why_no_shards", ""),
        )

    def _command(self, folder: Path) -> list[str]:
        """Return the words that start the program on so many workers."""
        words = list(self.start.command)
        if tuple(words) == TRAIN_COMMAND:
            config = self.ledger.folder.resolve() / CONFIGS[0]
            runs = folder / "runs" / self.ledger.folder.name
            words += [
                "--config",
                str(config),
                "--run-dir",
                str(runs),
                "--workers",
                str(self.workers),
                "--quiet",
            ]
            return [sys.executable, *words]
        if self.workers == 1 or self.start.launches:
            return [sys.executable, *words]
        return [sys.executable, "-m", "lockstep", "run", "-np", str(self.workers), *words]

    def _ended(self, code: int, output: str) -> LockstepError:
        """Return the error for a program that has ended before the step, with the last line that it
        has written.
        """
        lines = [line for line in output.splitlines() if line.strip()]
        what = lines[-1].strip()[:300] if lines else f"exit code {code}"
        errors = [
            line
            for line in lines
            if re.match(r"(\[?rank \d+\]?:? *)?[\w.]+(Error|Exception|Exit)\b", line)
        ]
        if errors:
            what = errors[-1].strip()[:300]
        missing = [name for name in self.start.withheld if name in what]
        if missing:
            what += (
                f"; the run had the variable {missing[0]}, which is not kept because it looks "
                "like a secret: set it"
            )
        command = self.start.command
        if tuple(command) == TRAIN_COMMAND:
            name = "lockstep train"
        elif command[0] == "-m":
            name = shlex.join(command[:2])
        else:
            name = Path(command[0]).name
        return LockstepError(f"{name} ended before step {self.step}: {what}")


def _run(words: list[str], folder: str, variables: dict[str, str], streams: dict[str, Any]) -> int:
    """Run a program, and return its exit code; Ctrl-C ends it too."""
    process = subprocess.Popen(words, cwd=folder, env=variables, **streams)
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _checkpoint_before(folder: Path, step: int) -> tuple[Path | None, int]:
    """Return the newest checkpoint with at most `step` updates, and their number."""
    paths = [
        path for path in CheckpointStore(folder / "checkpoints").paths() if _step_of(path) <= step
    ]
    newest = max(paths, key=_step_of, default=None)
    return newest, 0 if newest is None else _step_of(newest)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _seconds(steps: Any) -> float:
    """Return how long steps took; NaN for fewer than two of a start."""
    total = 0.0
    pairs = 0
    for number in range(1, len(steps)):
        if steps["start"][number] == steps["start"][number - 1]:
            total += float(steps["seconds"][number] - steps["seconds"][number - 1])
            pairs += 1
    return total * len(steps) / pairs if pairs else math.nan


def _in_time(seconds: float) -> str:
    if math.isnan(seconds):
        return "which is short"
    if seconds < 100:
        return f"about {max(1.0, seconds):.0f} s of training"
    return (
        f"about {seconds / 60:.0f} min of training"
        if seconds < 6000
        else f"about {seconds / 3600:.1f} h of training"
    )
