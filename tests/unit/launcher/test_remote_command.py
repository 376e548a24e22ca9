"""What `lockstep run` derives from its options: which host runs what."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import hosts
from lockstep.errors import ConfigError, LockstepError
from lockstep.launcher.options import JobOptions
from lockstep.launcher.remote_hosts.remote_command import (
    assign_workers,
    host_commands,
    redact_variables,
    remote_environment,
)
from lockstep.launcher.remote_hosts.ssh import run_on_hosts
from lockstep.launcher.start import config_for_slurm_task
from lockstep.system.heartbeat import address_towards
from lockstep.topology import World

HERE = "10.0.0.1"


@pytest.fixture(autouse=True)
def one_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lockstep.launcher.remote_hosts.remote_command.is_this_host", lambda host: host == HERE
    )


def configure(*program: str, **given: Any) -> JobOptions:
    return JobOptions.parse({**given, "program": program or ("train.py",)})


# --- the configuration
# ----------------------------------------------------------------------------------------


def test_a_configuration_is_parsed_from_texts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb\n")
    config = configure(
        workers="3", hostfile=str(tmp_path / "hosts"), preload="numpy, yaml,", start_timeout="0.5"
    )
    assert [(host.name, host.slots) for host in config.hosts] == [("a", 2), ("b", 1)]
    assert (config.workers, config.preload, config.start_timeout) == (3, ("numpy", "yaml"), 0.5)
    assert configure(workers="auto").workers is None


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"workers": "0"}, "workers"),
        ({"workers": "two"}, "workers"),
        ({"grace": "-1"}, "grace"),
        ({"start_timeout": "soon"}, "start_timeout"),
        ({"start_method": "fork"}, "start_method"),
        ({"hosts": "a:0"}, "hosts"),
        ({"hosts": "a", "hostfile": "b"}, "hostfile"),
        ({"hosts": "a", "nnodes": "2"}, "nnodes"),
        ({"hosts": "a:2,b:1", "workers": "4"}, "workers"),
        ({"nnodes": "2"}, "master_addr"),
        ({"nnodes": "2", "node_rank": "2", "master_addr": "a"}, "node_rank"),
        ({"dry_run": True}, "dry_run"),
        ({"hosts": "a", "identity": "/no/key"}, "identity"),
        ({"ssh_port": "70000"}, "ssh_port"),
    ],
)
def test_invalid_options_are_refused_by_name(given: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(**given)
    assert raised.value.argument == argument


# --- commands
# -------------------------------------------------------------------------------------------------


def test_hosts_are_filled_in_order() -> None:
    found = assign_workers(configure(hosts="a:2,b:3,c:1", workers="4"))
    assert [(host.name, host.slots) for host in found] == [("a", 2), ("b", 2)]
    assert [host.slots for host in assign_workers(configure(hosts="a:2,b:3,c:1"))] == [2, 3, 1]


def test_ssh_neither_prompts_nor_waits_forever(tmp_path: Path) -> None:
    key = tmp_path / "a key"
    key.touch()
    config = configure(hosts="me@a", ssh_port="2222", identity=str(key), start_timeout="4")
    (command,) = host_commands(config, assign_workers(config))
    assert command[:2] == ["ssh", "-T"]
    for setting in (
        "BatchMode=yes",
        "ConnectTimeout=4",
        "ServerAliveInterval=10",
        "ServerAliveCountMax=3",
    ):
        assert command[command.index(setting) - 1] == "-o"
    assert command[-6:-1] == ["-p", "2222", "-i", str(key), "me@a"]
    config = configure(hosts="me@a", heartbeat_timeout="6")
    assert "ServerAliveInterval=2" in host_commands(config, assign_workers(config))[0]


def test_the_remote_command_is_quoted() -> None:
    odd = ("my train.py", "a b", "it's", '"$HOME"', "--", "-x", "")
    config = configure(
        *odd, hosts="a:2,b", module=True, threads="2", restarts="1", output_dir="o p", preload="x,y"
    )
    first, second = host_commands(config, assign_workers(config))
    folder, there = second[-1].split(" && ")
    assert shlex.split(folder) == ["cd", str(Path.cwd())]
    words = shlex.split(there)
    assert words[:4] == ["exec", sys.executable, "-IS", "-c"]
    assert words[5:9] == [sys.executable, "-m", "lockstep", "run"]
    assert words[-8:] == ["my train.py", *("--", *odd[1:])][-8:]
    for pair in (
        ("--node-rank", "1"),
        ("--nnodes", "2"),
        ("-np", "1"),
        ("--threads", "2"),
        ("--output-dir", "o p"),
    ):
        assert words[words.index(pair[0]) + 1] == pair[1]
    assert "-np 2" in first[-1]
    assert " --module " in second[-1] and " 'my train.py' -- " in second[-1]


def test_watchdog_options_are_passed_to_all_hosts() -> None:
    config = configure(hosts="a:2,b", strict=True, stall_timeout="7", timeline="a b")
    words = shlex.split(host_commands(config, assign_workers(config))[1][-1])
    assert "--strict" in words and "--no-watchdog" not in words
    for pair in (("--stall-timeout", "7.0"), ("--timeline", "a b")):
        assert words[words.index(pair[0]) + 1] == pair[1]
    config = configure(hosts="a", no_watchdog=True)
    assert " --no-watchdog " in host_commands(config, assign_workers(config))[0][-1]


def test_this_host_is_not_reached_by_ssh() -> None:
    config = configure(hosts=f"{HERE},b", remote_python="/far/python")
    own, far = host_commands(config, assign_workers(config))
    assert own[:4] == ["env", "-u", "SSH_CONNECTION", sys.executable]
    assert " /far/python -m lockstep run " in far[-1]


def test_variables_of_the_program_are_passed_on_and_those_of_this_run_are_not() -> None:
    known = {
        "PYTHONPATH": "p",
        "NCCL_DEBUG": "x y",
        "HOME": "h",
        "MINE": "m",
        "LOCKSTEP_RUN_ID": "r",
        "TERM": "t",
    }
    known["LOCKSTEP_WATCHDOG_DIR"] = "d"
    config = configure(hosts="a", env=["MINE", "OTHER=1=2", "TERM="])
    own = {"NCCL_DEBUG": "x y", "PYTHONPATH": "p"}
    assert remote_environment(config, known) == {**own, "MINE": "m", "OTHER": "1=2", "TERM": ""}
    with pytest.raises(ConfigError, match="ABSENT"):
        remote_environment(configure(hosts="a", env=["ABSENT"]), known)


@pytest.mark.parametrize("host", [HERE, "far"])
def test_a_launcher_reads_its_variables_from_one_line_and_leaves_the_rest(
    host: str, tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the user has been loaded')")
    config = configure("x.py", hosts=host)
    (command,) = host_commands(config, assign_workers(config))
    told = "import os, sys; print(os.environ['MINE'] == sys.argv[1], sys.stdin.read())"
    value = "two\nlines, 'quotes' and \"quotes\", ä\udcff"
    words = command[3:7] if host == HERE else shlex.split(command[-1])[4:8]
    assert words[:3] == [sys.executable, "-IS", "-c"]
    line = json.dumps({"MINE": value}).encode() + b"\ngo on\n"
    argv = [*words, sys.executable, "-c", told, value.encode(errors="surrogateescape")]
    ended = subprocess.run(argv, input=line, capture_output=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, b"True go on\n\n"), ended.stderr
    assert (
        subprocess.run(argv, input=b"", capture_output=True, cwd=tmp_path).returncode == 1
    )  # nobody says anything


def test_values_are_neither_shown_nor_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_SECRET", "s3cret")
    run_on_hosts(
        configure("x.py", hosts=f"{HERE},far", env=["TOKEN=s3cret", "EMPTY="], dry_run=True)
    )
    shown = capsys.readouterr().out
    assert "s3cret" not in shown
    assert re.search(r"^# .* EMPTY=\.\.\. .*NCCL_SECRET=\.\.\. .*TOKEN=\.\.\.", shown, re.MULTILINE)
    given = [
        "run",
        "-x",
        "TOKEN=s3",
        "--env",
        "A=s3=",
        "--env=B=s3",
        "-xC=s3",
        "-x",
        "NAME",
        "x.py",
        "a=b",
    ]
    kept = [
        "run",
        "-x",
        "TOKEN=...",
        "--env",
        "A=...",
        "--env=B=...",
        "-xC=...",
        "-x",
        "NAME",
        "x.py",
        "a=b",
    ]
    assert redact_variables(given) == kept


# --- network
# --------------------------------------------------------------------------------------------------


def test_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert hosts.is_this_host("localhost")
    assert hosts.is_this_host("127.0.0.1")
    assert not hosts.is_this_host("192.0.2.1")  # reserved for examples
    assert address_towards("127.0.0.1") == "127.0.0.1"


# --- Slurm
# --------------------------------------------------------------------------------------------------

STEP = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "node[07-08]"}
SECOND = World(1, 2, 0, 1, 1, 2, "slurm")


def test_a_slurm_step_gives_the_node_and_the_master_address() -> None:
    found = config_for_slurm_task(configure(workers="4"), SECOND, STEP)
    assert (found.nnodes, found.node_rank, found.master_addr, found.workers) == (2, 1, "node07", 4)
    later = config_for_slurm_task(configure(), SECOND, {**STEP, "SLURM_STEP_ID": "4"})
    assert 1024 < later.master_port != found.master_port
    given = config_for_slurm_task(
        configure(), SECOND, {**STEP, "MASTER_ADDR": "other", "MASTER_PORT": "4000"}
    )
    assert (given.master_addr, given.master_port) == ("other", 4000)
    by_hand = configure(nnodes="3", master_addr="a", node_rank="2")
    assert config_for_slurm_task(by_hand, SECOND, STEP) == by_hand


def test_several_launchers_on_one_node_get_a_hint() -> None:
    with pytest.raises(
        LockstepError, match=r"--ntasks-per-node=1 lockstep run -np 2 .* srun python"
    ):
        config_for_slurm_task(configure(), World(0, 4, 0, 2, 0, 2, "slurm"), STEP)
    with pytest.raises(ConfigError, match="srun"):
        config_for_slurm_task(configure(hosts="a"), SECOND, STEP)
