"""Other hosts: whether ssh reaches them, and whether they have the same versions."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from .. import messages
from ..hosts import Host, is_this_host
from ..launcher.options import JobOptions
from ..launcher.remote_hosts.remote_command import ssh_command
from . import this_host
from .findings import Problem, Section

# runs on the host, with any version of Python
_PROGRAM = """
import json, os, platform
try:
    from importlib.metadata import PackageNotFoundError, version
except ImportError:
    version = PackageNotFoundError = None
found = {"python": platform.python_version(), "cores": os.cpu_count()}
if version:
    for name, package in (("torch", "torch"), ("lockstep", "lockstep-train")):
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            pass
print("lockstep-doctor " + json.dumps(found))
"""

# error message of ssh → fix
_FIXES = {
    "Could not resolve": "Check the name, or add it to /etc/hosts or ~/.ssh/config.",
    "Connection refused": "Start sshd there, or name its port with --ssh-port.",
    "Connection timed out": "Check that the host is up and that no firewall is in between.",
    "No route to host": "Check that the host is up and in the same network.",
    "Permission denied": "Put your public key there (ssh-copy-id {login}), or name the key with "
    "--identity.",
    "Host key verification failed": "Log in once by hand (ssh {login}) to accept its key.",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "Find out why its key has changed, then: "
    "ssh-keygen -R {name}.",
}


_LIMIT_S = 10.0  # in which a host must answer

# Exit codes by which a host says what it has not. Shells, Python and ssh (255) use others.
_NO_FOLDER = 91
_NO_PYTHON = 92


def examine_hosts(job: JobOptions, limit: float = _LIMIT_S) -> Section:
    """Log in on all hosts of `job` concurrently, and compare their versions with this host's.

    Args:
        job: the hosts, and how ssh reaches them.
        limit: seconds to connect, and as many again to answer.
    """
    section = Section("hosts")
    with ThreadPoolExecutor(min(32, len(job.hosts))) as pool:
        results = pool.map(lambda host: _examine(job, host, limit), job.hosts)
        for host, (text, problems) in zip(job.hosts, results, strict=True):
            section.add(host.name, text, good=not problems)
            section.problems += problems
    return section


def login_command(job: JobOptions, host: Host, program: str, limit: float) -> list[str]:
    """Return the command that runs `program`, a line of sh, on `host` without prompting."""
    settings = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(limit))}"]
    return [*ssh_command(job), *settings, "--", host.login, f"sh -c {shlex.quote(program)}"]


def _examine(job: JobOptions, host: Host, limit: float) -> tuple[str, list[Problem]]:
    if is_this_host(host.name):  # where `lockstep run` needs no ssh either
        local = this_host.versions()
        return compare(host, {**local, "cores": os.cpu_count()}, local)
    # as `lockstep run` would begin there: in this folder, with this Python
    python = job.remote_python or sys.executable
    folder = shlex.quote(str(Path.cwd()))
    program = (
        f"cd {folder} || exit {_NO_FOLDER}; command -v {shlex.quote(python)} > /dev/null || exit "
        f"{_NO_PYTHON}; exec {shlex.quote(python)} -c {shlex.quote(_PROGRAM)}"
    )
    try:
        done = subprocess.run(
            login_command(job, host, program, limit),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2 * limit,
        )
    except FileNotFoundError:
        return "not reached", [
            Problem("there is no ssh on this host", "Install it (Debian: openssh-client).")
        ]
    except subprocess.TimeoutExpired:
        return "not reached", [_unreachable(host, f"no answer within {2 * limit:g} s")]
    answers = [line for line in done.stdout.splitlines() if line.startswith("lockstep-doctor ")]
    if answers:
        return _read_answer(host, answers[-1].partition(" ")[2], python)
    if done.returncode == _NO_FOLDER:
        return "cannot run the program", [
            Problem(
                f"{host.name} has no folder {Path.cwd()}, in which the program would run",
                "Copy the program there, to the same path, or use a file system that all hosts "
                "share.",
            )
        ]
    if done.returncode == _NO_PYTHON:
        return "cannot run the program", [
            Problem(
                f"{host.name} has no Python at {python}",
                "Install it there at the same path, or name the one that is there with "
                "--remote-python, also for lockstep run.",
            )
        ]
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return "not reached", [
        _unreachable(host, lines[-1] if lines else f"exit code {done.returncode}", done.stderr)
    ]


class _Answer(msgspec.Struct, frozen=True):
    """The versions on a host, and its cores; None for what is not installed or not known there."""

    python: str
    torch: str | None = None
    lockstep: str | None = None
    cores: int | None = None


def _read_answer(host: Host, text: str, python: str) -> tuple[str, list[Problem]]:
    try:
        answer = messages.decode(text, _Answer)
    except ValueError as error:
        return "not examined", [_unreachable(host, f"the answer of its Python is damaged: {error}")]
    return compare(host, structs.asdict(answer), this_host.versions(), python)


def _unreachable(host: Host, reason: str, stderr: str = "") -> Problem:
    fixes = [fix for message, fix in _FIXES.items() if message in stderr]
    fix = fixes[-1] if fixes else "Try `ssh {login} python3 --version` by hand."
    return Problem(f"{host.name}: {reason}", fix.format(login=host.login, name=host.name))


def compare(
    host: Host, remote: dict[str, Any], local: dict[str, str], python: str = sys.executable
) -> tuple[str, list[Problem]]:
    """Return the line about a host that answered, and a problem for each version that differs from
    this host's.

    Args:
        host: the host.
        remote: its versions by package, and the number of its cores.
        local: the versions of this host.
        python: the path of Python there.
    """
    versions = {name: remote.get(name) for name in this_host.NAMES}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    problems = [
        Problem(
            f"{host.name} has {name} {version}, this host {local.get(name, 'none')}"
            if version
            else f"{host.name} has no {name}, this host {local.get(name, 'none')}",
            f"Install {name} {local.get(name, '')} there, in the Python at {python}.",
        )
        for name, version in versions.items()
        if this_host.must_match(name, version or "")
        != this_host.must_match(name, local.get(name, ""))
    ]
    slots = f"{host.slots} slot{'s'[: host.slots != 1]} on {remote.get('cores') or '?'} cores"
    return f"{slots}: {text}", problems
