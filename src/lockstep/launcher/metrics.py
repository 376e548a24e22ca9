"""The totals of a job as Prometheus reads them, over HTTP or from a file for the textfile collector
of a node exporter; nothing that happens here ends a job.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from .job_totals import JobTotals
from .worker_options import MetricsOptions

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_FILE_EVERY_S = 5.0  # node exporters are asked every 15 to 60 s
_RETRY_S = 30.0  # a multiple of that
_CLOSE_LIMIT_S = 2.0
_REQUEST_LIMIT_S = 10.0
_MOST_REQUESTS = 16  # at the same time; further ones are refused
_MOST_HOSTS = 64  # of which each gets a series


class MetricsExport:
    """Serves the newest totals of a job, and writes them into a file.

    A thread of its own opens the port and writes the file, as names may be looked up in vain for
    long, and storage may hang.

    Args:
        options: where.
        log: prints a message of the launcher; called in `publish`.
    """

    def __init__(self, options: MetricsOptions, log: Callable[[str], None]) -> None:
        from prometheus_client import CollectorRegistry

        self._options = options
        self._log = log
        self._totals: JobTotals | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._server: _Server | None = None
        self._messages: deque[str] = deque()
        self._said: set[str] = set()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep metrics", daemon=True)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry, for each request in a thread of its own."""
        if self._totals is not None:
            yield from metrics_of(self._totals)

    def publish(self, totals: JobTotals) -> None:
        """Let the next request get these totals, and say what there is to be said."""
        is_first = self._totals is None
        self._totals = totals
        if is_first:
            self._thread.start()
        while self._messages:
            self._log(f"lockstep: {self._messages.popleft()}")

    def close(self) -> None:
        """Close the port, and remove the file: its values would stay for ever."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_LIMIT_S)
        while self._messages:
            self._log(f"lockstep: {self._messages.popleft()}")

    def _run(self) -> None:
        try:
            self._serve_and_write()
        except Exception as error:  # no job ends because it cannot be measured
            self._say_once(f"no metrics any more: {type(error).__name__}: {error}")

    def _serve_and_write(self) -> None:
        """Open the port and write the file, again and again, until this is closed."""
        options = self._options
        next_try = 0.0
        while not self._is_closing.is_set():
            now = time.monotonic()
            if options.port is not None and self._server is None and now >= next_try:
                next_try = now + _RETRY_S
                self._open(options.host, options.port)
            if options.file:
                self._write(options.file)
            self._is_closing.wait(_FILE_EVERY_S)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if options.file:
            with suppress(OSError):
                Path(options.file).unlink(missing_ok=True)

    def _open(self, host: str, port: int) -> None:
        from prometheus_client import make_wsgi_app

        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _Server(family, address[:2])
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            reason = getattr(error, "strerror", None) or error
            self._say_once(
                f"no metrics at {host}:{port}: {reason}; the job goes on, and "
                f"tries again every {_RETRY_S:g} s"
            )
            return
        self._server.set_app(make_wsgi_app(self._registry))
        name = f"[{host}]" if ":" in host else host
        self._messages.append(f"metrics at http://{name}:{self._server.server_port}/metrics")
        threading.Thread(
            target=self._server.serve_forever, name="lockstep metrics server", daemon=True
        ).start()

    def _write(self, path: str) -> None:
        from prometheus_client import write_to_textfile

        try:
            # under a temporary name that node exporters do not read, and then renamed
            write_to_textfile(path, self._registry)
        except OSError as error:
            self._say_once(f"no metrics in {path}: {error.strerror or error}; the job goes on")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._messages.append(text)


def metrics_of(totals: JobTotals) -> Iterator[Metric]:
    """Yield a job's totals with the names and units that Prometheus' guidelines ask for."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    counters = {
        "steps": (totals.steps, "Training steps since the start of the job."),
        "steps_repeated": (
            totals.steps_repeated,
            "Steps that were made again, as all workers were started again from a checkpoint.",
        ),
        "samples": (totals.samples, "Samples that all ranks have processed."),
        "tokens": (totals.tokens, "Tokens; 0 if their number in a sample is not known."),
        "data_wait_seconds": (
            totals.data_wait_s,
            "Seconds of waiting for batches, the mean of the ranks.",
        ),
        "rank_wait_seconds": (
            totals.rank_wait_s,
            "Seconds of waiting for other ranks, the mean of the ranks.",
        ),
        "productive_seconds": (
            totals.productive_s,
            "Seconds in steps that were not made again, waits for their batches included.",
        ),
        "restarts": (totals.restarts, "How often all workers were started again."),
        "workers_lost": (totals.lost, "Workers of an elastic job that were lost or have left."),
        "workers_joined": (totals.joined, "Workers that joined the training later."),
    }
    for name, (value, text) in counters.items():
        yield CounterMetricFamily(f"lockstep_{name}", text, value=value)
    gauges = {
        "step": (totals.step, "Steps of the training so far, those before a resume included."),
        "world_size": (totals.world_size, "Number of ranks."),
        "goodput_ratio": (
            totals.goodput,
            "Share of the time since the start in which steps were made that count.",
        ),
        "start_time_seconds": (totals.started, "Unix time of the start of the job."),
        "last_update_timestamp_seconds": (totals.updated, "Unix time of these values."),
    }
    for name, (value, text) in gauges.items():
        yield GaugeMetricFamily(f"lockstep_{name}", text, value=value)
    workers = GaugeMetricFamily("lockstep_workers", "Number of ranks on a host.", labels=["host"])
    for host, count in sorted(totals.workers.items())[:_MOST_HOSTS]:
        workers.add_metric([host], count)
    yield workers
    slow = GaugeMetricFamily(
        "lockstep_slowest_rank", "The rank for which the others wait.", labels=["host"]
    )
    waits = GaugeMetricFamily(
        "lockstep_slowest_rank_others_wait_ratio",
        "Share of the last seconds in which the rank that waits most has waited; 0 if no rank is "
        "much slower.",
        value=0.0 if totals.slowest is None else totals.slowest.others_wait,
    )
    if totals.slowest is not None:
        slow.add_metric([totals.slowest.host], totals.slowest.rank)
    yield slow
    yield waits


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_LIMIT_S  # of each read and write

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Answers each request in a thread, a few at the same time.

    Args:
        family: of the address.
        address: where it listens.
    """

    daemon_threads = True

    def __init__(self, family: int, address: Any) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind the socket; `HTTPServer` would also look up the name of the address, for which it
        may wait.
        """
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request, unless too many are open."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that sends something else, or goes away."""
