"""``lockstep submit``: writes the file that gives a program to a scheduler, and hands it to that
one's own tool.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..launcher.options import JobOptions
from ..option_table import Option, options_of, values_of
from ..submit import SCHEDULERS, Job, Scheduler, SubmitOptions, hand_over
from ..submit.description import check_script_is_shared
from ..submit.options import KUBERNETES, SLURM, fit_name
from ..system.atomic_files import write_text
from .parser import Help

_DESCRIPTION = """\
Write the file that gives a program to a scheduler: a batch script of Slurm, or a
manifest of Kubernetes. It starts `lockstep run` on each node, gives the trainer
time to save before the time limit, and resumes.

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
  lockstep submit --to kubernetes --nodes 2 --gpus 8 --image my/train:1 --volume runs:/runs train.py
      nodes may be lost, and replaced, while the others go on:
  lockstep submit --to slurm --nodes 4 --gpus 8 --elastic 16:32 --time 1d train.py

exit codes: 0 for success, 1 if the scheduler refuses the job, 2 for invalid options
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="write the file that gives a program to Slurm or Kubernetes, and submit it",
        usage="%(prog)s --to SCHEDULER [options] script [arguments]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("script", help="a Python file; with -m, a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    parser.add_options(options_of(SubmitOptions))
    parser.add_options(_run_options(), are_shown=False)
    parser.group("options of `lockstep run`, which explains them").description = (
        "-np N (of each node), --elastic MIN:MAX, --resume RUN (default: latest),\n-m, -x "
        "NAME[=VALUE], --grace S, --threads N, --network-interface NAME,\n--output-dir DIR, "
        "--tee, --timeline DIR, --stall-timeout S, --strict,\n--preload MODULES, --restarts N and "
        "others"
    )
    parser.set_command(run_command)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    arguments = vars(parsed)
    if "to" not in arguments:
        raise ConfigError("to", f"a scheduler: {', '.join(SCHEDULERS.names())}", found="nothing")
    scheduler: Scheduler = SCHEDULERS.load(arguments["to"])()
    job = make_job(arguments, scheduler)
    request = job.request
    if request.yes and request.dry_run:
        raise ConfigError("dry_run", "either --yes or --dry-run", found="both")
    text = scheduler.write(job)
    if scheduler.local_python:
        _check_script(arguments, job)
    scheduler.check_here(job)
    path = Path(request.output or job.name + scheduler.suffix)
    if not request.yes:
        if request.output is not None:
            _write(path, text)
        else:
            print(text, end="")
        if not _agrees(job, scheduler, path):
            return 0
    _write(path, text)
    print(hand_over(scheduler, job, path))
    return 0


def _agrees(job: Job, scheduler: Scheduler, path: Path) -> bool:
    """Return whether the user wants the file to be handed over, who is asked if that is
    possible.
    """
    import shutil

    command = shlex.join(scheduler.submit_words(str(path)))
    asks = sys.stdin.isatty() and sys.stdout.isatty() and shutil.which(scheduler.tool) is not None
    if asks and not job.request.dry_run:
        return input(f"\nWrite {path}, and run `{command}`? [y/N] ").strip().lower() in ("y", "yes")
    saved = f"It is in {path}" if job.request.output is not None else f"Save it as {path}"
    print(
        f"lockstep submit: nothing is submitted. {saved}, and run `{command}`, or add --yes.",
        file=sys.stderr,
    )
    return False


def make_job(arguments: Mapping[str, Any], scheduler: Scheduler) -> Job:
    """Return the job that the options `arguments` describe (pure, but for the current folder and
    this Python).

    Raises:
        ConfigError: an option is invalid, or the scheduler has no use for it.
    """
    _check_scheduler(arguments, scheduler)
    request = SubmitOptions(**values_of(SubmitOptions, arguments))
    program = [str(arguments["script"]), *map(str, arguments.get("arguments", ()))]
    if program[1:2] == ["--"]:
        del program[1]
    passed_on = {
        entry.name: arguments[entry.name] for entry in _run_options() if entry.name in arguments
    }
    nodes = "auto" if request.nodes > 1 else "1"
    run = JobOptions.parse({**passed_on, "program": tuple(program), "nnodes": nodes})
    workers = run.workers or request.gpus or 1
    if request.gpus and workers > request.gpus:
        hint = "Without -np there is one worker for each GPU."
        raise ConfigError("workers", f"at most {request.gpus}, the GPUs of a node", workers, hint)
    passed_on = {"resume": "latest", **passed_on, "workers": str(workers)}
    is_local = scheduler.local_python
    subject = program[0].rpartition(".")[2] if run.module else Path(program[0]).stem
    folder = str(Path(request.folder or ".").absolute()) if is_local else request.folder or ""
    return Job(
        request=request,
        command=_command_line(arguments),
        name=request.name or fit_name(subject),
        options=tuple(_run_words(passed_on)),
        program=tuple(program),
        workers=workers,
        cpus=request.cpus or (4 * workers if request.gpus else workers),
        grace=int(run.grace),
        elastic=run.elastic is not None,
        folder=folder,
        python=request.python or (sys.executable if is_local else "python"),
        variables=run.env,
    )


def _check_scheduler(arguments: Mapping[str, Any], scheduler: Scheduler) -> None:
    """Raise ConfigError for an option that only another scheduler has."""
    entries = options_of(SubmitOptions)
    flags = [entry.flags[0] for entry in entries if entry.group == scheduler.title]
    for entry in entries:
        if (
            entry.name in arguments
            and entry.group in (SLURM, KUBERNETES)
            and entry.group != scheduler.title
        ):
            expected = f"not to be given for {scheduler.title}, which has {', '.join(flags)}"
            raise ConfigError(entry.name, expected, arguments[entry.name])


def _run_options() -> list[Option]:
    """Return the options of `lockstep run` that are written into the file; the nodes it finds
    itself.
    """
    return [entry for entry in options_of(JobOptions) if entry.to_hosts or entry.to_scheduler]


def _run_words(arguments: Mapping[str, Any]) -> list[str]:
    """Return options of `lockstep run` as words, in the order of its help."""
    words: list[str] = []
    for entry in _run_options():
        if entry.name in arguments and entry.name != "env":  # which the file sets for the launchers
            value = arguments[entry.name]
            words += entry.words(",".join(value) if isinstance(value, list) else value)
    return words


def _command_line(arguments: Mapping[str, Any]) -> str:
    """Return the command as it could be typed, in one line."""
    words = ["lockstep", "submit"]
    for name, flag in arguments["sources"].items():
        value = arguments.get(name)
        if name in ("yes", "dry_run", "output", "debug", "help") or value is None or value is False:
            continue
        texts = value if isinstance(value, list) else [value]
        words += [flag] if value is True else [word for text in texts for word in (flag, str(text))]
    return " ".join(
        shlex.join(
            [*words, str(arguments["script"]), *map(str, arguments.get("arguments", ()))]
        ).split()
    )


def _check_script(arguments: Mapping[str, Any], job: Job) -> None:
    """Check that the program is here, and will be on the nodes."""
    if arguments.get("module"):
        return
    path = Path(job.folder, job.program[0])
    if not path.exists():
        near = sorted(file.name for file in path.parent.glob("*.py"))[:5]
        hint = (
            f"That folder has {', '.join(near)}." if near else "Give its path relative to --folder."
        )
        raise ConfigError("script", "an existing Python file", str(path), hint)
    shared = job.request.shared_folder
    mounts = Path("/proc/mounts")
    listing = mounts.read_text() if mounts.exists() else ""
    check_script_is_shared(
        path.resolve(),
        Path(job.folder).resolve(),
        str(Path(shared).resolve()) if shared else "",
        listing,
    )


def _write(path: Path, text: str) -> None:
    """Write the file; one that this command has not made is not overwritten."""
    try:
        if path.exists() and "# Made by: lockstep submit" not in path.read_text(errors="replace"):
            hint = "Choose another one: --output FILE."
            raise ConfigError(
                "output", "a file that lockstep submit has made, or a new one", str(path), hint
            )
        write_text(path, text)
    except OSError as error:
        raise ConfigError(
            "output", "a file that can be written", found=f"{path} ({error.strerror})"
        ) from None
