"""The two models of the comparisons of language models, each with its optimizer and its tokens:
`lockstep.models.gpt`, and that of nanoGPT, written anew.

nanoGPT (A. Karpathy, 2022) cannot be installed as a package. Its model is a GPT-2 with learned
positions, LayerNorm without biases, GELU and tied weights; AdamW decays matrices only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from gpt_text import BETAS, LEARNING_RATE, SIZES, WEIGHT_DECAY, Sizes
from meter import Job

LOCKSTEP = "lockstep"
NANOGPT = "nanogpt"


@dataclass(frozen=True)
class GPTJob(Job):
    """What is trained; `model` is its size.

    Attributes:
        owner: whose model it is, "lockstep" or "nanogpt".
    """

    owner: str


class Layer(nn.Module):
    """Attention and an MLP of GPT-2."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.before_attention = nn.LayerNorm(width, bias=False)
        self.before_mlp = nn.LayerNorm(width, bias=False)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.joined = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, t, width) → (n, t, width)."""
        n, t, width = x.shape
        parts = self.attend(self.before_attention(x)).split(width, dim=2)
        q, k, v = (
            part.view(n, t, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).contiguous().view(n, t, width))
        y: torch.Tensor = x + self.narrow(F.gelu(self.widen(self.before_mlp(x))))
        return y


class NanoGPT(nn.Module):
    """The model: tokens (n, t) → logits (n, t, vocabulary)."""

    def __init__(self, vocabulary: int, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.context, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        self.head = nn.Linear(sizes.width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("joined.weight", "narrow.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * sizes.layers) if last else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class WithLoss(nn.Module):
    """A model with its loss inside, as nanoGPT has it: tokens (n, t) and targets (n, t) → the mean
    loss.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        logits = self.model(tokens)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS)


def known_bytes(owner: str, text: bytes) -> bytes:
    """The bytes that are tokens, in the order of their numbers: of nanoGPT's model those of the
    text, as it prepares a text by characters, of Lockstep's all 256, as `lockstep.data.text` has
    it.
    """
    return bytes(range(256)) if owner == LOCKSTEP else bytes(sorted(set(text)))


def build(job: GPTJob, vocabulary: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, tokens (n, t) → logits (n, t, vocabulary), and the optimizer that its owner trains
    it with.
    """
    sizes = SIZES[job.model]
    if job.owner == NANOGPT:
        other = NanoGPT(vocabulary, sizes)
        return other, make_optimizer(other)
    model = lockstep.models.gpt(vocabulary, **asdict(sizes))
    # nanoGPT has a fused AdamW on a GPU only
    fused = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    return model, fused
