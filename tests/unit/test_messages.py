"""Messages between processes: what is written is read again, and nothing else is."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from lockstep.messages import Integer, List, decode, encode


class Inner(msgspec.Struct, frozen=True):
    number: Integer
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    by_rank: dict[int, Inner] = {}
    names: List[str] = ()
    seconds: float | None = None


MESSAGE = Message({3: Inner(1 << 62, "é \udcff")}, ("a", "b"), 0.5)


def test_what_is_written_is_read_again() -> None:
    assert decode(encode(MESSAGE), Message) == MESSAGE
    assert encode(MESSAGE).isascii()
    assert decode(encode([MESSAGE]).encode(), list[Message]) == [MESSAGE]


def test_other_fields_are_ignored_and_missing_ones_have_defaults() -> None:
    assert decode('{"later": 1}', Message) == Message()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "Expected `object`, got `array`"),
        (
            '{"by_rank": {"x": {"number": 1}}}',
            r"Expected `int`, got `str` - at `key` in `\$\.by_rank`",
        ),
        ('{"by_rank": {"1": {}}}', "missing required field `number`"),
        ('{"by_rank": {"1": {"number": true}}}', "Expected `int`, got `bool`"),
        (
            f'{{"by_rank": {{"1": {{"number": {10**30}}}}}}}',
            "Expected `int` <= 9223372036854775807",
        ),
        (f'{{"names": {["a"] * 10_001}}}'.replace("'", '"'), "Expected `array` of length <= 10000"),
        ('{"seconds": NaN}', "expected a finite number, got NaN"),
    ],
)
def test_what_is_no_message_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(text, Message)


def test_numbers_that_are_not_finite_are_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode(Message(seconds=float("nan")))


# Threads that analyse the fields of a struct at the same time crash inside msgspec 0.22. Without
# the lock in `convert` this program crashes in every run.
THREADS = """
import importlib, sys, threading
from lockstep.messages import convert
from lockstep.watchdog import report

sys.setswitchinterval(1e-6)
value = {"kind": "lost", "sentence": "s", "ranks": [{"rank": 0, "state": "waits", "call": {"what": "x"}}]}
for _ in range(20):
    kind = importlib.reload(report).Report
    barrier = threading.Barrier(4)

    def work():
        barrier.wait()
        for _ in range(20):
            convert(value, kind)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_several_threads_may_read_the_first_message_of_a_kind() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
