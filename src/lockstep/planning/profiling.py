"""Runs a user's script for a few steps on one worker or more of this host, and returns their
profiles.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import environment
from ..activity import Activity
from ..errors import DataError, LockstepError, counted
from ..launcher.worker_process.script import Script
from ..messages import decode
from ..network import VirtualNetwork
from .step_profile import Profile

_POLL_S = 0.3
_FEWEST_STEPS = 5


@dataclass(frozen=True)
class Program:
    """A user's script.

    Attributes:
        words: its file, or with `is_module` the name of a module, and its arguments.
        is_module: see `words`.
        threads: intra-op threads of each worker; when None, the cores divided by the workers.
        steps: how many steps are measured.
    """

    words: tuple[str, ...]
    is_module: bool = False
    threads: int | None = None
    steps: int = 30


@dataclass(frozen=True)
class _ObservedScript(Script):
    """A script whose steps are recorded.

    Attributes:
        folder: for the profiles.
        steps, smallest_share: as of `ObserverSettings`.
        alone: whether each process is a job of its own, of one worker.
        durations_only: as of `ObserverSettings`.
    """

    folder: str = ""
    steps: int = 30
    smallest_share: float = 1.0
    alone: bool = False
    durations_only: bool = False

    def run(self) -> None:
        """Run it, and write its profile."""
        from .observer import ObserverSettings, StepObserver

        folder = Path(self.folder)
        if self.alone:
            folder = _be_alone(folder)
        observer = StepObserver(
            ObserverSettings(str(folder), self.steps, self.smallest_share, self.durations_only)
        )
        observer.install()
        try:
            super().run()
        finally:
            observer.finish()


def _be_alone(folder: Path) -> Path:
    """Make this process a job of one worker, and return its folder."""
    rank = environment.find_world().rank
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    own_store = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    environment.set_variables(one | own_store)
    copy = folder / f"copy-{rank}"
    copy.mkdir()
    return copy


def record_profiles(
    program: Program,
    workers: int,
    smallest_share: float = 1.0,
    *,
    alone: bool = False,
    network: VirtualNetwork | None = None,
    durations_only: bool = False,
    title: str = "",
) -> list[Profile]:
    """Run `program` on `workers` processes of this host, and return a profile of each.

    The script ends after the last recorded step, with an exception that is no Exception. Run
    directories of trainers are made in a temporary folder. What the script prints is shown only if
    it fails.

    Args:
        program: the script.
        workers: their number.
        smallest_share: the smallest share of a worker's batch to measure; 1 for the whole batch
            alone.
        alone: run a job of one worker in each process, all at the same time, instead of one job.
        network: that is emulated between the workers, with its dilation, by which all times are
            longer.
        durations_only: measure nothing else, with fewer further steps.
        title: what is shown while it runs.

    Raises:
        ConfigError: if there is no such script.
        LockstepError: if the script fails, in one line with the place; its exit code is that of the
            script.
        DataError: if the script ends without having run enough steps.
        KeyboardInterrupt: after Ctrl-C.
    """
    from ..launcher.quiet_run import run_quietly

    script = Script(program.words[0], program.words[1:], program.is_module)
    script.check()
    threads = (
        program.threads or environment.threads() or max(1, environment.usable_cores() // workers)
    )
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as name:
        folder = Path(name)
        settings = (name, program.steps, smallest_share, alone, durations_only)
        observed = _ObservedScript(script.name, script.arguments, script.is_module, "", *settings)
        with _progress(title, folder, alone):
            failure = run_quietly(observed, workers, threads, folder, network)
        return _read(script, program.steps, folder, workers, alone, failure)


@contextmanager
def _progress(title: str, folder: Path, alone: bool) -> Iterator[None]:
    """Show how many steps rank 0 has done."""
    from .observer import progress_file

    path = progress_file(folder / "copy-0" if alone else folder)
    ended = threading.Event()
    with Activity(title, shown=bool(title)) as activity:

        def follow() -> None:
            while not ended.wait(_POLL_S):
                if path.exists():
                    activity.text = f"{title}: {path.read_text()}"

        thread = threading.Thread(target=follow, name="lockstep plan progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _read(
    script: Script,
    steps: int,
    folder: Path,
    workers: int,
    alone: bool,
    failure: LockstepError | None,
) -> list[Profile]:
    from ..launcher.quiet_run import in_one_line, last_line
    from .observer import profile_file

    ranks = range(workers)
    paths = [
        profile_file(folder / f"copy-{rank}", 0) if alone else profile_file(folder, rank)
        for rank in ranks
    ]
    if not all(path.exists() for path in paths):
        if failure is not None:
            raise in_one_line(script, failure)
        raise DataError(
            f"{script.name} ended without a step: expected a script that trains, with an "
            f"optimizer of torch whose step() is called, got {last_line(folder)}"
        )
    profiles = [decode(path.read_bytes(), Profile) for path in paths]
    fewest = min(len(profile.steps) for profile in profiles)
    if fewest < min(_FEWEST_STEPS, steps):
        if failure is not None:
            raise in_one_line(script, failure)
        raise DataError(
            f"{script.name} ended after {counted(fewest, 'step')} that could be measured; "
            f"expected at least {_FEWEST_STEPS} after those to warm up. Let it train longer: more "
            "epochs, or more data"
        )
    return profiles
