"""A rank that stops within a collective, which all ranks have called: nobody is missing, and still
the others wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest

from support.desyncs import program
from support.programs import Ending, ProgramServer

PRELOAD = ("lockstep.watchdog.patches", "torch._dynamo", "torch.utils.data")

Run = Callable[[Sequence[tuple[str, int]]], list[list[Ending]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with closing(ProgramServer(PRELOAD)) as server:
        yield lambda programs: server.run(programs, tmp_path_factory.mktemp("programs"), 115)


# The last rank stops once it waits in the collective; the others call it when it has stopped. No
# step of this depends on how long another takes.
STOPS_WITHIN = """
import signal, threading
from lockstep.flight_recorder import current
pids = [None] * size
dist.all_gather_object(pids, os.getpid())
x = torch.ones(1 << 20)
def is_stopped():
    return pathlib.Path(f"/proc/{{pids[-1]}}/stat").read_text().rpartition(")")[2].split()[0] == "T"
def stop():
    while current.recorder.phase != "waits": time.sleep(0.001)
    time.sleep(0.05)  # so that it is past what it does before it waits, most often
    os.kill(os.getpid(), signal.SIGSTOP)
if last: threading.Thread(target=stop).start()
else:
    while not is_stopped(): time.sleep(0.001)
{others}
{call}
print("done", flush=True)
"""
CONTINUED_AFTER_THE_ERROR = """
if me == 0:
    import subprocess
    # for the case that this rank does not return from the call, and its process is ended there
    words = "while kill -0 $0 2>/dev/null; do sleep 0.1; done; kill -CONT $1"
    subprocess.Popen(["sh", "-c", words, str(os.getpid()), str(pids[-1])])
    try: {call}
    finally: os.kill(pids[-1], signal.SIGCONT)
"""
CONTINUED_AFTER_THE_LINE = """
def go_on():
    while "published nothing" not in pathlib.Path(f"{path}.0.err").read_text(): time.sleep(0.01)
    os.kill(pids[-1], signal.SIGCONT)
if me == 0: threading.Thread(target=go_on).start()
"""


ALL_REDUCE = "dist.all_reduce(x)"
MESSAGE = "dist.send(x, 0) if last else dist.recv(x, 1)"


def stops_within(call: str, others: str) -> str:
    """A program whose last rank stops within `call`, which the others reach later.

    Args:
        call: what all ranks call.
        others: what they do around it, so that the stopped rank goes on in the end.
    """
    return STOPS_WITHIN.format(call=call, others=others.replace("{call}", call))


@pytest.mark.parametrize("backend, hosts", [("shm", ""), ("gloo", ""), ("gloo", "ABB")])
def test_a_rank_that_is_stopped_within_a_collective_ends_it(
    run: Run, backend: str, hosts: str
) -> None:
    """As one does that is stopped before it: after a second, and with the same words."""
    text = stops_within(ALL_REDUCE, CONTINUED_AFTER_THE_ERROR)
    (ended,) = run([(program(text, backend, hosts), 3)])
    for rank, ending in enumerate(ended):
        said = " ".join(re.sub(r"^\[rank\d+\]:", "", ending.err, flags=re.MULTILINE).split())
        assert ending.code != 0, ending
        # The stopped one may be in C++ when it goes on, and ends with the report then. So does one
        # that was sending: Gloo does not end a send of which the kernel has taken a part.
        error = "DesyncError: " if rank < 2 and backend == "shm" else ""
        assert re.search(
            rf"{error}Rank 2 (on host B )?\(?.*is stopped while other ranks wait for it in "
            r"all_reduce\(float32\[1048576\], sum\)",
            said,
        ), ending


def test_a_host_all_of_whose_ranks_stop_within_a_collective_is_named(run: Run) -> None:
    """Nobody there can say so: the first host does, and ends nothing."""
    text = stops_within(ALL_REDUCE, CONTINUED_AFTER_THE_LINE)
    soon = {"LOCKSTEP_STALL_WARNING": "1"}
    (ended,) = run([(program(text, "gloo", "AB", **soon), 2)])
    assert [(ending.code, ending.out.endswith("done\n")) for ending in ended] == [(0, True)] * 2
    said = ended[0].err
    # the last that was published may be of a moment before the call
    beginning = r"held up: rank 0 has waited in|straggler: rank 1 has not reached"
    assert re.search(rf"({beginning}) all_reduce\(float32\[1048576\], sum\)", said), said
    assert re.search(r"Rank 1 is silent: its host \S+ has published nothing for", said), said


def test_a_sender_that_is_stopped_while_it_sends_ends_the_receive(run: Run) -> None:
    """Its message is on the way, but does not arrive."""
    (ended,) = run([(program(stops_within(MESSAGE, CONTINUED_AFTER_THE_ERROR), "gloo"), 2)])
    for ending in ended:
        said = " ".join(re.sub(r"^\[rank\d+\]:", "", ending.err, flags=re.MULTILINE).split())
        assert ending.code != 0, ending
        # the sender itself is in C++, and ends with the report
        assert re.search(r"Rank 1 .*is stopped while other ranks wait for it in recv", said)
