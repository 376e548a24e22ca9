"""What the ranks of several machines call is compared before any of it moves: each of them gets the records of all."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ..recorder import Raw, Record
from . import judge
from .swaps import crosses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .member import Member, Started

__all__ = ["Agreement", "Asked"]

_PATIENCE = timedelta(seconds=5)  # for another rank to say in words what it has called
_NEWS = ("fingerprint", "line", "batch", "loop", "name")


class Agreement:
    """Compares the collectives of one group that has ranks on several machines.

    A machine does not see what ranks elsewhere record. So before each collective the ranks exchange, over Gloo, some
    numbers of what they are about to call. Where these differ two of them say it in words as well, and all fail alike.

    Args:
        group: has another one, `everyone`, that connects the same ranks, and whose calls are not watched.
        member: of the group.
    """

    def __init__(self, group: Any, member: Member) -> None:
        self._group, self._member = group, member
        self._told: set[tuple[str, tuple[int, ...]]] = set()  # lines and loops that have met, and were warned of
        self._before: tuple[int, list[Raw]] = (0, [])  # the number of the last collective, and the records of all ranks

    def ask(self, started: Started) -> Asked:
        """Begin to compare; every rank must do so for the same collective."""
        member = self._member
        own = member.session.own.raw(started.number)
        goes_over = member.goes_over(member.session.own, started.sequence)
        numbers = [started.sequence, bool(member.session.uneven), goes_over, *(getattr(own, name, 0) for name in _NEWS)]
        mine = torch.tensor([_signed(number) for number in numbers])
        all_of_them = torch.empty(len(member.ranks), len(numbers), dtype=torch.int64)
        work = self._gather(all_of_them, mine)
        return Asked(lambda: self.judge(started, all_of_them.tolist()), work)

    def _gather(self, outputs: torch.Tensor, mine: torch.Tensor) -> Any:
        return self._group.everyone._allgather_base(outputs.view(-1), mine)

    def judge(self, started: Started, rows: Sequence[Sequence[int]]) -> None:
        """See whether all ranks call the same. All of them come to the same answer, as they have the same rows.

        Raises:
            DesyncError: they do not.
        """
        session, member = self._member.session, self._member
        if len({row[0] for row in rows}) > 1:
            return  # a call was refused on some ranks, and counts there no more
        own = session.own.raw(started.number)
        if own is None:
            return
        uneven = any(row[1] for row in rows)
        raws = [replace(own, **dict(zip(_NEWS, row[3:], strict=True))) for row in rows]
        found = [list(judge.differences(raws[0], raw, uneven)) for raw in raws]
        if any(row[2] for row in rows):
            self._add_swap(own.sequence, raws, found)
        self._before = own.sequence, raws
        member.pass_by(own, {raw.line for raw in raws})
        for kind in judge.KINDS:
            at = next((at for at, kinds in enumerate(found) if kind in kinds), -1)
            if at >= 0 and (judge.is_error(kind, session.limits.strict) or not self._has_told(kind, raws)):
                self._tell(started, kind, (member.ranks[0], member.ranks[at]))

    def _add_swap(self, sequence: int, raws: Sequence[Raw], found: Sequence[list[str]]) -> None:
        """Note which rank has changed places with the first one, if any."""
        number, before = self._before
        if number + 1 == sequence:
            for raw, last, kinds in zip(raws, before, found, strict=True):
                if crosses((before[0], last), (raws[0], raw)):
                    kinds.append("swap")

    def _tell(self, started: Started, kind: str, pair: tuple[int, int]) -> None:
        session = self._member.session
        difference = judge.explain(kind, pair, self._in_words(started, pair))
        if judge.is_error(kind, session.limits.strict):
            session.fail(difference.as_finding(self._member.key, started.sequence), raises=True)
        elif session.rank == pair[0] and pair[1] not in session.peers:  # else they have met before
            session.say(difference.as_warning())

    def _has_told(self, kind: str, raws: Sequence[Raw]) -> bool:
        what = kind, tuple(sorted({raw.line if kind == "lines" else raw.loop for raw in raws}))
        known = what in self._told
        self._told.add(what)
        return known

    def _in_words(self, started: Started, pair: tuple[int, int]) -> tuple[Record, Record]:
        """What the two ranks have called."""
        # by way of the store: Gloo's threads may all be in what does not end
        session, store = self._member.session, self._member.session.met.store
        topic = f"agreement/{self._member.key}/{started.sequence}"
        own = session.own.raw(started.number)
        if session.rank in pair and own is not None:
            store.set(f"{topic}/{session.rank}", json.dumps(asdict(session.own.record(own))))
        first, second = (_record(store, f"{topic}/{rank}") for rank in pair)
        return first, second


class Asked:
    """A comparison under way.

    Args:
        judge: is given what came of it, and raises if ranks differ.
        work: of the exchange.
    """

    def __init__(self, judge: Callable[[], None], work: Any) -> None:
        self._judge, self._work = judge, work
        self._judged: torch.futures.Future[Any] | None = None

    def check(self) -> None:
        """Wait for the others, and see whether all call the same.

        Raises:
            DesyncError: they do not.
        """
        if self._judged is not None:
            self._judged.wait()
            return
        self._work.wait()
        self._judge()

    def check_later(self) -> Asked:
        """See to it as soon as the others have come, in whichever thread."""

        def judged(exchanged: torch.futures.Future[Any]) -> None:
            exchanged.value()
            self._judge()

        self._judged = self._work.get_future().then(judged)
        return self

    def is_done(self) -> bool:
        """Whether `check` returns, or raises, at once."""
        return self._judged is None or bool(self._judged.done())

    def before(self, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
        """`future`, failed if ranks differ."""
        if self._judged is None:
            return future
        both = torch.futures.collect_all([self._judged, future])
        return both.then(lambda ended: [each.value() for each in ended.value()][1])


def _signed(number: int) -> int:
    """The same 64 bits, as torch knows them."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _record(store: Any, key: str) -> Record:
    try:
        store.wait([key], _PATIENCE)
        return Record(**json.loads(store.get(key)))
    except (RuntimeError, ValueError, TypeError):  # its rank, or the store, is gone
        return Record(0, "a collective", "a line", "", "", 0, None, False, 0.0, None)
