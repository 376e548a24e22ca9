"""What every rank has to say when a group is made, told to all of them through the store."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import StallError
from ..c10d import Store

__all__ = ["tell_all"]


def tell_all(store: Store, topic: str, rank: int, text: str, names: Sequence[int]) -> list[str]:
    """The texts of all ranks, in rank order; every rank must call it, once for each topic.

    Args:
        store: where they meet; its timeout limits the wait.
        topic: names the exchange in the store.
        rank: this rank, 0 ≤ rank < len(names).
        text: what it has to say.
        names: what the ranks are called in errors.

    Raises:
        StallError: some ranks have not said anything in time; it names them.
    """
    store.set(f"{topic}/{rank}", text)
    keys = [f"{topic}/{i}" for i in range(len(names))]
    try:
        return [answer.decode() for answer in store.multi_get(keys)]
    except RuntimeError as error:
        late = tuple(name for name, key in zip(names, keys, strict=True) if not _is_there(store, key))
        if not late:
            raise
        who = f"rank{'s'[: len(late) != 1]} {', '.join(map(str, late))}"
        raise StallError(f"making the group ({topic}): {who} did not arrive: {error}", late) from error


def _is_there(store: Store, key: str) -> bool:
    there: bool = store.check([key])
    return there
