"""Loops of one's own in elastic jobs under the faults of `elastic_chaos`.

Run as a program it tries many seeds: ``python tests/support/own_loop_chaos.py 100 --first 0 --backend shm``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.optim.lr_scheduler import ExponentialLR

sys.path.insert(0, str(Path(__file__).parents[1]))

import lockstep
from support import elastic_chaos
from support.elastic_chaos import BATCH, EPOCHS, VIRTUAL_WORKERS, Chaos, Plan, arm, make_trainer


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
    training = lockstep.elastic.steps(loader, step, EPOCHS, state={"scheduler": scheduler, "seen": seen})
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
    draft = result.with_suffix(".draft")
    draft.write_text(json.dumps({"fingerprint": lockstep.fingerprint(net, optimizer), "history": seen}))
    draft.rename(result)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--backend", choices=["shm", "gloo"])
    parser.add_argument("--kept", action="store_true", help="a model with state outside of its state dict")
    options = parser.parse_args(words)
    elastic_chaos.train = train
    expected: dict[str, Any] = {}
    completed = wrong = 0
    for seed in range(options.first, options.first + options.count):
        plan = Plan.of(seed, options.backend)
        plan = replace(plan, virtual=True, loaders=0, parts=0)
        if options.kept:
            plan = replace(plan, model="kept", replaces=True)
        if plan.model not in expected:
            expected[plan.model] = elastic_chaos.undisturbed(plan.model, True, 0, 0)
        outcome = elastic_chaos.run_job(plan)
        problem = elastic_chaos.check(plan, outcome, expected[plan.model])
        completed, wrong = completed + bool(outcome.results), wrong + bool(problem)
        if problem:
            print(f"seed {seed}: {problem}\n{plan}\n{outcome.describe()}", flush=True)
    print(f"{options.count} jobs, {completed} completed, {wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
