"""Bitwise reproducibility at any number of workers: shards, ordered sums, keyed randomness and determinism settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .registry import import_object

if TYPE_CHECKING:
    from .parallel.fingerprints import fingerprint
    from .parallel.ordered_reducer import OrderedReducer
    from .parallel.randomness import seed_shard

__all__ = ["OrderedReducer", "fingerprint", "seed_shard"]

_ELSEWHERE = {
    "OrderedReducer": "lockstep.parallel.ordered_reducer:OrderedReducer",
    "fingerprint": "lockstep.parallel.fingerprints:fingerprint",
    "seed_shard": "lockstep.parallel.randomness:seed_shard",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return import_object(name, _ELSEWHERE[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
