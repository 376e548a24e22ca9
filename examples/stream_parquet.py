"""Train on Parquet files that are read block by block, in an order that no number of workers
changes.

python examples/stream_parquet.py [FOLDER]                 one worker
lockstep run -np 2 examples/stream_parquet.py [FOLDER]     two, which read half of the files each

It makes the files first. It needs pyarrow: pip install 'lockstep-train[streams]'.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

import lockstep


def write_files(folder, files=4, rows=1000):
    """Write points on two spirals, with the arm that each is on."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(files):
        arms = generator.integers(0, 2, rows)
        angles = generator.uniform(0.5, 12.0, rows)
        points = angles[:, None] * np.stack(
            [np.cos(angles + arms * np.pi), np.sin(angles + arms * np.pi)], 1
        )
        table = pyarrow.table({"point": list(points.astype(np.float32)), "arm": arms})
        pyarrow.parquet.write_table(
            table, folder / f"{number}.parquet", row_group_size=50
        )  # rows that are read together


def sample(row):  # a row of a file → what the model gets
    return torch.from_numpy(row["point"]), row["arm"]


comm = lockstep.init()
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/spirals")
comm.on_rank0(lambda: write_files(folder))

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()
)
model.append(torch.nn.Linear(64, 2))
trainer = lockstep.Trainer(
    model,
    torch.optim.Adam(model.parameters(), lr=0.01),
    torch.nn.CrossEntropyLoss(),
    global_batch_size=64,  # over all workers
)
train = lockstep.data.Stream(
    [folder / f"{number}.parquet" for number in range(3)], map=sample, shuffle_window=1000
)
test = lockstep.data.Stream(folder / "3.parquet", map=sample)
trainer.fit(train, epochs=8, validate=test)
found = trainer.evaluate(test)  # on all workers
if comm.rank == 0:
    print(f"{len(train)} samples, loss {found['loss']:.5f}, accuracy {found['accuracy']:.1%}")
