"""Assertions on trainings: the same at any number of workers, after an interruption, after the loss
of a worker.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .. import arguments
from ..errors import ConfigError, LockstepError, counted
from ..verification.analysis import analyse
from ..verification.held import Held
from ..verification.records import RunRecord
from .results import Entries, describe_differences
from .subject import EVERY_RANK, Kill
from .subject_runs import Outcome, Subject, record_job, run_elastic_job, run_job

Train = Callable[..., Any] | str | Path | Sequence[str | Path]

_STEPS = 8  # recorded ones: what depends on the number of workers shows in the first of them
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}


def same_at(
    train: Train,
    *,
    workers: Sequence[int] = (1, 2, 3),
    rtol: float = 0.0,
    atol: float = 0.0,
    threads: int = 1,
) -> Entries:
    """Assert that a training gives the same result at each number of workers.

    The training runs in worker processes of this host, once for each number of workers. What rank 0
    returns is compared. If results differ, the first steps are run again and recorded, so that the
    error can name the first step at which the runs differ, and the likely cause.

    Args:
        train: a function; every rank calls it, in a process that finds its rank in torchrun's
            variables (for `lockstep.init`, `torch.distributed.init_process_group`, Accelerate,
            Horovod's interface). It returns what is compared: a module, a state dict, tensors,
            numbers, or dicts and lists of them. If it
                has a parameter, it
            gets an empty folder of its own. Or the path of a script, or a list of a script and its
            arguments, in which ``{folder}`` stands for such a folder; compared are the parameters
            that its optimizers train, and the buffers of their models, at its end.
        workers: two or more numbers of workers; the results of the others are compared with that of
            the first.
        rtol: relative tolerance, as that of `torch.testing.assert_close`.
        atol: absolute tolerance. If both are 0, all bits must be equal, as they are with
            ``virtual_workers=``; sums over workers in another order are rounded otherwise, for
            which ``rtol=1e-4, atol=1e-6`` is a usual choice.
        threads: threads of torch in each worker; results on the CPU depend on it.

    Returns:
        The result of the first number of workers: tensors on the CPU and values, by name.

    Raises:
        AssertionError: the results differ. The error names the first entry, the largest difference,
            the first step and the likely cause.
        ConfigError: an argument is invalid, the function cannot be pickled, or its result has
            objects that cannot be compared.
        LockstepError: the training fails; of a function, with the traceback of the worker.
    """
    __tracebackhide__ = True
    counts = _numbers_of_workers(workers)
    _check_tolerances(rtol, atol)
    subject = Subject.of(train)
    reference = _complete(subject, counts[0], threads)
    for count in counts[1:]:
        other = _complete(subject, count, threads)
        names = (f"on {counted(counts[0], 'worker')}", f"on {counted(count, 'worker')}")
        text = describe_differences(reference.entries, other.entries, names, rtol, atol)
        if text is not None:
            why = _explain_difference(subject, (counts[0], count), threads)
            raise AssertionError(
                f"{subject.name} has another result {names[1]} than {names[0]}: {text}\n{why}"
            )
    return reference.entries


def resumes(
    train: Train,
    *,
    at: int | Sequence[int],
    how: str = "kill",
    workers: int = 1,
    resume_workers: int | None = None,
    resume_arguments: Sequence[str] = (),
    rtol: float = 0.0,
    atol: float = 0.0,
    threads: int = 1,
) -> Entries:
    """Assert that a training that is interrupted and started again in the same folder ends as an
    undisturbed one.

    Args:
        train: as for `same_at`. The function has one parameter, the folder of the run, for its
            checkpoints, and resumes if there is one in it; a script has ``{folder}`` in its
            arguments.
        at: the number of steps after which it is interrupted: the calls of an optimizer's
            ``step()``. Several numbers are several interruptions, each of an own run.
        how: "kill": every worker gets SIGKILL right after that step, as from a host that loses its
            power. "stop": every worker gets SIGTERM, after which it may save, as before preemption.
        workers: number of workers.
        resume_workers: number of workers of the resumed run; by default the same.
        resume_arguments: appended to the arguments of the script when it is started again, such as
            ``["--resume"]``.
        rtol: as for `same_at`.
        atol: as for `same_at`.
        threads: as for `same_at`.

    Returns:
        The result of the undisturbed run.

    Raises:
        AssertionError: the results differ; or the resumed run did all steps anew, which tests
            nothing; or the training ended before the step.
        ConfigError, LockstepError: as from `same_at`.
    """
    __tracebackhide__ = True
    _check_tolerances(rtol, atol)
    if how not in _SIGNALS:
        raise ConfigError("how", '"kill" or "stop"', how)
    subject = Subject.of(train)
    if not subject.takes_folder:
        raise ConfigError(
            "train",
            "a function with one parameter, the folder of the run, or a script with {folder} in "
            "its arguments",
            subject.name,
            hint="The run is started again with the same folder, where it finds its checkpoint.",
        )
    undisturbed = _complete(subject, workers, threads)
    for step in [at] if isinstance(at, int) else list(at):
        arguments.whole("at", step, least=1)
        resumed = _interrupt_and_resume(
            subject,
            Kill(EVERY_RANK, step, _SIGNALS[how]),
            workers,
            resume_workers or workers,
            resume_arguments,
            threads,
        )
        if resumed.steps >= undisturbed.steps:
            raise AssertionError(
                f"{subject.name}, interrupted after step {step}, has not resumed: started again, "
                "it did "
                f"{resumed.steps} steps, as many as the undisturbed run. Expected a checkpoint in "
                "its folder from "
                f"before step {step}, and a training that begins at it."
            )
        names = ("undisturbed", f"resumed after step {step}")
        text = describe_differences(undisturbed.entries, resumed.entries, names, rtol, atol)
        if text is not None:
            raise AssertionError(
                f"{subject.name} ends with another result if it is interrupted after step {step} "
                "of "
                f"{undisturbed.steps}, and resumed for {resumed.steps}: {text}\nLook at what the "
                "checkpoint leaves out: "
                "the optimizer's state, the schedule, the position in the data, random "
                "generators, buffers."
            )
    return undisturbed.entries


def survives(
    train: Train,
    *,
    kill: tuple[int, int] | Sequence[tuple[int, int]],
    workers: int = 3,
    least: int = 1,
    rtol: float = 0.0,
    atol: float = 0.0,
    threads: int = 1,
) -> Entries:
    """Assert that an elastic job that loses workers ends with the result of an undisturbed one.

    The job is one of ``lockstep run --elastic``, on this host; it replaces a worker that is lost.

    Args:
        train: as for `same_at`.
        kill: (rank, step): the worker that began with this rank gets SIGKILL after so many steps;
            or several such pairs.
        workers: number of workers, at the beginning and at most.
        least: the least number, with which the job goes on.
        rtol: as for `same_at`.
        atol: as for `same_at`.
        threads: as for `same_at`.

    Returns:
        The result of the undisturbed job.

    Raises:
        AssertionError: the results differ; or the job fails after a loss, or ends before the step.
        ConfigError, LockstepError: as from `same_at`.
    """
    __tracebackhide__ = True
    _check_tolerances(rtol, atol)
    arguments.whole("workers", workers, least=1)
    arguments.whole("least", least, least=1, most=workers)
    pairs: Any = [kill] if isinstance(kill[0], int) else kill
    kills = [Kill(rank, step) for rank, step in pairs]
    for loss in kills:
        arguments.whole("rank to kill", loss.rank, least=0, most=workers - 1)
        arguments.whole("step to kill at", loss.step, least=1)
    subject = Subject.of(train)
    undisturbed = _complete(subject, workers, threads)
    losses = ", ".join(f"rank {loss.rank} after step {loss.step}" for loss in kills)
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as folder:
        survived = run_elastic_job(subject, workers, least, threads, Path(folder), kills)
    if survived.error is not None and not survived.killed:
        raise survived.error
    if survived.error is not None:
        raise AssertionError(
            f"{subject.name} does not survive the loss of {losses}: {survived.error}"
        )
    if not survived.killed:
        raise AssertionError(
            f"{subject.name} ended before all workers were killed ({losses}): the undisturbed job "
            "has "
            f"{undisturbed.steps} steps"
        )
    text = describe_differences(
        undisturbed.entries, survived.entries, ("undisturbed", "after the loss"), rtol, atol
    )
    if text is not None:
        raise AssertionError(
            f"{subject.name} ends with another result after the loss of {losses}: {text}"
        )
    return undisturbed.entries


def _complete(subject: Subject, workers: int, threads: int) -> Outcome:
    """Run a subject to its end.

    Raises:
        LockstepError: if it fails.
        AssertionError: if there is nothing to compare.
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as folder:
        outcome = run_job(subject, workers, threads, Path(folder))
    _check_outcome(subject, outcome, workers)
    return outcome


def _interrupt_and_resume(
    subject: Subject,
    kill: Kill,
    workers: int,
    resume_workers: int,
    resume_arguments: Sequence[str],
    threads: int,
) -> Outcome:
    __tracebackhide__ = True
    with ExitStack() as stack:
        first, second, run_folder = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-test-")))
            for _ in range(3)
        )
        interrupted = run_job(subject, workers, threads, first, run_folder, [kill])
        if not interrupted.killed:
            if interrupted.error is not None:
                raise interrupted.error
            raise AssertionError(
                f"{subject.name} ended after {interrupted.steps} steps: it cannot be interrupted "
                f"after step {kill.step}"
            )
        resumed = run_job(
            subject, resume_workers, threads, second, run_folder, (), resume_arguments
        )
    _check_outcome(subject, resumed, resume_workers)
    return resumed


def _check_outcome(subject: Subject, outcome: Outcome, workers: int) -> None:
    __tracebackhide__ = True
    if outcome.error is not None:
        # the launcher's frames tell nothing about the training
        raise outcome.error.with_traceback(None)
    if not outcome.entries or outcome.entries == {"result": None}:
        expected = (
            "trained by an optimizer of torch"
            if subject.program
            else "returned by the function on rank 0"
        )
        raise AssertionError(
            f"{subject.name} on {counted(workers, 'worker')} has nothing to compare: expected "
            "parameters, numbers or "
            f"tensors {expected}, got none"
        )


def _numbers_of_workers(workers: Sequence[int]) -> list[int]:
    counts = [arguments.whole("workers", count, least=1) for count in workers]
    if len(counts) < 2 or len(set(counts)) != len(counts):
        raise ConfigError(
            "workers", "two or more different numbers of workers, such as (1, 2, 3)", workers
        )
    return counts


def _check_tolerances(rtol: float, atol: float) -> None:
    arguments.number("rtol", rtol, least=0, expected="a number of at least 0")
    arguments.number("atol", atol, least=0, expected="a number of at least 0")


def _explain_difference(subject: Subject, counts: tuple[int, int], threads: int) -> str:
    """Return sentences on the first step at which a subject differs at two numbers of workers, and
    why.
    """

    def run(workers: int, held: Held, name: str) -> list[RunRecord]:
        with tempfile.TemporaryDirectory(prefix="lockstep-test-") as folder:
            records = record_job(subject, workers, threads, Path(folder), _STEPS, held)
        if len(records) < workers or not all(record.steps for record in records):
            raise LockstepError(f"{subject.name} took no step of an optimizer of torch on {name}")
        return records

    try:
        analysis = analyse(run, counts)
    except LockstepError as error:
        return f"The cause is not known: {error}."
    if analysis.verdict is None:
        sentences = [f"The first {_STEPS} steps are the same up to rounding."]
        sentences.append("Equal bits need virtual_workers= of Lockstep; else give rtol and atol.")
    else:
        sentences = [f"Cause: {analysis.verdict.cause}. {analysis.verdict.evidence}"]
        sentences.append(f"What to do: {analysis.verdict.remedy}")
    return "\n".join([*sentences, *analysis.notes])
