"""Counts what the cross-check finds of bits that flip, once or always, in outputs, gradients or
weights.

Each seed draws a fault: which worker, which step, which value, which of its bits. A fault that
changes no bit of the trained weights has no effect. Run it on two and on three workers:

    lockstep run -np 2 benchmarks/cross_check_faults.py --seeds 100
    lockstep run -np 3 benchmarks/cross_check_faults.py --seeds 100
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import lockstep

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support import bit_flips
from support.bit_flips import BitFlip

EVERY = 4
COLUMNS = (
    *(
        "faults",
        "no effect",
        "not finite",
        "found",
        "missed",
        "right rank",
        "one of two",
        "wrong rank",
    ),
    *("named and ended", "mended, same bits", "mended, other bits"),
)


def outcome_of(flip: BitFlip, healthy: str) -> tuple[set[str], int | None]:
    """What came of a fault, as names of `COLUMNS`, and the steps until it was found."""
    done = bit_flips.run(flip, EVERY)
    columns = {"faults"}
    if not done.faults:
        if done.fingerprint == healthy:
            return columns | {"no effect"}, None
        return columns | {"not finite" if done.end == "not finite" else "missed"}, None
    columns.add("found")
    first = done.faults[0]
    named = {(flip.rank,): "right rank"}.get(first.ranks, "wrong rank")  # type: ignore[arg-type]
    columns.add("one of two" if len(first.ranks) > 1 and flip.rank in first.ranks else named)
    if any(fault.ranks != (flip.rank,) and flip.rank not in fault.ranks for fault in done.faults):
        columns.add("wrong rank")
    if done.end == "faulty worker":
        columns.add("named and ended")
    elif done.end == "done" and not flip.is_persistent:
        columns.add(f"mended, {'same' if done.fingerprint == healthy else 'other'} bits")
    return columns, first.step - flip.step


def main() -> None:
    """Print a table of the outcomes by kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=100, help="the number of faults (default: 100)"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    args = parser.parse_args()
    comm = lockstep.init("cpu")
    logging.disable(logging.ERROR)
    for make in (bit_flips.mlp, bit_flips.convolutional, bit_flips.normed):
        plain, checked = bit_flips.run(None, None, make), bit_flips.run(None, 1, make)
        same = plain.fingerprint == checked.fingerprint
        if comm.rank == 0:
            print(
                f"{make.__name__}, healthy, every step checked: "
                f"{checked.checked_passes} passes of each worker, "
                f"{len(checked.faults)} faults found, {'the same' if same else 'OTHER'} bits"
            )
    healthy = bit_flips.run(None, None).fingerprint
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    delays: dict[str, list[int]] = defaultdict(list)
    for seed in range(args.first, args.first + args.seeds):
        flip = BitFlip.drawn(seed, comm.size)
        kind = f"{flip.kind}, {'always' if flip.is_persistent else 'once'}"
        columns, delay = outcome_of(flip, healthy)
        rows[kind].update(columns)
        if delay is not None:
            delays[kind].append(delay)
        is_odd = {"wrong rank", "mended, other bits"} & columns or (
            flip.is_persistent and "missed" in columns
        )
        if comm.rank == 0 and is_odd:
            print(f"seed {seed}: {', '.join(sorted(columns))}: {flip}")
    if comm.rank == 0:
        print(
            f"\n{comm.size} workers, K = {EVERY}, {bit_flips.VIRTUAL_WORKERS} virtual workers, "
            f"{args.seeds} seeds"
        )
        for kind, row in sorted(rows.items()):
            counts = ", ".join(f"{name} {row[name]}" for name in COLUMNS if row[name])
            late = delays[kind] or [0]
            print(
                f"{kind:16} {counts}; steps until found: median {median(late):g}, most {max(late)}"
            )


if __name__ == "__main__":
    main()
