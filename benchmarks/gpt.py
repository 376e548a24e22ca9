"""Measures how many tokens per second a small GPT is trained on: Lockstep, and nanoGPT's program
under torchrun.

Both sides train a GPT of the same sizes on the same text with the same global batch, on one worker
and on two with one thread each: `lockstep.models.gpt` with `Trainer.fit` (side_gpt.py), and
nanoGPT's model and loop with Gloo (side_nanogpt.py). Nothing is compiled, as nanoGPT's
documentation says for a CPU. All jobs of a size are started at once and take turns: a round is one
block of steps of each, every second round in the opposite order. A block's first steps, and the
first round, are not counted. A round gives one ratio; the median over the rounds counts.

    python benchmarks/gpt.py             # some four minutes on two idle cores
    python benchmarks/gpt.py --quick     # a smoke run; its figures say nothing
    python benchmarks/gpt.py --write     # also the table in docs/language-models.md
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from common import Spread, describe_machine, markdown_table, ratio
from frame import Benchmark, chosen
from gpt_text import SIZES, TITLES
from meter import Job
from turns import command_of, last_losses, speeds_of, train_in_turns

BENCHMARK = Benchmark("gpt", __doc__, "language-models.md")
WORKERS = (1, 2)

# name → (title, script, whether torchrun starts it when there are several workers)
SIDES = {
    "lockstep": ("Lockstep", "side_gpt.py", False),
    "nanogpt": ("nanoGPT, torchrun", "side_nanogpt.py", True),
}

SideAt = tuple[str, int]
"""(side, workers)."""


@dataclass(frozen=True)
class Case:
    """What is trained, and in blocks of how many steps: a few seconds each."""

    model: str
    global_batch_size: int
    warm_up: int
    timed_steps: int
    rounds: int

    def job(self, workers: int, meter: str) -> Job:
        """One side's job; the first round is not counted."""
        epochs = self.rounds + 1
        return Job(
            self.model,
            self.global_batch_size,
            self.warm_up,
            self.timed_steps,
            epochs,
            workers,
            meter,
        )

    @property
    def tokens(self) -> int:
        """In the timed steps of a block."""
        return self.timed_steps * self.global_batch_size * SIZES[self.model].context


CASES = [
    Case("small", global_batch_size=24, warm_up=2, timed_steps=30, rounds=12),
    Case("characters", global_batch_size=4, warm_up=1, timed_steps=4, rounds=12),
]


def start_of(side: str, job: Job) -> list[str]:
    """How a user starts this side: plain Python for one worker; for more, torchrun or Lockstep's
    own launcher.
    """
    _, script, by_torchrun = SIDES[side]
    python, *rest = command_of(script, job)
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.workers}"]
    return [python, *(several if by_torchrun and job.workers > 1 else []), *rest]


def measure(case: Case) -> dict[SideAt, list[dict[str, float]]]:
    """What each side's rank 0 reported in every round, at each number of workers."""

    def programs(folder: str) -> dict[SideAt, tuple[list[str], Job]]:
        keys = [(side, workers) for side in SIDES for workers in WORKERS]
        jobs = {
            (side, workers): case.job(workers, f"{folder}/{side}-{workers}")
            for side, workers in keys
        }
        return {key: (start_of(key[0], job), job) for key, job in jobs.items()}

    return train_in_turns(TITLES[case.model], case.rounds, programs)


def summarise(case: Case, speeds: dict[SideAt, list[float]]) -> list[dict[str, Any]]:
    """A row for each number of workers."""
    return [
        {
            "model": case.model,
            "global_batch_size": case.global_batch_size,
            "workers": workers,
            "tokens_per_second": {side: asdict(Spread.of(speeds[side, workers])) for side in SIDES},
            "lockstep_over_nanogpt": ratio(speeds, ("lockstep", workers), ("nanogpt", workers)),
        }
        for workers in WORKERS
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    header = [
        "",
        *(f"{title}, tokens/s" for title, _, _ in SIDES.values()),
        "Lockstep over nanoGPT",
    ]
    return markdown_table(
        header,
        [
            [
                f"{TITLES[row['model']]}, {row['global_batch_size']} blocks in a step: "
                f"{row['workers']} worker{'s'[: row['workers'] != 1]}",
                *(f"{row['tokens_per_second'][side]['median']:,.0f}" for side in SIDES),
                Spread(**row["lockstep_over_nanogpt"]).text(2),
            ]
            for row in rows
        ],
    )


def parse() -> argparse.Namespace:
    parser = BENCHMARK.parser("12")
    parser.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    return BENCHMARK.parse(parser, "model")


def main() -> None:
    args = parse()
    machine = describe_machine()
    rows = []
    kept = {}
    for case in chosen(CASES, args, global_batch_size=4, timed_steps=2):
        found = measure(case)
        speeds = speeds_of(found, case.tokens)
        rows += summarise(case, speeds)
        kept[case.model] = {
            "case": asdict(case),
            "tokens_per_second": {
                f"{side}, {workers}": value for (side, workers), value in speeds.items()
            },
            "last_mean_loss": {
                f"{side}, {workers}": value for (side, workers), value in last_losses(found).items()
            },
        }
    BENCHMARK.publish(
        args, machine, as_table(rows), "the project's documents", rows=rows, measured=kept
    )


if __name__ == "__main__":
    main()
