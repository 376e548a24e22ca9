"""Runs any command as a rank: ``python -m lockstep.cli.any_command COMMAND ARGUMENTS``."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from ..interruption import LAUNCHER_SIGNALS


def main(words: Sequence[str]) -> int:
    """Run the command, forward signals to it, and return its exit code; 126 or 127 if it cannot be
    started.
    """
    try:
        child = subprocess.Popen(words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    for number in LAUNCHER_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: child.send_signal(received))
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
