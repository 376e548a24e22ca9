"""Example programs as ranks of the warm pool, which need not import everything anew."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest import mock

from .pool import Pool, RanksFailedError

__all__ = ["EXAMPLES", "alone", "as_a_rank", "together"]

EXAMPLES = Path(__file__).parents[2] / "examples"

# what a pool tells its ranks, and nobody a program that is started by itself
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)


def as_a_rank(program: str, *arguments: str) -> None:
    """Run a program to its end."""
    with mock.patch.object(sys, "argv", [program, *arguments]):
        runpy.run_path(program, run_name="__main__")


def together(pool: Pool, name: str, *arguments: str, workers: int) -> list[str]:
    """What each rank of an example shows, under a launcher that has made its process group."""
    return _shown(pool, name, *arguments, workers=workers)


def alone(pool: Pool, name: str, *arguments: str) -> str:
    """What an example shows without a launcher: no variable says that there is a job."""
    return _shown(pool, name, *arguments, workers=1, init=False, env=dict.fromkeys(_VARIABLES))[0]


def _shown(pool: Pool, name: str, *arguments: str, **options: object) -> list[str]:
    outcomes = pool.outcomes(as_a_rank, str(EXAMPLES / name), *arguments, **options)  # type: ignore[arg-type]
    if any(outcome.failed for outcome in outcomes):
        raise RanksFailedError(name, outcomes)
    return [outcome.output for outcome in outcomes]
