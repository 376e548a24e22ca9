"""The native and the Python form of what every call writes: the same bytes, and what the native one
compares and refuses.
"""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.flight_recorder import call_writer
from lockstep.flight_recorder.layout import DEPTH, RING, Layout, StateWords

LAYOUT = Layout(2)
OFFSETS = (LAYOUT.group_keys, LAYOUT.last_sequences, LAYOUT.record_numbers, LAYOUT.ring)
AT = StateWords()
KEY = 2**64 - 5

needs_native = pytest.mark.skipif(
    call_writer._native is None, reason="installed without the native extension"
)


def make_memory(slot: int = -1) -> memoryview:
    """A flight recorder's memory, with the group `KEY` in `slot` if there is one."""
    memory = memoryview(bytearray(LAYOUT.total))
    if slot >= 0:
        memory.cast("Q")[(LAYOUT.group_keys >> 3) + slot] = KEY
    return memory


def native(memory: memoryview) -> Any:
    assert call_writer._native is not None
    return call_writer.make_call_writer(memory, LAYOUT)


def enter(
    writer: Any,
    sequence: int,
    fingerprint: int = 1,
    slot: int = 0,
    key: int = KEY,
    peer: int = -1,
    tag: int = 0,
    loop: int | None = None,
) -> int:
    """Record a call; the times and texts follow from its sequence number."""
    texts = (sequence + 1, sequence + 2, 2**32 - 1, 0)
    call = (key, slot, sequence, fingerprint, 2**63 + sequence, *texts, peer, 3)
    number: int = writer.enter(*call, 0.1 * sequence + 0.7, tag, loop)
    return number


def write_everything(writer: Any, memory: memoryview) -> None:
    """More records than the ring has room for, waits, and a message."""
    for sequence in range(1, RING + DEPTH):
        memory.cast("q")[AT.batch] = sequence if sequence % 3 else -sequence
        memory.cast("Q")[AT.loop] = 2**64 - sequence
        number = enter(writer, sequence, fingerprint=2**64 - sequence, slot=sequence % 64)
        writer.begin_wait(number, 0.1 * sequence)
        writer.end_wait(0.1 * sequence + 1.7)
        if sequence % 5:
            writer.leave(number, 0.3 * sequence)
        writer.leave(number, 0.4 * sequence)
    assert enter(writer, 0, peer=7, tag=-(2**40), loop=0) == RING + DEPTH
    writer.leave(1, 5.0)  # its row is another record's
    writer.begin_wait(RING + DEPTH, 1.0)


@needs_native
def test_both_forms_write_the_same_bytes() -> None:
    written = []
    for make in (native, lambda memory: call_writer.CallWriter(memory, LAYOUT)):
        memory = make_memory()
        write_everything(make(memory), memory)
        written.append(bytes(memory))
    assert written[0] == written[1]
    assert written[0] != bytes(LAYOUT.total)


@needs_native
def test_what_is_attached_is_written_to_and_what_was_is_released() -> None:
    before, after = make_memory(), make_memory()
    writer = native(before)
    writer.attach(after)
    enter(writer, 1)
    assert bytes(before) == bytes(LAYOUT.total) != bytes(after)
    before.release()


@needs_native
@pytest.mark.parametrize(
    ("theirs", "agrees"),
    [
        pytest.param({}, True, id="same"),
        pytest.param({"fingerprint": 2}, False, id="another signature"),
        pytest.param({"loop": 2}, False, id="another loop"),
        pytest.param({"key": 9, "fingerprint": 2}, True, id="another group"),
        pytest.param({"sequence": 5 + DEPTH, "fingerprint": 2}, True, id="a later one"),
        pytest.param({"sequence": 4, "fingerprint": 2}, True, id="not called yet"),
        pytest.param({"slot": 63}, True, id="same in another slot"),
        pytest.param({"slot": 63, "fingerprint": 2}, False, id="other in another slot"),
        pytest.param({"slot": 63, "is_member": False, "fingerprint": 2}, True, id="no member"),
    ],
)
def test_a_call_is_compared_with_that_of_another_rank(theirs: dict[str, Any], agrees: bool) -> None:
    is_member = theirs.pop("is_member", True)
    slot = theirs.get("slot", 0)
    own, other = make_memory(3), make_memory(slot if is_member else -1)
    enter(native(other), **{"sequence": 5, **theirs})
    writer = native(own)
    assert writer.agrees(enter(writer, 5, slot=3), 3, (other,)) is agrees


@needs_native
def test_the_first_rank_that_has_called_it_is_compared() -> None:
    memories = [make_memory(0) for _ in range(4)]
    writer = native(memories[0])
    number = enter(writer, 5)
    enter(native(memories[2]), 5)
    enter(native(memories[3]), 5, fingerprint=2)
    assert writer.agrees(number, 0, tuple(memories[1:]))
    assert writer.agrees(number, 0, ())
    assert not writer.agrees(number, 0, (memories[1], memories[3], memories[2]))
    assert not writer.agrees(number, 0, (memoryview(bytearray(8)),))


@needs_native
def test_invalid_arguments_are_refused() -> None:
    module: Any = call_writer._native
    memory = make_memory()
    writer = native(memory)
    empty = module.CallWriter.__new__(module.CallWriter)
    for call in (
        lambda: empty.leave(1, 1.0),
        lambda: empty.end_wait(1.0),
        lambda: writer.leave(1),
        lambda: writer.enter(1, 2, 3),
        lambda: enter(writer, 1, fingerprint="1"),  # type: ignore[arg-type]
        lambda: writer.agrees(1, 0, 5),
        lambda: writer.attach(bytes(LAYOUT.total)),
    ):
        with pytest.raises((TypeError, BufferError)):
            call()
    for slot in (-1, 64):
        with pytest.raises(ValueError, match="no such slot"):
            enter(writer, 1, slot=slot)
    with pytest.raises(ValueError, match="does not fit"):
        module.CallWriter(memory[: LAYOUT.ring], *OFFSETS)
    with pytest.raises(ValueError, match="not that of a flight recorder"):
        module.CallWriter(memory, *OFFSETS[::-1])
    assert bytes(memory) == bytes(LAYOUT.total)
