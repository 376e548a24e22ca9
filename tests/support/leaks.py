"""What a test may leave behind in its process: nothing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

__all__ = [
    "LINGER",
    "State",
    "Watch",
    "descriptors",
    "forget_communicator",
    "remaining",
    "resources",
]

LINGER = 2.0  # seconds in which what a test has let go of may end by itself

# Daemon threads that belong to the test run itself.
DAEMONS_ALLOWED = ("pytest_timeout",)

# The driver keeps its device files open from first use to the end of the process.
FILES_ALLOWED = ("/dev/nvidia",)

# pytest sets the first for every phase of a test. scikit-learn sets the next two when imported, and
# torch.compile the others when first used, each for the rest of the process.
VARIABLES_ALLOWED = (
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)

# pytest-timeout owns SIGALRM. torch's first loader with worker processes sets SIGCHLD's handler
# once for good, and would not notice that it was put back. The handlers of all other signals are
# watched.
SIGNALS = sorted(signal.valid_signals() - {signal.SIGALRM, signal.SIGCHLD})


# A descriptor's number and what it leads to: numbers alone are used again.
File = tuple[int, str]


# --- resources: counted, and gone or not
# --------------------------------------------------------------------


def resources(known_pids: Collection[int] = (), known_files: Collection[File] = ()) -> Counter[str]:
    """What this process holds open now, each described in words.

    Args:
        known_pids: child processes that belong to the test run; not counted.
        known_files: open file descriptors that belong to the test run; not counted.
    """
    known = {*known_files, *_machinery_files()}
    held = Counter(
        f"open file descriptor: {target}"
        for number, target in descriptors()
        if (number, target) not in known
    )
    held.update(_children({*known_pids, *_machinery_pids()}))
    held.update(_threads())
    return held


def remaining(
    before: Counter[str], now: Callable[[], Counter[str]], linger: float = LINGER
) -> list[str]:
    """What is held beyond `before` after waiting at most `linger` seconds for it to go."""
    left = now() - before
    if not left:
        return []
    deadline = time.monotonic() + linger
    # What only a reference cycle holds is garbage, not a leak. Another thread may have held the
    # cycle when it was collected last, as autograd's threads hold an exception for a moment.
    gc.collect()
    collected = time.monotonic()
    while (left := now() - before) and time.monotonic() < deadline:
        time.sleep(0.005)
        if time.monotonic() - collected > 0.2:
            gc.collect()
            collected = time.monotonic()
    return sorted(map(_with_command, left.elements()))


def descriptors() -> set[File]:
    """The open file descriptors of this process, where the system shows them."""
    table = Path("/proc/self/fd")
    if not table.exists():
        return set()
    found = set()
    for number in os.listdir(table):  # noqa: PTH208, the names are all that is needed
        try:
            target = os.readlink(table / number)  # noqa: PTH115, targets such as pipe:[7] are no paths
        except OSError:  # the descriptor of the listing itself
            continue
        if not target.startswith(FILES_ALLOWED):
            found.add((int(number), target))
    return found


def _children(known: Collection[int]) -> list[str]:
    found = []
    for pid in _descendants(os.getpid()):
        if pid not in known:
            with suppress(psutil.NoSuchProcess):
                child = psutil.Process(pid)
                state = "zombie" if child.status() == psutil.STATUS_ZOMBIE else "alive"
                found.append(f"child process {pid} ({state})")
    return found


def _with_command(line: str) -> str:
    """Add the command to a line about a child process, at the end only: one that has just been
    started has none yet.
    """
    match = re.match(r"child process (\d+) ", line)
    if match is None:
        return line
    try:
        child = psutil.Process(int(match[1]))
        return f"{line}: {' '.join(child.cmdline())[:120]}"
    except psutil.NoSuchProcess:  # a ZombieProcess is one as well
        return line


def _descendants(pid: int) -> list[int]:
    """The children of a process, theirs, and so on; asked of the kernel where it has lists of
    them.
    """
    lists = list(Path(f"/proc/{pid}/task").glob("*/children"))
    if not lists and pid == os.getpid():
        return [
            child.pid for child in psutil.Process().children(recursive=True)
        ]  # looks at every process there is
    found = []
    for path in lists:
        with suppress(OSError):  # a thread that has ended meanwhile
            found += [int(word) for word in path.read_text().split()]
    return [each for child in found for each in (child, *_descendants(child))]


def _threads() -> list[str]:
    return [
        f"{'daemon ' if thread.daemon else ''}thread: {thread.name}"
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and not (thread.daemon and thread.name.startswith(DAEMONS_ALLOWED))
    ]


def _machinery_files() -> set[File]:
    """Descriptors of multiprocessing's two servants, which live as long as the process."""
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    numbers = (getattr(_fork_server(), "_forkserver_alive_fd", None), getattr(tracker, "_fd", None))
    return {(number, target) for number, target in descriptors() if number in numbers}


def _machinery_pids() -> set[int]:
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    pids = (getattr(_fork_server(), "_forkserver_pid", None), getattr(tracker, "_pid", None))
    return {pid for pid in pids if pid is not None}


def _fork_server() -> object:
    return getattr(forkserver, "_forkserver", None)


# --- state: global settings, read before and put back after
# -------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A global setting: how to read it and how to put it back."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


def _read_folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109, text that can be compared
    except FileNotFoundError:
        return "a folder that is gone"


def _write_deterministic(value: tuple[bool, bool]) -> None:
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    else:  # the public function would import the compiler, which takes seconds, to tell it as well
        torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _write_start_method(value: str) -> None:
    multiprocessing.set_start_method(value, force=True)


def _leave_group(_value: bool) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _cudnn(name: str) -> Setting:
    cudnn: Any = torch.backends.cudnn
    return Setting(
        f"torch.backends.cudnn.{name}",
        lambda: getattr(cudnn, name),
        lambda v: setattr(cudnn, name, v),
    )


SETTINGS = (
    Setting("working directory", _read_folder, os.chdir),
    Setting("torch thread count", torch.get_num_threads, torch.set_num_threads),
    Setting("torch default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting(
        "torch gradient mode",
        torch.is_grad_enabled,
        lambda value: torch._C._set_grad_enabled(value),
    ),
    Setting(
        "torch matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    Setting(
        "torch deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _write_deterministic,
    ),
    _cudnn("deterministic"),
    _cudnn("benchmark"),
    Setting("default process group", dist.is_initialized, _leave_group),
    Setting("multiprocessing start method", multiprocessing.get_start_method, _write_start_method),
)


@dataclass(frozen=True)
class State:
    """Every watched setting of this process at one moment."""

    settings: dict[str, Any]
    environment: dict[str, str]
    handlers: dict[int, Any]

    @classmethod
    def now(cls) -> State:
        environment = {
            name: value for name, value in os.environ.items() if name not in VARIABLES_ALLOWED
        }
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
        return cls({setting.name: setting.read() for setting in SETTINGS}, environment, handlers)

    def changes(self, now: State) -> list[str]:
        """What is different `now`, in words."""
        found = [
            f"{name}: was {old!r}, is {now.settings[name]!r}"
            for name, old in self.settings.items()
            if old != now.settings[name]
        ]
        for name in sorted({*self.environment, *now.environment}):
            old, new = self.environment.get(name), now.environment.get(name)
            if old != new:
                found.append(f"environment variable {name}: was {_value(old)}, is {_value(new)}")
        for number, handler in self.handlers.items():
            if handler != now.handlers[number]:
                name = (
                    signal.Signals(number).name if number in list(signal.Signals) else str(number)
                )
                found.append(f"handler of {name}: was {handler!r}, is {now.handlers[number]!r}")
        return found

    def restore(self) -> None:
        """Put everything back as it was."""
        now = State.now()
        for setting in SETTINGS:
            if self.settings[setting.name] != now.settings[setting.name]:
                setting.write(self.settings[setting.name])
        for name in now.environment.keys() - self.environment.keys():
            del os.environ[name]
        for name, value in self.environment.items():
            if now.environment.get(name) != value:
                os.environ[name] = value
        for number, handler in self.handlers.items():
            if handler != now.handlers[number] and handler is not None:
                signal.signal(number, handler)


def _value(text: str | None) -> str:
    return "not set" if text is None else repr(text)


def forget_communicator() -> None:
    """Let the next `lockstep.init()` look for its job anew; one process serves many jobs here."""
    module: Any = sys.modules.get("lockstep.communicator.initialization")
    if module is not None:
        assert hasattr(module, "_default"), (
            "lockstep.communicator keeps its communicator elsewhere now; follow it"
        )
        module._default = None


# --- both together
# ------------------------------------------------------------------------------------------


class Watch:
    """Compares this process before and after a test.

    Args:
        known: gives the child processes and file descriptors that belong to the test run, when
            asked.
    """

    def __init__(self, known: Callable[[], tuple[Collection[int], Collection[File]]]) -> None:
        self.known = known
        self.state = State.now()
        self.held = self._resources()

    def _resources(self) -> Counter[str]:
        return resources(*self.known())

    def finish(self, linger: float = LINGER) -> list[str]:
        """Put the state back, and return in words everything that was not as before."""
        changed = self.state.changes(State.now())
        self.state.restore()
        return changed + remaining(self.held, self._resources, linger)
