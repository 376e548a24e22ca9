"""Names and numbers that the options of a training run share with what uses them, apart from torch."""

from __future__ import annotations

__all__ = ["IN_FLIGHT", "PRECISIONS", "REPLICA_CHECK"]

PRECISIONS = ("fp32", "bf16", "fp16")

IN_FLIGHT = 5
"""Steps that may be queued on an accelerator, if the user says nothing else."""

REPLICA_CHECK = 50
"""Steps between two looks at a few weights of all workers, likewise."""
