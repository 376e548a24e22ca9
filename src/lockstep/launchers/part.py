"""One machine's workers, from what the user has chosen: what is made ready for them, and their run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .. import environment
from ..errors import ConfigError
from .choices import Choices
from .fork_server import start_fork_server
from .options import PATIENCE, Options, Watch
from .screen import Screen
from .script import Script

if TYPE_CHECKING:
    from .meeting import Meeting

__all__ = ["check_debug_rank", "default_workers", "prepare", "run_part"]


def prepare(choices: Choices, workers: int) -> None:
    """Make ready what workers are forked from, while this process goes on."""
    threads = _threads(choices, workers)
    # torch and its libraries read these when they are loaded, in the fork server too
    environment.preset({"OMP_NUM_THREADS": str(threads), "LOCKSTEP_RUN_ID": f"run-{os.getpid()}-{time.time_ns()}"})
    if choices.start_method == "forkserver":
        start_fork_server(choices.preload)


def run_part(script: Script, choices: Choices, workers: int, screen: Screen, meeting: Meeting) -> None:
    """Run this machine's workers."""
    from . import program

    threads, watch = _threads(choices, workers), _watch(choices)
    if not choices.quiet:
        screen.tell(_greeting(workers, threads, choices))
    method, debug_rank = choices.start_method, choices.debug_rank
    options = Options(workers, threads, choices.grace, PATIENCE, choices.restarts, method, debug_rank, watch)
    folder = Path(choices.output_dir) if choices.output_dir is not None else None
    alone = workers == 1 and meeting.nodes == 1 and folder is None
    program.run_program(script, options, program.Output(screen, folder, alone, choices.tee), meeting)


def _watch(choices: Choices) -> Watch:
    environment.watch_mode()  # a wrong word is to be said before anything is started
    mode = "off" if choices.no_watch else "strict" if choices.strict else None
    timeline = None if choices.timeline is None else str(Path(choices.timeline).absolute())
    folder = "" if choices.output_dir is None else str(Path(choices.output_dir).absolute())
    return Watch(mode, choices.stall_timeout, timeline, folder)


def default_workers() -> int:
    """One for each GPU; one where there is none."""
    import torch

    return max(1, torch.cuda.device_count())


def _threads(choices: Choices, workers: int) -> int:
    """As the user says, with the option or for all programs of this shell; or so that no two threads share a core."""
    return choices.threads or environment.threads() or max(1, environment.usable_cores() // workers)


def _greeting(workers: int, threads: int, choices: Choices) -> str:
    of = f"{threads} thread{'s'[: threads != 1]}" + (" each" if workers > 1 else "")
    text = f"lockstep run: {workers} worker{'s'[: workers != 1]}, {of} ({environment.usable_cores()} cores)"
    if choices.output_dir is None:
        return text
    return f"{text}, output in {choices.output_dir}/" + ("rank.*/std*" if choices.tee else "rank-*.log")


def check_debug_rank(choices: Choices, ranks: int) -> None:
    """Raise ConfigError for a rank that there is not."""
    if choices.debug_rank is not None and choices.debug_rank >= ranks:
        raise ConfigError("debug_rank", f"a rank from 0 to {ranks - 1}", choices.debug_rank)
