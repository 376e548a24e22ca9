"""Optimizers that keep more than torch's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["MasterSGD"]


class MasterSGD(torch.optim.Optimizer):
    """SGD on a float32 copy of each parameter, with a counter, and a list of a float32 tensor and a
    mask.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.003) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["count"] = torch.zeros((), dtype=torch.int64)
                    state["parts"] = [torch.full((3,), 1 + 2**-12), torch.tensor([True, False])]
                state["count"] += 1
                state["master"].sub_(
                    p.grad.float(), alpha=group["lr"] * float(state["parts"][0][0])
                )
                p.copy_(state["master"])
