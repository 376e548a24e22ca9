"""The watch of this process while it has groups: what it records, whom it knows, and what has gone wrong."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .. import environment
from ..errors import LockstepError, TransportError
from ..recorder import Log, Raw, Recording, current, places
from ..recorder.layout import State
from . import blame, jobs, judge, notes, reporting
from . import report as reports
from .captures import Captures
from .delivery import Doorbell
from .ending import Ending
from .far import Far
from .finding import Finding
from .health import Health
from .limits import Limits
from .meeting import Met
from .member import Member, Other, Started
from .places import Places
from .signs import Signs
from .sockets import Sockets
from .stacks import StackFile, ask
from .watcher import Watcher

__all__ = ["Session"]


class Session:
    """See the module.

    Args:
        met: what this rank has learnt of the others.
        limits: what the user wants.
        sockets: of the groups.
    """

    def __init__(self, met: Met, limits: Limits, sockets: Sockets) -> None:
        self.folder, self.recorder, self.peers, self.limits = met.folder, met.recorder, met.peers, limits
        self.rank = met.recorder.rank
        self.own = Recording(places.rank_file(met.folder, self.rank))
        self.recordings = dict(sorted({**met.peers, self.rank: self.own}.items()))
        self.met, self.current = met, current
        self.lock = threading.RLock()
        self.members: list[Member] = []
        self.error: TransportError | None = None
        self.delivered = threading.Event()  # the program has got the error
        self.uneven = 0  # whether ranks have different numbers of batches on purpose
        self.inside: set[int] = set()  # threads that are in a blocking call
        texts = met.recorder.texts
        self.signs, self.places = Signs(texts.number), Places(texts.number)
        texts.on_turn = self._forget_texts
        self.health = Health({rank: recording.pid for rank, recording in met.peers.items()})
        self.stacks = StackFile(met.folder, met.recorder)
        self.sockets = sockets
        self.home = threading.current_thread()  # of the program: most often the main one
        self.groups: dict[Any, Member] = {}
        self.has_failed = False  # and what it ends with is no good end
        self.logs = False  # whether all records are kept
        self.is_ending = False  # the program is over, or has raised an exception
        self.captures = Captures()
        self.far = Far(self)
        self._made: dict[tuple[str, tuple[int, ...]], int] = {}
        self._threads: set[int] = set()  # that have ever waited
        self.looked = time.monotonic()  # when the watcher has last looked
        self.was_alone = -math.inf  # when a rank was last seen to do what others are meant to wait for
        self._told: set[tuple[str, int]] = set()

    def start(self, end: Callable[[], None], log: Log | None) -> None:
        """Begin to watch. `end` is called when the program ends; `log` gets all records."""
        self.doorbell = Doorbell(self)
        self.logs = log is not None
        self._ending = Ending(self, end)
        self._watcher = Watcher(self, log)

    # groups

    def join(self, name: str, title: str, ranks: tuple[int, ...], limit_s: float = 0.0) -> Member:
        """Take part in a group; `limit_s` as for `Member`."""
        uses = self._made[name, ranks] = self._made.get((name, ranks), 0) + 1
        member = Member(self, name, title, ranks, uses, limit_s)
        with self.lock:
            self.members.append(member)
        return member

    def forget(self, group: Any) -> None:
        """`group` is about to be destroyed."""
        self.leave_out(group)
        self.groups.pop(group, None)

    def leave_out(self, group: Any) -> None:
        """Watch `group` no more; its waits are still ended when something has gone wrong."""
        member = self.groups.get(group)
        if member is not None and group.watch_member is not None:
            group.watch_member = None
            member.close()
            with self.lock:
                self.members.remove(member)

    def leave_all(self) -> None:
        """All groups are about to be destroyed: whoever waits for this rank shall know that it has not died."""
        if self.recorder.phase not in ("raised", "ended"):
            self.recorder.turn("left")

    def look_who_is_alone(self) -> None:
        """Note whether a rank, here or elsewhere, does what others are meant to wait for."""
        living = (each for rank, each in self.recordings.items() if rank not in self.health.gone)
        if any(each.knows_one_alone and each.phase in ("runs", "waits") for each in living):
            self.was_alone = time.monotonic()

    def since_alone(self, waited_s: float) -> float:
        """So many seconds of a wait as have passed since then: no limit counts the others."""
        return min(waited_s, time.monotonic() - self.was_alone)

    def waits_in(self) -> Raw | None:
        """The record of the blocking call that this rank is in."""
        number = self.own.word(State().since_record)
        return self.own.raw(number) if self.recorder.phase == "waits" else None

    def started(self, raw: Raw) -> Started:
        """The collective or message of that record."""
        return Started(raw.number, raw.sequence, raw.entered)

    @contextmanager
    def blocking(self, number: int, ranks: Collection[int]) -> Iterator[None]:
        """Around a wait of `ranks` in that record's call; raises what has gone wrong instead of a mere symptom."""
        thread = threading.get_ident()
        self.recorder.wait(number, time.monotonic())
        self.begin(thread)
        try:
            yield
        except BaseException as error:
            self.explain(error, ranks)
            raise
        finally:
            self.inside.discard(thread)
            self.recorder.run()

    # what goes wrong

    def compare(self, member: Member, own: Raw, other: Other, theirs: Raw, kind: str, raises: bool) -> None:
        """Two records of one collective differ: one of `judge.KINDS`."""
        if not judge.is_error(kind, self.limits.strict):
            self._warn(kind, own, other, theirs)
            return
        calls = self.own.record(own), other.recording.record(theirs)
        found = judge.explain(kind, (self.rank, other.rank), calls)
        if self.recorder.phase == "runs":
            self.recorder.wait(own.number, own.entered)
        self.fail(found.as_finding(member.key, own.sequence), raises)

    def has_told(self, kind: str, own: Raw, theirs: Raw) -> bool:
        """Whether that kind of difference is no error, and somebody knows already of these two lines, or this loop."""
        return not judge.is_error(kind, self.limits.strict) and _what(kind, own, theirs) in self._told

    def _warn(self, kind: str, own: Raw, other: Other, theirs: Raw) -> None:
        what = _what(kind, own, theirs)
        self._told.add(what)
        calls = self.own.record(own), other.recording.record(theirs)
        found = judge.explain(kind, (self.rank, other.rank), calls)
        try:
            (self.folder / f"{kind}-{what[1]:x}").touch(exist_ok=False)
        except FileExistsError:  # the other rank has said it
            return
        except OSError:  # no room: better said twice than not at all
            pass
        self.say(found.as_warning())

    def say(self, text: str) -> None:
        """Tell whoever looks at the screen."""
        try:
            notes.say(self.folder if environment.under_launcher() else None, text)
        except OSError:  # the launcher has gone, or the disk is full
            return

    def fail(self, finding: Finding, raises: bool = False) -> None:
        """Make a report, unless there is one, and take it up.

        Raises:
            DesyncError, RankLostError, StallError: with `raises`.
        """
        if self.error is None and not self.look():
            try:
                made = self.report(finding)
            except Exception:  # what cannot be told beside it shall not keep the error back
                made = reporting.make_report(finding, {}, {}, self.recorder.world_size)
            report = self.far.first(made)
            with suppress(OSError):  # no room, or no folder any more: at least this rank says what is wrong
                reports.write_once(self.folder, report)
            if not self.look():
                self.take(report)
        if raises:
            self.check()

    def look(self) -> bool:
        """Take up a report that somebody has made; whether there is one."""
        path = self.folder / "report.json"
        if self.error is None and path.exists():
            try:
                self.take(reports.read(path))
            except LockstepError:  # the folder has gone: the job is over
                return False
        return self.error is not None

    def take(self, report: reports.Report) -> None:
        """Let every collective of this rank raise this report, and end the waits."""
        with self.lock:
            if self.error is not None:
                return
            self.error = blame.error_of(report)
        self._end_waits()  # before the store is asked, which may take its time
        self.far.first(report)

    def _end_waits(self) -> None:
        self.sockets.shut()
        for group in list(self.groups):
            with suppress(Exception):  # it may be gone already
                group.abort()

    def report(self, finding: Finding) -> reports.Report:
        """The report of a finding, with the stacks of the ranks that are in no collective."""
        gone = self.health.look()
        stopped = {rank for rank in self.peers if self.health.is_stopped(rank)}
        running = [
            each
            for rank, each in self.recordings.items()
            if rank not in gone and rank not in stopped and each.phase == "runs"
        ]
        found, rows = ask(self.folder, running), self.far.rows()
        several = len(self.met.machines) > 1
        for rank, each in self.recordings.items():
            rows[rank] = reporting.row_of(each.state(), several, rank in gone, rank in stopped, found.get(rank, ()))
        return reporting.make_report(finding, self.recordings, rows, self.recorder.world_size)

    def explain(self, error: BaseException, ranks: Collection[int] | None = None) -> None:
        """Raise what an error comes from, if that is the end of the others and is known within a moment."""
        blame.explain(self, error, ranks)

    def check(self) -> None:
        """Raise what has gone wrong, if anything has."""
        if self.error is not None:
            self.hand_over()
            raise self.error

    def hand_over(self) -> None:
        """Note that the thread of the program gets the error."""
        if threading.current_thread() is self.home:
            self.delivered.set()

    def begin(self, thread: int) -> None:
        """Note that a thread is in a blocking call."""
        self.inside.add(thread)
        if thread not in self._threads:
            self._threads.add(thread)
            self.recorder.note(State().threads, len(self._threads))

    def _forget_texts(self) -> None:
        self.signs.forget()
        self.places.forget()

    def close(self) -> None:
        """Watch no more, and leave nothing behind."""
        self._watcher.stop()
        self._ending.close()
        self.doorbell.close()
        self.far.close()
        self.stacks.close()
        self.health.close()
        for group in list(self.groups):
            group.watch_member = None
        self.groups.clear()
        for recording in self.recordings.values():
            recording.close()
        self.recorder.close()
        if self.met.made:
            self._remove()

    def _remove(self) -> None:
        """Remove this rank's files, and the folder with the last of them."""
        with suppress(OSError):  # another rank has removed the folder
            for name in (f"rank-{self.rank}", f"stack-{self.rank}"):
                (self.folder / name).unlink(missing_ok=True)
            if not any(self.folder.glob("rank-*")):
                jobs.remove(self.folder.parent)


def _what(kind: str, own: Raw, theirs: Raw) -> tuple[str, int]:
    """What is said once: of other lines, for each pair of them, of other batches, for each loop."""
    return kind, own.line ^ theirs.line if kind == "lines" else own.loop
