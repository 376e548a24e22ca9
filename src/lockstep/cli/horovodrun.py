"""``lockstep horovodrun``: Horovod's launcher as a front to ``lockstep run --as-horovod``."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import environment
from ..errors import ConfigError
from ..hosts import Host
from . import run
from .horovodrun_options import IGNORED, OPTIONS, Ignored
from .host_discovery import Discovery
from .parser import Help

__all__ = ["add_to", "handed_down", "program_of", "run_command"]

_DESCRIPTION = """\
Run a command as the ranks of a Horovod job, with the options of Horovod's own
launcher. `import horovod.torch` in the program is Lockstep's door; the program
needs no change. It is `lockstep run --as-horovod` with other options.
"""

_EXAMPLES = """
examples:
  lockstep horovodrun -np 4 python train.py
  lockstep horovodrun -np 8 -H serverA:4,serverB:4 python train.py
  lockstep horovodrun --check-build

exit codes: as `lockstep run`
"""

_NEVER = "604800"  # a week

_AS_RUN = {
    "workers": "-np",
    "hosts": "-H",
    "hostfile": "--hostfile",
    "ssh_port": "-p",
    "identity": "-i",
    "network_interface": "--network-interface",
    "start_timeout": "--start-timeout",
    "output_dir": "--output-dir",
    "stall_timeout": "--stall-timeout",
}
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_PLACES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="run a program of Horovod's as it is, with Horovod's options",
        usage="%(prog)s [options] command [arguments]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="such as `python train.py --epochs 3`")
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for flags, settings in options:
            group.add_argument(*flags, **settings)
    for count, names in IGNORED.items():
        for flag in names.split():
            parser.add_argument(flag, dest="ignored", nargs=count, action=Ignored, help=argparse.SUPPRESS)
    actions = [action for action in parser._actions if action.option_strings]
    known = [flag for action in actions for flag in action.option_strings]
    sources = {action.dest: action.option_strings[0] for action in actions}
    sources["network_interface"] = sources["network_interfaces"]
    parser.set_defaults(run=run_command, known=known, whole_tracebacks=True, sources=sources)


def run_command(arguments: argparse.Namespace) -> int:
    """Do what the parsed `arguments` ask for."""
    given = {name: value for name, value in vars(arguments).items() if name not in ("run", "known", "sources")}
    if "show_version" in given or "check_build" in given:
        print(_version() if "show_version" in given else _build())
        return 0
    if ignored := given.get("ignored"):
        _say(f"without meaning here, and ignored: {', '.join(ignored)}")
    program = program_of(given.get("command", []))
    variables = environment.variables()
    chosen = {**program, **_plain(given, variables), **_machines(given, variables), **_stall_timeout(given, variables)}
    environment.hand_down(handed_down(given, variables))
    names = [name for name in environment.variables() if name.startswith("HOROVOD_")]
    chosen["env"] = [name for name in names if name.removeprefix("HOROVOD_") not in _PLACES]
    if "verbose" in given:
        _say(shlex.join(_as_run(chosen)))
    return run.run_command(argparse.Namespace(**chosen, as_horovod=True))


def program_of(command: Sequence[str]) -> dict[str, Any]:
    """What `lockstep run` is to run for `command`: a script or a module of Python, or else a process of its own.

    ``python`` is the Python that runs this, whichever one the shell would find: it is the one that has Lockstep.
    """
    words = list(command[1:] if command[:1] == ["--"] else command)
    if not words:
        raise ConfigError("command", "a command, such as `python train.py`", found="nothing")
    if words[0].endswith(".py"):
        return {"script": words[0], "arguments": words[1:]}
    if _is_this_python(words[0]):
        rest = words[1:]
        while rest[:1] == ["-u"]:  # lines come out at once in any case
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
    return path.name == word or path.expanduser().absolute().parent == Path(sys.executable).absolute().parent


def _plain(given: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """The options that `lockstep run` has too."""
    found = {name: given[name] for name in _AS_RUN if name in given and name != "stall_timeout"}
    if "network_interfaces" in given:
        found["network_interface"] = ",".join(given["network_interfaces"])
    if "output_dir" in found:
        found["tee"] = True
    if "start_timeout" not in found and variables.get("HOROVOD_START_TIMEOUT"):
        found["start_timeout"] = variables["HOROVOD_START_TIMEOUT"]
    return found


def _machines(given: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """How many ranks, and where, for an elastic job."""
    numbers = {name: _count(name, given) for name in ("workers", "min_np", "max_np", "slots_per_host")}
    least = numbers["min_np"] or numbers["workers"] or 1
    most = numbers["max_np"]
    if most is not None and most < max(least, numbers["workers"] or 1):
        raise ConfigError("max_np", f"at least {max(least, numbers['workers'] or 1)}, as -np and --min-np say", most)
    script = given.get("host_discovery_script")
    if script is None:
        if "min_np" in given or "max_np" in given:
            _say("the number of ranks stays that of -np: ranks are not added or replaced while a job runs")
        return {}
    if "hosts" in given or "hostfile" in given:
        raise ConfigError("host_discovery_script", "either that, or -H or --hostfile", found="both")
    timeout = given.get("elastic_timeout") or variables.get("HOROVOD_ELASTIC_TIMEOUT") or "600"
    seconds = _seconds("elastic_timeout", timeout)
    hosts = Discovery(script, numbers["workers"] or least, numbers["slots_per_host"] or 1, seconds).find()
    workers = min(sum(host.slots for host in hosts), most or sys.maxsize)
    _say(f"{workers} ranks, to the end of the job: machines that come later are not used, and a lost one ends it")
    return {"workers": str(workers), "hosts": ",".join(_written(host) for host in hosts)}


def _written(host: Host) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{host.user}@{name}:{host.slots}" if host.user else f"{name}:{host.slots}"


def _count(name: str, given: Mapping[str, Any]) -> int | None:
    text = str(given.get(name, ""))
    if not text:
        return None
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", text):
        raise ConfigError(name, "a whole number of at least 1", text)
    return int(text)


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ConfigError(name, "a number of seconds, 0 or more", text)
    return value


def _stall_timeout(given: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """After how long ranks that others wait for are an error, if the user has said so."""
    if _is_unchecked(given, variables):
        return {"stall_timeout": _NEVER}
    text = given.get("stall_timeout", variables.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", ""))
    return {"stall_timeout": text if _seconds("stall_timeout", text) else _NEVER} if text else {}


def _is_unchecked(given: Mapping[str, Any], variables: Mapping[str, str]) -> bool:
    disabled = variables.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
    return bool(given.get("no_stall_check", disabled))


def handed_down(given: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables by which the ranks learn what has no option of `lockstep run`."""
    found = {}
    if "timeline_filename" in given:
        found["HOROVOD_TIMELINE"] = str(Path(given["timeline_filename"]).absolute())
    if "timeline_mark_cycles" in given:
        found["HOROVOD_TIMELINE_MARK_CYCLES"] = str(int(given["timeline_mark_cycles"]))
    text = given.get("stall_warning", variables.get("HOROVOD_STALL_CHECK_TIME_SECONDS", ""))
    if _is_unchecked(given, variables):
        found |= {"HOROVOD_STALL_CHECK_DISABLE": "1", "LOCKSTEP_STALL_WARNING": _NEVER}
    elif text:
        if not _seconds("stall_warning", text):
            raise ConfigError("stall_warning", "a number of seconds above 0", text)
        found |= {"HOROVOD_STALL_CHECK_TIME_SECONDS": text, "LOCKSTEP_STALL_WARNING": text}
    if "no_stall_check" in given and not given["no_stall_check"]:
        found["HOROVOD_STALL_CHECK_DISABLE"] = "0"
    return found


def _as_run(chosen: Mapping[str, Any]) -> list[str]:
    """The same as a command line of `lockstep run`."""
    words = ["lockstep", "run", "--as-horovod"]
    for name, flag in _AS_RUN.items():
        words += [flag, chosen[name]] if name in chosen else []
    for name in chosen["env"]:
        words += ["-x", name]
    return [*words, *["-m"] * chosen.get("module", False), chosen["script"], *chosen["arguments"]]


def _say(text: str) -> None:
    print(f"horovodrun: {text}", file=sys.stderr)


def _version() -> str:
    from .. import __version__

    return f"Lockstep {__version__}"


def _build() -> str:
    from ..doors.horovod.common import basics

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
    for title, each in parts.items():
        lines += ["", f"Available {title}:", *(f"    [{'X' if has else ' '}] {name}" for name, has in each.items())]
    return "\n".join(lines)
