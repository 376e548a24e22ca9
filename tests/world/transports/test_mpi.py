"""What is MPI's own in the backend "mpi4py": mpiexec, the end of a job, limits, and what MPI
refuses.

The cases that every transport has to pass are in the folder `transports`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.conformance import Case
from support.faults import attempt
from support.mpi import BACKEND, find_mpiexec, missing
from support.operations import perform
from support.pool import Pool
from support.programs import run_programs

needs_mpi = pytest.mark.skipif(bool(missing()), reason=missing())

START = """
import sys, torch, torch.distributed as dist
import lockstep
dist.init_process_group("mpi4py", init_method="mpi4py://")
rank, size = dist.get_rank(), dist.get_world_size()
"""


def store() -> Any:
    """Means to talk to the other ranks past the transport."""
    return dist.distributed_c10d._get_default_store()


# --- programs
# -------------------------------------------------------------------------------------------------


def mpiexec(program: str, start: str = START) -> tuple[int, list[str], str]:
    """Run a program as two ranks: exit code, sorted lines of output, and standard error."""
    command = [str(find_mpiexec()), "-n", "2", sys.executable, "-W", "error", "-c", start + program]
    with subprocess.Popen(
        command, text=True, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1
    ) as job:
        try:
            out, err = job.communicate(timeout=60)
        except BaseException:
            job.send_signal(signal.SIGTERM)  # it ends the ranks
            raise
    return job.returncode, sorted(out.splitlines()), err


TRAINS = """
from torch.nn.parallel import DistributedDataParallel
def trained(wrap, inputs):
    torch.manual_seed(1)
    model = torch.nn.Linear(5, 2)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()
    return model.weight
inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
ours = trained(DistributedDataParallel, inputs.chunk(size)[rank])
torch.testing.assert_close(ours, trained(lambda model: model, inputs))
groups = [dist.group.WORLD, dist.new_group()]
late = [[dist.all_reduce(torch.ones(300), group=group, async_op=True) for _ in range(50)] for group in groups]
sys.stdout.write(f"{rank} of {size} trained\\n")  # in one piece, as mpiexec mixes the ranks' output
late[1 - rank][-1].wait()
if rank == 0:
    dist.destroy_process_group()
"""


@needs_mpi
def test_a_program_trains_with_ddp_under_mpiexec() -> None:
    """Rank 0 leaves its groups, rank 1 just ends, each without having waited for all that the other
    waits for.
    """
    assert mpiexec(TRAINS) == (0, ["0 of 2 trained", "1 of 2 trained"], "")


@needs_mpi
def test_an_exception_on_one_rank_ends_the_job() -> None:
    """While it has something under way, and the other waits for it."""
    code, out, err = mpiexec(
        "if rank == 1:\n    work = dist.isend(torch.ones(10**7), 0)\n    raise "
        "ValueError('ouch')\ndist.barrier()"
    )
    assert code != 0 and out == []
    assert "[rank1]: ValueError: ouch" in err
    assert "[rank0]" not in err


MEETS = """
from mpi4py import MPI
from lockstep.transports.mpi.rendezvous import find_world, make_store
store = make_store(find_world())
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("ouch")
MPI.COMM_WORLD.Barrier()
"""


@needs_mpi
def test_an_exception_ends_the_job_also_where_mpi_has_only_made_a_store() -> None:
    code, _, err = mpiexec(MEETS, start="")
    assert code != 0 and "ValueError: ouch" in err


GIVES_UP = """
from datetime import timedelta
from lockstep.errors import StallError, TransportError
for later in (False, True):
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    if rank == 0:
        try:
            work = dist.all_reduce(torch.ones(10**5), group=group, async_op=later)
            work.wait()
        except StallError as error:
            print(later, error)
        try:
            dist.barrier(group)
        except TransportError as error:
            print(later, error, flush=True)
dist.barrier()
"""


@needs_mpi
def test_a_collective_that_takes_too_long_names_itself_and_ends_its_group() -> None:
    """The program may go on, but MPI cannot end in good order: it ends the job."""
    code, out, err = mpiexec(GIVES_UP)
    stall = "mpi4py: all_reduce has not ended on rank 0 (of 2) within its time limit of 0.2 s"
    for later, lines in ((False, out[:2]), (True, out[2:])):
        assert lines[0].startswith(f"{later} {stall}")
        assert lines[1].startswith(
            f"{later} mpi4py: this group cannot be used since an earlier error: {stall}"
        )
    assert code != 0
    assert "an operation was given up and has not ended: MPI aborts the job" in err


ALONE = """
import sys, torch.distributed as dist
import lockstep
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
try:
    dist.init_process_group("mpi4py", init_method="file://" + path, rank=rank, world_size=size)
except lockstep.LockstepError as error:
    print(type(error).__name__, error)
"""


@needs_mpi
def test_the_error_of_ranks_that_mpiexec_has_not_started_names_mpiexec(tmp_path: Path) -> None:
    (ended,) = run_programs([(ALONE, 2)], tmp_path)
    for rank in ended:
        assert (rank.code, rank.err) == (0, "")
        assert rank.out.startswith(
            "ConfigError mpi4py: expected the 2 ranks of the group in one MPI job, got ranks"
        )
        assert "Start the program with mpiexec -n 2" in rank.out


# --- meeting
# --------------------------------------------------------------------------------------------------


@needs_mpi
def test_the_world_is_what_mpiexec_has_started(pool: Pool) -> None:
    def body() -> tuple[Any, int]:
        from mpi4py import MPI

        from lockstep.transports.mpi.rendezvous import find_world, make_store

        world = find_world()
        place = make_store(world, timedelta(seconds=20))
        place.set(f"rank {world.rank}", "there")
        there = len(place.multi_get([f"rank {rank}" for rank in range(world.world_size)]))
        MPI.COMM_WORLD.Barrier()  # rank 0 keeps the store until all have read it
        return world, there

    from lockstep.topology import World

    expected = [(World(rank, 4, rank, 4, source="mpiexec"), 4) for rank in range(4)]
    assert pool.run(body, workers=4, backend=BACKEND, init=False) == expected


@needs_mpi
def test_every_rank_gets_an_error_if_there_is_no_store(pool: Pool) -> None:
    def body() -> str:
        from lockstep.transports.mpi import rendezvous

        def refuse(*_arguments: Any, **_options: Any) -> None:
            raise OSError("no port left")

        real, rendezvous.serve_store = rendezvous.serve_store, refuse
        try:
            return attempt(lambda: rendezvous.make_store(rendezvous.find_world())).text
        finally:
            rendezvous.serve_store = real

    told = pool.run(body, workers=4, backend=BACKEND, init=False)
    assert told == ["mpi4py: rank 0 cannot open a store for torch.distributed: no port left"] * 4


# --- limits
# --------------------------------------------------------------------------------------------------


@needs_mpi
def test_a_receive_that_was_given_up_takes_no_message(pool: Pool) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            store().wait(["given up"])
            dist.send(torch.ones(3), 0)
            return
        first, second = torch.zeros(3), torch.zeros(3)
        work = dist.irecv(first, 1)
        ended = attempt(lambda: work.wait(timedelta(milliseconds=20)))
        assert ended.kind == "StallError" and "recv from rank 1 has not ended" in ended.text
        store().set("given up", "")
        dist.recv(second, 1)
        assert (first.tolist(), second.tolist()) == ([0.0] * 3, [1.0] * 3)

    pool.run(body, backend=BACKEND)


# --- what is refused
# ------------------------------------------------------------------------------------------


@needs_mpi
@pytest.mark.parametrize(
    ("count", "text"), [(3, "mpi4py: "), (7, "rank 1 sent 20 bytes (tag 4), but rank 0 receives")]
)
def test_a_message_of_another_size_is_an_error_and_harms_no_other(
    pool: Pool, count: int, text: str
) -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            ended = attempt(lambda: dist.recv(torch.zeros(count), 1, tag=4))
            assert ended.kind == "TransportError" and text in ended.text, ended
        else:
            dist.send(torch.ones(5), 0, tag=4)
        perform("ring", Case())
        perform("all_reduce", Case())

    pool.run(body, backend=BACKEND)


@needs_mpi
def test_arguments_of_a_group_or_message_that_cannot_be_right(pool: Pool) -> None:
    def body() -> list[str]:
        group: Any = dist.group.WORLD
        calls = [
            lambda: dist.new_group(pg_options=object()),
            lambda: group.send([torch.ones(1)], 1 - dist.get_rank(), 1 << 40),
            lambda: group.recv_anysource([torch.ones(1)], -1),
            lambda: group.send([torch.ones(1)], dist.get_rank(), 0),
            lambda: group.recv([torch.ones(1)], 2, 0),
        ]
        kinds = [attempt(call).kind for call in calls]
        perform("all_reduce", Case())
        return kinds

    assert pool.run(body, backend=BACKEND) == [["ConfigError"] * 5] * 2


@needs_mpi
def test_an_exchange_in_place(pool: Pool) -> None:
    """MPI itself must not read and write in one place."""

    def body() -> None:
        rank, rows = dist.get_rank(), torch.zeros(2, 1_000_000)
        rows += 10 * rank + torch.arange(2)[:, None]
        dist.all_to_all_single(rows, rows)
        assert rows.eq(10 * torch.arange(2)[:, None] + rank).all()

    pool.run(body, backend=BACKEND)


@needs_mpi
def test_sums_of_short_integers_do_not_depend_on_how_mpi_overflows(pool: Pool) -> None:
    """Open MPI's stop at the largest number; MPICH's wrap around, as torch's do."""

    def body() -> list[torch.dtype]:
        from lockstep.transports.mpi.collectives import reduction_for

        short = (torch.int8, torch.uint8, torch.int16, torch.uint16)
        return [reduction_for(dist.ReduceOp.SUM, dtype).dtype for dtype in short]

    assert pool.run(body, workers=1, backend=BACKEND) == [[torch.int32] * 4]
