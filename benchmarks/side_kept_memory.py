"""A job of `kept_memory.py`: steps of a model; writes their processor time, page faults and peak
memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

WARM_UP = 2  # steps that are not counted


def build(name: str, steps: int) -> tuple[nn.Module, Any, TensorDataset, int]:
    """The model, its loss, its data, and the samples of a step."""
    torch.manual_seed(0)
    if name == "gpt":
        texts = torch.randint(20480, (8 * steps, 33))
        model = lockstep.models.gpt(20480, 32, 12, 12, 768)
        return model, lockstep.models.next_token_loss, TensorDataset(texts[:, :-1], texts[:, 1:]), 8
    batch = 32 if name == "resnet18" else 256
    images = TensorDataset(
        torch.randn(batch * steps, 1, 28, 28), torch.randint(10, (batch * steps,))
    )
    make = lockstep.models.resnet18 if name == "resnet18" else lockstep.models.lenet
    return make(), nn.CrossEntropyLoss(), images, batch


def main() -> None:
    """Train, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("resnet18", "gpt", "lenet"))
    parser.add_argument("steps", type=int)
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    lockstep.init("cpu")
    steps = args.steps + WARM_UP
    model, loss_fn, data, batch = build(args.model, steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = lockstep.TrainStep(model, optimizer, loss_fn)
    processor = []
    faults = []
    for one in lockstep.Loader(data, batch).epoch(0):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = time.process_time()
        loss = float(step(one))
        processor.append(time.process_time() - began)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    measured = {
        "processor": statistics.median(processor[WARM_UP:]),
        "faults": statistics.median(faults[WARM_UP:]),
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
        "loss": loss.hex(),
    }
    args.result.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
