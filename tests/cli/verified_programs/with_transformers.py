"""A program of Transformers' Trainer, and faults that are common in such programs: the first argument."""

import os
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

fault = sys.argv[1]
world = int(os.environ.get("WORLD_SIZE", "1"))

set_seed(0)
generator = torch.Generator().manual_seed(7)
tokens = torch.randint(5, 64, (48, 12), generator=generator)
lengths = torch.randint(3, 13, (48,), generator=generator)
data = []
for row, length in zip(tokens, lengths, strict=True):
    labels = row.clone()
    if fault in ("token mean", "right token mean"):
        labels[length:] = -100
    data.append({"input_ids": row, "labels": labels})

dropout = 0.1 if fault == "dropout" else 0.0
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
)


class OwnLoss(Trainer):
    """Its loss is the mean over the tokens of each worker's part of a batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


folder = os.environ.get("OUT") or tempfile.mkdtemp()
arguments = TrainingArguments(
    folder,
    per_device_train_batch_size=8 // world if fault == "divided batch" else 4,
    max_steps=6,
    learning_rate=0.01 * (world if fault == "scaled lr" else 1),
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)
kind = OwnLoss if fault == "token mean" else Trainer
kind(model=model, args=arguments, train_dataset=data).train()
