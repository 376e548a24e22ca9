"""``lockstep blame``: names the samples that made a step of a run stand out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..activity import Activity
from ..system.terminal_text import plain
from .parser import Help
from .replay import announce, print_comparison, whole_or_none

if TYPE_CHECKING:
    from ..proof.blame import Blamed
    from ..proof.culprits import Culprit

_DESCRIPTION = """\
Find the samples behind a step whose loss, gradient or running statistics jumped,
or became NaN. The step is found in the ledger and replayed; then shards, and in
them samples, are halved until few hold most of the gradient. A value that is not
finite is followed to the first module and operation that made it.
"""

_EXAMPLES = """
examples:
  lockstep blame runs/a                the step that stands out most
  lockstep blame runs/a --step 35      this step
  lockstep ledger runs/a               lists all steps that stand out

A sample is shown by its number in the data set, its share of the gradient, its
file or text, and an image as a picture in RUN/blame.

exit codes: 0 samples are named; 1 nothing was found, or the replay has other bits
than the ledger; 2 bad input
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="name the samples that made a step stand out",
        usage="%(prog)s RUN [--step N] [-np K]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN", help="a run directory with a ledger")
    parser.add_argument(
        "--step", metavar="N", help="the step (default: the one that stands out most)"
    )
    parser.add_argument("-np", metavar="K", dest="workers", help="number of workers")
    parser.add_debug()
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    step = whole_or_none("--step", parsed.step, least=0)
    workers = whole_or_none("-np", parsed.workers, least=1)
    with Activity("lockstep blame: loading PyTorch"):
        from ..proof.blame import PlannedBlame
        from ..proof.ledger import ledger

    planned = PlannedBlame(ledger(Path(parsed.run_dir)), step, workers)
    said = "nothing stands out" if planned.spike is None else str(planned.spike)
    print(f"step {planned.replay.step}: {said}", flush=True)
    announce(planned.replay)
    with Activity("lockstep blame: the program runs"):
        blamed = planned.run(on_replay=announce)
    weights = blamed.bad_weights
    if weights is not None:
        print(
            f"step {planned.replay.step} began with weights that were not finite: "
            f"{plain(weights.values)} since the update of step {blamed.step}"
        )
        if blamed.spike is not None:
            print(f"step {blamed.step}: {blamed.spike}")
    code = print_comparison(blamed.replayed)
    if blamed.kind == "update":
        start = planned.replay.ledger.start_of(blamed.step)
        record = planned.replay.ledger.record(blamed.step)
        print(
            f"loss and gradient of step {blamed.step} are finite: no sample is to blame, but its "
            f"update ({start.optimizer}, learning rate {record['learning_rate']:g}), or what the "
            "program changed after it"
        )
        return 1
    for culprit in blamed.culprits:
        print(_in_words(culprit, blamed))
    if not blamed.culprits:
        print(
            f"no few samples cause it: the largest share of the gradient is {blamed.largest:.0%}, "
            "as with a learning rate that is too high"
        )
        return 1
    for reason in dict.fromkeys(culprit.why_no_picture for culprit in blamed.culprits):
        if reason:
            print(f"no picture: {plain(reason)}")
    forward, backward = blamed.passes
    print(f"{forward} forward and {backward} backward passes of shards and parts of them")
    print(
        "To leave it out: remove it from the data, or skip such steps with Trainer(..., "
        'on_spike="skip").'
    )
    return code


def _in_words(culprit: Culprit, blamed: Blamed) -> str:
    if blamed.kind == "gradient":
        evidence = f"{culprit.share:.0%} of the gradient, loss {culprit.loss:.4g}"
    elif blamed.kind == "not finite":
        evidence = plain(culprit.origin)
    else:
        evidence = "raises the running statistics most"
    parts = [f"sample {culprit.index}: {evidence}", plain(culprit.what)]
    if culprit.picture:
        parts.append(f"picture in {plain(culprit.picture)}")
    return "; ".join(part for part in parts if part)
