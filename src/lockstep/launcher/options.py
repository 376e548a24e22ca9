"""The options of a job: the table from which the command lines of `run`, `horovodrun` and `submit`
are made.

To add an option, add an entry to `JobOptions`; `option_table.Option` explains its parts. What it
sets is read where it is needed, as an attribute of `JobOptions` or, with `variable`, in the
workers' environment. The tests that compare all options and texts with stored ones say how these
are written anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from .. import arguments
from ..environment.variable_table import (
    HEARTBEAT_TIMEOUT,
    LAUNCHER_TIMEOUT,
    PAUSE_TIMEOUT,
    RESUME,
)
from ..errors import ConfigError, counted
from ..hosts import Host, parse_hosts, read_hostfile
from ..network import VirtualNetwork, parse_network
from ..option_table import Typed, choice, integer, names, number, option, options_of, values_of
from .worker_options import METRICS_HOST, SAVE_GRACE, MetricsOptions

__all__ = ["AUTO", "JobOptions", "check_debug_rank", "check_network"]


AUTO = 0
"""The value of `JobOptions.nnodes` for ``auto``."""

_SECONDS = number("a number of seconds, 0 or more", least=0, below=1e9)
_POSITIVE_SECONDS = number("a number of seconds, above 0", above=0, below=1e9)
_SECONDS_OR_FOR_EVER = number("a number of seconds, above 0, or inf", above=0)


def _node_count(name: str, text: object) -> int:
    if str(text).strip() == "auto":
        return AUTO
    expected = f"auto, or a whole number from 1 to {1 << 16}"
    return arguments.parse_whole(name, text, least=1, most=1 << 16, expected=expected)


def _worker_count(name: str, text: object) -> int | None:
    written = str(text)
    if written[:1] == "p" and written[1:].isdecimal():  # -np2, of which -n is an option
        hint = f"It is written -np {written[1:]}, with a space."
        raise ConfigError("-np", "a whole number from 1 to 120000", written, hint)
    if text == "auto":
        return None
    return arguments.parse_whole(name, text, least=1, most=120_000)  # 120 per host, as `launch`


def _folder(name: str, text: str) -> str:
    if Path(text).is_file():
        raise ConfigError(name, "a folder, which is created if it does not exist", text)
    return text


def _key_file(name: str, text: str) -> str:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(name, "an existing key file", text)
    return str(path)


def _hosts(name: str, text: str) -> tuple[Host, ...]:
    return tuple(parse_hosts(text, name))


def _network(name: str, text: str) -> VirtualNetwork:
    return parse_network(text, name)


def _interfaces(_: str, names: str | Sequence[str]) -> str:
    return names if isinstance(names, str) else ",".join(names)


def _elastic_range(name: str, text: str) -> tuple[int, int]:
    low, separator, high = text.partition(":")
    least = arguments.parse_whole(name, low, least=1, most=120)
    most = arguments.parse_whole(name, high, least=1, most=120) if separator else least
    if most < least:
        raise ConfigError(name, "MIN:MAX with MIN at most MAX, such as 2:8", text)
    return least, most


def _range_text(limits: tuple[int, int]) -> str:
    return f"{limits[0]}:{limits[1]}"


# the groups of the help
WORKERS = "workers"
HOSTS = "multiple hosts"
WATCHDOG = "watchdog"
METRICS = "metrics"
OUTPUT = "output and debugging"


@dataclass(frozen=True)
class JobOptions:
    """The options of ``lockstep run``, and its program: the script's path or module's name, and its
    arguments.
    """

    program: tuple[str, ...]
    module: bool = option(
        False,
        "--module",
        "-m",
        to_hosts=True,
        help="`script` is the name of a module, as in python -m",
    )

    workers: int | None = option(
        None,
        "-np",
        "-n",
        "--nproc",
        "--num-proc",
        group=WORKERS,
        metavar="N",
        parse=_worker_count,
        to_scheduler=True,
        help="number of workers (default: one per GPU, or 1 without GPUs; with -H one per slot; "
        "with --nnodes, the number on each host)",
        horovodrun=Typed(
            ("-np", "--num-proc"), help="number of workers (default: as for `lockstep run`)"
        ),
    )
    threads: int | None = option(
        None,
        "--threads",
        group=WORKERS,
        metavar="N",
        parse=integer(1, 1 << 16),
        to_hosts=True,
        help="intra-op threads of PyTorch per worker (default: OMP_NUM_THREADS, or usable cores / "
        "workers)",
    )
    restarts: int = option(
        0,
        "--restarts",
        group=WORKERS,
        metavar="N",
        parse=integer(0, 1 << 16),
        to_hosts=True,
        help="restart all workers after a failure, at most N times",
    )
    elastic: tuple[int, int] | None = option(
        None,
        "--elastic",
        group=WORKERS,
        metavar="MIN:MAX",
        parse=_elastic_range,
        write=_range_text,
        to_hosts=True,
        help="replace workers that are lost, while the others go on from memory without losing a "
        "step; the training waits below MIN workers, and `lockstep resize` changes their "
        "number up to MAX",
    )
    pause_timeout: float | None = option(
        None,
        "--pause-timeout",
        group=WORKERS,
        metavar="S",
        parse=_SECONDS_OR_FOR_EVER,
        to_hosts=True,
        variable=PAUSE_TIMEOUT.name,
        help=PAUSE_TIMEOUT.help(),
    )
    start_method: str = option(
        "forkserver",
        "--start-method",
        group=WORKERS,
        metavar="M",
        parse=choice(("forkserver", "spawn")),
        to_hosts=True,
        help="forkserver forks workers from a process that has loaded PyTorch, which is fast; "
        "spawn starts new interpreters",
    )
    preload: tuple[str, ...] = option(
        (),
        "--preload",
        group=WORKERS,
        metavar="MODULES",
        parse=names,
        write=",".join,
        to_hosts=True,
        help="modules that the fork server imports as well, e.g. torchvision,numpy",
    )
    resume: str | None = option(
        None,
        "--resume",
        group=WORKERS,
        metavar="RUN",
        variable=RESUME.name,
        to_scheduler=True,
        help="resume the training of the program's lockstep.Trainer from the run directory RUN, or "
        "with `latest` from the newest run in its run_dir; the number of workers may differ",
    )
    as_horovod: bool = option(
        False,
        "--as-horovod",
        group=WORKERS,
        to_hosts=True,
        help="run an unmodified Horovod program: `import horovod.torch` imports "
        "lockstep.compat.horovod, and HOROVOD_RANK etc. are set",
    )
    grace: float = option(
        SAVE_GRACE,
        "--grace",
        group=WORKERS,
        metavar="S",
        parse=_SECONDS,
        to_hosts=True,
        help="seconds that workers may take to save after Ctrl-C if they ask for it, as Lockstep's "
        "Trainer does; others are killed after 1 s",
    )

    hosts: tuple[Host, ...] = option(
        (),
        "-H",
        "--hosts",
        group=HOSTS,
        metavar="A:4,B:4",
        parse=_hosts,
        help="hosts, each with its slots: the maximum number of workers on it",
        horovodrun=Typed(("-H", "--hosts")),
    )
    hostfile: str | None = option(
        None,
        "--hostfile",
        "-hostfile",
        group=HOSTS,
        metavar="FILE",
        help="file with one host per line, such as `A slots=4`",
        horovodrun=Typed(("-hostfile", "--hostfile")),
    )
    ssh_port: int | None = option(
        None,
        "--ssh-port",
        "-p",
        group=HOSTS,
        metavar="PORT",
        parse=integer(1, 65535),
        help="port of sshd on all hosts (default: as ssh is configured)",
        horovodrun=Typed(("-p", "--ssh-port")),
    )
    identity: str | None = option(
        None,
        "--identity",
        "-i",
        group=HOSTS,
        metavar="FILE",
        parse=_key_file,
        help="private key file for ssh (default: as ssh is configured)",
        horovodrun=Typed(("-i", "--ssh-identity-file")),
    )
    remote_python: str | None = option(
        None,
        "--remote-python",
        group=HOSTS,
        metavar="PATH",
        help="Python interpreter on the other hosts (default: the path of this one)",
    )
    dry_run: bool = option(
        False,
        "--dry-run",
        group=HOSTS,
        help="print the command for each host and exit",
    )
    env: tuple[str, ...] = option(
        (),
        "-x",
        "--env",
        group=HOSTS,
        metavar="NAME",
        parse=names,
        repeats=True,
        to_scheduler=True,
        help="pass this environment variable to all workers, or set it with NAME=VALUE (visible to "
        "all users of this host in `ps`); PYTHONPATH and the variables of Lockstep, PyTorch, "
        "NCCL and Gloo are always passed",
    )
    nnodes: int = option(
        1,
        "--nnodes",
        "--nodes",
        group=HOSTS,
        metavar="N",
        parse=_node_count,
        help="number of hosts, if `lockstep run` is started on each; `auto`: as the scheduler says "
        "that has started it (Kubernetes, Kubeflow Trainer, SkyPilot, dstack, SageMaker; "
        "Slurm's srun needs no option)",
    )
    node_rank: int = option(
        0,
        "--node-rank",
        group=HOSTS,
        metavar="I",
        parse=integer(0, 1 << 16),
        help="with --nnodes: the number of this host, from 0",
    )
    master_addr: str | None = option(
        None,
        "--master-addr",
        group=HOSTS,
        metavar="ADDR",
        parse=arguments.parse_host,
        help="name or address of the first host, as the others reach it",
    )
    master_port: int = option(
        29500,
        "--master-port",
        group=HOSTS,
        metavar="PORT",
        parse=integer(1, 65535),
        help="with --nnodes: a free port on the first host",
    )
    network_interface: str | None = option(
        None,
        "--network-interface",
        group=HOSTS,
        metavar="NAME",
        parse=_interfaces,
        repeats=True,
        to_hosts=True,
        help="network interface for Gloo and NCCL (default: the one towards the first host)",
        horovodrun=Typed(("--network-interfaces", "--network-interface")),
    )
    start_timeout: float = option(
        60.0,
        "--start-timeout",
        group=HOSTS,
        metavar="S",
        parse=_SECONDS,
        to_hosts=True,
        help="seconds to wait for the other hosts",
        horovodrun=Typed(
            ("--start-timeout",),
            WORKERS,
            help="seconds to wait for the other hosts; without it HOROVOD_START_TIMEOUT counts",
        ),
    )
    heartbeat_timeout: float | None = option(
        None,
        "--heartbeat-timeout",
        group=HOSTS,
        metavar="S",
        parse=_POSITIVE_SECONDS,
        to_hosts=True,
        variable=HEARTBEAT_TIMEOUT.name,
        help=HEARTBEAT_TIMEOUT.help(),
    )
    launcher_timeout: float | None = option(
        None,
        "--launcher-timeout",
        group=HOSTS,
        metavar="S",
        parse=_SECONDS_OR_FOR_EVER,
        to_hosts=True,
        variable=LAUNCHER_TIMEOUT.name,
        help=LAUNCHER_TIMEOUT.help(),
    )
    network: VirtualNetwork | None = option(  # noqa: RUF009 - as the others
        None,
        "--network",
        group=HOSTS,
        metavar="N",
        parse=_network,
        help="put the workers on virtual hosts of this host, between which messages take as long "
        "as on such a network: "
        '"4 hosts, 25Gbit, 50us"; further parts: "jitter 10us", "slow host 3 4x", "cut 0-2 after '
        '30s", "dilation auto"',
    )
    # set by the launcher that starts this one on another host
    as_host: bool = option(False, "--as-host")
    elastic_start: int | None = option(None, "--elastic-start", metavar="N", parse=integer(1, 120))

    stall_timeout: float | None = option(
        None,
        "--stall-timeout",
        group=WATCHDOG,
        metavar="S",
        parse=_POSITIVE_SECONDS,
        to_hosts=True,
        help="seconds to wait in a collective for a missing rank before that is an error (default: "
        "600); a warning is logged after 5 s",
        horovodrun=Typed(
            ("--stall-check-shutdown-time-seconds",),
            "timeline and stall check",
            help="seconds of waiting for a rank after which that is an error; 0 for never "
            "(default: 600)",
        ),
    )
    strict: bool = option(
        False,
        "--strict",
        group=WATCHDOG,
        to_hosts=True,
        help="raise an error, not a warning, if ranks call the same collective at different source "
        "lines",
    )
    no_watchdog: bool = option(
        False,
        "--no-watchdog",
        group=WATCHDOG,
        to_hosts=True,
        help="disable desync and stall detection",
    )
    timeline: str | None = option(
        None,
        "--timeline",
        group=WATCHDOG,
        metavar="DIR",
        parse=_folder,
        to_hosts=True,
        help="record all collectives in DIR, for `lockstep timeline DIR`",
    )

    metrics_port: int | None = option(
        None,
        "--metrics-port",
        group=METRICS,
        metavar="PORT",
        parse=integer(0, 65535),
        to_hosts=True,
        help="serve the job's metrics to Prometheus, from the first host: steps, samples and "
        "tokens, waits for data and for other ranks, the slowest rank, losses, goodput; 0 for any "
        "free port",
        horovodrun=Typed(("--metrics-port",)),
    )
    metrics_host: str = option(
        METRICS_HOST,
        "--metrics-host",
        group=METRICS,
        metavar="ADDR",
        parse=arguments.parse_host,
        to_hosts=True,
        help="with --metrics-port: the address at which they are served; 0.0.0.0 for all of this "
        "host, to anybody who reaches it",
        horovodrun=Typed(("--metrics-host",)),
    )
    metrics_file: str | None = option(
        None,
        "--metrics-file",
        group=METRICS,
        metavar="FILE",
        to_hosts=True,
        help="write the metrics into this file, for the textfile collector of a node exporter; it "
        "ends in .prom",
        horovodrun=Typed(("--metrics-file",)),
    )

    output_dir: str | None = option(
        None,
        "--output-dir",
        group=OUTPUT,
        metavar="DIR",
        parse=_folder,
        to_hosts=True,
        help="write the output of each rank to DIR/rank-N.log instead of printing it",
        horovodrun=Typed(
            ("--output-filename",),
            WORKERS,
            help="also write the output of rank N to DIR/rank.N/stdout and DIR/rank.N/stderr",
        ),
    )
    tee: bool = option(
        False,
        "--tee",
        group=OUTPUT,
        to_hosts=True,
        help="with --output-dir: print the output as well, and write DIR/rank.N/stdout and "
        "DIR/rank.N/stderr",
    )
    no_prefix: bool = option(
        False,
        "--no-prefix",
        group=OUTPUT,
        to_hosts=True,
        help="print lines without their [rank]",
    )
    quiet: bool = option(
        False,
        "--quiet",
        "-q",
        group=OUTPUT,
        to_scheduler=True,
        help="print no messages of the launcher except errors",
    )
    debug_rank: int | None = option(
        None,
        "--debug-rank",
        group=OUTPUT,
        metavar="R",
        parse=integer(0, 1 << 24),
        help="give rank R the terminal for breakpoint(); collectives of all ranks then have no "
        "time limit",
    )
    debug: bool = option(
        False,
        "--debug",
        group=OUTPUT,
        help="print the traceback of the launcher's own errors",
    )

    @classmethod
    def parse(cls, texts: Mapping[str, Any]) -> Self:
        """Return the options that `texts` give by name, and the program.

        Raises:
            ConfigError: an option, which the error names, is invalid or contradicts another.
        """
        parsed = values_of(cls, texts)
        if "hostfile" in parsed:
            if "hosts" in parsed:
                raise ConfigError("hostfile", "either -H or --hostfile", found="both")
            parsed["hosts"] = tuple(read_hostfile(Path(parsed["hostfile"]).expanduser()))
        job = cls(texts["program"], **parsed)
        job.check()
        return job

    def words(self) -> list[str]:
        """Return the options that the launchers of other hosts get, as words of a command line."""
        words: list[str] = []
        for option_ in options_of(type(self)):
            if option_.to_hosts:
                words += option_.words(getattr(self, option_.name))
        return words

    def texts(self) -> dict[str, str | bool]:
        """Return the options that a host gets that joins the job, for `parse`."""
        texts: dict[str, str | bool] = {}
        for option_ in options_of(type(self)):
            words = option_.words(getattr(self, option_.name)) if option_.to_hosts else []
            if words:
                texts[option_.name] = words[1] if option_.metavar else True
        return texts

    def variables(self) -> dict[str, str]:
        """Return the options that workers read in their environment."""
        variables = {}
        for option_ in options_of(type(self)):
            words = option_.words(getattr(self, option_.name)) if option_.variable else []
            if words:
                variables[option_.variable] = words[1] if option_.metavar else "1"
        return variables

    def metrics(self) -> MetricsOptions | None:
        """Return where the metrics of the job go; None if nowhere.

        Raises:
            MissingPackageError: what serves or writes them is not installed.
        """
        if self.metrics_port is None and self.metrics_file is None:
            return None
        file = "" if self.metrics_file is None else str(Path(self.metrics_file).absolute())
        metrics = MetricsOptions(self.metrics_port, self.metrics_host, file)
        metrics.check()
        return metrics

    def check(self) -> None:
        """Check that no option contradicts another.

        Raises:
            ConfigError: naming the first that does.
        """
        self._check_hosts()
        if self.no_watchdog:
            needs_it = {
                "strict": self.strict,
                "timeline": self.timeline is not None,
                "stall_timeout": self.stall_timeout is not None,
                "metrics_port": self.metrics_port is not None,
                "metrics_file": self.metrics_file is not None,
            }
            _refuse(needs_it, "not to be given with --no-watchdog, which disables it")
        if self.elastic is not None:
            self._check_elastic(*self.elastic)
        elif self.pause_timeout is not None:
            expected = "--elastic as well: other jobs do not wait for workers or hosts"
            raise ConfigError("pause_timeout", expected, found="no --elastic")
        if self.network is not None:
            several = {
                "hosts": bool(self.hosts),
                "nnodes": self.nnodes != 1,
                "elastic": self.elastic is not None,
            }
            _refuse(several, "not to be given with --network, which emulates hosts on this one")
        if self.metrics_file is not None and not self.metrics_file.endswith(".prom"):
            expected = "a file whose name ends in .prom, as node exporters read no others"
            raise ConfigError("metrics_file", expected, self.metrics_file)
        if self.tee and self.output_dir is None:
            raise ConfigError("tee", "--output-dir as well, for the log files", found="no folder")

    def _check_hosts(self) -> None:
        if self.hosts and self.nnodes != 1:
            number = "auto" if self.nnodes == AUTO else self.nnodes
            raise ConfigError(
                "nnodes", "none with -H or --hostfile, which start all hosts", found=str(number)
            )
        if self.nnodes == AUTO:
            is_told = {
                "node_rank": self.node_rank != 0,
                "master_addr": self.master_addr is not None,
            }
            _refuse(is_told, "not to be given with --nodes auto, which finds it")
        elif self.node_rank >= self.nnodes:
            expected = f"a number from 0 to {self.nnodes - 1} (--nnodes {self.nnodes})"
            raise ConfigError("node_rank", expected, self.node_rank)
        if self.nnodes > 1 and self.master_addr is None and not self.as_host:
            expected = "the name or address of the first host (--nnodes is given)"
            raise ConfigError("master_addr", expected, found="nothing")
        if self.dry_run and not self.hosts:
            raise ConfigError(
                "dry_run", "-H or --hostfile: it prints the commands for the hosts", found="neither"
            )
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and (self.workers or slots) > slots:
            listed = ", ".join(f"{host.name}:{host.slots}" for host in self.hosts)
            raise ConfigError("workers", f"at most {slots}, the slots of {listed}", self.workers)

    def _check_elastic(self, least: int, most: int) -> None:
        fixed = {
            "no_watchdog": self.no_watchdog,
            "debug_rank": self.debug_rank is not None,
            "output_dir": self.output_dir is not None,
            "restarts": self.restarts != 0,
        }
        _refuse(fixed, "not to be given with --elastic")
        several = self.nnodes != 1 or self.as_host  # where it is the number on each host
        if self.workers is not None and not several and not least <= self.workers <= most:
            raise ConfigError(
                "workers",
                f"a number from {least} to {most}, as --elastic {least}:{most}",
                self.workers,
            )


def _refuse(options: Mapping[str, bool], expected: str) -> None:
    """Raise ConfigError for the first option that is given, as it contradicts another."""
    for name, is_given in options.items():
        if is_given:
            raise ConfigError(name, expected, found="both")


def check_debug_rank(job: JobOptions, ranks: int) -> None:
    """Raise ConfigError if there is no such rank."""
    if job.debug_rank is not None and job.debug_rank >= ranks:
        raise ConfigError("debug_rank", f"a rank from 0 to {ranks - 1}", job.debug_rank)


def check_network(network: VirtualNetwork | None, workers: int, argument: str = "network") -> None:
    """Raise ConfigError if a virtual host would have no worker."""
    if network is not None and network.hosts > workers:
        expected = f"at most {counted(workers, 'host')}, the number of workers"
        raise ConfigError(argument, expected, found=counted(network.hosts, "host"))
