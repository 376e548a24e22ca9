"""What is known of ranks on other machines: one rank of each machine tells and asks for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..recorder.layout import State
from . import machines
from . import report as reports
from .causes import COMPANY_S, names
from .circles import Circles
from .finding import Finding
from .report import RankRow, Report
from .rounds import PERIOD_S, Rounds
from .sockets import Sockets
from .telling import told_of

if TYPE_CHECKING:
    from .view import Session

__all__ = ["Far"]

_TIMEOUT = timedelta(seconds=5)
_WAITS_S = 3.0  # who has waited for so long may say that nobody comes any more
_LAST_S = 1.0  # in which others may come to the end of the program, too
_ABSENT_S = 1.0  # a watcher that has not looked for so long has not seen what others have said


class Far:
    """See the module. Where all ranks are on one machine it does nothing.

    Args:
        session: of this process.
    """

    def __init__(self, session: Session) -> None:
        self._session, met = session, session.met
        self._rounds: Rounds | None = None
        self._told: dict[int, Any] = {}
        self._next = self._failing = self._since_raised = 0.0
        self._warned: dict[tuple[int, int], float] = {}
        self._circles = Circles()
        self._uneven_groups: set[str] = set()  # in which ranks are on other batches, and that has been said
        self._machine = 0
        self._final = False  # whether this rank is about to leave
        self._heartbeat = met.heartbeat
        if len(met.machines) > 1:
            self._machine = next(i for i, ranks in enumerate(met.machines) if session.rank in ranks)
            store = _clone(met.store, session.limits.heartbeat_s)
            store.set_timeout(_TIMEOUT)
            self._rounds = Rounds(store, self._machine, len(met.machines))
            if session.rank == met.machines[self._machine][0]:
                self._rounds.begin()

    def look(self, passed_s: float) -> None:
        """Tell and hear what is new, twice a second, if this rank speaks for its machine.

        Args:
            passed_s: seconds since this was called before.
        """
        rounds, now = self._rounds, time.monotonic()
        if rounds is None:
            return
        if passed_s > _ABSENT_S:  # this process was stopped, or got no turn: others may have been, too
            rounds.forgive()
            self._failing = 0.0
        if self._heartbeat is not None:
            self._heartbeat.look()  # before what others have told is read: they tell how they leave, and then leave
        if now < self._next or not self._speaks():
            return
        self._next = now + PERIOD_S
        own = self._own()
        try:
            rounds.tell(own)
            self._failing = 0.0
        except RuntimeError as error:
            self._failing = self._failing or now
            if time.monotonic() - self._failing > _WAITS_S and self._somebody_waits():
                self._session.fail(_cut_off(error))
            return
        with suppress(RuntimeError):  # a machine has said nothing yet
            report, self._told = rounds.hear()
            self._session.recorder.note(State().alone_elsewhere, any(said.get("alone") for said in self._told.values()))
            if report:
                self._take(report)
            else:
                self._judge(rounds, own)

    def settle(self) -> None:
        """At the end of a program, compare the last collectives, of which there was no time to tell yet."""
        rounds, session = self._rounds, self._session
        if rounds is None or session.error is not None or session.has_failed or not self._speaks():
            return
        self._final, deadline, own = True, time.monotonic() + _LAST_S, self._own()
        with suppress(RuntimeError, OSError, ValueError):  # the store has gone, and its machine
            rounds.tell(own)
            report, told = rounds.hear()
            while not report and not _all_final(told) and time.monotonic() < deadline:
                time.sleep(0.01)
                report, told = rounds.hear()
            # no report is taken up: it may be about this very end, which others have waited for in vain
            finding = machines.parted(self._job(), {**told, self._machine: own}, self._may_be_uneven())
            if finding is not None:
                session.fail(finding)

    def _somebody_waits(self) -> bool:
        """Whether ranks of this machine have long waited for others; if not, nobody need be there any more."""
        session, before = self._session, time.monotonic() - _WAITS_S
        far = {member.key: member.first() for member in session.members if member.far}
        if any(first is not None and first.entered < before for first in far.values()):
            return True
        waiting = [each for each in session.peers.values() if each.phase == "waits"]
        raws = [each.raw(each.word(State().since_record)) for each in waiting]
        return any(raw is not None and raw.key in far and raw.entered < before for raw in raws)

    def _speaks(self) -> bool:
        """Whether this is the first of its machine's ranks that can speak."""
        session = self._session
        for rank in session.met.machines[self._machine]:
            if rank == session.rank:
                return True
            peer = session.peers.get(rank)
            able = peer is not None and peer.phase not in ("ended", "left") and rank not in session.health.gone
            # one that holds the interpreter for long cannot speak; that two do is no harm
            silent_s = time.monotonic() - peer.reals[State().heartbeat] if peer is not None else 0.0
            if able and silent_s < _ABSENT_S and not session.health.is_stopped(rank):
                return False
        return False

    def _own(self) -> dict[str, Any]:
        session = self._session
        stopped = [rank for rank in session.peers if session.health.is_stopped(rank)]
        near = {member.key for member in session.members if not member.far}
        told = told_of(session.recordings, session.health.gone, stopped, near)
        if self._machine == 0:  # the others hear of nobody else
            told["alone"] = told["alone"] or any(said.get("alone") for said in self._told.values())
        return {**told, "final": self._final}

    def _judge(self, rounds: Rounds, own: dict[str, Any]) -> None:
        session = self._session
        lost = self._lost()
        if self._machine == 0:
            job = self._job()
            finding = machines.compare(job, self._told, lost, self._may_be_uneven()) or self._raised(job, self._told)
            self._warn_of_batches(job)
            if finding is None and not session.limits.debugging:
                finding = self._circles.look(self._told) or self._slow()
        else:
            finding = self._first_machine(lost.get(0), own)
        if finding is not None:
            session.fail(finding)

    def _may_be_uneven(self) -> bool:
        """Whether ranks may be on other batches: on purpose, or for all that is known."""
        return bool(self._session.uneven) or not self._session.limits.strict

    def _warn_of_batches(self, job: machines.Job) -> None:
        """Say once for each group that ranks are on other batches, unless `Agreement` does."""
        session = self._session
        if session.uneven or session.limits.strict:
            return
        keys = {str(each.key) for each in session.members if each.far and each.agreement is None} - self._uneven_groups
        told = {
            machine: {**said, "groups": {key: parts for key, parts in said.get("groups", {}).items() if key in keys}}
            for machine, said in self._told.items()
        }
        finding = machines.parted(job, told)
        if finding is not None and finding.kind == "batches":
            self._uneven_groups.add(str(finding.key))
            session.say(f"warning: {finding.sentence} {finding.cause} {finding.advice}")

    def _raised(self, job: machines.Job, told: dict[int, Any]) -> Finding | None:
        """A rank that has raised, at once if others wait; else they have a moment to raise the same."""
        finding, waits = machines.raised(job, told)
        if finding is None:
            return None
        self._since_raised = self._since_raised or time.monotonic()
        return finding if waits or time.monotonic() - self._since_raised >= COMPANY_S else None

    def _job(self) -> machines.Job:
        session = self._session
        return machines.Job(session.met.machines, {each.key: each.ranks for each in session.members if each.far})

    def _lost(self) -> dict[int, tuple[str, str]]:
        """The machines whose ranks say nothing any more, of those that this rank hears of; see `machines.Lost`."""
        session, found = self._session, {}
        for machine, ranks in enumerate(session.met.machines):
            state = None if machine == self._machine else self._state_of(machine, ranks)
            if state is not None:
                found[machine] = state
        return found

    def _state_of(self, machine: int, ranks: Sequence[int]) -> tuple[str, str] | None:
        heart, limit_s = self._heartbeat, self._session.limits.heartbeat_s
        lives = {rank: "unknown" if heart is None else heart.life(rank) for rank in ranks}
        if "lost" in lives.values():
            return "lost", f"its machine has not answered for {limit_s:g} s"
        if "lives" in lives.values():
            return None  # one that says nothing is only busy
        if all(life in ("ended", "left") for life in lives.values()) and "ended" in lives.values():
            return "died", "its process is gone"
        silent_s = self._rounds.silent_s(machine) if self._rounds is not None else 0.0
        return ("lost", f"for {silent_s:.1f} s") if silent_s > limit_s else None

    def _first_machine(self, lost: tuple[str, str] | None, own: dict[str, Any]) -> Finding | None:
        rows = self._told.get(0, {}).get("ranks", {})
        if rows and all(row[0] in ("ended", "raised", "died") for row in rows.values()):
            # it does not judge any more
            job, told = self._job(), {0: self._told[0], self._machine: own}
            return machines.compare(job, told, {}, self._may_be_uneven()) or self._raised(job, told)
        if lost is None or not self._somebody_waits():
            return None
        first = self._session.met.machines[0]
        text = f"Rank {first[0]}, or its machine, is not there any more, and others wait: {lost[1]}."
        return Finding("lost", text, first)

    def _slow(self) -> Finding | None:
        """Say which ranks come late, or that they have come too late."""
        limits = self._session.limits
        for key, sequence, seconds, limit_s, what, late, waiting in machines.slow_of(self._job(), self._told):
            allowed_s = max(limits.stall_s, limit_s)
            if self._session.since_alone(seconds) >= allowed_s:
                text = f"{names(late)} did not come to {what} within {allowed_s:.0f} s."
                return Finding("stall", text, tuple(late), "", _ADVICE, key, sequence)
            # ranks of one machine have told of each other
            machine_of = {rank: i for i, ranks in enumerate(self._session.met.machines) for rank in ranks}
            apart = {machine_of[rank] for rank in (*late, *waiting)}
            if seconds > limits.warning_s and len(apart) > 1 and (key, sequence) not in self._warned:
                self._warned = {(key, sequence): seconds}
                who = f"{names(late).lower()} {'has' if len(late) == 1 else 'have'}"
                self._session.say(f"slow: {who} not come to {what} for {seconds:.1f} s, where others wait.")
        return None

    def _take(self, text: str) -> None:
        with suppress(OSError, ValueError):
            reports.write_once(self._session.folder, reports.from_json(text))
        self._session.look()

    def rows(self) -> dict[int, RankRow]:
        """What is known of each rank on other machines."""
        return machines.rows_of(self._job(), self._told, self._lost())

    def first(self, report: Report) -> Report:
        """Let the other machines know of a report; the first that any of them has made, which may be another.

        What a machine finds after that may only follow from it: ranks end, and their peers' connections with them.
        """
        if self._rounds is not None:
            with suppress(RuntimeError, ValueError):  # they will hear nothing of this machine any more, and know
                return reports.from_json(self._rounds.report(report.to_json()))
        return report

    def close(self) -> None:
        """Ask no more, and let the others know how this machine's ranks have ended."""
        if self._rounds is not None and self._speaks():
            with suppress(RuntimeError, OSError, ValueError):
                self._rounds.tell(self._own())
        if self._heartbeat is not None:
            self._heartbeat.close()

    def abandon(self) -> None:
        """In a forked child: the connections to other machines are its parent's."""
        if self._heartbeat is not None:
            self._heartbeat.abandon()


def _clone(store: Any, limit_s: float) -> Any:
    """The store by a connection of its own, which does not wait for a machine that has gone for ever."""
    if not hasattr(store, "clone"):
        return store
    made = Sockets()
    with made.watching():
        found = store.clone()
    made.keep_alive(limit_s)
    return found


_ADVICE = "--stall-timeout, or LOCKSTEP_STALL_TIMEOUT, is how long is waited."


def _all_final(told: dict[int, Any]) -> bool:
    return all(said.get("final") for said in told.values())


def _cut_off(error: RuntimeError) -> Finding:
    return Finding(
        "lost",
        "The job's store cannot be reached any more: the machine that keeps it, or the way to it, is lost.",
        (),
        str(error)[:200],
    )
