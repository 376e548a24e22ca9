"""Rank 0 makes a folder and reads the settings; every worker uses both.

python examples/rank0_first.py [FOLDER]
torchrun --nproc-per-node 4 examples/rank0_first.py [FOLDER]
"""

import json
import sys
from pathlib import Path

import lockstep

comm = lockstep.init()
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/rank0_first")

with comm.rank0_first():  # on rank 0, and then on the others, for which the folder is there
    folder.mkdir(parents=True, exist_ok=True)
    if comm.rank == 0:
        (folder / "settings.json").write_text('{"lr": 0.1}')

settings = comm.on_rank0(lambda: json.loads((folder / "settings.json").read_text()))
(folder / f"{comm.rank}.log").write_text(f"rank {comm.rank} of {comm.size} uses {settings}\n")

comm.barrier()  # all have written
if comm.rank == 0:
    print("".join(path.read_text() for path in sorted(folder.glob("*.log"))), end="")
