"""Programs that end right after an operation over shared memory, or during one."""

from __future__ import annotations

import re
import signal

import pytest

from support.faults import SOON_S
from support.programs import Ending, run_programs

IMPORTS = """
import sys, torch, torch.distributed as dist, lockstep
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def meet():
    # no rank is gone before another has started all its operations
    import pathlib, time
    pathlib.Path(f"{path}.started.{rank}").touch()
    while not all(pathlib.Path(f"{path}.started.{each}").exists() for each in range(size)):
        time.sleep(0.001)
"""
INIT = 'dist.init_process_group("shm", init_method="file://" + path, rank=rank, world_size=size)\n'
# each rank believes that it is on a host of its own, with Gloo between them
APART = (
    "from lockstep.transports.runtime import host_identity\nhost_identity.host_key = lambda: "
    "f'host {rank}'\n"
)

# What comes last in a program; every rank is to end with code 0 and without a word.
LAST_LINES = {
    "nothing": "",
    "destroy": "dist.destroy_process_group()",
    "all_reduce, destroy": "dist.all_reduce(torch.ones(3)); dist.destroy_process_group()",
    "under way": "dist.all_reduce(torch.ones(3), async_op=True)",
    "many under way": "works = [dist.all_reduce(torch.ones(300_000), async_op=True) for _ in range(9)]; meet()",
    "destroyed under way": "w = dist.all_reduce(torch.ones(3_000_000), async_op=True); dist.destroy_process_group()",
    "one rank under way": "rank or dist.all_reduce(torch.ones(3), async_op=True)",
    "future": "f = dist.all_reduce(torch.ones(3_000_000), async_op=True).get_future().then(lambda f: "
    "f.value())",
    "irecv without a message": "work = dist.irecv(torch.empty(3), 1 - rank)",
    "irecv from anyone": "work = dist.irecv(torch.empty(3)); dist.barrier()",
    "isend that nobody receives": "work = dist.isend(torch.ones(3_000_000), 1 - rank)",
    "several groups": "groups = [dist.new_group() for _ in range(3)]; dist.barrier(groups[1])",
    "a thread": "import threading; threading.Thread(target=dist.barrier).start()",
    "a waiting daemon": "import threading; rank or threading.Thread(target=dist.barrier, daemon=True).start()",
    "an exit function": "import atexit; atexit.register(dist.destroy_process_group); dist.barrier()",
    "a fork": "import os; os.fork() or os._exit(0); os.wait(); dist.barrier()",
    "backward": """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
model(torch.ones(2, 64)).sum().backward()
""",
}


LAST_LINES_APART = {
    "one rank under way": "work = rank or dist.all_reduce(torch.ones(3), async_op=True)",
    "destroyed under way": "work = dist.all_reduce(torch.ones(3), async_op=True); dist.destroy_process_group()",
    "one rank over Gloo": "work = rank or dist.all_to_all_single(torch.ones(4), torch.ones(4), async_op=True)",
}

LONG_SUMS = (
    "w = [dist.all_reduce(torch.ones(3_000_000, dtype=torch.half), async_op=True) for _ in "
    "range(3)]"
)
TIMES = 5  # what they are to show happens often, not always

# Rank 1 ends while the others wait for it: its last line, its exit code, and what the others say.
WAIT = "if rank != 1: dist.all_reduce(torch.ones(3))\n"
LOST = {
    "returns": ("", 0, r"RankLostError: shm: .*the process of rank 1 \(\d+\) has ended"),
    "exits": (
        "if rank == 1: sys.exit(3)",
        3,
        r"RankLostError: shm: .*the process of rank 1 \(\d+\) has ended",
    ),
    "ends at once": (
        "import os; rank == 1 and os._exit(0)",
        0,
        r"RankLostError: .* rank 1 \(\d+\) has ended",
    ),
    "raises": (
        "if rank == 1: raise ValueError('mine')",
        1,
        r"RankLostError: .* rank 1 \(\d+\) has ended",
    ),
    "destroys": (
        "dist.destroy_process_group()",
        0,
        r"RankLostError: shm: .*rank 1 has left the group",
    ),
}

# Ctrl-C in rank 1 at the first nap of its wait; the first rank waits for a message, the last in the
# same all-reduce.
INTERRUPTED = """
import signal, time, types
from lockstep.transports.runtime import backoff
if rank == 1:
    backoff.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: signal.raise_signal(signal.SIGINT))
rank == 0 and dist.recv(torch.empty(1), 1)
dist.all_reduce(torch.ones(3))
"""

Endings = dict[str, list[Ending]]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Endings:
    """How each rank of each program ended; they are run in one go."""
    start = IMPORTS + INIT
    programs = {name: (start + line, 2) for name, line in LAST_LINES.items()}
    programs |= {
        f"apart, {name}": (IMPORTS + APART + INIT + line, 2)
        for name, line in LAST_LINES_APART.items()
    }
    programs |= {f"long sums {time}": (start + LONG_SUMS, 2) for time in range(TIMES)}
    programs |= {
        f"{name}, {n}": (start + WAIT + line, n)
        for name, (line, *_) in LOST.items()
        for n in (2, 3)
    }
    programs["interrupted"] = (start + INTERRUPTED, 3)
    folder = tmp_path_factory.mktemp("programs")
    ended = run_programs(list(programs.values()), folder, timeout=110, at_once=2)
    return dict(zip(programs, ended, strict=True))


@pytest.mark.parametrize("name", [*LAST_LINES, *(f"apart, {name}" for name in LAST_LINES_APART)])
def test_a_program_ends_well_whatever_its_last_line_is(endings: Endings, name: str) -> None:
    assert [(rank.code, rank.out, rank.err) for rank in endings[name]] == [(0, "", "")] * 2


def test_an_interpreter_exits_while_long_sums_are_in_flight(endings: Endings) -> None:
    """A thread that comes back from C++ to an interpreter that is gone would take the process
    down.
    """
    for time in range(TIMES):
        assert [(rank.code, rank.err) for rank in endings[f"long sums {time}"]] == [(0, "")] * 2


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", LOST)
def test_the_others_end_soon_with_an_error_that_names_it(
    endings: Endings, name: str, ranks: int
) -> None:
    _, code, pattern = LOST[name]
    ended = endings[f"{name}, {ranks}"]
    assert ended[1].code == code, ended[1]
    assert ("ValueError: mine" in ended[1].err) == (name == "raises")
    for rank in (ended[0], *ended[2:]):
        assert rank.code == 1, rank
        assert re.search(pattern, rank.err), rank.err
        assert rank.at - ended[1].at < SOON_S


def test_ctrl_c_in_one_rank_ends_all(endings: Endings) -> None:
    ended = endings["interrupted"]
    assert ended[1].code == -signal.SIGINT, ended[1]
    assert ended[1].err.rstrip().endswith("KeyboardInterrupt")
    for rank in (ended[0], ended[2]):
        assert rank.code == 1
        assert "rank 1 gave up: KeyboardInterrupt" in rank.err, rank.err
        assert rank.at - ended[1].at < SOON_S
