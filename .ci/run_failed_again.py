"""Runs the tests that failed in the last run of pytest again, each alone, one after another.

A test that passes then is unstable: it depends on what else runs on the host. Every such test is a
defect, but two of them do not fail the whole run. Exits with 0 if all passed now and at most two
were unstable, else with 1. The names of unstable tests are written to the file given as the first
argument, one a line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST_UNSTABLE = 2
MOST_REPEATED = 12  # more failures than that are no accident, and would take too long one by one

CACHE = Path(".pytest_cache/v")
SOME_TESTS_FAILED = 1  # pytest's exit status for a complete run; others mean that it was cut off


def failed_tests() -> list[str]:
    """Return the names of the tests that failed in the last run.

    Raises:
        SystemExit: if that run was not complete, so that nobody knows what else would have failed.
    """
    status = CACHE / "lockstep" / "exit_status"
    if not status.exists():
        raise SystemExit(
            "The tests did not end by themselves, or did not begin: nothing is run again."
        )
    if int(status.read_text()) != SOME_TESTS_FAILED:
        raise SystemExit(
            f"pytest ended with exit status {status.read_text()}: nothing is run again."
        )
    return sorted(json.loads((CACHE / "cache" / "lastfailed").read_text()))


def passes_alone(name: str) -> bool:
    """Run one test in a process of its own; print what pytest says if it fails again."""
    # -q twice leaves out pytest's count, so that the last one seen is that of all tests
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", flush=True)
    return done.returncode == 0


def main() -> int:
    """Run what failed again; see the module."""
    failed = failed_tests()
    if len(failed) > MOST_REPEATED:
        print(f"{len(failed)} tests failed, more than {MOST_REPEATED}: none is run again.")
        return 1
    unstable = []
    for name in failed:
        print(f"again, alone: {name}", flush=True)
        if passes_alone(name):
            unstable.append(name)
    Path(sys.argv[1]).write_text("".join(f"{name}\n" for name in unstable))
    if len(unstable) > MOST_UNSTABLE:
        print(f"{len(unstable)} tests failed once and passed alone; at most {MOST_UNSTABLE} may.")
        return 1
    return int(len(unstable) < len(failed))


if __name__ == "__main__":
    sys.exit(main())
