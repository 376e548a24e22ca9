"""``lockstep doctor``: checks this host and others, and lists what to fix."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .. import arguments
from ..activity import Activity
from ..launcher.options import JobOptions
from ..option_table import options_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..doctor import Problem, Section

_DESCRIPTION = """\
Check this host's devices, memory, cores, limits and network, run an all-reduce
of two processes on each backend, and log in on the hosts of a job, where the
folder and the Python of the job must be. On the nodes of a scheduler it checks
what the job's ranks would see: run it on all of them at once, as the job. Ends
with a list of problems and their fixes.
"""

# options of `lockstep run` that this command has too
_OF_RUN = ("hosts", "hostfile", "ssh_port", "identity", "remote_python")
_INDENT = 16  # columns before the text of a line: its mark and name

_EXAMPLES = """
examples:
  lockstep doctor
  lockstep doctor -H nodeA:4,nodeB:4
  lockstep doctor --hostfile hosts --ssh-port 2222 --identity ~/.ssh/cluster
  lockstep doctor --json | jq .problems
      on the nodes of a job: whether they reach each other, and their versions:
  srun --nodes=2 --ntasks-per-node=1 lockstep doctor

exit codes:
  0  nothing to fix
  1  something to fix
  2  bad input
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="check this host and others, and list what to fix",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_options(entry for entry in options_of(JobOptions) if entry.name in _OF_RUN)
    parser.add_argument(
        "--time-limit", metavar="SECONDS", default="60", help="limit per backend test (default: 60)"
    )
    text = "print JSON (experimental: may change in any release)"
    parser.add_argument("--json", action="store_true", default=False, help=text)
    parser.add_debug()
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return 1 if there is something to fix."""
    from ..doctor import as_json, examine

    job = JobOptions.parse({**vars(parsed), "program": ()})
    limit = arguments.parse_whole("--time-limit", parsed.time_limit, least=1, most=3600)
    results = examine(job, limit)
    if parsed.json:
        sections = list(results)
        print(json.dumps(as_json(sections), indent=2))
    else:
        sections = list(_print_sections(results))
    return 1 if any(section.problems for section in sections) else 0


def _print_sections(sections: Iterator[Section]) -> Iterator[Section]:
    """Yield the sections, print each as it arrives, and all problems at the end."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    problems: list[Problem] = []
    while True:
        with Activity("lockstep doctor: checking"):
            section = next(sections, None)
        if section is None:
            break
        if section.facts:
            _print_section(console, section)
        problems += section.problems
        yield section
    _print_problems(console, problems)


def _print_section(console: Console, section: Section) -> None:
    from rich.text import Text

    good, bad = ("✓", "✗") if console.encoding.startswith("utf") else ("+", "!")
    marks = {True: Text(good, "green"), False: Text(bad, "bold red"), None: Text(" ")}
    console.print(Text(section.title, "bold"))
    for fact in section.facts:
        name = fact.name.ljust(_INDENT - 3) + " "
        _print_lines(console, Text.assemble(marks[fact.good], " ", (name, "cyan")), fact.text)


def _print_problems(console: Console, problems: Sequence[Problem]) -> None:
    from rich.text import Text

    console.print()
    if not problems:
        console.print(Text("Nothing to fix.", "bold green"))
        return
    console.print(Text("What to fix", "bold"))
    for number, problem in enumerate(problems, 1):
        _print_lines(console, Text(f"{number}. ".rjust(4), "bold red"), problem.what)
        _print_lines(
            console,
            Text("  → " if console.encoding.startswith("utf") else " -> ", "green"),
            problem.fix,
        )


def _print_lines(console: Console, head: Text, text: str) -> None:
    """Print `text` after `head`, wrapped with aligned lines; a long word is not broken."""
    width = max(20, console.width - len(head))
    first, *more = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
    console.print(head + first, soft_wrap=True)
    for line in more:
        console.print(" " * len(head) + line, soft_wrap=True)
