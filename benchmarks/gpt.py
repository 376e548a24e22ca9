"""Measures how many tokens per second a small GPT is trained on: Lockstep, and nanoGPT's program
under torchrun.

There are two models of the same sizes, `lockstep.models.gpt` and nanoGPT's (gpt_models.py), each
with an optimizer of its own, and two loops: `Trainer.fit` (side_gpt.py), and nanoGPT's with Gloo
(side_nanogpt.py). Each loop trains each model, so that what the loop costs and what the model costs
are told apart. All have the same text and global batch, on one worker and on two with one thread
each. Nothing is compiled, as nanoGPT's documentation says for a CPU. All jobs of a size are started
at once and take turns: a round is one block of steps of each, every second round in the opposite
order. A block's first steps, and the first round, are not counted. A round gives one ratio; the
median over the rounds counts.

    python benchmarks/gpt.py             # some nine minutes on two idle cores
    python benchmarks/gpt.py --quick     # a smoke run; its figures say nothing
    python benchmarks/gpt.py --write     # also the table in docs/language-models.md
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from common import Spread, describe_machine, markdown_table, ratio
from frame import Benchmark, chosen
from gpt_models import LOCKSTEP, NANOGPT, GPTJob
from gpt_text import SIZES, TITLES
from turns import command_of, last_losses, speeds_of, train_in_turns

BENCHMARK = Benchmark("gpt", __doc__, "language-models.md")
WORKERS = (1, 2)

# loop → (title, script, whether torchrun starts it when there are several workers)
LOOPS = {
    LOCKSTEP: ("`Trainer.fit`", "side_gpt.py", False),
    NANOGPT: ("nanoGPT's loop, torchrun", "side_nanogpt.py", True),
}
OWNERS = {LOCKSTEP: "`lockstep.models.gpt`", NANOGPT: "nanoGPT's model"}

Side = tuple[str, str, int]
"""(whose loop, whose model, workers)."""


@dataclass(frozen=True)
class Case:
    """What is trained, and in blocks of how many steps: a few seconds each."""

    model: str
    global_batch_size: int
    warm_up: int
    timed_steps: int
    rounds: int

    def job(self, side: Side, meter: str) -> GPTJob:
        """One side's job; the first round is not counted."""
        _, owner, workers = side
        return GPTJob(
            self.model,
            self.global_batch_size,
            self.warm_up,
            self.timed_steps,
            epochs=self.rounds + 1,
            workers=workers,
            meter=meter,
            owner=owner,
        )

    @property
    def tokens(self) -> int:
        """In the timed steps of a block."""
        return self.timed_steps * self.global_batch_size * SIZES[self.model].context


CASES = [
    Case("small", global_batch_size=24, warm_up=2, timed_steps=30, rounds=12),
    Case("characters", global_batch_size=4, warm_up=1, timed_steps=4, rounds=12),
]


def start_of(loop: str, job: GPTJob) -> list[str]:
    """How a user starts this loop: plain Python for one worker; for more, torchrun or Lockstep's
    own launcher.
    """
    _, script, by_torchrun = LOOPS[loop]
    python, *rest = command_of(script, job)
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.workers}"]
    return [python, *(several if by_torchrun and job.workers > 1 else []), *rest]


def measure(case: Case) -> dict[Side, list[dict[str, float]]]:
    """What each side's rank 0 reported in every round."""

    def programs(folder: str) -> dict[Side, tuple[list[str], GPTJob]]:
        sides = [
            (loop, owner, workers) for loop in LOOPS for owner in OWNERS for workers in WORKERS
        ]
        jobs = {side: case.job(side, f"{folder}/{'-'.join(map(str, side))}") for side in sides}
        return {side: (start_of(side[0], job), job) for side, job in jobs.items()}

    return train_in_turns(TITLES[case.model], case.rounds, programs)


def summarise(case: Case, speeds: dict[Side, list[float]]) -> list[dict[str, Any]]:
    """A row for each model and number of workers."""
    return [
        {
            "model": case.model,
            "global_batch_size": case.global_batch_size,
            "workers": workers,
            "owner": owner,
            "tokens_per_second": {
                loop: asdict(Spread.of(speeds[loop, owner, workers])) for loop in LOOPS
            },
            "over_same_model": ratio(speeds, (LOCKSTEP, owner, workers), (NANOGPT, owner, workers)),
            "over_nanogpt": ratio(speeds, (LOCKSTEP, owner, workers), (NANOGPT, NANOGPT, workers)),
        }
        for workers in WORKERS
        for owner in OWNERS
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    header = [
        "",
        *(f"{title}, tokens/s" for title, _, _ in LOOPS.values()),
        "the loops, of one model",
        "`Trainer.fit` over nanoGPT's loop and model",
    ]
    return markdown_table(
        header,
        [
            [
                f"{TITLES[row['model']]}, {row['global_batch_size']} blocks in a step, "
                f"{row['workers']} worker{'s'[: row['workers'] != 1]}: {OWNERS[row['owner']]}",
                *(f"{row['tokens_per_second'][loop]['median']:,.0f}" for loop in LOOPS),
                Spread(**row["over_same_model"]).text(2),
                Spread(**row["over_nanogpt"]).text(2),
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
                ", ".join(map(str, side)): value for side, value in speeds.items()
            },
            "last_mean_loss": {
                ", ".join(map(str, side)): value for side, value in last_losses(found).items()
            },
        }
    BENCHMARK.publish(
        args, machine, as_table(rows), "the project's documents", rows=rows, measured=kept
    )


if __name__ == "__main__":
    main()
