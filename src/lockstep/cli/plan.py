"""``lockstep plan``: predicts what more workers on a network would bring to a user's script."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import arguments
from ..activity import Activity
from ..errors import ConfigError
from .parser import Help, can_draw

if TYPE_CHECKING:
    from ..planning.collective_costs import Fabric
    from ..planning.prediction import Forecast, Job
    from ..planning.profiling import Program
    from ..planning.step_profile import Profile

_DESCRIPTION = """\
Predict what N workers on a given network would bring, before anybody pays for
them. The script runs for some 40 steps on one worker, and on two where there
are cores. Its steps are recorded and then simulated with more workers: the
median duration of a step with a 90 % interval, the speed-up, and what limits it.

The script is the user's own, unmodified: with Lockstep's Trainer, TrainStep,
prepare or OrderedReducer, or with torch's DistributedDataParallel. It ends
after these steps; its weights are set back after each. A Trainer's run
directory is a temporary one; other files that the script writes are written.

Experimental: may change in any release.
"""

_EXAMPLES = """
examples:
  lockstep plan train.py                        up to 16 workers on 25 Gbit/s
  lockstep plan --workers 1..64 --network 10Gbit,50us train.py --lr 0.1
  lockstep plan --network 100gbe --per-host 8 --price 2.5 train.py
  lockstep bench -o network.json                measure a network first
  lockstep plan --network network.json train.py
  lockstep plan --held-out train.py             compare with what can be measured here
  lockstep plan --json plan.json --picture plan.png train.py

exit codes: 0; 2 for bad input; that of the script if it fails
"""

_OWN_OPTIONS = (
    "--workers",
    "--network",
    "--per-host",
    "--price",
    "--held-out",
    "--json",
    "--picture",
    "--no-picture",
)
_MOST_WORKERS = 100_000
_MOST_ROWS = 24
_LAST_TRANSPORTS = ("gloo", "mpi4py")


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="predict whether more workers will pay",
        usage="%(prog)s [options] script [arguments]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("script", help="a Python file; with -m, a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is the name of a module"
    )
    asked = parser.add_argument_group("what to predict")
    asked.add_argument(
        "--workers", metavar="N..M", default="1..16", help="1..64, or 1,2,4,8 (default: 1..16)"
    )
    network = "FILE of `lockstep bench`, a bandwidth and a latency, or a name (default: 25gbe)"
    asked.add_argument("--network", metavar="NETWORK", default="25gbe", help=network)
    asked.add_argument(
        "--transport", metavar="NAME", help="of the file: shm, gloo, … (default: the script's)"
    )
    asked.add_argument(
        "--per-host", metavar="K", default="1", help="workers on each host (default: 1)"
    )
    batch = (
        "whether workers divide the script's batch or each has its own: global, per-worker "
        "(default: as it does)"
    )
    asked.add_argument("--batch", metavar="KIND", default="auto", help=batch)
    asked.add_argument("--price", metavar="PER_HOUR", help="of one worker, in any currency")
    measured = parser.add_argument_group("what to measure")
    measured.add_argument("--steps", metavar="N", default="30", help="measured steps (default: 30)")
    measured.add_argument(
        "--threads", metavar="N", help="threads of a worker (default: cores / workers)"
    )
    measured.add_argument(
        "--one", action="store_true", help="profile one worker only, though there are more cores"
    )
    compare = "measure all numbers of workers for which there are cores, and compare"
    measured.add_argument("--held-out", action="store_true", help=compare)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE", help="also write everything as JSON, for programs"
    )
    output.add_argument("--picture", metavar="FILE", help="(default: plan.png)")
    output.add_argument("--no-picture", action="store_true", help="draw none")
    output.add_argument("--debug", action="store_true", help="print the traceback of an error")
    parser.set_command(run_command, full_tracebacks=True)


def parse_counts(text: str) -> list[int]:
    """Return the numbers of workers that ``1..64``, ``1,2,4`` or ``8`` stands for, ascending.

    Raises:
        ConfigError: it is none of them.
    """
    first, dots, last = text.partition("..")
    if dots:
        low = arguments.parse_whole("--workers", first, least=1)
        high = arguments.parse_whole("--workers", last, least=1, most=_MOST_WORKERS)
        if low > high:
            raise ConfigError("--workers", "N..M with N at most M, such as 1..64", text)
        return list(range(low, high + 1))
    parts = [part.strip() for part in text.split(",")]
    return sorted(
        {arguments.parse_whole("--workers", part, least=1, most=_MOST_WORKERS) for part in parts}
    )


def _check_files(parsed: argparse.Namespace) -> None:
    """Check before the measurement that the results can be written after it.

    A picture that was not asked for is left out, with a line, where it cannot be drawn.
    """
    if parsed.picture is None:
        parsed.picture = "plan.png"
        parsed.no_picture = parsed.no_picture or not can_draw("lockstep plan")
    elif not parsed.no_picture:
        arguments.require_package("matplotlib", "--picture", "plots")
    files = {"--json": parsed.json, "--picture": None if parsed.no_picture else parsed.picture}
    for flag, name in files.items():
        if name is not None:
            arguments.output_file(flag, name)
    if files["--picture"] is not None and Path(parsed.picture).suffix not in (
        ".png",
        ".svg",
        ".pdf",
    ):
        raise ConfigError("--picture", "a file that ends in .png, .svg or .pdf", parsed.picture)


def _check_transport(network: Any, transport: str | None) -> None:
    """Check before the measurement that the network has the transport that is given."""
    from ..network import Link

    if transport is None:
        return
    if isinstance(network, Link):
        raise ConfigError("--transport", "none without a FILE of `lockstep bench`", transport)
    arguments.choice("--transport", transport, network.transports)


def _note_options_of_the_script(words: Sequence[str]) -> None:
    """Say so if words after the script look like options of this command, which might be meant."""
    misplaced = [word for word in words[1:] if word.partition("=")[0] in _OWN_OPTIONS]
    if misplaced and words[1] != "--":
        text = (
            f"{', '.join(misplaced)} after {words[0]} goes to the script; write it before "
            f"{words[0]} for lockstep plan"
        )
        print(f"lockstep plan: {text}", file=sys.stderr)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    counts = parse_counts(parsed.workers)
    steps = arguments.parse_whole("--steps", parsed.steps, least=1, most=10_000)
    per_host = arguments.parse_whole("--per-host", parsed.per_host, least=1)
    price = None
    if parsed.price is not None:
        expected = "an amount per hour and worker, 0 or more"
        price = arguments.parse_number(
            "--price", parsed.price, least=0, below=1e12, expected=expected
        )
    arguments.choice("--batch", parsed.batch, ("auto", "global", "per-worker"))
    threads = (
        None
        if parsed.threads is None
        else arguments.parse_whole("--threads", parsed.threads, least=1)
    )
    _check_files(parsed)
    from ..planning.measurement import find_network

    network = find_network(parsed.network, "--network")
    _check_transport(network, parsed.transport)
    with Activity("lockstep plan: loading PyTorch"):
        from ..planning.prediction import predict
        from ..planning.profiling import Program
    words = [str(parsed.script), *map(str, parsed.arguments)]
    _note_options_of_the_script(words)
    if words[1:2] == ["--"]:
        del words[1]
    program = Program(tuple(words), parsed.module, threads, steps)
    profiles = _record(program, max(counts), parsed.one)
    from ..planning.prediction import Job

    is_global = _batch_is_global(parsed.batch, profiles)
    fabric = _fabric(network, parsed.transport, profiles, per_host)
    job = Job(
        profiles,
        fabric,
        is_global,
        slowdown=_slowdown(network, parsed.transport),
        price_per_hour=price,
    )
    forecasts = predict(job, counts)
    held_out = _held_out(program, job, network) if parsed.held_out else []
    _publish(parsed, job, forecasts, held_out, _noise_of(network, parsed.transport, profiles))
    return 0


def _record(program: Program, most: int, only_one: bool) -> dict[int, list[Profile]]:
    """Profile the script on one worker, and on two if there are cores for them."""
    from .. import environment
    from ..planning.profiling import record_profiles

    title = f"lockstep plan: {program.words[0]}"
    share = 1 / max(most, 2)
    profiles = {1: record_profiles(program, 1, share, title=f"{title} on 1 worker")}
    first = profiles[1][0]
    divisible = first.virtual_workers != 1 and first.global_batch != 1
    if not only_one and most > 1 and environment.usable_cores() >= 2 and divisible:
        profiles[2] = record_profiles(
            program, 2, min(1.0, 2 * share), title=f"{title} on 2 workers"
        )
    return profiles


def _batch_is_global(kind: str, profiles: Mapping[int, Sequence[Profile]]) -> bool:
    """Return whether the script divides its batch: Lockstep's loaders do; of a DDP script two
    workers show it.
    """
    first = profiles[1][0]
    if kind != "auto":
        return kind == "global"
    if first.global_batch:
        return True
    return 2 in profiles and profiles[2][0].batch < 0.75 * first.batch


def _fabric(
    network: Any, transport: str | None, profiles: Mapping[int, Sequence[Profile]], per_host: int
) -> Fabric:
    from ..network import Link
    from ..planning.collective_costs import Fabric

    used = profiles[max(profiles)][0].backend
    if isinstance(network, Link):
        return Fabric(network, per_host, checks_calls=used != "gloo")
    return Fabric.of_measurement(network, _transport(network, transport, profiles), per_host)


def _transport(
    network: Any, transport: str | None, profiles: Mapping[int, Sequence[Profile]]
) -> str:
    """Return the name of the measured transport that counts: as given, or else the script's if it
    was measured.
    """
    used = profiles[max(profiles)][0].backend
    known = list[str](network.transports)
    names = (transport,) if transport is not None else (used, "shm", *_LAST_TRANSPORTS, *known)
    return next((name for name in names if name in known), names[0])


def _noise_of(
    network: Any, transport: str | None, profiles: Mapping[int, Sequence[Profile]]
) -> list[str]:
    """Return, in words, that the measured transport is no result, if so."""
    from ..network import Link

    if (
        isinstance(network, Link)
        or (measured := network.transports[_transport(network, transport, profiles)]).is_result
    ):
        return []
    told = (
        "The network is as measured, though parts of the measurement differ by "
        f"{100 * measured.noise:.0f} %"
    )
    return [f"{told}: measure it again on idle hosts, or longer."]


def _slowdown(network: Any, transport: str | None) -> float:
    """Return by how much longer computing takes while something is sent, as measured, or else
    assumed.
    """
    from ..network import Link
    from ..planning.prediction import ASSUMED_SLOWDOWN

    if isinstance(network, Link):
        return ASSUMED_SLOWDOWN
    of = [
        measured
        for name, measured in network.transports.items()
        if transport in (None, name) and measured.compute_slowdown
    ]
    return max(0.0, of[0].compute_slowdown - 1) if of else ASSUMED_SLOWDOWN


def _held_out(program: Program, job: Job, network: Any) -> list[dict[str, float]]:
    """Predict the numbers of workers that this host has cores for from one worker, and measure
    them.
    """
    import statistics

    from .. import environment
    from ..network import Link
    from ..planning.collective_costs import Fabric
    from ..planning.prediction import STANDS_STILL, Job, predict
    from ..planning.profiling import record_profiles

    cores = environment.usable_cores()
    rows = []
    title = f"lockstep plan: {program.words[0]}"
    for count in range(2, cores + 1):
        try:
            job.check(count)
        except ConfigError:
            break
        known = job.profiles.get(count)
        real = known or record_profiles(
            program, count, title=f"{title} on {count} workers, to compare"
        )
        # as many workers, each with a job of its own, so that they share caches and memory but send
        # nothing
        alone = record_profiles(
            program, count, 1 / count, alone=True, title=f"{title}, {count} times on 1 worker"
        )
        backend = real[0].backend
        is_measured = (
            not isinstance(network, Link)
            and backend in network.transports
            and len(network.hosts) == 1
        )
        fabric = Fabric.of_measurement(network, backend) if is_measured else Fabric(None)
        threads = program.threads or environment.threads() or max(1, cores // count)
        slowdown = STANDS_STILL if threads * count >= cores else 0.0
        copies = network.copy_bandwidth if is_measured else None
        one = Job({1: alone}, fabric, job.batch_is_global, slowdown=slowdown, copy_bandwidth=copies)
        predicted = predict(one, [count])[0]
        measured = statistics.median(profile.median_s for profile in real)
        row = {
            "workers": count,
            "predicted_s": predicted.step_s,
            "low_s": predicted.low_s,
            "high_s": predicted.high_s,
        }
        rows.append({**row, "measured_s": measured, "error": predicted.step_s / measured - 1})
    return rows


def _publish(
    parsed: argparse.Namespace,
    job: Job,
    forecasts: Sequence[Forecast],
    held_out: Sequence[dict[str, float]],
    doubts: Sequence[str],
) -> None:
    from ..planning.advice import advise, assumptions
    from ..planning.picture import draw
    from ..system import atomic_files

    advice = advise(job, forecasts)
    taken = [*assumptions(job), *doubts]
    _print(parsed, job, forecasts, held_out, advice, taken)
    measured = {int(row["workers"]): row["measured_s"] for row in held_out}
    try:
        if not parsed.no_picture:
            title = f"{Path(parsed.script).name} on {parsed.network}, as predicted"
            with Activity("lockstep plan: drawing the picture"):
                draw(Path(parsed.picture), forecasts, title, measured)
            print(f"picture: {parsed.picture}")
        if parsed.json:
            result = {
                "lockstep_plan": 1,
                "script": [parsed.script, *parsed.arguments],
                "network": parsed.network,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "forecasts": [asdict(forecast) for forecast in forecasts],
                "advice": advice,
                "assumptions": taken,
                "held_out": list(held_out),
            }
            atomic_files.write_json(Path(parsed.json), result)
    except OSError as error:
        raise ConfigError("output", "files that can be written", found=str(error)) from None


def _print(
    parsed: argparse.Namespace,
    job: Job,
    forecasts: Sequence[Forecast],
    held_out: Sequence[dict[str, float]],
    advice: Sequence[str],
    taken: Sequence[str],
) -> None:
    from rich.console import Console

    width = None if os.isatty(1) else 140
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    batch = (
        f"global batch {job.global_batch}"
        if job.batch_is_global
        else f"batch {job.first.batch} on each worker"
    )
    title = f"{Path(parsed.script).name}, {batch}, network {parsed.network}"
    console.print(_table(title, _rows(forecasts)))
    if held_out:
        console.print()
        console.print(_held_out_table(held_out))
    console.print()
    for line in advice:
        console.print(f"- {line}", soft_wrap=True)
    console.print("\nThis assumes:")
    for line in taken:
        console.print(f"  {line}", soft_wrap=True)


def _rows(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return the forecasts to show: all, or about as many as fit, wider apart for many workers."""
    if len(forecasts) <= _MOST_ROWS:
        return list(forecasts)
    wanted = {forecasts[0].workers, forecasts[-1].workers, *range(1, 9), *(2**n for n in range(30))}
    wanted |= {3 * 2**n for n in range(30)}
    return [forecast for forecast in forecasts if forecast.workers in wanted]


def _table(title: str, forecasts: Sequence[Forecast]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    columns = ["workers", "step", "90 % interval", "speed-up", "efficiency", "samples/s"]
    priced = forecasts[0].cost_per_hour is not None
    columns += ["cost/hour", "per M samples"] * priced + ["memory", "limited by"]
    for name in columns:
        table.add_column(name, justify="left" if name == "limited by" else "right", no_wrap=True)
    for forecast in forecasts:
        cells = [
            str(forecast.workers),
            _time(forecast.step_s),
            _interval(forecast.low_s, forecast.high_s),
        ]
        cells += [
            f"{forecast.speedup:.2f}",
            f"{forecast.efficiency:.0%}",
            f"{forecast.samples_per_s:,.0f}",
        ]
        if forecast.cost_per_hour is not None and forecast.cost_per_million is not None:
            cells += [f"{forecast.cost_per_hour:.2f}", f"{forecast.cost_per_million:.4g}"]
        memory = "" if forecast.memory is None else f"{forecast.memory / (1 << 20):,.0f} MiB"
        table.add_row(*cells, memory, forecast.limit)
    return table


def _held_out_table(rows: Sequence[dict[str, float]]) -> Any:
    from rich.table import Table

    table = Table(
        title="On this host, predicted from one worker",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for name in ("workers", "predicted", "90 % interval", "measured", "error"):
        table.add_column(name, justify="right")
    for row in rows:
        interval = _interval(row["low_s"], row["high_s"])
        cells = (
            _time(row["predicted_s"]),
            interval,
            _time(row["measured_s"]),
            f"{row['error']:+.1%}",
        )
        table.add_row(f"{row['workers']:.0f}", *cells)
    return table


def _time(seconds: float) -> str:
    scale, unit = _unit(seconds)
    return f"{seconds * scale:.3g} {unit}"


def _interval(low: float, high: float) -> str:
    scale, unit = _unit(high)
    return f"{low * scale:.3g}–{high * scale:.3g} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    units = ((1.0, "s"), (1e3, "ms"))
    return next((unit for unit in units if seconds * unit[0] >= 1), (1e6, "µs"))
