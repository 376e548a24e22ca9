"""An optimizer for Adasum: each rank takes its own step, and what the steps have changed is combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.errors import ConfigError

from ..common.process_sets import ProcessSet
from ..engine.request import Adasum
from .hooks import check_idle, keeping, take_in
from .reducing import grouped_allreduce_

__all__ = ["DeltaMixin"]

Parameter = torch.Tensor


class DeltaMixin:
    """Combines changes of parameters; the class of the optimizer itself comes behind it."""

    param_groups: list[dict[str, Any]]

    def begin(self, names: dict[Parameter, str], compression: Any, passes: int, process_set: ProcessSet) -> None:
        """What a constructor would do."""
        self._parameter_names, self._compression, self._set = names, compression, process_set
        self._trained: list[Parameter] = []
        take_in(self)
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, so many backward passes come before each."""
        if not isinstance(passes, int) or passes < 1:
            raise ConfigError("backward_passes_per_step", "a whole number of at least 1", passes)
        self.backward_passes_per_step = passes
        self._left = dict.fromkeys(self._parameter_names, passes)

    def arrived(self, p: Parameter) -> None:
        """A backward pass has come to `p`."""
        if self._left[p] <= 0:
            raise AssertionError(
                "gradients were computed more than backward_passes_per_step times before step(). Make "
                "backward_passes_per_step larger to add up the gradients of several passes."
            )
        self._left[p] -= 1

    def synchronize(self) -> None:
        """Nothing: gradients stay those of this rank."""

    def skip_synchronize(self) -> None:
        """Not for Adasum. Raises an AssertionError."""
        raise AssertionError("skip_synchronize() cannot be used with op=hvd.Adasum: step() itself combines the ranks")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take this rank's step, and combine what it has changed with the changes of the others."""
        take_in(self)
        before = [p.detach().clone() for p in self._trained]
        loss = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            changes = [p - old for p, old in zip(self._trained, before, strict=True)]
            packed, ctxs = zip(*(self._compression.compress(change) for change in changes), strict=True)
            name = "adasum." + self._parameter_names[self._trained[0]]
            grouped_allreduce_(packed, name=name, op=Adasum, process_set=self._set)
            for p, old, tensor, ctx in zip(self._trained, before, packed, ctxs, strict=True):
                p.copy_(old + self._compression.decompress(tensor, ctx))
        self._left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As of the optimizer; not between a step's last backward pass and the step."""
        check_idle([p for p, left in self._left.items() if left == 0])
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As of the optimizer; passes are counted anew."""
        self._left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        with keeping(self):
            super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
