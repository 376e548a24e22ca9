"""A small GPT: a transformer that predicts the next token of a text, its loss, and texts that it
writes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .. import arguments
from ..errors import ConfigError

_ROTATION_BASE = 10_000.0  # of Su et al.: the slowest pair turns once in 2π × 10,000 positions
_STD = 0.02  # of initial weights, as in GPT-2


class Attention(nn.Module):
    """Causal self-attention with several heads: (n, t, width) → (n, t, width).

    Source: Vaswani et al., "Attention is all you need", NeurIPS 2017.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Return, for each position, a mixture of the values at this position and those before
        it.
        """
        n, t, width = x.shape
        parts = self.queries_keys_values(x).view(n, t, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # each (n, heads, t, width / heads)
        dropout = self.dropout if self.training else 0.0
        queries = rotate(queries, rotation)
        keys = rotate(keys, rotation)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=True
        )
        joined: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(n, t, width))
        return joined


class MLP(nn.Sequential):
    """Two layers with ReLU between them, four times as wide inside: (n, t, width) → (n, t, width).

    ReLU in place takes a CPU a fifth of the time of GELU, 5 % of a step; SwiGLU was not faster, and
    is more to read.
    """

    def __init__(self, width: int) -> None:
        widen = nn.Linear(width, 4 * width, bias=False)
        narrow = nn.Linear(4 * width, width, bias=False)
        super().__init__(widen, nn.ReLU(inplace=True), narrow)


class Block(nn.Module):
    """Attention and an MLP, side by side, both added to their input: (n, t, width) → (n, t, width).

    Their input is normalised (Zhang, Sennrich, "Root mean square layer normalization", NeurIPS
    2019), the sum is not, as in GPT-2. The norm has no gains of its own: the matrices after it can
    hold these. Side by side needs one norm a block instead of two (Chowdhery et al., "PaLM: scaling
    language modeling with pathways", 2022, section 2).
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = norm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Return the block's output for `x`."""
        normed = self.norm(x)
        y: torch.Tensor = (
            x + self.dropout(self.attention(normed, rotation)) + self.dropout(self.mlp(normed))
        )
        return y


def norm(width: int) -> nn.RMSNorm:
    """Return a layer that divides the numbers of a position by their root mean square: (n, t,
    width) → the same.
    """
    return nn.RMSNorm(width, elementwise_affine=False)


class GPT(nn.Module):
    """A transformer decoder: tokens (n, t), int64 → logits of the tokens that follow each of them
    (n, t, vocabulary).

    Positions are rotations of queries and keys, see `rotations`, so that t is not limited. The
    embedding is also the output layer ("tied weights": Press, Wolf, "Using the output embedding to
    improve language models", EACL 2017).

    Args:
        vocabulary: number of different tokens.
        context: number of tokens that it is trained with, and that `generate` looks back at.
        layers: number of blocks.
        heads: number of attention heads in a block.
        width: numbers for a token between blocks; a multiple of 2 × `heads`.
        dropout: the probability with which a number is zeroed in training.

    Raises:
        ConfigError: for sizes below 1, a width that does not fit the heads, or a dropout that is no
            probability.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int = 256,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {
            "vocabulary": vocabulary,
            "context": context,
            "layers": layers,
            "heads": heads,
            "width": width,
        }
        for name, size in sizes.items():
            arguments.whole(name, size, least=1)
        if width % (2 * heads):
            raise ConfigError(
                "width", f"a multiple of {2 * heads}, twice the number of heads", width
            )
        arguments.number(
            "dropout", dropout, least=0, below=1, expected="a probability from 0 to below 1"
        )
        self.context = context
        self.pairs = width // heads // 2
        # a parameter, not an nn.Embedding: the output layer uses it too, and so it belongs to
        # neither
        self.embedding = nn.Parameter(torch.empty(vocabulary, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = norm(width)
        self.initialise()

    def initialise(self) -> None:
        """Draw the weights as GPT-2 does: those that add to the residual stream are smaller the
        more of them there are.

        Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section
        2.3.
        """
        nn.init.normal_(self.embedding, std=_STD)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.2.weight")):
                nn.init.normal_(weight, std=_STD / math.sqrt(2 * len(self.blocks)))
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=_STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits for `tokens`; those at a position depend on the tokens up to it
        alone.

        Args:
            tokens: int64, of shape (n, t), where t is at most the context.
        """
        rotation = rotations(tokens.shape[1], self.pairs, tokens.device)
        x = self.dropout(F.embedding(tokens, self.embedding))
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.embedding)

    def generate(
        self,
        tokens: torch.Tensor,
        count: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return `tokens` (n, t) with `count` more, see `continue_text`.

        Args:
            tokens: int64, of shape (n, t): how the texts begin.
            count: the number of tokens to add.
            temperature: logits are divided by it: lower values make likely tokens likelier.
            top_k: draw among so many of the likeliest tokens; among all when None.
            generator: of the draws; torch's global one when None.
        """
        return continue_text(
            self,
            tokens,
            count,
            self.context,
            temperature=temperature,
            top_k=top_k,
            generator=generator,
        )


def gpt(
    vocabulary: int = 256,
    context: int = 256,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    dropout: float = 0.0,
) -> GPT:
    """Build a small GPT, of 0.8 million parameters by default: tokens (n, t), int64 → logits (n, t,
    vocabulary).

    `lockstep.data.text` makes data for it.

    Args:
        vocabulary: number of different tokens.
        context: the longest sequence, in tokens.
        layers: number of blocks.
        heads: number of attention heads in each.
        width: features of a token.
        dropout: probability that a value is set to zero in training.
    """
    return GPT(vocabulary, context, layers, heads, width, dropout)


def rotations(positions: int, pairs: int, device: torch.device) -> torch.Tensor:
    """Return for each position the angles by which the pairs of numbers of a query or key are
    turned, as their cosines and sines.

    A pair is turned by an angle in proportion to its position, so that the product of a query and a
    key depends on the distance of their positions alone.

    Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.

    Args:
        positions: number of positions.
        pairs: number of pairs in a head; each turns at a speed of its own.
        device: where to compute them.

    Returns:
        float32 tensor (positions, pairs, 2), in this precision whatever that of the model is.
    """
    # computed anew in each pass, which costs next to nothing: as buffers they would be cast with
    # the model
    speeds = _ROTATION_BASE ** (-torch.arange(pairs, device=device, dtype=torch.float32) / pairs)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * speeds
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn each pair of neighbours in `x` (n, heads, t, 2 × pairs) by the angle of its position.

    A pair is a complex number here, so that one product turns it: half of the time of the four real
    ones on a CPU. Torch's compiler makes one kernel of these four, and none of complex numbers.

    Args:
        x: queries or keys.
        rotation: see `rotations`.
    """
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    if torch.compiler.is_compiling():
        first, second = pairs.unbind(-1)
        cos, sin = rotation.unbind(-1)
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    else:
        complex_product = torch.view_as_complex(pairs) * torch.view_as_complex(rotation)
        turned = torch.view_as_real(complex_product)
    return turned.flatten(-2).type_as(x)


def next_token_loss(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Return the sum of the cross-entropies of all tokens, and their number: a loss for
    `lockstep.Trainer`.

    Args:
        logits: of shape (n, t, vocabulary).
        targets: the token that follows at each position, int64 of shape (n, t); -100 is not
            counted.
    """
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum"
    )
    return total, (targets != _IGNORED).sum()


_IGNORED = -100  # of torch


@torch.no_grad()
def continue_text(
    model: nn.Module,
    tokens: torch.Tensor,
    count: int,
    context: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return `tokens` with `count` more after them, each drawn with the probability that `model`
    gives it.

    Args:
        model: tokens (n, t) → logits (n, t, vocabulary). If it has dropout, put it into evaluation
            mode before.
        tokens: the beginnings of n texts, int64 of shape (n, t), t at least 1.
        count: number of tokens to add.
        context: number of last tokens that the model sees of a longer text.
        temperature: the logits are divided by it; 0 takes the most probable token.
        top_k: draw from so many most probable tokens; from all when None.
        generator: draws on the CPU, so that they do not depend on the device; torch's global one
            when None.

    Returns:
        Tokens (n, t + count), on the device of `tokens`.

    Raises:
        ConfigError: for tokens of another form, a negative count or temperature, or a context or
            top_k below 1.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 1 or tokens.dtype != torch.int64:
        expected = "torch.int64 of shape (texts, tokens), with at least one token"
        raise ConfigError("tokens", expected, found=f"{tokens.dtype} of shape {list(tokens.shape)}")
    arguments.whole("count", count, least=0)
    arguments.number("temperature", temperature, least=0)
    arguments.whole("context", context, least=1)
    if top_k is not None:
        arguments.whole("top_k", top_k, least=1)
    for _ in range(count):
        logits = model(tokens[:, -context:])[:, -1].float().cpu()
        following = _draw(logits, temperature, top_k, generator)
        tokens = torch.cat((tokens, following.to(tokens.device)), dim=1)
    return tokens


def _draw(
    logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> torch.Tensor:
    """Return one token for each row of `logits`: (n, vocabulary) → (n, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        logits, kept = logits.topk(top_k, dim=-1)
    else:
        kept = None
    drawn = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
    return drawn if kept is None else kept.gather(1, drawn)
