"""How right `lockstep plan` is: predicted from two workers at most, against steps that are
measured.

For each of 5 models, one worker and two are profiled once. Steps on 6 networks with 2 to 8 workers
are predicted from that, and measured on emulated networks in dilated time. Two workers without an
emulated network, over shared memory and over Gloo, are predicted from one.

A shared host may be a third slower a minute later, and workers on emulated hosts, which sleep half
of the time, disturb each other less than two that compute at the same time. So two workers on an
emulated network without any delay are timed before and after each measurement (the pace), and the
profile's times are multiplied by how much slower they are.

    python benchmarks/plan.py                    # a part of the whole: a quarter of an hour
    python benchmarks/plan.py --minutes 60       # goes on where the last run has stopped
    python benchmarks/plan.py --model lenet,gpt  # some of the models
    python benchmarks/plan.py --quick            # a smoke run; its figures say nothing
    python benchmarks/plan.py --write            # also the tables in docs/planning.md
    python benchmarks/plan.py --example          # only the example there and its picture, a minute

Every step that was measured is kept at once in results/plan-kept.json, with the profiles, so that a
run can be interrupted; results/plan.json has the steps alone. Workers come in the order 2, 8, 4, 6,
3, 5, 7, so that a part of the whole has all models and networks. --fresh measures all again,
--profiles the profiles alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import lockstep
from common import DOCS, RESULTS, describe_machine, keep_freed_memory, markdown_table, write_between
from frame import Benchmark
from lockstep import environment
from lockstep.errors import LockstepError
from lockstep.messages import convert, encode
from lockstep.network import AUTO_DILATION, VirtualNetwork, parse_link
from lockstep.planning.collective_costs import Fabric, MeasuredCollective
from lockstep.planning.measurement import Curve
from lockstep.planning.prediction import STANDS_STILL, Forecast, Job, predict
from lockstep.planning.profiling import Program, record_profiles
from lockstep.planning.step_profile import Pass, Profile
from lockstep.system import atomic_files

BENCHMARK = Benchmark("plan", __doc__ or "", "planning.md")
SCRIPT = str(Path(__file__).with_name("side_plan.py"))

BATCHES = {"lenet": 256, "resnet18": 16, "mlp": 256, "gpt": 32, "convnet": 32}
TITLES = {
    "lenet": "LeNet",
    "resnet18": "ResNet-18",
    "mlp": "MLP of 10 M parameters",
    "gpt": "GPT of 0.8 M parameters",
    "convnet": "convolutions, 6.5 M parameters",
}
# Gloo itself moves some 10 Gbit/s on one host: a faster network cannot be emulated with these
# models' gradients.
NETWORKS = ("1gbe", "1Gbit,1ms", "2.5Gbit,50us", "5Gbit,50us", "10gbe", "10Gbit,500us")
ORDER = (2, 8, 4, 6, 3, 5, 7)

NO_DELAY = "1000Gbit,0us"

PROFILE_STEPS = 60
MEASURED_STEPS = 60
FEWEST_STEPS = 4
PATIENCE_S = 8.0  # of one measurement; slow steps are fewer
PACE_S = 5.0
TURNS = 3  # of two workers, alone and together


# --- What is measured
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One number of workers of one model on one network, predicted and measured; seconds."""

    model: str
    network: str
    workers: int
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    pace_s: float = 0.0
    """The step of two workers on an emulated network without delay, before and after; 0 without an
    emulated network.
    """

    @property
    def error(self) -> float:
        """Relative, without its sign."""
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def is_covered(self) -> bool:
        """Whether what was measured lies in the interval."""
        return self.low_s <= self.measured_s <= self.high_s


def program(model: str, steps: int) -> Program:
    return Program((SCRIPT, model, str(BATCHES[model])), threads=1, steps=steps)


def profile(model: str, steps: int) -> dict[int, list[Profile]]:
    """The model on one worker and on two, with batches as small as one of eight has."""
    return {
        count: record_profiles(
            program(model, steps), count, count / 8, title=f"{model}: profile of {count}"
        )
        for count in (1, 2)
    }


def pace(model: str, profiles: dict[int, list[Profile]]) -> float:
    """How long a step of two workers takes now on an emulated network without delay."""
    return measure(
        model, NO_DELAY, 2, forecasts(profiles, NO_DELAY)[2].step_s, MEASURED_STEPS, PACE_S
    )


def pace_factor(profiles: dict[int, list[Profile]], pace_s: float) -> float:
    """How much longer computing takes on emulated hosts than in the profiles."""
    return pace_s / forecasts(profiles, NO_DELAY)[2].step_s


def forecasts_at(
    profiles: dict[int, list[Profile]], network: str, pace_s: float
) -> dict[int, Forecast]:
    """The forecasts from the profiles as they would be at this pace."""
    factor = pace_factor(profiles, pace_s)
    return forecasts(
        {count: [_scaled(each, factor) for each in ranks] for count, ranks in profiles.items()},
        network,
    )


def _scaled(profile: Profile, factor: float) -> Profile:
    steps = []
    for step in profile.steps:
        times = {
            name: getattr(step, name) * factor
            for name in ("loader_s", "wait_s", "update_s", "other_s")
        }
        passes = tuple(
            Pass(each.forward_s * factor, each.backward_s * factor) for each in step.passes
        )
        ready = tuple(each * factor if each > 0 else each for each in step.ready_s)
        steps.append(msgspec.structs.replace(step, **times, passes=passes, ready_s=ready))
    return msgspec.structs.replace(profile, steps=tuple(steps))


def forecasts(profiles: dict[int, list[Profile]], network: str) -> dict[int, Forecast]:
    job = Job(profiles, Fabric(parse_link(network), checks_calls=True))
    return {each.workers: each for each in predict(job, range(1, 9))}


def measure(
    model: str,
    network: str,
    workers: int,
    expected_s: float,
    steps: int,
    patience_s: float = PATIENCE_S,
) -> float:
    """The median step on an emulated network, in its own time."""
    emulated = VirtualNetwork(workers, parse_link(network), dilation=AUTO_DILATION)
    emulated = emulated.resolved(workers, environment.usable_cores())
    fewer = max(FEWEST_STEPS, min(steps, int(patience_s / (expected_s * emulated.dilation))))
    title = f"{model} on {network}, {workers} workers, dilation {emulated.dilation:g}"
    ranks = record_profiles(
        program(model, fewer), workers, network=emulated, durations_only=True, title=title
    )
    return statistics.median(each.median_s for each in ranks) / emulated.dilation


# --- Two workers without an emulated network
# --------------------------------------------------------------------------


def time_all_reduces(
    transport: str, sizes: Sequence[int], rounds: int
) -> tuple[dict[int, float], float]:
    """Seconds that an all-reduce adds to computing, by its bytes, and bytes copied per second, on
    one of two workers.

    DDP starts it while the cores compute: then each of the threads that move its messages waits for
    a core.
    """
    keep_freed_memory()
    comm = lockstep.init("cpu", transport=transport)
    square = torch.ones(256, 256)

    def compute() -> None:
        for _ in range(8):
            torch.mm(square, square).clamp_(-1, 1)

    def seconds(run: Callable[[], object]) -> float:
        dist.barrier(comm.group)
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    tensors = {size: torch.zeros(size // 4) for size in sizes}

    def beside_computing(tensor: torch.Tensor) -> None:
        work: Any = dist.all_reduce(tensor, group=comm.group, async_op=True)
        compute()
        work.wait()

    added: dict[int, list[float]] = {size: [] for size in sizes}
    for _, size in itertools.product(range(rounds), sizes):
        alone_s = seconds(compute)
        added[size].append(seconds(partial(beside_computing, tensors[size])) - alone_s)
    found = {
        size: max(1e-6, statistics.median(each[rounds // 3 :])) for size, each in added.items()
    }
    source = torch.zeros(4 << 20)
    target = torch.zeros(4 << 20)
    return found, source.nbytes / statistics.median(
        seconds(lambda: target.copy_(source)) for _ in range(rounds)
    )


def two_workers(model: str, transport: str, quick: bool, turns: int) -> Row:
    """Two workers from one: from two jobs of one worker each, run at the same time, and the
    measured transport.

    Both kinds of jobs take turns, as this host is faster and slower by the minute.
    """
    sizes = [64, 1 << 12, 1 << 16, 1 << 20, 4 << 20, 16 << 20]
    points, copies = lockstep.launch(
        time_all_reduces, transport, sizes, 6 if quick else 30, workers=2, threads=1
    )
    curve = MeasuredCollective(
        Curve.fit({float(size): seconds for size, seconds in points.items()})
    )
    job_of = partial(two_workers_job, curve=curve, copies=copies)
    predictions = []
    ratios = []
    measured = []
    steps = 6 if quick else PROFILE_STEPS // turns
    with environment.with_variables({"LOCKSTEP_TRANSPORT": transport}):
        for turn in range(turns):
            title = f"{model} over {transport}, turn {turn + 1} of {turns}"
            alone = record_profiles(
                program(model, steps), 2, 1 / 2, alone=True, title=f"{title}: two alone"
            )
            real = record_profiles(
                program(model, steps), 2, durations_only=True, title=f"{title}: two together"
            )
            (found,) = predict(job_of(alone), [2])
            predictions.append(found)
            measured.append(statistics.median(each.median_s for each in real))
            ratios.append(found.step_s / measured[-1])
    middle = ratios.index(statistics.median_low(ratios))
    found = predictions[middle]
    return Row(model, transport, 2, found.step_s, found.low_s, found.high_s, measured[middle])


def two_workers_job(alone: list[Profile], curve: MeasuredCollective, copies: float) -> Job:
    """Two workers with a thread each on two cores: what moves data takes its time from
    computing.
    """
    fabric = Fabric(None, 2, inside={"all_reduce": curve})
    return Job({1: alone}, fabric, slowdown=STANDS_STILL, copy_bandwidth=copies)


# --- What was found
# --------------------------------------------------------------------------------------------------


def verdicts(rows: Sequence[Row], alone: dict[str, tuple[float, float]]) -> list[bool]:
    """For each next number of workers that was measured, whether it was rightly predicted to pay,
    or not to.
    """
    found = []
    for _, group in itertools.groupby(
        sorted(rows, key=_place), key=lambda row: (row.model, row.network)
    ):
        known = list(group)
        pairs = [alone[known[0].model], *((row.predicted_s, row.measured_s) for row in known)]
        found += [(a[0] > b[0]) == (a[1] > b[1]) for a, b in itertools.pairwise(pairs)]
    return found


def _place(row: Row) -> tuple[str, str, int]:
    return row.model, row.network, row.workers


def summary(rows: Sequence[Row], right: Sequence[bool]) -> list[str]:
    """The figures of one line of the table: what they are about comes before."""
    errors = sorted(row.error for row in rows)
    worst = (
        statistics.quantiles(errors, n=20, method="inclusive")[-1] if len(errors) > 1 else errors[0]
    )
    covered = statistics.mean(row.is_covered for row in rows)
    judged = f"{statistics.mean(right):.0%}" if right else ""
    return [
        str(len(rows)),
        f"{statistics.median(errors):.1%}",
        f"{worst:.1%}",
        f"{covered:.0%}",
        judged,
    ]


def tables(rows: Sequence[Row], plain: Sequence[Row], alone: dict[str, tuple[float, float]]) -> str:
    header = [
        "emulated",
        "steps",
        "median error",
        "95th percentile",
        "in the 90 % interval",
        "one more pays: right",
    ]
    lines = []
    for model in BATCHES:
        of_model = [row for row in rows if row.model == model]
        if of_model:
            lines.append([TITLES[model], *summary(of_model, verdicts(of_model, alone))])
    if rows:
        lines.append(["all", *summary(rows, verdicts(rows, alone))])
    by_workers = defaultdict(list)
    for row in rows:
        by_workers[row.workers].append(row)
    counts = [[f"{count} workers", *summary(of, [])] for count, of in sorted(by_workers.items())]
    text = (
        markdown_table(header, [*lines, *counts]) if rows else "no steps on emulated networks yet"
    )
    if plain:
        shown = [
            [
                TITLES[row.model],
                row.network,
                *(f"{1e3 * seconds:.1f} ms" for seconds in (row.predicted_s, row.measured_s)),
                f"{row.predicted_s / row.measured_s - 1:+.1%}",
            ]
            for row in plain
        ]
        text += "\n\n" + markdown_table(
            ["two workers, from one", "over", "predicted", "measured", "error"], shown
        )
    return text


# --- Running
# --------------------------------------------------------------------------------------------------


class Kept:
    """What has been measured so far, in a file.

    Args:
        path: None to keep nothing.
        fresh: whether to begin anew.
    """

    def __init__(self, path: Path | None, fresh: bool) -> None:
        self._path = path
        self.data: dict[str, Any] = {"profiles": {}, "emulated": [], "plain": []}
        if path is not None and path.exists() and not fresh:
            self.data |= json.loads(path.read_text())

    def profiles(self, model: str, steps: int) -> dict[int, list[Profile]]:
        """The profiles of a model, which are measured if they are not there."""
        if model not in self.data["profiles"]:
            made = profile(model, steps)
            self.data["profiles"][model] = {
                n: [json.loads(encode(one)) for one in ranks] for n, ranks in made.items()
            }
            self.save()
        found = self.data["profiles"][model]
        return {int(n): [convert(one, Profile) for one in ranks] for n, ranks in found.items()}

    def rows(self, kind: str) -> list[Row]:
        """The rows that were measured: "emulated" or "plain"."""
        return [Row(*each) for each in self.data[kind]]

    def add(self, kind: str, row: Row) -> None:
        """Keep a further row."""
        self.data[kind].append(list(vars(row).values()))
        self.save()

    def save(self) -> None:
        """Write the file."""
        if self._path is not None:
            atomic_files.write_json(self._path, self.data)


def left_to_measure(
    models: Sequence[str], kept: Kept, quick: bool
) -> Iterator[tuple[str, str, int]]:
    done = {(row.model, row.network, row.workers) for row in kept.rows("emulated")}
    orders = (ORDER[:1], NETWORKS[:1]) if quick else (ORDER, NETWORKS)
    for workers, model, network in itertools.product(orders[0], models, orders[1]):
        if (model, network, workers) not in done:
            yield model, network, workers


def run(args: argparse.Namespace, models: Sequence[str]) -> Kept:
    """Measure what is not yet known, until the time is over."""
    until = time.monotonic() + 60 * args.minutes
    path = None if args.quick else RESULTS / "plan-kept.json"
    kept = Kept(path, args.fresh)
    steps = 6 if args.quick else PROFILE_STEPS
    for model in models:
        if args.profiles:
            kept.data["profiles"].pop(model, None)
        kept.profiles(model, steps)
    done = {(row.model, row.network) for row in kept.rows("plain")}
    for model, transport in itertools.product(models, ("shm", "gloo")):
        if (model, transport) not in done and time.monotonic() < until:
            kept.add(
                "plain",
                two_workers(
                    model, transport, args.quick, args.rounds or (1 if args.quick else TURNS)
                ),
            )
    before: tuple[str, float] = ("", 0.0)
    for model, network, workers in left_to_measure(models, kept, args.quick):
        if time.monotonic() > until:
            print("the time is over; run it again to go on")
            break
        profiles = kept.profiles(model, steps)
        if before[0] != model:
            before = model, pace(model, profiles)
        expected_s = forecasts(profiles, network)[workers].step_s
        try:
            measured = measure(
                model, network, workers, expected_s, 4 if args.quick else MEASURED_STEPS
            )
        except LockstepError as error:
            print(f"{model} on {network}, {workers} workers: {str(error).splitlines()[0]}")
            continue
        after = model, pace(model, profiles)
        pace_s = statistics.mean((before[1], after[1]))
        each = forecasts_at(profiles, network, pace_s)[workers]
        before = after
        row = Row(model, network, workers, each.step_s, each.low_s, each.high_s, measured, pace_s)
        kept.add("emulated", row)
        figures = (
            f"{1e3 * each.step_s:9.1f} ms {1e3 * measured:9.1f} ms "
            f"{row.predicted_s / measured - 1:+6.1%}"
        )
        print(
            f"{model:9} {network:13} {workers} {figures}  pace {pace_factor(profiles, pace_s):.2f}",
            flush=True,
        )
    return kept


def predicted_again(kept: Kept, steps: int) -> list[Row]:
    """The rows, with predictions of the code as it is now: measuring takes long, predicting does
    not.
    """
    again = []
    for row in kept.rows("emulated"):
        each = forecasts_at(kept.profiles(row.model, steps), row.network, row.pace_s)[row.workers]
        again.append(replace(row, predicted_s=each.step_s, low_s=each.low_s, high_s=each.high_s))
    return again


def one_worker(kept: Kept, models: Sequence[str], steps: int) -> dict[str, tuple[float, float]]:
    """The step of one worker, predicted and measured, by model; both at the pace of the emulated
    steps.
    """
    found = {}
    for model in models:
        profiles = kept.profiles(model, steps)
        paces = [
            pace_factor(profiles, row.pace_s) for row in kept.rows("emulated") if row.model == model
        ]
        factor = statistics.median(paces or [1.0])
        found[model] = (
            factor * forecasts(profiles, NETWORKS[0])[1].step_s,
            factor * profiles[1][0].median_s,
        )
    return found


# --- The example in the documentation
# ---------------------------------------------------------------------------------

EXAMPLE = ("--workers", "1..8", "--network", "1gbe", "--price", "0.50")


def write_example() -> None:
    """Plan for the example script of DDP, and put what is printed and drawn into the
    documentation.
    """
    words = ["lockstep", "plan", *EXAMPLE, "examples/ddp.py"]
    picture = ["--picture", "docs/figures/plan.png"]
    command = [sys.executable, "-m", *words[:2], *picture, *words[2:]]
    ended = subprocess.run(command, cwd=DOCS.parent, stdout=subprocess.PIPE, text=True, check=True)
    lines = [
        line.rstrip() for line in ended.stdout.splitlines() if not line.startswith("picture: ")
    ]
    text = "```console\n$ " + " ".join(words) + "\n" + "\n".join(lines).strip() + "\n```"
    write_between(DOCS / "planning.md", "plan-example", text)
    print(ended.stdout)


def main() -> None:
    parser = BENCHMARK.parser("3 of two workers over shm and Gloo")
    parser.add_argument("--model", help=f"some of {','.join(BATCHES)}")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="stop after so long (default: 15)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what is in the results")
    parser.add_argument(
        "--profiles", action="store_true", help="profile again, and predict what is kept from that"
    )
    parser.add_argument(
        "--example", action="store_true", help="measure the example of the documentation alone"
    )
    args = BENCHMARK.parse(parser, "model", "example")
    if args.example:
        write_example()
        return
    chosen = args.model or ("lenet" if args.quick else ",".join(BATCHES))
    models = [name.strip() for name in chosen.split(",")]
    if unknown := [name for name in models if name not in BATCHES]:
        parser.error(f"--model: expected some of {', '.join(BATCHES)}, got {unknown[0]!r}")
    machine = describe_machine()
    steps = 6 if args.quick else PROFILE_STEPS
    kept = run(args, models)
    rows = predicted_again(kept, steps)
    text = tables(rows, kept.rows("plain"), one_worker(kept, models, steps))
    found = {"emulated": [list(vars(row).values()) for row in rows], "plain": kept.data["plain"]}
    BENCHMARK.publish(args, machine, text, "images and tokens of random numbers", **found)


if __name__ == "__main__":
    main()
