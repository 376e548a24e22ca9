"""The job of `shard_optimizer_step.py`: the same training with the optimizer divided among the
workers and whole on each, in turns.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import lockstep
from side_worker_memory import CONTEXT, SIZES

BATCH = 8
SIDES = {"whole": False, "divided": True}


def main() -> None:
    """Train both, and write what each step has taken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("rounds", type=int)
    parser.add_argument("found", type=Path)
    parser.add_argument("--virtual-workers", type=int)
    args = parser.parse_args()
    comm = lockstep.init("cpu")
    layers, width, vocabulary = SIZES[args.size]
    torch.manual_seed(0)
    texts = torch.randint(vocabulary, (BATCH * (args.rounds + 2), CONTEXT + 1))
    data = TensorDataset(texts[:, :-1], texts[:, 1:])
    steps = {}
    for side, shard_optimizer in SIDES.items():
        torch.manual_seed(0)
        model = lockstep.models.gpt(vocabulary, CONTEXT, layers, width // 64, width, dropout=0.1)
        steps[side] = lockstep.TrainStep(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            lockstep.models.next_token_loss,
            virtual_workers=args.virtual_workers,
            max_grad_norm=0.5,
            shard_optimizer=shard_optimizer,
        )
    loader = lockstep.Loader(data, BATCH, virtual_workers=args.virtual_workers)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    processor: dict[str, list[float]] = {side: [] for side in SIDES}
    for number, batch in enumerate(loader.epoch(0)):
        for side in SIDES if number % 2 else reversed(SIDES):
            comm.barrier()
            began = time.perf_counter()
            began_processor = time.process_time()
            steps[side](batch)
            comm.barrier()
            took = torch.tensor([time.process_time() - began_processor], dtype=torch.float64)
            if number >= 2:  # the first steps make the optimizer's state, and the buckets
                seconds[side].append(time.perf_counter() - began)
                processor[side].append(float(comm.allreduce(took)))
            else:
                comm.allreduce(took)
        weights = {lockstep.fingerprint(step.model) for step in steps.values()}
        if len(weights) > 1:
            raise SystemExit(f"step {number}: the two models have different weights")
    if comm.rank == 0:
        args.found.write_text(json.dumps({"seconds": seconds, "processor": processor}))


if __name__ == "__main__":
    main()
