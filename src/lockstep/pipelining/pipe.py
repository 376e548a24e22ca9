"""The pipeline: one worker's stage, with training steps, forward passes and state dicts over all
stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import arguments
from ..communicator import Communicator
from ..errors import ConfigError, DataError
from ..parallel.full_state import load_optimizer
from ..parallel.strategy import accumulation_dtype
from ..training.losses.loss import Loss, LossFn
from ..training.losses.mean_check import raise_problem
from ..training.step.precision import scale_gradients
from .full_state import (
    broadcast_tree,
    gather_stages,
    merge_optimizers,
    stage_optimizer_state,
    stage_state,
)

SCHEDULES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}

Values = tuple[torch.Tensor, ...]


def make_schedule(
    name: str,
    module: nn.Module,
    comm: Communicator,
    microbatches: int,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    passed: tuple[Values, Values],
) -> Any:
    """Create a schedule of `torch.distributed.pipelining`.

    Args:
        name: a name of `SCHEDULES`.
        module: this worker's stage.
        comm: communicator over the workers.
        microbatches: number of micro-batches in a batch.
        loss_fn: (output, target) of a micro-batch → its loss; the gradients are those of the sum of
            all losses.
        passed: example inputs and outputs of the stage for a micro-batch, so that torch need not
            infer them with a forward pass, which would change running statistics.

    Raises:
        ConfigError: for fewer micro-batches than stages where torch has no schedule for them, as
            torch 2.10.
    """
    from torch.distributed import pipelining

    stage = pipelining.PipelineStage(
        module,
        comm.rank,
        comm.size,
        comm.device,
        input_args=passed[0],
        output_args=passed[1],
        group=comm.group,
    )
    # With fewer micro-batches than stages both schedules are equal, but torch's 1F1B refuses them.
    supported = name if microbatches >= comm.size else "gpipe"
    try:
        return getattr(pipelining, SCHEDULES[supported])(
            stage, microbatches, loss_fn=loss_fn, scale_grads=False
        )
    except ValueError as error:
        if microbatches >= comm.size:
            raise
        expected = f"at least {comm.size}, one for each stage, with torch {torch.__version__}"
        hint = "A newer torch takes fewer."
        raise ConfigError(
            "microbatches", expected, found=f"{microbatches} ({error})", hint=hint
        ) from None


def forward_stages(
    module: nn.Module, inputs: torch.Tensor | None, comm: Communicator
) -> tuple[Values, Values]:
    """Run the forward pass of one micro-batch through all stages; returns the inputs and outputs of
    this stage.

    Args:
        module: this worker's stage.
        inputs: the micro-batch, needed on rank 0.
        comm: communicator over the workers, one for each stage.
    """
    received = (inputs,) if comm.rank == 0 and inputs is not None else _receive_inputs(comm)
    result = module(*received)
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if comm.rank < comm.size - 1:
        comm.send_object(
            [(value.shape, value.dtype, value.requires_grad) for value in outputs], comm.rank + 1
        )
        for value in outputs:
            comm.send(value.detach(), comm.rank + 1)
    return received, outputs


def _receive_inputs(comm: Communicator) -> Values:
    """Receive the outputs of the previous stage."""
    values = []
    for shape, dtype, requires_grad in comm.recv_object(comm.rank - 1):
        value = torch.empty(shape, dtype=dtype, device=comm.device)
        comm.recv(value, comm.rank - 1)
        values.append(value.requires_grad_(requires_grad))
    return tuple(values)


def dry_run(
    module: nn.Module, inputs: torch.Tensor | None, comm: Communicator
) -> tuple[Values, Values]:
    """Run `forward_stages`, and restore buffers and random generators."""
    with _preserve_state(module, comm.device), torch.enable_grad():
        return forward_stages(module, inputs, comm)


@contextmanager
def _preserve_state(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the buffers of `module` and torch's random generators after a `with` block."""
    saved: list[tuple[Any, str, torch.Tensor]] = [
        (layer, name, buffer.clone())
        for layer in module.modules()
        for name, buffer in layer._buffers.items()
        if buffer is not None
    ]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
    for layer, name, values in saved:
        layer._buffers[name].copy_(values)


# Default number of micro-batches for each stage: with S stages and M micro-batches, a worker is
# idle for (S - 1) / (M + S - 1) of the time, here less than a fifth.
_PER_STAGE = 4


class Pipeline:
    """One stage of a model that is split over the workers, see `lockstep.pipeline`.

    Experimental: may change in any release.

    All workers call every method together, except `parameters` and `named_parameters`:

        pipe = lockstep.pipeline(model, stages=2)
        optimizer = torch.optim.AdamW(pipe.parameters())
        loss = pipe.step(inputs, targets, nn.CrossEntropyLoss())
        optimizer.step()

    Args:
        module: this worker's stage, on its device, with the names of the whole model.
        comm: communicator over the workers.
        names: the names of the whole model's state dict, in order.
        schedule: a name of `SCHEDULES`.
        microbatches: see `lockstep.pipeline`.
        size: samples in a micro-batch, if the stages were traced for a fixed size.

    Attributes:
        module: this worker's stage.
        comm: communicator over the workers; the rank is the number of the stage.
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
        self.module = module
        self.comm = comm
        self._names = list(names)
        self._schedule_name = schedule
        self._microbatches = microbatches
        self._size = size
        self._loss_fn: LossFn = None
        self._loss: Loss | None = None  # of `_loss_fn`
        self._steps_done = 0
        self._batch_size = 0
        self._counts = [torch.zeros(())]
        self._schedule: tuple[Any, Any] = (None, None)  # what it was created for, and the schedule

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of this stage, with their names in the whole model."""
        return self.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this stage, for an optimizer."""
        return self.module.parameters()

    def train(self, mode: bool = True) -> Pipeline:
        """Put this stage into training or evaluation mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put this stage into evaluation mode."""
        return self.train(False)

    def step(self, batch: torch.Tensor, target: torch.Tensor, loss_fn: LossFn) -> torch.Tensor:
        """Run forward and backward passes of a batch; returns its mean loss, and replaces the
        gradients.

        Layers see one micro-batch at a time; batch norm has the statistics of a micro-batch.

        Args:
            batch: the inputs, equal on every worker, of shape (samples, …).
            target: the targets, equal on every worker, of shape (samples, …).
            loss_fn: see `lockstep.training.losses.loss.LossFn`.

        Returns:
            0-dim tensor of float64 (float32 on MPS) on the device, the same on every worker.

        Raises:
            ConfigError: for a batch that cannot be split into the micro-batches, another number of
                targets, or a loss that is not a mean over samples, see
                `lockstep.training.losses.mean_check`.
            DataError: if the loss counts nothing in the whole batch.
        """
        parts = self._check(batch, target)
        for p in self.parameters():
            p.grad = None
        loss = self._loss_of(loss_fn)
        self._batch_size = len(batch)
        self._counts = []
        is_compared = loss.expect(self._steps_done)
        losses = self._passes(batch.to(self.comm.device), target.to(self.comm.device), parts)
        problem = loss.check(nullcontext, compares_model=False)
        if is_compared:
            raise_problem(problem, self.comm)
        self._steps_done += 1
        totals = torch.zeros(2, device=self.comm.device, dtype=accumulation_dtype(self.comm.device))
        if self.comm.rank == self.comm.size - 1:
            totals[0] = torch.stack([loss.detach() for loss in losses]).sum() * len(batch)
            for count in self._counts[-parts:]:
                totals[1] += count
        self.comm.broadcast(totals, self.comm.size - 1)
        return self._mean_loss(*totals.unbind())

    def _loss_of(self, loss_fn: LossFn) -> Loss:
        """Return the loss for a function: the one of the last step if the function is the same.

        Raises:
            ConfigError: if it is no function.
        """
        if self._loss is None or loss_fn is not self._loss_fn:
            if loss_fn is None:
                raise ConfigError(
                    "loss_fn", "a function (output, target) -> loss, or a module", loss_fn
                )
            self._loss = Loss(loss_fn, self.comm.device)
            self._loss_fn = loss_fn
        return self._loss

    def _passes(self, batch: torch.Tensor, target: torch.Tensor, parts: int) -> list[torch.Tensor]:
        """Run the forward and backward passes of all micro-batches; returns their losses on the
        last worker.
        """
        if self.comm.size == 1:
            pairs = zip(batch.tensor_split(parts), target.tensor_split(parts), strict=True)
            return [self._single_worker_pass(*pair) for pair in pairs]
        first = self.comm.rank == 0
        last = self.comm.rank == self.comm.size - 1
        losses: list[torch.Tensor] = []
        schedule = self._schedule_for(batch.tensor_split(parts)[0], parts)
        schedule.step(
            *([batch] if first else []),
            target=target if last else None,
            losses=losses if last else None,
        )
        return losses

    def _single_worker_pass(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self._part_loss(self.module(inputs), target)
        torch.autograd.backward(loss)
        return loss

    def _schedule_for(self, inputs: torch.Tensor, parts: int) -> Any:
        """Return the schedule; a new one if the micro-batches have another shape than those of the
        last step.
        """
        key = (inputs.shape, inputs.dtype, parts, torch.is_autocast_enabled(self.comm.device.type))
        if self._schedule[0] != key:
            passed = dry_run(self.module, inputs, self.comm)
            schedule = make_schedule(
                self._schedule_name, self.module, self.comm, parts, self._part_loss, passed
            )
            self._schedule = (key, schedule)
        return self._schedule[1]

    def _part_loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        total, count = self._loss(output, target, len(target))
        self._counts.append(torch.as_tensor(count, device=self.comm.device))
        return total / self._batch_size

    def _mean_loss(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, and scale the gradients of a mean over samples to that over what
        the loss counts.
        """
        if count.device.type == "cpu" and count == 0:
            raise DataError(
                "expected a batch with something that the loss counts, got only e.g. ignored labels"
            )
        factor = self._batch_size / count
        # reading the factor of another device would wait for it
        if count.device.type != "cpu" or factor != 1:
            scale_gradients(self._gradients(), factor)
        return total / count

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def _check(self, batch: Any, target: Any) -> int:
        """Check a batch and its targets; returns the number of micro-batches."""
        for name, value in (("batch", batch), ("target", target)):
            arguments.instance(name, value, torch.Tensor, "a tensor of shape (samples, …)")
            if value.dim() == 0:
                raise ConfigError(
                    name, "a tensor of shape (samples, …)", found="a tensor without dimensions"
                )
        if len(batch) != len(target):
            raise ConfigError(
                "target", f"as many as samples in the batch, {len(batch)}", len(target)
            )
        return self._microbatch_count(len(batch))

    def _microbatch_count(self, samples: int) -> int:
        """Return the number of micro-batches in a batch."""
        if samples == 0:
            raise ConfigError("batch", "at least one sample", 0)
        if self._size is not None:
            if samples % self._size or self._microbatches not in (None, samples // self._size):
                wanted = self._microbatches or "some"
                raise ConfigError(
                    "batch",
                    f"{wanted} micro-batches of {self._size}, as the example",
                    found=f"{samples} samples",
                )
            return samples // self._size
        if self._microbatches is None:
            return max(n for n in range(1, _PER_STAGE * self.comm.size + 1) if samples % n == 0)
        if samples % self._microbatches:
            hint = (
                "Leave out the last batch of an epoch (drop_last=True), or choose another number."
            )
            raise ConfigError(
                "batch", f"samples in {self._microbatches} equal micro-batches", samples, hint
            )
        return self._microbatches

    @torch.no_grad()
    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the model's output for a batch, the same on every worker, without gradients.

        Raises:
            ConfigError: for a batch that cannot be split into the micro-batches.
        """
        parts = batch.to(self.comm.device).tensor_split(self._microbatch_count(len(batch)))
        outputs = [forward_stages(self.module, part, self.comm)[1] for part in parts]
        output = (
            torch.cat([values[0] for values in outputs])
            if self.comm.rank == self.comm.size - 1
            else None
        )
        result: torch.Tensor = broadcast_tree(
            output, self.comm, self.comm.size - 1, self.comm.device
        )
        return result

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of all stages to a joint 2-norm of at most `max_norm`; returns the
        norm before.
        """
        gradients = self._gradients()
        dtype = accumulation_dtype(self.comm.device)
        squares = [gradient.to(dtype).square().sum() for gradient in gradients]
        total = torch.stack(
            squares or [torch.zeros((), device=self.comm.device, dtype=dtype)]
        ).sum()
        norm = self.comm.allreduce(total.reshape(1)).sqrt()[0]
        scale_gradients(gradients, (max_norm / (norm + 1e-6)).clamp(max=1))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the whole model, with tensors on the CPU, the same on every
        worker.
        """
        entries = gather_stages(self.module.state_dict(), self.comm)
        return {name: entries[name] for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this stage's part of the state dict of the whole model, from one device or any
        number of stages.

        Raises:
            CheckpointError: if it is the state dict of another model.
        """
        self.module.load_state_dict(stage_state(state, self._names, self.module.state_dict()))

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of one optimizer over the whole model, merged from the optimizers
        of all stages.

        Raises:
            ConfigError: for an optimizer with several groups, or other parameters than this
                stage's.
        """
        return merge_optimizers(optimizer, dict(self.named_parameters()), self._names, self.comm)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this stage's part of the state dict of one optimizer over the whole model.

        Raises:
            CheckpointError: if it has another number of parameters.
            ConfigError: see `optimizer_state_dict`.
        """
        parameters = dict(self.named_parameters())
        load_optimizer(
            optimizer, stage_optimizer_state(optimizer, parameters, self._names, self.comm, state)
        )
