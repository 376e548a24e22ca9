"""Other machines: whether ssh gets there, and whether they have the same versions."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..hosts import Host
from . import versions
from .report import Problem, Section

__all__ = ["Ssh", "examine_hosts"]

# runs there, by whatever Python there is
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

# what ssh says → what to do
_FIXES = {
    "Could not resolve": "Check the name, or add it to /etc/hosts or ~/.ssh/config.",
    "Connection refused": "Start sshd there, or name its port with --ssh-port.",
    "Connection timed out": "Check that the machine is up and that no firewall is in between.",
    "No route to host": "Check that the machine is up and in the same network.",
    "Permission denied": "Put your public key there (ssh-copy-id {login}), or name the key with --identity.",
    "Host key verification failed": "Log in once by hand (ssh {login}) to accept its key.",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "Find out why its key is another now, then: ssh-keygen -R {name}.",
}


@dataclass(frozen=True, slots=True)
class Ssh:
    """How ssh is called.

    Attributes:
        port: None leaves it to ssh's configuration.
        identity: file of the private key; None leaves it to ssh's configuration.
        limit: seconds that a machine may take to answer.
    """

    port: int | None = None
    identity: Path | None = None
    limit: float = 10.0

    def command(self, host: Host, program: str) -> list[str]:
        """The command that runs `program`, a line of sh, on `host` without asking anything."""
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(self.limit))}"]
        options += ["-p", str(self.port)] if self.port is not None else []
        options += ["-i", str(self.identity)] if self.identity is not None else []
        return ["ssh", *options, "--", host.login, f"sh -c {shlex.quote(program)}"]


def examine_hosts(hosts: Sequence[Host], ssh: Ssh) -> Section:
    """Log in on all `hosts` at the same time, and compare their versions with those here."""
    section = Section("hosts")
    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        for host, (text, problems) in zip(hosts, pool.map(lambda host: _examine(host, ssh), hosts), strict=True):
            section.add(host.name, text, good=not problems)
            section.problems += problems
    return section


def _examine(host: Host, ssh: Ssh) -> tuple[str, list[Problem]]:
    # the same Python as here, if it is there
    python, code = shlex.quote(sys.executable), shlex.quote(_PROGRAM)
    program = f"p={python}; [ -x $p ] || p=python3; exec $p -c {code}"
    try:
        done = subprocess.run(
            ssh.command(host, program),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2 * ssh.limit,
        )
    except FileNotFoundError:
        return "not reached", [Problem("there is no ssh on this machine", "Install it (Debian: openssh-client).")]
    except subprocess.TimeoutExpired:
        return "not reached", [_unreachable(host, f"no answer within {2 * ssh.limit:g} s")]
    answers = [line for line in done.stdout.splitlines() if line.startswith("lockstep-doctor ")]
    if answers:
        return compare(host, json.loads(answers[-1].partition(" ")[2]), versions.here())
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return "not reached", [_unreachable(host, lines[-1] if lines else f"exit code {done.returncode}", done.stderr)]


def _unreachable(host: Host, reason: str, told: str = "") -> Problem:
    fixes = [fix for words, fix in _FIXES.items() if words in told]
    fix = fixes[-1] if fixes else "Try `ssh {login} python3 --version` by hand."
    return Problem(f"{host.name}: {reason}", fix.format(login=host.login, name=host.name))


def compare(host: Host, there: dict[str, Any], here: dict[str, str]) -> tuple[str, list[Problem]]:
    """The line about a machine that answered, and what is different on it."""
    found = {name: there.get(name) for name in versions.NAMES}
    text = ", ".join(f"{name} {text or 'missing'}" for name, text in found.items())
    wrong = {name: text for name, text in found.items() if text != here.get(name)}
    problems = [
        Problem(
            f"{host.name} has {f'{name} {text}' if text else f'no {name}'}, this machine {here.get(name, 'none')}",
            f"Install {name} {here.get(name, '')} there, in the Python at {sys.executable}.",
        )
        for name, text in wrong.items()
    ]
    slots = f"{host.slots} slot{'s'[: host.slots != 1]} on {there.get('cores', '?')} cores"
    return f"{slots}: {text}", problems
