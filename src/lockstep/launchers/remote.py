"""A job on several machines, from one of them: a launcher on each, over ssh, that does this one's bidding."""

from __future__ import annotations

import json
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from .. import environment
from ..errors import ConfigError, InterruptedRunError, LockstepError
from ..hosts import Host
from .choices import Choices
from .command import commands_for, shares, ssh_words, variables_for
from .failure import Failure
from .interruption import collected_signals
from .lines import Lines, Piece
from .node import MARK
from .options import PATIENCE
from .part import check_debug_rank
from .roll_call import Description, compare
from .screen import Screen
from .supervision import FAILURE_GRACE

__all__ = ["run_on_hosts"]

_POLL_S = 0.1
_READ_S = 1.0
_LOOPBACK = "127.0.0.1"
_BROKEN = 255  # ssh's own exit code
_MARK = MARK.encode()


@dataclass
class _Part:
    """The launcher on one machine.

    Attributes:
        ready, failure, ended: what it has said.
        port: where it serves the job's store; 0 until it does.
        words: its last lines.
        readers: the threads that read what it writes.
    """

    host: Host
    process: subprocess.Popen[bytes]
    ready: Description | None = None
    port: int = 0
    failure: Failure | None = None
    ended: str = ""
    words: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def has_fallen(self) -> bool:
        """Whether it has ended without a word of a worker's failure, and not because of a signal."""
        code = self.code()
        return code not in (None, 0, 128 + signal.SIGINT, 128 + signal.SIGTERM) and self.failure is None

    @property
    def is_lost(self) -> bool:
        """Whether it, or the way to it, was cut off."""
        code = self.code()
        return code is not None and (code == _BROKEN or code < 0) and not (self.failure or self.ended)

    def code(self) -> int | None:
        """Its exit code, once it has ended and everything that it had written is read; None before."""
        code = self.process.poll()
        if code is not None:
            for thread in self.readers:
                thread.join(_READ_S)  # what it has started may hold its pipes open for ever
            self.readers.clear()
        return code

    def say(self, text: str) -> None:
        """Send a line; one that has ended does not hear it."""
        with suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(text.encode() + b"\n")
            self.process.stdin.flush()


def run_on_hosts(choices: Choices) -> None:
    """Run the program on all machines of `choices.hosts`, to its end.

    Raises:
        ConfigError: when a machine cannot be reached, or does not fit.
        as `start.start`.
    """
    parts = shares(choices)
    check_debug_rank(choices, sum(part.slots for part in parts))
    if choices.debug_rank is not None:
        raise ConfigError("debug_rank", "one machine, whose terminal can be given away", found="-H or --hostfile")
    commands, variables = commands_for(choices, parts), variables_for(choices, environment.variables())
    if choices.dry_run:
        for command in commands:
            print(shlex.join(command))
        if variables:
            print("# with these variables, sent to standard input:", *(f"{name}=..." for name in sorted(variables)))
        return
    _Launch(choices, parts, commands, variables).run()


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Launch:
    """The launchers of all machines, from start to end."""

    def __init__(
        self,
        choices: Choices,
        hosts: Sequence[Host],
        commands: Sequence[Sequence[str]],
        variables: Mapping[str, str],
    ) -> None:
        self._choices, self._hosts, self._commands, self._variables = choices, hosts, commands, variables
        self._screen = Screen((1, 2), colours=environment.wants_colours(), prefixes=False)
        self._news: queue.Queue[None] = queue.Queue()
        self._parts: list[_Part] = []
        self._signals: list[int] = []
        self._lost: list[_Part] = []

    def run(self) -> None:
        """Run to the end; raises what went wrong."""
        with collected_signals(self._signals):
            try:
                for host, command in zip(self._hosts, self._commands, strict=True):
                    self._parts.append(self._begin(host, command))
                self._meet()
                self._watch()
            finally:
                self._end()
        self._conclude()

    def _begin(self, host: Host, command: Sequence[str]) -> _Part:
        # in a session of its own: Ctrl-C at the terminal comes from here alone, and so once
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            process = subprocess.Popen(command, start_new_session=True, **pipes)
        except FileNotFoundError as error:
            raise ConfigError("hosts", "a program ssh on this machine", found=str(error)) from None
        part = _Part(host, process)
        part.say(json.dumps(dict(self._variables)))
        for stream, pipe in enumerate((process.stdout, process.stderr)):
            assert pipe is not None
            thread = threading.Thread(target=self._read, args=(part, stream, pipe), daemon=True)
            thread.start()
            part.readers.append(thread)
        return part

    def _read(self, part: _Part, stream: int, pipe: IO[bytes]) -> None:
        lines = Lines()
        with pipe:
            while data := pipe.read1():  # type: ignore[attr-defined]
                for piece in lines.feed(data):
                    self._take(part, stream, piece)
        for piece in lines.end():
            self._take(part, stream, piece)
        self._news.put(None)

    def _take(self, part: _Part, stream: int, piece: Piece) -> None:
        if piece.text.startswith(_MARK):
            said = json.loads(piece.text[len(_MARK) :])
            if "ready" in said:
                part.ready = Description(**said["ready"])
                part.words.clear()  # what ssh or a login shell had to say
            part.failure = Failure(**said["failure"]) if "failure" in said else part.failure
            part.ended = said.get("ended", part.ended)
            part.port = int(said.get("port", part.port))
            self._news.put(None)
        elif part.ready is not None and not (stream == 1 and (part.failure or part.ended)):
            self._screen.show(0, stream, piece)
        else:
            part.words.append(piece.text.decode(errors="replace"))

    def _meet(self) -> None:
        """Wait until all launchers are there, compare them, and let them go."""
        self._await(self._parts, lambda part: part.ready is not None)
        found = [part.ready for part in self._parts if part.ready is not None]
        compare(found)
        address = self._address(found)
        if not self._choices.quiet:
            names = ", ".join(f"{part.host.name} {part.host.slots}" for part in self._parts)
            total = sum(part.host.slots for part in self._parts)
            self._screen.tell(f"lockstep run: {total} worker{'s'[: total != 1]} on {names}")
        first = self._parts[0]
        first.say(f"serve {address}")
        self._await([first], lambda part: part.port > 0)
        for part in self._parts:
            part.say(f"go {address} {first.port} {time.time_ns()}")

    def _await(self, parts: Sequence[_Part], has_said: Callable[[_Part], bool]) -> None:
        deadline = time.monotonic() + self._choices.start_timeout
        while not all(map(has_said, parts)):
            self._wait()
            for part in parts:
                if not has_said(part) and part.code() is not None:
                    raise self._unreachable(part)
            if self._signals:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                late = ", ".join(part.host.name for part in parts if not has_said(part))
                raise ConfigError("hosts", f"machines that answer within {self._choices.start_timeout:g} s", found=late)

    def _address(self, found: Sequence[Description]) -> str:
        """The first machine, as all the others reach it; names may be known to this user's ssh alone."""
        if len(found) == 1:
            return _LOOPBACK
        callers = [each.caller for each in found if each.caller]
        seen = found[0].address or (callers[0] if callers else _LOOPBACK)
        return self._choices.master_addr or seen

    def _watch(self) -> None:
        """Wait for the end, passing signals on."""
        told, deadline = 0, float("inf")
        while any(part.process.poll() is None for part in self._parts):
            self._wait()
            while told < len(self._signals):
                for part in self._parts:
                    part.say(f"signal {self._signals[told]}")
                told += 1
                if told > 1:
                    deadline = time.monotonic() + PATIENCE
            self._lost = self._lost or [part for part in self._parts if part.is_lost]
            if deadline == float("inf") and any(part.has_fallen for part in self._parts):
                self._hang_up()  # the others may wait for it in vain
                deadline = time.monotonic() + FAILURE_GRACE + PATIENCE
            if time.monotonic() > deadline:
                return

    def _wait(self) -> None:
        with suppress(queue.Empty):
            self._news.get(timeout=_POLL_S)

    def _hang_up(self) -> None:
        """Close the lines to all launchers; each then ends its workers."""
        for part in self._parts:
            with suppress(OSError):
                assert part.process.stdin is not None
                part.process.stdin.close()

    def _end(self) -> None:
        self._hang_up()
        deadline = time.monotonic() + PATIENCE + 1
        for part in self._parts:
            try:
                part.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _terminate(part.process)
        for part in self._parts:
            part.code()
        self._screen.close()

    def _conclude(self) -> None:
        """Raise what the end amounts to."""
        first = Failure.first([part.failure for part in self._parts if part.failure is not None])
        ended = next((part for part in self._parts if part.process.returncode and not part.failure), None)
        if self._lost and not self._signals:
            names = ", ".join(part.host.name for part in self._lost)
            words = " ".join(" ".join(part.words[-3:]) for part in self._lost).strip()
            raise LockstepError(f"lost {names}: the connection broke, or the launcher there was killed. {words}")
        if first is not None:
            raise first.as_error()
        if self._signals and ended is not None:
            number, how = self._signals[0], ended.ended or "the workers have left"
            raise KeyboardInterrupt(how) if number == signal.SIGINT else InterruptedRunError(how, number)
        if ended is not None:
            words = ended.ended or " ".join(ended.words[-3:]) or "its launcher has ended"
            error = LockstepError(f"{ended.host.name}: {words}")
            error.exit_code = ended.process.returncode
            raise error

    def _unreachable(self, part: _Part) -> LockstepError:
        words = " ".join(" ".join(part.words[-4:]).split()) or f"exit code {part.process.returncode}"
        if part.process.returncode == 255:
            hint = f"`{shlex.join([*ssh_words(self._choices), part.host.login, 'true'])}` must work without a question."
            return ConfigError("hosts", f"a machine that ssh reaches ({part.host.name})", found=words, hint=hint)
        hint = f"Lockstep must be installed there for {self._choices.remote_python or sys.executable}."
        return ConfigError(
            "hosts", f"a machine on which a launcher can be started ({part.host.name})", found=words, hint=hint
        )
