"""``python -m lockstep``: the same as the command ``lockstep``."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
