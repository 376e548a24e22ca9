"""What the ranks of a job are doing on this host, watched from another process: what each one is
in, for how long, how fast it is, and how long it waits for the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..system.processes import read_status, resident_bytes
from ..system.terminal_text import plain
from .rank_progress import WINDOW_S, RankProgress
from .reader import RankState, RawRecord, RecorderReader, open_job

_HEARTBEAT_LIMIT_S = 3.0  # a rank's watchdog records many heartbeats per second
_ONLY_WAITS = 0.99  # share of the time; such a rank completes no step
_NO_TIME_S = 1e-6  # instead of 0, by which nothing can be divided


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank.

    Attributes:
        rank: its number, of `world_size`.
        pid: of its process.
        state: "computes", "waits", "stopped", "no heartbeat", "raised", "ended", "left" or "gone".
            A rank waits in a blocking call, and while it is in a collective that another rank of
            this host has not entered.
        seconds: for how long it has waited; for how long it has computed since its last collective
            or message.
        batch: its current batch, counted over all epochs.
        collective: the collective in which it waits, or its last one.
        call_site: the call site of the collective, with the source line.
        waiting: the share of its time in which it waited for other ranks: in a collective that
            another rank of this host had not entered, or blocked in a message, or, if there are
            ranks on other hosts, in any call; 0 to 1. None if it is the only rank of the job.
        waited_s: seconds in which it was so since the poll before; since the start of all ranks at
            the first poll.
        samples_s: samples per second; None if none has been counted.
        memory: resident bytes of its process; 0 if that has ended.
        progress: its counters.
    """

    rank: int
    world_size: int
    pid: int
    state: str
    seconds: float
    batch: int | None
    collective: str
    call_site: str
    waiting: float | None
    waited_s: float
    samples_s: float | None
    memory: int
    progress: RankProgress


class LiveRanks:
    """The ranks whose flight records are in `folder`; call `poll` repeatedly.

    Rates and shares are averages over the last `WINDOW_S` seconds; at the first poll, since the
    start of a rank.

    Args:
        folder: of the job's records.
        is_elastic: whether ranks may change, so that only those of the newest group count.
    """

    def __init__(self, folder: Path, is_elastic: bool = False) -> None:
        self._folder = folder
        self._is_elastic = is_elastic
        self._readers: dict[int, RecorderReader] = {}
        self._histories: dict[int, deque[tuple[float, RankState]]] = {}  # by rank, with the time
        self._collective_waits: deque[_CollectiveWaits] = deque()  # of the last polls
        self._replaced: list[RankProgress] = []

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def poll(self) -> list[RankStatus]:
        """Return the states of all ranks, in order."""
        for rank, reader in open_job(self._folder).items():
            self._adopt(rank, reader)
        readers = _newest_group(self._readers) if self._is_elastic else self._readers
        now = time.monotonic()
        begin = self._collective_waits[-1].end if self._collective_waits else 0.0
        waits = _find_waits(readers, begin, now)
        self._collective_waits.append(waits)
        while now - self._collective_waits[0].end >= WINDOW_S:
            self._collective_waits.popleft()
        is_whole = all(len(readers) == reader.world_size for reader in readers.values())
        return [
            self._status(rank, readers[rank], waits.pending.get(rank), is_whole, now)
            for rank in sorted(readers)
        ]

    def counters(self) -> list[RankProgress]:
        """Return the counters of all records that were there at the last poll, also of ranks that
        have ended; before them the last ones of records that were replaced since the last call.
        """
        replaced = self._replaced
        self._replaced = []
        return [*replaced, *(RankProgress.of(reader) for reader in self._readers.values())]

    def _adopt(self, rank: int, reader: RecorderReader) -> None:
        """Read the record of a rank with `reader` from now on, unless that record is known."""
        known = self._readers.get(rank)
        if known is not None and (known.pid, known.started) == (reader.pid, reader.started):
            reader.close()
            return
        if known is not None:
            self._replaced.append(RankProgress.of(known))
            known.close()
        self._readers[rank] = reader
        self._histories.pop(rank, None)

    def _status(
        self,
        rank: int,
        reader: RecorderReader,
        pending: RawRecord | None,
        is_whole: bool,
        now: float,
    ) -> RankStatus:
        """Return the status of a rank.

        Args:
            rank: its number.
            reader: of its record.
            pending: its first collective that another rank of this host has not entered, if any.
            is_whole: whether all ranks of the job are on this host.
            now: the time.
        """
        state = reader.state()
        history = self._histories.setdefault(rank, deque())
        history.append((now, state))
        while len(history) > 2 and now - history[1][0] >= WINDOW_S:
            history.popleft()
        waiting = None if state.world_size < 2 else self._share_of_waits(rank, is_whole, now)
        name = _name_of_state(state, now)
        call = state.call
        since = state.since
        if name == "computes" and pending is not None:
            # the call itself did not block, but the rank cannot go on without its result
            name = "waits"
            call = reader.record(pending)
            since = pending.entered
        elif name == "computes" and call is not None:
            since = max(since, call.entered, call.left or 0.0)
        collective = ""
        call_site = ""
        if call is not None:
            collective = plain(call.name or call.what)
            call_site = plain(call.call_site)
            if call.source:
                call_site += f": {plain(call.source)}"
        return RankStatus(
            rank,
            state.world_size,
            state.pid,
            name,
            max(0.0, now - since),
            state.batch,
            collective,
            call_site,
            waiting,
            self._seconds_of_waits(rank, now),
            self._samples_per_second(rank, waiting, now),
            resident_bytes(state.pid),
            RankProgress.of(reader),
        )

    def _seconds_of_waits(self, rank: int, now: float) -> float:
        """Return the seconds in which a rank has waited for others since the poll before."""
        history = self._histories[rank]
        in_messages_s = _seconds_in_messages(history[-1][1], now)
        if len(history) > 1:
            in_messages_s -= _seconds_in_messages(history[-2][1], history[-2][0])
        return self._collective_waits[-1].seconds.get(rank, 0.0) + max(0.0, in_messages_s)

    def _share_of_waits(self, rank: int, is_whole: bool, now: float) -> float:
        """Return the share of its time in which a rank has waited for others, 0 to 1."""
        observed_s = sum(waits.end - waits.begin for waits in self._collective_waits)
        in_collectives_s = sum(waits.seconds.get(rank, 0.0) for waits in self._collective_waits)
        since, earlier = self._histories[rank][0]
        _, state = self._histories[rank][-1]
        in_messages_s = _seconds_in_messages(state, now)
        in_calls_s = state.waited_until(now)
        if len(self._histories[rank]) > 1:
            in_messages_s -= _seconds_in_messages(earlier, since)
            in_calls_s -= earlier.waited_until(since)
        else:
            since = state.started
        passed_s = max(now - since, _NO_TIME_S)
        share = in_collectives_s / max(observed_s, _NO_TIME_S) + in_messages_s / passed_s
        if not is_whole:
            share = max(share, in_calls_s / passed_s)
        return min(1.0, max(0.0, share))

    def _samples_per_second(self, rank: int, waiting: float | None, now: float) -> float | None:
        """Return the samples per second of a rank; None before its first step."""
        history = self._histories[rank]
        since, earlier = history[0]
        state = history[-1][1]
        samples = state.samples
        if not samples:
            return None
        recent = samples - (earlier.samples or 0) if len(history) > 1 else 0
        only_waits = waiting is not None and waiting > _ONLY_WAITS
        if recent or only_waits:
            return recent / max(now - since, _NO_TIME_S)
        # no step has ended since the first poll that counts: a step may take longer than that
        return samples / max(now - state.started, _NO_TIME_S)


def _newest_group(readers: Mapping[int, RecorderReader]) -> dict[int, RecorderReader]:
    """Return the ranks of an elastic job's newest group, in which each worker has made a new
    record.
    """
    living = []
    for reader in readers.values():
        process = read_status(reader.pid)
        if process is not None and process.state not in ("Z", "X"):
            living.append(reader)
    living.sort(key=lambda reader: reader.started)
    newest_of_process = {reader.pid: reader for reader in living}
    if not newest_of_process:
        return {}
    world_size = living[-1].world_size
    return {
        reader.rank: reader for reader in newest_of_process.values() if reader.rank < world_size
    }


def _name_of_state(state: RankState, now: float) -> str:
    """Return what a rank is doing; see `RankStatus.state`."""
    process = read_status(state.pid)
    if process is None or process.state in ("Z", "X"):
        return state.phase if state.phase in ("ended", "raised") else "gone"
    if process.state in ("T", "t"):
        return "stopped"
    if state.phase in ("runs", "waits") and now - state.heartbeat > _HEARTBEAT_LIMIT_S:
        return "no heartbeat"
    return "computes" if state.phase == "runs" else state.phase


@dataclass(frozen=True)
class _CollectiveWaits:
    """How long ranks were in collectives that another rank of this host had not entered.

    Which thread blocks where says little: the all-reduces of a backward pass are asynchronous, and
    `DistributedDataParallel` waits for them in C++.

    Attributes:
        begin, end: of the time that was examined, by the monotonic clock.
        seconds: by rank.
        pending: by rank, its first collective that another rank has not entered at `end`.
    """

    begin: float
    end: float
    seconds: dict[int, float]
    pending: dict[int, RawRecord]


def _find_waits(
    readers: Mapping[int, RecorderReader], begin: float, end: float
) -> _CollectiveWaits:
    """Return the waits of all ranks from `begin`, or as far back as the records and `WINDOW_S`
    reach, to `end`.
    """
    calls = {rank: list(reader.raws()) for rank, reader in readers.items()}
    limits = [begin, end - WINDOW_S]
    limits += [reader.started for reader in readers.values()]
    # before the oldest record of a ring that has been filled nothing is known
    limits += [raws[0].entered for raws in calls.values() if raws and raws[0].number > 1]
    begin = min(end, max(limits))
    last_entry: dict[tuple[int, int], float] = {}  # by group key and sequence number
    for raws in calls.values():
        for raw in raws:
            if raw.sequence:
                collective = (raw.key, raw.sequence)
                last_entry[collective] = max(last_entry.get(collective, raw.entered), raw.entered)
    # by group key, the sequence number of the last collective that all its ranks on this host have
    # entered
    entered_by_all: dict[int, int] = {}
    for key in {key for key, _ in last_entry}:
        slots = ((reader, reader.group_slot(key)) for reader in readers.values())
        numbers = (reader.last_sequence(slot) for reader, slot in slots if slot >= 0)
        entered_by_all[key] = min(numbers, default=0)
    seconds: dict[int, float] = {}
    pending: dict[int, RawRecord] = {}
    for rank, raws in calls.items():
        seconds[rank] = 0.0
        covered = begin  # calls may overlap: time until here has been counted
        for raw in raws:
            if not raw.sequence:
                continue
            is_missing = raw.sequence > entered_by_all[raw.key]
            if is_missing and not raw.left:
                pending.setdefault(rank, raw)
            until = end if is_missing else last_entry[raw.key, raw.sequence]
            until = min(until, raw.left or end)
            seconds[rank] += max(0.0, until - max(raw.entered, covered))
            covered = max(covered, until)
    return _CollectiveWaits(begin, end, seconds, pending)


def _seconds_in_messages(state: RankState, now: float) -> float:
    """Return for how long a rank has been blocked in point-to-point messages, until `now`."""
    if state.phase == "waits" and state.call is not None and not state.call.sequence:
        return state.waited_in_messages_s + max(0.0, now - state.since)
    return state.waited_in_messages_s
