"""Running a program of the user's in the worker processes of this machine, and showing what they write."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .options import Options
from .rank_files import RankFiles
from .screen import Screen
from .script import Script
from .streams import FileStreams, Streams, inherited, piped
from .terminal import lent_terminal

if TYPE_CHECKING:
    from .local import Job
    from .meeting import Meeting

__all__ = ["Output", "run_program"]


@dataclass(frozen=True)
class Output:
    """Where the workers' output goes.

    Attributes:
        screen: shows the lines of all workers, marked with their ranks.
        folder: keeps a file for each rank instead.
        direct: the one worker writes to this process's own standard streams.
        tee: both the screen and files in the folder, two for each rank.
    """

    screen: Screen
    folder: Path | None = None
    direct: bool = False
    tee: bool = False


def run_program(script: Script, options: Options, output: Output, meeting: Meeting) -> None:
    """Run `script` in `options.workers` processes, as this node's part of the job that meets at `meeting`.

    Raises:
        what `local.run` raises.
    """
    from . import local

    jobs: list[Job] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, ExitStack() as stack:
        first_rank = lambda: jobs[0].first_rank if jobs else 0  # noqa: E731
        streams = stack.enter_context(_streams(output, Path(folder), options, first_rank))
        jobs.append(local.Job(Path(folder), options, meeting, streams, tell=output.screen.tell))
        try:
            local.run(script.run, jobs[0])
        finally:
            stack.close()  # what they have written comes before what is said of their end
            output.screen.close()


@contextmanager
def _streams(output: Output, folder: Path, options: Options, first_rank: Callable[[], int]) -> Iterator[Streams]:
    with ExitStack() as stack:
        streams: Streams
        if output.folder is not None and not output.tee:
            output.folder.mkdir(parents=True, exist_ok=True)
            streams = FileStreams(output.folder)
        elif output.direct:
            streams = stack.enter_context(inherited())
        else:
            show = output.screen.show
            if output.folder is not None:
                show = stack.enter_context(RankFiles(output.folder, show)).write
            ranks = range(options.workers)
            streams = stack.enter_context(
                piped(folder, ranks, lambda local, stream, piece: show(first_rank() + local, stream, piece))
            )
        if options.debug_rank is not None:
            streams = stack.enter_context(lent_terminal(options.debug_rank, streams))
        yield streams
