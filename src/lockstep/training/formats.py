"""The number formats in which a model can be trained, by name."""

from __future__ import annotations

__all__ = ["PRECISIONS"]

PRECISIONS = ("fp32", "bf16", "fp16")
