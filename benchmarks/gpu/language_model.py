"""Tokens per second of a small GPT in bf16, compiled: `Trainer.fit` and `lockstep.models.gpt`, and
nanoGPT's program.

Each side has its own model of the same sizes: nanoGPT's is written anew in
benchmarks/gpt_models.py. The model FLOPS utilisation counts 6 operations for each parameter and
token, and 12 × layers × width × context for attention (Chowdhery et al., "PaLM", 2022, appendix B),
against the GPU's peak in bf16 without sparsity.

    PYTHONPATH=src:benchmarks python benchmarks/gpu/language_model.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from timing import Options, Side, finish, medians, options, ratio_of, take_turns
from torch import nn

import lockstep
from gpt_models import NanoGPT, WithLoss, make_optimizer
from gpt_text import BETAS, CLIP, LEARNING_RATE, SIZES, WEIGHT_DECAY, Sizes

# peak operations per second in bf16 without sparsity, from NVIDIA's data sheets (SXM)
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}

VOCABULARY = 256


def blocks(count: int, context: int) -> torch.Tensor:
    return torch.randint(
        0, VOCABULARY, (count, context + 1), generator=torch.Generator().manual_seed(0)
    )


def nanogpt(sizes: Sizes, batch: int, steps: int, given: Options) -> Side:
    """nanoGPT's loop: batches from pinned memory, autocast, clipping, a fused AdamW."""
    device = given.device
    torch.manual_seed(0)
    model = WithLoss(NanoGPT(VOCABULARY, sizes)).to(device)
    optimizer = make_optimizer(model)
    for group in optimizer.param_groups:
        group["fused"] = device.type == "cuda"
    compiled: Any = torch.compile(model) if device.type == "cuda" else model
    data = blocks(batch * steps, sizes.context)

    def block() -> None:
        for number in range(steps):
            part = data[number * batch : (number + 1) * batch]
            inputs = part[:, :-1].contiguous()
            targets = part[:, 1:].contiguous()
            if device.type == "cuda":
                inputs, targets = (
                    each.pin_memory().to(device, non_blocking=True) for each in (inputs, targets)
                )
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = compiled(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return block


def ours(
    make: Callable[[], nn.Module], context: int, batch: int, steps: int, given: Options
) -> Side:
    """`Trainer.fit` with a model: tokens (n, t) → logits (n, t, vocabulary)."""
    comm = lockstep.init()
    torch.manual_seed(0)
    model = make()
    if given.device.type == "cuda":
        model = lockstep.prepare_model(model, comm, compile_model=True)
    model.to(given.device)
    fused = given.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=fused
    )
    loss: Callable[..., Any] = lockstep.models.next_token_loss
    trainer = lockstep.Trainer(
        model, optimizer, loss, batch, max_grad_norm=CLIP, precision="bf16", callbacks=[]
    )
    data = blocks(batch * steps, context)
    tokens = torch.utils.data.TensorDataset(data[:, :-1].contiguous(), data[:, 1:].contiguous())
    loader = trainer.loader(tokens)
    done = [0]

    def block() -> None:
        done[0] += 1
        trainer.fit(loader, epochs=done[0])

    return block


def utilisation(tokens_per_second: float, parameters: int, sizes: Sizes, name: str) -> float | None:
    """The share of the GPU's peak that the model's own operations are; None for a GPU whose peak is
    not known here.
    """
    peak = next((value for known, value in PEAKS.items() if known in name), None)
    operations = 6 * parameters + 12 * sizes.layers * sizes.width * sizes.context
    return None if peak is None else tokens_per_second * operations / peak


def main() -> None:
    given, path = options(__doc__, 15.0)
    lockstep.init(given.device.type)
    sizes = Sizes(layers=2, heads=2, width=32, context=16) if given.quick else SIZES["characters"]
    batch, steps = (4, 2) if given.quick else (64, 30)
    own_model = partial(lockstep.models.gpt, VOCABULARY, **asdict(sizes))
    other_model = partial(NanoGPT, VOCABULARY, sizes)
    parameters = sum(p.numel() for p in own_model().parameters())
    sides: dict[str, Callable[[], Side]] = {
        "Lockstep": partial(ours, own_model, sizes.context, batch, steps, given),
        "Lockstep, nanoGPT's model": partial(ours, other_model, sizes.context, batch, steps, given),
        "nanoGPT": partial(nanogpt, sizes, batch, steps, given),
    }
    found = take_turns(sides, given)
    tokens = batch * steps * sizes.context
    speeds = {name: tokens / seconds for name, seconds in medians(found).items()}
    device_name = torch.cuda.get_device_name(given.device) if given.device.type == "cuda" else ""
    finish(
        path,
        {
            "sizes": asdict(sizes),
            "batch": batch,
            "tokens per second": speeds,
            "Lockstep over nanoGPT": ratio_of(found, "nanoGPT", "Lockstep"),
            "Lockstep over nanoGPT, with its model": ratio_of(
                found, "nanoGPT", "Lockstep, nanoGPT's model"
            ),
            "model FLOPS utilisation": {
                name: utilisation(speed, parameters, sizes, device_name)
                for name, speed in speeds.items()
            },
        },
    )


if __name__ == "__main__":
    main()
