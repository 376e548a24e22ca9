"""No healthy job is ended: the user's own time limits count, and rank 0 may take its time in what
it does for all.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from lockstep import watchdog
from lockstep.transports.runtime import host_identity
from support.desyncs import program
from support.faults import SOON_S, Ended, attempt
from support.hosts import Network, inside, network, or_skip
from support.pool import Pool
from support.programs import Ending, ProgramServer

PRELOAD = (
    "lockstep.watchdog.patches",
    "torch._dynamo",
    "torch.utils.data",
    "lockstep.training.trainer",
)
SHORT = {"LOCKSTEP_STALL_WARNING": "0.3", "LOCKSTEP_STALL_TIMEOUT": "0.8"}

Run = Callable[[Sequence[tuple[str, int]]], list[list[Ending]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with closing(ProgramServer(PRELOAD)) as server:
        # all of a test at once, as they hardly do anything but wait
        yield lambda programs: server.run(
            programs, tmp_path_factory.mktemp("programs"), 115, at_once=4
        )


def limited(text: str, seconds: float | None, backend: str, hosts: str = "") -> str:
    """A program whose group has a time limit of `seconds`, which is more or less than the short one
    of the watch.
    """
    whole = program(text, backend, hosts, **SHORT)
    if seconds is None:
        return whole
    given = f"timeout=__import__('datetime').timedelta(seconds={seconds}), rank=rank"
    return whole.replace("rank=rank", given, 1)


LATE = """
from datetime import timedelta
if last: time.sleep(2)
dist.all_reduce(x)
print("done")
"""
LATE_IN_A_GROUP = """
from datetime import timedelta
pair = dist.new_group(list(range(size)), timeout=timedelta(seconds=60))
if last: time.sleep(2)
dist.all_reduce(x, group=pair)
print("done")
"""


def test_a_time_limit_of_the_users_is_not_cut_short(run: Run) -> None:
    programs = [
        (limited(LATE, 60.0, "shm", "AB"), 2),
        (program(LATE_IN_A_GROUP, "gloo", **SHORT), 2),
        (program(LATE, "gloo", **SHORT), 2),  # torch's own limit is nothing that the user has said
        (program(LATE, "gloo", "AB", **SHORT), 2),
    ]
    *patient, near, far = run(programs)
    for ended in patient:
        assert [(ending.code, ending.out.endswith("done\n")) for ending in ended] == [
            (0, True)
        ] * 2, ended
        assert "straggler: rank 1 has not reached" in "".join(ending.err for ending in ended)
    for ended in (near, far):
        assert "StallError: Rank 1 did not reach" in " ".join(ended[0].err.split()), ended


START = """
import lockstep
comm = lockstep.init("cpu")
def work():
    time.sleep(2); return "worked"
"""
VERBS = """
with comm.rank0_first():
    if rank == 0: work()
assert comm.on_rank0(work) == "worked"
pair = comm.split(0)
assert pair.on_rank0(work) == "worked"
"""
FIRST = """
with comm.rank0_first():
    if rank == 0: work()
"""
SAVES = """
from lockstep.checkpoint.folder import CheckpointStore
from lockstep.training.callbacks.base import Callback
save = CheckpointStore.save
def slowly(self, *args, **kwargs):
    work()
    return save(self, *args, **kwargs)
CheckpointStore.save = slowly
class Reports(Callback):
    every_rank = False
    def on_train_epoch_end(self, trainer, row): work()
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))
options = {"run_dir": path + "-run", "callbacks": [Reports()]}
loss = torch.nn.functional.cross_entropy
trainer = lockstep.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loss, 4, **options)
trainer.fit(data, 1)
trainer.save()
"""
DONE = "dist.all_reduce(x)\nprint('done')\n"


@pytest.mark.parametrize("backend, hosts", [("shm", ""), ("gloo", ""), ("shm", "AB")])
def test_what_rank_0_does_for_all_may_take_its_time(run: Run, backend: str, hosts: str) -> None:
    """Longer than the watch's limit and than that of the group, which the transport itself
    keeps.
    """
    bodies = (
        [(FIRST, 1.2)] if backend == "gloo" else [(VERBS, 1.2), (SAVES, None)][: 1 if hosts else 2]
    )
    for ended in run(
        [(limited(START + body + DONE, limit, backend, hosts), 2) for body, limit in bodies]
    ):
        assert [(ending.code, ending.out.endswith("done\n")) for ending in ended] == [
            (0, True)
        ] * 2, ended
        assert "straggler: rank 0 has not reached" in "".join(ending.err for ending in ended)


FREED_BY_DDP = """
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # Gloo's threads come late where all share a core
def train():
    group = dist.new_group()
    ddp = DDP(torch.nn.Linear(4, 4), process_group=group)
    ddp(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
for _ in range(20): train()
print("done")
"""


def test_a_group_that_is_destroyed_before_its_model_waits_for_no_thread_that_waits_for_it(
    run: Run,
) -> None:
    """Without the watchdog one of the first ten rounds hangs: torch waits for Gloo's threads with
    Python's lock.
    """
    (ended,) = run([(program(FREED_BY_DDP, "gloo"), 2)])
    assert [(ending.code, ending.out.endswith("done\n")) for ending in ended] == [(0, True)] * 2, (
        ended
    )


def test_its_failure_and_its_death_end_the_wait(run: Run) -> None:
    raises = "time.sleep(1.5)\n    raise ValueError('on rank 0')"
    dies = "time.sleep(1.5)\n    os.kill(os.getpid(), 9)"
    bodies = [
        START
        + FIRST.replace("work()", "fail()").replace("with", f"def fail():\n    {how}\nwith", 1)
        for how in (raises, dies)
    ]
    raised, died, apart = run(
        [
            (limited(bodies[0], 1.0, "shm"), 2),
            (limited(bodies[1], 1.0, "shm"), 2),
            (limited(bodies[1], 1.0, "gloo", "AB"), 2),
        ]
    )
    assert [ending.code for ending in raised] == [1, 1]
    assert all("ValueError: on rank 0" in ending.err for ending in raised)
    for ended in (died, apart):
        assert ended[0].code == -9
        assert re.search(r"RankLostError: ", ended[1].err), ended[1]
        assert ended[1].at - ended[0].at < 10


HOLDS = """
import ctypes
hold = lambda: ctypes.PyDLL(None).sleep(3)
if rank >= 2: hold()
dist.all_reduce(x)
if rank < 2: hold()
dist.all_reduce(x)
print("done")
"""


def test_a_host_whose_ranks_all_hold_the_interpreter_is_not_lost(run: Run) -> None:
    """Nobody on it can say anything for longer than the limit, as when all of them parse a large
    file.
    """
    soon = {"LOCKSTEP_STALL_WARNING": "1", "LOCKSTEP_HEARTBEAT_TIMEOUT": "1.5"}
    (ended,) = run([(program(HOLDS, "shm", "AABB", **soon), 4)])
    assert [(ending.code, ending.out.endswith("done\n")) for ending in ended] == [(0, True)] * 4, (
        ended
    )
    assert "straggler: ranks 2 and 3 have not reached" in ended[0].err


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    """Two namespaces, which are as far from each other as hosts are."""
    with or_skip(network(2)) as found:
        yield found


def link(name: str, state: str) -> None:
    subprocess.run(["ip", "-n", name, "link", "set", "eth0", state], check=True)


def wait_while_the_network_fails(names: Sequence[str]) -> Ended:
    """A second without a network, which the ranks get over, and then the end of it."""

    with inside(names[int(os.environ["RANK"])]):
        watchdog.install(host_identity.host_key)
        dist.init_process_group("shm")
        x = torch.ones(4)
        for state in ("back", "gone"):
            dist.all_reduce(x)
            if dist.get_rank() == 0:
                link(names[1], "down")
                if state == "back":
                    time.sleep(1)  # what was lost is sent again within two seconds
                    link(names[1], "up")
        try:
            return attempt(lambda: dist.all_reduce(x))
        finally:
            watchdog.uninstall()


def test_a_network_that_comes_back_is_no_loss_and_one_that_does_not_is(
    pool: Pool, hosts: Network
) -> None:
    env = {
        "MASTER_ADDR": hosts.address,
        "GLOO_SOCKET_IFNAME": "eth0",
        "LOCKSTEP_HEARTBEAT_TIMEOUT": "5",
    }
    try:
        outcomes = pool.outcomes(
            wait_while_the_network_fails, hosts.names, workers=2, init=False, env=env
        )
    finally:
        link(hosts.names[1], "up")
    for outcome in outcomes:
        assert outcome.ending == "returned", outcome.line() + outcome.trace
        assert outcome.value.kind == "RankLostError", outcome.value
        assert outcome.value.seconds < 5 + SOON_S
    assert "and its host are unreachable" in outcomes[0].value.text
