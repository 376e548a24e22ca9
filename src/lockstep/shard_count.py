"""How many shards a global batch is cut into, as users say it."""

from __future__ import annotations

from .errors import ConfigError

__all__ = ["DEFAULT_SHARDS", "shard_count"]

DEFAULT_SHARDS = 8


def shard_count(shards: object, workers: int) -> int:
    """The number of shards that is meant; True means the usual one.

    Raises:
        ConfigError: when it is none, or there are more workers than shards.
    """
    count = DEFAULT_SHARDS if shards is True else shards
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError("shards", "a whole number of at least 1", shards)
    if count < workers:
        hint = "Use fewer workers, or more shards, which give other bits."
        raise ConfigError("shards", f"at least one for each of {workers} workers", count, hint)
    return count
