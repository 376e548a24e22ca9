"""Batch scripts for Slurm: `sbatch` starts them, and `srun` in them one launcher on each node.

Source of options and variables: the manual pages of sbatch(1), srun(1) and scontrol(1).
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError, LockstepError
from .description import Job, run_tool, split_variables
from .options import parse_time

_SPECIAL = set(" #\"'\\")


class Slurm:
    """Writes a job as a batch script for Slurm, which `sbatch` checks and takes; a
    `description.Scheduler`.
    """

    title = "Slurm"
    suffix = ".sbatch"
    tool = "sbatch"
    local_python = True

    def write(self, job: Job) -> str:
        """Return the batch script."""
        job.check_limit()
        logs = job.request.log_dir
        lines = ["#!/bin/bash", *_head(job, logs), "", *_directives(job, logs)]
        if job.request.setup:
            lines += ["", *job.request.setup]
        # those without a value are in the shell that calls sbatch
        values, _ = split_variables(job.variables)
        lines += [f"export {name}={shlex.quote(value)}" for name, value in values.items()]
        return "\n".join([*lines, "", *_step(job), "", *_ending(job)]) + "\n"

    def check_here(self, job: Job) -> None:
        """Compare the job with the partition, where `sinfo` is installed."""
        if shutil.which("sinfo") is None:
            return
        code, output, _ = run_tool(["sinfo", "--noheader", "--format=%P|%D|%l"])
        if not code:  # without a controller a file can be written all the same
            check_partition(job, output)

    def submit_words(self, path: str) -> list[str]:
        """Return the command that hands over the script at `path`."""
        return ["sbatch", path]

    def prepare(self, job: Job, path: str) -> None:
        """Make the folder of the logs, and let Slurm check the script without submitting it."""
        Path(job.folder, job.request.log_dir).mkdir(parents=True, exist_ok=True)
        code, _, error = run_tool(["sbatch", "--test-only", path])
        if code:
            message = error.replace("allocation failure: ", "").removeprefix("sbatch: error: ")
            raise LockstepError(
                f"Slurm would not run this job: {message}. `sinfo` shows what there is. The file "
                f"is {path}."
            )


def check_partition(job: Job, listing: str) -> None:
    """Compare a job with the partitions that `sinfo` lists as NAME|NODES|TIME, the default one with
    a star (pure).

    Raises:
        ConfigError: there is no such partition, or it has fewer nodes or a shorter time limit.
    """
    # a partition has several lines if its nodes differ in state
    nodes: dict[str, int] = {}
    limits: dict[str, str] = {}
    request = job.request
    chosen = request.partition or ""
    for line in listing.splitlines():
        name, count, limit = (*line.split("|"), "", "")[:3]
        if name.endswith("*") and not chosen:
            chosen = name.rstrip("*")
        name = name.rstrip("*")
        nodes[name] = nodes.get(name, 0) + int(count or 0)
        limits[name] = limit
    hint = "`sinfo` lists them."
    if request.partition and chosen not in nodes:
        raise ConfigError("partition", f"one of {', '.join(nodes) or 'none'}", chosen, hint)
    if chosen in nodes and request.nodes > nodes[chosen]:
        raise ConfigError(
            "nodes",
            f"at most {nodes[chosen]}, the nodes of partition {chosen}",
            request.nodes,
            hint,
        )
    most = _seconds(limits.get(chosen, ""))
    if most is not None and request.time is not None and request.time > most:
        expected = f"at most {limits[chosen]}, the limit of partition {chosen}"
        raise ConfigError("time", expected, found=_time(request.time))


def _seconds(limit: str) -> int | None:
    """Return the seconds in a time limit of `sinfo`, which leaves out hours that are 0; None if
    there is none.
    """
    try:
        return parse_time("time", limit if limit.count(":") == 2 else f"0:{limit}")
    except ConfigError:  # infinite, n/a
        return None


def _time(seconds: int) -> str:
    """Return a time limit as Slurm writes it; Slurm counts whole minutes."""
    days, rest = divmod(-(-seconds // 60) * 60, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:00"
    return f"{days}-{clock}" if days else clock


def _head(job: Job, logs: str) -> list[str]:
    file = f"{job.name}.sbatch"
    return [
        f"# Made by: {job.command}",
        "#",
        f"#   mkdir -p {shlex.quote(logs)}       Slurm does not make the folder of the logs, and "
        "fails without it",
        f"#   sbatch {file}",
        "#   squeue --me                    where it stands",
        "#   scancel --signal=TERM JOBID    save a checkpoint and end, in as long as that takes",
        "#   scancel JOBID                  the same, but Slurm kills the job after its KillWait "
        "(30 s by default)",
    ]


def _directives(job: Job, logs: str) -> list[str]:
    rows = [
        (f"--job-name={job.name}", ""),
        (f"--chdir={job.folder}", "the same folder on all nodes"),
        (f"--output={logs}/{job.name}-%j.out", "of all ranks"),
        ("--open-mode=append", "a job that is requeued goes on with its log"),
    ]
    request = job.request
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(request, name)
        if value:
            rows.append((f"--{name}={value}", ""))
    rows.append((f"--nodes={request.nodes}", ""))
    rows.append(("--ntasks-per-node=1", "one launcher on each node; it starts the workers"))
    rows.append(
        (
            f"--cpus-per-task={job.cpus}",
            "cores of a node, for all of its workers and their loader processes",
        )
    )
    if request.gpus:
        kind = f"{request.gpu_type}:" if request.gpu_type else ""
        comment = "one for each worker" if job.workers == request.gpus else ""
        rows.append((f"--gpus-per-node={kind}{request.gpus}", comment))
    if request.memory is not None:
        rows.append((f"--mem={request.memory}G", "of a node"))
    if request.time is not None:
        rows.append((f"--time={_time(request.time)}", ""))
    rows.append(
        (
            f"--signal=TERM@{job.lead}",
            f"{job.lead} s before the time limit: the trainer saves, and ends",
        )
    )
    rows.append(
        (
            "--requeue",
            "after the failure of a node, or preemption, the job starts again, and resumes",
        )
    )
    if job.elastic:
        rows.append(("--no-kill", "elastic: a node may be lost, the others go on"))
    width = max(len(_directive(option)) for option, comment in rows if comment)
    return [
        f"{_directive(option):{width}}  # {comment}" if comment else _directive(option)
        for option, comment in rows
    ]


def _directive(option: str) -> str:
    name, equals, value = option.partition("=")
    # sbatch reads quotes as a shell does, and a comment after #; %j stays as it is
    return f"#SBATCH {name}{equals}{shlex.quote(value) if set(value) & _SPECIAL else value}"


def _step(job: Job) -> list[str]:
    # since 22.05 srun does not take --cpus-per-task from sbatch, and would give each launcher a
    # single core
    words = ["srun", f"--cpus-per-task={job.cpus}"]
    if job.elastic:
        comment = "# A launcher on each node. When one is lost, srun lets the others go on."
        words += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    else:
        comment = "# A launcher on each node. When one fails, srun ends the others."
        words.append("--kill-on-bad-exit=1")
    return [comment, *_in_lines([*words, *job.run_words()]), "code=$?"]


def _in_lines(words: Sequence[str], width: int = 100) -> list[str]:
    """Return a command of sh in lines that end in backslashes; an option stays with its value."""
    lines = []
    line = ""
    for number, word in enumerate(words):
        starts = word.startswith("-") or not (number and words[number - 1].startswith("-"))
        text = shlex.quote(word)
        if line and starts and len(line) + len(text) > width:
            lines.append(line + " \\")
            line = "    " + text
        else:
            line = f"{line} {text}" if line else text
    return [*lines, line]


def _ending(job: Job) -> list[str]:
    return [
        "# Exit code 143: the trainer has saved after SIGTERM. If that was near the time limit, "
        "queue again;",
        "# --resume latest then resumes. After scancel there is time left, and the job ends.",
        'end=$(date -d "$(squeue --noheader --job "$SLURM_JOB_ID" --format=%e)" +%s 2>/dev/null '
        "|| echo 0)",
        f"if ((code == 143 && end > 0 && end - $(date +%s) <= {job.lead} + 60)); then",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
