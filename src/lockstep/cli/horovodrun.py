"""``lockstep horovodrun``: Horovod's launcher as a front to ``lockstep run --as-horovod``."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import arguments, environment, option_table
from ..environment.variable_table import STALL_WARNING
from ..errors import ConfigError
from ..hosts import Host, is_loopback, is_this_host, parse_hosts, read_hostfile
from ..launcher.options import WORKERS, JobOptions
from ..option_table import Option, integer, option, options_of, values_of
from . import run
from .host_discovery import Discovery, Follower, OwnJob
from .parser import Help

ELASTIC = "elastic jobs"
TIMELINE = "timeline and stall check"
INFORMATION = "information"

_seconds = option_table.number("a number of seconds, 0 or more", least=0, below=1e9)


def _warning_seconds(name: str, text: str) -> str:
    """Return a number of seconds as it was typed."""
    arguments.parse_number(name, text, above=0, below=1e9, expected="a number of seconds above 0")
    return text


@dataclass(frozen=True)
class HorovodOptions:
    """The options of horovodrun that `lockstep run` does not have. Those that it has say in its
    table what they are.
    """

    verbose: bool = option(False, group=WORKERS, help="print the equivalent `lockstep run` command")
    debug: bool = option(
        False, group=WORKERS, help="print the traceback of the launcher's own errors"
    )

    # Elastic jobs.
    min_np: int | None = option(
        None,
        "--min-np",
        "--min-num-proc",
        group=ELASTIC,
        metavar="N",
        parse=integer(1),
        help="the training waits below so many workers (default: -np)",
    )
    max_np: int | None = option(
        None,
        "--max-np",
        "--max-num-proc",
        group=ELASTIC,
        metavar="N",
        parse=integer(1),
        help="at most so many workers (default: -np, or with --host-discovery-script as many as "
        "there are slots)",
    )
    host_discovery_script: str | None = option(
        None,
        group=ELASTIC,
        metavar="FILE",
        help="program that prints one line `host:slots` per host; it is run once a second, and the "
        "job follows the hosts and their slots",
    )
    slots_per_host: int = option(
        1,
        "--slots-per-host",
        "--slots",
        group=ELASTIC,
        metavar="N",
        parse=integer(1),
        help="slots of a host that is printed without a number",
    )
    elastic_timeout: float | None = option(
        None,
        group=ELASTIC,
        metavar="S",
        parse=_seconds,
        help="seconds to wait for enough slots (default: HOROVOD_ELASTIC_TIMEOUT, or 600)",
    )

    # Timeline and stall check.
    timeline_filename: str | None = option(
        None,
        group=TIMELINE,
        metavar="FILE",
        help="write a trace of all operations to FILE, for ui.perfetto.dev or chrome://tracing",
    )
    timeline_mark_cycles: bool | None = option(
        None,
        group=TIMELINE,
        opposites=("--no-timeline-mark-cycles",),
        help="mark the start of each cycle in the trace",
    )
    no_stall_check: bool | None = option(
        None,
        group=TIMELINE,
        opposites=("--stall-check",),
        help="do not limit how long ranks wait for each other",
    )
    stall_warning: str | None = option(
        None,
        "--stall-check-warning-time-seconds",
        group=TIMELINE,
        metavar="S",
        parse=_warning_seconds,
        help="seconds of waiting for a rank after which a warning is logged (default: 5)",
    )

    # Information.
    check_build: bool = option(
        False,
        "-cb",
        "--check-build",
        group=INFORMATION,
        help="show the available frameworks and backends",
    )
    show_version: bool = option(
        False, "-v", "--version", group=INFORMATION, help="show the version"
    )


def _shared() -> Iterator[Option]:
    """Yield the options of `lockstep run` that horovodrun has too, as they are typed there."""
    for entry in options_of(JobOptions):
        typed = entry.horovodrun
        if typed is not None:
            group = typed.group or entry.group
            yield replace(entry, flags=typed.flags, group=group, help=typed.help or entry.help)


IGNORED: dict[int, str] = {
    0: """
        --disable-cache --autotune --no-autotune
        --hierarchical-allreduce --no-hierarchical-allreduce
        --hierarchical-allgather --no-hierarchical-allgather
        --mpi-threads-disable --no-mpi-threads-disable --tcp
        --log-with-timestamp --log-without-timestamp --log-hide-timestamp --no-log-hide-timestamp
        -prefix-timestamp --prefix-output-with-timestamp
        --gloo --mpi --jsrun
    """,
    1: """
        --fusion-threshold-mb --cycle-time-ms --cache-capacity --reset-limit
        --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample
        --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise
        --mpi-args --binding-args --num-nccl-streams --thread-affinity
        --gloo-timeout-seconds --log-level
    """,
    2: "--blacklist-cooldown-range",
}
"""Number of values → the options of horovodrun that have no effect."""


class Ignored(argparse.Action):
    """Records that an option was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Add the option to the list of ignored ones."""
        ignored: tuple[str, ...] = getattr(namespace, self.dest, ())
        if option_string and option_string not in ignored:
            setattr(namespace, self.dest, (*ignored, option_string))


_DESCRIPTION = """\
Run a command as the ranks of a Horovod job, with the options of Horovod's own
launcher. The program runs unmodified: `import horovod.torch` imports
lockstep.compat.horovod. Equivalent to `lockstep run --as-horovod`.
"""

_EXAMPLES = """
examples:
  lockstep horovodrun -np 4 python train.py
  lockstep horovodrun -np 8 -H serverA:4,serverB:4 python train.py
  lockstep horovodrun --check-build

exit codes: as `lockstep run`
"""

_NEVER = "604800"  # a week

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_RANK_VARIABLES = (
    "RANK",
    "SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "HOSTNAME",
)


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="run an unmodified Horovod program, with horovodrun's options",
        usage="%(prog)s [options] command [arguments]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="such as `python train.py --epochs 3`"
    )
    parser.add_options(_shared())
    parser.add_options(options_of(HorovodOptions))
    for count, names in IGNORED.items():
        for flag in names.split():
            parser.add_argument(
                flag, dest="ignored", nargs=count, action=Ignored, help=argparse.SUPPRESS
            )
    parser.set_command(run_command, full_tracebacks=True)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    parsed_values = vars(parsed)
    options = HorovodOptions(**values_of(HorovodOptions, parsed_values))
    if options.show_version or options.check_build:
        print(_version() if options.show_version else _build_information())
        return 0
    if ignored := parsed_values.get("ignored"):
        _log(f"options without effect, ignored: {', '.join(ignored)}")
    program = program_of(parsed_values.get("command", []))
    variables = environment.variables()
    elastic, follower = _elastic_job(options, parsed_values, variables)
    chosen = {
        **program,
        **_shared_values(parsed_values, variables),
        **elastic,
        **_stall_timeout(options, parsed_values, variables),
    }
    environment.set_variables(child_variables(options, variables))
    names = [name for name in environment.variables() if name.startswith("HOROVOD_")]
    chosen["env"] = [name for name in names if name.removeprefix("HOROVOD_") not in _RANK_VARIABLES]
    if options.verbose:
        _log(shlex.join(_equivalent_command(chosen)))
    is_elastic_here = (
        "elastic" in chosen
        and follower is None
        and all(is_this_host(host.name) for host in _given_hosts(chosen))
    )
    if is_elastic_here:
        for name in ("hosts", "hostfile"):
            chosen.pop(name, None)
    is_followed = follower is not None and "hosts" in chosen
    with follower or nullcontext():
        parsed = argparse.Namespace(**chosen, as_horovod=True)
        return run.run_command(
            parsed, (lambda: follower.hosts) if follower and is_followed else None
        )


def program_of(command: Sequence[str]) -> dict[str, Any]:
    """Return the options by which `lockstep run` runs `command`: a Python script or module, or else
    any program.

    ``python`` means the interpreter of this process, which has Lockstep, and not the first one on
    the PATH.
    """
    words = list(command[1:] if command[:1] == ["--"] else command)
    if not words:
        raise ConfigError("command", "a command, such as `python train.py`", found="nothing")
    if words[0].endswith(".py"):
        return {"script": words[0], "arguments": words[1:]}
    if _is_this_python(words[0]):
        rest = words[1:]
        while rest[:1] == ["-u"]:  # output is line-buffered in any case
            del rest[0]
        if rest[:1] == ["-m"] and len(rest) > 1:
            return {"script": rest[1], "arguments": rest[2:], "module": True}
        if rest and not rest[0].startswith("-"):
            return {"script": rest[0], "arguments": rest[1:]}
        words = [sys.executable, *rest]
    return {"script": "lockstep.cli.any_command", "arguments": words, "module": True}


def _is_this_python(word: str) -> bool:
    path = Path(word)
    if not _PYTHON.fullmatch(path.name):
        return False
    return (
        path.name == word
        or path.expanduser().absolute().parent == Path(sys.executable).absolute().parent
    )


def _shared_values(
    parsed_values: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return the texts of the options that `lockstep run` also has."""
    shared = {
        entry.name: parsed_values[entry.name] for entry in _shared() if entry.name in parsed_values
    }
    shared.pop("stall_timeout", None)
    if "network_interface" in shared:
        shared["network_interface"] = ",".join(shared["network_interface"])
    if "output_dir" in shared:
        shared["tee"] = True
    if "start_timeout" not in shared and variables.get("HOROVOD_START_TIMEOUT"):
        shared["start_timeout"] = variables["HOROVOD_START_TIMEOUT"]
    return shared


_MOST = 120  # workers of an elastic job, see --elastic of `lockstep run`


def _elastic_job(
    options: HorovodOptions, parsed_values: Mapping[str, Any], variables: Mapping[str, str]
) -> tuple[dict[str, str], Follower | None]:
    """Return the options of `lockstep run` for an elastic job, and what follows its script, if
    there is one.
    """
    workers = (
        arguments.parse_whole("workers", parsed_values["workers"], least=1)
        if "workers" in parsed_values
        else None
    )
    least = options.min_np or workers or 1
    most = options.max_np
    bound = max(least, workers or 1)
    if most is not None and most < bound:
        raise ConfigError("max_np", f"at least {bound}, the value of -np or --min-np", most)
    script = options.host_discovery_script
    if script is None:
        if options.min_np is None and options.max_np is None:
            return {}, None
        slots = sum(host.slots for host in _given_hosts(parsed_values)) or _MOST
        if _is_fixed(parsed_values):
            return {}, None
        most = min(most or bound, slots, _MOST)
        return {"elastic": f"{least}:{most}", "workers": str(min(bound, most))}, None
    if "hosts" in parsed_values or "hostfile" in parsed_values:
        raise ConfigError(
            "host_discovery_script", "either this option, or -H or --hostfile", found="both"
        )
    seconds = options.elastic_timeout
    if seconds is None:
        seconds = _seconds("elastic_timeout", variables.get("HOROVOD_ELASTIC_TIMEOUT") or "600")
    discovery = Discovery(script, workers or least, options.slots_per_host, seconds)
    hosts = discovery.find()
    workers = min(sum(host.slots for host in hosts), most or sys.maxsize)
    names = {"hosts": ",".join(_host_text(host) for host in hosts)}
    if _is_fixed(parsed_values):
        return {"workers": str(workers), **names}, None
    most = min(most or _MOST, _MOST)
    workers = min(workers, most)
    elastic = {"elastic": f"{least}:{most}", "workers": str(workers)}
    if all(is_loopback(host.name) for host in hosts):
        return elastic, Follower(discovery, hosts, OwnJob(workers, least, most).follow, _log)
    return {**elastic, **names}, Follower(discovery, hosts, lambda hosts: None, _log)


def _given_hosts(parsed_values: Mapping[str, Any]) -> list[Host]:
    if "hostfile" in parsed_values:
        return read_hostfile(Path(parsed_values["hostfile"]))
    return parse_hosts(parsed_values["hosts"]) if "hosts" in parsed_values else []


def _is_fixed(parsed_values: Mapping[str, Any]) -> bool:
    """Return whether the number of workers stays as it is at the start, and say so."""
    if "output_dir" in parsed_values:
        _log(
            "with --output-filename the number of workers is fixed at the start, and the loss of "
            "one ends the job"
        )
    return "output_dir" in parsed_values


def _host_text(host: Host) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{host.user}@{name}:{host.slots}" if host.user else f"{name}:{host.slots}"


def _stall_timeout(
    options: HorovodOptions, parsed_values: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, str]:
    """Return the value of --stall-timeout, if the user has set it."""
    if _is_stall_check_off(options, variables):
        return {"stall_timeout": _NEVER}
    text = parsed_values.get(
        "stall_timeout", variables.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "")
    )
    if not text:
        return {}
    # 0 seconds means no shutdown
    return {"stall_timeout": text if _seconds("stall_timeout", text) else _NEVER}


def _is_stall_check_off(options: HorovodOptions, variables: Mapping[str, str]) -> bool:
    if options.no_stall_check is not None:
        return options.no_stall_check
    return variables.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")


def child_variables(options: HorovodOptions, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for the options that `lockstep run` does not have."""
    values = {}
    if options.timeline_filename is not None:
        values["HOROVOD_TIMELINE"] = str(Path(options.timeline_filename).absolute())
    if options.timeline_mark_cycles is not None:
        values["HOROVOD_TIMELINE_MARK_CYCLES"] = str(int(options.timeline_mark_cycles))
    warning = options.stall_warning or variables.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "")
    if _is_stall_check_off(options, variables):
        values |= {"HOROVOD_STALL_CHECK_DISABLE": "1", STALL_WARNING.name: _NEVER}
    elif warning:
        seconds = _warning_seconds("stall_warning", warning)
        values |= {"HOROVOD_STALL_CHECK_TIME_SECONDS": seconds, STALL_WARNING.name: seconds}
    if options.no_stall_check is False:
        values["HOROVOD_STALL_CHECK_DISABLE"] = "0"
    return values


def _equivalent_command(chosen: Mapping[str, Any]) -> list[str]:
    """Return the equivalent command line of `lockstep run`."""
    words = ["lockstep", "run", "--as-horovod"]
    for entry in options_of(JobOptions):
        if entry.name in chosen and entry.metavar and entry.name != "env":
            words += [entry.flags[0], chosen[entry.name]]
    for name in chosen["env"]:
        words += ["-x", name]
    return [*words, *["-m"] * chosen.get("module", False), chosen["script"], *chosen["arguments"]]


def _log(text: str) -> None:
    print(f"horovodrun: {text}", file=sys.stderr)


def _version() -> str:
    from .. import __version__

    return f"Lockstep {__version__}"


def _build_information() -> str:
    from ..compat.horovod.common import basics

    parts: dict[str, dict[str, Any]] = {
        "Frameworks": {"TensorFlow": False, "PyTorch": True, "MXNet": False},
        "Controllers": {"MPI": basics.mpi_built(), "Gloo": basics.gloo_built()},
        "Tensor Operations": {
            "NCCL": basics.nccl_built(),
            "DDL": basics.ddl_built(),
            "CCL": basics.ccl_built(),
            "MPI": basics.mpi_built(),
            "Gloo": basics.gloo_built(),
        },
    }
    lines = [f"{_version()}, in place of Horovod:"]
    for title, available in parts.items():
        lines += [
            "",
            f"Available {title}:",
            *(f"    [{'X' if has else ' '}] {name}" for name, has in available.items()),
        ]
    return "\n".join(lines)
