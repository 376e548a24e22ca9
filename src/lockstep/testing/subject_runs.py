"""Starts the workers of a test on this host, with a launcher of Lockstep, and reads the result of
rank 0.
"""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from .. import arguments, environment
from ..errors import ConfigError, LockstepError, counted
from ..launcher import check_process
from ..launcher.quiet_run import OUTPUT, run_quietly
from ..launcher.worker_process.script import Script
from ..launcher.worker_status import pickle_call
from ..verification.held import Held
from ..verification.recording import record_file
from ..verification.records import RunRecord
from .results import Entries
from .subject import Kill, Task, mark_of

FOLDER = "{folder}"
"""What stands for the folder of a run in the arguments of a program."""


@dataclass(frozen=True)
class Outcome:
    """How a job has ended.

    Attributes:
        entries: the result of rank 0 by name; empty after an error.
        steps: number of steps that rank 0 has done in the process that ended the job.
        killed: whether all kills of the task have happened.
        error: what ended the job, if something did.
    """

    entries: Entries
    steps: int
    killed: bool
    error: LockstepError | None


@dataclass(frozen=True)
class Subject:
    """A function or a program that trains.

    Attributes:
        name: for messages.
        function: the function; None for a program.
        takes_folder: whether the function takes the folder of its run, or the arguments of the
            program have `FOLDER`.
        program: a script and its arguments; empty for a function.
    """

    name: str
    function: Callable[..., Any] | None
    takes_folder: bool
    program: tuple[str, ...] = ()

    @classmethod
    def of(cls, train: Callable[..., Any] | str | Path | Sequence[str | Path]) -> Subject:
        """Return what the user has given as a subject.

        Raises:
            ConfigError: if it is neither a function with at most one parameter nor an existing
                script.
        """
        if callable(train):
            name = getattr(train, "__name__", type(train).__name__)
            parameters = inspect.signature(train).parameters.values()
            positional = (
                inspect.Parameter.POSITIONAL_ONLY,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
            )
            required = [
                parameter
                for parameter in parameters
                if parameter.default is parameter.empty and parameter.kind in positional
            ]
            if len(required) > 1:
                expected = "a function without parameters, or with one for the folder of its run"
                hint = "Bind the others with functools.partial or a lambda."
                raise ConfigError(
                    "train", expected, ", ".join(parameter.name for parameter in required), hint
                )
            return cls(name, train, len(required) == 1)
        words = [train] if isinstance(train, (str, Path)) else list(train)
        if not words or not all(isinstance(word, (str, Path)) for word in words):
            raise ConfigError(
                "train",
                "a function, the path of a script, or a list of a script and its arguments",
                train,
            )
        program = tuple(str(word) for word in words)
        Script(program[0]).check()
        return cls(Path(program[0]).name, None, any(FOLDER in word for word in program), program)


def run_job(
    subject: Subject,
    workers: int,
    threads: int,
    folder: Path,
    run_folder: Path | None = None,
    kills: Sequence[Kill] = (),
    more_arguments: Sequence[str] = (),
) -> Outcome:
    """Run a subject on workers of this host; what they print is printed here if they fail.

    Args:
        subject: the subject.
        workers: number of workers.
        threads: of torch, in each worker.
        folder: an empty one, for what the launcher and the workers exchange.
        run_folder: what the subject gets as its folder; by default an empty one in `folder`.
        kills: ends of workers.
        more_arguments: for a program.

    Raises:
        ConfigError: the function cannot be pickled, or this host has too little memory for the
            workers.
    """
    arguments.whole("workers", workers, least=1)
    check_process()
    _write_task(subject, folder, run_folder, kills, more_arguments, 0)
    failure = run_quietly(_worker_program(folder), workers, threads, folder)
    if failure is not None and not kills:
        for path in sorted(folder.glob(f"{OUTPUT}/*.log")):
            print(
                f"--- {path.stem} of {subject.name} on "
                f"{counted(workers, 'worker')}\n{path.read_text(errors='replace')}"
            )
    return _outcome(folder, kills, failure)


def run_elastic_job(
    subject: Subject, workers: int, least: int, threads: int, folder: Path, kills: Sequence[Kill]
) -> Outcome:
    """Run a subject in an elastic job of this host, which replaces workers that are lost.

    Args:
        subject: the subject.
        workers: number of workers at the beginning, and the most.
        least: the least number.
        threads: of torch, in each worker.
        folder: an empty one, for what the launcher and the workers exchange.
        kills: ends of workers.
    """
    check_process()
    _write_task(subject, folder, None, kills, (), 0)
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "run",
        "--elastic",
        f"{least}:{workers}",
        "-np",
        str(workers),
    ]
    command += ["--threads", str(threads), "-m", "lockstep.testing.subject", str(folder)]
    package = str(Path(__file__).resolve().parents[2])
    with environment.with_variables({"PYTHONPATH": os.pathsep.join([package, *sys.path])}):
        ended = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    failure = None
    if ended.returncode != 0:
        failure = LockstepError(
            f"the elastic job ended with exit code {ended.returncode}:\n{ended.stderr.strip()}"
        )
    return _outcome(folder, kills, failure)


def run_function(
    function: Callable[..., Any], values: Mapping[str, Any], workers: int
) -> LockstepError | None:
    """Call a function with keyword arguments as the ranks of a job, and return the error by which
    it failed.
    """
    subject = Subject(function.__name__, functools.partial(function, **values), False)
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as folder:
        return run_job(subject, workers, 1, Path(folder)).error


def record_job(
    subject: Subject, workers: int, threads: int, folder: Path, steps: int, held: Held
) -> list[RunRecord]:
    """Run a subject for some steps, and return the records of its ranks; fewer than `workers` if it
    failed.

    Args:
        subject: the subject.
        workers: number of workers.
        threads: of torch, in each worker.
        folder: an empty one, for what the launcher and the workers exchange.
        steps: recorded steps of each optimizer, after which the job ends.
        held: what is the same at every number of workers.
    """
    _write_task(subject, folder, None, (), (), steps, held)
    run_quietly(_worker_program(folder), workers, threads, folder)
    paths = [record_file(folder, rank) for rank in range(workers)]
    return [
        msgspec.msgpack.decode(path.read_bytes(), type=RunRecord) for path in paths if path.exists()
    ]


def _worker_program(folder: Path) -> Script:
    return Script("lockstep.testing.subject", (str(folder),), is_module=True)


def _write_task(
    subject: Subject,
    folder: Path,
    run_folder: Path | None,
    kills: Sequence[Kill],
    more_arguments: Sequence[str],
    recorded_steps: int,
    held: Held | None = None,
) -> None:
    own_folder = run_folder or folder / "run"
    own_folder.mkdir(exist_ok=True)
    if subject.function is not None:
        call = (own_folder,) if subject.takes_folder else ()
        (folder / "call").write_bytes(_pickle(subject.function, call))
    words = [word.replace(FOLDER, str(own_folder)) for word in subject.program]
    program = (str(Path(words[0]).resolve()), *words[1:], *more_arguments) if words else ()
    task = Task(program, tuple(sys.path), tuple(kills), recorded_steps, held or Held())
    (folder / "task.json").write_bytes(msgspec.json.encode(task))


def _pickle(function: Callable[..., Any], call: tuple[Any, ...]) -> bytes:
    """Return the pickled call; what a module defines that workers cannot import, such as a test's,
    goes by value.
    """
    module = inspect.getmodule(inspect.unwrap(getattr(function, "func", function)))
    if module is None or _can_be_imported(module):
        return pickle_call(function, call, {})
    try:
        import cloudpickle
    except ImportError:
        return pickle_call(function, call, {})
    cloudpickle.register_pickle_by_value(module)
    try:
        return pickle_call(function, call, {})
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(module: ModuleType) -> bool:
    """Return whether a worker that imports a module by its name finds the same file."""
    names = module.__name__.split(".")
    folders: Sequence[str] | None = None
    for length in range(1, len(names) + 1):
        name = ".".join(names[:length])
        # not importlib.util.find_spec, which returns what a loaded module itself says
        specs = (
            finder.find_spec(name, folders, None)
            for finder in sys.meta_path
            if hasattr(finder, "find_spec")
        )
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        folders = spec.submodule_search_locations
    return spec is not None and spec.origin == getattr(module, "__file__", None)


def _outcome(folder: Path, kills: Sequence[Kill], failure: LockstepError | None) -> Outcome:
    killed = all(mark_of(folder, kill).exists() for kill in kills)
    path = folder / "result"
    if failure is not None or not path.exists():
        return Outcome(
            {}, 0, killed, failure or LockstepError("the job ended without a result of rank 0")
        )
    stored = torch.load(path, weights_only=True)
    return Outcome(stored["entries"], stored["steps"], killed, None)
