"""The engine: takes requests in any order, and executes each in the cycle in which all ranks have
submitted it.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from lockstep import Communicator, devices, watchdog
from lockstep.environment import variables
from lockstep.errors import ConfigError, TransportError
from lockstep.watchdog.delivery import is_transport_error
from lockstep.watchdog.rounds import Rounds

from . import operation_log
from .execution import abort_waits, destroy_group, execute, matching_requests
from .negotiation import NegotiationMessages, RawCollectives, negotiation_device
from .request import JOIN_KEY, MessageTable, Request, Response, internal_error
from .response_cache import ResponseCache
from .stall_inspector import StallInspector, StallLimits, operations_in_words


def _record_event(tensors: Sequence[torch.Tensor]) -> Any:
    """Record and return an event on the current stream of the device of `tensors`; None where it
    has no streams.
    """
    if not tensors or not devices.has_streams(tensors[0].device):
        return None
    return devices.record_event(tensors[0].device)


def _wait_for_event(event: Any) -> None:
    """Let later work on the current stream of this thread start after `event`; return at once if
    that is None.
    """
    if event is not None:
        event.wait()


# Requests that are not urgent are negotiated once so many bytes are pending: enough for sending
# them to pay off ...
_EAGER_BYTES = 1 << 20
# ... or when they have been pending for this long.
_IDLE_S = 0.05
# After a cycle in which no rank has announced anything the next one is delayed, twice as long each
# time.
_MIN_BACKOFF_S = 0.2e-3
_MAX_BACKOFF_S = 5e-3


class Engine:
    """Negotiates and executes the operations of one set of ranks.

    In each cycle every rank announces its requests since its last cycle, and all ranks execute, in
    the same order, the requests that all of them have submitted by then. A rank on which nothing
    waits for a request runs no cycle, and the cycles of the other ranks block until it does:
    without it no operation can be executed anyway. The thread that waits for a request runs the
    cycles. A background thread runs them for requests for which no thread waits.

    Args:
        comm: the ranks; from now on only the engine may use it.
        title: the name of this set of ranks in a timeline; "" for all ranks.
    """

    def __init__(self, comm: Communicator, title: str = "") -> None:
        self.comm = comm
        self._title = title
        self._completed = (
            0  # operations, including those that this rank, having joined, did not submit
        )
        self._message_table = MessageTable(comm.size)
        self._collectives = RawCollectives(comm)
        device = negotiation_device(comm)
        self._messages = (
            NegotiationMessages(comm, device, self._collectives) if comm.size > 1 else None
        )
        self._response_cache = ResponseCache(
            self._collectives if device.type == "cpu" else None, comm.size
        )
        self._lock = threading.RLock()  # acquiring it directly is faster than through the condition
        self._changed = threading.Condition(self._lock)
        self._requests: dict[bytes, Request] = {}
        self._unannounced: collections.deque[Request] = collections.deque()
        self._unnamed_counts: collections.Counter[str] = collections.Counter()
        self._in_cycle = self._urgent = False
        self._waiters = 0
        self._pending_bytes = 0
        self._backoff_s = self._next_cycle_at = 0.0
        self._failure: BaseException | str | None = (
            None  # why the engine no longer executes anything
        )
        self._background = threading.Thread(
            target=self._run_background, name="lockstep horovod", daemon=True
        )
        # without the watchdog nobody inspects anything
        self._rounds: Rounds | None = None
        self._inspector: StallInspector | None = None
        if comm.size > 1:
            limits = StallLimits.from_variables(variables())
            self._rounds = watchdog.watch_rounds(
                comm.group, self._purpose, limits.warn_s, limits.shutdown_s, limits.setting
            )
            if self._rounds is not None:
                self._inspector = StallInspector(
                    comm.rank, limits, self._rounds, self._message_table
                )
            self._background.start()

    def _purpose(self) -> str:
        """Return for what this rank runs cycles, for the watchdog's reports."""
        return operations_in_words(list(self._requests.values())) or "a cycle of Horovod"

    def name_for(self, kind: str) -> str:
        """Return a name for an unnamed request: the same for the n-th one of its kind on every
        rank.
        """
        self._unnamed_counts[kind] += 1
        return f"{kind}.noname.{self._unnamed_counts[kind]}"

    def submit(self, request: Request) -> None:
        """Submit a request.

        Raises:
            ConfigError: an operation of the same kind and name is pending.
            HorovodInternalError: the engine has failed or been shut down.
        """
        with self._lock:
            self._enqueue(request)
            self._pending_bytes += sum(
                tensor.numel() * tensor.element_size() for tensor in request.inputs
            )
            if request.urgent or self._pending_bytes >= _EAGER_BYTES:
                self._wake_background()
        if self.comm.size == 1:
            self.wait(request)

    def run(self, request: Request) -> Any:
        """Submit a request, wait for it and return its result; see `submit` and `wait` for what
        this raises.
        """
        with self._lock:
            self._enqueue(request)
            self._run_cycles_until_done(request)
        return self._result(request)

    def wait(self, request: Request) -> Any:
        """Wait for `request` and return its result.

        Raises:
            HorovodInternalError: it could not be executed.
            ConfigError: the operation is not defined for its arguments.
        """
        if not request.done:
            with self._lock:
                self._run_cycles_until_done(request)
        return self._result(request)

    def _result(self, request: Request) -> Any:
        _wait_for_event(request.result_ready)
        if request.error is not None:
            if self._rounds is not None:
                self._rounds.note_raised()
            raise request.error
        return request.result

    def poll(self, request: Request) -> bool:
        """Return whether `request` has completed; if not, have the background thread negotiate it
        from now on.
        """
        if not request.done:
            with self._lock:
                if self._failure is None:
                    self._wake_background()
        return request.done

    def close(self, reason: str = "Horovod has been shut down on this rank") -> None:
        """Leave the set of ranks: pending requests of this rank fail with `reason`, those of the
        other ranks too.
        """
        with self._lock:
            self._fail(reason)
        if self._background.is_alive() and self._background is not threading.current_thread():
            self._background.join(timeout=5.0)

    # The callers of the following methods hold `_lock`.

    def _enqueue(self, request: Request) -> None:
        if self._failure is not None:
            raise internal_error("this rank can no longer reach the others", self._failure)
        key = request.key
        if key in self._requests:
            expected = f"a name that no pending {request.kind} has"
            raise ConfigError(
                "name", expected, request.name, "Call synchronize() for the pending one first."
            )
        request.inputs_ready = _record_event(request.inputs)
        request.submitted_at = time.monotonic()
        if (log := operation_log.active) is not None:
            log.submitted(request)
        self._requests[key] = request
        self._unannounced.append(request)

    def _run_cycles_until_done(self, request: Request) -> None:
        self._waiters += 1
        try:
            while not request.done:
                if not self._in_cycle:
                    self._run_cycle(own_waiters=1)
                else:
                    self._changed.wait(_IDLE_S)
        except TransportError as report:  # the watchdog's, which a signal raises in the main thread
            self._fail(report)
        finally:
            self._waiters -= 1
            if self._urgent and self._requests:
                self._changed.notify_all()

    def _wake_background(self) -> None:
        self._urgent = True
        if not self._in_cycle:
            self._changed.notify_all()

    def _run_background(self) -> None:
        if devices.has_streams(self.comm.device):
            devices.use(self.comm.device)
        with self._lock:
            while self._failure is None:
                if self._urgent and self._requests and not self._in_cycle and not self._waiters:
                    self._run_cycle()
                elif not self._changed.wait(_IDLE_S) and self._requests:
                    self._urgent = True

    def _run_cycle(self, own_waiters: int = 0) -> None:
        """Run one cycle, releasing `_lock` meanwhile.

        Args:
            own_waiters: how many of `_waiters` are the calling thread.
        """
        delay = (
            self._next_cycle_at - time.monotonic()
            if self._backoff_s and not self._unannounced
            else 0.0
        )
        if delay > 0:
            self._changed.wait(delay)
            return
        queue = self._unannounced
        new = (
            [queue.popleft() for _ in range(min(len(queue), NegotiationMessages.max_messages))]
            if queue
            else []
        )
        responses: Sequence[Response] = ()
        failure: BaseException | None = None
        try:
            self._in_cycle = True
            self._pending_bytes = 0
            rounds = self._rounds
            if rounds is not None:
                rounds.begin()
            self._lock.release()
            try:
                if (log := operation_log.active) is not None:
                    log.cycle_started()
                responses = self._negotiate_and_execute(new)
            except BaseException as error:
                failure = error if rounds is None else rounds.root_cause(error)
            finally:
                if rounds is not None:
                    rounds.end()
                self._lock.acquire()
        finally:
            self._in_cycle = False
        for response in responses:
            self._complete(response)
        if failure is not None or self._failure is not None:
            self._fail(failure or self._failure or "")
        if failure is not None and not isinstance(failure, Exception):  # Ctrl-C is for the program
            raise failure
        self._urgent = self._urgent and bool(self._requests)
        if self._waiters > own_waiters or self._urgent:
            self._changed.notify_all()

    def _complete(self, response: Response) -> None:
        request = self._requests.pop(response.key, None)
        self._completed += 1
        if request is None:  # this rank has joined
            return
        if response.key == JOIN_KEY:
            # ranks have joined after different numbers of requests; from now on their counts are
            # equal again
            self._unnamed_counts.clear()
            request.result = list(response.signatures)[-1]
        if (log := operation_log.active) is not None:
            log.completed(request, self._completed, self._title)
        request.done = True

    def _fail(self, cause: BaseException | str) -> None:
        """Fail all requests; the cause of the first call stays."""
        if self._failure is None:
            self._failure = cause
            for request in self._requests.values():
                request.fail(cause)
            self._requests.clear()
            self._unannounced.clear()
        if self._in_cycle or (isinstance(cause, Exception) and not is_transport_error(cause)):
            abort_waits(self.comm)  # an error of the transport has reached the other ranks already
        # otherwise the thread in the cycle destroys the group when it returns
        if not self._in_cycle:
            self._collectives.close()
            destroy_group(self.comm)
        self._changed.notify_all()

    # The following methods are called without `_lock`, by the one thread that runs the cycle.

    def _negotiate_and_execute(self, new: Sequence[Request]) -> Sequence[Response]:
        """Announce the requests `new`, execute what all ranks have submitted, and return the
        responses to it.
        """
        if self._inspector is not None:
            self._inspector.check(list(self._requests.values()))
        if self._response_cache.has_prediction and (confirmed := self._confirm_prediction(new)):
            return confirmed
        of_this_rank = [request.message for request in new]
        messages = (
            [of_this_rank] if self._messages is None else self._messages.exchange(of_this_rank)
        )
        responses = self._message_table.add(messages)
        if responses:
            self._execute_responses(responses)
        elif any(messages):
            self._backoff_s = 0.0
        else:
            self._backoff_s = min(max(self._backoff_s * 2, _MIN_BACKOFF_S), _MAX_BACKOFF_S)
            self._next_cycle_at = time.monotonic() + self._backoff_s
        return responses

    def _confirm_prediction(self, new: Sequence[Request]) -> Sequence[Response]:
        request = new[0] if len(new) == 1 and self._response_cache.matches(new[0]) else None
        key = JOIN_KEY if request is None else request.key
        if not self._response_cache.confirm(key, request) or request is None:
            return ()
        if request.result is None:
            self._execute([request])
        self._backoff_s = 0.0
        return _cached_response(key)

    def _execute_responses(self, responses: Sequence[Response]) -> None:
        self._backoff_s = 0.0
        operations = [response for response in responses if response.key != JOIN_KEY]
        requests = matching_requests(self.comm, operations, self._requests)
        self._execute(requests)
        if len(responses) == len(requests) == 1 and not responses[0].joined:
            self._response_cache.put(requests[0])
        else:
            self._response_cache.clear()

    def _execute(self, requests: Sequence[Request]) -> None:
        for request in requests:
            _wait_for_event(request.inputs_ready)
        execute(self.comm, self._collectives, requests)
        for request in requests:
            request.result_ready = _record_event(request.inputs)


@functools.lru_cache(maxsize=8)
def _cached_response(key: bytes) -> tuple[Response]:
    return (Response(key, {}),)
