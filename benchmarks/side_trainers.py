"""One side of the comparison of trainers: fine-tunes a small language model as each library's
documentation shows it.

The program is the same for all: sentences with padding, batches of 12 sentences over all workers,
AdamW, a learning rate that falls linearly to 0, and the loss that the model computes. It is started
by lockstep run or torchrun.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

SENTENCES = 360
BATCH = 12
WORDS = 61
LENGTH = 24
EPOCH = SENTENCES // BATCH


@dataclass
class Job:
    """What a side has to do.

    Attributes:
        folder: for its checkpoints, and for what it has found.
        steps: after which it ends.
        of: the steps of the whole run, in which the learning rate falls to 0.
        resumes: whether it goes on from the checkpoint of a run before.
        saves: whether it saves a checkpoint at the end.
    """

    folder: Path
    steps: int
    of: int
    resumes: bool = False
    saves: bool = False


class Sentences(Dataset[dict[str, Any]]):
    """Sentences of different lengths; each word follows from the one before."""

    def __len__(self) -> int:
        return SENTENCES

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 4 + index * 7 % (LENGTH - 4)
        words = [1 + (index + place * (1 + index % 3)) % (WORDS - 1) for place in range(length)]
        return {"input_ids": words, "labels": words, "number": index}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest, as a collator of Transformers does."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def stack(name: str, fill: int) -> torch.Tensor:
        return torch.tensor(
            [sample[name] + [fill] * (longest - len(sample[name])) for sample in samples]
        )

    words = stack("input_ids", 0)
    numbers = torch.tensor([sample["number"] for sample in samples])
    return {
        "input_ids": words,
        "attention_mask": (words != 0).long(),
        "labels": stack("labels", -100),
        "number": numbers,
    }


class Model(GPT2LMHeadModel):  # type: ignore[no-untyped-call]
    """A small GPT-2 that keeps the numbers of the sentences that it is trained with."""

    seen: list[int]

    def forward(self, number: torch.Tensor | None = None, **batch: Any) -> Any:
        """Compute the loss, see `GPT2LMHeadModel`."""
        if self.training and number is not None and torch.is_grad_enabled():
            self.seen += number.tolist()
        return super().forward(**batch)


def make_model() -> tuple[Model, torch.optim.Optimizer]:
    """Build the model without dropout, whose draws would differ, and its optimizer."""
    torch.manual_seed(0)
    none: dict[str, Any] = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = Model(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **none)
    )
    model.seen = []
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def falls(of: int) -> Any:
    """Return the factor of the learning rate by step."""
    return lambda step: max(0.0, 1 - step / of)


def found(job: Job, model: Model, learning_rate: float, rank: int) -> None:
    """Write what came out: the loss over all sentences, computed in one way for all, and the
    sentences of this rank.
    """
    model.train(False)
    with torch.no_grad():
        batches = [padded([Sentences()[index]]) for index in range(SENTENCES)]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        losses = [
            float(model(**batch).loss) * count for batch, count in zip(batches, counts, strict=True)
        ]
    result = {"loss": sum(losses) / sum(counts), "learning_rate": learning_rate, "seen": model.seen}
    (job.folder / f"found-{rank}.json").write_text(json.dumps(result))


def lockstep_(job: Job) -> None:
    import lockstep

    model, optimizer = make_model()
    trainer = lockstep.Trainer(
        model,
        optimizer,
        global_batch_size=BATCH,
        scheduler=LambdaLR(optimizer, falls(job.of)),
        run_dir=job.folder / "run" if job.saves or job.resumes else None,
        callbacks=[lockstep.callbacks.Checkpoints()] if job.saves else [],
    )
    loader = DataLoader(Sentences(), batch_size=BATCH, shuffle=True, collate_fn=padded)
    trainer.fit(loader, max_steps=job.steps, resume="latest" if job.resumes else None)
    found(job, model, optimizer.param_groups[0]["lr"], trainer.comm.rank)


def accelerate_(job: Job) -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model, optimizer = make_model()
    batch = BATCH // accelerator.num_processes
    scheduler = LambdaLR(optimizer, falls(job.of))
    loader = DataLoader(Sentences(), batch_size=batch, shuffle=True, collate_fn=padded)
    wrapped, prepared, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    done = 0
    if job.resumes:
        accelerator.load_state(str(job.folder / "state"))
        done = int((job.folder / "done").read_text())
    wrapped.train()
    while done < job.steps:
        skipped = accelerator.skip_first_batches(loader, done % EPOCH) if done % EPOCH else loader
        for inputs in skipped:
            loss = wrapped(**inputs).loss
            accelerator.backward(loss)
            prepared.step()
            scheduler.step()
            prepared.zero_grad()
            done += 1
            if done == job.steps:
                break
    if job.saves:
        accelerator.save_state(str(job.folder / "state"))
        (job.folder / "done").write_text(str(done))
    accelerator.wait_for_everyone()
    found(
        job,
        accelerator.unwrap_model(wrapped),
        optimizer.param_groups[0]["lr"],
        accelerator.process_index,
    )
    accelerator.end_training()


def lightning_(job: Job) -> None:
    import lightning as light

    class Module(light.LightningModule):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = make_model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            scheduler = LambdaLR(self.optimizer, falls(job.of))
            return {
                "optimizer": self.optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    light.seed_everything(0, verbose=False)
    module = Module()
    workers = int(os.environ["WORLD_SIZE"])
    trainer = light.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy="ddp" if workers > 1 else "auto",
        max_steps=job.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    loader = DataLoader(Sentences(), batch_size=BATCH // workers, shuffle=True, collate_fn=padded)
    saved = str(job.folder / "state.ckpt")
    trainer.fit(module, loader, ckpt_path=saved if job.resumes else None)
    if job.saves:
        trainer.save_checkpoint(saved)
    found(job, module.model, module.optimizer.param_groups[0]["lr"], trainer.global_rank)


def transformers_(job: Job) -> None:
    import transformers

    class Stop(transformers.TrainerCallback):  # type: ignore[misc,name-defined,unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == job.steps:
                control.should_training_stop = True
                control.should_save = job.saves

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model, optimizer = make_model()
    workers = int(os.environ["WORLD_SIZE"])
    arguments = transformers.TrainingArguments(
        output_dir=str(job.folder / "run"),
        per_device_train_batch_size=BATCH // workers,
        max_steps=job.of,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=0,
        max_grad_norm=0.0,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Sentences(),
        data_collator=padded,
        optimizers=(optimizer, LambdaLR(optimizer, falls(job.of))),
        callbacks=[Stop()],
    )
    trainer.train(resume_from_checkpoint=job.resumes)
    found(job, model, optimizer.param_groups[0]["lr"], trainer.args.process_index)


SIDES = {
    "lockstep": lockstep_,
    "accelerate": accelerate_,
    "lightning": lightning_,
    "transformers": transformers_,
}

if __name__ == "__main__":
    side = sys.argv[1]
    words = json.loads(sys.argv[2])
    torch.set_num_threads(1)
    SIDES[side](Job(Path(words.pop("folder")), **words))
