"""Networks as users describe them: a link's bandwidth and latency, networks by name, and hosts of
an emulated one.

Experimental: may change in any release.
"""

from __future__ import annotations

from .emulated import AUTO_DILATION, NETWORK_FORM, Cut, VirtualNetwork, parse_network
from .presets import LINK_FORM, PRESETS, Link, Preset, parse_link

__all__ = [
    "AUTO_DILATION",
    "LINK_FORM",
    "NETWORK_FORM",
    "PRESETS",
    "Cut",
    "Link",
    "Preset",
    "VirtualNetwork",
    "parse_link",
    "parse_network",
]
