"""The versions of torch with which Lockstep has been tried."""

from __future__ import annotations

import re

__all__ = ["NEWEST_TORCH", "OLDEST_TORCH", "about_untried_torch", "release_of"]

# The tests have been run with both, and with some between: docs/first-ten-minutes.md has the list.
# pyproject.toml asks for the oldest. A newer torch is not refused: nearly all of Lockstep works
# with it, as a rule.
OLDEST_TORCH = (2, 10)
NEWEST_TORCH = (2, 15)


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (2, 13) of "2.13.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def about_untried_torch(torch_version: str) -> str | None:
    """Return one line on a torch that Lockstep has not been tried with; None on others.

    Args:
        torch_version: such as "2.13.0+cpu".
    """
    release = release_of(torch_version)
    if OLDEST_TORCH <= release <= NEWEST_TORCH:
        return None
    version, oldest, newest = (
        ".".join(map(str, numbers)) for numbers in (release, OLDEST_TORCH, NEWEST_TORCH)
    )
    return (
        f"torch {version} has not been tried with {_own_name()} ({oldest} to {newest} have): "
        f"if something fails, install torch {newest}, or a newer Lockstep"
    )


def _own_name() -> str:
    # as slow as all of `import lockstep`
    from importlib.metadata import PackageNotFoundError, version

    try:
        return "Lockstep " + ".".join(map(str, release_of(version("lockstep-train"))))
    except PackageNotFoundError:  # its source is on the path, and it is not installed
        return "this Lockstep"
