"""Optimizers of a prepared loop: gradients summed over all shards, and one update for each global
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ...communicator import Communicator
from ...errors import ConfigError
from ...parallel.optimizer_parts import check_whole, refuse_other_parts
from ...parallel.optimizer_shards import OptimizerShards, divided
from ...parallel.reducer import Reducer
from ...parallel.strategy import accumulation_dtype
from ..batch_parts import BatchParts, Shard
from ..check_schedule import is_due
from ..divided_update import update_by_owners
from ..errors_on_all import call_on_all
from ..in_flight import LAG, HostCopy
from ..replica_check import ReplicaCheck
from ..step.precision import clip, scale_gradients
from ..step.separable_updates import check_separable
from ..step.step_arguments import parameters_of, refuse_closure
from .all_gradients import AllGradients
from .batch_buffers import BatchBuffers
from .body_losses import BodyLosses
from .loss_graphs import ignored_labels_error
from .loss_sums import common_number
from .repeated_batches import RepeatedBatches
from .shard_gradients import multiply

# The places of numbers in the sums beside the gradients. The buffers follow, where they are part of
# the step.
_LOSS = 0
_COUNT = 1  # the denominator of the loss
_MARKS = slice(2, 6)  # of the replicas, see `ReplicaCheck.marks`
_LEFT_OUT = 6  # samples that were left out of this batch
_LEFT_OUT_BEFORE = 7  # those, and samples left out of batches whose gradients are accumulated
_IGNORED = 8  # labels that losses have ignored
_REQUESTS = 9
_NUMBERS = 10


class Loop(Protocol):
    """What an optimizer asks of the loop that it was prepared for."""

    comm: Communicator
    model: nn.Module
    max_grad_norm: float | None
    shards_optimizers: bool
    parts: BatchParts
    buffers: BatchBuffers
    repeats: RepeatedBatches
    gradients: AllGradients
    losses: BodyLosses
    synchronised_layers: list[nn.Module]

    def shards(self, batch: Any) -> Any:
        """Yield the data of each of this worker's shards of a global batch."""
        ...


class _Unread(NamedTuple):
    """A number of a step on the way to the host, and what checks it there."""

    copy: HostCopy
    check: Callable[[float], None]

    def settle(self) -> None:
        """Wait for the number, and check it."""
        self.check(self.copy.read()[0])


class PreparedOptimizer:
    """Replaces `step` and `zero_grad` of an optimizer, and sums the gradients of its parameters
    over all shards.

    Gradients that stay for a later batch are rescaled to the weight of the shard then, because the
    parts of a smaller batch may have other weights.

    Attributes:
        optimizer: the optimizer.
        steps_done: the number of its steps.
        owners: which worker updates which parameter, if the optimizer's state is divided among the
            workers; None if each worker has all of it.
    """

    def __init__(self, optimizer: Optimizer, loop: Loop) -> None:
        if hasattr(optimizer, "shards"):
            raise ConfigError(
                "optimizer", "each optimizer in one call of prepare() only", found="one in two"
            )
        refuse_closure(optimizer)
        self.optimizer = optimizer
        self._loop = loop
        self._original_step = optimizer.step
        self._original_zero_grad = optimizer.zero_grad
        self._replicas = ReplicaCheck(loop.comm, loop.model, optimizer, exact=loop.parts.exact)
        self._gradients = loop.gradients.add(loop.shards_optimizers)
        self.owners: OptimizerShards | None = None
        refuse_other_parts(optimizer)
        if loop.shards_optimizers:
            check_separable(optimizer)
            self._choose_owners()
        if self.owners is None:
            check_whole(optimizer)
        self._reducer = self._make_reducer()
        self.steps_done = 0
        self._empty: list[int] = []  # shards of the batch for which no body runs
        self._waiting: list[int] = []  # those of them that are not in the sums yet
        self._stepped: list[int] = []
        self._counted = False
        self._accumulates = False  # whether a shard of this batch has gradients of an earlier one
        # samples left out of batches whose gradients stay for a later one
        self._left_out_before = 0
        self._settings: dict[tuple[int, str], Any] = {}  # of the first shard that has stepped
        self._sums_buffers = False  # in the step, with the gradients
        self._unread: list[_Unread] = []  # numbers of earlier steps, see `_check_later`
        self._of_step: list[_Unread] = []  # those of the step in progress
        # numbers of labels that losses of the running shard have ignored
        self._ignored: list[torch.Tensor] = []
        self._refresh()

    def _choose_owners(self) -> None:
        """Divide the optimizer's state among the workers, if there are, or may be, several."""
        loop = self._loop
        may_change = not loop.repeats.recovery.has_fixed_workers
        if loop.comm.size > 1 or may_change:
            self.owners = divided(
                self.optimizer,
                parameters_of(loop.model, self.optimizer),
                loop.comm,
                has_second_owners=may_change,
                has_equal_bits=loop.parts.exact,
            )

    def _make_reducer(self) -> Reducer:
        """Return a reducer for the present workers."""
        loop = self._loop
        owner_of = None if self.owners is None else self.owners.owner_of
        return Reducer(loop.comm, loop.parts.virtual_workers, one_pass=False, owner_of=owner_of)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's whole state dict, with its tensors on the CPU, on every worker;
        called by all of them, outside of the bodies of a batch.
        """
        owners = self.owners
        if owners is None:
            return self.optimizer.state_dict()
        recovery = self._loop.repeats.recovery
        if not recovery.is_running:
            return owners.full_state(self.optimizer)
        return recovery.run(partial(owners.full_state, self.optimizer), meets=False)

    def install(self) -> None:
        """Replace the optimizer's methods."""
        optimizer: Any = self.optimizer

        def step(
            _: Optimizer, closure: Any = None, *, loss: Any = None, count: Any = None
        ) -> torch.Tensor | None:
            return self.step(closure, loss, count)

        def zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            self.zero_grad()

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers of torch look for it
        optimizer.step = MethodType(step, optimizer)
        optimizer.zero_grad = MethodType(zero_grad, optimizer)
        optimizer.shards = self._loop.shards
        optimizer.full_state_dict = self.full_state_dict
        optimizer.grad_norm = None
        optimizer.stepped = False

    def _refresh(self) -> None:
        """Find out which parameters are trained now."""
        parameters = parameters_of(self._loop.model, self.optimizer)
        if self.owners is not None:
            self.owners.check_same(parameters)
        self._gradients.train([p for p in parameters if p.requires_grad])

    def abandon(self) -> None:
        """End the bodies of a batch whose step was not done, and which run again."""
        self._gradients.zero(everywhere=True)
        self._set_stepped(False)

    def regroup(self) -> None:
        """Adapt to the communicator's new workers, which have the same state."""
        if self.owners is not None:
            self.owners.regroup(self.optimizer)
        self._reducer = self._make_reducer()
        self._replicas.regroup()

    def begin_batch(self, empty: list[int]) -> None:
        """Begin a global batch, of which this worker's shards `empty` have no samples."""
        self._refresh()
        self._gradients.begin_batch(is_due(self.steps_done))
        self._begin(empty)

    def _begin(self, empty: list[int]) -> None:
        self._empty = empty
        self._stepped = []
        self._counted = False
        self._accumulates = False
        self._waiting = list(empty)
        self._reducer.begin(self._gradients.trained)

    def begin_shard(self, shard: Shard, first: bool) -> None:
        """Put the gradients of `shard` into ``.grad``; those that an earlier step has left stay for
        the first one.
        """
        self._set_stepped(False)
        self._reducer.open(shard.number)
        self._gradients.open(shard, first)

    def end_shard(self, shard: Shard) -> None:
        """Keep the gradients of `shard` for a later batch, unless they were used."""
        if shard.number in self._stepped:
            return
        if self._stepped:
            raise self._incomplete()
        if shard.last:
            self._gradients.drop_in(self._empty)
        if self._gradients.keep(shard):
            self._left_out_before += shard.left_out or 0

    def end_batch(self) -> None:
        """End a global batch after this worker's last shard."""
        self._gradients.end_batch(self._loop.parts.local[0])

    def zero_grad(self) -> None:
        """Set the gradients of the running shard to None; outside of a batch, those of all
        shards.
        """
        self._original_zero_grad(set_to_none=True)
        self._gradients.zero(everywhere=self._loop.parts.current is None)

    def _set_stepped(self, stepped: bool) -> None:
        self.optimizer.stepped = stepped  # type: ignore[attr-defined]

    def step(self, closure: Any, loss: Any, count: Any) -> torch.Tensor | None:
        """Add the gradients of the running shard to the sum; after this worker's last one, update
        the parameters.
        """
        if closure is not None:
            hint = "It could call it any number of times, on each worker another."
            raise ConfigError(
                "closure", "none for an optimizer of prepare()", found="one", hint=hint
            )
        if self._loop.repeats.is_abandoned:  # its bodies run again
            return None
        shard = self._loop.parts.current or self._outside()
        self._check_step(shard, count)
        if self._loop.repeats.recovery.repeats and self._gradients.any_carried_over():
            self._loop.repeats.do_not_repeat("gradients that stay for a later step")
        if self._loop.parts.current is None:
            self._loop.gradients.look_at_repeated(self._gradients.current())
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's own wrapper does
        if not shard.last:
            self._collect(shard, loss, count)
            self._loop.gradients.note_used(self._gradients)
            self._gradients.release()
            self._loop.gradients.note_deferred_step()
            self._loop.buffers.note_step()
            return None
        done = self._loop.repeats.attempt(partial(self._complete, shard, loss, count))
        if done is None:
            return None
        mean, norm = done
        if norm is not None:
            self.optimizer.grad_norm = norm  # type: ignore[attr-defined]
        self._gradients.release()
        self._set_stepped(True)
        return mean

    def _complete(
        self, shard: Shard, loss: Any, count: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Take the step after this worker's last shard; returns the mean loss, and the norm of the
        gradient.
        """
        self._of_step = []
        self._collect(shard, loss, count)
        self._loop.gradients.note_used(self._gradients)
        self._reducer.finish()
        sums = self._reducer.sums
        assert sums is not None
        if self.owners is not None:
            self.owners.copy_gradients()
        if self._counted:
            self._divide_by_count(sums[_COUNT])
        elif shard.left_out is not None:
            self._left_out_before = 0
            self._check_later(sums[_LEFT_OUT_BEFORE], self._check_left_out)
            if self._loop.parts.virtual_workers > 1:
                gradients = [p.grad for p in self._gradients.trained if p.grad is not None]
                scale_gradients(gradients, shard.total / (shard.total - sums[_LEFT_OUT]))
        if (
            self._loop.comm.device.type != "cpu"
            and not self._counted
            and not self._loop.parts.exact
        ):
            self._check_later(sums[_IGNORED], _check_ignored)
        self._check_replicas(sums[_MARKS])
        if self._sums_buffers:
            samples = shard.total if shard.left_out is None else shard.total - sums[_LEFT_OUT]
            self._loop.buffers.set(sums[_NUMBERS:], samples)
        # before the update, in which the workers may change: then these are requests of others
        self._loop.repeats.note_requests(sums[_REQUESTS])
        norm = self._update()
        self._unread += self._of_step
        while len(self._unread) > LAG:
            self._unread.pop(0).settle()
        self.steps_done += 1
        return None if loss is None else sums[_LOSS] / sums[_COUNT], norm

    def _update(self) -> torch.Tensor | None:
        """Update the parameters with the gradients of the global batch; returns their norm if it is
        limited.

        Raises:
            ConfigError: on every worker, if the state is to be divided among the workers, and the
                optimizer's update of one tensor depends on others, from the state that it has by
                now.
        """
        loop = self._loop
        trained = self._gradients.trained
        max_grad_norm = loop.max_grad_norm
        owners = self.owners
        if loop.shards_optimizers and is_due(self.steps_done):
            owns = (lambda _: True) if owners is None else owners.owns
            call_on_all(loop.comm, partial(check_separable, self.optimizer, owns))
        if owners is not None:
            return update_by_owners(
                owners, loop.repeats.recovery, trained, max_grad_norm, self._take_step
            )
        norm = None if max_grad_norm is None else clip(trained, max_grad_norm)
        # from here on nobody waits for others: the step is done, or none of it
        self._take_step(norm)
        return norm

    def _take_step(self, norm: torch.Tensor | None) -> None:
        """Take the optimizer's own step with the gradients in ``.grad``."""
        if norm is not None:
            self.optimizer.grad_norm = norm  # type: ignore[attr-defined]  # for hooks of the optimizer
        with self._loop.gradients.update():
            self._original_step()

    def _check_left_out(self, left_out: float) -> None:
        """Check that no samples were left out of batches whose gradients are accumulated.

        Raises:
            ConfigError: on every worker, as the mean over what is left of each batch is not known
                any more.
        """
        if left_out:
            hint = "Or leave them out of the data set, or give count= in a step for each batch."
            expected = (
                "a collate function that keeps all samples of batches whose gradients are "
                "accumulated"
            )
            raise ConfigError(
                "collate_fn", expected, found=f"one that left out {left_out:g}", hint=hint
            )

    def _check_later(self, number: torch.Tensor, check: Callable[[float], None]) -> None:
        """Call `check` with a number of this step: at once on the CPU, else when the device has
        computed it.

        Nothing waits for the device: the check comes at most a few steps later, or at the end of
        the epoch, see `settle`. It is the same step on every worker.
        """
        unread = _Unread(HostCopy(number.detach().reshape(1)), check)
        if number.device.type == "cpu":
            unread.settle()
        else:
            self._of_step.append(unread)

    def settle(self) -> None:
        """Check the numbers of the latest steps; this waits for the device.

        Raises:
            ConfigError: see `step`.
        """
        while self._unread:
            self._unread.pop(0).settle()

    def _outside(self) -> Shard:
        """Return what stands for the shard of a step outside of a loop over a loader or
        `shards`.
        """
        loop = self._loop
        if loop.parts.virtual_workers != loop.comm.size:
            hint = "Or use a loop over optimizer.shards(batch)."
            expected = "a step within a loop over the prepared loader, with virtual workers"
            raise ConfigError("step", expected, found="one outside", hint=hint)
        self._refresh()
        self._begin([])
        self._reducer.open(loop.comm.rank)
        return Shard(loop.comm.rank, 1, 1 / loop.comm.size, last=True, one_of_several=False)

    def _check_step(self, shard: Shard, count: Any) -> None:
        self._loop.gradients.check_deferred_step()
        if shard.number in self._stepped:
            raise ConfigError("step", "one step of an optimizer in each batch", found="two")
        if isinstance(count, torch.Tensor) and count.requires_grad:
            description = "one that requires a gradient"
            hint = "It is the number of tokens, labels or weights that count."
            raise ConfigError("count", "a number", found=description, hint=hint)
        if count is not None and self._gradients.any_carried():
            hint = "Accumulate within one batch, or use means over samples."
            raise ConfigError(
                "count",
                "no gradients of earlier batches in a step with count=",
                found="some",
                hint=hint,
            )
        synchronised = self._loop.synchronised_layers
        if count is not None and any(layer.training for layer in synchronised):
            hint = (
                "Its gradients go to other workers before the count is known. Compute the loss "
                "from lockstep.whole_batch(output), or leave sync_batchnorm out, or train with "
                "lockstep.Trainer and a loss that returns (sum, count)."
            )
            raise ConfigError("count", "none with synchronised batch norm", found="one", hint=hint)
        if count is not None and shard.whole_batch:
            hint = "The loss is that of the whole batch already: divide it by what counts there."
            raise ConfigError("count", "none with lockstep.whole_batch()", found="one", hint=hint)
        if self._stepped and (count is not None) != self._counted:
            raise ConfigError("count", "a count in each shard, or in none", found="one in some")
        if shard.last and len(self._stepped) + len(self._empty) + 1 < len(self._loop.parts.local):
            raise self._incomplete()
        self._gradients.check_not_of_step()
        self._gradients.check_unchanged()
        if not self._loop.parts.exact:  # a virtual worker may look at its own samples
            self._gradients.check_same_weights()
        self._ignored = self._gradients.check_allowed(count is not None)
        if shard.one_of_several:
            self._check_settings()

    def _check_settings(self) -> None:
        """Check that the step of each shard of a batch would be taken with the same
        hyperparameters.
        """
        settings = self._replicas.hyperparameters()
        if not self._stepped:
            self._settings = settings
        for (group, name), value in settings.items():
            first = self._settings.get((group, name))
            if value != first:
                raise ConfigError(
                    "scheduler" if name == "lr" else name,
                    "a learning rate that changes once a global batch"
                    if name == "lr"
                    else "one value in each batch",
                    found=f"{name!r} of parameter group {group} is {first} in one shard of a "
                    "batch, "
                    f"{value} in another",
                    hint="Give the scheduler to lockstep.prepare() too; what you set yourself, set "
                    "where optimizer.stepped is true.",
                )

    def _incomplete(self) -> ConfigError:
        return ConfigError(
            "step",
            "a step of the optimizer in each shard of a batch, or in none",
            found="one in some: this worker has several shards of each batch, for which the loop's "
            "body runs in turn",
            hint="Count global batches, not turns of the loop.",
        )

    def _collect(self, shard: Shard, loss: Any, count: Any) -> None:
        """Add the weighted gradients and the numbers of `shard` to the sums, in order with those of
        empty shards.
        """
        marks = self._replicas.marks(self.steps_done) if shard.last else None
        if self._waiting:
            self._gradients.drop_in(self._empty)
        device = self._loop.comm.device
        weight = torch.zeros((), dtype=accumulation_dtype(device), device=device)
        if shard.samples:
            weight = weight.fill_(shard.weight) if count is None else weight + count
        scale = weight
        if (
            count is not None
            and shard.samples
            and (divisor := common_number(shard.divisors)) is not None
        ):
            # The sum of a part that counts nothing may be divided by something else, as by
            # clamp(count, min=1).
            number = float(divisor) if divisor.device.type == "cpu" else divisor.to(weight.dtype)
            scale = torch.where(weight == 0, number, weight)
        of_buffers = self._loop.buffers.of_shard(shard) if self._loop.repeats.sums_buffers else None
        self._sums_buffers = of_buffers is not None
        numbers = torch.zeros(_NUMBERS, dtype=weight.dtype, device=device)
        if of_buffers is not None:
            numbers = torch.cat([numbers, of_buffers.to(device)])
        if loss is not None and shard.samples:
            # Where nothing counts, a mean is no number.
            numbers[_LOSS] = torch.where(scale == 0, 0.0, torch.as_tensor(loss).detach() * scale)
        numbers[_COUNT] = weight
        if marks is not None:
            numbers[_MARKS.start : _MARKS.start + len(marks)] = marks
        if self._ignored:
            numbers[_IGNORED] = torch.stack(self._ignored).sum()
        self._accumulates |= self._gradients.any_carried()
        if shard.left_out is not None:
            numbers[_LEFT_OUT].fill_(shard.left_out)  # an assignment of a number waits for a device
            numbers[_LEFT_OUT_BEFORE].fill_(
                self._left_out_before + shard.left_out if self._accumulates else 0
            )
        if shard.last and (requests := self._loop.repeats.recovery.requests):
            numbers[_REQUESTS].fill_(requests)
        if self._waiting and self._waiting[0] < shard.number:
            present = self._gradients.current()
            self._add_empty(numbers, before=shard.number)
            self._gradients.put(present)
            self._reducer.open(shard.number)
        self._reducer.add(numbers)
        self._counted = count is not None
        self._loop.losses.have_counts |= self._counted
        self._stepped.append(shard.number)
        self._weigh(shard, scale)
        self._reducer.close()
        if shard.last:
            self._add_empty(numbers, before=self._loop.parts.virtual_workers)

    def _add_empty(self, numbers: torch.Tensor, before: int) -> None:
        """Add what the shards without samples keep of earlier batches to the sums: those before
        shard `before`.
        """
        while self._waiting and self._waiting[0] < before:
            number = self._waiting.pop(0)
            self._reducer.open(number)
            self._reducer.add(torch.zeros_like(numbers))
            gradients, weight = self._gradients.take(number)
            multiply(gradients, weight)
            self._gradients.put(gradients)
            self._reducer.close()

    def _weigh(self, shard: Shard, weight: torch.Tensor) -> None:
        """Multiply the gradients of `shard` by its weight, if there are others to add them to."""
        several = self._loop.parts.virtual_workers > 1
        if not shard.samples:  # of a sample that stands in for none, and may be anything
            gradients, before = self._gradients.aside()
            multiply(gradients, before)
            self._gradients.put(gradients)
        elif self._counted:
            present = [gradient for gradient in self._gradients.current() if gradient is not None]
            if several:
                scale_gradients(present, weight)
            _clear_where(weight == 0, present)
        elif several:
            multiply(self._gradients.current(), shard.weight)

    def _divide_by_count(self, total: torch.Tensor) -> None:
        """Divide the sums by what counts in the whole batch, on all workers the same.

        Off the CPU nothing waits: where nothing counts, gradients are zero, and the error comes a
        few steps later.
        """
        self._check_later(total, partial(_check_counts, self.steps_done))
        if self._loop.parts.virtual_workers > 1:
            gradients = [p.grad for p in self._gradients.trained if p.grad is not None]
            scale_gradients(gradients, torch.where(total == 0, 0.0, 1 / total))

    def _check_replicas(self, marks: torch.Tensor) -> None:
        if self._loop.comm.size > 1 and (
            marks.device.type == "cpu" or self.steps_done & (self.steps_done - 1) <= 0
        ):
            self._replicas.settle(self.steps_done, marks.tolist())


def _check_ignored(ignored: float) -> None:
    """Check that losses that are means over labels have ignored none, in a step without a count.

    Raises:
        ConfigError: on every worker.
    """
    if ignored:
        raise ignored_labels_error()


def _check_counts(step: int, count: float) -> None:
    """Check the count of the whole batch of a step.

    Raises:
        ConfigError: on every worker, if it is 0.
    """
    if not count:
        raise ConfigError(
            "count",
            "something that counts in each global batch",
            found=f"a count of 0 in the whole batch, in step {step}",
            hint="Its mean is no number. Leave such batches out, in the same way on every worker.",
        )


def _clear_where(empty: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    """Set `gradients` to zero where nothing counts: 0 times what is no number is no number."""
    if empty.device.type != "cpu":
        for gradient in gradients:
            gradient.masked_fill_(empty, 0.0)
    elif empty and gradients:
        torch._foreach_zero_(gradients)
