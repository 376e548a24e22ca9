"""What both sides of the comparisons of language models have: sizes, settings, and a text that
everybody has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common import DOCS


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT, as both sides name them."""

    context: int
    layers: int
    heads: int
    width: int


# those of nanoGPT's documentation for a CPU, and those of its model for characters
SIZES = {"small": Sizes(64, 4, 4, 128), "characters": Sizes(256, 6, 6, 384)}
TITLES = {"small": "4 layers of 128, context 64", "characters": "6 layers of 384, context 256"}

LEARNING_RATE = 1e-3
MIN_LEARNING_RATE = 1e-4
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
CLIP = 1.0
WARM_UP = 100  # steps


def project_text() -> bytes:
    """The project's documents one after the other, ASCII only, so that a character is a byte on
    both sides.
    """
    pages = [
        DOCS.parent / "README.md",
        *sorted(DOCS.glob("*.md")),
        *sorted(DOCS.glob("coming-from/*.md")),
    ]
    return b"\n".join(page.read_text(encoding="utf-8").encode("ascii", "ignore") for page in pages)


def write_text(path: Path, size: int, known: bytes) -> Path:
    """Write `size` bytes of the text to a file, from its beginning again where it ends; returns the
    path.

    Each byte is replaced by its number in `known`.
    """
    table = bytes(max(0, known.find(byte)) for byte in range(256))
    text = project_text().translate(table)
    path.write_bytes((text * (1 + size // len(text)))[:size])
    return path
