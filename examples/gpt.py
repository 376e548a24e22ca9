"""A GPT and a training loop of one's own, on any text file, with the same losses on any number of
workers.

python examples/gpt.py [FILE] [STEPS]
lockstep run -np 2 examples/gpt.py

Without a file it reads the documentation of this project. 400 steps take about a minute on two
cores.
"""

import math
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import lockstep

CONTEXT = 64
WIDTH = 96
HEADS = 4
LAYERS = 3


class Block(nn.Module):
    """Attention to the tokens before, and an MLP: (n, t, WIDTH) → (n, t, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        """Return the output for `x`."""
        n, t, _ = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens (n, t) → scores of what follows each of them (n, t, vocabulary)."""

    def __init__(self, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, tokens):
        """Return the scores."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.places(places)))


def documentation(folder):
    """One file of all pages, for whoever names none."""
    pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    path = Path(folder, "documentation.txt")
    path.write_text("\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
    return path


def train(file, steps):
    comm = lockstep.init()
    torch.manual_seed(0)
    train, test = lockstep.data.text(file, CONTEXT)  # each byte is a token
    model = GPT(train.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    loader = DataLoader(train, batch_size=32, shuffle=True)  # 32 blocks in a step, over all workers
    model, optimizer, schedule, loader = lockstep.prepare(
        model, optimizer, schedule, loader, max_grad_norm=1.0
    )
    done = 0
    while done < steps:
        for tokens, following in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            loss.backward()
            mean = optimizer.step(loss=loss)  # over the global batch
            schedule.step()
            done += 1
            if comm.rank == 0 and (done % 50 == 0 or done == steps):
                print(f"step {done:>4}  loss {float(mean):.4f}", flush=True)
            if done == steps:
                break

    held_out = lockstep.Loader(test, 64, shuffle=False)
    loss = lockstep.evaluate(model, held_out, lockstep.models.next_token_loss)["loss"]
    if comm.rank == 0:
        print(f"loss {loss:.4f} and perplexity {math.exp(loss):.2f} on the text held out")
        beginning = torch.tensor([train.encode("The ")], device=comm.device)
        model.eval()
        written = lockstep.models.continue_text(model, beginning, 200, CONTEXT, temperature=0.8)
        print(train.decode(written[0].tolist()))


if __name__ == "__main__":
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 400
    with tempfile.TemporaryDirectory() as folder:
        train(sys.argv[1] if len(sys.argv) > 1 else documentation(folder), steps)
