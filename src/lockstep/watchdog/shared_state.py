"""What the parts of the watchdog share: the ranks' flight recorders, the limits, open graph
captures, and the error.

`WatchdogState` belongs to a `Session`, which makes the parts and gives them this state and no more.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import environment
from ..errors import TransportError
from ..flight_recorder import RawRecord, RecorderReader, jobs, layout
from ..flight_recorder.layout import StateWords
from ..system.patching import Replaced
from ..system.processes import ProcessLiveness
from .call_sites import CallSites
from .program import Program
from .rendezvous import Rendezvous
from .report import Finding
from .signatures import Signatures

_WORDS = StateWords()


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits and modes, as the user has set them; see `environment`.

    Attributes:
        strict: whether different call sites and batches are errors and not warnings.
        warning_s: seconds after which a straggler is warned about.
        stall_s: seconds after which a straggler is an error.
        debugging: whether a debugger is attached to a rank, so that stragglers and deadlocks are
            not reported.
        heartbeat_s: seconds after which a host that does not respond is lost.
        expects_losses: whether the job is elastic, so that the loss of a rank is no error.
        setting: the name of what sets `stall_s`, for reports.
    """

    strict: bool
    warning_s: float
    stall_s: float
    debugging: bool
    heartbeat_s: float = 30.0
    expects_losses: bool = False
    setting: str = "--stall-timeout (LOCKSTEP_STALL_TIMEOUT)"

    @classmethod
    def read(cls) -> Limits:
        """Return the limits that the environment variables set.

        Raises:
            ConfigError: a variable has an invalid value.
        """
        return cls(
            environment.watchdog_mode() == "strict",
            environment.stall_warning(),
            environment.stall_timeout(),
            environment.debug_rank() is not None,
            environment.heartbeat_timeout(),
            environment.elastic_worker() is not None,
        )


class GraphCaptures:
    """Whether this process captures a device graph, during which no device may be queried.

    In CUDA's default mode a capture fails if any thread queries an event meanwhile. The watchdog of
    torch's NCCL backend changes the mode of its thread for that, which Python code cannot do:
    queries wait here until no capture is open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # no capture begins during a query
        # weak: a graph that is dropped is not captured any more
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def are_open(self) -> bool:
        """Whether a graph is being captured; operations that are called then may run later."""
        return len(self._open) > 0

    def query(self, question: Callable[[], bool]) -> bool:
        """Return the result of `question`, which queries a device; False while a graph is being
        captured.
        """
        with self._lock:
            return not self.are_open and question()

    def replacements(self) -> list[Replaced]:
        """Patch torch's graph classes to learn of captures, while the session lasts."""
        kinds = (
            torch.cuda.CUDAGraph,
            getattr(torch.xpu, "XPUGraph", None),
            getattr(torch.accelerator, "Graph", None),
        )
        replaced = []
        for kind in filter(None, kinds):
            replaced += [
                Replaced(kind, "capture_begin", self._begin),
                Replaced(kind, "capture_end", self._end),
            ]
        return replaced

    def _begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._open.add(graph)
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                self._close(graph)
                raise

        return begin

    def _end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self._close(graph)

        return end

    def _close(self, graph: Any) -> None:
        with self._lock:
            self._open.discard(graph)


@dataclass(eq=False, slots=True)
class PendingCall:
    """A collective or message that may not have completed yet.

    Attributes:
        number: of its record.
        sequence: sequence number in its group; 0 for a message.
        entered: when it was called.
        work: tells whether it has completed: c10d's work, or an event; None for a call in which the
            program waits.
        message: of a message the other rank, whether it is sent, and the key of its channel; else
            None.
    """

    number: int
    sequence: int
    entered: float
    work: Any = None
    message: Any = None

    @classmethod
    def of(cls, raw: RawRecord) -> PendingCall:
        """Return the call of that record."""
        return cls(raw.number, raw.sequence, raw.entered)


class WatchdogState:
    """The shared state of the watchdog of this process.

    Args:
        rendezvous: what this rank knows of the others.
        limits: time limits and modes.

    Attributes:
        rank, folder, recorder, peers, limits: as in `rendezvous` and `limits`.
        own_reader: reader of this rank's flight recorder.
        readers: readers of all flight recorders of this host, by rank.
        lock: protects the lists of pending calls and the error.
        error: the report of what went wrong, as the exception that every rank raises; None while
            all is well.
        program: of this process, and whether it has got that error.
        uneven_batches: above 0 while ranks have different numbers of batches on purpose.
        waiting_threads: identities of the threads that are in a blocking call.
        keeps_log: whether all records are written to a log.
        last_poll: when the monitor thread last looked for a report.
        fail: makes a report of a finding, unless there is one, and distributes it.
        poll_report: reads a report that another rank has made; returns whether there is one.
        raise_root_cause: raises the report instead of an exception that is only a symptom of it.
    """

    fail: Callable[[Finding], None]
    poll_report: Callable[[], bool]
    raise_root_cause: Callable[[BaseException, Collection[int] | None], None]

    def __init__(self, rendezvous: Rendezvous, limits: Limits) -> None:
        self.rendezvous = rendezvous
        self.limits = limits
        self.folder = rendezvous.folder
        self.recorder = rendezvous.recorder
        self.peers = rendezvous.peers
        self.rank = self.recorder.rank
        self.own_reader = RecorderReader(layout.rank_file(self.folder, self.rank))
        self.readers = dict(sorted({**self.peers, self.rank: self.own_reader}.items()))
        self.health = ProcessLiveness({rank: reader.pid for rank, reader in self.peers.items()})
        texts = self.recorder.texts
        self.signatures = Signatures(texts.intern)
        self.call_sites = CallSites(texts.intern)
        texts.on_wraparound = self._clear_caches
        self.captures = GraphCaptures()
        self.lock = threading.RLock()
        self.error: TransportError | None = None
        self.program = Program(self.recorder)
        self.uneven_batches = 0
        self.waiting_threads: set[int] = set()
        self.keeps_log = False
        self.last_poll = time.monotonic()
        self._last_solo = -math.inf  # when a rank was last seen in a `solo_section`
        self._known_threads: set[int] = set()  # that have ever waited

    def _clear_caches(self) -> None:
        self.signatures.clear()
        self.call_sites.clear()

    def current_wait(self) -> RawRecord | None:
        """Return the record of the blocking call that this rank is in, if any."""
        number = self.own_reader.state_word(_WORDS.since_record)
        return self.own_reader.raw(number) if self.recorder.phase == "waits" else None

    def enter_wait(self, thread: int) -> None:
        """Record that a thread is in a blocking call."""
        self.waiting_threads.add(thread)
        if thread not in self._known_threads:
            self._known_threads.add(thread)
            self.recorder.set_word(_WORDS.threads, len(self._known_threads))

    @contextmanager
    def blocking(
        self, number: int, ranks: Collection[int], is_message: bool = False
    ) -> Iterator[None]:
        """Let this thread wait for `ranks` in the call of that record during the body; a failure is
        explained.
        """
        thread = threading.get_ident()
        began = time.monotonic()
        self.recorder.begin_wait(number, began)
        self.enter_wait(thread)
        try:
            yield
        except BaseException as error:
            self.raise_root_cause(error, ranks)
            raise
        finally:
            self.waiting_threads.discard(thread)
            now = time.monotonic()
            self.recorder.end_wait(now)
            if is_message:
                self.recorder.add_message_wait(now - began)

    def update_last_solo(self) -> None:
        """Note whether a rank, here or on another host, is in a `solo_section`."""
        living = (reader for rank, reader in self.readers.items() if rank not in self.health.gone)
        if any(
            reader.knows_of_solo_section and reader.phase in ("runs", "waits") for reader in living
        ):
            self._last_solo = time.monotonic()

    def seconds_since_solo(self, waited_s: float) -> float:
        """Return how many of `waited_s` seconds have passed since the last `solo_section`: limits
        count only these.
        """
        return min(waited_s, time.monotonic() - self._last_solo)

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            self.program.note_error()
            raise self.error

    def write_message(self, text: str) -> None:
        """Show `text` to the user, through the launcher if there is one."""
        try:
            jobs.write_message(self.folder if environment.under_launcher() else None, text)
        except OSError:  # the launcher is gone, or the disk is full
            return
