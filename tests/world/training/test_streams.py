"""Training on sharded files: the same bits at any number of workers, and in a run that is resumed
by others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.communicator import init
from lockstep.data import Stream
from support.outcome import RanksFailedError
from support.pool import Pool


def write(folder: Path, samples: int = 400) -> None:
    for number in range(3):
        rows = [{"x": [index % 7, number, 1.0], "label": index % 3} for index in range(samples)]
        (folder / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def augmented(row: Any) -> Any:
    return torch.tensor(row["x"]) + 0.1 * torch.randn(3), row["label"]


def train(folder: str, epochs: int, resume: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    trainer = lockstep.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 0.01),
        nn.CrossEntropyLoss(),
        100,
        virtual_workers=6,
        run_dir=f"{folder}/run" if resume or not epochs else None,
        callbacks=[lockstep.callbacks.Checkpoints("3steps")] if resume or not epochs else [],
    )
    data, test = (
        Stream(f"{folder}/{files}.jsonl", map=augmented, lanes=8, shuffle_window=500)
        for files in ("[01]", "2")
    )
    steps = {} if epochs else {"max_steps": 5}
    trainer.fit(data, epochs or None, validate=test, resume="latest" if resume else None, **steps)  # type: ignore[arg-type]
    return lockstep.fingerprint(model, trainer.optimizer), trainer.evaluate(test)["loss"]


def test_three_workers_begin_and_two_resume(pool: Pool, tmp_path: Path) -> None:
    write(tmp_path)
    whole = pool.run(train, str(tmp_path), 2, workers=1)[0]
    pool.run(train, str(tmp_path), 0, workers=3)  # five steps, of eight in an epoch
    assert pool.run(train, str(tmp_path), 2, True, workers=2) == [whole, whole]


def read(folder: str) -> None:
    next(iter(lockstep.Loader(Stream(f"{folder}/{init().rank}/0.jsonl"), 10)))


def test_ranks_that_have_other_files_find_out(pool: Pool, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        write(tmp_path / str(rank), 50 + rank)
    with pytest.raises(
        RanksFailedError,
        match=r"MismatchError: the data of ranks 0 and 1 differ: \{'shuffle_window'",
    ):
        pool.run(read, str(tmp_path), workers=2)
