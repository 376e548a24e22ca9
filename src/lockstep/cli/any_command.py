"""Any command as the work of a rank: ``python -m lockstep.cli.any_command WORDS``."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Run it, pass signals on to it, and return its exit code; that of a shell where it cannot be run."""
    try:
        child = subprocess.Popen(words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: child.send_signal(which))
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
