"""The part of a replay within the program: its Trainer resumes before a step, compares, and ends
the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from ..data.loader import Batch, Loader
from ..registry import import_object
from ..training.callbacks.base import Callback
from ..training.callbacks.checkpoints import Checkpoints
from ..training.in_flight import HostCopy
from ..training.run.run_guard import RunGuard
from ..training.step.finite_weights import FiniteWeights
from ..training.step.guards import Decision, PendingStep
from ..training.trainer import Trainer
from .ledger import SKIPPED, Difference, StepValues, first_difference, ledger, values_of
from .recorder import values_from, values_on_way
from .starts import data_of, differences, start_of

ANSWER = "answer"
"""The name of the file with the answer."""


class Request(msgspec.Struct, frozen=True):
    """What is to be replayed, for the workers of the program.

    Attributes:
        run: the run directory.
        step: the step to end with.
        checkpoint: from which to resume; "" for the beginning.
        trainer: which of the trainers of the program with a ledger trains; others do nothing.
        fit: the first call of its `fit` that trains.
        rounding: whether loss and norms may differ by rounding.
        probe: `module:function`, a `Probe` that looks at the step.
        needs_finite_weights: whether the probe is left out if the weights are not finite before the
            step.
        options: for the probe.
        folder: for the answer, and for what the program writes in place of the run directory.
    """

    run: str
    step: int
    checkpoint: str
    trainer: int
    fit: int
    rounding: bool
    probe: str
    needs_finite_weights: bool
    options: dict[str, Any]
    folder: str


class BadWeights(msgspec.Struct, frozen=True):
    """Trained weights that have become not finite.

    Attributes:
        step: the first step that began with them, so that the update before it made them so.
        values: which they are, in words.
    """

    step: int
    values: str


class Answer(msgspec.Struct, frozen=True):
    """What a replay has found.

    Attributes:
        workers: their number.
        compared: number of steps that were compared with the ledger.
        difference: the first value that differs; None if all are the same.
        changed: what is known to have changed since, in words.
        result: what the probe has returned.
        bad_weights: the weights that have become not finite before the step; None if all are
            finite, or were so from the beginning.
    """

    workers: int
    compared: int
    difference: Difference | None
    changed: list[str]
    result: Any
    bad_weights: BadWeights | None = None


Probe = Callable[[Trainer, Any, Batch, dict[str, Any]], Any]
"""(trainer, data set, this worker's part of the batch, options) → plain values. All workers of a
replay call it before the passes of the step; it must leave no trace in the training."""


class ReplayEnded(SystemExit):
    """The step is replayed: the program ends, as by `sys.exit`, on every rank."""


class DebuggerLeft(ReplayEnded):
    """The user has quit the debugger of the step: the program ends before the step's end."""


class Replay(RunGuard):
    """Lets a trainer replay, if it is the one whose ledger is compared; any other trains nothing.

    The program has an empty run directory in place of its own, and of its callbacks only those of
    every rank that do not save: they alone may change the training.

    Args:
        path: of the request.
        number: how many trainers with a ledger the program has made before; None for one without.
    """

    name = "replay"

    def __init__(self, path: Path, number: int | None) -> None:
        request: Request = msgspec.json.decode(path.read_bytes(), type=Request)
        self._request = request
        self._is_replayed = number == request.trainer
        self.run_dir = (
            Path(request.folder, "runs", Path(request.run).name) if self._is_replayed else None
        )
        self._ledger = ledger(request.run)
        self.may_undo = bool((self._ledger.steps["flags"] & SKIPPED).any())
        self._fits = 0
        self._trainer: Trainer | None = None
        self._changed: list[str] = []
        self._dataset: Any = None
        self._compared = 0
        self._difference: Difference | None = None
        self._result: Any = None
        self._values: StepValues | HostCopy | None = None
        self._finite_weights: FiniteWeights | None = None
        self._bad_weights: BadWeights | None = None

    @override
    def callbacks(self, callbacks: Sequence[Callback] | None) -> list[Callback]:
        return [
            callback
            for callback in callbacks or ()
            if callback.every_rank and not isinstance(callback, Checkpoints)
        ]

    @override
    def trains(self) -> bool:
        self._fits += 1
        return self._is_replayed and self._fits > self._request.fit

    def resumes(self, checkpoint: str | Path | None) -> str | None:
        """Return the checkpoint of the request for the call of `fit` that is replayed, and none for
        a further one, whatever the program says.
        """
        is_first = self._fits == self._request.fit + 1
        return self._request.checkpoint or None if is_first else None

    @contextmanager
    @override
    def fit(self, trainer: Trainer, loader: Loader) -> Iterator[None]:
        self._trainer = trainer
        self._dataset = loader.dataset
        self._finite_weights = FiniteWeights(trainer.model, trainer.comm)
        if trainer.comm.rank == 0:
            then = self._ledger.start_of(self._request.step)
            now = start_of(trainer, data_of(loader))
            self._changed = differences(
                then, now, ("variables", "workers", *["threads"] * bool(then.virtual_workers))
            )
            first = self._ledger.starts[0]
            if not self._request.checkpoint and first.weights != now.weights:
                self._changed.append("the initial weights: seed them (torch.manual_seed)")
        try:
            yield
        except DebuggerLeft:
            self._write_answer(trainer)
            raise

    def before_passes(self, step: int, batch: Batch) -> None:
        """Look at the step of the request, before anything of it is changed; and at the weights
        before each one, which waits for the device.
        """
        request = self._request
        trainer = self._trainer
        if trainer is None:
            return
        if self._bad_weights is None and self._finite_weights is not None:
            self._finite_weights.note()
            values = self._finite_weights.problem()
            self._bad_weights = BadWeights(step, values) if values else None
        is_of_use = self._bad_weights is None or not request.needs_finite_weights
        if step == request.step and self._result is None and is_of_use:
            probe: Probe = import_object("probe", request.probe)
            self._result = probe(trainer, self._dataset, batch, request.options)

    def before_update(self, pending: PendingStep) -> Decision:
        """Measure the step before gradients are clipped; leave out what the run has left out."""
        self._values = values_on_way(pending)
        record = self._ledger.find(pending.step)
        was_skipped = record is not None and record["flags"] & SKIPPED
        return Decision.SKIP if was_skipped else Decision.GO

    def after_step(self, pending: PendingStep) -> None:
        """Compare the step with the ledger; after that of the request, write the answer and end the
        program.
        """
        trainer = self._trainer
        request = self._request
        assert trainer is not None
        record = self._ledger.find(pending.step)
        if record is not None:
            now = values_from(self._values or values_on_way(pending))
            self._compared += 1
            if self._difference is None:
                was = values_of(record)
                self._difference = first_difference(pending.step, was, now, request.rounding)
        if pending.step == request.step:
            if trainer.comm.rank == 0:
                self._write_answer(trainer)
            trainer.comm.barrier()
            raise ReplayEnded(0)

    def _write_answer(self, trainer: Trainer) -> None:
        answer = Answer(
            trainer.comm.size,
            self._compared,
            self._difference,
            self._changed,
            self._result,
            self._bad_weights,
        )
        Path(self._request.folder, ANSWER).write_bytes(msgspec.msgpack.encode(answer))
