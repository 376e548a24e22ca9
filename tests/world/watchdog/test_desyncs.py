"""No silent hang: however ranks diverge, every living one ends soon with an error that names the
culprit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from support.desyncs import CASES, GLOO_CASES, program
from support.programs import Ending, ProgramServer

SOON_S = (
    30.0  # load must not make a test fail; how soon it is on a quiet host is in docs/watchdog.md
)
DEAD = ("killed", "stopped")  # the last rank says nothing
QUIET = (
    "one rank alone, the others end",
    "group on one rank, the others end",
    "exits early",
    "monitored barrier, one exits",
    "uneven batches",
    "skipped batch",
)  # those that leave do so without an error
OWN = {  # what the last rank says instead
    "exception": "ValueError",
    "exception beside a thread": "ValueError",
    "exception while the others compute": "ValueError",
    "undefined name": "NameError",
    "full disk": "OSError",
    "unused parameters": "RuntimeError",
}
# over Gloo, those that mean something else there
GLOO = (
    "one rank alone, the others go on",
    "other shape",
    "other group",
    "exception",
    "killed",
    "exits early",
    "other dtype of the same size",
    "stopped",
    "recv without send",
    "skipped batch",
    "unused parameters",
    "other tag",
    "both send first",
    "group on one rank",
    "group on one rank, the others end",
    "groups in another order",
)
ALONE = (
    "one rank alone, the others end",
    "group on one rank, the others end",
)  # the last rank gets the error
PRELOAD = ("lockstep.watchdog.patches", "torch._dynamo", "torch.utils.data")

Run = Callable[[Sequence[tuple[str, int]]], list[list[Ending]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with closing(ProgramServer(PRELOAD, full_end=False)) as server:
        yield lambda programs: server.run(
            programs, tmp_path_factory.mktemp("programs"), 115, at_once=3
        )


def check(name: str, ended: Sequence[Ending]) -> None:
    """Every living rank of the case `name` has ended soon, and said what it should."""
    size, expected = len(ended), (CASES | GLOO_CASES)[name][1]
    for rank, ending in enumerate(ended):
        last = rank == size - 1
        alone = name in ALONE
        if (last and name in DEAD) or (name in QUIET and last != alone):
            continue
        assert ending.code not in (0, -6, -11), (rank, ending)
        began = float(re.findall(r"began ([\d.]+)", ending.out)[0])
        assert ending.at - began < SOON_S, (rank, ending)
        text = " ".join(
            re.sub(r"^\[rank\d+\]:", "", ending.err, flags=re.MULTILINE).split()
        )  # without torch's prefix
        if last and name in OWN:
            assert OWN[name] in text, (rank, ending.err)
        else:
            assert re.search(expected, text), (rank, ending.err)
            assert re.search(r"(DesyncError|RankLostError): ", text), (rank, ending.err)
            assert 'File "program"' in text, "it is raised at the user's own line"
    assert "wrong" not in "".join(ending.out for ending in ended)


def cases(names: Sequence[str], backend: str, size: int) -> list[tuple[str, int]]:
    return [(program(CASES[name][0], backend), size) for name in names]


NAMES = list(CASES)
PARTS = [NAMES[start::3] for start in range(3)]  # so that no test takes too long


@pytest.mark.parametrize(("part", "size"), [(0, 3), (1, 3), (2, 3), (0, 2)])
def test_every_kind_of_desync_over_shared_memory(run: Run, part: int, size: int) -> None:
    """On three ranks, where one differs from the others; some kinds on two as well, where no
    majority is right.
    """
    names = PARTS[part]
    for name, ended in zip(names, run(cases(names, "shm", size)), strict=True):
        check(name, ended)


def test_over_gloo(run: Run) -> None:
    """Waits inside C++ end as well, also those of a backward pass."""
    for name, ended in zip(GLOO, run(cases(GLOO, "gloo", 2)), strict=True):
        check(name, ended)


def test_what_only_gloo_has(run: Run) -> None:
    endings = run([(program(text, "gloo"), 2) for text, _ in GLOO_CASES.values()])
    for name, ended in zip(GLOO_CASES, endings, strict=True):
        check(name, ended)


FIRST_EXITS = "if me == 0: sys.exit(0)\ndist.all_reduce(x)"
LAST_PARTS = "dist.all_reduce(x.int() if last else x)"  # and the program is over


def test_between_hosts(run: Run) -> None:
    names = (
        "other shape",
        "exception",
        "killed",
        "stopped",
        "exits early",
        "recv without send",
        "skipped batch",
    )
    programs = [(program(CASES[name][0], "shm", "AABB"), 4) for name in names]
    pairs = (
        "other dtype of the same size",
        "uneven batches, then a like metric",
        "layers in another order",
    )
    programs += [(program(CASES[name][0], "gloo", "AB"), 2) for name in pairs]
    names = (*names, *pairs)
    for text in (CASES["killed"][0], FIRST_EXITS, LAST_PARTS):
        programs.append((program(text, "shm", "AB"), 2))
    *ended, alone, first, at_end = run(programs)
    for name, endings in zip(names, ended, strict=True):
        check(name, endings)
    assert re.search(
        r"RankLostError: Rank 1 (on \S+ )?died while other ranks waited",
        " ".join(alone[0].err.split()),
    ), alone
    assert re.search(
        r"Rank 0 (on \S+ )?exited while other ranks waited", " ".join(first[1].err.split())
    ), first
    for ending in at_end:
        assert ending.code == 1, at_end
        assert "all_reduce(int32[4], sum)" in " ".join(ending.err.split()), at_end


def test_deadlocks_between_hosts(run: Run) -> None:
    names = ("other tag", "both send first", "group on one rank")
    *messages, groups = run([(program(CASES[name][0], "gloo", "AB"), 2) for name in names])
    for name, ended in zip(names, messages, strict=False):
        check(name, ended)
    for ending in groups:
        text = " ".join(re.sub(r"^\[rank\d+\]:", "", ending.err, flags=re.MULTILINE).split())
        assert re.search(CASES["group on one rank"][1], text), ending
    assert "DesyncError: " in groups[0].err
    assert groups[1].code == 86, (
        "Gloo connects the ranks in C++, where no error gets one that waits for another host"
    )


SWAPPED = """
a, b = torch.tensor([1.]), torch.tensor([2.])
def first(): dist.all_reduce(a)
def second(): dist.all_reduce(b)
for call in (second, first) if last else (first, second): call()
print("values", a.item(), b.item())
"""
# the same in the metrics of a program, and asynchronously: which is the first to come differs from
# run to run
METRICS = """
class Loss:
    value = torch.tensor([1.])
    def sync(self): return dist.all_reduce(self.value, async_op=True)
class Accuracy:
    value = torch.tensor([2.])
    @torch.no_grad()
    def sync(self): return dist.all_reduce(self.value, async_op=True)
def finish(metrics):
    for work in [metric.sync() for metric in metrics]: work.wait()
if last: time.sleep(0.3)
finish([Loss(), Accuracy()])
if rank == 0: time.sleep(0.3)
finish([Accuracy(), Loss()] if last else [Loss(), Accuracy()])
print("values", Loss.value.item())
"""
# ranks that take turns, each of which looks like a swap if one only looks at two collectives
TURNS = """
def f(): dist.all_reduce(x.clone(), **kind)
def g(): dist.all_reduce(x.clone(), **kind)
def branch(turn):
    if turn % 2: f()
    else: g()
for kind in ({}, {"async_op": True}):
    for step in range(6):  # branches of one function
        if (step + rank) % 2: dist.all_reduce(x.clone(), **kind)
        else: dist.all_reduce(x.clone(), **kind)
    for step in range(6):  # and functions that they call
        if (step + rank) % 2: f()
        else: g()
    for step in range(6): (f, g)[(step + rank) % 2]()
    for step in range(6): branch(step + rank)
    for root in range(size):
        if root == rank: dist.broadcast(x.clone(), root)
        else: dist.broadcast(x.clone(), root)
    for batch in DataLoader(torch.arange(6)):  # the parts of a batch that this rank has, of several
        for task in (f, g)[(int(batch) + rank) % 2 :][:1]: task()
    if rank: f(); g()
    else: f(); g()
dist.barrier()
print("done")
"""
BRANCHES = """
for _ in range(20):
    if rank == 0: dist.broadcast(x, 0)
    else: dist.broadcast(x, 0)
print("done")
"""
NAMED = """
from lockstep.flight_recorder import named
with named("loss" if last else "accuracy"): dist.all_reduce(x)
print("wrong")
"""


def test_like_collectives_on_other_lines(run: Run) -> None:
    """A warning with both lines, or in strict mode, or with names, an error before any value is
    returned.
    """
    programs = [
        (program(SWAPPED, "shm", LOCKSTEP_WATCHDOG="strict"), 2),
        (program(BRANCHES, "shm"), 2),
        (program(BRANCHES, "shm", "AB"), 2),
        (program(NAMED, "shm"), 2),
        (program(SWAPPED, "gloo", "AB", LOCKSTEP_WATCHDOG="strict"), 2),
    ]
    strict, branches, apart, named, strict_apart = run(programs)
    for ended in (branches, apart):
        assert [ending.code for ending in ended] == [0] * 2
        text = "".join(ending.err for ending in ended)
        assert text.count("warning: ") == 1  # said once
        assert len(set(re.findall(r"at program:\d+", text))) == 2
    for ending in (*strict, *named, *strict_apart):
        assert ending.code == 1, ending
        assert "DesyncError: " in ending.err
        assert "values" not in ending.out
        assert "wrong" not in ending.out
    assert "'loss'" in named[0].err


def test_swapped_collectives_end_before_the_second_value_is_returned(run: Run) -> None:
    pairs = [
        (program(text, *where), 2) for text in (SWAPPED, METRICS) for where in (("shm",), ("gloo",))
    ]
    endings = run([*pairs, (program(SWAPPED, "shm", "AB"), 2), (program(METRICS, "shm"), 3)])
    for ending in (ending for ended in endings for ending in ended):
        assert ending.code == 1, ending
        assert re.search("DesyncError: Swapped collectives at collective #", ending.err), ending
        assert "values" not in ending.out


def test_ranks_that_take_turns_have_swapped_nothing(run: Run) -> None:
    endings = run(
        [(program(TURNS, "shm"), 2), (program(TURNS, "gloo"), 2), (program(TURNS, "shm", "AAB"), 3)]
    )
    for ended in endings:
        assert [(ending.code, ending.out.endswith("done\n")) for ending in ended] == [
            (0, True)
        ] * len(ended), ended


ENDLESS = """
def batches():
    epoch = DataLoader(torch.arange(8.)[: 8 - 2 * rank])
    while True: yield from epoch
data = batches()
class Data(torch.utils.data.IterableDataset):
    def __iter__(self): return data
step = 0
for number, batch in enumerate(DataLoader(Data(), batch_size=None)):
    if last and number == 3: continue  # a bad one
    dist.all_reduce(batch)
    step += 1
    if step == 20: break
print("done")
"""


def test_a_batch_that_one_rank_skips_is_a_warning_or_in_strict_mode_an_error(run: Run) -> None:
    programs = [(program(ENDLESS, "shm"), 2), (program(ENDLESS, "gloo", "AB"), 2)]
    *fitting, strict = run([*programs, (program(ENDLESS, "shm", LOCKSTEP_WATCHDOG="strict"), 2)])
    for ended in fitting:
        assert [(ending.code, ending.out.endswith("done\n")) for ending in ended] == [
            (0, True)
        ] * 2, ended
        text = "".join(ending.err for ending in ended)
        assert text.count("warning: ") == 1, text
        assert re.search(r"on batch 3.*on batch 4|on batch 4.*on batch 3", text), text
    for ending in strict:
        assert ending.code == 1, ending
        assert re.search(
            r"(?s)DesyncError: .*(on batch 3.*on batch 4|on batch 4.*on batch 3)", ending.err
        ), ending


SLOW = """
class Data:
    def __len__(self): return 3
    def __getitem__(self, i):
        if last and i == 1: {wait}
        return torch.ones(4)
for batch in DataLoader(Data()): dist.all_reduce(batch)
print("done")
"""
HOLDS_THE_INTERPRETER = (
    "import ctypes; ctypes.PyDLL(None).usleep(900_000); ctypes.PyDLL(None).usleep(900_000)"
)
FOR_EVER = "if last:\n  while True: pass\ndist.all_reduce(x)"


def test_slow_is_not_stuck(run: Run) -> None:
    """A warning names the late rank and where it is, also inside a loader and C code; an error
    comes at the limit.
    """
    soon = {"LOCKSTEP_STALL_WARNING": "0.6"}
    programs = [
        (program(SLOW.format(wait="time.sleep(2)"), "shm", **soon), 2),
        (program(SLOW.format(wait=HOLDS_THE_INTERPRETER), "gloo", **soon), 2),
        (program(FOR_EVER, "shm", **soon, LOCKSTEP_STALL_TIMEOUT="1.5"), 2),
        (program(SLOW.format(wait="time.sleep(2)"), "shm", **soon, LOCKSTEP_DEBUG_RANK="1"), 2),
    ]
    slow, held, stuck, debugged = run(programs)
    assert [ending.code for ending in (*slow, *held, *debugged)] == [0] * 6
    for ended in (slow, held):
        said = " ".join(ended[0].err.split())
        assert re.search(
            r"straggler: rank 1 has not reached all_reduce\(float32\[1, 4\], sum\)", said
        ), said
        assert re.search(r"Rank 1 is at program:\d+ in __getitem__", said), said
    for ending in stuck:
        assert ending.code == 1
        assert "StallError: Rank 1 did not reach all_reduce" in " ".join(ending.err.split()), ending
    assert debugged[0].err == ""


TWO_JOBS = """
job, rank, size = rank // 2, rank % 2, 2
"""
JOB = """
if job and rank: raise ValueError("mine")
for _ in range(30):
    dist.all_reduce(x); time.sleep(0.02)
print("done")
"""


def test_two_jobs_at_once_are_not_confused(run: Run) -> None:
    text = program(JOB, "shm").replace(
        "last, me =", "job, rank, size = rank // 2, rank % 2, 2\nlast, me ="
    )
    (ended,) = run([(text.replace('"file://" + path', '"file://" + path + str(job)'), 4)])
    assert [ending.code for ending in ended] == [0, 0, 1, 1]
    assert [ending.out.endswith("done\n") for ending in ended] == [True, True, False, False]


INNOCENT = """
if os.fork() == 0: raise ValueError("a child is no rank")
os.wait()
dist.barrier()
for call in (lambda: dist.broadcast(x, 9), lambda: dist.all_gather([x], x), lambda: dist.send(x, 9)):
    try: call()
    except (ValueError, RuntimeError): pass  # by every rank alike
    else: print("wrong")
dist.all_reduce(x)
if rank == 0:
    dist.send(x, 1); sys.exit(0)  # before it is received
time.sleep(0.5)
dist.recv(x, 0)
try: dist.all_reduce(torch.ones(2), group=dist.new_group([1], use_local_synchronization=True))
except RuntimeError: print("wrong")
print("done")
"""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_is_no_fault(run: Run, backend: str) -> None:
    (ended,) = run([(program(INNOCENT, backend), 2)])
    assert [ending.code for ending in ended] == [0, 0], ended
    assert ended[1].out.endswith("done\n")
    assert "wrong" not in ended[0].out + ended[1].out
    assert "Desync" not in ended[0].err + ended[1].err


# messages and groups that belong together, each in the presence of a rank that takes its time
MESSAGES = """
from datetime import timedelta
from torch.distributed.algorithms.join import Join
a, b = torch.full((4,), float(rank)), torch.full((2,), float(rank))
big, other = torch.full((1 << 22,), float(rank)), torch.empty(1 << 22)
if rank == 0:
    for work in [dist.isend(a, 1, tag=1), dist.isend(b, 1, tag=2), dist.isend(a, 1)]: work.wait()
    dist.send(big, 1)
elif rank == 1:
    dist.recv(x, 2)  # which takes its time, while rank 0 sends
    for work in [dist.irecv(b, 0, tag=2), dist.irecv(a, 0, tag=1)]: work.wait()
    dist.recv(x)  # from any rank
    dist.recv(other, 0)
    assert a.sum() + b.sum() + x.sum() + other.sum() == 0
elif last: time.sleep(3); dist.send(x, 1)
for send in (dist.isend, dist.irecv), (dist.irecv, dist.isend):  # a ring, in either order
    ends = {dist.isend: (big, (rank + 1) % size), dist.irecv: (other, (rank - 1) % size)}
    for work in dist.batch_isend_irecv([dist.P2POp(op, *ends[op]) for op in send]): work.wait()
if rank: dist.all_reduce(x, group=dist.new_group([1, 2], use_local_synchronization=True))
dist.distributed_c10d._world.group_count = 10  # names of groups: since torch 2.15 the one before counts, on its members
if rank < 2: time.sleep(rank); dist.new_group([0, 1])  # the others never make it, which they should
else: dist.distributed_c10d._world.group_count += 1
for ranks in ([0, 1], [1, 2], [0, 1, 2]): dist.new_group(ranks)
if dist.get_backend() == "gloo":
    dist.monitored_barrier()
    try: dist.monitored_barrier(timeout=timedelta(seconds=0.5)) if rank == 0 else time.sleep(1.5)
    except RuntimeError as error: assert "failed to pass monitoredBarrier" in str(error), error
    else: assert rank, "nobody has come"
    dist.destroy_process_group(dist.new_group([0]))
else:
    model = DDP(torch.nn.Linear(4, 4))
    with Join([model]):
        for batch in DataLoader(torch.ones(8 + 8 * rank, 4), batch_size=4): model(batch).sum().backward()
print("done")
sys.stdout.flush()
"""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_messages_and_groups_that_belong_together(run: Run, backend: str) -> None:
    (ended,) = run([(program(MESSAGES, backend, LOCKSTEP_STALL_WARNING="60"), 3)])
    assert [(ending.code, ending.out.endswith("done\n")) for ending in ended] == [(0, True)] * 3, (
        ended
    )
    assert not any("lockstep: " in ending.err for ending in ended), ended


LATE = """
import atexit, threading
noticed = threading.Event()
def look():
    while "note: " not in pathlib.Path(path + f".{rank}.err").read_text(): time.sleep(0.02)
    noticed.set()
threading.Thread(target=look, daemon=True).start()  # so that whoever uploads is at one line
def upload(): noticed.wait()
"""
LATE_ENDS = {  # how the last rank stays behind, and what is shown
    "upload()": r"its main thread is at program:\d+ in upload",
    "dist.destroy_process_group()\n    upload()": r"its main thread is at program:\d+ in upload",
    "atexit.register(upload)": r"its main thread is at program:\d+ in upload",
    "threading.Thread(target=upload, name='uploader').start()": r"the thread uploader keeps it running, at program:\d+",
    "threading.Thread(target=upload, name='uploader').start(); sys.exit(4)": r"the thread uploader keeps it running",
}


def test_what_keeps_the_last_rank_is_shown_and_not_ended(run: Run) -> None:
    texts = [f"{LATE}\nif last:\n    {way}" for way in LATE_ENDS]
    endings = run([(program(text, "shm", LOCKSTEP_STALL_WARNING="0.5"), 2) for text in texts])
    for (way, expected), ended in zip(LATE_ENDS.items(), endings, strict=True):
        assert [ending.code for ending in ended] == [0, 4 * ("sys.exit" in way)], ended
        assert re.search(
            r"note: rank 1 still runs, \d+ s after all other ranks have ended", ended[1].err
        ), ended
        assert re.search(expected, ended[1].err), ended
        assert "note: " not in ended[0].err, ended


OFF = (
    "import threading\nprint([thread.name for thread in threading.enumerate()], "
    "type(dist.group.WORLD))"
)


def test_it_can_be_turned_off(run: Run) -> None:
    (ended,) = run([(program(OFF, "gloo", LOCKSTEP_WATCHDOG="off"), 2)])
    assert [ending.code for ending in ended] == [0, 0]
    assert "watchdog" not in ended[0].out


SOAK = """
import random
shared, own = random.Random(1), random.Random(rank)
groups = [dist.group.WORLD, dist.new_group([0, size - 1]), dist.new_group(list(range(size)))]
for number in range({rounds}):
    if number % 150 == 149: groups.append(dist.new_group([0, size - 1])); dist.destroy_process_group(groups.pop(1))
    group, kind, n = shared.choice(groups), shared.randrange(7), shared.randrange(1, 9)
    if own.random() < 0.05: time.sleep(own.random() / 50)
    if rank not in dist.get_process_group_ranks(group): continue
    count, t = dist.get_world_size(group), torch.full((n,), float(rank + 1))
    if kind == 0: dist.all_reduce(t, group=group)
    elif kind == 1:
        if rank == 0: dist.broadcast(t, 0, group=group)
        else: dist.broadcast(t, 0, group=group)
        assert t[0] == 1
    elif kind == 2: dist.all_gather([torch.empty(n) for _ in range(count)], t, group=group)
    elif kind == 3: dist.barrier(group)
    elif kind == 4: [work.wait() for work in [dist.all_reduce(t, group=group, async_op=True) for _ in range(5)]]
    elif kind == 5:
        if rank == 0: dist.send(t, size - 1, group=group)
        elif last: dist.recv(t, 0, group=group); assert t[0] == 1
    else: dist.all_gather_object([None] * count, (rank, "x" * own.randrange(50)), group=group)
print("done")
"""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_no_false_alarm(run: Run, backend: str) -> None:
    """More ranks than cores; LOCKSTEP_SOAK_ROUNDS makes it a long run."""
    rounds = int(os.environ.get("LOCKSTEP_SOAK_ROUNDS", "600"))
    (ended,) = run([(program(SOAK.format(rounds=rounds), backend), 4)])
    assert [(ending.code, ending.out.endswith("done\n")) for ending in ended] == [(0, True)] * 4, (
        ended
    )
    assert all(
        "warning: Call site mismatch at" in line and ": broadcast" in line
        for ending in ended
        for line in ending.err.splitlines()
        if line
    ), ended


def test_nothing_is_left_behind(run: Run) -> None:
    from lockstep.flight_recorder import layout

    def here() -> set[Path]:  # without those of a launcher
        return set(layout.parent().glob(f"lockstep-{os.getuid()}/*-0"))

    before = here()
    run(
        [
            (program("dist.all_reduce(x)\ndist.destroy_process_group()", "shm"), 2),
            (program("", "gloo"), 2),
        ]
    )
    left = {path for path in here() - before if _is_of_no_living_rank(path)}
    assert left == set()


def _is_of_no_living_rank(folder: Path) -> bool:
    from lockstep.flight_recorder import open_job

    found = [recording for path in folder.glob("*") for recording in open_job(path).values()]
    living = any(Path(f"/proc/{recording.pid}").exists() for recording in found)
    for recording in found:
        recording.close()
    return not living
