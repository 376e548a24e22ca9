"""The command lines and environments of the launchers on other hosts (pure).

Command lines are visible to every user of a host (`ps`); environment variables are sent over
standard input instead.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ... import environment
from ...environment.variable_table import LAUNCHED, RUN_ID, WATCHDOG_DIR
from ...errors import ConfigError
from ...hosts import Host, is_this_host
from ..options import JobOptions

__all__ = [
    "assign_workers",
    "host_command",
    "host_commands",
    "redact_variables",
    "remote_environment",
    "requested_variables",
    "ssh_command",
]

# Reads variables as one line of JSON from standard input, and replaces itself by the command in its
# arguments. It reads no byte after that line and imports none of the user's modules.
_READ_ENVIRONMENT = (
    'import json, os, sys; line = open(0, "rb", 0, closefd=False).readline() or sys.exit(1); '
    "os.environ.update(json.loads(line)); os.execvp(sys.argv[1], sys.argv[1:])"
)

# variables that belong to the program rather than to the host
_FORWARDED = (
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "LOCKSTEP_",
    "TORCH",
    "NCCL_",
    "GLOO_",
    "OMP_NUM_THREADS",
)
_NOT_FORWARDED = (RUN_ID.name, LAUNCHED.name, WATCHDOG_DIR.name)


def assign_workers(config: JobOptions) -> list[Host]:
    """Return the hosts that take part, each with its number of workers as slots: a host is filled
    before the next.

    In an elastic job all take part, with all their slots.
    """
    if config.elastic is not None:
        return list(config.hosts)
    left = config.workers or sum(host.slots for host in config.hosts)
    assigned = []
    for host in config.hosts:
        if left > 0:
            assigned.append(replace(host, slots=min(left, host.slots)))
            left -= host.slots
    return assigned


def host_commands(config: JobOptions, hosts: Sequence[Host]) -> list[list[str]]:
    """Return the command for each host: through ssh, or the launcher itself for this host.

    Each command reads its variables, `remote_environment` as one line of JSON, from standard input.
    """
    return [host_command(config, host, node, len(hosts)) for node, host in enumerate(hosts)]


def host_command(config: JobOptions, host: Host, node: int, nodes: int) -> list[str]:
    """Return the command for `host`, the one with the number `node` of so many `nodes`, see
    `host_commands`.
    """
    is_local = is_this_host(host.name)
    python = sys.executable if is_local else config.remote_python or sys.executable
    launcher = [python, *_launcher_command(config, nodes, node, host.slots)]
    words = [python, "-IS", "-c", _READ_ENVIRONMENT, *launcher]
    if is_local:
        # the ssh connection of this host's user says nothing about the way to the other hosts
        return ["env", "-u", "SSH_CONNECTION", *words]
    return [
        *_ssh_session(config),
        host.login,
        f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}",
    ]


def _launcher_command(config: JobOptions, nodes: int, node: int, workers: int) -> list[str]:
    of_host = ["--as-host", "--nnodes", str(nodes), "--node-rank", str(node), "-np", str(workers)]
    if config.elastic is not None:
        start = config.workers or sum(host.slots for host in config.hosts)
        of_host += ["--elastic-start", str(min(start, config.elastic[1]))]
    return [
        "-m",
        "lockstep",
        "run",
        *of_host,
        *config.words(),
        config.program[0],
        "--",
        *config.program[1:],
    ]


def _ssh_session(config: JobOptions) -> list[str]:
    # it must not prompt: its standard input is the connection to the launcher; and a broken
    # connection must be noticed
    limit = max(1, min(15, int(config.start_timeout)))
    # the connection ends after three probes without an answer
    silence_s = config.heartbeat_timeout or environment.heartbeat_timeout()
    probe_s = max(1, round(silence_s / 3))
    alive = (f"ServerAliveInterval={probe_s}", "ServerAliveCountMax=3")
    settings = ("BatchMode=yes", f"ConnectTimeout={limit}", *alive)
    first, *others = ssh_command(config)
    return [first, "-T", *(word for setting in settings for word in ("-o", setting)), *others]


def ssh_command(config: JobOptions) -> list[str]:
    """Return the words of ssh with the user's options."""
    port = ["-p", str(config.ssh_port)] if config.ssh_port is not None else []
    return ["ssh", *port, *(["-i", config.identity] if config.identity is not None else [])]


def remote_environment(config: JobOptions, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for the launchers of all hosts, besides their host's own.

    Raises:
        ConfigError: a variable named by -x is not set.
    """
    forwarded = {name: variables[name] for name in variables if name.startswith(_FORWARDED)}
    forwarded = {name: value for name, value in forwarded.items() if name not in _NOT_FORWARDED}
    return forwarded | requested_variables(config, variables)


def requested_variables(config: JobOptions, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that workers read options in, and those of -x, by name or with a value.

    Raises:
        ConfigError: a variable named by -x is not set.
    """
    requested = {}
    for text in config.env:
        name, equals, value = text.partition("=")
        if not equals and name not in variables:
            raise ConfigError("env", "the name of a variable that is set, or NAME=VALUE", text)
        requested[name] = value if equals else variables[name]
    return requested | config.variables()


def redact_variables(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with ``-x NAME=...`` for ``-x NAME=VALUE``, to be shown
    and stored.
    """
    redacted = list(words)
    for number, word in enumerate(words):
        follows = number > 0 and words[number - 1] in ("-x", "--env")
        start = re.match(r"[^=]+=" if follows else r"(-x|--env=)[^=]+=", word)
        if start is not None:
            redacted[number] = f"{start[0]}..."
    return redacted
