"""The commands by which the launchers of other machines are started (pure)."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError
from ..hosts import Host
from .choices import Choices
from .network import is_this_machine

__all__ = ["commands_for", "shares", "ssh_words"]

# variables that belong to the program rather than to the machine
_OWN = ("PYTHONPATH", "PYTHONUNBUFFERED", "LOCKSTEP_", "TORCH", "NCCL_", "GLOO_", "OMP_NUM_THREADS")
_NEVER = ("LOCKSTEP_RUN_ID", "LOCKSTEP_ASK_FOR_TIME", "LOCKSTEP_LAUNCHED", "LOCKSTEP_WATCH_DIR")

# those options that every machine gets as they are
_PASSED = {
    "threads": "--threads",
    "restarts": "--restarts",
    "start_method": "--start-method",
    "grace": "--grace",
    "network_interface": "--network-interface",
    "start_timeout": "--start-timeout",
    "output_dir": "--output-dir",
    "stall_timeout": "--stall-timeout",
    "timeline": "--timeline",
}
_PASSED_FLAGS = {
    "no_prefix": "--no-prefix",
    "no_watch": "--no-watch",
    "strict": "--strict",
    "tee": "--tee",
    "as_horovod": "--as-horovod",
}


def shares(choices: Choices) -> list[Host]:
    """The machines that take part, with as many slots as they get workers: each is filled before the next."""
    left = choices.workers or sum(host.slots for host in choices.hosts)
    found = []
    for host in choices.hosts:
        if left > 0:
            found.append(replace(host, slots=min(left, host.slots)))
            left -= host.slots
    return found


def commands_for(choices: Choices, hosts: Sequence[Host], variables: Mapping[str, str]) -> list[list[str]]:
    """The command for each machine: through ssh, or the launcher itself for this machine."""
    own = _variables(choices, variables)
    return [_command(choices, hosts, node, own) for node in range(len(hosts))]


def _command(choices: Choices, hosts: Sequence[Host], node: int, own: Mapping[str, str]) -> list[str]:
    host = hosts[node]
    launcher = _launcher(choices, len(hosts), node, host.slots)
    settings = [f"{name}={value}" for name, value in own.items()]
    if is_this_machine(host.name):
        # the way by which this machine's user has come is not that to the other machines
        return ["env", "-u", "SSH_CONNECTION", *settings, sys.executable, *launcher]
    python = choices.remote_python or sys.executable
    there = shlex.join(["env", *settings, python, *launcher])
    return [*_ssh(choices), host.login, f"cd {shlex.quote(str(Path.cwd()))} && exec {there}"]


def _launcher(choices: Choices, nodes: int, node: int, workers: int) -> list[str]:
    words = [
        "-m",
        "lockstep",
        "run",
        "--as-host",
        "--nnodes",
        str(nodes),
        "--node-rank",
        str(node),
        "-np",
        str(workers),
    ]
    for name, flag in _PASSED.items():
        value, default = getattr(choices, name), Choices.__dataclass_fields__[name].default
        words += [flag, str(value)] if value != default else []
    words += ["--preload", ",".join(choices.preload)] if choices.preload else []
    for name, flag in _PASSED_FLAGS.items():
        words += [flag] if getattr(choices, name) else []
    words += ["-m"] if choices.module else []
    return [*words, choices.program[0], "--", *choices.program[1:]]


def _ssh(choices: Choices) -> list[str]:
    # it must not ask: its standard input is the line to the launcher; and a broken line must be noticed
    limit = max(1, min(15, int(choices.start_timeout)))
    settings = ("BatchMode=yes", f"ConnectTimeout={limit}", "ServerAliveInterval=5", "ServerAliveCountMax=2")
    first, *others = ssh_words(choices)
    return [first, "-T", *(word for setting in settings for word in ("-o", setting)), *others]


def ssh_words(choices: Choices) -> list[str]:
    """ssh with the options that the user has chosen."""
    port = ["-p", str(choices.ssh_port)] if choices.ssh_port is not None else []
    return ["ssh", *port, *(["-i", choices.identity] if choices.identity is not None else [])]


def _variables(choices: Choices, variables: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in variables.items() if name.startswith(_OWN) and name not in _NEVER}
    for text in choices.env:
        name, equals, value = text.partition("=")
        if not equals and name not in variables:
            raise ConfigError("env", "the name of a variable that is set, or NAME=VALUE", text)
        found[name] = value if equals else variables[name]
    return found
