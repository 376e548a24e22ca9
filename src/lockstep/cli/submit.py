"""``lockstep submit``: writes the file that gives a program to a scheduler, and hands it to that one's own tool."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import arguments
from ..errors import ConfigError
from ..launcher.run_config import OPTIONS, RunConfig
from ..submit import SCHEDULERS, Job, Scheduler, hand_over
from ..submit.description import check_script_is_shared, parse_gigabytes, parse_name, parse_time
from ..system.atomic_files import write_text
from .parser import Help
from .run import argparse_settings

__all__ = ["add_to", "run_command"]

_DESCRIPTION = """\
Write the file that gives a program to a scheduler: a batch script of Slurm, a
manifest of Kubernetes, a task of SkyPilot or dstack. It starts `lockstep run` on
each node, gives the trainer time to save before the time limit, and resumes.

Nothing is handed over unless you say so. On a terminal the command shows the
file and asks, if the scheduler's tool is installed; with --yes it does not ask;
with --dry-run, and where nobody can be asked, it only prints the file.

Experimental: may change in any release.
"""

_EXAMPLES = """
examples:
  lockstep submit --to slurm --nodes 2 --gpus 4 --time 4h train.py --lr 0.1
      print the script into a file, and submit it yourself:
  lockstep submit --to slurm --nodes 2 --gpus 4 --time 4h train.py > train.sbatch
  sbatch train.sbatch
      submit it without a question:
  lockstep submit --to slurm --partition long --time 2d --yes -np 16 train.py
      in a container, with a volume that all pods can write:
  lockstep submit --to kubernetes --nodes 2 --gpus 8 --image registry/train:1 --volume runs:/runs train.py
      nodes may be lost, and replaced, while the others go on:
  lockstep submit --to slurm --nodes 4 --gpus 8 --elastic 16:32 --time 1d train.py
      on nodes that begin empty:
  lockstep submit --to skypilot --nodes 2 --gpus 8 --gpu-type H100 --setup 'pip install -r requirements.txt' train.py
  lockstep submit --to dstack --nodes 2 --gpus 8 --gpu-type H100 --image registry/train:1 --time 4h train.py

exit codes: 0 for success, 1 if the scheduler refuses the job, 2 for invalid options
"""

# What the file's `lockstep run` gets, besides the nodes, which it finds itself.
_RUN_OPTIONS = (
    *("module", "workers", "threads", "restarts", "elastic", "start_method", "preload", "resume", "as_horovod"),
    *("grace", "env", "network_interface", "start_timeout", "stall_timeout", "strict", "no_watchdog", "timeline"),
    *("output_dir", "tee", "no_prefix", "quiet"),
)

# (name, flag, placeholder, help); those of `Job.settings` say which scheduler has them
_RESOURCES = (
    ("nodes", "--nodes", "N", "number of nodes, with a launcher on each (default: 1)"),
    ("gpus", "--gpus", "G", "GPUs of each node; without -np there is a worker for each (default: none)"),
    ("gpu_type", "--gpu-type", "NAME", "their model, such as H100, as the scheduler calls it"),
    ("cpus", "--cpus", "N", "cores of each node (default: one for each worker, with GPUs four)"),
    ("memory", "--memory", "GB", "memory of each node, such as 64G (default: the scheduler's)"),
    ("time", "--time", "T", "time limit, such as 90m, 4h, 2d or 1-12:00:00; workers are told to save before it"),
    ("retries", "--retries", "N", "how often nodes that fail are started again, not counting preemptions; Slurm does "
     "not count (default: 3)"),
)  # fmt: skip
_PLACE = (
    ("name", "--name", "NAME", "of the job (default: the program's)"),
    ("folder", "--folder", "DIR", "in which the program runs (default: this one, or that of the container image)"),
    ("python", "--python", "PATH", "interpreter on the nodes (default: with Slurm this one, else `python`)"),
    ("partition", "--partition", "NAME", "Slurm: partition (default: the default one)"),
    ("account", "--account", "NAME", "Slurm: account"),
    ("qos", "--qos", "NAME", "Slurm: quality of service"),
    ("constraint", "--constraint", "LIST", "Slurm: features that the nodes must have"),
    ("log_dir", "--log-dir", "DIR", "Slurm: folder of the job's output (default: logs)"),
    ("shared_folder", "--shared-folder", "DIR", "Slurm: a folder that all nodes see, in which the program is (default: "
     "any that is not obviously one of this host alone, such as /tmp)"),
    ("image", "--image", "NAME", "Kubernetes, SkyPilot, dstack: container image"),
    ("volume", "--volume", "V:/PATH", "Kubernetes: persistent volume claim; SkyPilot: bucket; dstack: volume; and its "
     "place in the container, for checkpoints"),
    ("shm", "--shm", "GB", "Kubernetes, dstack: size of /dev/shm (default: 8)"),
    ("kind", "--kind", "KIND", "Kubernetes: job, or jobset, for which the cluster needs JobSet (default: job)"),
    ("namespace", "--namespace", "NAME", "Kubernetes: namespace"),
    ("infra", "--infra", "CLOUD", "SkyPilot: where, such as aws or kubernetes"),
)  # fmt: skip
_SETTINGS = tuple(name for name, *_ in _PLACE[3:])


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="write the file that gives a program to Slurm, Kubernetes, SkyPilot or dstack, and submit it",
        usage="%(prog)s --to SCHEDULER [options] script [arguments]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("script", help="a Python file; with -m, a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    parser.add_argument("--to", metavar="SCHEDULER", help=f"one of {', '.join(SCHEDULERS.names())}")
    parser.add_argument("-y", "--yes", action="store_true", help="hand the file to the scheduler without asking")
    parser.add_argument("--dry-run", action="store_true", help="only print the file")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the file there (default: when it is handed over, "
                        "into the current folder, under the job's name)")  # fmt: skip
    for title, rows in (("resources", _RESOURCES), ("place", _PLACE)):
        group = parser.add_argument_group(title)
        for dest, flag, metavar, text in rows:
            group.add_argument(flag, dest=dest, metavar=metavar, help=text)
        if title == "place":
            group.add_argument("--setup", action="append", metavar="COMMAND", help="line of shell before the program, "
                               "such as 'module load cuda'; may be repeated")  # fmt: skip
    group = parser.add_argument_group("options of `lockstep run`, which explains them")
    for option in OPTIONS:
        if option.name in _RUN_OPTIONS:
            group.add_argument(*option.flags, **argparse_settings(option) | {"help": argparse.SUPPRESS})
    group.description = (
        "-np N (of each node), --elastic MIN:MAX, --resume RUN (default: latest),\n-m, -x NAME[=VALUE], --grace S, "
        "--threads N, --network-interface NAME,\n--output-dir DIR, --tee, --timeline DIR, --stall-timeout S, "
        "--strict,\n--preload MODULES, --restarts N and others"
    )
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    sources = parser.first_flags() | {"workers": "-np"}
    parser.set_command(run_command, sources=sources)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    given = vars(parsed)
    if "to" not in given:
        raise ConfigError("to", f"a scheduler: {', '.join(SCHEDULERS.names())}", found="nothing")
    scheduler: Scheduler = SCHEDULERS.load(given["to"])()
    _check_settings(given, scheduler)
    if given.get("yes") and given.get("dry_run"):
        raise ConfigError("dry_run", "either --yes or --dry-run", found="both")
    job = make_job(given, scheduler)
    text = scheduler.write(job)
    _check_script(given, job, scheduler)
    scheduler.check_here(job)
    path = Path(given.get("output", job.name + scheduler.suffix))
    if not given.get("yes"):
        if "output" in given:
            _write(path, text)
        else:
            print(text, end="")
        if not _agrees(given, job, scheduler, path):
            return 0
    _write(path, text)
    print(hand_over(scheduler, job, path))
    return 0


def _agrees(given: Mapping[str, Any], job: Job, scheduler: Scheduler, path: Path) -> bool:
    """Return whether the user wants the file to be handed over, who is asked if that is possible."""
    import shutil

    command = shlex.join(scheduler.submit_words(job, str(path)))
    asks = sys.stdin.isatty() and sys.stdout.isatty() and shutil.which(scheduler.tool) is not None
    if asks and not given.get("dry_run"):
        return input(f"\nWrite {path}, and run `{command}`? [y/N] ").strip().lower() in ("y", "yes")
    saved = f"It is in {path}" if "output" in given else f"Save it as {path}"
    print(f"lockstep submit: nothing is submitted. {saved}, and run `{command}`, or add --yes.", file=sys.stderr)
    return False


def _check_settings(given: Mapping[str, Any], scheduler: Scheduler) -> None:
    """Raise ConfigError for an option that the scheduler has no use for."""
    for name in _SETTINGS:
        if name in given and name not in scheduler.settings:
            flags = [f"--{each.replace('_', '-')}" for each in scheduler.settings]
            expected = f"not to be given for {scheduler.title}, which has {', '.join(flags)}"
            raise ConfigError(name, expected, given[name])


def make_job(given: Mapping[str, Any], scheduler: Scheduler) -> Job:
    """Return the job that the options `given` describe (pure, but for the current folder and this Python).

    Raises:
        ConfigError: an option is invalid.
    """
    nodes = _number(given, "nodes", 1)
    gpus = _number(given, "gpus", 0)
    if "shm" in given:
        arguments.parse_whole("shm", given["shm"], least=1, most=1 << 16)
    program = [str(given["script"]), *map(str, given.get("arguments", ()))]
    if program[1:2] == ["--"]:
        del program[1]
    options = {name: given[name] for name in _RUN_OPTIONS if name in given}
    config = RunConfig.parse({**options, "program": tuple(program), "nnodes": "auto" if nodes > 1 else "1"})
    workers = config.workers or gpus or 1
    if gpus and workers > gpus:
        hint = "Without -np there is one worker for each GPU."
        raise ConfigError("workers", f"at most {gpus}, the GPUs of a node", workers, hint)
    options = {**options, "workers": str(workers), "resume": given.get("resume", "latest")}
    local = scheduler.local_python
    name = given.get("name", Path(program[0]).stem if not config.module else program[0].rpartition(".")[2])
    return Job(
        command=_command_line(given),
        name=parse_name(str(name), "name" in given),
        options=tuple(_run_words(options)),
        program=tuple(program),
        nodes=nodes,
        workers=workers,
        gpus=gpus,
        gpu_type=_word(given, "gpu_type"),
        cpus=_number(given, "cpus", workers if not gpus else 4 * workers),
        memory=parse_gigabytes(given["memory"]) if "memory" in given else None,
        limit=parse_time(given["time"]) if "time" in given else None,
        grace=int(config.grace),
        elastic=config.elastic is not None,
        restarts=_number(given, "retries", 3),
        folder=_folder(given, local),
        python=given.get("python", sys.executable if local else "python"),
        setup=tuple(given.get("setup", ())),
        variables=config.env,
        settings={name: _word(given, name) for name in _SETTINGS if name in given},
    )


def _folder(given: Mapping[str, Any], local: bool) -> str:
    folder = given.get("folder", str(Path.cwd()) if local else "")
    return str(Path(folder).absolute()) if local else str(folder)


def _number(given: Mapping[str, Any], name: str, default: int) -> int:
    text = given.get(name)
    if text is None or (text == "0" and name in ("gpus", "retries")):
        return default if text is None else 0
    return arguments.parse_whole(name, text, least=1, most=1 << 16)


def _word(given: Mapping[str, Any], name: str) -> str:
    """Return an option that becomes part of a line of the file."""
    text = str(given.get(name, ""))
    if not text.isprintable() or text != text.strip():
        raise ConfigError(name, "a word without control characters", text)
    return text


def _run_words(options: Mapping[str, Any]) -> list[str]:
    """Return options of `lockstep run` as words, in the order of its help."""
    words: list[str] = []
    for option in OPTIONS:
        value = options.get(option.name)
        if value is None or option.name == "env":  # which the file sets for the launchers
            continue
        flag = option.flags[0] if option.name == "workers" else option.words(True if value is True else "-")[0]
        words += [flag] if value is True else [flag, str(value)]
    return words


def _command_line(given: Mapping[str, Any]) -> str:
    """Return the command as it could be typed, in one line."""
    words = ["lockstep", "submit"]
    for name, flag in given["sources"].items():
        value = given.get(name)
        if name in ("yes", "dry_run", "output", "debug", "help") or value is None or value is False:
            continue
        texts = value if isinstance(value, list) else [value]
        words += [flag] if value is True else [word for text in texts for word in (flag, str(text))]
    return " ".join(shlex.join([*words, str(given["script"]), *map(str, given.get("arguments", ()))]).split())


def _check_script(given: Mapping[str, Any], job: Job, scheduler: Scheduler) -> None:
    """Check that the program is here, and will be on the nodes."""
    if given.get("module") or (job.setting("image") and not scheduler.local_python):
        return
    path = Path(job.folder or ".", job.program[0])
    if not path.exists():
        near = sorted(each.name for each in path.parent.glob("*.py"))[:5]
        hint = f"That folder has {', '.join(near)}." if near else "Give its path relative to --folder."
        raise ConfigError("script", "an existing Python file", str(path), hint)
    if scheduler.local_python:
        shared = job.setting("shared_folder") and str(Path(job.setting("shared_folder")).resolve())
        mounts = Path("/proc/mounts")
        listing = mounts.read_text() if mounts.exists() else ""
        check_script_is_shared(path.resolve(), Path(job.folder).resolve(), shared, listing)
    elif Path(job.program[0]).is_absolute():
        expected = f"a path relative to this folder, which {scheduler.title} copies to the nodes"
        raise ConfigError("script", expected, job.program[0])


def _write(path: Path, text: str) -> None:
    """Write the file; one that this command has not made is not overwritten."""
    try:
        if path.exists() and "# Made by: lockstep submit" not in path.read_text(errors="replace"):
            hint = "Choose another one: --output FILE."
            raise ConfigError("output", "a file that lockstep submit has made, or a new one", str(path), hint)
        write_text(path, text)
    except OSError as error:
        raise ConfigError("output", "a file that can be written", found=f"{path} ({error.strerror})") from None
