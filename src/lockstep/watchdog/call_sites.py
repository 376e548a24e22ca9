"""Call sites: the user's own line in a stack, which is the first frame outside torch and
Lockstep.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

__all__ = [
    "CallSite",
    "CallSites",
    "current_folder",
    "describe",
    "digest",
    "is_internal",
    "is_library",
    "main_frame",
    "stack_of",
    "user_call_site",
]

_OWN = str(Path(__file__).resolve().parent.parent) + os.sep
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_MAX_CODE = 4096  # functions that are remembered
_MAX_CHARACTERS = 140  # characters of a path, and of a line
_PASS_THROUGH = tuple(
    _STANDARD_LIBRARY + name
    for name in (
        "contextlib.py",
        "functools.py",
        "runpy.py",
        "threading.py",
        "multiprocessing",
        "concurrent",
    )
)
_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_STARTERS = ("multiprocessing.forkserver", "multiprocessing.spawn")
_INTERNAL_PACKAGES = tuple(
    _OWN + name for name in ("transports", "communicator", "watchdog", "flight_recorder", "system")
)


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of the user's program.

    Attributes:
        line: 64-bit digest of it.
        text: number of its text in the flight recorder's text table.
    """

    line: int
    text: int


def digest(text: str) -> int:
    """Return a 64-bit digest of `text`, the same in every process; never 0."""
    return (
        int.from_bytes(
            hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little"
        )
        or 1
    )


def is_internal(file: str) -> bool:
    """Return whether `file` belongs to torch, Lockstep, or a part of the standard library that only
    passes calls on.
    """
    init_of_torch = getattr(sys.modules.get("torch"), "__file__", None)
    folder = _OWN
    if init_of_torch:
        folder = os.path.dirname(init_of_torch) + os.sep  # noqa: PTH120 - called for every new call site
    return file.startswith((folder, _OWN, "<frozen", *_PASS_THROUGH))


def user_call_site(error: BaseException) -> str:
    """Return where the user's program was when `error` was raised, as ``train.py:31 in main``; ""
    without one.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_internal(frame.filename)
    ]
    if not frames:
        return ""
    last = frames[-1]
    folder = current_folder()
    name = last.filename.removeprefix(folder + os.sep) if folder else last.filename
    return f"{name}:{last.lineno}" + ("" if last.name == "<module>" else f" in {last.name}")


class CallSites:
    """A cache of call sites.

    Args:
        intern: returns the number of a text in the flight recorder's text table.
    """

    def __init__(self, intern: Callable[[str], int]) -> None:
        self._intern = intern
        # by identity: code objects of two files may be equal, and take long to hash
        self._internal: dict[int, bool] = {}
        self._known: dict[tuple[int, int], CallSite] = {}
        self._kept: list[CodeType] = []  # so that no identity is reused

    def lookup(self, frame: FrameType | None) -> CallSite:
        """Return the call site of the first user frame, outwards from `frame`; else that of the
        main thread.
        """
        internal = self._internal
        start = frame
        while frame is not None:
            inside = internal.get(id(frame.f_code))
            if inside is None:
                inside = self._classify(frame)
            if not inside:
                break
            frame = frame.f_back
        if frame is None:  # a thread of autograd
            frame = _first_user_frame(main_frame()) or _first_own_frame(start) or start
        if frame is None:
            return CallSite(0, 0)
        site = self._known.get((id(frame.f_code), frame.f_lasti))
        return site if site is not None else self._new(frame)

    def clear(self) -> None:
        """Clear the cache, as the texts may be overwritten."""
        self._known.clear()
        self._internal.clear()
        self._kept.clear()

    def _classify(self, frame: FrameType) -> bool:
        if len(self._kept) >= _MAX_CODE:  # code that is compiled again and again, as by `exec`
            self.clear()
        self._kept.append(frame.f_code)
        inside = self._internal[id(frame.f_code)] = is_internal(
            frame.f_code.co_filename
        ) or _is_multiprocessing_main(frame)
        return inside

    def _new(self, frame: FrameType) -> CallSite:
        call_site, source = describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        site = CallSite(digest(f"{call_site}\n{source}"), self._intern(f"{call_site}\n{source}"))
        if id(frame.f_code) not in self._internal:
            self._classify(frame)
        self._known[id(frame.f_code), frame.f_lasti] = site
        return site


def _first_user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and (
        is_internal(frame.f_code.co_filename) or _is_multiprocessing_main(frame)
    ):
        frame = frame.f_back
    return frame


def _is_multiprocessing_main(frame: FrameType) -> bool:
    """Return whether this is the program with which multiprocessing starts a process (``python -c
    "from …"``).
    """
    if frame.f_code.co_filename != "<string>" or frame.f_back is not None:
        return False
    names = frame.f_globals
    return any(
        getattr(names.get(name), "__module__", "") in _STARTERS for name in ("main", "spawn_main")
    )


def _first_own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the first frame of Lockstep's own program, as its commands may run without a line of
    the user's.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN) and not file.startswith(_INTERNAL_PACKAGES):
            break
        frame = frame.f_back
    return frame


def main_frame() -> FrameType | None:
    """Return the current frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def describe(file: str, line: int, function: str) -> tuple[str, str]:
    """Return (``train.py:31 in main``, the source text of that line)."""
    path = file
    if not file.startswith("<"):
        path = path.removeprefix(f"{current_folder() or os.devnull}{os.sep}")
    if path.startswith(_OWN):
        path = path.removeprefix(os.path.dirname(_OWN.rstrip(os.sep)) + os.sep)  # noqa: PTH120 - as above
    if is_library(path):
        path = _LIBRARIES.split(path)[-1]
    if len(path) > _MAX_CHARACTERS:
        path = f"…{path[-_MAX_CHARACTERS:]}"
    return f"{path}:{line} in {function}", _shown_source(linecache.getline(file, line).strip())


def _shown_source(line: str) -> str:
    """Return a line of source, with "…" where the statement begins before it or ends after it, or
    is too long.
    """
    if len(line) > _MAX_CHARACTERS:
        return f"{line[:_MAX_CHARACTERS]} …"
    depth = lowest = 0
    for character in line:
        depth += (character in "([{") - (character in ")]}")
        lowest = min(lowest, depth)
    before = "… " * (lowest < 0)
    after = " …" * (depth > lowest or line.endswith(("\\", ",")))
    return f"{before}{line}{after}"


def is_library(file: str) -> bool:
    """Return whether `file` belongs to an installed package."""
    return _LIBRARIES.search(file) is not None


def current_folder() -> str:
    """Return the path of the current folder; "" if it has been removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - used as a text only
    except OSError:
        return ""


def stack_of(frames: list[tuple[str, int, str]], max_frames: int = 4) -> tuple[str, ...]:
    """Return a stack as text: the user's own frames, the first with the innermost one of all if
    that is a library's.

    Where there is none of the user's, those of Lockstep, or else of libraries, take their place.

    Args:
        frames: file, line and function of each, innermost first.
        max_frames: number of user frames to include.
    """
    if (
        len(frames) > 1
        and frames[-1][0] == "<string>"
        and frames[-2][0].startswith(f"{_STANDARD_LIBRARY}multiprocessing")
    ):
        frames = frames[:-1]  # the program with which multiprocessing has started the process
    while frames and frames[0][0].startswith(_INTERNAL_PACKAGES):
        frames = frames[1:]  # the watchdog itself
    outside = [
        frame
        for frame in frames
        if not is_internal(frame[0]) and not frame[0].startswith(_STANDARD_LIBRARY)
    ]
    program_frames = [frame for frame in outside if not is_library(frame[0])]
    program_frames = (
        program_frames
        or [frame for frame in frames if frame[0].startswith(_OWN)]
        or outside
        or frames[:1]
    )
    texts = [": ".join(filter(None, describe(*frame))) for frame in program_frames[:max_frames]]
    if texts and frames[0] != program_frames[0]:
        texts[0] += f" (inside {describe(*frames[0])[0]})"
    return tuple(texts)
