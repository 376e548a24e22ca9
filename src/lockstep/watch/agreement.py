"""What the ranks of several machines call is compared before any of it moves; only where they differ, in full."""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import json
from dataclasses import asdict, astuple, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..recorder import Raw, Record
from ..store_exchange import exchange_present, ranks_of, runs_of
from . import judge
from .digest import Call, Digest, words_of
from .swaps import crosses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .member import Member, Started

__all__ = ["Agreement", "Asked"]

_PATIENCE = timedelta(seconds=5)  # for another rank to say in words what it has called
_NEWS = ("fingerprint", "line", "batch", "loop", "name")


class Agreement:
    """Compares the collectives of one group that has ranks on several machines.

    A machine does not see what ranks elsewhere record. So before each collective the ranks all-reduce a digest of what
    they are about to call: as many bytes for a thousand ranks as for two. Where it does not show that all call the
    same, they tell each other some numbers of it, by way of the store; where these differ two of them say it in words
    as well, and all fail alike.

    Args:
        group: can all-reduce without that being watched.
        member: of the group.
    """

    def __init__(self, group: Any, member: Member) -> None:
        self._group, self._member = group, member
        self._told: set[tuple[str, tuple[int, ...]]] = set()  # lines and loops that have met, and were warned of
        self._before: tuple[int, list[Raw]] = (0, [])  # the number of the last collective, and the records of all ranks
        self._known: set[tuple[int, ...]] = set()  # patterns of digests in which a closer look has found no error

    def ask(self, started: Started, at_once: bool = False) -> Asked:
        """Begin to compare; every rank must do so for the same collective.

        Args:
            started: the collective.
            at_once: whether the caller goes on only with the answer.
        """
        member = self._member
        own = member.session.own.raw(started.number)
        uneven = bool(member.session.uneven)
        goes_over = member.goes_over(member.session.own, started.sequence)
        mine = Call(started.sequence, uneven, goes_over, *(getattr(own, name, 0) for name in _NEWS))
        words = torch.tensor(words_of(mine))
        work = self._all_reduce(words, at_once)
        return Asked(lambda: self._look(started, mine, words), work)

    def _all_reduce(self, words: torch.Tensor, at_once: bool) -> Any:
        options: Any = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp.BOR, not at_once
        return self._group.allreduce_unwatched([words], options)

    def _look(self, started: Started, mine: Call, words: torch.Tensor) -> None:
        """See whether the ranks' digest calls for a closer look; it is the same on all of them, and so is the answer.

        Raises:
            DesyncError: they do not call the same.
        """
        digest = Digest(words.tolist())
        if not digest.counts_alike or digest.is_alike or digest.pattern in self._known:
            return  # the first: a call was refused on some ranks, and counts there no more
        self.judge(started, self._rows(started, mine))
        if digest.pattern is not None:
            self._known.add(digest.pattern)

    def _rows(self, started: Started, mine: Call) -> list[Sequence[int]]:
        """What all ranks are about to call; of one that says nothing in time, what this one is."""
        # by way of the store: the collective itself may be under way already, and not end
        member = self._member
        own, row = member.session.own.raw(started.number), [int(number) for number in astuple(mine)]
        topic = f"agreement/{member.key}/{started.sequence}.{own.refused if own is not None else 0}/rows"
        at, size = member.ranks.index(member.session.rank), len(member.ranks)
        text = json.dumps(row)
        told = exchange_present(member.session.met.store, topic, at, text, size, _by_row, _PATIENCE)
        rows: list[Sequence[int]] = [row] * size
        for said, runs in json.loads(told):
            for rank in ranks_of(runs):
                rows[rank] = said
        return rows

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


def _by_row(said: Mapping[int, str]) -> str:
    """The rows that there are, and whose they are: of a thousand ranks' there are most often two."""
    found: dict[str, list[int]] = {}
    for rank, text in said.items():
        found.setdefault(text, []).append(rank)
    return json.dumps([[json.loads(text), runs_of(ranks)] for text, ranks in found.items()])


def _record(store: Any, key: str) -> Record:
    try:
        store.wait([key], _PATIENCE)
        return Record(**json.loads(store.get(key)))
    except (RuntimeError, ValueError, TypeError):  # its rank, or the store, is gone
        return Record(0, "a collective", "a line", "", "", 0, None, False, 0.0, None)
