"""Tasks for SkyPilot: the same commands on each node, which have one launcher each.

Source: SkyPilot's documentation of the task YAML, and the schema in its package (sky.utils.schemas).
"""

from __future__ import annotations

from ..errors import ConfigError
from .description import START_LIMIT_S, Job, in_lines, quoted, split_variables

__all__ = ["SkyPilot"]


class SkyPilot:
    """See `description.Scheduler`."""

    title = "SkyPilot"
    suffix = ".yaml"
    tool = "sky"
    settings = ("image", "volume", "infra")
    local_python = False

    def write(self, job: Job) -> str:
        """Return the task."""
        job.check_limit()
        job.check_installed(self.title)
        if job.gpus and not job.gpu_type:
            hint = "`sky show-gpus` lists them."
            raise ConfigError("gpu_type", "the model of the GPUs, such as H100", found="nothing", hint=hint)
        lines = [*_head(job), f"name: {job.name}", f"num_nodes: {job.nodes}", *_resources(job)]
        lines += ["", f"workdir: {quoted(job.folder or '.')}    # copied to ~/sky_workdir on each node"]
        lines += [*_mounts(job), *_variables(job), *_setup(job), *_run(job)]
        return "\n".join(lines) + "\n"

    def check_here(self, job: Job) -> None:
        """`sky launch` itself says what cannot be had, and where."""

    def submit_words(self, job: Job, path: str) -> list[str]:
        """Return the command that hands over the task at `path`."""
        _, names = split_variables(job.variables)
        secrets = [word for name in names for word in ("--secret", name)]
        return ["sky", "launch", "--yes", "--detach-run", "--cluster", job.name, *secrets, path]

    def prepare(self, job: Job, path: str) -> None:
        """There is nothing to prepare."""


def _head(job: Job) -> list[str]:
    _, names = split_variables(job.variables)
    secrets = "".join(f" --secret {name}" for name in names)
    return [
        f"# Made by: {job.command}",
        "#",
        f"#   sky launch -c {job.name}{secrets} {job.name}.yaml",
        f"#   sky jobs launch{secrets} {job.name}.yaml    a managed job: lost nodes are replaced, it resumes",
        f"#   sky logs {job.name}",
        f"#   sky cancel {job.name}                  the trainer saves first",
        f"#   sky down {job.name}",
        "",
    ]


def _resources(job: Job) -> list[str]:
    lines = ["", "resources:    # of each node"]
    if job.setting("infra"):
        lines.append(f"  infra: {quoted(job.setting('infra'))}")
    if job.gpus:
        lines.append(f"  accelerators: {quoted(f'{job.gpu_type}:{job.gpus}')}")
    lines.append(f"  cpus: {job.cpus}+")
    if job.memory is not None:
        lines.append(f"  memory: {job.memory}+")
    if job.setting("image"):
        lines.append(f"  image_id: {quoted('docker:' + job.setting('image'))}")
    return [
        *lines,
        "  job_recovery:",
        f"    max_restarts_on_errors: {job.restarts}    # of managed jobs; preemptions are not counted",
    ]


def _mounts(job: Job) -> list[str]:
    volume = job.setting("volume")
    if not volume:
        return ["# --volume s3://BUCKET:/PATH adds a bucket for checkpoints; without it they are lost with the nodes"]
    source, colon, path = volume.rpartition(":")
    if not colon or not path.startswith("/") or path.startswith("//"):
        raise ConfigError("volume", "URL:/PATH, a bucket and its place, such as s3://checkpoints:/runs", volume)
    comment = "# for checkpoints, so that any node can resume"
    return ["", "file_mounts:", f"  {quoted(path)}:    {comment}", f"    source: {quoted(source)}", "    mode: MOUNT"]


def _variables(job: Job) -> list[str]:
    values, names = split_variables(job.variables)
    lines: list[str] = []
    if values:
        lines += ["", "envs:", *(f"  {name}: {quoted(value)}" for name, value in values.items())]
    if names:
        lines += ["", "secrets:    # whose values the command adds", *(f"  {name}: null" for name in names)]
    return lines


def _setup(job: Job) -> list[str]:
    return ["", "setup: |", *(f"  {line}" for line in job.setup)] if job.setup else []


def _run(job: Job) -> list[str]:
    words = job.run_words("--nodes", "auto", "--start-timeout", str(START_LIMIT_S))
    if "--start-timeout" in job.options:
        words = job.run_words("--nodes", "auto")
    lines = ["", "run: |"]
    if job.limit is not None:
        lines.append(
            f"  # SkyPilot has no time limit: after {job.limit - job.lead} s the trainer saves, within {job.lead} s"
        )
        words = ["timeout", "--signal=TERM", f"--kill-after={job.lead}", str(job.limit - job.lead), *words]
    # exec: the launcher, or timeout, shall get the signals
    return [*lines, *(f"  {line}" for line in in_lines(["exec", *words]))]
