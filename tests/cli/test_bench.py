"""`lockstep bench`, and `lockstep run --network`: what they write and show, and what they
refuse.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.errors import ConfigError
from lockstep.planning import network_bench
from lockstep.planning.measurement import read_measurement
from support.command import Here


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_measurement_has_every_curve_and_is_drawn(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_bench, "_mpiexec", lambda: None)  # a further start of two processes
    path = tmp_path / "network.json"
    ended = here("bench", "-np", 2, "--seconds", 1, "-o", path)
    found = read_measurement(path)
    # whether it is a result depends on this host
    assert ended.returncode == int(not found.is_result), ended.stderr
    assert ("Not a result: " in ended.stderr) == (not found.is_result)
    assert {"shm", "gloo"} <= {*found.transports} and found.workers == 2
    for measured in found.transports.values():
        assert len(measured.collectives) == 6 and [pair.ranks for pair in measured.pairs] == [
            (0, 1)
        ]
        assert all(curve.computing is not None for curve in measured.collectives.values())
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "all_reduce" in ended.stdout and "copy in memory" in ended.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-np", "1"), "-np: expected at least 2 ranks"),
        (("-np", "many"), "-np: expected a whole number"),
        (("-H", "a:1"), "-np: expected at least 2 ranks"),
        (("--seconds", "0"), "--seconds: expected a whole number"),
        (("-o", "/nowhere/network.json"), "-o: expected a file in an existing folder"),
        (("--size", "3"), "--size"),
    ],
)
def test_bad_options_of_bench_get_one_line(here: Here, words: tuple[str, ...], told: str) -> None:
    ended = here("bench", *words)
    assert ended.returncode == 2 and told in ended.stderr and ended.stderr.count("\n") == 1


def test_a_program_runs_on_virtual_hosts(here: Here, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, lockstep, torch\ncomm = lockstep.init()\ntotal = "
        "comm.allreduce(torch.ones(1)).item()\nnames = ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', "
        "'GROUP_RANK')\nprint(total, type(comm.group).__name__, *(os.environ[name] for name in "
        "names), flush=True)\n"
    )
    ended = here("run", "-np", 3, "--network", "2 hosts, 1Gbit, 100us, dilation 2", program)
    assert ended.returncode == 0, ended.stderr
    expected = [
        "[0] 3.0 HierarchicalGroup 0 2 0",
        "[1] 3.0 HierarchicalGroup 1 2 0",
        "[2] 3.0 HierarchicalGroup 0 1 1",
    ]
    assert sorted(ended.stdout.splitlines()) == expected
    assert "lockstep run: emulated network: " in ended.stderr
    assert re.search(r"time dilation 2: \S+ s here are \S+ s on the emulated hosts", ended.stderr)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--network", "fast"), "--network: expected hosts, a bandwidth"),
        (("--network", "2 hosts, 0Gbit"), "--network: expected a bandwidth above 0"),
        (("--network", "4 hosts, 1Gbit", "-np", "2"), "--network: expected at most 2 hosts"),
        (
            ("--network", "2 hosts, 1Gbit", "-H", "a:2,b:2"),
            "-H: expected not to be given with --network",
        ),
        (
            ("--network", "2 hosts, 1Gbit", "--elastic", "1:2"),
            "--elastic: expected not to be given with --network",
        ),
    ],
)
def test_bad_networks_get_one_line(
    here: Here, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text("")
    ended = here("run", *words, program)
    assert ended.returncode == 2 and told in ended.stderr and ended.stderr.count("\n") == 1, (
        ended.stderr
    )


def test_launch_takes_a_network() -> None:
    def job() -> tuple[float, str, float]:
        from lockstep.emulation import dilation

        total = lockstep.init().allreduce(torch.ones(1)).item()
        return total, os.environ["GROUP_WORLD_SIZE"], dilation()

    assert lockstep.launch(job, workers=2, network="2 hosts, 1Gbit, 10us, dilation 3") == (
        2.0,
        "2",
        3.0,
    )
    with pytest.raises(ConfigError, match=r"network: expected at most 2 hosts"):
        lockstep.launch(job, workers=2, network="3 hosts, 1Gbit")
