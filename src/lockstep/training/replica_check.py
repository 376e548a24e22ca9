"""Sees while training that all workers hold the same hyperparameters and the same weights."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ..communicator import Communicator
from ..errors import ConfigError, MismatchError
from ..fingerprints import INTEGERS, checksum_of, mixed
from ..shards import mix
from .formats import REPLICA_CHECK

__all__ = ["ReplicaCheck"]

_log = logging.getLogger(__name__)

_NOT_COMPARED = ("params", "param_names", "initial_lr")
_ELSEWHERE, _MISSING = "on the device", "missing"

# Hyperparameters this near each other come of sums that were rounded differently, as those of optimizers that find
# their own learning rate.
_NEAR = 1e-4


def _checked(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ConfigError("replica_check", "a whole number of at least 0", steps, "0 compares nothing.")
    return steps


class ReplicaCheck:
    """Compares the workers' hyperparameters at every step, and weights now and then, without waiting for a device.

    What a worker holds goes as small whole numbers d and d² into the sums that each step has anyway: of n workers all
    have the same d if and only if n · Σd² = (Σd)². Only a difference makes the workers exchange more.

    Weights that were changed on some workers only are an error. Weights that differ by rounding are a warning: other
    processors, other numbers of threads, or an optimizer whose operations have no fixed order make them, and such a job
    is healthy. Where equal bits are promised, they are an error too.

    Args:
        comm: the workers.
        model: on each of them.
        optimizer: likewise.
        every: steps between two looks at a few weights; 0 compares nothing at all.
        weights: whether the workers hold the same weights, and not parts of them.
        exact: whether equal bits are promised.

    Raises:
        ConfigError: when `every` is no whole number of at least 0.
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = REPLICA_CHECK,
        weights: bool = True,
        exact: bool = False,
    ) -> None:
        self._comm, self._model, self._optimizer = comm, model, optimizer
        self._on = _checked(every) > 0 and comm.size > 1
        self._every, self._weights, self._exact = every, weights, exact
        self._wide = torch.float32 if comm.device.type == "mps" else torch.float64
        self._bits = 9 if self._wide is torch.float32 else 20  # so that sums of squares are whole up to 4096 workers
        self._names: list[list[str]] = []
        self._ignored: set[tuple[int, str]] = set()
        self._values: list[list[Any]] | None = None
        self._marks = torch.zeros(4 if self._on else 0, dtype=self._wide, device=comm.device)
        self._warned = False
        self._steps = 0  # looked at, since the workers had the same weights
        self._latest, self._explained = -1, -1

    # --- at every step ----------------------------------------------------------------------------------------

    def marks(self, step: int) -> torch.Tensor:
        """What this worker adds to the sums of `step`: shape (4,), or (0,) where nothing is compared."""
        if not self._on:
            return self._marks
        self._steps, self._latest = self._steps + 1, step
        on_device = self._look()
        samples = [] if step % self._every or not self._weights or self._warned else list(self._sampled(step))
        if not samples and not on_device:
            return self._marks
        number = self._small([*on_device, *samples])
        return torch.cat([self._marks[:2], torch.stack([number, number * number])])

    def settle(self, step: int, sums: Sequence[float]) -> None:
        """Look at the sums of a step's marks, which every worker does at the same place.

        Raises:
            MismatchError: on every worker, naming what differs, where, and the values.
        """
        if not sums or step <= self._explained or all(self._same(*sums[at : at + 2]) for at in (0, 2)):
            return
        self.compare(step)

    def _same(self, total: float, squares: float) -> bool:
        return self._comm.size * int(squares) == int(total) ** 2

    def _look(self) -> list[torch.Tensor]:
        """Take in the hyperparameters as they are now; returns those that only a device knows."""
        values, on_device = self._read()
        if values != self._values:
            self._values = values
            digest = zlib.crc32(repr(values).encode()) & ((1 << self._bits) - 1)
            # Filled: to copy numbers there would wait for the device.
            self._marks = torch.zeros_like(self._marks)
            self._marks[0], self._marks[1] = digest, digest * digest
        return on_device

    def _read(self) -> tuple[list[list[Any]], list[torch.Tensor]]:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._names):
            # As the groups were made: a scheduler on one worker alone may put notes of its own into them later.
            self._names = [sorted(name for name in group if name not in _NOT_COMPARED) for group in groups]
        on_device: list[torch.Tensor] = []
        values = [
            [
                None if (number, name) in self._ignored else _plain(group.get(name), on_device)
                for name in self._names[number]
            ]
            for number, group in enumerate(groups)
        ]
        return values, on_device

    def _sampled(self, step: int) -> Iterator[torch.Tensor]:
        """One value of each parameter, each time another: shape (1,)."""
        for number, (_, p) in enumerate(self._tensors()):
            place, offset = mix((step, number)) % p.numel(), p.storage_offset()
            for size, stride in zip(reversed(p.shape), reversed(p.stride()), strict=True):
                offset += place % size * stride
                place //= size
            yield p.as_strided((1,), (1,), offset)

    def _small(self, samples: list[torch.Tensor]) -> torch.Tensor:
        """A small whole number made of the bits of `samples`, on the device."""
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for sample in samples:
            kinds.setdefault(sample.dtype, []).append(sample)
        parts = [torch.cat(same).view(INTEGERS[same[0].element_size()]).to(torch.int64) for same in kinds.values()]
        bits = torch.cat(parts) if len(parts) > 1 else parts[0]
        total = mixed(bits, torch.arange(1, len(bits) + 1, device=bits.device)).sum()
        return (((total ^ (total >> 29)) >> 5) & ((1 << self._bits) - 1)).to(self._wide)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self._model.named_parameters():
            if type(p) is nn.Parameter and p.layout is torch.strided and p.device == self._comm.device and p.numel():
                found = p.detach()
                yield name, torch.view_as_real(found) if found.is_complex() else found

    # --- of everything ----------------------------------------------------------------------------------------

    def compare(self, step: int | None = None) -> None:
        """Compare all hyperparameters and all weights; called by every worker. Waits for the device.

        Args:
            step: at which a difference has been seen.

        Raises:
            MismatchError: on every worker, naming what differs, where, and the values.
        """
        if not self._on:
            return
        self._values = None  # the user may have changed what is compared
        values, on_device = self._read()
        groups = [zlib.crc32(repr(values).encode()), *(float(value) for value in on_device)]
        named = list(self._tensors()) if self._weights else []
        numbers = [checksum_of([torch.tensor(groups, dtype=torch.float64)]), *(checksum_of([t]) for _, t in named)]
        mine = torch.stack([number.to(self._comm.device) for number in numbers])
        most, least = self._comm.allreduce(torch.stack([mine, -mine]), "max")
        apart = (most != -least).tolist()
        if apart[0]:
            self._explain_hyperparameters(step)
        if any(apart[1:]):
            self._explain_weights([both for both, other in zip(named, apart[1:], strict=True) if other], step)
        if step is not None and not any(apart):
            _fail(step, "Hyperparameters or weights of some ranks differed then, and do not now.")
        # Steps that are on their way have found the same.
        self._explained = self._latest

    def _explain_hyperparameters(self, step: int | None) -> None:
        """Name the first hyperparameter that differs by more than rounding; leave out the others from now on."""
        values, on_device = self._read()
        known = iter([float(value) for value in on_device])
        mine = {
            (number, name): next(known) if value is _ELSEWHERE else value
            for number, (names, found) in enumerate(zip(self._names, values, strict=True))
            for name, value in zip(names, found, strict=True)
        }
        every = self._comm.allgather_object(mine)
        for rank, theirs in enumerate(every):
            for key in [*every[0], *(key for key in theirs if key not in every[0])]:
                first, other = every[0].get(key, _MISSING), theirs.get(key, _MISSING)
                if first == other or key in self._ignored:
                    continue
                if self._exact or not _near(first, other):
                    said = (
                        f"{key[1]!r} of parameter group {key[0]} of the optimizer is {first} on rank 0 and {other} on"
                    )
                    _fail(step, f"{said} rank {rank}.")
                self._ignored.add(key)
                self._say(f"{key[1]!r} of parameter group {key[0]} is {first!r} on rank 0 and {other!r} on rank {rank}")

    def _explain_weights(self, differing: list[tuple[str, torch.Tensor]], step: int | None) -> None:
        """Name the first weights that differ by more than rounding."""
        mine = [int(checksum_of([tensor])) for _, tensor in differing]
        every = self._comm.allgather_object(mine)
        for number, (name, tensor) in enumerate(differing):
            rank = next((rank for rank, theirs in enumerate(every) if theirs[number] != every[0][number]), 0)
            share = self._difference(tensor)
            what = f"{name} on rank {rank} holds other values than on rank 0, by up to {share:.2g} of its largest."
            if share > self._rounding(tensor.dtype):
                _fail(step, what)
            self._say(what)

    def _difference(self, tensor: torch.Tensor) -> float:
        """The largest difference of any worker's values from rank 0's, over the largest of all."""
        own = tensor.float() if tensor.element_size() < 4 else tensor
        first = self._comm.broadcast(own.clone(memory_format=torch.contiguous_format))
        apart = torch.stack([(own - first).abs().max(), own.abs().max()]).to(self._wide)
        difference, scale = self._comm.allreduce(apart, "max").tolist()
        if difference == 0:
            return 0.0  # zeros with different signs
        return difference / scale if math.isfinite(difference) else math.inf

    def _rounding(self, dtype: torch.dtype) -> float:
        """What may come of rounding in the steps so far, each in another direction."""
        if self._exact or not dtype.is_floating_point:
            return 0.0
        eps = torch.finfo(dtype).eps
        return min(eps * (8 + 4 * math.sqrt(self._steps)), max(0.01, 8 * eps))

    def _say(self, what: str) -> None:
        if not self._warned and self._comm.rank == 0:
            _log.warning(
                "%s Such small differences come of other processors or numbers of threads, or of an optimizer whose "
                "operations have no fixed order. From now on weights are compared at checkpoints and at the end of "
                "epochs only.",
                what,
            )
        self._warned = True


def _fail(step: int | None, what: str) -> NoReturn:
    when = "" if step is None else f" at step {step}"
    raise MismatchError(
        f"the workers' replicas differ{when}: {what} From then on they are different models. Whatever changes the "
        "optimizer or the model does so on every rank alike: a callback runs on rank 0 alone unless it has every_rank "
        "= True, and a learning rate can follow schedule=. replica_check=0 switches this check off."
    )


def _plain(value: Any, on_device: list[torch.Tensor]) -> Any:
    """What of a hyperparameter is compared: numbers, texts, and tuples of them; tensors elsewhere are put aside."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        if value.device.type == "cpu":
            return float(value)
        on_device.append(value.detach().reshape(1))
        return _ELSEWHERE
    if isinstance(value, Real):
        return float(value)  # 0 and False are 0.0
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item, on_device) for item in value)
    return value if isinstance(value, str) else None


def _near(ours: Any, theirs: Any) -> bool:
    both_numbers = isinstance(ours, float) and isinstance(theirs, float)
    return both_numbers and math.isclose(ours, theirs, rel_tol=_NEAR)
