"""Bitwise reproducibility at any number of workers: shards, ordered sums, keyed randomness and
determinism settings.
"""

from __future__ import annotations

from .parallel.fingerprints import fingerprint
from .parallel.ordered_reducer import OrderedReducer
from .parallel.randomness import seed_shard

__all__ = ["OrderedReducer", "fingerprint", "seed_shard"]
