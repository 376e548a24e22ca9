"""Names and defaults of training options, in a module that does not import torch."""

from __future__ import annotations

PRECISIONS = ("fp32", "bf16", "fp16")

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes of `torch.compile`."""

IN_FLIGHT = 5
"""Default number of steps that may be queued on an accelerator."""

REPLICA_CHECK = 50
"""Default number of steps between two comparisons of sampled weights among workers."""
