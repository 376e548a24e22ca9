"""Loops of one's own in elastic jobs under the faults of `elastic_chaos`.

Run as a program it tries many seeds: ``python tests/support/own_loop_chaos.py 100 --first 0
--backend shm``; with ``--prepare``, loops over a loader of `lockstep.prepare` in place of those of
`lockstep.elastic.steps`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

import lockstep
from lockstep.parallel.fingerprints import fingerprint_of
from support import elastic_chaos
from support.elastic_chaos import (
    BATCH,
    EPOCHS,
    LIMIT_S,
    VIRTUAL_WORKERS,
    Chaos,
    Plan,
    arm,
    make_trainer,
)
from support.optimizers import DIVISIBLE

# There is no fp16 in these loops.
PLACES = {"unscale": "meet", "unscaled": "give out"}


def train(plan: Plan, number: int, run_dir: Path | None, result: Path) -> None:
    """Train, as one worker, and write what has come out."""
    trainer, net, data = make_trainer(plan, None, [])
    optimizer, loss_fn = trainer.optimizer, trainer.loss_fn
    scheduler, seen = ExponentialLR(optimizer, 0.97), {"losses": [], "rows": [], "order": []}
    loader = lockstep.Loader(data, BATCH, seed=3, virtual_workers=VIRTUAL_WORKERS)
    step = lockstep.TrainStep(net, optimizer, loss_fn, virtual_workers=VIRTUAL_WORKERS, seed=3)
    chaos = Chaos(number, plan.faults)
    if hasattr(trainer.comm, "client"):
        arm(chaos, SimpleNamespace(optimizer=optimizer), net)
    training = lockstep.elastic.steps(
        loader, step, EPOCHS, state={"scheduler": scheduler, "seen": seen}
    )
    for batch in training:
        seen["order"].append([batch.epoch, batch.step])
        if plan.model == "kept" and (batch.epoch, batch.step) == (1, 0):
            net.change()  # type: ignore[operator]
        loss = step(batch)
        scheduler.step()
        seen["losses"].append(float(loss))
        if training.ends_epoch or batch.step == 3:
            held_out = lockstep.Loader(data, 32, virtual_workers=VIRTUAL_WORKERS)
            seen["rows"].append(training.call(lockstep.evaluate, net, held_out, loss_fn))
            seen["rows"].append(optimizer.param_groups[0]["lr"])
    if trainer.comm.is_joining:
        return  # it has come too late, and has the model as it began
    write(result, lockstep.fingerprint(net, optimizer), seen)


def write(result: Path, fingerprint: str, seen: dict[str, Any]) -> None:
    draft = result.with_suffix(".draft")
    draft.write_text(json.dumps({"fingerprint": fingerprint, "history": seen}))
    draft.rename(result)


def whole_fingerprint(net: nn.Module, optimizer: Optimizer) -> str:
    """The fingerprint, also where the state is divided; all workers call this."""
    entries = {**dict(net.named_parameters()), **net.state_dict()}
    return fingerprint_of(entries, optimizer.full_state_dict())  # type: ignore[attr-defined]


def train_prepared(plan: Plan, number: int, run_dir: Path | None, result: Path) -> None:
    """The same with passes of its own; one epoch is left before its end, and two have the shards in
    a loop.
    """
    trainer, net, data = make_trainer(replace(plan, shards=False), None, [])
    optimizer, loss_fn = trainer.optimizer, trainer.loss_fn
    optimizer.same_bits = True  # the hooks that let it meet its faults change nothing
    scheduler, seen = ExponentialLR(optimizer, 0.97), {"losses": [], "rows": [], "order": []}
    average: Any = AveragedModel(net, use_buffers=True)
    loader = lockstep.Loader(data, BATCH, seed=3, virtual_workers=VIRTUAL_WORKERS)
    net, optimizer, scheduler, average, loader = lockstep.prepare(
        *(net, optimizer, scheduler, average, loader),
        virtual_workers=VIRTUAL_WORKERS,
        max_grad_norm=1.0,
        seed=3,
        state={"seen": seen},
        shard_optimizer=plan.shards,
    )
    chaos = Chaos(number, plan.faults)
    if hasattr(trainer.comm, "client"):
        arm(chaos, SimpleNamespace(optimizer=optimizer), net)

    has_buffers = any(True for _ in net.buffers())

    def body(epoch: int, data: Any) -> None:
        inputs, labels = data
        optimizer.zero_grad()
        loss = loss_fn(net(inputs), labels)
        loss.backward()
        optimizer.param_groups[0]["weight_decay"] = 0.01 / (1 + len(seen["losses"]))
        mean = optimizer.step(loss=loss)
        scheduler.step()
        average.update_parameters(net)
        if optimizer.stepped:
            seen["losses"].append(float(mean))
            seen["order"].append(
                [epoch, loader.state_dict()["step"], optimizer.param_groups[0]["lr"]]
            )
            if (
                len(seen["losses"]) % 5 == 3 and not has_buffers
            ):  # else they have those of the batch only after it
                measure(net)

    def measure(model: Any) -> None:
        held_out = lockstep.Loader(data, 32, virtual_workers=VIRTUAL_WORKERS)
        seen["rows"].append(lockstep.evaluate(model, held_out, loss_fn))

    for epoch in range(EPOCHS + 1):
        if epoch % 2:
            for part in loader:
                if epoch == 1 and loader.state_dict()["step"] == 5:
                    break
                body(epoch, part)
        else:
            for batch in loader.batches():
                for part in optimizer.shards(batch):
                    body(epoch, part)
                if batch.step % 3 == 1:
                    measure(net)
                if batch.step == 4:
                    seen["order"].append(whole_fingerprint(net, optimizer))
        measure(average.module)
    if trainer.comm.is_joining:
        return  # it has come too late for the last epoch
    write(result, whole_fingerprint(net, optimizer) + lockstep.fingerprint(average.module), seen)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--backend", choices=["shm", "gloo"])
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        help="seconds after which a job counts as one that hangs; more on a busy machine",
    )
    parser.add_argument(
        "--kept", action="store_true", help="a model with state outside of its state dict"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="loops over a loader of lockstep.prepare"
    )
    parser.add_argument(
        "--shard-optimizer",
        action="store_true",
        help="with --prepare, an optimizer that is divided among the workers, and faults within "
        "its update",
    )
    parser.add_argument(
        "--optimizers",
        action="store_true",
        help="with --shard-optimizer, one of those that can be divided after the other",
    )
    options = parser.parse_args(words)
    if options.shard_optimizer and not options.prepare:
        parser.error("--shard-optimizer: expected --prepare with it")
    if options.optimizers and not options.shard_optimizer:
        parser.error("--optimizers: expected --shard-optimizer with it")
    elastic_chaos.train = train_prepared if options.prepare else train
    expected: dict[tuple[str, str], Any] = {}
    completed = joined = wrong = 0
    for seed in range(options.first, options.first + options.count):
        plan = Plan.of(seed, options.backend)
        if options.shard_optimizer:
            plan = plan.sharding(seed)
            faults = tuple(
                replace(each, place=PLACES.get(each.place, each.place)) for each in plan.faults
            )
            plan = replace(plan, faults=faults)
        if options.optimizers:
            plan = plan.optimized_by(list(DIVISIBLE)[seed % len(DIVISIBLE)])
        plan = replace(plan, virtual=True, loaders=0, parts=0, precision="fp32", ddp=False)
        if options.kept:
            plan = replace(plan, model="kept", replaces=True)
        kind = plan.model, plan.optimizer
        if kind not in expected:
            expected[kind] = elastic_chaos.undisturbed(
                plan.model, True, 0, 0, optimizer=plan.optimizer
            )
        outcome = elastic_chaos.run_job(plan, options.limit)
        # The first batch shows whether a loop can be repeated, and is not repeated itself.
        is_in_first = any(fault.count == 1 for fault in plan.faults)
        checked = replace(plan, shards=False) if is_in_first else plan
        problem = elastic_chaos.check(checked, outcome, expected[kind])
        completed, wrong = completed + bool(outcome.results), wrong + bool(problem)
        joined += outcome.joined
        if problem:
            print(f"seed {seed}: {problem}\n{plan}\n{outcome.describe()}", flush=True)
    print(f"{options.count} jobs, {completed} completed, {joined} workers joined, {wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
