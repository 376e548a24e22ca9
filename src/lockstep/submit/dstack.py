"""Tasks for dstack: the same commands on each node, which have one launcher each.

Source: dstack's documentation of tasks, and the models in its package (dstack._internal.core.models).
"""

from __future__ import annotations

from ..errors import ConfigError
from .description import START_LIMIT_S, Job, in_lines, quoted, split_variables

__all__ = ["Dstack"]


class Dstack:
    """See `description.Scheduler`."""

    title = "dstack"
    suffix = ".dstack.yml"
    tool = "dstack"
    settings = ("image", "volume", "shm")
    local_python = False

    def write(self, job: Job) -> str:
        """Return the task."""
        job.check_limit()
        job.check_installed(self.title)
        lines = [*_head(job), "type: task", f"name: {job.name}", f"nodes: {job.nodes}"]
        if job.setting("image"):
            lines += ["", f"image: {quoted(job.setting('image'))}"]
        if job.folder:
            lines.append(f"working_dir: {quoted(job.folder)}")
        lines += [*_files(job), *_variables(job), *_commands(job), *_resources(job), *_policy(job), *_volumes(job)]
        return "\n".join(lines) + "\n"

    def check_here(self, job: Job) -> None:
        """`dstack apply` itself says what cannot be had."""

    def submit_words(self, job: Job, path: str) -> list[str]:
        """Return the command that hands over the task at `path`."""
        return ["dstack", "apply", "--yes", "--detach", "-f", path]

    def prepare(self, job: Job, path: str) -> None:
        """There is nothing to prepare."""


def _head(job: Job) -> list[str]:
    return [
        f"# Made by: {job.command}",
        "#",
        f"#   dstack apply -f {job.name}.dstack.yml",
        f"#   dstack logs {job.name}",
        f"#   dstack stop {job.name}      the trainer saves first; apply it again to resume",
        "",
    ]


def _files(job: Job) -> list[str]:
    if job.setting("image"):
        return []  # the program is in it
    return ["", "files:", "- .    # this file's folder, copied to the working directory of each node"]


def _variables(job: Job) -> list[str]:
    values, names = split_variables(job.variables)
    if not job.variables:
        return []
    texts = [quoted(f"{name}={value}") for name, value in values.items()]
    return ["", "env:", *(f"- {text}" for text in texts), *(f"- {name}    # as in your shell" for name in names)]


def _commands(job: Job) -> list[str]:
    start = [] if "--start-timeout" in job.options else ["--start-timeout", str(START_LIMIT_S)]
    # exec: the launcher shall get the signals
    words = in_lines(["exec", *job.run_words("--nodes", "auto", *start)])
    first, *more = ["- |", *(f"  {line}" for line in (*job.setup, *words))]
    return ["", "commands:", first, *more]


def _resources(job: Job) -> list[str]:
    lines = ["", "resources:    # of each node", f"  cpu: {job.cpus}.."]
    if job.memory is not None:
        lines.append(f"  memory: {job.memory}GB..")
    if job.gpus:
        kind = f"name: {quoted(job.gpu_type)}, " if job.gpu_type else ""
        lines.append(f"  gpu: {{{kind}count: {job.gpus}}}")
    shm = job.setting("shm") or "8"
    return [*lines, f"  shm_size: {shm}GB    # /dev/shm, for the batches of loader processes, and for NCCL"]


def _policy(job: Job) -> list[str]:
    lines = [""]
    if job.limit is not None:
        lines.append(f"max_duration: {job.limit - job.lead}s    # then the run is stopped:")
    return [
        *lines,
        f"stop_duration: {job.lead}s    # between SIGTERM, at which the trainer saves, and SIGKILL",
        "retry:    # nodes that are lost are replaced, and the job resumes",
        "  on_events: [no-capacity, interruption, error]",
        "  duration: 1d",
    ]


def _volumes(job: Job) -> list[str]:
    volume = job.setting("volume")
    if not volume:
        return ["# --volume NAME:/PATH adds one for checkpoints; without it they are lost with the nodes"]
    name, colon, path = volume.rpartition(":")
    if not colon or not name or not path.startswith("/"):
        raise ConfigError("volume", "NAME:/PATH, a volume of dstack and its place", volume)
    return ["", "volumes:    # for checkpoints, so that any node can resume", f"- {quoted(volume)}"]
