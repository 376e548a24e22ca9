"""What the launcher adds up of the counters in flight records: the totals of a job, and how
Prometheus reads them.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.errors import ConfigError
from lockstep.flight_recorder import FlightRecorder, writer
from lockstep.flight_recorder.rank_progress import (
    OtherHosts,
    RankProgress,
    SlowestRank,
    SlowRank,
    read_other_hosts,
    write_other_hosts,
)
from lockstep.launcher.job_totals import JobTotals, TotalsOfJob, read_totals, write_totals
from lockstep.launcher.metrics import MetricsExport
from lockstep.launcher.options import JobOptions
from lockstep.launcher.supervisor import WatchdogFiles
from lockstep.launcher.worker_options import MetricsOptions, WatchdogOptions


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of flight records go on only where a test says so."""
    clock = SimpleNamespace(now=time.monotonic() - 60, time=time.time)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(writer, "time", clock)


def make_rank(folder: Path, rank: int, size: int = 2) -> FlightRecorder:
    """Make a flight record, a second after the one before."""
    writer.time.now += 1.0  # type: ignore[attr-defined]
    return FlightRecorder(folder, rank, size, "here", "train.py")


def make_step(rank: FlightRecorder, step: int, samples: int = 8) -> None:
    """Record a step that took half a second, half of it until its batch was there."""
    began = writer.time.monotonic() - 0.5
    rank.note_data_wait(began, began + 0.25)
    rank.note_samples(samples)
    rank.note_step(step)


# --- Totals


def test_totals_go_on_when_records_begin_again(tmp_path: Path) -> None:
    totals = TotalsOfJob(is_elastic=False)
    totals.start_attempt(0, tmp_path)
    ranks = [make_rank(tmp_path, rank) for rank in range(2)]
    for step in range(1, 4):
        for rank in ranks:
            make_step(rank, step)
    first = totals.update()
    assert (first.steps, first.step, first.samples) == (3, 3, 48)
    assert first.data_wait_s == pytest.approx(0.75)
    assert first.productive_s == pytest.approx(1.5)
    assert (first.workers, first.world_size, first.is_whole) == ({"here": 2}, 2, True)
    for rank in ranks:
        make_step(rank, 4)  # between two looks, and then a worker is lost
    alone = make_rank(tmp_path, 0, size=1)
    make_step(alone, 5)
    assert totals.update().steps == 5
    assert totals.update().samples == 48 + 16 + 8
    totals.close()


def test_steps_that_are_repeated_after_a_restart_do_not_count_as_productive(tmp_path: Path) -> None:
    totals = TotalsOfJob(is_elastic=False)
    for attempt in range(2):
        (tmp_path / str(attempt)).mkdir()
        totals.start_attempt(attempt, tmp_path / str(attempt))
        rank = make_rank(tmp_path / str(attempt), 0, size=1)
        for step in range(1, 11) if attempt == 0 else range(7, 11):  # from a checkpoint of step 6
            make_step(rank, step)
    found = totals.update()
    assert (found.steps, found.steps_repeated, found.step, found.restarts) == (14, 4, 10, 1)
    assert found.productive_s == pytest.approx(5.0)  # ten steps
    totals.close()


def test_a_second_training_of_the_program_repeats_no_step(tmp_path: Path) -> None:
    totals = TotalsOfJob(is_elastic=False)
    totals.start_attempt(0, tmp_path)
    rank = make_rank(tmp_path, 0, size=1)
    for step in (1, 2, 3):
        make_step(rank, step)
    totals.update()
    make_step(rank, 1)
    found = totals.update()
    assert (found.steps, found.steps_repeated, found.step) == (4, 0, 1)
    totals.close()


def progress(rank: int, host: str, waited_s: float, samples: int = 0) -> RankProgress:
    return RankProgress(
        rank, host, 100 + rank, 1.0, "runs", samples, samples, samples, 2.0, 0.0, waited_s, 0.0
    )


def test_ranks_of_other_hosts_count(tmp_path: Path) -> None:
    totals = TotalsOfJob(is_elastic=False)
    totals.start_attempt(0, tmp_path)
    make_step(make_rank(tmp_path, 0), 1)
    slow = SlowRank(1, "there", 0.1, 0.6)
    found = OtherHosts(time.time(), [progress(1, "there", 3.0, samples=5)], "here", slow)
    write_other_hosts(tmp_path, found)
    seen = totals.update()
    assert (seen.samples, seen.tokens, seen.workers) == (13, 10.0, {"here": 1, "there": 1})
    assert (seen.rank_wait_s, seen.slowest, seen.is_whole) == (1.5, slow, True)
    assert totals.update().samples == 13
    (tmp_path / "other-hosts.json").write_text('{"time": "x"}')
    assert read_other_hosts(tmp_path) is None and not totals.update().is_whole
    write_other_hosts(tmp_path, OtherHosts(time.time() - 60, []))
    assert read_other_hosts(tmp_path) is None  # that host has not been heard of for long
    totals.close()


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    search = SlowestRank()
    assert search.find([progress(0, "a", 0.0), progress(1, "b", 0.0)], 10.0) is None
    found = search.find([progress(0, "a", 6.0), progress(1, "b", 1.0)], 20.0)
    assert found == SlowRank(1, "b", 0.1, 0.6)
    for second in range(1, 15):  # both wait alike from now on
        both = [progress(0, "a", 6.0 + second / 2), progress(1, "b", 1.0 + second / 2)]
        found = search.find(both, 20.0 + second)
    assert found is None


def test_totals_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = JobTotals(
        1.0, 11.0, 2, {"a": 2}, productive_s=4.0, slowest=SlowRank(1, "a", 0.0, 0.5)
    )
    write_totals(tmp_path, written)
    assert read_totals(tmp_path) == written and written.goodput == pytest.approx(0.4)
    (tmp_path / "totals.json").write_text("[" * 5000)
    assert read_totals(tmp_path) is None
    write_totals(tmp_path / "nowhere", written)  # the job has ended


# --- Prometheus


TOTALS = JobTotals(
    *(1.0, 11.0, 2, {"a": 2}, 107, 7, 1, 56, 112.0, 1.5, 2.5, 4.0, 1, 3, 2),
    slowest=SlowRank(1, 'a"\n', 0.0, 0.5),
)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def served(said: list[str]) -> Iterator[int]:
    """The port at which TOTALS are served."""
    pytest.importorskip("prometheus_client")
    export = MetricsExport(MetricsOptions(port=0), said.append)

    def is_open() -> bool:
        export.publish(TOTALS)
        return bool(said)

    wait_for(is_open)
    yield int(said[0].rpartition(":")[2].partition("/")[0])
    export.close()


def read_metrics(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def test_metrics_have_prometheus_names_and_units(served: int, said: list[str]) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    assert said == [f"lockstep: metrics at http://127.0.0.1:{served}/metrics"]
    families = list(text_string_to_metric_families(read_metrics(served)))
    assert all(family.documentation.endswith(".") for family in families)
    samples = {sample.name: sample for family in families for sample in family.samples}
    values = {name.removeprefix("lockstep_"): sample.value for name, sample in samples.items()}
    assert values == {
        "steps_total": 7,
        "steps_repeated_total": 1,
        "samples_total": 56,
        "tokens_total": 112,
        "data_wait_seconds_total": 1.5,
        "rank_wait_seconds_total": 2.5,
        "productive_seconds_total": 4,
        "restarts_total": 1,
        "workers_lost_total": 3,
        "workers_joined_total": 2,
        "step": 107,
        "world_size": 2,
        "goodput_ratio": 0.4,
        "start_time_seconds": 1,
        "last_update_timestamp_seconds": 11,
        "workers": 2,
        "slowest_rank": 1,
        "slowest_rank_others_wait_ratio": 0.5,
    }
    assert samples["lockstep_slowest_rank"].labels == {"host": 'a"\n'}


def test_hosts_get_a_series_each_only_as_far_as_they_are_few() -> None:
    pytest.importorskip("prometheus_client")
    from lockstep.launcher.metrics import metrics_of

    many = JobTotals(1.0, 2.0, workers={f"host-{number}": 8 for number in range(1000)})
    assert sum(len(family.samples) for family in metrics_of(many)) < 100


def test_neither_strangers_nor_scrapes_that_hang_keep_others_out(served: int) -> None:
    hanging = [socket.create_connection(("127.0.0.1", served)) for _ in range(4)]
    stranger = socket.create_connection(("127.0.0.1", served))
    stranger.sendall(b"\x16\x03\x01\xff\xfe\x00 \x00\r\n\r\n")
    gone = socket.create_connection(("127.0.0.1", served))
    gone.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    gone.close()
    assert "lockstep_steps_total 7.0" in read_metrics(served)
    for connection in (*hanging, stranger):
        connection.close()


def test_a_port_that_is_taken_is_said_once_and_the_job_goes_on(said: list[str]) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        export = MetricsExport(MetricsOptions(port=port), said.append)

        def is_said() -> bool:
            export.publish(TOTALS)
            return bool(said)

        wait_for(is_said)
        export.close()
    assert said == [
        f"lockstep: no metrics at 127.0.0.1:{port}: Address already in use; the job goes on, and "
        "tries again every 30 s"
    ]


def test_the_file_for_node_exporters_is_whole_and_goes_with_the_job(
    tmp_path: Path, said: list[str]
) -> None:
    pytest.importorskip("prometheus_client")
    path = tmp_path / "job.prom"
    export = MetricsExport(MetricsOptions(file=str(path)), said.append)
    export.publish(TOTALS)
    wait_for(path.exists)
    assert path.read_text().endswith("\n") and "lockstep_steps_total 7.0" in path.read_text()
    export.close()
    assert not list(tmp_path.iterdir()) and said == []
    nowhere = MetricsExport(MetricsOptions(file=str(tmp_path / "no" / "job.prom")), said.append)
    nowhere.publish(TOTALS)
    nowhere.close()
    assert len(said) == 1 and "the job goes on" in said[0]


def test_no_job_ends_because_it_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    files = WatchdogFiles("run", WatchdogOptions(), None, said.append)
    files.start_attempt(0, 0, 1)

    def fail(self: TotalsOfJob) -> JobTotals:
        raise RuntimeError("of any kind")

    monkeypatch.setattr(TotalsOfJob, "update", fail)
    files.relay_messages()
    files._next_update = 0.0
    files.relay_messages()
    files.close()
    assert said == ["lockstep: no metrics any more: RuntimeError: of any kind"]


def test_options_that_make_no_metrics_are_refused() -> None:
    for given, name in (
        ({"metrics_file": "job.txt"}, "metrics_file"),
        ({"metrics_port": "65536"}, "metrics_port"),
        ({"metrics_port": "9400", "no_watchdog": True}, "metrics_port"),
    ):
        with pytest.raises(ConfigError) as caught:
            JobOptions.parse({**given, "program": ("train.py",)})
        assert name in str(caught.value).replace("-", "_")


def test_a_name_that_no_host_can_have_is_said(said: list[str]) -> None:
    pytest.importorskip("prometheus_client")
    with pytest.raises(ConfigError, match=r"metrics_host.*expected a host's name or address"):
        JobOptions.parse({"metrics_host": "a..b", "program": ("train.py",)})
    export = MetricsExport(MetricsOptions(port=9400, host="a..b"), said.append)
    export.publish(TOTALS)
    export.close()
    assert len(said) == 1 and said[0].startswith("lockstep: no metrics at a..b:9400: ")


def test_whatever_ends_the_thread_is_said(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    pytest.importorskip("prometheus_client")

    def fail(self: MetricsExport, host: str, port: int) -> None:
        raise RuntimeError("of any kind")

    monkeypatch.setattr(MetricsExport, "_open", fail)
    export = MetricsExport(MetricsOptions(port=0), said.append)
    export.publish(TOTALS)
    export.close()
    assert said == ["lockstep: no metrics any more: RuntimeError: of any kind"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.arguments.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--metrics-port.*lockstep-train\[metrics\]"):
        MetricsOptions(port=9400).check()


def test_threads_of_the_server_end_with_it(said: list[str]) -> None:
    pytest.importorskip("prometheus_client")
    export = MetricsExport(MetricsOptions(port=0), said.append)
    export.publish(TOTALS)
    export.close()
    wait_for(
        lambda: not any(
            thread.name.startswith("lockstep metrics") for thread in threading.enumerate()
        )
    )
