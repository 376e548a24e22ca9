"""Counts how many lines of a program change when it is ported to several workers, and whether the
results agree.

`ports/port_plain.py` is a training on one device, in plain PyTorch, with clipping, a learning-rate
schedule and an evaluation; the other `ports/port_*.py` are the same training on any number of
workers. Lines are compared with difflib. With --run, each port trains on one and on two workers:
the losses of its last evaluation should agree.

    python benchmarks/changed_lines.py          # counts
    python benchmarks/changed_lines.py --run    # also trains, in a minute; needs lightning
    python benchmarks/changed_lines.py --write  # also the table in docs/coming-from/accelerate.md
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import DOCS, markdown_table, write_between

PORTS = Path(__file__).parent / "ports"


@dataclass(frozen=True)
class Port:
    """A port: its name, its file, and what starts it on several workers, before the file's name."""

    name: str
    file: str
    launcher: tuple[str, ...]


_LOCKSTEP = ("-m", "lockstep", "run", "--quiet", "--no-prefix", "-np")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ALL = (
    Port("Lockstep, `prepare`", "port_prepare.py", _LOCKSTEP),
    Port("Lockstep, `Trainer`", "port_trainer.py", _LOCKSTEP),
    Port("Accelerate", "port_accelerate.py", _TORCHRUN),
    Port("Lightning", "port_lightning.py", _TORCHRUN),
)


def lines_of(file: str) -> list[str]:
    """Return the lines of a port, without its docstring and blank lines."""
    code = (PORTS / file).read_text().partition('"""\n')[2]
    return [line for line in code.splitlines() if line.strip()]


def changes(file: str) -> tuple[int, int]:
    """Return how many lines of a port are new or changed, and how many lines of the plain program
    are gone.
    """
    new = gone = 0
    for kind, before, until, start, stop in difflib.SequenceMatcher(
        None, lines_of("port_plain.py"), lines_of(file), autojunk=False
    ).get_opcodes():
        if kind != "equal":
            new += stop - start
            gone += max(0, (until - before) - (stop - start))
    return new, gone


def last_loss(port: Port, workers: int) -> float:
    """Train on so many workers, and return the loss of the last evaluation."""
    command = [sys.executable, *port.launcher, str(workers), str(PORTS / port.file)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
    found = re.findall(r"epoch \d+: loss ([\d.]+)", done.stdout)
    if done.returncode or not found:
        raise SystemExit(
            f"{port.file} on {workers} workers ended with exit code "
            f"{done.returncode}:\n{done.stderr}"
        )
    return float(found[-1])


def table(runs: bool) -> str:
    """Return the table: changed lines, and with `runs` the losses on one and two workers."""
    rows = [
        ["", "new or changed lines", "lines gone", *(["loss on 1 worker", "on 2"] if runs else [])]
    ]
    for port in ALL:
        losses = [f"{last_loss(port, workers):.4f}" for workers in (1, 2)] if runs else []
        rows.append([port.name, *map(str, changes(port.file)), *losses])
    return markdown_table(rows[0], rows[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="also train on one and two workers")
    parser.add_argument("--write", action="store_true", help="put the table into the documentation")
    arguments = parser.parse_args()
    text = table(arguments.run or arguments.write)
    print(text)
    if arguments.write:
        write_between(DOCS / "coming-from" / "accelerate.md", "changed-lines", text)


if __name__ == "__main__":
    main()
