"""What the measurements on a GPU share: sides that take turns, their options, and where what they
found goes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Side = Callable[[], object]
"""Does a block of work: queues it on the device."""

LEAST_ROUNDS = 3
"""Blocks of each side that count, at least."""


@dataclass(frozen=True)
class Options:
    """How a measurement is run.

    Attributes:
        device: on which device.
        seconds: how long it may take, beside what it prepares.
        quick: whether sizes are small and the figures say nothing.
    """

    device: torch.device
    seconds: float
    quick: bool


def options(text: str | None, seconds: float) -> tuple[Options, Path | None]:
    """Read the command line; returns the options, and the file for what is found, if one was
    named.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda, or cpu to see that the script runs (default: cuda)"
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"how long (default: {seconds:g})"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; the figures say nothing")
    parser.add_argument("--json", type=Path, help="where what was found goes")
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device: expected a GPU that torch can use, got none (cpu shows that the script runs)"
        )
    return Options(device, args.seconds, args.quick), args.json


def wait_for(device: torch.device) -> None:
    """Return when the device has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(side: Side, device: torch.device) -> float:
    """Seconds of a block on an idle device, until it has been computed."""
    wait_for(device)
    began = time.perf_counter()
    side()
    wait_for(device)
    return time.perf_counter() - began


def take_turns(
    sides: Mapping[str, Callable[[], Side]], given: Options, warm_up: int = 2
) -> dict[str, list[float]]:
    """Let the sides take turns until the time is over; returns the seconds of each side's blocks.

    Every second round is in the opposite order, so that a clock rate that drifts falls on all
    alike. A side that fails is left out, with its error printed.

    Args:
        sides: name → what makes the side.
        given: the options.
        warm_up: blocks of each side that do not count.
    """
    found: dict[str, list[float]] = {}
    working = {}
    for name, make in sides.items():
        try:
            side = make()
            for _ in range(warm_up):
                timed(side, given.device)
            working[name] = side
            found[name] = []
        except Exception as error:  # the others are still worth to be measured
            print(
                f"{name}: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}",
                flush=True,
            )
    until = time.monotonic() + given.seconds
    rounds = 0
    while rounds < LEAST_ROUNDS or (time.monotonic() < until and rounds < 50):
        for name in list(working) if rounds % 2 == 0 else reversed(list(working)):
            found[name].append(timed(working[name], given.device))
        rounds += 1
        if given.quick and rounds == LEAST_ROUNDS:
            break
    return found


def medians(found: Mapping[str, list[float]], scale: float = 1.0) -> dict[str, float]:
    """The median of each side's blocks, times `scale`."""
    return {name: scale * statistics.median(values) for name, values in found.items()}


def ratio_of(found: Mapping[str, list[float]], above: str, below: str) -> float | None:
    """The median of the ratios of two sides, a round each; None if one of them is missing."""
    if above not in found or below not in found:
        return None
    return statistics.median([a / b for a, b in zip(found[above], found[below], strict=True)])


def best_of(found: Mapping[str, list[float]], names: list[str]) -> str | None:
    """The fastest of some sides."""
    known = [name for name in names if name in found]
    return min(known, key=lambda name: statistics.median(found[name]), default=None)


def keep(path: Path | None, found: dict[str, Any]) -> None:
    """Write what was found so far: the script may be ended at any time."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def finish(path: Path | None, found: dict[str, Any]) -> None:
    """Write what was found, and print it."""
    keep(path, found)
    print(json.dumps(found, indent=1))
