"""What every benchmark has around its measurement: the same options, and the same places for what
it found.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common import DOCS, RESULTS, machine_line, write_between, write_json


class AnyCase(Protocol):
    """What is measured, a dataclass, as far as `chosen` must know it."""

    @property
    def model(self) -> str:
        """What is trained."""

    @property
    def rounds(self) -> int:
        """How many rounds count."""


CaseT = TypeVar("CaseT", bound=AnyCase)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as its user meets it.

    Attributes:
        name: of its file in results/, without the ending; with hyphens instead of underscores, of
            its place in `page`.
        text: its module's docstring, which --help shows.
        page: of docs/, where its tables stand.
    """

    name: str
    text: str
    page: str = "performance.md"

    def parser(self, rounds: str) -> argparse.ArgumentParser:
        """The options that all have; `rounds` says how many there are without --rounds."""
        parser = argparse.ArgumentParser(
            description=self.text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument(
            "--quick", action="store_true", help="a smoke run; its figures say nothing"
        )
        parser.add_argument("--rounds", type=at_least_one, help=f"instead of {rounds}")
        kept = (
            f"where everything that was measured goes (default: results/{self.name}.json, or with "
            "--quick nowhere)"
        )
        parser.add_argument("--json", type=Path, help=kept)
        parser.add_argument(
            "--write", action="store_true", help=f"also put the result into docs/{self.page}"
        )
        return parser

    def parse(self, parser: argparse.ArgumentParser, *partial: str) -> argparse.Namespace:
        """The options given; those named in `partial`, None unless given, leave a part of the whole
        out.
        """
        args = parser.parse_args()
        given = [
            f"--{name}" for name in ("quick", *partial) if getattr(args, name) not in (None, False)
        ]
        if args.write and given:
            parser.error(
                "--write: only the whole run is for the documentation; expected no "
                f"{', no '.join(given)}"
            )
        return args

    def publish(
        self,
        args: argparse.Namespace,
        machine: dict[str, Any],
        text: str,
        data: str,
        picture: str = "",
        /,
        **found: Any,
    ) -> None:
        """Show what was found, keep it in results/, and with --write put it into the documentation.

        Args:
            args: of `parse`.
            machine: of `describe_machine`, before the measurement.
            text: the tables.
            data: what was trained on, for the line about the machine below them.
            picture: a reference to one, for the documentation alone.
            found: everything that was measured.
        """
        machine["load_average_after"] = round(os.getloadavg()[0], 2)
        line = machine_line(machine, data)
        print(f"\n{text}\n\n{line}")
        if args.json or not args.quick:
            write_json(args.json or RESULTS / f"{self.name}.json", {"machine": machine, **found})
        if args.write:
            parts = [part for part in (text, picture, line) if part]
            write_between(DOCS / self.page, self.name.replace("_", "-"), "\n\n".join(parts))


def at_least_one(text: str) -> int:
    """A number of rounds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def chosen(cases: Sequence[CaseT], args: argparse.Namespace, **quick: int) -> list[CaseT]:
    """The cases that --model leaves; with --quick a single round of them, and of the sizes in
    `quick`.
    """
    kept = [case for case in cases if args.model in (None, case.model)]
    if args.quick:
        kept = [replace(case, rounds=1, **quick) for case in kept]  # type: ignore[type-var]
    return kept if args.rounds is None else [replace(case, rounds=args.rounds) for case in kept]  # type: ignore[type-var]
