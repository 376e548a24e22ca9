"""A job of `worker_memory.py`: some steps of a GPT; says where its workers are and how they end."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import lockstep

# layers, width, vocabulary
SIZES = {
    "tiny": (1, 64, 64),
    "1M": (4, 128, 1024),
    "10M": (6, 384, 1024),
    "30M": (8, 512, 8192),
    "50M": (12, 512, 24576),
    "100M": (12, 768, 20480),
}
VIRTUAL_WORKERS = 8
CONTEXT = 32
STEPS = 4


def train(size: str, shard_optimizer: bool) -> tuple[lockstep.TrainStep, list[float]]:
    """Train a model of a size; returns its step, and the processor time of each."""
    layers, width, vocabulary = SIZES[size]
    torch.manual_seed(0)
    texts = torch.randint(vocabulary, (VIRTUAL_WORKERS * STEPS, CONTEXT + 1))
    model = lockstep.models.gpt(vocabulary, CONTEXT, layers, width // 64, width, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = lockstep.TrainStep(
        model,
        optimizer,
        lockstep.models.next_token_loss,
        virtual_workers=VIRTUAL_WORKERS,
        max_grad_norm=0.5,
        shard_optimizer=shard_optimizer,
    )
    data = TensorDataset(texts[:, :-1], texts[:, 1:])
    loader = lockstep.Loader(data, VIRTUAL_WORKERS, virtual_workers=VIRTUAL_WORKERS)
    processor = []
    for batch in loader.epoch(0):
        began = time.process_time()
        step(batch)
        processor.append(time.process_time() - began)
    return step, processor


def number_in(file: str, name: str) -> int:
    """A number of kB that the kernel tells of this process."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Train, and write what this worker has needed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shard-optimizer", action="store_true")
    args = parser.parse_args()
    comm = lockstep.init("cpu")
    train("tiny", args.shard_optimizer)  # all code is loaded, and all connections are made
    comm.barrier()
    before = number_in("smaps_rollup", "Pss")
    comm.barrier()
    (args.folder / f"{comm.rank}.pid").write_text(str(os.getpid()))
    step, processor = train(args.size, args.shard_optimizer)
    found = {
        "resident": number_in("status", "VmHWM"),
        "before": before,
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "processor": round(min(processor[1:]), 3),
        "fingerprint": step.fingerprint()[:12],
    }
    (args.folder / f"{comm.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
