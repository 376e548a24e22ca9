"""Runs every benchmark with --quick, and says which of them no longer work: each is run rarely, and
what it measures changes in the meantime.

    python benchmarks/quick.py                 # all of them
    python benchmarks/quick.py elastic plan    # these

The figures of such runs say nothing, and are kept nowhere. One that needs what is not installed
here is left out. It ends with 1 if one has failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 600.0
LAST_LINES = 15  # of the output of one that has failed
NEEDS = "this benchmark needs "  # how one begins to say what is not installed


def names() -> list[str]:
    """The benchmarks that have --quick, without the ending of their files."""
    return [
        path.stem
        for path in sorted(HERE.glob("*.py"))
        if path.stem not in ("frame", "quick")
        and not path.stem.startswith("side_")
        and "--quick" in path.read_text()
    ]


def failure(name: str) -> str:
    """How a benchmark has failed, with the end of its output; "" if it has not.

    For one that is left out, what it needs, from `NEEDS` on.
    """
    with tempfile.TemporaryFile("w+") as output:
        words = [sys.executable, str(HERE / f"{name}.py"), "--quick"]
        process = subprocess.Popen(
            words,
            cwd=HERE.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ending = f"ended with {process.wait(LIMIT_S)}"
        except subprocess.TimeoutExpired:
            ending = f"has not ended within {LIMIT_S:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode == 0:
            return ""
        output.seek(0)
        lines = output.read().replace("\r", "\n").splitlines()
        if lines and lines[-1].startswith(NEEDS):
            return lines[-1]
        return "\n    ".join([ending, *lines[-LAST_LINES:]])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = names()
    parser.add_argument("name", nargs="*", help=f"of {', '.join(known)} (default: all)")
    chosen = parser.parse_args().name or known
    for name in chosen:
        if name not in known:
            parser.error(f"expected a benchmark that has --quick, got {name!r}")
    failed = []
    for name in chosen:
        begin = time.monotonic()
        said = failure(name)
        print(f"{name}: {said or 'works'} ({time.monotonic() - begin:.0f} s)", flush=True)
        if said and not said.startswith(NEEDS):
            failed.append(name)
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
