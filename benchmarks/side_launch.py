"""One rank of the benchmark of launchers: joins a group, adds up, notes when; and once it fails on
purpose.

    python side_launch.py FOLDER BACKEND [fail]

Each rank writes the time at which its first all-reduce had ended, as attempt and seconds since the
epoch, into FOLDER. With "fail" rank 1 raises an exception after that in the first attempt, and
writes down when.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(sys.argv[1])
BACKEND = sys.argv[2]
FAIL = "fail" in sys.argv[3:]
RANK = os.environ["RANK"]
ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"]

if BACKEND == "shm":
    import lockstep  # noqa: F401 - makes the backend known
dist.init_process_group(BACKEND)
total = torch.ones(1)
dist.all_reduce(total)
(FOLDER / f"{ATTEMPT}-{RANK}").write_text(repr(time.time()))
assert total.item() == dist.get_world_size()
dist.barrier()
# a process that ends right after a collective of Gloo may be aborted, which is not what is measured
time.sleep(0.05)
if FAIL and ATTEMPT == "0" and RANK == "1":
    (FOLDER / "failed").write_text(repr(time.time()))
    raise RuntimeError("on purpose")
if FAIL and ATTEMPT == "0":
    time.sleep(60)
dist.destroy_process_group()
