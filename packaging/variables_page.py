"""Writes docs/variables.md: the environment variables that Lockstep reads and sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.environment.launchers import LAUNCHERS
from lockstep.environment.variable_table import OF_OTHERS, OF_WORKERS, SETTINGS, Variable

PAGE = Path(__file__).resolve().parent.parent / "docs/variables.md"

_HEAD = """# Environment variables

What Lockstep reads in its environment, and what it sets in that of the processes that it starts.
An option of `lockstep run` sets its variable for the workers, and counts more than the variable.
What torch, NCCL, wandb and other libraries read for themselves is not here.

This page is made by `make public-names` from the table that the code uses, and a test compares it
with the code.
"""

_SETTINGS = """## Settings

For the launchers and the workers of all hosts: `lockstep run -H` sends what begins with `LOCKSTEP_`
to the [other hosts](launching.md#several-hosts).
"""

_OF_WORKERS = """## Set by Lockstep for its processes

Not to be set by hand; programs may read them.
"""

_OF_LAUNCHERS = """## Of launchers

By these a worker finds its place in the job: [the first launcher whose variables are set
counts](launching.md#how-a-worker-finds-its-rank).
"""

_OF_OTHERS = "## Of others\n"


def render() -> str:
    """Return the page."""
    settings = (
        (
            _code(variable.name),
            variable.meaning,
            variable.values,
            variable.default,
            _code(*filter(None, variable.option.split(", "))),
        )
        for variable in SETTINGS
    )
    launchers = ((launcher.title, _code(*launcher.names)) for launcher in LAUNCHERS[1:])
    others = ((rows.owner, _code(*rows.names), rows.use) for rows in OF_OTHERS)
    parts = [
        _HEAD,
        _SETTINGS,
        _table(("Variable", "What it sets", "Values", "Default", "Option"), settings),
        _OF_WORKERS,
        _table(("Variable", "What it says", "Values"), map(_row_of_worker, OF_WORKERS)),
        _OF_LAUNCHERS,
        _table(("Launcher", "Variables"), launchers),
        _OF_OTHERS,
        _table(("Of", "Variables", "What Lockstep does with them"), others),
    ]
    return "\n".join(parts)


def _row_of_worker(variable: Variable) -> tuple[str, ...]:
    return _code(variable.name), variable.meaning, variable.values


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def lines() -> Iterator[str]:
        yield f"| {' | '.join(heads)} |"
        yield f"|{'---|' * len(heads)}"
        for row in rows:
            yield f"| {' | '.join(row)} |"

    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
