"""What the tests of a step's calls of torch share."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch.optim import optimizer as optimizer_module

from lockstep.training.step import torch_calls


@pytest.fixture
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that other tests have prepared leave a hook of all optimizers, and another
    backward().
    """
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(optimizer_module, name, OrderedDict())
    monkeypatch.setattr(torch.autograd, "backward", torch_calls._backward)
