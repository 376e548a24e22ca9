"""One side of the comparison of language models: `lockstep.models.gpt` and `Trainer.fit` on a text
file.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

import lockstep
from gpt_text import BETAS, CLIP, LEARNING_RATE, SIZES, WARM_UP, WEIGHT_DECAY, write_text
from lockstep.training.schedules import make_schedule
from meter import Job, parse_job
from side_lockstep import Metering


def train(path: Path, job: Job) -> None:
    """Train as the job says on the text in `path`, on this worker and the others."""
    lockstep.init("cpu")
    torch.manual_seed(0)
    sizes = SIZES[job.model]
    steps = job.epochs * job.steps
    model = lockstep.models.gpt(**asdict(sizes))
    adamw = partial(torch.optim.AdamW, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    trainer = lockstep.Trainer(
        model,
        adamw(model.parameters(), fused=True),  # nanoGPT has this on a GPU only
        lockstep.models.next_token_loss,
        job.global_batch_size,
        max_grad_norm=CLIP,
        schedule=make_schedule("cosine", steps, min(WARM_UP, steps // 4)),
        callbacks=[Metering(job)],
    )
    trainer.fit(lockstep.data.text(path, sizes.context, validation=0.0)[0], job.epochs)


if __name__ == "__main__":
    job = parse_job()
    with tempfile.TemporaryDirectory() as folder:
        path = write_text(Path(folder, "text"), job.samples * SIZES[job.model].context + 1)
        if job.workers == 1:
            train(path, job)
        else:
            lockstep.launch(train, path, job, workers=job.workers, threads=1)
