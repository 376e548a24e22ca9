"""Counts the false alarms of the spike rule in healthy runs, and what it finds of one poisoned
sample.

Small networks train on the handwritten digits and on the text of docs/; columns of loss and norms
are kept in a folder, so that a count goes on where it ended. The rule was chosen on seeds below
100, and is counted on others:

    python benchmarks/spike_alarms.py runs/spikes --seeds 100:120
    python benchmarks/spike_alarms.py runs/spikes --seeds 100:110 --poison x1000
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import lockstep
from lockstep.proof.spikes import COLUMNS, find_spikes

DOCS = Path(__file__).resolve().parent.parent / "docs"
POISONS = ("x1000", "x30", "nan", "label")
POISONED = 700  # the sample


def mlp() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def normed() -> nn.Module:
    first = [nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)]
    second = [nn.Conv2d(8, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(256, 10))


def gpt() -> nn.Module:
    return lockstep.models.gpt(context=64, layers=2, width=64)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=3e-3)


def slow_adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Case:
    """A network, its optimizer, the samples of a step, and the steps of a run, far beyond where its
    loss is small.
    """

    make: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    batch: int
    steps: int


CASES = {
    "mlp-sgd": Case(mlp, sgd, 48, 900),
    "lenet-sgd": Case(lockstep.models.lenet, sgd, 48, 450),
    "normed-sgd": Case(normed, sgd, 48, 600),
    "mlp-adamw": Case(mlp, slow_adamw, 64, 900),
    "lenet-adamw": Case(lockstep.models.lenet, slow_adamw, 64, 450),
    "normed-adamw": Case(normed, adamw, 32, 600),
    "lenet-small-batch": Case(lockstep.models.lenet, sgd, 16, 700),
    "gpt-adamw": Case(gpt, adamw, 16, 400),
}

Data = tuple[torch.Tensor, torch.Tensor]


def batches(name: str, case: Case, seed: int, poison: str) -> Iterator[tuple[Data, bool]]:
    """The batches of a run, and whether the poisoned sample is in them."""
    generator = torch.Generator().manual_seed(seed)
    if name.startswith("gpt"):
        text = b"".join(page.read_bytes() for page in sorted(DOCS.glob("*.md")))
        tokens = torch.tensor(list(text))
        while True:
            starts = torch.randint(0, len(tokens) - 65, (case.batch,), generator=generator)
            rows = torch.stack([tokens[start : start + 65] for start in starts])
            yield (rows[:, :-1], rows[:, 1:]), False
    train, _ = lockstep.data.digits()
    images, labels = train.collated_batch(list(range(len(train))))
    while True:
        for indices in torch.randperm(len(images), generator=generator).split(case.batch)[:-1]:  # type: ignore[no-untyped-call]
            noise = 0.01 * torch.randn(len(indices), *images.shape[1:], generator=generator)
            inputs, targets = images[indices] + noise, labels[indices].clone()
            is_poisoned = indices == POISONED
            if poison.startswith("x"):
                inputs[is_poisoned] *= float(poison[1:])
            elif poison == "nan":
                inputs[is_poisoned, 0, 14, 14] = torch.nan
            elif poison == "label":
                targets[is_poisoned] = (targets[is_poisoned] + 5) % 10
            yield (inputs, targets), bool(poison) and bool(is_poisoned.any())


def train(name: str, seed: int, poison: str) -> tuple[list[list[float]], int | None]:
    """Train; returns the columns of the steps, up to one whose loss is not finite, and the first
    poisoned step.
    """
    case = CASES[name]
    torch.manual_seed(seed)
    model = case.make()
    optimizer = case.optimizer(model)
    rows: list[list[float]] = []
    poisoned: int | None = None
    for (inputs, targets), is_poisoned in batches(name, case, seed, poison):
        if len(rows) == case.steps or (rows and not rows[-1][0] < float("inf")):
            break
        if is_poisoned and poisoned is None:
            poisoned = len(rows)
        optimizer.zero_grad()
        output = model(inputs)
        loss = (
            F.cross_entropy(output.flatten(0, 1), targets.flatten())
            if name.startswith("gpt")
            else None
        )
        loss = F.cross_entropy(output, targets) if loss is None else loss
        loss.backward()  # type: ignore[no-untyped-call]
        norms = [
            torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            )
        ]
        norms.append(
            torch.nn.utils.get_total_norm([b for b in model.buffers() if b.is_floating_point()])
        )
        rows.append([loss.item(), *(float(norm) for norm in norms)])
        optimizer.step()
    return rows, poisoned


def raises_twofold(rows: list[list[float]], step: int) -> bool:
    """Whether a step has a number that is not finite, or twice the largest of the 64 before."""
    before = rows[max(0, step - 64) : step]
    largest = (
        [max(column) for column in zip(*before, strict=True)] if before else [float("inf")] * 3
    )
    return any(not value <= 2 * most for value, most in zip(rows[step], largest, strict=True))


def main() -> None:
    """Train what is missing, and print what the rule finds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the columns of the runs are kept")
    parser.add_argument("--seeds", default="100:120", help="FIRST:END (default: 100:120)")
    parser.add_argument(
        "--poison",
        default="",
        choices=POISONS,
        help="what is wrong with one sample (default: nothing)",
    )
    parser.add_argument(
        "--cases", nargs="*", choices=CASES, default=list(CASES), help="the networks (default: all)"
    )
    args = parser.parse_args()
    first, end = map(int, args.seeds.split(":"))
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    steps = alarms = poisoned_runs = raised = named = 0
    for seed in range(first, end):
        for name in args.cases:
            if args.poison and name.startswith("gpt"):
                continue
            file = args.folder / f"{name}-{args.poison or 'healthy'}-{seed}.json"
            if not file.exists():
                file.write_text(json.dumps(train(name, seed, args.poison)))
            rows, poisoned = json.loads(file.read_text())
            columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
            found = find_spikes(range(len(rows)), columns)
            if not args.poison:
                steps += len(rows)
                alarms += len(found)
                for step, spike in found:
                    print(f"{file.name}: step {step}: {spike}", flush=True)
            elif poisoned is not None:
                poisoned_runs += 1
                if raises_twofold(rows, poisoned):
                    raised += 1
                    named += any(step == poisoned for step, _ in found)
        what = f"{alarms} false alarms in {steps:,} healthy steps"
        if args.poison:
            what = f"{poisoned_runs} runs; {raised} samples raise a number twofold"
            what += f", {named} of these are found at once"
        print(f"seeds {first} to {seed}: {what}", flush=True)


if __name__ == "__main__":
    main()
