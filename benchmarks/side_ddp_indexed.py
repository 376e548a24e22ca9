"""One side of the scaling benchmark: DistributedDataParallel with a loader that is as quick as
Lockstep's.
"""

from __future__ import annotations

from meter import parse_job
from side_ddp import make_indexed_loader, train

if __name__ == "__main__":
    train(parse_job(), make_indexed_loader)
