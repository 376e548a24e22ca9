"""`launch`: a function in worker processes, its result, its failures, its interruption, and no
trace of it.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from lockstep import environment
from lockstep.errors import ConfigError, DataError, InterruptedRunError, LockstepError, WorkerError
from lockstep.launcher import launch, supervisor
from lockstep.launcher.fixed_host import FixedHost
from support import warm_python

DEADLINE = 60.0  # seconds that a test waits for what must happen


@pytest.fixture(autouse=True, scope="module")
def _functions_by_value() -> Iterator[None]:
    """Workers need not import this test module."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(autouse=True)
def _private_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test checks that nothing is left among the temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    # multiprocessing keeps the fork server's socket in a folder of its own: it goes to the usual
    # place
    multiprocessing.util.get_temp_dir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.01)


def rank() -> int:
    return int(os.environ["RANK"])


def join_group() -> None:
    dist.init_process_group("gloo")
    dist.barrier()


# --- what a worker is
# ---------------------------------------------------------------------------------------


def test_rank_0_returns_and_every_worker_has_its_rank(tmp_path: Path) -> None:
    def work(folder: Path, *, word: str) -> str:
        (folder / f"{rank()}.json").write_text(json.dumps(dict(os.environ)))
        return f"{word} {rank()}"

    assert launch(work, tmp_path, workers=3, word="rank") == "rank 0"
    for number in range(3):
        variables = json.loads((tmp_path / f"{number}.json").read_text())
        world = environment.find_world(variables)
        assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (
            number,
            3,
            number,
            3,
        )
        assert (world.node, world.nodes, world.source) == (0, 1, "lockstep")
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert int(variables["MASTER_PORT"]) > 0


def test_workers_can_communicate_and_may_leave_their_group_to_the_launcher(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> list[float]:
        destroy = dist.destroy_process_group

        def leave(group: dist.ProcessGroup | None = None) -> None:
            (tmp_path / f"left {rank()}").touch()
            destroy(group)

        dist.destroy_process_group = leave
        join_group()
        value = torch.tensor([1.0, rank()])
        dist.all_reduce(value)
        return [float(x) for x in value]

    assert launch(work) == [2.0, 1.0]
    assert sorted(path.name for path in tmp_path.glob("left *")) == ["left 0", "left 1"]
    assert capfd.readouterr() == ("", "")


def test_one_worker_is_a_process_too() -> None:
    assert launch(os.getpid, workers=1) != os.getpid()


def test_functions_arguments_and_results_travel_by_value() -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    offset = 10
    moved = launch(lambda point: Point(point.x + offset), Point(1), workers=1)
    assert isinstance(moved, Point)
    assert moved.x == 11


def test_a_function_chooses_its_own_way_to_start_processes() -> None:
    """As what it defines could not be found by name in a new interpreter."""
    assert launch(lambda: multiprocessing.get_start_method(allow_none=True), workers=1) is None


def test_tensors_outlive_the_worker_that_made_them() -> None:
    def work(weight: torch.Tensor) -> dict[str, Any]:
        layer = torch.nn.Linear(300, 300, bias=False)
        layer.weight.data.copy_(weight)
        return {"layer": layer, "double": weight * 2, "leaf": torch.ones(2, requires_grad=True)}

    weight = torch.randn(300, 300)
    result = launch(work, weight, workers=1)
    assert torch.equal(result["layer"].weight, weight)
    assert isinstance(result["layer"].weight, torch.nn.Parameter)
    assert torch.equal(result["double"], weight * 2)
    assert result["leaf"].requires_grad


def test_a_worker_finds_folder_modules_arguments_and_variables_as_they_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> tuple[Any, ...]:
        import lockstep_test_neighbour as neighbour  # type: ignore[import-not-found]

        return neighbour.VALUE, os.getcwd(), sys.argv, os.environ["LOCKSTEP_TEST_VALUE"]  # noqa: PTH109

    (tmp_path / "lockstep_test_neighbour.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--fast"])
    for number in range(2):  # the fork server has seen neither
        folder = tmp_path / f"folder{number}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("LOCKSTEP_TEST_VALUE", str(number))
        assert launch(work, workers=1) == (7, str(folder), ["train.py", "--fast"], str(number))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_threads_is_the_number_of_threads_within_an_operation(threads: int) -> None:
    def work() -> tuple[int, str, int]:
        torch.randn(1 << 20).exp().sum()
        running = len(list(Path("/proc/self/task").iterdir()))
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], running

    number, variable, running = launch(work, workers=1, threads=threads)
    assert (number, variable) == (threads, str(threads))
    # beside the main thread, one waits for the end of the launcher; the fork server has handed down
    # none
    assert (running > 2) == (threads > 1)


def test_workers_share_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers, threads in ((5, 2, 2), (1, 2, 1)):
        monkeypatch.setattr(environment, "usable_cores", lambda n=cores: n)
        assert launch(torch.get_num_threads, workers=workers) == threads


@contextmanager
def output_in(path: Path) -> Iterator[None]:
    """Let the descriptors of standard output and standard error lead to a file."""
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        with path.open("w") as file:
            for number in kept:
                os.dup2(file.fileno(), number)
        yield
    finally:
        for number, original in kept.items():
            os.dup2(original, number)
            os.close(original)


def test_output_goes_where_it_goes_at_the_time_of_the_call(tmp_path: Path) -> None:
    def work(word: str) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.write(
                f"{word}\n"
            )  # at once: print() may write the line and its end apart, when unbuffered

    for word in ("first", "second"):  # the fork server knows at most one of the files
        with output_in(tmp_path / word):
            launch(work, word, workers=2)
        assert (tmp_path / word).read_text() == f"{word}\n" * 4


def test_closed_output_is_refused() -> None:
    kept = os.dup(1)
    os.close(1)
    try:
        with pytest.raises(LockstepError, match="standard output is closed"):
            launch(rank)
    finally:
        os.dup2(kept, 1)
        os.close(kept)


# --- failures
# -----------------------------------------------------------------------------------------------


def test_an_exception_is_raised_here_with_its_rank_and_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def divide(a: int) -> float:
        return a / 0

    def work() -> None:
        join_group()
        if rank() == 1:
            divide(1)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(WorkerError) as caught:
        launch(work)
    error = caught.value
    assert (error.rank, error.kind, error.reason, error.exit_code) == (
        1,
        "ZeroDivisionError",
        "division by zero",
        1,
    )
    assert "in divide" in error.worker_traceback
    assert "lockstep/launchers" not in error.worker_traceback
    assert error.__suppress_context__ or error.__context__ is None
    assert capfd.readouterr() == ("", "")


def turn_late(
    host: FixedHost, seconds: float, turn: Callable[[FixedHost, float], None] = FixedHost.turn
) -> None:
    time.sleep(0.5)
    turn(host, seconds)


@pytest.mark.parametrize(
    ("die", "reason", "code"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL", 137),
        (lambda: os._exit(3), "exit code 3", 3),
    ],
)
def test_a_death_is_named_before_the_failures_that_follow_from_it(
    die: Callable[[], None],
    reason: str,
    code: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work() -> None:
        join_group()
        if rank() == 1:
            die()
        while True:
            dist.all_reduce(torch.ones(1))

    monkeypatch.setattr(FixedHost, "turn", turn_late)  # all are gone when the launcher looks
    with pytest.raises(WorkerError) as caught:
        launch(work, workers=3)
    assert (caught.value.rank, caught.value.kind, caught.value.exit_code) == (1, "exit", code)
    assert reason in caught.value.reason
    assert caught.value.worker_traceback == ""
    out, err = capfd.readouterr()
    assert (out, [line for line in err.splitlines() if "[c10d]" not in line]) == (
        "",
        [],
    )  # torch tells of lost peers


def test_a_worker_that_vanishes_with_exit_code_0_does_not_leave_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "FAILURE_GRACE", 0.2)
    with pytest.raises(
        WorkerError, match="rank 1: exit: ended with exit code 0 before its work was done"
    ):
        launch(lambda: os._exit(0) if rank() == 1 else signal.pause())
    with pytest.raises(WorkerError, match="rank 0: exit: ended with exit code 0"):
        launch(os._exit, 0, workers=1)  # nobody is left to be waited for


def test_workers_that_do_not_end_after_a_failure_are_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        join_group()
        if rank() == 1:
            threading.Thread(target=signal.pause).start()  # keeps the process from ending
            raise ValueError("first")
        while True:
            signal.pause()

    monkeypatch.setattr(supervisor, "FAILURE_GRACE", 0.2)
    with pytest.raises(WorkerError, match="rank 1: ValueError: first"):
        launch(work)


def test_an_error_that_all_workers_raise_is_not_attributed_to_one() -> None:
    def work() -> None:
        raise ConfigError("global_batch_size", "at least 1", 0)

    for workers in (1, 2):
        with pytest.raises(ConfigError) as caught:
            launch(work, workers=workers)
        assert str(caught.value) == "global_batch_size: expected at least 1, got 0"
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerError)
        assert "in work" in cause.worker_traceback


def test_the_others_have_a_moment_to_raise_the_same() -> None:
    def work() -> None:
        from lockstep.launcher.worker_process import worker

        worker.SAME_ERROR_WAIT_SECONDS = 60.0
        join_group()
        if rank() == 1:
            time.sleep(
                0.5
            )  # enough for the launcher to see that the other has ended, had it not waited
        raise DataError("images: expected 10 bytes, got 7")

    with pytest.raises(DataError):
        launch(work)


def test_an_error_of_one_worker_names_it_and_keeps_its_exit_code() -> None:
    def work() -> None:
        join_group()
        if rank() == 1:
            raise DataError("images: expected 10 bytes, got 7")
        dist.barrier()

    with pytest.raises(
        WorkerError, match=r"rank 1: DataError: images: expected 10 bytes, got 7"
    ) as caught:
        launch(work)
    assert caught.value.exit_code == 2


def test_an_error_that_cannot_be_pickled_is_sent_as_text() -> None:
    def work() -> None:
        raise ConfigError("lock", "none", threading.Lock())

    with pytest.raises(WorkerError, match="ConfigError: lock: expected none, got <unlocked"):
        launch(work, workers=1)


@pytest.mark.parametrize(
    ("argument", "reason", "code"), [("no data", "no data", 1), (7, "ended with exit code 7", 7)]
)
def test_sys_exit_is_a_failure(argument: object, reason: str, code: int) -> None:
    with pytest.raises(WorkerError) as caught:
        launch(sys.exit, argument, workers=1)
    assert (caught.value.kind, caught.value.reason, caught.value.exit_code) == (
        "SystemExit",
        reason,
        code,
    )


def test_sys_exit_with_0_is_a_way_to_return() -> None:
    assert launch(sys.exit, 0, workers=1) is None


def test_an_exception_whose_message_fails_is_reported_all_the_same() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def work() -> None:
        raise OddError

    with pytest.raises(
        WorkerError, match=r"OddError: \(its message cannot be shown: RuntimeError\)"
    ):
        launch(work, workers=1)


def test_a_result_that_cannot_be_sent_is_the_workers_failure() -> None:
    with pytest.raises(
        WorkerError, match=r"rank 0: TypeError: cannot pickle '_thread\.lock' object"
    ):
        launch(threading.Lock, workers=1)
    assert launch(lambda: threading.Lock() if rank() else 5) == 5  # only rank 0's is sent


def test_a_worker_cannot_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LockstepError, match="this process is already a worker"):
        launch(lambda: launch(rank), workers=1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LockstepError, match="this process is already a worker"):
        launch(rank)


# --- bad input
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("workers", value) for value in (0, -1, 121, 2.0, "2", True, None)),
        *(("threads", value) for value in (0, 1.5, False)),
        *(("grace", value) for value in (-1, "30", None, float("nan"))),
    ],
)
def test_settings_are_checked(argument: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(rank, **{argument: value})
    assert (caught.value.argument, caught.value.got) == (argument, value) or value != value


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(ConfigError, match="fn: expected a function or another callable, got 3"):
        launch(3)  # type: ignore[arg-type]


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"^args\[1\]: .*cannot pickle '_thread.lock' object"):
        launch(print, 1, lock)
    with pytest.raises(ConfigError, match=r"^sep: "):
        launch(print, 1, sep=lock)
    with pytest.raises(ConfigError, match=r"^fn: "):
        launch(lambda: lock)


# --- signals
# ------------------------------------------------------------------------------------------------


def stop_in_good_order(launcher: int, number: int, folder: Path) -> None:
    """Wait for the signal, as a training loop does, then take a while to save; rank 0 takes
    longer.
    """
    received: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda n, _: received.append(n))
    join_group()
    if rank() == 0:
        os.kill(launcher, number)
    wait_for(lambda: received, "signal")
    if rank() == 0:
        wait_for((folder / "other").exists, "the other worker is done")
        time.sleep(0.3)  # were it ended because of the other, it would be now
        (folder / "saved").write_text(str(received))
    else:
        (folder / "other").touch()
    raise InterruptedRunError("stopped after step 7", received[0], f"rank {rank()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_workers_stop_in_good_order(number: signal.Signals, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError) as caught:
        launch(stop_in_good_order, os.getpid(), number, tmp_path)
    assert (caught.value.message, caught.value.checkpoint) == ("stopped after step 7", "rank 0")
    assert (caught.value.signal_number, caught.value.exit_code) == (number, 128 + number)
    assert (tmp_path / "saved").read_text() == f"[{int(number)}]"  # it came once


def call_launcher(launcher: int, numbers: list[int], ignore: bool = False) -> None:
    if ignore:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    join_group()
    if rank() == 0:
        for number in numbers:
            os.kill(launcher, number)
            time.sleep(0.2)  # two at once may arrive as one
    while True:
        signal.pause()


def test_ctrl_c_without_more_from_the_workers_is_a_keyboard_interrupt(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt, match="the workers have exited"):
        launch(call_launcher, os.getpid(), [signal.SIGINT])
    assert capfd.readouterr() == ("", "")
    assert launch(rank) == 0


def test_sigterm_without_more_from_the_workers_is_an_interrupted_run() -> None:
    with pytest.raises(InterruptedRunError, match="stopped by SIGTERM") as caught:
        launch(call_launcher, os.getpid(), [signal.SIGTERM])
    assert (caught.value.exit_code, caught.value.checkpoint) == (143, None)


def test_a_second_signal_kills_at_once() -> None:
    with pytest.raises(KeyboardInterrupt, match="were killed"):
        launch(call_launcher, os.getpid(), [signal.SIGINT, signal.SIGINT], ignore=True, grace=1e6)


def test_workers_that_do_not_leave_in_their_grace_are_killed() -> None:
    with pytest.raises(KeyboardInterrupt, match="were killed"):
        launch(call_launcher, os.getpid(), [signal.SIGINT], ignore=True, grace=0.1)


def test_a_failure_while_stopping_is_reported() -> None:
    def work(launcher: int) -> None:
        try:
            call_launcher(launcher, [signal.SIGINT])
        except KeyboardInterrupt:
            raise OSError("disk full") from None

    with pytest.raises(WorkerError, match="OSError: disk full"):
        launch(work, os.getpid())


def test_an_ignored_signal_stays_ignored() -> None:
    def work(launcher: int) -> str:
        os.kill(launcher, signal.SIGINT)
        return "done"

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert launch(work, os.getpid(), workers=1) == "done"
    finally:
        signal.signal(signal.SIGINT, before)


# --- the process that launches
# ------------------------------------------------------------------------------


def test_launches_from_several_threads_do_not_disturb_each_other() -> None:
    def work(value: int) -> int:
        join_group()
        total = torch.tensor(value)
        dist.all_reduce(total)
        return int(total)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda value: launch(work, value), [1, 10])) == [2, 20]


def test_nothing_is_changed_in_this_process() -> None:
    main = sys.modules["__main__"]
    watched = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")

    def state() -> tuple[Any, ...]:
        loggers = [(g.filters[:], g.level, g.propagate) for g in map(logging.getLogger, watched)]
        method = multiprocessing.get_start_method(allow_none=True)
        return (
            loggers,
            method,
            main.__spec__,
            vars(main).get("__file__"),
            signal.pthread_sigmask(signal.SIG_BLOCK, []),
        )

    launch(rank)  # loads the modules whose loggers are looked at
    before_method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    try:
        before = state()
        with pytest.raises(WorkerError):
            launch(os._exit, 1)
        assert state() == before
    finally:
        multiprocessing.set_start_method(before_method, force=True)


def test_an_exception_in_the_waiting_thread_ends_the_workers(tmp_path: Path) -> None:
    class TimeIsUpError(Exception):
        pass

    def give_up(_number: int, _frame: object) -> None:
        raise TimeIsUpError

    def work(launcher: int) -> None:
        (tmp_path / str(rank())).write_text(str(os.getpid()))
        join_group()
        if rank() == 0:
            os.kill(launcher, signal.SIGUSR1)
        signal.pause()

    before = signal.signal(signal.SIGUSR1, give_up)
    try:
        with pytest.raises(TimeIsUpError):
            launch(work, os.getpid())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not any(
        psutil.pid_exists(int((tmp_path / str(number)).read_text())) for number in range(2)
    )


# --- whole programs
# -----------------------------------------------------------------------------------------


def program(folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    return script.name


def test_a_script_needs_no_main_guard_and_runs_once(tmp_path: Path) -> None:
    name = program(
        tmp_path,
        """
        import os
        from dataclasses import dataclass
        from lockstep.launcher import launch
        print("script runs as", __name__)

        @dataclass
        class Answer:
            value: int

        def work():
            if os.environ["RANK"] == "0":
                print("worker")
            return Answer(int(os.environ["WORLD_SIZE"]))

        for _ in range(2):
            answer = launch(work)
        assert isinstance(answer, Answer)
        print(answer, __file__)
        import multiprocessing
        multiprocessing.set_start_method("spawn")
        launch(lambda: 1 / 0)
        """,
    )
    done = warm_python.run([name], tmp_path)
    assert (
        done.stdout
        == f"script runs as __main__\nworker\nworker\nAnswer(value=2) {tmp_path / 'script.py'}\n"
    )
    assert done.returncode == 1
    assert (
        done.stderr.count("Traceback (most recent call last)") == 2
    )  # the program's own, and in it the worker's
    assert "WorkerError: rank " in done.stderr
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


WAITING = """
    import os, signal, subprocess, sys, tempfile, time
    from lockstep.errors import InterruptedRunError
    from lockstep.launcher import launch

    tempfile.tempdir = sys.argv[1]

    def work():
        received = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, _: received.append(n))
        child = subprocess.Popen(["sleep", "1000"])
        os.write(1, f"{os.getpid()} {child.pid}\\n".encode())
        while not received:
            time.sleep(0.01)
        child.kill()
        child.wait()
        time.sleep(0.3)
        raise InterruptedRunError(f"stopped by {received}", received[0])

    try:
        launch(work, grace=1e6)
    except InterruptedRunError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # it came before the workers could take it otherwise
        sys.exit(130)
"""


@pytest.fixture
def private() -> Iterator[str]:
    """A folder for temporary files of a program; sockets in it have a path of limited length."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@pytest.fixture
def waiting(tmp_path: Path, private: str) -> Iterator[warm_python.WarmProcess]:
    """A program whose two workers wait for a signal, in a process group of its own."""
    words = [program(tmp_path, WAITING), private]
    with warm_python.popen(words, tmp_path, start_new_session=True) as process:
        yield process
        process.kill()


def read_pids(process: warm_python.WarmProcess) -> list[int]:
    """The process ids that both workers write, each with its child's."""
    assert process.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    assert len(pids) == 4
    return pids


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_reaches_each_worker_once(
    number: signal.Signals, waiting: warm_python.WarmProcess
) -> None:
    read_pids(waiting)
    os.killpg(waiting.pid, number)  # what a terminal does on Ctrl-C, and a shell on "kill %1"
    output, errors = waiting.communicate(timeout=DEADLINE)
    assert (output, errors, waiting.returncode) == (
        f"stopped by [{int(number)}]\n",
        "",
        128 + number,
    )


def test_sigterm_twice_in_a_moment_is_one_request(waiting: warm_python.WarmProcess) -> None:
    read_pids(waiting)
    for _ in range(
        2
        # as a scheduler does that signals every process, and the tasks through their starter as
        # well
    ):
        waiting.send_signal(signal.SIGTERM)
        time.sleep(0.1)  # two at once may arrive as one
    output, errors = waiting.communicate(timeout=DEADLINE)
    assert (output, errors, waiting.returncode) == ("stopped by [15]\n", "", 143)


def test_a_scheduler_that_signals_every_process_interrupts_the_run(
    waiting: warm_python.WarmProcess,
) -> None:
    workers_and_children = read_pids(waiting)
    for each in psutil.Process(waiting.pid).children(
        recursive=True
    ):  # the fork server does not survive this
        if each.pid not in workers_and_children[1::2]:
            each.terminate()
    waiting.send_signal(signal.SIGTERM)
    output, errors = waiting.communicate(timeout=DEADLINE)
    assert output.startswith("stopped by [15")
    assert "2" not in output  # the end of the fork server is no Ctrl-C
    assert (errors, waiting.returncode) == ("", 143)


def test_ctrl_c_while_the_fork_server_is_loading_is_as_quiet(tmp_path: Path, private: str) -> None:
    command = [sys.executable, program(tmp_path, WAITING), private]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    ) as process:
        wait_for(
            lambda: any(map(is_loading, psutil.Process(process.pid).children())),
            "the fork server loads PyTorch",
        )
        os.killpg(process.pid, signal.SIGINT)
        _output, errors = process.communicate(timeout=DEADLINE)
    assert (errors, process.returncode) == ("", 130)


def is_loading(process: psutil.Process) -> bool:
    try:
        return any("libtorch" in each.path for each in process.memory_maps())
    except psutil.Error:
        return False


def test_workers_and_what_they_have_started_end_with_a_launcher_that_is_killed(
    waiting: warm_python.WarmProcess, private: str
) -> None:
    pids = read_pids(waiting)
    waiting.kill()
    waiting.communicate(timeout=DEADLINE)
    wait_for(lambda: not any(map(is_running, pids)), "the workers and their children end")
    assert list(Path(private).glob("lockstep-*")) == []


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
