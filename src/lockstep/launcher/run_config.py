"""The configuration of `lockstep run`: a table of its options, their checks, and the settings of a host's workers.

The fields of `RunConfig` declare every option once. From their metadata (`OPTIONS`) come the parser of `lockstep run`,
the options that travel to the launchers of other hosts, and those that `lockstep horovodrun` shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from .. import arguments
from ..errors import ConfigError, counted
from ..hosts import Host, parse_hosts, read_hostfile
from ..network import VirtualNetwork, parse_network

__all__ = [
    "EXIT_GRACE",
    "OPTIONS",
    "SAVE_GRACE",
    "RunConfig",
    "RunOption",
    "WatchdogOptions",
    "WorkerOptions",
    "check_debug_rank",
    "check_network",
]


# --- How workers are run (data only) ----------------------------------------------------------------------------------

SAVE_GRACE = 120.0
"""Seconds to finish a step and save. At the 100 MB/s of a slow disk that is a checkpoint of 12 GB; a second signal ends
the wait."""

EXIT_GRACE = 1.0
"""Seconds to exit for a program that does not ask for time to save."""

FAILURE_GRACE = 5.0
"""Seconds until the other workers are killed after one has failed. They cannot continue, only clean up."""


@dataclass(frozen=True)
class WatchdogOptions:
    """The user's settings of the watchdog; None: the value in the environment.

    Attributes:
        mode: "on", "strict" or "off".
        stall_timeout: seconds of waiting for a rank after which it is an error.
        timeline: a folder for the records of all collectives.
        folder: the folder for the workers' output, by which `lockstep top` can find the job.
    """

    mode: str | None = None
    stall_timeout: float | None = None
    timeline: str | None = None
    folder: str = ""


@dataclass(frozen=True)
class WorkerOptions:
    """How to run the workers of this host.

    Attributes:
        workers: their number.
        threads: intra-op threads of PyTorch in each worker.
        grace: seconds that workers may take to exit after a signal if one of them has asked for time to save.
        exit_grace: the same if none has.
        restarts: how often to restart all workers after a failure.
        start_method: "forkserver", or "spawn" for new interpreters.
        debug_rank: the rank that has the terminal.
        watch: settings of the watchdog.
        network: that is emulated between the workers, its dilation resolved; None for none.
    """

    workers: int
    threads: int
    grace: float = SAVE_GRACE
    exit_grace: float = SAVE_GRACE
    restarts: int = 0
    start_method: str = "forkserver"
    debug_rank: int | None = None
    watch: WatchdogOptions = WatchdogOptions()
    network: VirtualNetwork | None = None


# --- Values of options ------------------------------------------------------------------------------------------------

Parse = Callable[[str, Any], Any]
"""Makes the value of an option of its name and its text; raises ConfigError."""


def _integer(least: int, most: int) -> Parse:
    return partial(arguments.parse_whole, least=least, most=most)


AUTO = 0
"""The value of `RunConfig.nnodes` for ``auto``."""


def _node_count(name: str, text: object) -> int:
    if str(text).strip() == "auto":
        return AUTO
    expected = f"auto, or a whole number from 1 to {1 << 16}"
    return arguments.parse_whole(name, text, least=1, most=1 << 16, expected=expected)


def _worker_count(name: str, text: object) -> int | None:
    written = str(text)
    if written[:1] == "p" and written[1:].isdecimal():  # -np2, of which -n is an option
        hint = f"It is written -np {written[1:]}, with a space."
        raise ConfigError(name, "a whole number from 1 to 120000", written, hint)
    if text == "auto":
        return None
    return arguments.parse_whole(name, text, least=1, most=120_000)  # 120 per host, as `launch`


def _seconds(name: str, text: object) -> float:
    return arguments.parse_number(name, text, least=0, below=1e9, expected="a number of seconds, 0 or more")


def _positive_seconds(name: str, text: object) -> float:
    return arguments.parse_number(name, text, above=0, below=1e9, expected="a number of seconds, above 0")


def _start_method(name: str, text: object) -> str:
    return arguments.choice(name, text, ("forkserver", "spawn"))


def _names(_: str, given: str | Sequence[str]) -> tuple[str, ...]:
    texts = given.split(",") if isinstance(given, str) else given
    return tuple(text.strip() for text in texts if text.strip())


def _folder(name: str, text: str) -> str:
    if Path(text).is_file():
        raise ConfigError(name, "a folder, which is created if it does not exist", text)
    return text


def _file(name: str, text: str) -> str:
    if not Path(text).is_file():
        raise ConfigError(name, "an existing key file", text)
    return text


def _hosts(name: str, text: str) -> tuple[Host, ...]:
    return tuple(parse_hosts(text, name))


def _network(name: str, text: str) -> VirtualNetwork:
    return parse_network(text, name)


def _elastic_range(name: str, text: str) -> tuple[int, int]:
    low, separator, high = text.partition(":")
    least = arguments.parse_whole(name, low, least=1, most=120)
    most = arguments.parse_whole(name, high, least=1, most=120) if separator else least
    if most < least:
        raise ConfigError(name, "MIN:MAX with MIN at most MAX, such as 2:8", text)
    return least, most


# --- The options of `lockstep run` ------------------------------------------------------------------------------------

WORKERS, HOSTS, WATCHDOG, OUTPUT = "workers", "multiple hosts", "watchdog", "output and debugging"
"""The groups of options in the help."""


@dataclass(frozen=True)
class RunOption:
    """An option of `lockstep run`.

    Attributes:
        name: the field of `RunConfig`.
        default: its value without the option; False marks a flag without a value.
        flags: how it is typed, the first one in messages.
        group: its group in the help; "" for none.
        help: what it sets, in a phrase; "" hides it.
        metavar: placeholder of its value in the help.
        parse: makes the value of the text.
        repeats: whether it may be given several times.
        to_hosts: whether the launchers of other hosts get it as it is.
        horovodrun: the flags of the same option of `lockstep horovodrun`; () if it has none.
    """

    name: str
    default: Any
    flags: tuple[str, ...]
    group: str
    help: str
    metavar: str
    parse: Parse | None
    repeats: bool
    to_hosts: bool
    horovodrun: tuple[str, ...]

    def words(self, value: Any) -> list[str]:
        """Return the option with `value` as words of a command line; none for the default."""
        if value == self.default:
            return []
        flag = next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])
        if self.default is False:
            return [flag]
        return [flag, ",".join(value) if isinstance(value, tuple) else str(value)]


def _option(
    default: Any,
    *flags: str,
    group: str = "",
    help: str = "",
    metavar: str = "",
    parse: Parse | None = None,
    repeats: bool = False,
    to_hosts: bool = False,
    horovodrun: tuple[str, ...] = (),
) -> Any:
    given = {"flags": flags, "group": group, "help": help, "metavar": metavar, "parse": parse}
    return field(
        default=default, metadata={**given, "repeats": repeats, "to_hosts": to_hosts, "horovodrun": horovodrun}
    )


# fmt: off
@dataclass(frozen=True)
class RunConfig:
    """The options of ``lockstep run``, and its program: the script's path or module's name, and its arguments."""

    program: tuple[str, ...]
    module: bool = _option(
        False, "-m", "--module", help="`script` is the name of a module, as in python -m"
    )
    # --- workers
    workers: int | None = _option(
        None, "-np", "-n", "--nproc", "--num-proc", group=WORKERS, metavar="N", parse=_worker_count,
        horovodrun=("-np", "--num-proc"),
        help="number of workers (default: one per GPU, or 1 without GPUs; with -H one per slot; with --nnodes, the "
        "number on each host)",
    )
    threads: int | None = _option(
        None, "--threads", group=WORKERS, metavar="N", parse=_integer(1, 1 << 16), to_hosts=True,
        help="intra-op threads of PyTorch per worker (default: OMP_NUM_THREADS, or usable cores / workers)",
    )
    restarts: int = _option(
        0, "--restarts", group=WORKERS, metavar="N", parse=_integer(0, 1 << 16), to_hosts=True,
        help="restart all workers after a failure, at most N times (default: 0)",
    )
    elastic: tuple[int, int] | None = _option(
        None, "--elastic", group=WORKERS, metavar="MIN:MAX", parse=_elastic_range,
        help="replace workers that are lost, while the others go on from memory without losing a step; the training "
        "waits below MIN workers, and `lockstep resize` changes their number up to MAX",
    )
    start_method: str = _option(
        "forkserver", "--start-method", group=WORKERS, metavar="M", parse=_start_method, to_hosts=True,
        help="forkserver forks workers from a process that has loaded PyTorch, which is fast; spawn starts new "
        "interpreters (default: forkserver)",
    )
    preload: tuple[str, ...] = _option(
        (), "--preload", group=WORKERS, metavar="MODULES", parse=_names, to_hosts=True,
        help="modules that the fork server imports as well, e.g. torchvision,numpy",
    )
    resume: str | None = _option(
        None, "--resume", group=WORKERS, metavar="RUN",
        help="resume the training of the program's lockstep.Trainer from the run directory RUN, or with `latest` from "
        "the newest run in its run_dir; the number of workers may differ",
    )
    as_horovod: bool = _option(
        False, "--as-horovod", group=WORKERS, to_hosts=True,
        help="run an unmodified Horovod program: `import horovod.torch` imports lockstep.compat.horovod, and "
        "HOROVOD_RANK etc. are set",
    )
    grace: float = _option(
        SAVE_GRACE, "--grace", group=WORKERS, metavar="S", parse=_seconds, to_hosts=True,
        help="seconds that workers may take to save after Ctrl-C if they ask for it, as Lockstep's Trainer does "
        "(default: 120); others are killed after 1 s",
    )
    # --- multiple hosts
    hosts: tuple[Host, ...] = _option(
        (), "-H", "--hosts", group=HOSTS, metavar="A:4,B:4", parse=_hosts, horovodrun=("-H", "--hosts"),
        help="hosts, each with its slots: the maximum number of workers on it",
    )
    hostfile: str | None = _option(
        None, "--hostfile", "-hostfile", group=HOSTS, metavar="FILE", horovodrun=("-hostfile", "--hostfile"),
        help="file with one host per line, such as `A slots=4`",
    )
    ssh_port: int | None = _option(
        None, "--ssh-port", "-p", group=HOSTS, metavar="PORT", parse=_integer(1, 65535),
        horovodrun=("-p", "--ssh-port"),
        help="port of sshd on all hosts (default: as ssh is configured)",
    )
    identity: str | None = _option(
        None, "--identity", "-i", group=HOSTS, metavar="FILE", parse=_file, horovodrun=("-i", "--ssh-identity-file"),
        help="private key file for ssh (default: as ssh is configured)",
    )
    remote_python: str | None = _option(
        None, "--remote-python", group=HOSTS, metavar="PATH",
        help="Python interpreter on the other hosts (default: the path of this one)",
    )
    dry_run: bool = _option(
        False, "--dry-run", group=HOSTS, help="print the command for each host and exit",
    )
    env: tuple[str, ...] = _option(
        (), "-x", "--env", group=HOSTS, metavar="NAME", parse=_names, repeats=True,
        help="pass this environment variable to all workers, or set it with NAME=VALUE (visible to all users of this "
        "host in `ps`); PYTHONPATH and the variables of Lockstep, PyTorch, NCCL and Gloo are always passed",
    )
    nnodes: int = _option(
        1, "--nnodes", "--nodes", group=HOSTS, metavar="N", parse=_node_count,
        help="number of hosts, if `lockstep run` is started on each; `auto`: as the scheduler says that has started it "
        "(Kubernetes, Kubeflow Trainer, SkyPilot, dstack, SageMaker; Slurm's srun needs no option) (default: 1)",
    )
    node_rank: int = _option(
        0, "--node-rank", group=HOSTS, metavar="I", parse=_integer(0, 1 << 16),
        help="with --nnodes: the number of this host, from 0 (default: 0)",
    )
    master_addr: str | None = _option(
        None, "--master-addr", group=HOSTS, metavar="ADDR",
        help="name or address of the first host, as the others reach it",
    )
    master_port: int = _option(
        29500, "--master-port", group=HOSTS, metavar="PORT", parse=_integer(1, 65535),
        help="with --nnodes: a free port on the first host (default: 29500)",
    )
    network_interface: str | None = _option(
        None, "--network-interface", group=HOSTS, metavar="NAME", to_hosts=True,
        help="network interface for Gloo and NCCL (default: the one towards the first host)",
    )
    start_timeout: float = _option(
        60.0, "--start-timeout", group=HOSTS, metavar="S", parse=_seconds, to_hosts=True,
        horovodrun=("--start-timeout",),
        help="seconds to wait for the other hosts (default: 60)",
    )
    network: VirtualNetwork | None = _option(  # noqa: RUF009 - as the others
        None, "--network", group=HOSTS, metavar="N", parse=_network,
        help='put the workers on virtual hosts of this host, between which messages take as long as on such a network: '
        '"4 hosts, 25Gbit, 50us"; further parts: "jitter 10us", "slow host 3 4x", "cut 0-2 after 30s", "dilation auto"',
    )
    as_host: bool = _option(False, "--as-host")  # set by the launcher of another host
    elastic_start: int | None = _option(None, "--elastic-start", parse=_integer(1, 120))  # by it, too
    # --- watchdog
    stall_timeout: float | None = _option(
        None, "--stall-timeout", group=WATCHDOG, metavar="S", parse=_positive_seconds, to_hosts=True,
        horovodrun=("--stall-check-shutdown-time-seconds",),
        help="seconds to wait in a collective for a missing rank before that is an error (default: 600); a warning is "
        "logged after 5 s",
    )
    strict: bool = _option(
        False, "--strict", group=WATCHDOG, to_hosts=True,
        help="raise an error, not a warning, if ranks call the same collective at different source lines",
    )
    no_watchdog: bool = _option(
        False, "--no-watchdog", group=WATCHDOG, to_hosts=True, help="disable desync and stall detection",
    )
    timeline: str | None = _option(
        None, "--timeline", group=WATCHDOG, metavar="DIR", parse=_folder, to_hosts=True,
        help="record all collectives in DIR, for `lockstep timeline DIR`",
    )
    # --- output and debugging
    output_dir: str | None = _option(
        None, "--output-dir", group=OUTPUT, metavar="DIR", parse=_folder, to_hosts=True,
        horovodrun=("--output-filename",),
        help="write the output of each rank to DIR/rank-N.log instead of printing it",
    )
    tee: bool = _option(
        False, "--tee", group=OUTPUT, to_hosts=True,
        help="with --output-dir: print the output as well, and write DIR/rank.N/stdout and DIR/rank.N/stderr",
    )
    no_prefix: bool = _option(
        False, "--no-prefix", group=OUTPUT, to_hosts=True, help="print lines without their [rank]",
    )
    quiet: bool = _option(
        False, "--quiet", "-q", group=OUTPUT, help="print no messages of the launcher except errors",
    )
    debug_rank: int | None = _option(
        None, "--debug-rank", group=OUTPUT, metavar="R", parse=_integer(0, 1 << 24),
        help="give rank R the terminal for breakpoint(); collectives of all ranks then have no time limit",
    )
    debug: bool = _option(
        False, "--debug", group=OUTPUT, help="print the traceback of the launcher's own errors",
    )

    # fmt: on
    @staticmethod
    def parse(given: Mapping[str, Any]) -> RunConfig:
        """Return the configuration of options `given` as texts.

        Raises:
            ConfigError: an option, which the error names, is invalid or contradicts another.
        """
        values: dict[str, Any] = {"program": given["program"]}
        for option in OPTIONS:
            if option.name in given:
                text = given[option.name]
                values[option.name] = text if option.parse is None else option.parse(option.name, text)
        if "hostfile" in given:
            if "hosts" in given:
                raise ConfigError("hostfile", "either -H or --hostfile", found="both")
            values["hosts"] = tuple(read_hostfile(Path(given["hostfile"])))
        config = RunConfig(**values)
        config._check()
        return config

    def _check(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        if self.hosts and self.nnodes != 1:
            found = "auto" if self.nnodes == AUTO else self.nnodes
            raise ConfigError("nnodes", "none with -H or --hostfile, which start all hosts", found=str(found))
        if self.nnodes == AUTO and (self.node_rank or self.master_addr is not None):
            name = "node_rank" if self.node_rank else "master_addr"
            raise ConfigError(name, "not to be given with --nodes auto, which finds it", found="both")
        if self.nnodes != AUTO and self.node_rank >= self.nnodes:
            expected = f"a number from 0 to {self.nnodes - 1} (--nnodes {self.nnodes})"
            raise ConfigError("node_rank", expected, self.node_rank)
        if self.nnodes > 1 and self.master_addr is None and not self.as_host:
            expected = "the name or address of the first host (--nnodes is given)"
            raise ConfigError("master_addr", expected, found="nothing")
        if self.dry_run and not self.hosts:
            raise ConfigError("dry_run", "-H or --hostfile: it prints the commands for the hosts", found="neither")
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and (self.workers or slots) > slots:
            names = ", ".join(f"{host.name}:{host.slots}" for host in self.hosts)
            raise ConfigError("workers", f"at most {slots}, the slots of {names}", self.workers)
        if self.no_watchdog and (self.strict or self.stall_timeout is not None or self.timeline is not None):
            other = "strict" if self.strict else "timeline" if self.timeline is not None else "stall_timeout"
            raise ConfigError(other, "not to be given with --no-watchdog, which disables it", found="both")
        if self.elastic is not None:
            self._check_elastic(*self.elastic)
        if self.network is not None:
            several = "hosts" if self.hosts else "nnodes" if self.nnodes != 1 else "elastic" if self.elastic else ""
            if several:
                expected = "not to be given with --network, which emulates hosts on this one"
                raise ConfigError(several, expected, found="both")
        if self.tee and self.output_dir is None:
            raise ConfigError("tee", "--output-dir as well, for the log files", found="no folder")


    def _check_elastic(self, least: int, most: int) -> None:
        """Raise ConfigError for options that an elastic job cannot have."""
        given = {
            "no_watchdog": self.no_watchdog,
            "debug_rank": self.debug_rank is not None, "output_dir": self.output_dir is not None,
            "restarts": self.restarts,
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(name, "not to be given with --elastic", found="both")
        several = self.nnodes != 1 or self.as_host  # where it is the number on each host
        if self.workers is not None and not several and not least <= self.workers <= most:
            raise ConfigError("workers", f"a number from {least} to {most}, as --elastic {least}:{most}", self.workers)


OPTIONS = tuple(RunOption(each.name, each.default, **each.metadata) for each in fields(RunConfig) if each.metadata)
"""All options of `lockstep run`, in the order of its help."""


def check_debug_rank(config: RunConfig, ranks: int) -> None:
    """Raise ConfigError if there is no such rank."""
    if config.debug_rank is not None and config.debug_rank >= ranks:
        raise ConfigError("debug_rank", f"a rank from 0 to {ranks - 1}", config.debug_rank)


def check_network(network: VirtualNetwork | None, workers: int, argument: str = "network") -> None:
    """Raise ConfigError if a virtual host would have no worker."""
    if network is not None and network.hosts > workers:
        expected = f"at most {counted(workers, 'host')}, the number of workers"
        raise ConfigError(argument, expected, found=counted(network.hosts, "host"))
