"""The other sides of the benchmark of elastic jobs: what recovers in another way from the loss of a
worker.

    torchrun ... side_elastic_others.py torchrun FOLDER STEPS
    python side_elastic_others.py ray FOLDER STEPS
    lockstep horovodrun ... side_elastic_others.py horovod FOLDER STEPS
    python side_elastic_others.py torchft FOLDER STEPS

The first is DDP over Gloo with a checkpoint after every step, the second the same in a TorchTrainer
of Ray Train, the third hvd.elastic with a commit after every step, and the last torchft with a
replica group for each worker.

Each is as its documentation shows it, on the same model, data and global batch, and notes its steps
in FOLDER/events.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from side_elastic import GLOBAL_BATCH_SIZE, SAMPLES, WORKERS, Notes, make_data, make_model

# torch's stubs lack some of its names
# mypy: disable-error-code="attr-defined,no-untyped-call"

IMAGES, LABELS = make_data()


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This worker's part of the global batch of a step."""
    per_epoch = SAMPLES // GLOBAL_BATCH_SIZE
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step // per_epoch))
    first = step % per_epoch * GLOBAL_BATCH_SIZE
    mine = order[first + rank : first + GLOBAL_BATCH_SIZE : size]
    return IMAGES[mine], LABELS[mine]


def note_end(notes: Notes, model: torch.nn.Module) -> None:
    """Note the loss over all data and a digest of the weights."""
    with torch.no_grad():
        loss = F.cross_entropy(model(IMAGES), LABELS).item()
    digest = hashlib.sha256(
        b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    ).hexdigest()
    notes.write("end", loss=loss, digest=digest)


def train_ddp(
    notes: Notes,
    steps: int,
    attempt: int,
    saved: Path | None,
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Train with DDP from a checkpoint; rank 0 makes one after every step, and `save` is called
    with it on all.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    model, optimizer = make_model("lenet")
    begin = 0
    if saved is not None:
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    ddp = DistributedDataParallel(model)
    for step in range(begin, steps):
        images, labels = batch(step, rank, size)
        optimizer.zero_grad()
        F.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
        notes.write("step", attempt, step=step, size=size)
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
    if rank == 0:
        note_end(notes, model)


def by_torchrun(notes: Notes, folder: Path, steps: int) -> None:
    path = folder / "checkpoint.pt"

    def save(state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            torch.save(state, path.with_suffix(".draft"))
            path.with_suffix(".draft").rename(path)

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # in torchrun's own store restarted workers find the addresses of the first ones (torch 2.13),
    # and often hang
    store = dist.FileStore(str(folder / f"store-{attempt}"), WORKERS)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=WORKERS)
    train_ddp(notes, steps, attempt, path if path.exists() else None, save)
    dist.barrier()
    dist.destroy_process_group()


def in_ray(config: dict[str, Any]) -> None:
    """What each worker of Ray Train runs."""
    ray_train: Any = import_module("ray.train")

    def save(state: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as draft:
            first = dist.get_rank() == 0
            if first:
                torch.save(state, Path(draft, "checkpoint.pt"))
            ray_train.report(
                {}, checkpoint=ray_train.Checkpoint.from_directory(draft) if first else None
            )

    torch.set_num_threads(1)
    notes = Notes(Path(config["folder"]))
    found = ray_train.get_checkpoint()
    if found is None:
        train_ddp(notes, config["steps"], 0, None, save)
    else:
        with found.as_directory() as saved:
            train_ddp(notes, config["steps"], 0, Path(saved, "checkpoint.pt"), save)


def by_ray(_: Notes, folder: Path, steps: int) -> None:
    ray, ray_train, ray_torch = (
        import_module(name) for name in ("ray", "ray.train", "ray.train.torch")
    )
    # workers of Ray import this file by its name; by default reports are taken, and losses seen,
    # every two seconds
    variables = {"PYTHONPATH": ":".join(sys.path), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.02"}
    os.environ.update(variables)
    ray.init(num_cpus=WORKERS, include_dashboard=False, runtime_env={"env_vars": variables})
    trainer = ray_torch.TorchTrainer(
        in_ray,
        train_loop_config={"folder": str(folder), "steps": steps},
        scaling_config=ray_train.ScalingConfig(num_workers=WORKERS),
        torch_config=ray_torch.TorchConfig(backend="gloo"),
        run_config=ray_train.RunConfig(
            storage_path=str(folder / "ray"),
            failure_config=ray_train.FailureConfig(max_failures=-1),
            checkpoint_config=ray_train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


def by_horovod(notes: Notes, _: Path, steps: int) -> None:
    import lockstep.compat.horovod.torch as hvd

    hvd.init()
    model, optimizer = make_model("lenet")
    distributed: Any = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters()
    )
    state: Any = hvd.elastic.TorchState(model=model, optimizer=distributed, step=0)
    calls = [0]

    @hvd.elastic.run
    def train(state: Any) -> None:
        calls[0] += 1
        while state.step < steps:
            images, labels = batch(state.step, hvd.rank(), hvd.size())
            state.optimizer.zero_grad()
            F.cross_entropy(state.model(images), labels).backward()
            state.optimizer.step()
            notes.write("step", calls[0], step=state.step, size=hvd.size())
            state.step += 1
            state.commit()

    train(state)
    if hvd.rank() == 0:
        note_end(notes, model)
    hvd.shutdown()


def by_torchft(notes: Notes, folder: Path, steps: int) -> None:
    """Start the lighthouse and the replica groups, one worker each, and start those that are lost
    again.
    """
    coordination: Any = import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=WORKERS - 1, join_timeout_ms=100, quorum_tick_ms=50
    )
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    words = [sys.executable, __file__, "torchft-replica", str(folder), str(steps)]
    replicas = {
        number: subprocess.Popen([*words, str(number)], env=env) for number in range(WORKERS)
    }
    while (
        any(replica.poll() is None for replica in replicas.values())
        and not (folder / "ended").exists()
    ):
        for number, replica in replicas.items():
            if replica.poll() not in (None, 0):
                replicas[number] = subprocess.Popen([*words, str(number)], env=env)
        time.sleep(0.02)
    time.sleep(0.5)
    for replica in replicas.values():
        replica.kill()
        replica.wait()
    lighthouse.shutdown()


def torchft_replica(notes: Notes, folder: Path, steps: int) -> None:
    torchft: Any = import_module("torchft")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    model, inner = make_model("lenet")

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=WORKERS - 1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"worker_{sys.argv[4]}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
    )
    managed = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    while manager.current_step() < steps:
        step = manager.current_step()
        optimizer.zero_grad()  # begins the step: a quorum
        # who takes part is known then only; the documented way is a sampler over replica groups of
        # a fixed number
        images, labels = batch(step, int(sys.argv[4]), WORKERS)
        F.cross_entropy(managed(images), labels).backward()
        optimizer.step()
        if manager.current_step() > step:
            notes.write("step", step=manager.current_step() - 1, size=manager.num_participants())
    note_end(notes, model)
    (folder / "ended").touch()
    manager.shutdown(wait=False)


SIDES: dict[str, Callable[[Notes, Path, int], None]] = {
    "torchrun": by_torchrun,
    "ray": by_ray,
    "horovod": by_horovod,
    "torchft": by_torchft,
    "torchft-replica": torchft_replica,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    here = Path(sys.argv[2])
    SIDES[sys.argv[1]](Notes(here), here, int(sys.argv[3]))
