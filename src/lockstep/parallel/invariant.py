"""Data parallelism with the same bits at any number of workers: a separate pass for each shard of a
step.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ..communicator import Communicator
from ..communicator.elastic_communicator import ElasticCommunicator
from ..errors import ConfigError
from .buffers import Buffers
from .determinism import DeterminismSettings
from .module_sync import move_module, sync_module
from .reducer import Reducer
from .shards import check_virtual_workers
from .strategy import Strategy
from .sync_batchnorm import SyncBatchNorm, convert_marked
from .unchanged_parameters import UnchangedParameters
from .unsupported_layers import check_joint_passes, check_supported

__all__ = ["Invariant"]


_log = logging.getLogger(__name__)


class Invariant(Strategy):
    """Trains one model on all workers, with a separate pass for each of `virtual_workers` shards of
    a step.

    Gradients, losses and running statistics are added in one fixed tree, see
    `lockstep.parallel.reducer`.

    Args:
        comm: communicator over the workers.
        virtual_workers: number of shards of each global batch.
        threads: threads within an operation on the CPU, see `lockstep.parallel.determinism`; 1 on
            the CPU when None.

    Raises:
        ConfigError: for fewer virtual workers than workers.

    Attributes:
        joint_layers: the layers of the prepared model that use all shards at once.
    """

    can_shard_optimizer = True
    divides_gradients = True
    virtual_workers: int

    def __init__(
        self, comm: Communicator, virtual_workers: int, threads: int | None = None
    ) -> None:
        super().__init__(comm)
        self.virtual_workers = check_virtual_workers(virtual_workers, comm.size)
        self.determinism = DeterminismSettings(comm.device, threads)
        self._log_threads()
        self._prepared: tuple[Reducer, Buffers] | None = None
        self._parameters: list[nn.Parameter] = []
        self._allows_undo = False
        self.joint_layers: list[SyncBatchNorm] = []
        self._unchanged: UnchangedParameters | None = None

    def _log_threads(self) -> None:
        threads = self.determinism.threads
        current = torch.get_num_threads()
        if threads is not None and threads != current and self.comm.rank == 0:
            _log.warning(
                "with virtual workers, steps are computed with threads=%d in each worker, not %d",
                threads,
                current,
            )

    def with_virtual_workers(self, virtual_workers: int, threads: int | None) -> Strategy:
        """Return this strategy."""
        return self

    def determinism_settings(self) -> dict[str, Any]:
        """Return the number of virtual workers, and the settings of
        `lockstep.parallel.determinism`.
        """
        return {"virtual_workers": self.virtual_workers, **self.determinism.describe()}

    def prepare(self, model: nn.Module) -> None:
        """Move `model` to the device, broadcast rank 0's values, and check that all workers have
        the same.

        Raises:
            MismatchError: if the models differ in their parameters or buffers.
            ConfigError: if the model has an unsupported layer, or the workers have different
                determinism settings.
        """
        check_supported(model, self.comm.device)
        self.joint_layers = convert_marked(model, self.comm)
        if self.joint_layers:
            check_joint_passes(model)
        move_module(model, self.comm.device)
        sync_module(model, self.comm)
        if self.comm.size > 1 and not self.comm.is_joining:
            self.determinism.check_same(self.comm)
        self._unchanged = UnchangedParameters(model)
        self._make_parts(model)

    def _make_parts(self, model: nn.Module) -> None:
        """Make the reducer and the buffers for the present workers."""
        self._parameters = list(model.parameters())
        self.choose_owners(model)
        owner_of = None if self.shards is None else self.shards.owner_of
        reducer = Reducer(self.comm, self.virtual_workers, one_pass=True, owner_of=owner_of)
        has_several = len(reducer.local_shards) > 1
        saves = has_several or self._allows_undo or isinstance(self.comm, ElasticCommunicator)
        buffers = Buffers(self.with_loss(model), self.comm, saves=saves, at_once=True)
        self._prepared = reducer, buffers

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return `module` unchanged: the reducer itself finds out which parameters are trained."""
        return module

    def deterministic(self) -> AbstractContextManager[object]:
        """Return a context manager that applies the determinism settings."""
        return self.determinism.applied()

    @property
    def threads(self) -> int | None:
        """Threads within an operation on the CPU."""
        return self.determinism.threads

    @property
    def reducer(self) -> Reducer:
        """The reducer of the prepared model."""
        return self._prepared_parts[0]

    @property
    def buffers(self) -> Buffers:
        """The buffers of the prepared model."""
        return self._prepared_parts[1]

    @property
    def _prepared_parts(self) -> tuple[Reducer, Buffers]:
        if self._prepared is None:
            raise ConfigError(
                "strategy", "prepare(model) before anything else", found="no call of it"
            )
        return self._prepared

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters of the prepared model that require a gradient now."""
        return [p for p in self._parameters if p.requires_grad]

    def begin(self) -> None:
        """Save the buffers, and note the versions of parameters, at the beginning of a step."""
        assert self._unchanged is not None
        self._unchanged.note()
        self.buffers.begin()

    def end(self, sums: torch.Tensor, samples: int | torch.Tensor) -> None:
        """Set the buffers that the passes have changed, equally on every worker.

        Args:
            sums: the sums of `Buffers.of_shard` over all shards.
            samples: samples in the global batch.

        Raises:
            ConfigError: if a forward pass has changed a parameter, which other shards and workers
                would not get.
        """
        assert self._unchanged is not None
        self._unchanged.check()
        self.buffers.set(sums, samples)

    @override
    def allow_undo(self, model: nn.Module) -> None:
        self._allows_undo = True
        self._make_parts(model)

    def begin_step(self) -> None:
        """Save the buffers, for `abandon_step`."""
        self.buffers.begin()

    def abandon_step(self) -> None:
        """Restore the buffers."""
        self.buffers.restore()

    def regroup(self, model: nn.Module) -> None:
        """Adapt to the communicator's new workers.

        Raises:
            ConfigError: for fewer virtual workers than workers.
        """
        self._make_parts(model)

    def sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, including those changed outside of steps."""
        if self._prepared is not None:
            self.buffers.broadcast()
