"""This worker's stage of a model, and what all stages do together: a batch, an output, a state dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..communicator import Communicator
from ..errors import ConfigError, DataError
from ..training.losses import LossFn, LossSum
from ..training.sums import raise_together
from .schedules import make_schedule
from .stage import pass_on, try_out
from .whole import from_one, gathered, merge_optimizers, own_part, part_of_optimizer

__all__ = ["Pipeline"]

# Micro-batches for each stage where the user says no number: with S stages and M micro-batches, (S - 1) / (M + S - 1)
# of the time nothing can be done, here less than a fifth.
_PER_STAGE = 4


class Pipeline:
    """One stage of a model that is cut over the workers, see `lockstep.pipeline`.

    Every method but `parameters` and `named_parameters` is called by all workers together::

        pipe = lockstep.pipeline(model, stages=2)
        optimizer = torch.optim.AdamW(pipe.parameters())
        loss = pipe.step(inputs, targets, nn.CrossEntropyLoss())
        optimizer.step()

    Args:
        module: this worker's stage, on its device, with the whole model's names.
        comm: the workers.
        names: of the whole model's state dict.
        schedule: of `lockstep.pipelining.schedules`.
        microbatches: see `lockstep.pipeline`.
        size: samples in a micro-batch where the stages take no other number.

    Attributes:
        module: this worker's stage.
        comm: the workers; the rank is the number of the stage.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        names: Sequence[str],
        schedule: str = "1f1b",
        microbatches: int | None = None,
        size: int | None = None,
    ) -> None:
        self.module, self.comm = module, comm
        self._names, self._order, self._microbatches, self._size = list(names), schedule, microbatches, size
        self._loss: LossSum | None = None
        self._loss_checked = False  # whether it has been found to be a mean over samples
        self._batch, self._counts = 0, [torch.zeros(())]
        self._schedule: tuple[Any, Any] = (None, None)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this stage, by their names in the whole model."""
        return self.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this stage, for an optimizer."""
        return self.module.parameters()

    def train(self, mode: bool = True) -> Pipeline:
        """Put this stage into training or evaluation mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put this stage into evaluation mode."""
        return self.train(False)

    def step(self, batch: torch.Tensor, target: torch.Tensor, loss_fn: LossFn) -> torch.Tensor:
        """The loss of a batch, its mean over the whole batch, and its gradients in place of those of before.

        Layers see one micro-batch at a time: batch norm normalises over it alone.

        Args:
            batch: the same on every worker, shape (samples, …).
            target: the same on every worker, shape (samples, …).
            loss_fn: see `lockstep.training.losses.LossFn`.

        Returns:
            0-dim tensor on the device, the same on every worker.

        Raises:
            ConfigError: for a batch that cannot be cut into the micro-batches, another number of targets, or at the
                first step a loss that is no mean over samples.
            DataError: when the loss counts nothing in the whole batch.
        """
        parts = self._check(batch, target)
        for p in self.parameters():
            p.grad = None
        self._loss, self._batch, self._counts = LossSum(loss_fn, self.comm.device), len(batch), []
        if self._loss_checked:
            self._loss.parts.close()
        losses = self._passes(batch.to(self.comm.device), target.to(self.comm.device), parts)
        if not self._loss_checked:
            raise_together(self._loss.parts.check(), self.comm)
            self._loss_checked = True
        totals = torch.zeros(2, device=self.comm.device, dtype=_wide(self.comm.device))
        if self.comm.rank == self.comm.size - 1:
            totals[0] = torch.stack([loss.detach() for loss in losses]).sum() * len(batch)
            for count in self._counts[-parts:]:
                totals[1] += count
        self.comm.broadcast(totals, self.comm.size - 1)
        return self._averaged(*totals.unbind())

    def _passes(self, batch: torch.Tensor, target: torch.Tensor, parts: int) -> list[torch.Tensor]:
        """Forward and backward passes of all micro-batches; the last worker gets their losses."""
        if self.comm.size == 1:
            pairs = zip(batch.tensor_split(parts), target.tensor_split(parts), strict=True)
            return [self._alone(*pair) for pair in pairs]
        first, last = self.comm.rank == 0, self.comm.rank == self.comm.size - 1
        losses: list[torch.Tensor] = []
        schedule = self._made(batch.tensor_split(parts)[0], parts)
        schedule.step(*([batch] if first else []), target=target if last else None, losses=losses if last else None)
        return losses

    def _alone(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self._part_loss(self.module(inputs), target)
        torch.autograd.backward(loss)
        return loss

    def _made(self, inputs: torch.Tensor, parts: int) -> Any:
        """The schedule, again where micro-batches are of another shape than those of the last step."""
        kind = (inputs.shape, inputs.dtype, parts, torch.is_autocast_enabled(self.comm.device.type))
        if self._schedule[0] != kind:
            passed = try_out(self.module, inputs, self.comm)
            made = make_schedule(self._order, self.module, self.comm, parts, self._part_loss, passed)
            self._schedule = (kind, made)
        return self._schedule[1]

    def _part_loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        total, count = self._loss(output, target, len(target))
        self._counts.append(torch.as_tensor(count, device=self.comm.device))
        return total / self._batch

    def _averaged(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """The mean loss; gradients, of a mean over samples, become those of the mean over what the loss counts."""
        if count.device.type == "cpu" and count == 0:
            raise DataError("expected a batch with something that the loss counts, got only e.g. ignored labels")
        factor = self._batch / count
        if count.device.type != "cpu" or factor != 1:  # to ask is free on the CPU; elsewhere it would wait for a device
            self._multiply(factor)
        return total / count

    def _multiply(self, factor: torch.Tensor) -> None:
        """Multiply all gradients."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        for dtype in {gradient.dtype for gradient in gradients}:
            own = [gradient for gradient in gradients if gradient.dtype == dtype]
            torch._foreach_mul_(own, factor.to(dtype))

    def _check(self, batch: Any, target: Any) -> int:
        for name, value in (("batch", batch), ("target", target)):
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                raise ConfigError(name, "a tensor of shape (samples, …)", found=_described(value))
        if len(batch) != len(target):
            raise ConfigError("target", f"as many as samples in the batch, {len(batch)}", len(target))
        return self._number(len(batch))

    def _number(self, samples: int) -> int:
        """Of micro-batches."""
        if samples == 0:
            raise ConfigError("batch", "at least one sample", 0)
        if self._size is not None:
            if samples % self._size or self._microbatches not in (None, samples // self._size):
                wanted = self._microbatches or "some"
                raise ConfigError(
                    "batch", f"{wanted} micro-batches of {self._size}, as the example", found=f"{samples} samples"
                )
            return samples // self._size
        if self._microbatches is None:
            return max(n for n in range(1, _PER_STAGE * self.comm.size + 1) if samples % n == 0)
        if samples % self._microbatches:
            hint = "Leave out the last batch of an epoch (drop_last=True), or choose another number."
            raise ConfigError("batch", f"samples in {self._microbatches} equal micro-batches", samples, hint)
        return self._microbatches

    @torch.no_grad()
    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """The model's output for a batch, the same on every worker, without gradients.

        Raises:
            ConfigError: for a batch that cannot be cut into the micro-batches.
        """
        parts = batch.to(self.comm.device).tensor_split(self._number(len(batch)))
        outputs = [pass_on(self.module, part, self.comm)[1] for part in parts]
        whole = torch.cat([values[0] for values in outputs]) if self.comm.rank == self.comm.size - 1 else None
        result: torch.Tensor = from_one(whole, self.comm, self.comm.size - 1, self.comm.device)
        return result

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all stages down together to a 2-norm of at most `max_norm`; the norm before."""
        squares = [p.grad.to(_wide(self.comm.device)).square().sum() for p in self.parameters() if p.grad is not None]
        total = torch.stack(squares or [torch.zeros((), device=self.comm.device, dtype=_wide(self.comm.device))]).sum()
        norm = self.comm.allreduce(total.reshape(1)).sqrt()[0]
        factor = (max_norm / (norm + 1e-6)).clamp(max=1)
        self._multiply(factor)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """That of the whole model, its tensors on the CPU, the same on every worker."""
        found = gathered(self.module.state_dict(), self.comm)
        return {name: found[name] for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up this stage's part of the state dict of the whole model, from one device or any number of stages.

        Raises:
            CheckpointError: when it is of another model.
        """
        self.module.load_state_dict(own_part(state, self._names, self.module.state_dict()))

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """That of one optimizer over all parameters of the whole model; each worker gives that of its stage.

        Raises:
            ConfigError: for an optimizer with several groups, or other parameters than this stage's.
        """
        return merge_optimizers(optimizer, dict(self.named_parameters()), self._names, self.comm)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take up this stage's part of the state dict of one optimizer over the whole model.

        Raises:
            CheckpointError: when that has another number of parameters.
            ConfigError: as `optimizer_state_dict`.
        """
        own = part_of_optimizer(optimizer, dict(self.named_parameters()), self._names, self.comm, state)
        optimizer.load_state_dict(own)


def _described(value: Any) -> str:
    return "a tensor without dimensions" if isinstance(value, torch.Tensor) else type(value).__name__


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
