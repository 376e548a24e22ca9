"""The replica check: compares hyperparameters and weights of all workers during training."""

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

from .. import arguments
from ..communicator import Communicator
from ..errors import MismatchError
from ..flight_recorder import named
from ..parallel.fingerprints import INTEGERS, checksum_of, mix_bits, state_entries
from ..parallel.optimizer_parts import hyperparameters_of, part_of
from ..parallel.shards import mix
from ..parallel.strategy import accumulation_dtype
from .formats import REPLICA_CHECK

_log = logging.getLogger(__name__)

_NOT_COMPARED = ("param_names", "initial_lr")
_ON_DEVICE = "on the device"
_MISSING = "missing"

# Relative difference of hyperparameters that rounding may cause, in optimizers that adapt their
# learning rate.
_TOLERANCE = 1e-4
# Relative difference of weights that the rounding of a long training may cause.
_MOST_ROUNDING = 0.01


class ReplicaCheck:
    """Compares the workers' hyperparameters at every step, and samples of weights at intervals,
    without device waits.

    Each worker adds a digest d, a small whole number, and d² to the all-reduce of each step: n
    workers have the same d if and only if n · Σd² = (Σd)². Only a difference causes further
    communication.

    The first step also compares the optimizer's state, which the program may have loaded on one
    worker only.

    Weights that were changed on some workers only are an error. Weights that differ by rounding are
    a warning: other processors, other numbers of threads, or an optimizer whose operations have no
    fixed order cause it, and the job is healthy. With a guarantee of equal bits they are an error
    too.

    Args:
        comm: communicator over the workers.
        model: the model.
        optimizer: the optimizer.
        every: steps between two comparisons of sampled weights; 0 compares nothing at all.
        weights: whether all workers hold the same weights, not shards of them.
        exact: whether equal bits are guaranteed.

    Attributes:
        every: see the argument.

    Raises:
        ConfigError: if `every` is not a whole number of at least 0.
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
        self._comm = comm
        self._model = model
        self._optimizer = optimizer
        self.every = arguments.whole("replica_check", every, least=0, hint="0 compares nothing.")
        self._on = self.every > 0 and comm.size > 1
        self._weights = weights
        self._exact = exact
        self._dtype = accumulation_dtype(comm.device)
        # sums of squares are exact up to 4096 workers
        self._bits = 9 if self._dtype is torch.float32 else 20
        self._names: list[list[str]] = []
        self._ignored: set[tuple[int, str]] = set()
        self._values: list[list[Any]] | None = None
        self._marks = torch.zeros(4 if self._on else 0, dtype=self._dtype, device=comm.device)
        self._warned = False
        self._steps = 0  # number of steps, for the bound on rounding
        self._latest_step = -1
        self._compared_until = -1
        # None until it comes. A worker that joins has the state of the others, who have made it.
        self._first_step: int | None = -1 if comm.is_joining else None
        # Of each parameter, when the first step began: the names of what the optimizer has of it,
        # with numbers of the host. And a checksum of the tensors among it, if bits are compared.
        self._first_state: list[Any] = []
        self._first_checksum: torch.Tensor | None = None

    def regroup(self) -> None:
        """Adapt to the communicator's new workers."""
        self._on = self.every > 0 and self._comm.size > 1
        self._values = None
        self._compared_until = -1
        self._first_step = -1
        self._marks = torch.zeros(4 if self._on else 0, dtype=self._dtype, device=self._comm.device)

    def marks(self, step: int) -> torch.Tensor:
        """Return what this worker adds to the all-reduce of `step`: shape (4,), or (0,) if nothing
        is compared.

        They are d and d² of the hyperparameters on the host, and of those on the device together
        with sampled weights.
        """
        if not self._on:
            return self._marks
        self._steps = self._steps + 1
        self._latest_step = step
        on_device = self._update_hyperparameters()
        samples = (
            []
            if step % self.every or not self._weights or self._warned
            else list(self._sample_weights(step))
        )
        if self._first_step is None:
            self._first_step = step
            samples += self._note_state()
        if not samples and not on_device:
            return self._marks
        number = self._digest([*on_device, *samples])
        return torch.cat([self._marks[:2], torch.stack([number, number * number])])

    def settle(self, step: int, sums: Sequence[float]) -> None:
        """Check the sums of a step's marks; called by every worker at the same point.

        Raises:
            MismatchError: on every worker, naming what differs, where, and the values.
        """
        if (
            not sums
            or step <= self._compared_until
            or all(self._equal(*sums[at : at + 2]) for at in (0, 2))
        ):
            return
        if step == self._first_step:
            self._report_state(step)
        self.compare(step)

    def _equal(self, total: float, squares: float) -> bool:
        return self._comm.size * int(squares) == int(total) ** 2

    def hyperparameters(self) -> dict[tuple[int, str], Any]:
        """Return the hyperparameters of this worker, by parameter group and name; those on a device
        without values.
        """
        values, _ = self._read_hyperparameters()
        pairs = enumerate(zip(self._names, values, strict=True))
        return {
            (group, name): value
            for group, (names, row) in pairs
            for name, value in zip(names, row, strict=True)
        }

    def _update_hyperparameters(self) -> list[torch.Tensor]:
        """Read the hyperparameters, and update their marks; returns those that are on a device."""
        values, on_device = self._read_hyperparameters()
        if values != self._values:
            self._values = values
            digest = zlib.crc32(repr(values).encode()) & ((1 << self._bits) - 1)
            # Filled, because copying numbers to the device would wait for it.
            self._marks = torch.zeros_like(self._marks)
            self._marks[0] = digest
            self._marks[1] = digest * digest
        return on_device

    def _read_hyperparameters(self) -> tuple[list[list[Any]], list[torch.Tensor]]:
        """Return the values of each parameter group, with a placeholder for each on a device, and
        those on a device.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self._names):
            # The names of the first call: a scheduler on one worker only may add entries later.
            self._names = [
                sorted(name for name in hyperparameters_of(group) if name not in _NOT_COMPARED)
                for group in groups
            ]
        on_device: list[torch.Tensor] = []
        values = [
            [
                None
                if (number, name) in self._ignored
                else _plain_value(group.get(name), on_device)
                for name in self._names[number]
            ]
            for number, group in enumerate(groups)
        ]
        return values, on_device

    def _sample_weights(self, step: int) -> Iterator[torch.Tensor]:
        """Yield one value of each parameter, at another index at each step: shape (1,)."""
        for number, (_, p) in enumerate(_compared_tensors(self._comm, self._model)):
            index = mix((step, number)) % p.numel()
            offset = p.storage_offset()
            for size, stride in zip(reversed(p.shape), reversed(p.stride()), strict=True):
                offset += index % size * stride
                index //= size
            yield p.as_strided((1,), (1,), offset)

    def _note_state(self) -> list[torch.Tensor]:
        """Note the state that the optimizer has before the first step; returns what is compared of
        it, each of shape (1,). Nothing if each worker has another part of it.
        """
        if not self._weights or part_of(self._optimizer.param_groups) is not None:
            return []
        states = state_entries(self._optimizer)
        self._first_state = [
            [(str(name), value if type(value) is int else None) for name, value in entries]
            for entries in states
        ]
        if not any(states):
            return []
        device = self._comm.device
        number = zlib.crc32(repr(self._first_state).encode())
        samples = [torch.full((1,), number, dtype=torch.int64, device=device)]
        tensors = [
            value.to(device, non_blocking=True)
            for entries in states
            for _, value in entries
            if type(value) is torch.Tensor and value.layout is torch.strided
        ]
        # Rounding may have made the states of an earlier training others, where that may be.
        if self._exact and tensors:
            self._first_checksum = checksum_of(tensors)
            samples.append(self._first_checksum.reshape(1))
        return samples

    def _digest(self, samples: list[torch.Tensor]) -> torch.Tensor:
        """Return a small whole number computed from the bits of `samples`, on the device."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for sample in samples:
            by_dtype.setdefault(sample.dtype, []).append(sample)
        parts = [
            torch.cat(same).view(INTEGERS[same[0].element_size()]).to(torch.int64)
            for same in by_dtype.values()
        ]
        bits = torch.cat(parts) if len(parts) > 1 else parts[0]
        total = mix_bits(bits, torch.arange(1, len(bits) + 1, device=bits.device)).sum()
        return (((total ^ (total >> 29)) >> 5) & ((1 << self._bits) - 1)).to(self._dtype)

    def compare(
        self, step: int | None = None, model: nn.Module | None = None, problems: Sequence[bool] = ()
    ) -> list[bool]:
        """Compare all hyperparameters and all weights; called by every worker, waits for the
        device.

        Args:
            step: the step whose marks differed, if any.
            model: another model, the weights of which are compared, as every worker has all of
                them; that of the training when None.
            problems: for each problem that is looked for, whether this worker has it; the same
                message tells all of them.

        Returns:
            For each of `problems`, whether any worker has it. If so, nothing else is looked at.

        Raises:
            MismatchError: on every worker, naming what differs, where, and the values.
        """
        if self._comm.size == 1 or self._comm.is_joining or not (self._on or problems):
            return list(problems)
        local, named = (
            self._checksums(model) if self._on else (torch.zeros(0, dtype=torch.int64), [])
        )
        facts = torch.tensor([int(fact) for fact in problems], dtype=torch.int64)
        message = torch.cat([part.to(self._comm.device) for part in (local, -local, facts)])
        reduced = self._comm.allreduce(message, "max")
        count = len(local)
        differ: list[bool] = (reduced[:count] != -reduced[count : 2 * count]).tolist()
        of_any: list[bool] = reduced[2 * count :].bool().tolist()
        if any(of_any) or not self._on:
            return of_any
        if differ[0]:
            self._report_hyperparameters(step)
        if any(differ[1:]):
            self._report_weights(
                [pair for pair, differs in zip(named, differ[1:], strict=True) if differs], step
            )
        if step is not None and not any(differ):
            _fail(step, "Hyperparameters or weights of some ranks differed then, and do not now.")
        # The marks of steps in flight show the same differences.
        self._compared_until = self._latest_step
        return of_any

    def _checksums(
        self, model: nn.Module | None
    ) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
        """Return a checksum of the hyperparameters, and one of each weight; and these, by name."""
        self._values = None  # update the marks at the next step
        values, on_device = self._read_hyperparameters()
        hyperparameters = [
            zlib.crc32(repr(values).encode()),
            *(float(value) for value in on_device),
        ]
        compared = self._model if model is None and self._weights else model
        named = [] if compared is None else list(_compared_tensors(self._comm, compared))
        checksums = [checksum_of([torch.tensor(hyperparameters, dtype=torch.float64)])]
        checksums += [checksum_of([tensor]) for _, tensor in named]
        return torch.stack([checksum.to(self._comm.device) for checksum in checksums]), named

    def _report_hyperparameters(self, step: int | None) -> None:
        """Raise an error for the first hyperparameter that differs by more than rounding; warn of
        others only once.
        """
        values, on_device = self._read_hyperparameters()
        device_values = iter([float(value) for value in on_device])
        local = {
            (number, name): next(device_values) if value is _ON_DEVICE else value
            for number, (names, of_group) in enumerate(zip(self._names, values, strict=True))
            for name, value in zip(names, of_group, strict=True)
        }
        with named("comparison of hyperparameters"):
            by_rank = self._comm.allgather_object(local)
        for rank, theirs in enumerate(by_rank):
            for key in [*by_rank[0], *(key for key in theirs if key not in by_rank[0])]:
                first = by_rank[0].get(key, _MISSING)
                other = theirs.get(key, _MISSING)
                if first == other or key in self._ignored:
                    continue
                group, name = key
                if self._exact or not _close(first, other):
                    problem = (
                        f"{name!r} of parameter group {group} of the optimizer is {first} on rank 0"
                    )
                    _fail(step, f"{problem} and {other} on rank {rank}.")
                self._ignored.add(key)
                self._warn(
                    f"{name!r} of parameter group {group} is {first!r} on rank 0 and {other!r} on "
                    f"rank {rank}."
                )

    def _report_state(self, step: int) -> None:
        """Raise an error if the optimizer's state was another on some worker when the first step
        began.
        """
        checksum = None if self._first_checksum is None else int(self._first_checksum)
        with named("comparison of the optimizer's state"):
            by_rank = self._comm.allgather_object((self._first_state, checksum))
        first, first_checksum = by_rank[0]
        for rank, (theirs, their_checksum) in enumerate(by_rank):
            if (theirs, their_checksum) == (first, first_checksum):
                continue
            names, other_names = (
                [", ".join(name for name, _ in of) or "nothing" for of in states]
                for states in (first, theirs)
            )
            pairs = enumerate(zip(names, other_names, strict=False))
            for number, (one, other) in pairs:
                if one != other:
                    problem = f"the optimizer's state of parameter {number} is {one} on rank 0"
                    _fail(step, f"{problem} and {other} on rank {rank}, before the first step.")
            problem = f"the optimizer's state on rank {rank} holds other values than on rank 0"
            _fail(step, f"{problem}, before the first step.")

    def _report_weights(self, differing: list[tuple[str, torch.Tensor]], step: int | None) -> None:
        """Raise an error for the first weights that differ by more than rounding; warn of others
        once.
        """
        with named("comparison of weights"):
            by_rank = self._comm.allgather_object(
                [int(checksum_of([tensor])) for _, tensor in differing]
            )
        for number, (name, tensor) in enumerate(differing):
            rank = next(
                (
                    rank
                    for rank, theirs in enumerate(by_rank)
                    if theirs[number] != by_rank[0][number]
                ),
                0,
            )
            relative = _relative_difference(self._comm, tensor)
            problem = (
                f"{name} on rank {rank} holds other values than on rank 0, by up to "
                f"{relative:.2g} of its largest."
            )
            if relative > self._rounding(tensor.dtype):
                _fail(step, problem)
            self._warn(problem)

    def _rounding(self, dtype: torch.dtype) -> float:
        """Return a bound on relative differences that rounding in the steps so far may cause."""
        if self._exact or not dtype.is_floating_point:
            return 0.0
        eps = torch.finfo(dtype).eps
        return min(eps * (8 + 4 * math.sqrt(self._steps)), max(_MOST_ROUNDING, 8 * eps))

    def _warn(self, problem: str) -> None:
        if not self._warned and self._comm.rank == 0:
            _log.warning(
                "%s Such small differences are due to other processors or numbers of threads, or "
                "to an optimizer whose operations have no fixed order. From now on weights are "
                "compared at checkpoints and at the end of epochs only.",
                problem,
            )
        self._warned = True


def compare_weights(comm: Communicator, model: nn.Module) -> None:
    """Check that all workers have the same weights, up to the rounding of a training; called by all
    of them.

    Args:
        comm: communicator over the workers.
        model: the model that they are about to evaluate together.

    Raises:
        MismatchError: on every worker, naming the first weights that differ.
    """
    if comm.size == 1:
        return
    weights = list(_compared_tensors(comm, model))
    if not weights:
        return
    with named("comparison of weights"):
        local = torch.stack([checksum_of([tensor]).to(comm.device) for _, tensor in weights])
        largest, negated_smallest = comm.allreduce(torch.stack([local, -local]), "max")
        differing = (largest != -negated_smallest).tolist()
        for (name, tensor), differs in zip(weights, differing, strict=True):
            relative = _relative_difference(comm, tensor) if differs else 0.0
            if relative > max(_MOST_ROUNDING, 8 * torch.finfo(tensor.dtype).eps):
                raise MismatchError(
                    f"the workers' models differ: {name} holds other values on some rank than on "
                    f"rank 0, by up to {relative:.2g} of its largest. Each worker would evaluate "
                    "another model. Load the weights, or make the model with the same seed, on "
                    "every rank."
                )


def _compared_tensors(comm: Communicator, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dense parameters on the device, by name, as real tensors."""
    for name, p in model.named_parameters():
        if (
            type(p) is nn.Parameter
            and p.layout is torch.strided
            and p.device == comm.device
            and p.numel()
        ):
            values = p.detach()
            yield name, torch.view_as_real(values) if values.is_complex() else values


def _relative_difference(comm: Communicator, tensor: torch.Tensor) -> float:
    """Return the largest difference of any worker's values from rank 0's, relative to the largest
    value.
    """
    local = tensor.float() if tensor.element_size() < 4 else tensor
    first = comm.broadcast(local.clone(memory_format=torch.contiguous_format))
    extremes = torch.stack([(local - first).abs().max(), local.abs().max()]).to(
        accumulation_dtype(comm.device)
    )
    difference, scale = comm.allreduce(extremes, "max").tolist()
    if difference == 0:
        return 0.0  # zeros with different signs
    return difference / scale if math.isfinite(difference) else math.inf


def _fail(step: int | None, problem: str) -> NoReturn:
    when = "" if step is None else f" at step {step}"
    raise MismatchError(
        f"the workers' replicas differ{when}: {problem} From then on they are different models. "
        "Change the optimizer and the model on every rank in the same way: a callback runs on "
        "rank 0 alone unless it has every_rank = True, and schedule= changes the learning rate on "
        "every rank. replica_check=0 switches this check off."
    )


def _plain_value(value: Any, on_device: list[torch.Tensor]) -> Any:
    """Return the value of a hyperparameter to compare: numbers, strings, and tuples of them; None
    for other types.

    A tensor on a device is appended to `on_device`, and `_ON_DEVICE` is returned.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        if value.device.type == "cpu":
            return float(value)
        on_device.append(value.detach().reshape(1))
        return _ON_DEVICE
    if isinstance(value, Real):
        return float(value)  # 0 and False are 0.0
    if isinstance(value, (tuple, list)):
        return tuple(_plain_value(item, on_device) for item in value)
    return value if isinstance(value, str) else None


def _close(ours: Any, theirs: Any) -> bool:
    both_numbers = isinstance(ours, float) and isinstance(theirs, float)
    return both_numbers and math.isclose(ours, theirs, rel_tol=_TOLERANCE)
