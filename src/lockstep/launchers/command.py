"""How the launchers of other machines are started: by commands that every user there may see, and in secret (pure)."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .. import environment
from ..errors import ConfigError
from ..hosts import Host
from .choices import Choices
from .network import is_this_machine

__all__ = ["chosen_variables", "commands_for", "shares", "ssh_words", "variables_for", "without_values"]

# Takes variables, as JSON in a line on standard input, and becomes the command of its arguments. It reads no byte more
# than that line, and none of the user's modules. They are not in a command line, as `ps` shows those to everybody.
_TAKE_VARIABLES = (
    'import json, os, sys; line = open(0, "rb", 0, closefd=False).readline() or sys.exit(1); '
    "os.environ.update(json.loads(line)); os.execvp(sys.argv[1], sys.argv[1:])"
)

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


def commands_for(choices: Choices, hosts: Sequence[Host]) -> list[list[str]]:
    """The command for each machine: through ssh, or the launcher itself for this machine.

    Each reads its variables, `variables_for` as JSON in one line, from its standard input.
    """
    return [_command(choices, hosts, node) for node in range(len(hosts))]


def _command(choices: Choices, hosts: Sequence[Host], node: int) -> list[str]:
    host = hosts[node]
    is_here = is_this_machine(host.name)
    python = sys.executable if is_here else choices.remote_python or sys.executable
    launcher = [python, *_launcher(choices, len(hosts), node, host.slots)]
    words = [python, "-IS", "-c", _TAKE_VARIABLES, *launcher]
    if is_here:
        # the way by which this machine's user has come is not that to the other machines
        return ["env", "-u", "SSH_CONNECTION", *words]
    there = shlex.join(words)
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
    # it breaks after three without an answer
    probe_s = max(1, round(environment.heartbeat_timeout() / 3))
    alive = (f"ServerAliveInterval={probe_s}", "ServerAliveCountMax=3")
    settings = ("BatchMode=yes", f"ConnectTimeout={limit}", *alive)
    first, *others = ssh_words(choices)
    return [first, "-T", *(word for setting in settings for word in ("-o", setting)), *others]


def ssh_words(choices: Choices) -> list[str]:
    """ssh with the options that the user has chosen."""
    port = ["-p", str(choices.ssh_port)] if choices.ssh_port is not None else []
    return ["ssh", *port, *(["-i", choices.identity] if choices.identity is not None else [])]


def variables_for(choices: Choices, variables: Mapping[str, str]) -> dict[str, str]:
    """What the launchers of all machines find in their environment beside what their machine puts there.

    Raises:
        ConfigError: for the name of a variable that is not set.
    """
    own = {name: value for name, value in variables.items() if name.startswith(_OWN) and name not in _NEVER}
    return own | chosen_variables(choices, variables)


def chosen_variables(choices: Choices, variables: Mapping[str, str]) -> dict[str, str]:
    """Those that the user has named, or given a value.

    Raises:
        ConfigError: for the name of a variable that is not set.
    """
    found = {}
    for text in choices.env:
        name, equals, value = text.partition("=")
        if not equals and name not in variables:
            raise ConfigError("env", "the name of a variable that is set, or NAME=VALUE", text)
        found[name] = value if equals else variables[name]
    return found


def without_values(words: Sequence[str]) -> list[str]:
    """The words of a command line, with ``-x NAME=...`` for ``-x NAME=VALUE``: to be shown and kept."""
    found = list(words)
    for number, word in enumerate(words):
        follows = number > 0 and words[number - 1] in ("-x", "--env")
        start = re.match(r"[^=]+=" if follows else r"(-x|--env=)[^=]+=", word)
        if start is not None:
            found[number] = f"{start[0]}..."
    return found
