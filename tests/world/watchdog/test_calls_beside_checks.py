"""The first difference after many equal turns, when collectives go on beside their pre-flight
checks.
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
    with closing(ProgramServer(PRELOAD, full_end=False)) as server:
        yield lambda programs: server.run(
            programs, tmp_path_factory.mktemp("programs"), 115, at_once=3
        )


# Equal turns, after which calls go on beside their checks. Then the last rank calls something else.
EQUAL_TURNS = """
def turn(t, how): return dist.all_reduce(t, async_op=how)
for number in range({turns}):
    work = turn(torch.ones(4), {how})
    if work: work.wait()
"""
DEVIATIONS = {
    "larger": "torch.ones(4 + (1 << 18) * last)",
    "a little larger": "torch.ones(4 + last)",
    "smaller": "torch.ones(4 - last)",
    "other shape": "torch.ones(2, 2) if last else torch.ones(4)",
    "other dtype of the same size": "torch.ones(4, dtype=torch.int32) if last else torch.ones(4)",
    "other dtype": "torch.ones(4).double() if last else torch.ones(4)",
}
OPERATIONS = {
    "other reduction": "dist.all_reduce(x, dist.ReduceOp.MAX)",
    "broadcast": "dist.broadcast(x, 0)",
    "all-gather": "dist.all_gather([torch.ones(4) for _ in range(size)], x)",
    "reduce": "dist.reduce(x, 0)",
    "all-to-all": "dist.all_to_all_single(torch.ones(2 * size), torch.ones(2 * size))",
    "barrier": "dist.barrier()",
    "named": "from lockstep.flight_recorder import named\n  with named('mine'): dist.all_reduce(x)",
}
GONE = {
    "exits": "sys.exit(0)",
    "raises": "raise ValueError('mine')",
    "killed": "os.kill(os.getpid(), 9)",
}
DIFFERS = r"DesyncError: Desync at collective #\d+ of the default group: rank 0 called all_reduce\(float32\[4\], sum\)"


def equal_turns(how: str = "False", turns: int = 50) -> str:
    """Turns in which all ranks make the same blocking, or asynchronous, call."""
    return EQUAL_TURNS.format(how=how, turns=turns)


def deviating(what: str, how: str = "False", last_how: str = "") -> str:
    """A program whose ranks call the same for long, asynchronously or not, and then an all-reduce
    of `what`.
    """
    text = equal_turns(how) + f"work = turn({what}, {last_how or how} if last else {how})\n"
    return text + "if work: work.wait()\nprint('wrong')"


def text_of(ending: Ending) -> str:
    """What it wrote, on one line, and without torch's prefix."""
    return " ".join(re.sub(r"^\[rank\d+\]:", "", ending.err, flags=re.MULTILINE).split())


def check(ended: Sequence[Ending], expected: str = DIFFERS) -> None:
    """Every rank has ended with the error, and none has used a value."""
    for ending in ended:
        assert ending.code == 1, ended
        assert re.search(expected, text_of(ending)), ended
        assert "wrong" not in ending.out


@pytest.mark.parametrize(
    ("backend", "hosts"), [("gloo", "AB"), ("shm", "AB"), ("gloo", "AABB"), ("shm", "AABB")]
)
def test_the_first_difference_after_equal_turns(run: Run, backend: str, hosts: str) -> None:
    """Nobody is ended by what arrives, no value is returned, and the error names both calls on all
    ranks.
    """
    texts = [deviating(what) for what in DEVIATIONS.values()]
    texts[0] = texts[0].replace("range(50)", "range(3000)")
    ends = [
        f"if last:\n  {call}\nelse: turn(x, False)\nprint('wrong')" for call in OPERATIONS.values()
    ]
    texts += [equal_turns() + end for end in ends]
    if hosts == "AABB":  # both ranks of the second host
        texts = [f"last = rank in (2, 3)\n{text}" for text in texts[1::4]]
    elif backend == "shm":
        texts = texts[::2]
    for ended in run([(program(text, backend, hosts), len(hosts)) for text in texts]):
        check(ended)


def test_one_rank_of_a_host_that_differs(run: Run) -> None:
    """Its neighbour finds it in shared memory, and the leader of the other host is within the
    call.
    """
    programs = [
        (program(deviating(DEVIATIONS[name]), "shm", "AABB"), 4)
        for name in ("smaller", "other dtype")
    ]
    programs.append(
        (program("last = rank in (0, 1)\n" + deviating(DEVIATIONS["smaller"]), "shm", "AABB"), 4)
    )
    for ended in run(programs):
        check(ended, r"DesyncError: Desync at collective #\d+ .*all_reduce\(float32\[4\], sum\)")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_first_difference_of_asynchronous_calls(run: Run, backend: str) -> None:
    """Also where one rank waits at once and another one later."""
    larger, smaller, other = (
        DEVIATIONS[name] for name in ("larger", "smaller", "other dtype of the same size")
    )
    ways = [
        (larger, "True"),
        (other, "True"),
        (larger, "False", "True"),
        (larger, "True", "False"),
        (smaller, "True"),
    ]
    for ended in run([(program(deviating(*way), backend, "AB"), 2) for way in ways]):
        check(ended)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_is_gone_after_equal_turns(run: Run, backend: str) -> None:
    expected = {
        "exits": "exited while other ranks waited",
        "raises": "raised ValueError: mine",
        "killed": "died while",
    }
    texts = [
        equal_turns() + f"if last: {how}\nturn(x, False)\nprint('wrong')" for how in GONE.values()
    ]
    for how, ended in zip(
        GONE, run([(program(text, backend, "AB"), 2) for text in texts]), strict=True
    ):
        check(ended[:1], expected[how])
        assert "wrong" not in ended[1].out


# DistributedDataParallel, whose buckets are asynchronous; one rank has a smaller last batch of
# gradients to send
BUCKETS = """
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.05)
for number in range(20): model(torch.ones(2, 64)).sum().backward()
if last: turn = dist.all_reduce(torch.ones(7))
else: model(torch.ones(2, 64)).sum().backward()
print('wrong')
"""


def test_buckets_of_gradients_go_on_beside_their_checks(run: Run) -> None:
    programs = [(program(BUCKETS, backend, "AB"), 2) for backend in ("gloo", "shm")]
    for ended in run(programs):
        check(ended, "DesyncError: Desync at collective #")


# A rank starts an asynchronous collective, and another one does so when it has had a message from
# that rank.
AFTER_A_MESSAGE = """
for size_ in (3, 5):
    if rank == 0:
        work = dist.all_reduce(torch.ones(size_), async_op=True)
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
        work = dist.all_reduce(torch.ones(size_), async_op=True)
    work.wait()
print("done")
"""


def test_an_asynchronous_call_waits_for_nobody(run: Run) -> None:
    programs = [(program(AFTER_A_MESSAGE, backend, "AB"), 2) for backend in ("gloo", "shm")]
    for ended in run(programs):
        assert [(ending.code, ending.out.endswith("done\n")) for ending in ended] == [
            (0, True)
        ] * 2, ended
