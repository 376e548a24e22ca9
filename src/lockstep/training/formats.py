"""Names and numbers that the options of a training run share with what uses them, apart from torch."""

from __future__ import annotations

__all__ = ["IN_FLIGHT", "PRECISIONS"]

PRECISIONS = ("fp32", "bf16", "fp16")

IN_FLIGHT = 5
"""Steps that may be queued on an accelerator, if the user says nothing else."""
