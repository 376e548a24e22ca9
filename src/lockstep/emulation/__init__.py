"""An emulated network: ranks of this host are put on virtual hosts, and messages between those take
their time.

Experimental: may change in any release.
"""

from __future__ import annotations

from ..clock import dilation, monotonic

__all__ = ["dilation", "monotonic"]
