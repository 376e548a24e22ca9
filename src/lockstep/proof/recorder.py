"""Keeps the ledger of a run: a guard that lets every step go on, and with which rank 0 writes."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from .. import arguments
from ..data.loader import Batch, Loader
from ..parallel.fingerprints import checksum_of
from ..parallel.nested import tensors_of
from ..parallel.strategy import accumulation_dtype, number_on
from ..training.in_flight import LAG, HostCopy
from ..training.run.run_guard import RunGuard
from ..training.step.guards import Decision, PendingStep
from ..training.step.train_step import DIGEST_BITS
from ..training.trainer import Trainer
from .ledger import NOT_SUMMED, SKIPPED, Difference, LedgerWriter, StepValues
from .starts import Data, data_of, start_of, state_checksums

_log = logging.getLogger(__name__)


def values_on_way(pending: PendingStep) -> StepValues | HostCopy:
    """Return what a step has computed, for `values_from`; from an accelerator on its way to the
    host.
    """
    gradient_norm = pending.gradient_norm
    device = gradient_norm.device
    samples = 0 if pending.samples is None else pending.samples
    buffers_norm = 0.0 if pending.buffers_norm is None else pending.buffers_norm
    numbers = [
        pending.loss,
        pending.count,
        gradient_norm,
        pending.learning_rate,
        samples,
        buffers_norm,
    ]
    if device.type == "cpu":
        return _values([float(number) for number in numbers])
    # Numbers of the host are filled in, because copying them would wait for the device.
    dtype = accumulation_dtype(device)
    on_device = [number_on(device, number, dtype).reshape(()) for number in numbers]
    return HostCopy(torch.stack(on_device))


def values_from(on_way: StepValues | HostCopy) -> StepValues:
    """Return what a step has computed, when its numbers have arrived."""
    return _values(on_way.read()) if isinstance(on_way, HostCopy) else on_way


def _values(numbers: list[float]) -> StepValues:
    loss, count, gradient_norm, learning_rate, samples, buffers_norm = numbers
    digest = int(samples) % (1 << DIGEST_BITS)
    return StepValues(loss, count, gradient_norm, learning_rate, digest, buffers_norm)


class _Computed(NamedTuple):
    """What is to be written of a step."""

    number: int
    flags: int
    seconds: float
    values: StepValues | HostCopy
    checksums: HostCopy | None
    restored: int | None
    faults: tuple[int, ...]


# Steps that a worker without the file keeps: when rank 0 is lost, it may have done one step less
# than the others, and has others in its queue.
_RECENT = LAG + 2


class Recorder(RunGuard):
    """Writes the ledger on rank 0, whichever worker that is.

    On an accelerator nothing waits for the numbers of a step: its record is written when some later
    ones are queued. If the files cannot be written, a warning is logged once, and the training goes
    on.

    In an elastic job all workers measure each step, and keep the last ones: whoever has rank 0
    after the loss of that worker writes what it has not written any more.

    Args:
        run_dir: the run directory that the trainer was given.
        number: how many trainers with a ledger the program has made before.
        fingerprint_every: steps between two fingerprints; 0 takes none.

    Raises:
        ConfigError: `fingerprint_every` is not a whole number of at least 0.
    """

    name = "ledger"
    may_undo = False

    def __init__(self, run_dir: Path, number: int = 0, fingerprint_every: int = 50) -> None:
        hint = "0 takes none."
        self._every = arguments.whole("fingerprint_every", fingerprint_every, least=0, hint=hint)
        self.run_dir = run_dir
        self._number = number
        self._trainer: Trainer | None = None
        self._writer: LedgerWriter | None = None
        self._queued: deque[_Computed] = deque()
        self._recent: deque[_Computed] = deque(maxlen=_RECENT)
        self._values: StepValues | HostCopy | None = None
        self._data = Data()
        self._fits = 0
        self._began = 0.0
        self._has_failed = False
        self._has_differed = False

    @contextmanager
    def fit(self, trainer: Trainer, loader: Loader) -> Iterator[None]:
        """Keep the ledger of a call of `fit`, see `RunGuard`."""
        self._trainer = trainer
        self.run_dir = trainer.run_dir
        if trainer.comm.rank == 0:
            self._data = data_of(loader)
        step = trainer.step
        is_elastic_and_divided = (
            step.strategy.shards is not None and not step.recovery.has_fixed_workers
        )
        if self._every and is_elastic_and_divided:
            # a fingerprint would need messages after an update, whose step no other workers repeat
            self._every = 0
            if trainer.comm.rank == 0:
                _log.warning(
                    "the ledger has no fingerprints: with shard_optimizer in an elastic job no "
                    "worker has the whole state when a step ends"
                )
        try:
            yield
        finally:
            self._close()
            self._recent.clear()
            self._trainer = None
            self._fits += 1

    def before_passes(self, step: int, batch: Batch) -> None:
        """Open the ledger on the worker that has rank 0, before its first update."""
        trainer = self._trainer
        if trainer is None:
            return
        if trainer.comm.rank != 0:
            self._close()
        elif self._writer is None and not self._has_failed:
            start = start_of(trainer, self._data, (self._number, self._fits))
            assert self.run_dir is not None
            first = self._recent[0].number if self._recent else step
            try:
                writer = LedgerWriter(self.run_dir, start, first, start.virtual_workers is None)
            except OSError as error:
                self._fail(error)
                return
            self._writer = writer
            self._began = time.monotonic()
            self._queued.extend(
                computed for computed in self._recent if not writer.has(computed.number)
            )
            self._recent.clear()
            if writer.cut:
                text = "%s: %d bytes of a torn end were cut off the ledger"
                _log.warning(text, self.run_dir, writer.cut)

    def before_update(self, pending: PendingStep) -> Decision:
        """Measure the step before its gradients are clipped, or its buffers restored; every step
        goes on.
        """
        trainer = self._trainer
        if trainer is not None and (
            self._writer is not None
            or self._may_be_rank0(trainer)
            # of a gradient that is sharded all workers measure the norm together
            or trainer.step.strategy.sharded_state
            or trainer.step.strategy.shards is not None
        ):
            self._values = values_on_way(pending)
        return Decision.GO

    def _may_be_rank0(self, trainer: Trainer) -> bool:
        """Return whether this worker may have to write what rank 0 has computed."""
        return not (self._has_failed or trainer.step.recovery.has_fixed_workers)

    def after_step(self, pending: PendingStep) -> None:
        """Queue the record of a step behind what the device computes, and write those that have
        arrived.
        """
        values = self._values
        self._values = None
        trainer = self._trainer
        if trainer is None:
            return
        done = pending.step + 1
        is_due = bool(self._every) and done % self._every == 0
        is_recorded = self._writer is not None or self._may_be_rank0(trainer)
        checksums = None
        # of an optimizer's state that is divided, all workers compute it together
        if is_due and (is_recorded or trainer.step.strategy.shards is not None):
            checksums = _checksums(trainer, pending.batch)
        if not is_recorded:
            return
        flags = SKIPPED if pending.decision is Decision.SKIP else 0
        flags |= NOT_SUMMED if pending.samples is None else 0
        computed = _Computed(
            pending.step,
            flags,
            time.monotonic() - self._began,
            values_on_way(pending) if values is None else values,
            checksums,
            pending.notes.get("restored"),
            tuple(rank for fault in pending.notes.get("faults", ()) for rank in fault.ranks),
        )
        if self._writer is not None:
            self._queued.append(computed)
            self._write_queued(0 if pending.gradient_norm.is_cpu else LAG)
            return
        while self._recent and self._recent[-1].number >= computed.number:
            self._recent.pop()  # of an attempt that was undone
        self._recent.append(computed)

    def on_checkpoint(self) -> None:
        """Flush what a resume is compared with."""
        self._write_queued(0, flush=True)

    def on_regroup(self) -> None:
        """Let go of the file if another worker has rank 0 now, or if there are more or fewer
        workers: it is opened again with a start.
        """
        writer = self._writer
        if writer is None or self._trainer is None:
            return
        comm = self._trainer.comm
        if comm.rank != 0 or comm.size != writer.workers:
            self._close()

    def _write_queued(self, left: int, flush: bool = False) -> None:
        """Write what is queued, but for so many of the newest records."""
        writer = self._writer
        if writer is None:
            return
        try:
            while len(self._queued) > left:
                self._write(writer, self._queued.popleft())
            if flush:
                writer.sync()
        except OSError as error:
            self._fail(error)

    def _write(self, writer: LedgerWriter, computed: _Computed) -> None:
        """Write what is known of a step; its record is the last, and says that all is there."""
        step = computed.number
        if computed.restored is not None:
            writer.rollback(step, computed.restored)
        for rank in computed.faults:
            writer.fault(step, rank)
        if computed.checksums is not None:
            writer.fingerprint(step + 1, computed.checksums.integers())
        values = values_from(computed.values)
        difference = writer.step(step, values, computed.flags, computed.seconds)
        if difference is not None and not self._has_differed:
            self._has_differed = True
            self._say(difference)

    def _say(self, difference: Difference) -> None:
        _log.warning(
            "a step that was computed before the run resumed has another result now: %s. The "
            "program, the data, the libraries or the hardware are others than then; `lockstep "
            "ledger %s --recomputed` lists both results",
            difference,
            self.run_dir,
        )

    def _fail(self, error: OSError) -> None:
        """Say once that nothing more is written."""
        self._has_failed = True
        text = "%s: the ledger cannot be written: %s. The training continues without it."
        _log.warning(text, self.run_dir, error.strerror or error)
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close()

    def _close(self) -> None:
        self._write_queued(0, flush=True)
        self._queued.clear()
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close()


def _checksums(trainer: Trainer, batch: Batch) -> HostCopy:
    """Return the checksums of the state, of the content of a batch, and of the learning rates."""
    device = trainer.comm.device
    rates = [float(group["lr"]) for group in trainer.optimizer.param_groups]
    of_rates = checksum_of([torch.tensor(rates, dtype=torch.float64)])
    of_batch = torch.zeros_like(of_rates)  # another worker than rank 0 has another part of it
    if trainer.comm.rank == 0:
        first = batch.data[0] if batch.virtual_workers else batch.data
        of_batch = checksum_of([_first_samples(tensor) for tensor in tensors_of(first)])
    sums = [*state_checksums(trainer), of_batch, of_rates]
    return HostCopy(torch.stack([checksum.to(device, non_blocking=True) for checksum in sums]))


# Whether the data are the same shows in few samples; those of a large batch take longer than the
# whole state of a small model.
_DIGESTED_SAMPLES = 64


def _first_samples(tensor: torch.Tensor) -> torch.Tensor:
    has_rows = tensor.dim() > 0 and tensor.layout is torch.strided
    return tensor[:_DIGESTED_SAMPLES] if has_rows else tensor
