"""Square and sum an array that lies on rank 0, each worker on its part.

python examples/array_work.py
torchrun --nproc-per-node 4 examples/array_work.py
"""

import torch

import lockstep

comm = lockstep.init()
mine = comm.scatter(torch.arange(8) if comm.rank == 0 else None)
total = comm.allreduce(mine.sum())
squares = torch.cat(comm.allgather(mine**2))
if comm.rank == comm.size - 1:  # any rank could print them
    print(f"workers {comm.size}  sum {total.item()}  squares {squares.tolist()}")
