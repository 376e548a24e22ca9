"""How a launcher starts the workers of its host, in a job of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from lockstep.launcher import host_workers
from lockstep.launcher.host_workers import HostSetup, HostWorkers
from lockstep.launcher.output.worker_output import FileOutput
from lockstep.launcher.pulse import Patience
from lockstep.launcher.worker_options import WatchdogOptions, WorkerOptions
from lockstep.launcher.workers import Workers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[HostWorkers]:
    """Workers of a host, of which no process is started."""
    options = WorkerOptions(2, 1, watch=WatchdogOptions("off"))
    defaults = {"GLOO_SOCKET_IFNAME": "lo"}
    patience = Patience.of(several_hosts=False)
    setup = HostSetup(int, "train.py", options, patience, print, defaults)
    workers = HostWorkers(setup, tmp_path, FileOutput(tmp_path), create_autospec(Workers), [])
    yield workers
    workers.close()


def variables_of(workers: HostWorkers) -> dict[str, str]:
    """Return the variables with which the last worker was started."""
    variables: dict[str, str] = workers.processes.start.call_args.args[2]  # type: ignore[attr-defined]
    return variables


def test_a_variable_of_the_user_counts_and_not_the_default(
    workers: HostWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    workers.start(0, {"RANK": "0"})
    assert variables_of(workers)["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("RANK", "5")
    workers.start(1, {"RANK": "1"})
    assert variables_of(workers)["GLOO_SOCKET_IFNAME"] == "eth7"
    assert variables_of(workers)["RANK"] == "1"


def test_what_workers_have_left_is_ended_before_the_next_ones_start(
    workers: HostWorkers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may hold the memory of a GPU, or a port."""
    monkeypatch.setattr(host_workers, "end_orphans", lambda *_, **__: "17 sleep")
    workers.begin_attempt(0, 0)
    assert not capsys.readouterr().out
    workers.begin_attempt(1, 0)
    said = "lockstep: ended processes that the ranks left running: 17 sleep\n"
    assert capsys.readouterr().out == said
