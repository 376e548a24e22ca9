"""Saves that are killed at each call that touches a file; run as ``python -m
support.checkpoint_killer FOLDER``.

It runs by itself because a process that has torch loaded and nothing else going on can fork cheaply
and safely.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lockstep.checkpoint.folder import CheckpointStore, save_weights
from support.checkpoints import save

TOUCHING = {
    "open",
    "write",
    "fsync",
    "close",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "remove",
    "rmdir",
}
Report = Callable[[int], object]


def following(case: Path) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        store = CheckpointStore(case / "checkpoints", keep=1)
        for step in (1, 2):
            save(store, step)
            report(step)

    return work


def replacing(case: Path) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        save(store, 1, size=8)
        report(1)

    store = CheckpointStore(case / "checkpoints")
    save(store, 1)
    return work


def weights(case: Path) -> Callable[[Report], None]:
    def work(report: Report) -> None:
        save_weights({"a": torch.ones(8)}, case / "model.safetensors")
        report(1)

    save_weights({"a": torch.ones(4)}, case / "model.safetensors")
    return work


def kill_at(number: int, case: Path, work: Callable[[Report], None]) -> bool:
    """Do `work` in a child that is killed just before its n-th call that touches a file; whether it
    came so far.
    """
    descriptor = os.open(case / "finished", os.O_WRONLY | os.O_CREAT)
    child = os.fork()
    if child:
        os.close(descriptor)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    try:
        kill_self_at(number)
        work(lambda step: os.write(descriptor, b"%d\n" % step))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def kill_self_at(number: int) -> None:
    calls = itertools.count(1)

    def look(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or function.__name__ not in TOUCHING:
            return
        of_a_file = isinstance(getattr(function, "__self__", None), io.IOBase)
        if (of_a_file or function.__module__ in ("posix", "io", "_io")) and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(look)


def main(folder: Path) -> None:
    for scenario in (following, replacing, weights):
        for number in itertools.count(1):
            case = folder / scenario.__name__ / f"{number:04d}"
            case.mkdir(parents=True)
            if not kill_at(number, case, scenario(case)):
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
