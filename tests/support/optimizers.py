"""Optimizers to try: those of which each worker can update a part, and one that keeps more than
torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lockstep.training.optimizers import LAMB, LARS

__all__ = ["DIVISIBLE", "MasterSGD"]

DIVISIBLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-4),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=10.0),
    "lars": lambda p: LARS(p, lr=0.5),
    "lamb": lambda p: LAMB(p, lr=1e-2, weight_decay=0.01),
}
"""Functions that make an optimizer of parameters: those that update each tensor from its own
gradient and state. "muon", where torch has it, takes matrices only.
"""
if hasattr(torch.optim, "Muon"):
    DIVISIBLE["muon"] = lambda p: torch.optim.Muon(p, lr=0.02)


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
