"""One side of the comparison of language models: `Trainer.fit` on a text file, with
`lockstep.models.gpt` or the model of nanoGPT.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import lockstep
from gpt_models import GPTJob, build, known_bytes
from gpt_text import CLIP, SIZES, WARM_UP, project_text, write_text
from lockstep.training.schedules import make_schedule
from meter import parse_as
from side_lockstep import Metering


def train(path: Path, vocabulary: int, job: GPTJob) -> None:
    """Train as the job says on the text in `path`, on this worker and the others."""
    lockstep.init("cpu")
    torch.manual_seed(0)
    steps = job.epochs * job.steps
    model, optimizer = build(job, vocabulary)
    trainer = lockstep.Trainer(
        model,
        optimizer,
        lockstep.models.next_token_loss,
        job.global_batch_size,
        max_grad_norm=CLIP,
        schedule=make_schedule("cosine", steps, min(WARM_UP, steps // 4)),
        callbacks=[Metering(job)],
    )
    trainer.fit(lockstep.data.text(path, SIZES[job.model].context, validation=0.0)[0], job.epochs)


if __name__ == "__main__":
    job = parse_as(GPTJob)
    with tempfile.TemporaryDirectory() as folder:
        known = known_bytes(job.owner, project_text())
        size = job.samples * SIZES[job.model].context + 1
        path = write_text(Path(folder, "text"), size, known)
        if job.workers == 1:
            train(path, len(known), job)
        else:
            lockstep.launch(train, path, len(known), job, workers=job.workers, threads=1)
