"""What the user has chosen for a run, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..hosts import Host, parse_hosts, read_hostfile
from .options import GRACE

__all__ = ["MASTER_PORT", "Choices"]

MASTER_PORT = 29500
START_TIMEOUT = 60.0
_MAX_WORKERS = 120  # as `launch`


@dataclass(frozen=True)
class Choices:
    """The options of ``lockstep run``, by their names there.

    Attributes:
        program: the script's path or module's name, and its arguments.
        hosts: the machines of -H or of the host file; empty without either.
        nnodes, node_rank: of a machine that is started by hand; 1 and 0 without that.
    """

    program: tuple[str, ...]
    module: bool = False
    workers: int | None = None
    threads: int | None = None
    restarts: int = 0
    start_method: str = "forkserver"
    preload: tuple[str, ...] = ()
    grace: float = GRACE
    hosts: tuple[Host, ...] = ()
    ssh_port: int | None = None
    identity: str | None = None
    remote_python: str | None = None
    dry_run: bool = False
    env: tuple[str, ...] = ()
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = MASTER_PORT
    network_interface: str | None = None
    start_timeout: float = START_TIMEOUT
    output_dir: str | None = None
    no_prefix: bool = False
    quiet: bool = False
    debug_rank: int | None = None
    as_host: bool = False
    no_watch: bool = False
    strict: bool = False
    stall_timeout: float | None = None
    timeline: str | None = None
    tee: bool = False
    as_horovod: bool = False

    @staticmethod
    def of(given: Mapping[str, Any]) -> Choices:
        """The choices `given` as texts.

        Raises:
            ConfigError: naming an option that is not what it must be, or does not go with another.
        """
        values = {field.name: given[field.name] for field in fields(Choices) if field.name in given}
        for name, (least, most) in _WHOLE_NUMBERS.items():
            if name in values:
                values[name] = _whole(name, values[name], least, most)
        for name in ("grace", "start_timeout"):
            if name in values:
                values[name] = _seconds(name, values[name])
        if "stall_timeout" in values:
            values["stall_timeout"] = _seconds("stall_timeout", values["stall_timeout"], above=True)
        for name in ("preload", "env"):
            if name in values:
                texts = values[name].split(",") if isinstance(values[name], str) else values[name]
                values[name] = tuple(text.strip() for text in texts if text.strip())
        values["hosts"] = _hosts(given)
        choices = Choices(**values)
        choices._check()
        return choices

    def _check(self) -> None:
        if self.start_method not in ("forkserver", "spawn"):
            raise ConfigError("start_method", "forkserver or spawn", self.start_method)
        if self.hosts and self.nnodes > 1:
            raise ConfigError("nnodes", "not to be given with -H or --hostfile, which start all machines", self.nnodes)
        if self.node_rank >= self.nnodes:
            expected = f"a number from 0 to {self.nnodes - 1} (--nnodes {self.nnodes})"
            raise ConfigError("node_rank", expected, self.node_rank)
        if self.nnodes > 1 and self.master_addr is None and not self.as_host:
            raise ConfigError(
                "master_addr", "the name or address of the first machine (--nnodes is given)", found="nothing"
            )
        if self.dry_run and not self.hosts:
            raise ConfigError(
                "dry_run", "-H or --hostfile: it shows what would be run on the machines", found="neither"
            )
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and (self.workers or slots) > slots:
            names = ", ".join(f"{host.name}:{host.slots}" for host in self.hosts)
            raise ConfigError("workers", f"at most {slots}, the slots of {names}", self.workers)
        if self.no_watch and (self.strict or self.stall_timeout is not None or self.timeline is not None):
            other = "strict" if self.strict else "timeline" if self.timeline is not None else "stall_timeout"
            raise ConfigError(other, "not to be given with --no-watch, which does without all of it", found="both")
        if self.tee and self.output_dir is None:
            raise ConfigError("tee", "--output-dir as well, which says where the files go", found="no folder")
        if self.timeline is not None and Path(self.timeline).is_file():
            raise ConfigError("timeline", "a folder, made where it is missing", self.timeline)
        if self.identity is not None and not Path(self.identity).is_file():
            raise ConfigError("identity", "a key file that is there", self.identity)


_WHOLE_NUMBERS = {
    "workers": (1, _MAX_WORKERS * 1000),
    "threads": (1, 1 << 16),
    "restarts": (0, 1 << 16),
    "ssh_port": (1, 65535),
    "nnodes": (1, 1 << 16),
    "node_rank": (0, 1 << 16),
    "master_port": (1, 65535),
    "debug_rank": (0, 1 << 24),
}


def _whole(name: str, text: object, least: int, most: int) -> int | None:
    if name == "workers" and text == "auto":
        return None
    try:
        value = int(str(text))
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ConfigError(name, f"a whole number from {least} to {most}", text)
    return value


def _seconds(name: str, text: object, above: bool = False) -> float:
    try:
        value = float(str(text))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9 or (above and value == 0):
        raise ConfigError(name, f"a number of seconds, {'above 0' if above else '0 or more'}", text)
    return value


def _hosts(given: Mapping[str, Any]) -> tuple[Host, ...]:
    if "hosts" in given and "hostfile" in given:
        raise ConfigError("hostfile", "either -H or --hostfile", found="both")
    if "hosts" in given:
        return tuple(parse_hosts(given["hosts"], "hosts"))
    return tuple(read_hostfile(Path(given["hostfile"]))) if "hostfile" in given else ()
