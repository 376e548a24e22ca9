"""The interface of strategies: how a model and its training state are distributed over workers and
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import devices
from ..communicator import Communicator
from ..communicator.elastic_communicator import ElasticCommunicator
from ..errors import ConfigError
from .fingerprints import fingerprint, fingerprint_of
from .full_state import load_model, load_optimizer, read_optimizer_state
from .optimizer_shards import OptimizerShards, divided

__all__ = ["MakeTotals", "Strategy", "Sums", "accumulation_dtype", "number_on"]

MakeTotals = Callable[..., torch.Tensor]
"""(*further numbers) → this worker's totals of a step and these numbers, 1-d floating tensor on the
device.
"""

Sums = torch.Tensor | Sequence[float | torch.Tensor]
"""Sums over the workers: a 1-d tensor, or numbers if there is one worker or they are on the host in
any case.
"""


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums of losses, counts and statistics: float64, or float32 on a device
    without it.
    """
    return torch.float64 if devices.has_float64(device) else torch.float32


def number_on(device: torch.device, value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a 0-dim tensor on `device`, without waiting for it.

    Args:
        device: the device.
        value: a number, or a 0-dim tensor.
        dtype: of the result.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype, non_blocking=True)
    return torch.full((), value, dtype=dtype, device=device)


class Strategy:
    """The whole model on each worker, without communication: the strategy of one worker, and the
    base class.

    A `TrainStep` calls, in this order: `check`, `prepare` and `update_optimizer` once; `wrap` once,
    and again when the set of trained parameters changes; then in each step `gradient_sync` around
    each pass, and `reduce_totals` in the last of them. When the model has gained parameters,
    `prepare` and `update_optimizer` are called again.

    Args:
        comm: communicator over the workers.

    Attributes:
        virtual_workers: number of shards of a global batch; None if it is divided among the workers
            only.
        collective_forward: whether a forward pass communicates, so that every worker must run the
            same number of passes, even one without samples.
        sharded_state: whether parameters are DTensors, and each worker writes and reads its shards
            of a checkpoint.
        can_regroup: whether every worker holds the whole state, so that a step can be repeated by
            other workers.
        loss_modules: the modules of the loss function, if any, set before `prepare`: their buffers
            are treated as the model's.
        can_shard_optimizer: whether the optimizer's state can be divided among the workers.
        divides_gradients: whether a step with a divided optimizer leaves the gradient of a
            parameter to its owner alone; otherwise all workers have all gradients.
        shards: which worker updates which parameter of a prepared model, if the optimizer's state
            is divided among the workers; None if each worker has all of it.
    """

    virtual_workers: int | None = None
    collective_forward: bool = False
    sharded_state: bool = False
    can_regroup: bool = True
    loss_modules: nn.Module | None = None
    can_shard_optimizer: bool = False
    divides_gradients: bool = False
    shards: OptimizerShards | None = None

    _sharded_optimizer: Optimizer | None = None

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    @property
    def devices(self) -> list[torch.device]:
        """The devices that this worker computes on; batches and losses are on the first one."""
        return [self.comm.device]

    def with_virtual_workers(self, virtual_workers: int, threads: int | None) -> Strategy:
        """Return the strategy that replaces this one and computes each step in `virtual_workers`
        shards.

        Raises:
            ConfigError: if this strategy does not support virtual workers.
        """
        raise ConfigError(
            "virtual_workers",
            f"none with the strategy {type(self).__name__.lower()}",
            virtual_workers,
        )

    def check(self, optimizer: Optimizer, precision: str) -> None:
        """Check that this strategy supports `optimizer` and `precision`; called before anything is
        changed.

        Raises:
            ConfigError: if it does not.
        """

    def shard_optimizer(self, optimizer: Optimizer) -> None:
        """Divide the state of an optimizer among the workers, with the same bits; called before
        `prepare`.

        Raises:
            ConfigError: if this strategy does not support that.
        """
        if not self.can_shard_optimizer:
            raise ConfigError(
                "shard_optimizer",
                "true only with strategy='distributed', with or without virtual_workers",
                found=f"true, with the strategy {type(self).__name__.lower()}",
                hint="strategy='sharded' divides parameters, gradients and state by itself, with "
                "other bits.",
            )
        self._sharded_optimizer = optimizer

    @property
    def is_optimizer_sharded(self) -> bool:
        """Whether `shard_optimizer` was called."""
        return self._sharded_optimizer is not None

    @property
    def divides_optimizer(self) -> bool:
        """Whether `shard_optimizer` was called and there are, or may be, several workers."""
        may_change = isinstance(self.comm, ElasticCommunicator)
        return self.is_optimizer_sharded and (self.comm.size > 1 or may_change)

    def choose_owners(self, model: nn.Module) -> None:
        """Choose who updates which parameter of a model, in `prepare`, if the optimizer's state is
        to be divided.

        Raises:
            ConfigError: if the model has other parameters than before.
            ConfigError, MismatchError: see `lockstep.parallel.optimizer_shards.divided`.
        """
        parameters = list(model.parameters())
        if self.shards is not None:
            self.shards.check_same(parameters)
        elif self.divides_optimizer:
            assert self._sharded_optimizer is not None
            self.shards = divided(
                self._sharded_optimizer,
                parameters,
                self.comm,
                has_second_owners=isinstance(self.comm, ElasticCommunicator),
                has_equal_bits=self.virtual_workers is not None,
            )

    def prepare(self, model: nn.Module) -> None:
        """Move the model to its device, with rank 0's values on every worker."""

    def with_loss(self, model: nn.Module) -> nn.Module:
        """Return a container of `model` and the modules of the loss, whose buffers forward passes
        change as well.
        """
        return nn.ModuleList([model, *([] if self.loss_modules is None else [self.loss_modules])])

    def update_optimizer(self, optimizer: Optimizer) -> None:
        """Replace the optimizer's parameters by those that `prepare` has put in their place, if
        any.
        """

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module that a step calls instead of `module`: (data, samples) → (sum of the
        loss, count).

        Its gradients are *averaged* over the workers, by its backward pass or by what
        `reduce_totals` returns.
        """
        return module

    def deterministic(self) -> AbstractContextManager[object]:
        """Return a context manager that applies determinism settings during a step; none here."""
        return nullcontext()

    backward_name = "gradient all-reduce"
    """What the watchdog calls the collectives of a backward pass."""

    totals_name = "loss and sample count"
    """What the watchdog calls those of `reduce_totals`."""

    def gradient_sync(self, now: bool) -> AbstractContextManager[object]:
        """Return a context manager for one pass of a step.

        Args:
            now: whether the pass reduces the gradients; otherwise they accumulate until a later
                pass.
        """
        return nullcontext()

    def reduce_totals(
        self, totals: MakeTotals, weight: float, add_up: bool = True
    ) -> Callable[[], Sums]:
        """Start to sum a step's totals over the workers; returns a function that waits for the
        sums.

        Called between the last forward pass and its backward pass, so that the reduction may
        overlap with the latter, and the function that it returns after both.

        Args:
            totals: returns this worker's, with further numbers behind them.
            weight: this worker's share of the step's samples, 0 to 1.
            add_up: whether the workers' weights add up to 1; otherwise they are divided by their
                sum.
        """
        return self.comm.iallreduce(totals()).wait

    def cast_parameters(self, model: nn.Module, precision: str) -> list[int] | None:
        """Return the numbers of the parameters that a pass converts to a half-precision format.

        None if autocast alone does so: they are then found in the graph of a forward pass.
        """
        return None

    def wrap_evaluation(self, module: nn.Module) -> nn.Module:
        """Return the module that an evaluation calls instead of `module`: (data, samples) → tensor
        of sums.
        """
        return module

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, including those changed outside of steps."""

    def allow_undo(self, model: nn.Module) -> None:
        """From here on copy what passes change at the beginning of each step, for `abandon_step`.

        In an elastic job that is so anyway.
        """

    def begin_step(self) -> None:
        """Save what a step changes before its update, for `abandon_step`.

        Called in elastic jobs, and with guards that may undo a step.
        """

    def abandon_step(self) -> None:
        """Restore what a step has changed that was interrupted before its update."""

    def regroup(self, model: nn.Module) -> None:
        """Adapt to the communicator's new workers, which all hold the same state of the prepared
        `model`.
        """

    # The methods for state dicts are called by all workers together. With wanted=False a worker
    # takes part in collectives without keeping the result. States may hold stored tensors.

    def model_state(self, model: nn.Module, wanted: bool = True) -> dict[str, Any]:
        """Return the model's state dict with full tensors."""
        return model.state_dict()

    def optimizer_state(
        self, model: nn.Module, optimizer: Optimizer, wanted: bool = True
    ) -> dict[str, Any]:
        """Return the optimizer's state dict with full tensors, by the number of the parameter."""
        if self.shards is not None:
            return self.shards.full_state(optimizer, wanted)
        return optimizer.state_dict()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load what `model_state` returned, under this or another strategy; names and shapes have
        been checked.
        """
        load_model(model, state, self.comm)

    def load_optimizer_state(
        self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]
    ) -> None:
        """Load what `optimizer_state` returned, under this or another strategy; names and shapes
        have been checked; of a divided state the part that this worker owns.
        """
        if self.shards is not None:
            state = self.shards.own_part(optimizer, state)
        load_optimizer(optimizer, read_optimizer_state(optimizer, state, self.comm))

    def fingerprint(self, model: nn.Module, optimizer: Optimizer) -> str:
        """Return the fingerprint of the full tensors, see `lockstep.fingerprint`."""
        if self.shards is None:
            return fingerprint(model, optimizer)
        is_first = self.comm.rank == 0
        state = self.shards.full_state(optimizer, wanted=is_first)
        entries = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **model.state_dict(),
        }
        whole = fingerprint_of(entries, state) if is_first else None
        return self.comm.broadcast_object(whole)

    def determinism_settings(self) -> dict[str, Any]:
        """Return the settings that the bits of a run depend on, by name; empty without a guarantee
        of equal bits.
        """
        return {}
