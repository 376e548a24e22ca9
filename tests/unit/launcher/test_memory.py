"""A job with more workers than its host has memory for is refused before anything is started for
it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import lockstep
from lockstep import environment
from lockstep.cli import main
from lockstep.errors import ConfigError
from lockstep.launcher import start
from lockstep.launcher.options import JobOptions
from lockstep.launcher.worker_process import fork_server
from lockstep.launcher.worker_process.script import Script


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 1.5 GiB of available memory and two cores, on which no fork server can be
    started.
    """
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 << 29))
    monkeypatch.setattr(environment, "usable_cores", lambda: 2)
    monkeypatch.setattr(
        fork_server, "start_fork_server", lambda *_: pytest.fail("the fork server was started")
    )


EXPECTED = (
    "expected at most 24 on this host: 1.5 GiB of its memory are available, and each worker needs "
    "at least 64 MiB, got {}. Start fewer workers (this host has 2 cores), or end other programs."
)


def test_the_command_names_its_option_the_memory_and_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "-np", "100000", __file__]) == 2
    assert capsys.readouterr().err == f"lockstep run: error: -np: {EXPECTED.format(100000)}\n"


def test_launch_names_its_argument() -> None:
    with pytest.raises(ConfigError) as caught:
        lockstep.launch(print, workers=25)
    assert str(caught.value) == f"workers: {EXPECTED.format(25)}"


def test_a_host_of_several_reports_it_as_its_problem() -> None:
    config = JobOptions((__file__,), nnodes=2)
    assert start._prepare_host(Script(__file__), config, 25) == f"workers: {EXPECTED.format(25)}"


def test_as_many_workers_as_fit_are_allowed_and_one_always(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server.check_memory(24)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    fork_server.check_memory(1)


def test_where_the_memory_is_unknown_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Path("/no such folder").stat())
    fork_server.check_memory(100_000)
