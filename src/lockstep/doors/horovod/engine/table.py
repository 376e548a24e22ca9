"""Which operations have been asked for by which ranks, from what all ranks tell each other (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["JOIN", "Agreed", "Record", "Table"]

Record = tuple[bytes, bytes]
"""(key, digest of the form) of an operation that a rank asks for."""

JOIN: Record = (bytes(8), bytes(8))
"""What a rank says that takes part in all that comes, until all ranks have said so."""


@dataclass(frozen=True)
class Agreed:
    """An operation that is to be carried out now, by all ranks.

    Attributes:
        key: of what; JOIN's when all ranks have joined.
        forms: the digests of the ranks that have asked for it, by rank; for JOIN, the ranks in the order of joining.
        absent: the ranks that have joined instead.
    """

    key: bytes
    forms: dict[int, bytes]
    absent: tuple[int, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether ranks mean different things by one name."""
        return len(set(self.forms.values())) > 1


class Table:
    """The same on every rank, as every rank is told the same in the same order.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._asked: dict[bytes, dict[int, bytes]] = {}
        self._joined: dict[int, bytes] = {}

    def take(self, told: Sequence[Sequence[Record]]) -> list[Agreed]:
        """Note what each rank has told in this round; what all of them have asked for by now, in an agreed order."""
        touched: dict[bytes, None] = {}
        joins = False
        for rank, records in enumerate(told):
            for key, form in records:
                if key == JOIN[0]:
                    self._joined[rank] = form
                    joins = True
                else:
                    self._asked.setdefault(key, {})[rank] = form
                    touched[key] = None
        found = [self._agree(key) for key in (list(self._asked) if joins else touched) if self._is_ready(key)]
        if len(self._joined) == self._size:
            found.append(Agreed(JOIN[0], self._joined))
            self._joined = {}
        return found

    def _is_ready(self, key: bytes) -> bool:
        forms = self._asked[key]
        return len(forms) + sum(rank not in forms for rank in self._joined) == self._size

    def _agree(self, key: bytes) -> Agreed:
        forms = self._asked.pop(key)
        return Agreed(key, forms, tuple(rank for rank in sorted(self._joined) if rank not in forms))

    def waiting_for(self, key: bytes) -> list[int]:
        """The ranks that have not asked for `key`, as far as is known here."""
        forms = self._asked.get(key, {})
        return [rank for rank in range(self._size) if rank not in forms and rank not in self._joined]
