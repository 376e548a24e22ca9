"""Where modules of POSIX are missing, as on Windows, the import says in one line what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What Python for Windows does not have, of what Lockstep imports.
MISSING = ("fcntl", "grp", "pwd", "resource", "termios")

PROGRAM = f"""
import signal, sys
sys.modules.update(dict.fromkeys({MISSING}))
del signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL
sys.platform = "win32"
"""


@pytest.mark.parametrize(
    "use",
    [
        "import lockstep",
        "from lockstep import Trainer",
        "from lockstep.training.trainer import Trainer",
        "from lockstep.cli import main",
        "import lockstep.__main__",
    ],
)
def test_windows_is_told_what_to_do(use: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM + use], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    said = ended.stderr.splitlines()
    assert said[-1] == (
        "ImportError: lockstep: expected Linux (or macOS, where it is not tested), got a Python "
        "without the module fcntl, for 'win32'. On Windows, install Python and Lockstep inside "
        "WSL 2 and run the program there."
    )
    assert "During handling" not in ended.stderr
    assert "ModuleNotFoundError" not in ended.stderr
