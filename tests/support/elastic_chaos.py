"""Elastic jobs under random faults: workers are killed, stopped, told to leave and added at named
points of a training.

Run as a program it tries many seeds: ``python tests/support/elastic_chaos.py 100 --first 0
--backend shm``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import lockstep
from lockstep import environment
from lockstep.elastic import client as client_module
from lockstep.elastic.membership import Coordinator, HostMemory, Up
from lockstep.environment import ElasticWorker
from lockstep.job.messages import FromAnyWorker, Hello
from lockstep.launcher.workers import Workers
from lockstep.parallel import bucket_exchange, one_bucket, optimizer_shards, reducer
from lockstep.parallel.optimizer_shards import OptimizerShards
from lockstep.proof.ledger import values_of
from lockstep.training.step.separable_updates import check_separable

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.optimizers import DIVISIBLE, MasterSGD

__all__ = ["Outcome", "Plan", "Point", "run_job", "undisturbed"]

STEPS_PER_EPOCH, EPOCHS, VIRTUAL_WORKERS, BATCH = 7, 3, 6, 18
REGROUPING = ("leave group", "arrive", "form", "share", "shared")
POINTS = (
    *(
        "load",
        "forward",
        "backward",
        "bucket",
        "between",
        "reduced",
        "update",
        "updated",
        "late",
        "evaluation",
    ),
    *("save", *REGROUPING),
)
PROOF_POINTS = (
    *("check weights", "checked", "spike", "spike decided", "restore", "restored"),
    *("open ledger", "opened ledger", "record", "recorded", "fingerprint"),
)
MOVING = ("owners", "owners found", "move", "moved", "hand over", "handed over")
UPDATING = (
    *("copy", "copied", "unscale", "unscaled", "meet", "met"),
    *("update", "updated", "give out", "within", "given out"),
)
POISONED = 9  # a step with a spike, in the second epoch
LIMIT_S = 40.0


@dataclass(frozen=True)
class Point:
    """A fault: `what` happens to `worker` when it passes `place` for the `count`-th time."""

    worker: int
    place: str
    count: int
    what: str  # "kill", "stop" (and continue a moment later) or "leave"


@dataclass(frozen=True)
class Plan:
    """A job: its first workers, its faults, and when others join (seconds after the first view).

    Attributes:
        waits: whether the training waits for workers that start to join, which it would be over
            before.
        virtual: whether there are virtual workers; without them, losses are equal up to rounding.
        ddp: whether gradients are then averaged by DistributedDataParallel, as those of large
            models.
        on_spike: "skip" or "rollback" with a spike, the cross-check and a ledger; "" without.
        loaders: the number of loader processes of each worker.
        parts: of an iterable data set with the samples; 0 for one whose samples have indices.
        shards: whether the optimizer's state is divided among the workers.
        precision: of the training; with "fp16" gradients overflow now and then.
        optimizer: the name of one of `DIVISIBLE`; "" for that of the model.
        again: whether another trainer of the same optimizer trains again.
    """

    workers: int
    model: str
    backend: str
    faults: tuple[Point, ...]
    joins: tuple[float, ...]
    replaces: bool
    saves: bool
    waits: bool = False
    virtual: bool = True
    loaders: int = 0
    parts: int = 0
    ddp: bool = False
    on_spike: str = ""
    shards: bool = False
    precision: str = "fp32"
    optimizer: str = ""
    again: bool = False

    @classmethod
    def of(cls, seed: int, backend: str | None = None) -> Plan:
        """Return the plan of a seed."""
        draw = random.Random(seed)
        workers = draw.randrange(1, 5)
        faults = tuple(cls._fault(draw, workers) for _ in range(draw.randrange(1, 6)))
        joins = tuple(draw.random() * 0.25 for _ in range(draw.randrange(0, 3)))
        model, chosen = draw.choice(["norm", "plain"]), draw.choice(["shm", "gloo"])
        plan = cls(
            workers,
            model,
            backend or chosen,
            faults,
            joins,
            draw.random() < 0.6,
            draw.random() < 0.5,
        )
        if draw.random() < 0.2:
            plan = replace(plan, model="lenet")
        if draw.random() < 0.15:
            plan = plan.averaged(draw.choice(["plain", "lenet"]), ddp=draw.random() < 0.5)
        plan = replace(plan, waits=draw.random() < 0.3, loaders=2 * (draw.random() < 0.1))
        return replace(plan, parts=draw.choice([1, 3]) if draw.random() < 0.2 else 0)

    def averaged(self, model: str, ddp: bool) -> Plan:
        """Return the plan without virtual workers."""
        # over Gloo a wait of DDP may not end for half an hour, see docs/elastic.md
        return replace(
            self, model=model, virtual=False, ddp=ddp, backend="shm" if ddp else self.backend
        )

    def proving(self, seed: int) -> Plan:
        """Return the plan with a ledger, a spike and the cross-check, and faults where these act."""
        draw = random.Random(f"proof {seed}")
        workers = draw.randrange(2, 5)
        count = draw.randrange(1, 4)
        faults = tuple(self._fault(draw, workers, PROOF_POINTS) for _ in range(count))
        return replace(
            self,
            workers=workers,
            model="norm",
            faults=faults,
            saves=True,
            virtual=True,
            ddp=False,
            loaders=0,
            parts=0,
            on_spike=draw.choice(["skip", "rollback"]),
        )

    def sharding(self, seed: int) -> Plan:
        """Return the plan with an optimizer that is divided among the workers, and most faults
        within its update.
        """
        draw = random.Random(f"shards {seed}")
        workers = draw.randrange(2, 5)
        place = UPDATING[seed % len(UPDATING)]
        first = Point(draw.randrange(workers), place, draw.randrange(1, 16), "kill")
        others = tuple(
            self._fault(draw, workers, draw.choice([UPDATING, (*MOVING, *REGROUPING), POINTS]))
            for _ in range(draw.randrange(3))
        )
        faults = (first, *others)
        plan = replace(
            self,
            workers=workers,
            model=draw.choice(["norm", "plain", "wide"]),
            faults=faults,
            virtual=True,
            ddp=False,
            loaders=0,
            parts=0,
            shards=True,
        )
        kind = draw.random()
        if kind < 0.25:
            plan = replace(plan, precision="fp16")
        elif kind < 0.5:
            plan = plan.averaged(draw.choice(["plain", "wide"]), ddp=draw.random() < 0.5)
        if plan.virtual and draw.random() < 0.7:
            plan = plan.optimized_by(draw.choice(list(DIVISIBLE)))
        return replace(plan, again=draw.random() < 0.3)

    def optimized_by(self, optimizer: str) -> Plan:
        """Return the plan with one of `DIVISIBLE`, with virtual workers: else rounding makes others
        of the updates of those that look at signs.
        """
        model = "matrices" if optimizer == "muon" else self.model
        return replace(self, model=model, optimizer=optimizer, virtual=True, ddp=False)

    @staticmethod
    def _fault(draw: random.Random, workers: int, places: Sequence[str] = POINTS) -> Point:
        place = draw.choice(places)
        rare = (*REGROUPING, *MOVING, "restore", "restored", "open ledger")
        most = 3 if place in rare else 16
        count = draw.randrange(1, most)
        return Point(
            draw.randrange(workers + 2),
            place,
            count,
            draw.choice(["kill", "kill", "kill", "stop", "leave"]),
        )


@dataclass
class Outcome:
    """How a job has ended: the result of each worker that completed it, what happened, the workers
    with errors, how many have joined, and what is in the ledger."""

    results: list[dict[str, Any]]
    events: list[str]
    failure: str
    errors: list[str] = field(default_factory=list)
    joined: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the events in lines."""
        return "\n".join([*self.events, f"failure: {self.failure}"])


# --- the program of a worker
# --------------------------------------------------------------------------------


class Seen(nn.Module):
    """A buffer outside of normalisation that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x


class Kept(nn.Module):
    """What a state dict does not have: a buffer that is not in it, a layer that is trained later,
    one that stops.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last, self.norm, self.first = nn.Linear(16, 3), nn.BatchNorm1d(16), nn.Linear(6, 16)
        self.first.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean().bfloat16()
        hidden = self.norm(self.first(x.bfloat16()))
        return self.last(hidden.tanh()) * (1 + self.seen) + self.table.mean()  # type: ignore[no-any-return]

    def change(self) -> None:
        """Train another layer, keep another one as it is, and let a table grow."""
        self.first.requires_grad_(True)
        self.norm.eval()
        self.table = torch.ones(5).bfloat16()


class Changes(lockstep.callbacks.Callback):
    """Changes the model once."""

    every_rank = True

    def on_train_epoch_start(self, trainer: Any) -> None:
        if trainer.epoch == 1:
            trainer.model.change()


class Iterated(torch.utils.data.IterableDataset[Any]):
    """The samples of a data set, for each loader process every so many."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.dataset[index] for index in range(first, len(self.dataset), step))


def make_trainer(
    plan: Plan, run_dir: Path | None, callbacks: list[Any]
) -> tuple[Any, nn.Module, Any]:
    torch.manual_seed(0)
    n = BATCH * STEPS_PER_EPOCH - 3
    shape = (1, 28, 28) if plan.model == "lenet" else (6,)
    data: Any = torch.utils.data.TensorDataset(torch.randn(n, *shape), torch.randint(0, 3, (n,)))
    proof: dict[str, Any] = {}
    if plan.on_spike:
        spoil(data)
        # A copy before each step: it does not depend on when the workers changed.
        proof["on_spike"] = lockstep.OnSpike(plan.on_spike, copy_every=1)
        proof |= {"cross_check": 2, "fingerprint_every": 3}
    if plan.parts:
        data = lockstep.data.Substreams(Iterated(data), plan.parts)
    if plan.model == "lenet":
        net: nn.Module = lockstep.models.lenet()
        optimizer: Any = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
        options: dict[str, Any] = {}
    elif plan.model == "kept":
        net = Kept()
        optimizer, options = MasterSGD(net.parameters(), 0.02), {}
        callbacks = [*callbacks, Changes()]
    elif plan.model == "norm":
        net = nn.Sequential(
            *(
                nn.Linear(6, 16),
                nn.BatchNorm1d(16),
                nn.ReLU(),
                Seen(),
                nn.Dropout(0.3),
                nn.Linear(16, 3),
            )
        )
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        options = {"max_grad_norm": 1.0}
    elif plan.model == "wide":  # a tensor is sent by itself
        layers = nn.Linear(6, 450), nn.Tanh(), nn.Linear(450, 600, bias=False), nn.Linear(600, 3)
        net = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(net.parameters(), 0.001, fused=True)
        options = {"max_grad_norm": 1.0}
    elif plan.model == "matrices":
        sizes = (6, 24, 16, 3)
        linear = [nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)]
        net = nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])
        optimizer, options = torch.optim.AdamW(net.parameters(), 0.01), {}
    else:
        net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
        optimizer, options = torch.optim.AdamW(net.parameters(), 0.01), {}
    if plan.optimizer:
        optimizer = DIVISIBLE[plan.optimizer](net.parameters())
    if plan.shards:
        check_separable(optimizer)
        optimizer.same_bits = True  # the hooks that let it meet its faults change nothing
        options["shard_optimizer"] = True
    trainer = lockstep.Trainer(
        *(net, optimizer, nn.CrossEntropyLoss(), BATCH),
        seed=3,
        num_workers=plan.loaders,
        virtual_workers=VIRTUAL_WORKERS if plan.virtual else None,
        precision=plan.precision,
        run_dir=run_dir,
        async_save=run_dir is not None and len(plan.faults) % 2 == 0,
        callbacks=callbacks,
        **options,
        **proof,
    )
    return trainer, net, data


def another_trainer(plan: Plan, first: Any, callbacks: list[Any]) -> Any:
    """Return another trainer of the same model and optimizer."""
    return lockstep.Trainer(
        *(first.model, first.optimizer, nn.CrossEntropyLoss(), BATCH),
        seed=4,
        virtual_workers=VIRTUAL_WORKERS if plan.virtual else None,
        precision=plan.precision,
        callbacks=callbacks,
        shard_optimizer=plan.shards,
    )


def spoil(data: torch.utils.data.TensorDataset) -> None:
    """Spoil a sample: it is in the step `POISONED`, and in one of each other epoch."""
    first = lockstep.Loader(data, BATCH, seed=3, virtual_workers=VIRTUAL_WORKERS)
    epoch, step = divmod(POISONED, STEPS_PER_EPOCH)
    index = int(first.order(epoch)[step * BATCH + 4])
    data.tensors[0][index] = 1e6


class Chaos:
    """Lets a worker meet its faults."""

    def __init__(self, number: int, faults: tuple[Point, ...]) -> None:
        self.faults = [fault for fault in faults if fault.worker == number]
        self.counts: dict[str, int] = {}

    def pass_by(self, place: str) -> None:
        self.counts[place] = self.counts.get(place, 0) + 1
        for fault in self.faults:
            if fault.place == place and fault.count == self.counts[place]:
                self.meet(fault)

    def meet(self, fault: Point) -> None:
        if fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.what == "leave":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            stopped, waker = psutil.Process(), os.fork()
            if waker == 0:
                while stopped.is_running() and stopped.status() != psutil.STATUS_STOPPED:
                    time.sleep(0.0002)  # a signal to go on that came first would be lost
                time.sleep(random.Random(f"{fault}").random() * 0.3)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.waitpid(waker, 0)

    def soon(self, place: str) -> None:
        """Pass by a moment later, in the middle of what follows."""
        self.counts[place] = self.counts.get(place, 0) + 1
        for fault in self.faults:
            if fault.place == place and fault.count == self.counts[place] and fault.what == "kill":
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(
                    signal.ITIMER_REAL, random.Random(fault.count).random() * 0.003 + 1e-5
                )

    def before(self, owner: Any, name: str, place: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            self.soon(place)
            return original(*args)

        setattr(owner, name, call)

    def around(self, owner: Any, name: str, place: str, after: str = "") -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.pass_by(place)
            result = original(*args, **kwargs)
            if after:
                self.pass_by(after)
            return result

        setattr(owner, name, call)


def arm(chaos: Chaos, trainer: Any, net: nn.Module) -> None:
    """Set the named points of the training."""
    from lockstep.checkpoint.folder import CheckpointStore
    from lockstep.communicator.elastic_communicator import ElasticCommunicator
    from lockstep.data.fetching import Fetcher
    from lockstep.proof.cross_check import CrossCheck
    from lockstep.proof.ledger import LedgerWriter
    from lockstep.proof.on_spike import SpikeGuard, StateCopy
    from lockstep.training import recovery
    from lockstep.training.step.precision import Precision

    next(net.children()).register_forward_hook(
        lambda *_: chaos.pass_by("forward" if net.training else "evaluation")
    )
    next(net.parameters()).register_hook(lambda _: chaos.pass_by("backward"))
    chaos.around(bucket_exchange.BucketExchange, "start", "bucket")
    chaos.around(bucket_exchange.BucketExchange, "add_up", "between")
    chaos.around(one_bucket.OneBucket, "average", "bucket", "between")
    for owner, name in ((reducer.Reducer, "finish"), (one_bucket.OneBucket, "average")):
        chaos.before(owner, name, "late")

    def begin_update(*_: Any) -> None:
        chaos.pass_by("reduced")
        chaos.soon("update")

    trainer.optimizer.register_step_pre_hook(begin_update)
    trainer.optimizer.register_step_post_hook(lambda *_: chaos.pass_by("updated"))
    chaos.around(CheckpointStore, "save", "save")
    chaos.around(Fetcher, "fetch", "load")
    chaos.around(ElasticCommunicator, "leave_group", "leave group")
    chaos.around(client_module.MembershipClient, "regroup", "arrive")
    chaos.around(ElasticCommunicator, "_make_group", "form")
    chaos.around(recovery, "share", "share", "shared")
    chaos.around(CrossCheck, "before_update", "check weights", "checked")
    chaos.around(SpikeGuard, "before_update", "spike", "spike decided")
    chaos.around(StateCopy, "restore", "restore", "restored")
    chaos.around(LedgerWriter, "__init__", "open ledger", "opened ledger")
    chaos.around(LedgerWriter, "step", "record", "recorded")
    chaos.around(LedgerWriter, "fingerprint", "fingerprint")
    chaos.around(OptimizerShards, "copy_gradients", "copy", "copied")
    chaos.around(Precision, "unscale", "unscale", "unscaled")
    chaos.around(OptimizerShards, "gradient_norms", "meet", "met")
    chaos.around(OptimizerShards, "give_out", "give out", "given out")
    chaos.before(optimizer_shards._Values, "finish", "within")
    chaos.around(OptimizerShards, "find_owners", "owners", "owners found")
    chaos.around(OptimizerShards, "_receive", "move", "moved")
    chaos.around(OptimizerShards, "regroup", "hand over", "handed over")


class Losses(lockstep.callbacks.Callback):
    """On rank 0: the losses of all steps, each once."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])

    def on_loss(self, trainer: Any, result: Any, loss: float) -> None:
        self.losses.append(loss)


class Count(lockstep.callbacks.Callback):
    """On every rank: the number of steps, each once. Waits in a step while the job says so."""

    every_rank = True

    def __init__(self, hold: Path) -> None:
        self.steps, self.hold = 0, hold

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def on_train_step_end(self, trainer: Any, result: Any) -> None:
        self.steps += 1
        while self.hold.exists():
            time.sleep(0.002)


class Starts(lockstep.callbacks.Callback):
    """On every rank: what an evaluation gives before the first step, also on workers that join
    later.
    """

    every_rank = True

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}

    def on_train_start(self, trainer: Any) -> None:
        self.measured = trainer.evaluate(trainer.held_out)


class Complete(lockstep.callbacks.Callback):
    """On every rank: the checkpoints that are complete, each once, with the files on disk."""

    every_rank = True

    def __init__(self) -> None:
        self.names: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self.names)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.names = list(state["names"])

    def on_checkpoint_complete(self, trainer: Any, path: Path) -> None:
        assert (path / "manifest.json").exists(), path
        assert path.name not in self.names, f"{path} is told of again"
        self.names.append(path.name)


def train(plan: Plan, number: int, run_dir: Path | None, result: Path) -> None:
    """Train, as one worker, and write what has come out."""
    losses, count, starts = Losses(), Count(result.with_name("hold")), Starts()
    callbacks: list[Any] = [losses, count, starts]
    if run_dir is not None:
        callbacks += [lockstep.callbacks.CSVLog(), lockstep.callbacks.Checkpoints("2steps")]
        callbacks.append(Complete())
        callbacks.append(lockstep.callbacks.TensorBoard(1))
    if plan.virtual and not plan.shards:
        callbacks.append(lockstep.callbacks.GradientNoise(1))
    trainer, net, data = make_trainer(plan, run_dir, callbacks)
    trainer.held_out = data
    if plan.precision == "fp16":
        scaler = trainer.step.precision._scaler
        scaler._init_scale = 2.0**26  # some of the first steps are skipped
        scaler.set_growth_interval(2)  # and others later
    chaos = Chaos(number, plan.faults)
    if hasattr(trainer.comm, "client"):
        arm(chaos, trainer, net)
    history = trainer.fit(data, EPOCHS, validate=data)
    if plan.again:
        losses, count, starts = Losses(), Count(result.with_name("hold")), Starts()
        trainer = another_trainer(plan, trainer, [losses, count, starts])
        trainer.held_out = data
        history = trainer.fit(data, EPOCHS, validate=data)
    if trainer.comm.is_joining:
        return  # it has come too late, and has the model as it began
    timed = "seconds", "samples_per_second"
    rows: list[dict[str, Any]] = [
        {name: row[name] for name in row if name not in timed} for row in history
    ]
    for row in rows:
        row["noise_scale"] = str(
            row.get("noise_scale")
        )  # which may be nan, that is equal to nothing
    found: dict[str, Any] = {
        "fingerprint": trainer.step.fingerprint(),
        "history": rows,
        "steps": count.steps,
        "at the start": starts.measured if plan.virtual else None,
    }
    if trainer.comm.rank == 0:
        found["losses"] = losses.losses
    draft = result.with_suffix(".draft")
    draft.write_text(json.dumps(found))
    draft.rename(result)


def ledger_of(run_dir: Path) -> dict[str, Any]:
    """Return what is in the ledger of a run: the steps, in order, all computations of steps, in any
    order, and what else happened, as JSON has it.
    """
    found = lockstep.ledger(run_dir)

    def rows(steps: Any) -> list[Any]:
        return [[int(row["step"]), int(row["flags"]), *map(repr, values_of(row))] for row in steps]

    everything = [*rows(found.steps), *rows(found.recomputed)]
    return {
        "steps": rows(found.steps),
        "computed": sorted(map(list, {tuple(row) for row in everything})),
        "fingerprints": [list(map(int, row)) for row in found.fingerprints.tolist()],
        "rollbacks": sorted(map(list, set(found.rollbacks))),
        "faults": found.faults,
        "damaged": found.damaged,
    }


@cache
def undisturbed(
    model: str,
    virtual: bool,
    loaders: int,
    parts: int,
    on_spike: str = "",
    shards: bool = False,
    precision: str = "fp32",
    optimizer: str = "",
    again: bool = False,
) -> dict[str, Any]:
    """Return the result of a run without faults on one worker."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result")
        plan = Plan(
            1, model, "shm", (), (), False, False, virtual=virtual, loaders=loaders, parts=parts
        )
        plan = replace(plan, on_spike=on_spike, shards=shards)
        plan = replace(plan, precision=precision, optimizer=optimizer, again=again)
        run_dir = Path(folder, "run") if on_spike else None
        train(plan, 0, run_dir, path)
        found: dict[str, Any] = json.loads(path.read_text())
        if run_dir is not None:
            found["ledger"] = ledger_of(run_dir)
    return found


# --- the job
# ------------------------------------------------------------------------------------------------


def become_worker(plan: Plan, number: int, joins: bool, folder: Path, socket: str) -> None:
    """The whole life of a worker's process."""
    os.setpgid(0, 0)
    log = os.open(folder / f"log-{number}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    rank = min(plan.workers, VIRTUAL_WORKERS - 1) if joins else number
    variables = environment.position_variables(
        rank, rank + 1 if joins else plan.workers, rank, rank + 1
    )
    variables |= environment.elastic_variable(ElasticWorker(number, socket, joins))
    variables |= {
        "LOCKSTEP_LAUNCHED": "1",
        "LOCKSTEP_TRANSPORT": plan.backend,
        "LOCKSTEP_WATCHDOG_DIR": str(folder / "watch"),
    }
    environment.set_variables(variables)
    import faulthandler

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if plan.ddp:
        one_bucket.MOST_BYTES = 0
    code = 0
    try:
        train(plan, number, folder / "run" if plan.saves else None, folder / f"result-{number}")
    except SystemExit:
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 3
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_job(plan: Plan, limit_s: float = LIMIT_S) -> Outcome:
    """Run a job with the faults of a plan in forks of this process."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        return _Job(plan, Path(name)).run(limit_s)


class _Job:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        (folder / "watch").mkdir()
        self.coordinator = Coordinator(plan.workers)
        self.selector = selectors.DefaultSelector()
        self.memory = HostMemory(0)
        self.workers = Workers(folder, self.selector, self.receive, FromAnyWorker | Up)
        self.pids: dict[int, int] = {}
        self.started, self.begun = 0, time.monotonic()
        self.events: list[str] = []
        self.errors: list[str] = []
        self.joined: set[int] = set()

    def note(self, text: str) -> None:
        self.events.append(f"{time.monotonic() - self.begun:.3f} {text}")

    def receive(self, number: int, message: Up) -> None:
        self.memory.note_up(number, message)
        if isinstance(message, Hello):
            for value in self.memory.values_for(number):
                self.workers.send(number, value)
        self.coordinator.receive(number, message)

    def start(self) -> None:
        number, self.started = self.started, self.started + 1
        joins = self.coordinator.formed >= 0
        context: Any = multiprocessing.get_context("fork")
        process: BaseProcess = context.Process(
            target=become_worker, args=(self.plan, number, joins, self.folder, self.workers.path)
        )
        process.start()
        self.pids[number] = process.pid or 0
        self.coordinator.started(number)
        self.memory.started(number, joins)
        self.workers.add(number, process)
        self.note(f"worker {number} started{' to join' if joins else ''}")

    def run(self, limit_s: float) -> Outcome:
        for _ in range(self.plan.workers):
            self.start()
        joins, view, first = sorted(self.plan.joins), (), None
        try:
            while self.pids:
                for key, _ in self.selector.select(0.05):
                    key.data()
                for number in list(self.workers.ended):
                    self.ended(number)
                self.send()
                if self.coordinator.view != view:
                    view, first = self.coordinator.view, first or time.monotonic()
                    self.joined.update(number for number in view if number >= self.plan.workers)
                    self.note(f"generation {self.coordinator.generation}: {view}")
                while joins and first is not None and time.monotonic() - first > joins[0]:
                    joins.pop(0)
                    if not self.coordinator.complete:
                        self.start()
                if self.coordinator.failure:
                    break
                if time.monotonic() - self.begun > limit_s:
                    self.show_stacks()
                    return Outcome([], self.events, "it hangs")
                self.hold()
                self.dismiss()
        finally:
            for pid in self.pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.workers.close()
        results = [
            json.loads(path.read_text())
            for path in self.folder.glob("result-*")
            if path.suffix != ".draft"
        ]
        # steps that are left out are not shown
        is_whole = results and not self.plan.on_spike
        if is_whole and (self.folder / "run" / "tensorboard").exists():
            steps = steps_of_events(self.folder / "run" / "tensorboard")
            if steps != list(range(1, 1 + EPOCHS * STEPS_PER_EPOCH)):
                self.errors.append(f"other steps in TensorBoard: {steps}")
        outcome = Outcome(
            results, self.events, self.coordinator.failure, self.errors, len(self.joined)
        )
        if results and self.plan.on_spike:
            outcome.ledger = ledger_of(self.folder / "run")
        return outcome

    def hold(self) -> None:
        """Let the members wait in a step for those that start to join, if the plan says so."""
        path, coordinator = self.folder / "hold", self.coordinator
        starting = any(
            coordinator._workers[number].status.value == "started"
            for number in coordinator.candidates
        )
        if self.plan.waits and starting and coordinator.formed >= 0:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def send(self) -> None:
        while self.coordinator.to_keep:
            message = self.coordinator.to_keep.popleft()
            for number in self.memory.keep(message):
                self.workers.send(number, message)
            self.coordinator.answer_kept(message.worker, message.request)
        for number, told in self.coordinator.take_messages():
            self.memory.note_down(number, told)
            self.workers.send(number, told)

    def dismiss(self) -> None:
        """End those that would join when all is done: no member is left, as a program may have
        several trainings.
        """
        if self.coordinator.complete and not self.coordinator.members:
            for number in self.coordinator.candidates:
                if number in self.pids:
                    os.kill(self.pids[number], signal.SIGKILL)

    def ended(self, number: int) -> None:
        del self.pids[number]
        code = self.workers.remove(number).code or 0
        self.note(f"worker {number} ended with {code}")
        was_member = number in self.coordinator.members
        self.memory.ended(number, code == 0)
        if code == 0:
            self.coordinator.left(number)
        else:
            self.coordinator.lost(number)
        if code > 0:
            self.events.append((self.folder / f"log-{number}").read_text())
            self.errors.append(f"worker {number} has failed")
        if (
            code < 0
            and was_member
            and self.plan.replaces
            and not self.coordinator.complete
            and self.started < 12
        ):
            self.start()

    def show_stacks(self) -> None:
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        for number in self.pids:
            self.events.append(
                f"--- worker {number}\n" + (self.folder / f"log-{number}").read_text()
            )


def steps_of_events(folder: Path) -> list[int]:
    """Return the steps whose losses are in the event files of a run, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars("loss/train")]


def check(plan: Plan, outcome: Outcome, expected: dict[str, Any]) -> str:
    """Return what is wrong with an outcome; "" if nothing is."""
    refused = [text for text in outcome.events if "lockstep.errors.ConfigError" in text]
    if refused:  # after which the others lose a worker outside of the training
        return refused[0]
    is_single = sum(fault.what != "stop" for fault in plan.faults) <= 1
    if outcome.failure and plan.shards and is_single and plan.workers > 1:
        return f"one worker was lost: {outcome.failure}"
    if outcome.failure in (
        "all workers that had the training's state were lost",
        "a worker was lost outside of the training",
    ):
        return ""  # the launcher starts all again
    if outcome.failure:
        return outcome.failure
    if not outcome.results:
        everyone_left = all(fault.what == "leave" for fault in plan.faults)
        return "" if everyone_left else "no worker has completed the training"
    if outcome.errors:
        return outcome.errors[0]
    for name, value in outcome.ledger.items():
        if name == "fingerprints":
            # who has taken over from rank 0 does not know the content of its part of the batch
            for row, other in zip(value, expected["ledger"][name], strict=False):
                row[4] = row[4] or other[4]
        if value != expected["ledger"][name]:
            return f"{name} in the ledger: {value}, expected {expected['ledger'][name]}"
    return next(filter(None, (_compare(plan, result, expected) for result in outcome.results)), "")


def _compare(plan: Plan, result: dict[str, Any], expected: dict[str, Any]) -> str:
    if not plan.virtual:
        losses = [[row["train_loss"] for row in found["history"]] for found in (result, expected)]
        if (
            len(losses[0]) != len(losses[1])
            or max(abs(a - b) for a, b in zip(*losses, strict=True)) > 1e-5
        ):
            return f"other losses: {losses}"
    elif result["fingerprint"] != expected["fingerprint"]:
        return "another fingerprint"
    elif result["history"] != expected["history"]:
        return f"another history: {result['history']}, expected {expected['history']}"
    seen = result.get("losses", expected.get("losses", []))  # of rank 0 only
    if len(seen) != len(expected.get("losses", [])):
        return f"steps that rank 0's callbacks have seen: {len(seen)}"
    if plan.virtual and seen != expected.get("losses", []):
        return f"other losses seen by callbacks: {seen}"
    if result.get("at the start") != expected.get("at the start"):
        return f"another evaluation before the first step: {result['at the start']}"
    if result.get("steps") != expected.get("steps"):
        return f"steps that a callback of every rank has seen: {result['steps']}"
    return ""


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
        "--averaged", action="store_true", help="no virtual workers, DDP for every second seed"
    )
    parser.add_argument(
        "--proof", action="store_true", help="a ledger, a spike, the cross-check, and faults there"
    )
    parser.add_argument(
        "--shard-optimizer",
        action="store_true",
        help="an optimizer that is divided among the workers, and faults within its update",
    )
    parser.add_argument(
        "--optimizers",
        action="store_true",
        help="with --shard-optimizer, one of those that can be divided after the other",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="another trainer of the same optimizer trains again",
    )
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(words)
    if options.optimizers and not options.shard_optimizer:
        parser.error("--optimizers: expected --shard-optimizer with it")
    torch.set_num_threads(1)
    undisturbed("plain", True, 0, 0)  # what workers are forked from has loaded what they need
    bad = completed = joined = 0
    for seed in range(options.first, options.first + options.count):
        plan = Plan.of(seed, options.backend)
        if options.kept:
            plan = replace(
                plan, model="kept", virtual=True, loaders=0, parts=0, waits=True, replaces=True
            )
        if options.averaged:
            plan = plan.averaged(plan.model.replace("norm", "plain"), ddp=seed % 2 == 1)
        if options.proof:
            plan = plan.proving(seed)
        if options.shard_optimizer:
            plan = plan.sharding(seed)
        if options.optimizers:
            plan = plan.optimized_by(list(DIVISIBLE)[seed % len(DIVISIBLE)])
        if options.again:
            plan = replace(plan, again=True)
        begun = time.monotonic()
        outcome = run_job(plan, options.limit)
        kind = plan.model, plan.virtual, plan.loaders, plan.parts, plan.on_spike, plan.shards
        expected = undisturbed(*kind, plan.precision, plan.optimizer, plan.again)
        wrong = check(plan, outcome, expected)
        bad, completed, joined = (
            bad + bool(wrong),
            completed + bool(outcome.results),
            joined + outcome.joined,
        )
        if wrong or options.verbose:
            print(
                f"seed {seed}: {wrong or 'fine'} in {time.monotonic() - begun:.2f} s: {plan}",
                flush=True,
            )
        if wrong:
            print(outcome.describe(), flush=True)
    print(f"{options.count} jobs, {completed} completed, {joined} workers joined, {bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
