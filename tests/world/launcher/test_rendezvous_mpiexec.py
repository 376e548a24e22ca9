"""Processes that mpiexec has started on one host rendezvous, without an address, and without
MPI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.mpi import find_mpiexec

pytestmark = pytest.mark.skipif(
    find_mpiexec() is None, reason="mpiexec is not installed: pip install mpich"
)

PROGRAM = """
import datetime, sys
import torch, torch.distributed as dist
from lockstep import bootstrap, environment
world, limit = environment.find_world(), datetime.timedelta(seconds=60)
for backend in ("gloo", "shm"):
    store = bootstrap.open_store(world, limit)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=limit)
    total = torch.tensor([world.rank + int(sys.argv[1])])
    dist.all_reduce(total)
    dist.destroy_process_group()
    sys.stdout.write(f"{backend} {world.rank} {world.source} {total.item()}\\n")
    sys.stdout.flush()
"""


def test_each_job_of_mpiexec_has_its_own_rendezvous(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    direct = [sys.executable, "program.py"]
    behind_a_shell = ["sh", "-c", f"{sys.executable} program.py 10; true"]
    mpiexec = [str(find_mpiexec()), "-n", "2"]
    jobs = [
        subprocess.Popen(
            [*mpiexec, *command], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
        )
        for command in ([*direct, "0"], behind_a_shell)
    ]
    said = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    for text, total in zip(said, (1, 21), strict=True):
        expected = [
            f"{backend} {rank} mpich {total}" for backend in ("gloo", "shm") for rank in range(2)
        ]
        assert sorted(text.splitlines()) == expected
    assert list(tmp_path.glob("lockstep-*/*")) == []
