"""Compares `lockstep.ray.launch` with Ray Train's TorchTrainer: time to the first step, and samples
per second.

Both train LeNet on two workers of one local Ray cluster with the same global batch: Lockstep with
its loader and `TrainStep`, Ray Train as its documentation shows it, with `prepare_model` (DDP over
Gloo) and `prepare_data_loader`. They take turns; the time to the first step counts from the call in
the driver to the end of the first optimizer step on rank 0. The ratio of two neighbours is one
value, and the median over the rounds counts.

    python benchmarks/ray_launch.py               # some four minutes on two idle cores
    python benchmarks/ray_launch.py --quick       # a smoke run; its figures say nothing
    python benchmarks/ray_launch.py --write       # also the table in docs/clusters.md
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from common import Spread, describe_machine, markdown_table, ratio
from frame import Benchmark

BENCHMARK = Benchmark("ray_launch", __doc__, "clusters.md")

WORKERS = 2
ROUNDS = 7
GLOBAL_BATCH = 256
STEPS = 150
WARM_UP = 10
LOCKSTEP = "lockstep.ray.launch"
RAY_TRAIN = "Ray Train"


def images(steps: int) -> Any:
    """Random images for so many steps: their content does not matter for the speed."""
    import torch

    generator = torch.Generator().manual_seed(0)
    count = GLOBAL_BATCH * steps
    labels = torch.randint(0, 10, (count,), generator=generator)
    return torch.utils.data.TensorDataset(torch.rand(count, 1, 28, 28, generator=generator), labels)


def timed(step: Callable[[Any], None], batches: Any, warm_up: int) -> dict[str, float]:
    """Make a step with each batch; when the first had ended, and the speed after the warm-up."""
    first = begin = 0.0
    count = 0
    for batch in batches:
        step(batch)
        count += 1
        first = first or time.time()
        if count == warm_up:
            begin = time.perf_counter()
    seconds = time.perf_counter() - begin
    return {"first": first, "samples_per_s": GLOBAL_BATCH * (count - warm_up) / seconds}


def by_lockstep(_: Path, steps: int, warm_up: int) -> dict[str, float]:
    import lockstep.ray

    def train() -> dict[str, float]:
        import torch

        lockstep.init("cpu")
        model = lockstep.models.lenet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        step = lockstep.TrainStep(model, optimizer, torch.nn.CrossEntropyLoss())
        loader = lockstep.Loader(images(steps), global_batch_size=GLOBAL_BATCH)
        return timed(lambda batch: float(step(batch)), loader.epoch(0), warm_up)  # type: ignore[arg-type]

    return lockstep.ray.launch(train, workers=WORKERS, threads=1)


def by_ray_train(folder: Path, steps: int, warm_up: int) -> dict[str, float]:
    ray_train = import_module("ray.train")
    ray_torch = import_module("ray.train.torch")
    path = folder / "found.json"

    def train(config: dict[str, Any]) -> None:
        import torch

        import lockstep

        torch.set_num_threads(1)
        model = ray_torch.prepare_model(lockstep.models.lenet())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loss_fn = torch.nn.CrossEntropyLoss()

        def step(batch: Any) -> None:
            inputs, targets = batch
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            loss.item()

        data = torch.utils.data.DataLoader(
            images(steps), batch_size=GLOBAL_BATCH // WORKERS, shuffle=True
        )
        found = timed(step, ray_torch.prepare_data_loader(data), warm_up)
        if ray_train.get_context().get_world_rank() == 0:
            path.write_text(json.dumps(found))

    trainer = ray_torch.TorchTrainer(
        train,
        scaling_config=ray_train.ScalingConfig(num_workers=WORKERS),
        torch_config=ray_torch.TorchConfig(backend="gloo"),
        run_config=ray_train.RunConfig(storage_path=str(folder / "ray")),
    )
    trainer.fit()
    found: dict[str, float] = json.loads(path.read_text())
    return found


SIDES = {LOCKSTEP: by_lockstep, RAY_TRAIN: by_ray_train}


def measure(rounds: int, steps: int, warm_up: int) -> dict[str, dict[str, list[float]]]:
    """Both sides in turns; the first round is not counted."""
    start: dict[str, list[float]] = {side: [] for side in SIDES}
    speed: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in list(SIDES) if number % 2 else reversed(list(SIDES)):
            with tempfile.TemporaryDirectory(prefix="ray-launch-") as folder:
                began = time.time()
                found = SIDES[side](Path(folder), steps, warm_up)
            if number > 0:
                start[side].append(found["first"] - began)
                speed[side].append(found["samples_per_s"])
        print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {"start": start, "speed": speed}


def as_table(found: dict[str, dict[str, list[float]]]) -> str:
    start = found["start"]
    speed = found["speed"]
    rows = [
        ["time to the first step", *(f"{Spread.of(start[side]).median:.2f} s" for side in SIDES)],
        ["samples per second", *(f"{Spread.of(speed[side]).median:,.0f}" for side in SIDES)],
    ]
    rows[0].append(Spread(**ratio(start, RAY_TRAIN, LOCKSTEP)).text(2) + " times quicker")
    rows[1].append(Spread(**ratio(speed, LOCKSTEP, RAY_TRAIN)).text(2) + " times as many")
    return markdown_table(["LeNet, two workers", *SIDES, "Lockstep"], rows)


def main() -> None:
    args = BENCHMARK.parse(BENCHMARK.parser(f"{ROUNDS} rounds"))
    try:
        ray = import_module("ray")
    except ImportError:
        raise SystemExit(
            "this benchmark needs Ray: pip install 'lockstep-train[ray]' 'ray[train]'"
        ) from None
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine = describe_machine()
    # one CPU more, which is none, for the controller of Ray Train
    ray.init(
        num_cpus=WORKERS + 1,
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
    )
    try:
        sizes = (2 * WARM_UP, WARM_UP) if args.quick else (STEPS, WARM_UP)
        found = measure(args.rounds or (1 if args.quick else ROUNDS), *sizes)
    finally:
        ray.shutdown()
    machine["ray"] = ray.__version__
    spreads = {
        what: {side: asdict(Spread.of(each)) for side, each in sides.items()}
        for what, sides in found.items()
    }
    what = (
        f"images of 28×28 pixels, global batch {GLOBAL_BATCH}, one thread a worker; Ray "
        f"{ray.__version__}"
    )
    BENCHMARK.publish(args, machine, as_table(found), what, values=found, spreads=spreads)


if __name__ == "__main__":
    main()
