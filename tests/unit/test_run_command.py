"""What `lockstep run` makes of its options: who runs what on which machine."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.launchers import network
from lockstep.launchers.choices import Choices
from lockstep.launchers.command import commands_for, shares, variables_for, without_values
from lockstep.launchers.remote import run_on_hosts
from lockstep.launchers.slurm_step import as_step
from lockstep.topology import World

HERE = "10.0.0.1"


@pytest.fixture(autouse=True)
def one_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("command", "network"):
        monkeypatch.setattr(f"lockstep.launchers.{module}.is_this_machine", lambda host: host == HERE)


def choose(*program: str, **given: Any) -> Choices:
    return Choices.of({**given, "program": program or ("train.py",)})


# --- choices --------------------------------------------------------------------------------------------------


def test_choices_are_read_from_texts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb\n")
    choices = choose(workers="3", hostfile=str(tmp_path / "hosts"), preload="numpy, yaml,", start_timeout="0.5")
    assert [(host.name, host.slots) for host in choices.hosts] == [("a", 2), ("b", 1)]
    assert (choices.workers, choices.preload, choices.start_timeout) == (3, ("numpy", "yaml"), 0.5)
    assert choose(workers="auto").workers is None


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
def test_choices_that_cannot_be_are_refused_by_name(given: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose(**given)
    assert raised.value.argument == argument


# --- commands -------------------------------------------------------------------------------------------------


def test_machines_are_filled_in_turn() -> None:
    found = shares(choose(hosts="a:2,b:3,c:1", workers="4"))
    assert [(host.name, host.slots) for host in found] == [("a", 2), ("b", 2)]
    assert [host.slots for host in shares(choose(hosts="a:2,b:3,c:1"))] == [2, 3, 1]


def test_ssh_is_called_so_that_it_neither_asks_nor_waits_for_ever(tmp_path: Path) -> None:
    key = tmp_path / "a key"
    key.touch()
    choices = choose(hosts="me@a", ssh_port="2222", identity=str(key), start_timeout="4")
    (command,) = commands_for(choices, shares(choices))
    assert command[:2] == ["ssh", "-T"]
    for setting in ("BatchMode=yes", "ConnectTimeout=4", "ServerAliveInterval=10", "ServerAliveCountMax=3"):
        assert command[command.index(setting) - 1] == "-o"
    assert command[-6:-1] == ["-p", "2222", "-i", str(key), "me@a"]


def test_what_the_far_shell_runs_is_quoted() -> None:
    odd = ("my train.py", "a b", "it's", '"$HOME"', "--", "-x", "")
    choices = choose(*odd, hosts="a:2,b", module=True, threads="2", restarts="1", output_dir="o p", preload="x,y")
    first, second = commands_for(choices, shares(choices))
    folder, there = second[-1].split(" && ")
    assert shlex.split(folder) == ["cd", str(Path.cwd())]
    words = shlex.split(there)
    assert words[:4] == ["exec", sys.executable, "-IS", "-c"]
    assert words[5:9] == [sys.executable, "-m", "lockstep", "run"]
    assert words[-8:] == ["my train.py", *("--", *odd[1:])][-8:]
    for pair in (("--node-rank", "1"), ("--nnodes", "2"), ("-np", "1"), ("--threads", "2"), ("--output-dir", "o p")):
        assert words[words.index(pair[0]) + 1] == pair[1]
    assert "-np 2" in first[-1]
    assert "-m 'my train.py' --" in second[-1]


def test_what_is_chosen_for_the_watch_is_handed_on() -> None:
    choices = choose(hosts="a:2,b", strict=True, stall_timeout="7", timeline="a b")
    words = shlex.split(commands_for(choices, shares(choices))[1][-1])
    assert "--strict" in words and "--no-watch" not in words
    for pair in (("--stall-timeout", "7.0"), ("--timeline", "a b")):
        assert words[words.index(pair[0]) + 1] == pair[1]
    choices = choose(hosts="a", no_watch=True)
    assert " --no-watch " in commands_for(choices, shares(choices))[0][-1]


def test_this_machine_is_not_reached_by_ssh() -> None:
    choices = choose(hosts=f"{HERE},b", remote_python="/far/python")
    own, far = commands_for(choices, shares(choices))
    assert own[:4] == ["env", "-u", "SSH_CONNECTION", sys.executable]
    assert " /far/python -m lockstep run " in far[-1]


def test_variables_of_the_program_are_handed_on_and_those_of_this_run_are_not() -> None:
    known = {"PYTHONPATH": "p", "NCCL_DEBUG": "x y", "HOME": "h", "MINE": "m", "LOCKSTEP_RUN_ID": "r", "TERM": "t"}
    known["LOCKSTEP_WATCH_DIR"] = "d"
    choices = choose(hosts="a", env=["MINE", "OTHER=1=2", "TERM="])
    own = {"NCCL_DEBUG": "x y", "PYTHONPATH": "p"}
    assert variables_for(choices, known) == {**own, "MINE": "m", "OTHER": "1=2", "TERM": ""}
    with pytest.raises(ConfigError, match="ABSENT"):
        variables_for(choose(hosts="a", env=["ABSENT"]), known)


@pytest.mark.parametrize("host", [HERE, "far"])
def test_a_launcher_takes_its_variables_from_a_line_and_leaves_the_rest(host: str, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the user has been loaded')")
    choices = choose("x.py", hosts=host)
    (command,) = commands_for(choices, shares(choices))
    told = "import os, sys; print(os.environ['MINE'] == sys.argv[1], sys.stdin.read())"
    value = "two\nlines, 'quotes' and \"quotes\", ä\udcff"
    words = command[3:7] if host == HERE else shlex.split(command[-1])[4:8]
    assert words[:3] == [sys.executable, "-IS", "-c"]
    line = json.dumps({"MINE": value}).encode() + b"\ngo on\n"
    argv = [*words, sys.executable, "-c", told, value.encode(errors="surrogateescape")]
    ended = subprocess.run(argv, input=line, capture_output=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, b"True go on\n\n"), ended.stderr
    assert subprocess.run(argv, input=b"", capture_output=True, cwd=tmp_path).returncode == 1  # nobody says anything


def test_values_are_neither_shown_nor_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NCCL_SECRET", "s3cret")
    run_on_hosts(choose("x.py", hosts=f"{HERE},far", env=["TOKEN=s3cret", "EMPTY="], dry_run=True))
    shown = capsys.readouterr().out
    assert "s3cret" not in shown
    assert re.search(r"^# .* EMPTY=\.\.\. .*NCCL_SECRET=\.\.\. .*TOKEN=\.\.\.", shown, re.MULTILINE)
    given = ["run", "-x", "TOKEN=s3", "--env", "A=s3=", "--env=B=s3", "-xC=s3", "-x", "NAME", "x.py", "a=b"]
    kept = ["run", "-x", "TOKEN=...", "--env", "A=...", "--env=B=...", "-xC=...", "-x", "NAME", "x.py", "a=b"]
    assert without_values(given) == kept


# --- network --------------------------------------------------------------------------------------------------


def test_own_addresses_and_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert network.is_this_machine("localhost")
    assert network.is_this_machine("127.0.0.1")
    assert not network.is_this_machine("192.0.2.1")  # reserved for examples
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.1") is None


# --- Slurm ----------------------------------------------------------------------------------------------------

STEP = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "node[07-08]"}
SECOND = World(1, 2, 0, 1, 1, 2, "slurm")


def test_a_slurm_step_says_which_node_this_is_and_where_to_meet() -> None:
    found = as_step(choose(workers="4"), SECOND, STEP)
    assert (found.nnodes, found.node_rank, found.master_addr, found.workers) == (2, 1, "node07", 4)
    later = as_step(choose(), SECOND, {**STEP, "SLURM_STEP_ID": "4"})
    assert 1024 < later.master_port != found.master_port
    given = as_step(choose(), SECOND, {**STEP, "MASTER_ADDR": "other", "MASTER_PORT": "4000"})
    assert (given.master_addr, given.master_port) == ("other", 4000)
    by_hand = choose(nnodes="3", master_addr="a", node_rank="2")
    assert as_step(by_hand, SECOND, STEP) == by_hand


def test_several_launchers_on_one_node_are_told_what_to_do_instead() -> None:
    with pytest.raises(LockstepError, match=r"--ntasks-per-node=1 lockstep run -np 2 .* srun python"):
        as_step(choose(), World(0, 4, 0, 2, 0, 2, "slurm"), STEP)
    with pytest.raises(ConfigError, match="srun"):
        as_step(choose(hosts="a"), SECOND, STEP)
