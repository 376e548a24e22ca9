"""A transformer whose parameters, gradients and optimizer state are cut over the workers (FSDP2),
not copied to each.

Run it alone or with several workers; the losses are the same up to rounding, and each worker holds
less:

    lockstep run -np 2 examples/sharded.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

WORDS = 64
LENGTH = 16
WIDTH = 96


class Writer(nn.Module):
    """Predicts the next of a row of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(4)
        )
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Words, shape (n, length) → scores of the following ones, shape (n, number of words,
        length).
        """
        x = self.words(words) + self.places
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=words.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=hidden)
        scores: torch.Tensor = self.scores(x)
        return scores.transpose(1, 2)


def rows(n: int) -> TensorDataset:
    """Each word is the one before plus a step that stays the same within a row."""
    draw = torch.Generator().manual_seed(0)
    start, step = torch.randint(WORDS, (2, n, 1), generator=draw)
    words = (start + (step % 5 + 1) * torch.arange(LENGTH + 1)) % WORDS
    return TensorDataset(words[:, :-1], words[:, 1:].contiguous())


def held(trainer: lockstep.Trainer) -> int:
    """Bytes of parameters and optimizer state on this worker."""
    states = [value for entries in trainer.optimizer.state.values() for value in entries.values()]
    found = [
        *trainer.model.parameters(),
        *(value for value in states if isinstance(value, torch.Tensor)),
    ]
    return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in found)


def main() -> None:
    """Train for three epochs, and say what each worker holds."""
    comm = lockstep.init()
    torch.manual_seed(0)
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = lockstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        global_batch_size=32,
        strategy="sharded",
        max_grad_norm=1.0,
        callbacks=[],
    )
    for row in trainer.fit(rows(512), epochs=3, validate=rows(64)):
        if comm.rank == 0:
            print(
                f"epoch {row['epoch']}: train loss {row['train_loss']:.5f}, val loss "
                f"{row['val_loss']:.5f}"
            )
    each = comm.allgather_object(held(trainer))
    if comm.rank == 0:
        print(
            "parameters and optimizer state, MB on each worker:",
            ", ".join(f"{n / 1e6:.2f}" for n in each),
        )


if __name__ == "__main__":
    main()
