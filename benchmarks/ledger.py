"""Measures the processor time that the ledger of a run costs, beside the steps of LeNet on one
worker.

What the ledger does in a step is timed within a training: measuring the norms, writing the record,
and every 50 steps the fingerprint of the whole state; the digest of the samples' numbers is timed
alone. Most of the time of a norm is that of reading gradients that are not in the cache. The update
that follows finds them there: it is timed in turns after the norm and without it. Time that other
processes take is not counted, so that the shares hold on a busy host as well.

    python benchmarks/ledger.py            # about two minutes
    python benchmarks/ledger.py --quick    # a smoke run; its figures say nothing
    python benchmarks/ledger.py --write    # also puts the table into docs/proof.md
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from common import describe_machine, load_images, make_model, markdown_table
from frame import Benchmark
from lockstep.data.loader import Batch
from lockstep.training.step.guards import Decision, Guard, PendingStep
from lockstep.training.step.train_step import digest_of_samples

BENCHMARK = Benchmark("ledger", __doc__, "proof.md")
GLOBAL_BATCH = 256
TARGET = 0.003
STEPS = 100
CALLS = 2000


class Timed(Guard):
    """A guard whose processor time is measured.

    Args:
        guard: the guard.

    Attributes:
        seconds: of each step so far.
    """

    may_undo = False

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.name = guard.name
        self.seconds: list[float] = []

    def before_passes(self, step: int, batch: Batch) -> None:
        """Not measured: it opens the ledger once."""
        self._guard.before_passes(step, batch)
        self.seconds.append(0.0)

    def before_update(self, pending: PendingStep) -> Decision:
        """Measure the guard."""
        return self._measured(self._guard.before_update, pending)  # type: ignore[no-any-return]

    def after_step(self, pending: PendingStep) -> None:
        """Measure the guard."""
        self._measured(self._guard.after_step, pending)

    def _measured(self, call: Callable[[PendingStep], Any], pending: PendingStep) -> Any:
        begin = time.process_time()
        result = call(pending)
        self.seconds[-1] += time.process_time() - begin
        return result


class Norm(Guard):
    """A guard that measures the norm of the gradient alone, as the ledger does."""

    name = "norm"
    may_undo = False

    def before_update(self, pending: PendingStep) -> Decision:
        """Measure it."""
        float(pending.gradient_norm)
        return Decision.GO


def shorter_update(steps: int, virtual_workers: int | None) -> float:
    """Seconds of processor time by which an update is shorter after the norm of the gradient was
    measured; steps with and without it take turns.
    """
    model, optimizer = make_model("lenet")
    step = lockstep.TrainStep(
        model, optimizer, nn.CrossEntropyLoss(), virtual_workers=virtual_workers
    )
    loader = lockstep.Loader(
        load_images(GLOBAL_BATCH * 20), GLOBAL_BATCH, virtual_workers=virtual_workers
    )
    times: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: times.append(time.process_time()))
    optimizer.register_step_post_hook(lambda *_: times.append(time.process_time()))
    after_norm: list[float] = []
    alone: list[float] = []
    batches = (batch for epoch in itertools.count() for batch in loader.epoch(epoch))
    for number, batch in enumerate(itertools.islice(batches, 2 * steps)):
        step.guards = [Norm()] if number % 2 else []
        times.clear()
        step(batch)
        (after_norm if number % 2 else alone).append(times[1] - times[0])
    shorter: float = statistics.median(alone) - statistics.median(after_norm)
    return shorter


def measure(steps: int, virtual_workers: int | None) -> dict[str, Any]:
    """Seconds of processor time of a step, and of the ledger in it: usual, with a fingerprint, and
    the digest.
    """
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = make_model("lenet")
        trainer = lockstep.Trainer(
            model,
            optimizer,
            nn.CrossEntropyLoss(),
            GLOBAL_BATCH,
            run_dir=Path(folder) / "run",
            callbacks=[],
            virtual_workers=virtual_workers,
        )
        (recorder,) = trainer.step.guards
        timed = Timed(recorder)
        trainer.step.guards = [timed]
        data = load_images(GLOBAL_BATCH * 20)
        begin = time.process_time()
        trainer.fit(data, max_steps=steps)
        step = (time.process_time() - begin) / steps
        batch = next(iter(trainer.loader(data)))
        size = (trainer.run_dir / "ledger.bin").stat().st_size  # type: ignore[operator]
    fingerprints = [seconds for number, seconds in enumerate(timed.seconds, 1) if number % 50 == 0]
    usual = [seconds for number, seconds in enumerate(timed.seconds, 1) if number % 50]
    begin = time.process_time()
    for _ in range(CALLS):
        digest_of_samples(batch, trainer.comm)
    digest = (time.process_time() - begin) / CALLS
    fingerprint = statistics.median(fingerprints) if fingerprints else 0.0
    record = statistics.median(usual)
    shorter = shorter_update(steps, virtual_workers)
    whole = record + max(0.0, fingerprint - record) / 50 + digest - shorter
    return {
        "step": step,
        "record": record,
        "fingerprint": fingerprint,
        "digest": digest,
        "shorter update": shorter,
        "whole": whole,
        "bytes": size / steps,
    }


def as_table(found: dict[str, dict[str, Any]]) -> str:
    """What is shown."""
    header = ["LeNet, 256 images a step, 1 worker", *found]
    rows = [
        ["a step", *(f"{1e3 * each['step']:.1f} ms" for each in found.values())],
        ["norms and record", *(f"{1e6 * each['record']:.0f} µs" for each in found.values())],
        [
            "every 50 steps also a fingerprint",
            *(f"{1e6 * each['fingerprint']:.0f} µs" for each in found.values()),
        ],
        [
            "digest of the samples' numbers",
            *(f"{1e6 * each['digest']:.0f} µs" for each in found.values()),
        ],
        [
            "the update, which finds the gradients in the cache",
            *(f"-{1e6 * each['shorter update']:.0f} µs" for each in found.values()),
        ],
        [
            "all of it, of a step",
            *(f"{each['whole'] / each['step']:.2%}" for each in found.values()),
        ],
        ["bytes a step", *(f"{each['bytes']:.1f}" for each in found.values())],
    ]
    return markdown_table(header, rows)


def main() -> None:
    args = BENCHMARK.parse(BENCHMARK.parser("one run"))
    machine = describe_machine()
    torch.set_num_threads(1)
    lockstep.init("cpu")
    steps = 4 if args.quick else STEPS
    found = {
        name: measure(steps, number) for name, number in (("plain", None), ("4 virtual workers", 4))
    }
    BENCHMARK.publish(args, machine, as_table(found), "Fashion-MNIST", measured=found)
    share = max(each["whole"] / each["step"] for each in found.values())
    if not args.quick:
        print(
            f"{share:.2%} of a step, {'within' if share < TARGET else 'ABOVE'} the target of "
            f"{TARGET:.1%}"
        )


if __name__ == "__main__":
    main()
