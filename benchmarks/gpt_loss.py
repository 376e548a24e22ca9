"""Compares what a small GPT has learned: `lockstep train --model gpt`, and nanoGPT's program, after
as many tokens.

The run is the one that nanoGPT's documentation shows for a CPU: 4 layers of 128 numbers, blocks of
64 characters, 12 in a step, 2,000 steps. The text is the project's documents, ASCII only, so that a
character is a byte; the last tenth is held out, and both sides are evaluated on all blocks of it. A
round is another seed.

    python benchmarks/gpt_loss.py             # some eight minutes on an idle core
    python benchmarks/gpt_loss.py --quick     # a smoke run; its figures say nothing
    python benchmarks/gpt_loss.py --write     # also the table in docs/language-models.md
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import lockstep
from common import Spread, describe_machine, markdown_table, ratio
from frame import Benchmark
from gpt_models import NANOGPT, NanoGPT, WithLoss, known_bytes, make_optimizer
from gpt_text import BETAS, CLIP, LEARNING_RATE, SIZES, WARM_UP, WEIGHT_DECAY, project_text
from lockstep.cli import main as lockstep_command
from side_nanogpt import Characters, learning_rate, step

BENCHMARK = Benchmark("gpt_loss", __doc__, "language-models.md")
BATCH = 12
STEPS = 2000
SEEDS = 2
VALIDATION = 0.1
SIZES_HERE = SIZES["small"]


def train_lockstep(text: Path, steps: int, seed: int) -> tuple[float, int]:
    """Return the loss on the text held out, and the number of tokens trained on: `steps` steps, to
    the next epoch.
    """
    train, _ = lockstep.data.text(text, SIZES_HERE.context, validation=VALIDATION)
    per_epoch = math.ceil(len(train) / BATCH)
    epochs = max(1, round(steps / per_epoch))
    run_dir = text.parent / f"run-{seed}"
    options: dict[str, Any] = {
        "model": "gpt",
        "data": f"text:{text}",
        "workers": 1,
        "run-dir": run_dir,
        "seed": seed,
        "epochs": epochs,
        "global-batch-size": BATCH,
        "lr": LEARNING_RATE,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "weight-decay": WEIGHT_DECAY,
        "max-grad-norm": CLIP,
        "warmup-epochs": min(WARM_UP / per_epoch, epochs / 4),
        **asdict(SIZES_HERE),
    }
    if lockstep_command(
        ["train", "--quiet", *(f"--{name}={value}" for name, value in options.items())]
    ):
        raise SystemExit("lockstep train failed")
    result = json.loads((run_dir / "result.json").read_text())
    return result["val_loss"], epochs * len(train) * SIZES_HERE.context


def train_nanogpt(text: Path, tokens: int, seed: int) -> float:
    """Return the loss on the text held out, after about as many `tokens`."""
    data = text.read_bytes()
    _, test = lockstep.data.text(text, SIZES_HERE.context, validation=VALIDATION)
    assert test is not None
    train = data[: len(data) - round(len(data) * VALIDATION)]
    known = known_bytes(NANOGPT, train)
    characters = Characters(train, text.parent, known)
    torch.manual_seed(seed)
    model = WithLoss(NanoGPT(len(known), SIZES_HERE))
    optimizer = make_optimizer(model)
    steps = round(tokens / BATCH / SIZES_HERE.context)
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, steps)
        step(model, optimizer, characters.batch(BATCH, SIZES_HERE.context))
    table = torch.from_numpy(characters.table.astype("int64"))
    with torch.no_grad():
        losses = [
            model(*(table[part] for part in test.collated_batch([index])))
            for index in range(len(test))
        ]
    return float(torch.stack(losses).mean())


def compare(text: bytes, steps: int, seeds: int) -> dict[str, list[float]]:
    """Return the loss of each side for each seed, and the tokens of each run."""
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {"lockstep": [], "nanogpt": [], "tokens": []}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            path = Path(folder, "documents.txt")
            path.write_bytes(text)
            loss, tokens = train_lockstep(path, steps, seed)
            losses["lockstep"].append(loss)
            losses["nanogpt"].append(train_nanogpt(path, tokens, seed))
            losses["tokens"].append(tokens)
    return losses


def as_table(losses: dict[str, list[float]]) -> str:
    """A row for each side."""
    titles = {"lockstep": "`lockstep train --model gpt`", "nanogpt": "nanoGPT's program"}
    rows = []
    for side, title in titles.items():
        mean = sum(losses[side]) / len(losses[side])
        over = Spread(**ratio(losses, side, "nanogpt")).text(3)
        rows.append(
            [title, f"{losses['tokens'][0]:,.0f}", f"{mean:.4f}", f"{math.exp(mean):.3f}", over]
        )
    return markdown_table(
        ["", "tokens", "loss on the text held out", "perplexity", "loss over nanoGPT's"], rows
    )


def parse() -> argparse.Namespace:
    return BENCHMARK.parse(BENCHMARK.parser(f"{SEEDS}, each with another seed"))


def main() -> None:
    args = parse()
    machine = describe_machine()
    text = project_text()
    steps, seeds = (20, 1) if args.quick else (STEPS, args.rounds or SEEDS)
    losses = compare(text[:20_000] if args.quick else text, steps, seeds)
    data = f"{len(text):,} characters of the project's documents"
    BENCHMARK.publish(args, machine, as_table(losses), data, losses=losses, steps=steps)


if __name__ == "__main__":
    main()
