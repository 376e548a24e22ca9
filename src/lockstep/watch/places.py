"""Finds the user's own line in a stack: the first frame outside torch and Lockstep."""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

__all__ = ["Place", "Places", "current_folder", "describe", "digest", "is_internal", "main_frame", "stack_of"]

_OWN = str(Path(__file__).resolve().parent.parent) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_MOST_CODE = 4096  # functions that are remembered
_LONGEST = 140  # characters of a path, and of a line
_PASSING_ON = tuple(
    _STANDARD + name
    for name in ("contextlib.py", "functools.py", "runpy.py", "threading.py", "multiprocessing", "concurrent")
)
_STARTERS = ("multiprocessing.forkserver", "multiprocessing.spawn")
_BENEATH = tuple(_OWN + name for name in ("transports", "communicator", "watch", "recorder"))


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's. Attributes: line, 64 bits made of it; text, number of its text in the recording."""

    line: int
    text: int


def digest(text: str) -> int:
    """64 bits made of `text`, the same in every process; never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little") or 1


def is_internal(file: str) -> bool:
    """Whether `file` is torch's, Lockstep's, or a part of the standard library that only passes calls on."""
    return file.startswith((_torch(), _OWN, "<frozen", *_PASSING_ON))


def _torch() -> str:
    torch = sys.modules.get("torch")
    file = getattr(torch, "__file__", None)
    return os.path.dirname(file) + os.sep if file else _OWN  # noqa: PTH120 - asked at every new place


class Places:
    """Remembers the places that have been seen.

    Args:
        number: gives the number of a text in the recording.
    """

    def __init__(self, number: Callable[[str], int]) -> None:
        self._number = number
        # by identity: code of two files may be equal, and takes long to hash
        self._internal: dict[int, bool] = {}
        self._known: dict[tuple[int, int], Place] = {}
        self._kept: list[CodeType] = []  # so that no identity is given again

    def of(self, frame: FrameType | None) -> Place:
        """The place of the first frame of the user's, outwards from `frame`; else where the main thread is."""
        internal, start = self._internal, frame
        while frame is not None:
            inside = internal.get(id(frame.f_code))
            if inside is None:
                inside = self._look_at(frame)
            if not inside:
                break
            frame = frame.f_back
        if frame is None:  # a thread of autograd's
            frame = _first(main_frame()) or _own(start) or start
        if frame is None:
            return Place(0, 0)
        found = self._known.get((id(frame.f_code), frame.f_lasti))
        return found if found is not None else self._new(frame)

    def forget(self) -> None:
        """Numbers of texts are given anew from here on."""
        self._known.clear()
        self._internal.clear()
        self._kept.clear()

    def _look_at(self, frame: FrameType) -> bool:
        if len(self._kept) >= _MOST_CODE:  # made anew again and again, as by `exec`
            self.forget()
        self._kept.append(frame.f_code)
        inside = self._internal[id(frame.f_code)] = is_internal(frame.f_code.co_filename) or _starts_workers(frame)
        return inside

    def _new(self, frame: FrameType) -> Place:
        place, source = describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        made = Place(digest(f"{place}\n{source}"), self._number(f"{place}\n{source}"))
        if id(frame.f_code) not in self._internal:
            self._look_at(frame)
        self._known[id(frame.f_code), frame.f_lasti] = made
        return made


def _first(frame: FrameType | None) -> FrameType | None:
    while frame is not None and (is_internal(frame.f_code.co_filename) or _starts_workers(frame)):
        frame = frame.f_back
    return frame


def _starts_workers(frame: FrameType) -> bool:
    """Whether this is the line with which multiprocessing starts a process, ``python -c "from multiprocessing…"``."""
    if frame.f_code.co_filename != "<string>" or frame.f_back is not None:
        return False
    names = frame.f_globals
    return any(getattr(names.get(name), "__module__", "") in _STARTERS for name in ("main", "spawn_main"))


def _own(frame: FrameType | None) -> FrameType | None:
    """The first frame of what Lockstep itself does with the ranks, as its commands do without a line of the user's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN) and not file.startswith(_BENEATH):
            break
        frame = frame.f_back
    return frame


def main_frame() -> FrameType | None:
    """Where the main thread is."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def describe(file: str, line: int, function: str) -> tuple[str, str]:
    """(``train.py:31 in main``, the text of that line)."""
    path = file
    if not file.startswith("<"):
        path = path.removeprefix(f"{current_folder() or os.devnull}{os.sep}")
    if path.startswith(_OWN):
        path = path.removeprefix(os.path.dirname(_OWN.rstrip(os.sep)) + os.sep)  # noqa: PTH120 - as above
    if len(path) > _LONGEST:
        path = f"…{path[-_LONGEST:]}"
    return f"{path}:{line} in {function}", linecache.getline(file, line).strip()[:_LONGEST]


def current_folder() -> str:
    """Its path; "" where it has been removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - it is only a text
    except OSError:
        return ""


def stack_of(frames: list[tuple[str, int, str]], most: int = 4) -> tuple[str, ...]:
    """A stack, innermost first, in words: the user's own frames, and before them the one that is innermost of all.

    Args:
        frames: file, line and function of each, innermost first.
        most: of the user's frames.
    """
    if len(frames) > 1 and frames[-1][0] == "<string>" and frames[-2][0].startswith(f"{_STANDARD}multiprocessing"):
        frames = frames[:-1]  # the line with which multiprocessing has started the process
    while frames and frames[0][0].startswith(_BENEATH):
        frames = frames[1:]  # the watch itself
    own = [frame for frame in frames if not is_internal(frame[0]) and not frame[0].startswith(_STANDARD)]
    shown = own[:most]
    if frames and (not own or frames[0] != own[0]):
        shown = [frames[0], *shown]
    return tuple(": ".join(filter(None, describe(*frame))) for frame in shown)
