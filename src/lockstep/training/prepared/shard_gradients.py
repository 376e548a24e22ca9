"""The gradients of each shard of a prepared loop: which are kept, and whether the loop has changed
them by hand.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...parallel.gradient_buckets import Gradients
from ..batch_parts import Shard
from ..step.precision import full_precision
from .loss_graphs import Refusal

_log = logging.getLogger(__name__)

Seen = tuple[torch.Tensor | None, int]
"""A gradient, and its version."""


@dataclass
class _Kept:
    """Gradients of a shard that took no step, for a later batch.

    Attributes:
        gradients: one for each parameter, or None.
        weight: the weight of the shard in its batch then.
        of_step: for each of them, whether it includes the sum that an earlier step has left.
    """

    gradients: Gradients
    weight: float
    of_step: list[bool]


@dataclass
class _Refused:
    """A backward pass whose gradients may not be part of a step, and one gradient that it has
    reached.
    """

    why: Refusal
    number: int
    gradient: torch.Tensor
    version: int
    passes: int


class ShardGradients:
    """The gradients of an optimizer's parameters in each shard, as if each shard were a process.

    A worker with several shards puts those of a shard into ``.grad`` while its passes run. What a
    loop does to them there is found out from the tensors: ``None``, another tensor or a version
    that passes do not explain. So it does not matter which of the ways to zero them a loop uses.

    Args:
        are_divided: whether a step may leave a worker the gradients of some parameters alone. Then
            no shard may add to them, on one worker neither.

    Attributes:
        trained: the parameters that require a gradient.
        carried: whether the running shard began with gradients of an earlier batch.
    """

    def __init__(self, are_divided: bool = False) -> None:
        self._are_divided = are_divided
        self.trained: list[nn.Parameter] = []
        self.carried = False
        self._ids = frozenset[int]()  # of the trained parameters
        self._hooks: list[Any] = []
        self._opened: list[Seen] = []  # as the running shard began
        self._after: list[Seen] = []  # as its latest backward pass has left them
        self._passes: list[int] = []  # how many have reached each of them
        self._of_step: list[bool] = []
        self._norms: list[torch.Tensor | None] = []
        # versions of the parameters as the first pass has left them
        self._weights: list[int | None] = []
        # and their norms, as changes through .data leave the version
        self._sizes: dict[int, torch.Tensor] = {}
        self._moved: list[int] = []  # parameters that were changed when a later pass reached them
        self._due = False
        # whether the optimizer's own zero_grad() was called for the running shard
        self._zeroed = False
        # what the shard began with, while a sample stands in for none
        self._aside: _Kept | None = None
        self._kept_by_shard: dict[int, _Kept] = {}
        self._shown: list[Seen] = []  # at the end of a batch
        self._first = 0  # the shard whose gradients they are
        self._refused: list[_Refused] = []

    def train(self, trained: list[nn.Parameter]) -> None:
        """Set the trained parameters; if they are others than before, what is known of gradients is
        forgotten.
        """
        if len(trained) == len(self.trained) and all(map(operator.is_, trained, self.trained)):
            return
        for hook in self._hooks:
            hook.remove()
        self.trained = trained
        self._kept_by_shard = {}
        self._shown = []
        self._refused = []
        self._ids = frozenset(map(id, trained))
        self.note_step()
        me = weakref.ref(self)  # a cycle through a hook would never be freed
        self._hooks = [
            p.register_post_accumulate_grad_hook(_recorder(me, number))  # type: ignore[no-untyped-call]
            for number, p in enumerate(trained)
        ]
        self.reopen()

    def record(self, number: int, gradient: torch.Tensor) -> None:
        """Record a gradient as a backward pass has left it."""
        self._after[number] = gradient, gradient._version
        self._passes[number] += 1
        if self._due and gradient.layout is torch.strided:
            self._norms[number] = _norm(gradient)
        version = self.trained[number]._version
        before = self._weights[number]
        if before is None:
            self._weights[number] = version
            if self._due:
                self._sizes[number] = _norm(self.trained[number])
        elif before != version or (
            self._due and not torch.equal(self._sizes[number], _norm(self.trained[number]))
        ):
            self._moved.append(number)

    def note_step(self) -> None:
        """Note that a step has changed the parameters, on every worker alike."""
        self._weights = [None] * len(self.trained)
        self._moved = []

    def note_used(self, by: ShardGradients) -> None:
        """Note that a step has used the gradients of another optimizer, and changed them where they
        are these.
        """
        if by is not self and not self._ids.isdisjoint(by._ids):
            self.release()

    def check_same_weights(self) -> None:
        """Check that all passes of the shard that have reached a parameter had the same values of
        it.

        Raises:
            ConfigError: otherwise, as what has changed them knew the gradients of one's own samples
                only.
        """
        if self._moved:
            raise ConfigError(
                "parameters",
                "the same values in all backward passes before a step",
                found=f"{len(self._moved)} of {len(self.trained)} that were changed between two "
                "passes, which on several workers depends on one's own samples, such as a "
                "step of sharpness-aware minimisation (SAM)",
                hint="Let an optimizer of its own change them, which lockstep.prepare() is given "
                "too: its step has the gradient of the global batch. The page on training has "
                "an example.",
            )

    def release(self) -> None:
        """Forget what the passes of a shard have left, after its step; nothing that follows is
        compared with it.
        """
        self._begin([(None, -1)] * len(self.trained))

    def current(self) -> Gradients:
        """Return what is in ``.grad``."""
        return [p.grad for p in self.trained]

    def put(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set ``.grad`` of each parameter."""
        for p, gradient in zip(self.trained, gradients, strict=True):
            p.grad = gradient

    def begin_batch(self, due: bool) -> None:
        """Begin a global batch: gradients that the loop has dropped since the last one are dropped
        in all shards.

        Args:
            due: whether to notice changes of values through ``.data``, which leave no trace in the
                version.
        """
        self._due = due
        for number, ((shown, version), p) in enumerate(
            zip(self._shown, self.trained, strict=False)
        ):
            if shown is None or (p.grad is shown and shown._version == version):
                continue
            if p.grad is shown and bool(shown.any()):
                raise _changed()
            for shard, kept in self._kept_by_shard.items():
                kept.gradients[number] = p.grad if shard == self._first else None
                kept.of_step[number] = False
        self._shown = []

    def open(self, shard: Shard, first: bool) -> None:
        """Put the gradients of `shard` into ``.grad``; what an earlier step has left stays there
        for the first one.
        """
        self._zeroed = False
        self.note_step()
        kept = self._kept_by_shard.pop(shard.number, None)
        of_step = [False] * len(self.trained)
        self._aside = None
        self.carried = kept is not None
        if kept is not None:
            of_step = kept.of_step
            if not shard.samples:
                self._aside = kept
                kept = _Kept(
                    [None if g is None else g.clone() for g in kept.gradients], 1.0, of_step
                )
            elif kept.weight != shard.weight:
                multiply(kept.gradients, kept.weight / shard.weight)
            self.put(kept.gradients)
        elif not first:
            self.put([None] * len(self.trained))
        elif shard.one_of_several or self._are_divided:
            of_step = [p.grad is not None for p in self.trained]
        self.reopen()
        self._of_step = of_step

    def reopen(self) -> None:
        """Take what is in ``.grad`` as what the passes begin with."""
        self._begin([(p.grad, -1 if p.grad is None else p.grad._version) for p in self.trained])

    def _begin(self, opened: list[Seen]) -> None:
        count = len(opened)
        self._opened = opened
        self._after = [(None, -1)] * count
        self._passes = [0] * count
        self._norms = [None] * count
        self._of_step = [False] * count
        self._refused = []

    def keep(self, shard: Shard) -> bool:
        """End a shard without a step: keep its gradients for a later batch; returns whether there
        are any.
        """
        self.check_unchanged()
        gradients = self.current()
        weight = shard.weight
        of_step = [
            is_of_step and self._is_kept(number) for number, is_of_step in enumerate(self._of_step)
        ]
        if not shard.samples:
            gradients, weight = self.aside()
        has_gradients = any(gradient is not None for gradient in gradients)
        if has_gradients:
            self._kept_by_shard[shard.number] = _Kept(gradients, weight, of_step)
        if shard.one_of_several:
            self.put([None] * len(gradients))
        elif not shard.samples:
            self.put(gradients)
        return has_gradients

    def end_batch(self, first: int) -> None:
        """End a batch; the gradients that are kept for shard `first` are in ``.grad`` until the
        next one.
        """
        self._first = first
        if self._kept_by_shard:
            if first in self._kept_by_shard:
                self.put(self._kept_by_shard[first].gradients)
            self._shown = [
                (p.grad, -1 if p.grad is None else p.grad._version) for p in self.trained
            ]
        self.release()

    def zero(self, everywhere: bool) -> None:
        """Forget the gradients of the running shard, which the loop has set to None; `everywhere`:
        of all shards.
        """
        self._aside = None
        self._shown = []
        self._zeroed = True
        if everywhere:
            self._kept_by_shard.clear()
        self.release()

    def drop_in(self, shards: Sequence[int]) -> None:
        """Drop in shards without samples, for which no body runs, what the loop has dropped in the
        running one.
        """
        dropped = [
            opened is not None and not self._is_kept(number)
            for number, (opened, _) in enumerate(self._opened)
        ]
        any_dropped = self._zeroed or any(dropped)
        for kept in (
            self._kept_by_shard[shard] for shard in shards if shard in self._kept_by_shard
        ):
            for number, (opened, _) in enumerate(self._opened):
                if dropped[number] or (any_dropped and opened is None):
                    kept.gradients[number] = None
                    kept.of_step[number] = False

    def aside(self) -> tuple[Gradients, float]:
        """Return what a shard without samples keeps of what it began with, and the weight of the
        shard then.
        """
        if self._aside is None:
            return [None] * len(self.trained), 0.0
        kept = [
            g if self._is_kept(number) else None for number, g in enumerate(self._aside.gradients)
        ]
        return kept, self._aside.weight

    def take(self, number: int) -> tuple[Gradients, float]:
        """Take the gradients that are kept for a shard of which this batch has no samples, and its
        weight then.
        """
        kept = self._kept_by_shard.pop(number, None)
        return ([None] * len(self.trained), 0.0) if kept is None else (kept.gradients, kept.weight)

    def _is_kept(self, number: int) -> bool:
        """Return whether the gradient that the shard began with is still a part of the present one.

        A pass adds to it in place, which its version counts. Zeros in place are one change more.
        """
        (opened, version) = self._opened[number]
        gradient = self.trained[number].grad
        return (
            opened is not None
            and gradient is opened
            and opened._version - version == self._passes[number]
        )

    def any_carried(self) -> bool:
        """Return whether gradients of an earlier batch are a part of the running shard's."""
        return self.carried and any(self._is_kept(number) for number in range(len(self.trained)))

    def any_carried_over(self) -> bool:
        """Return whether the running shard's gradients have something in them with which it
        began.
        """
        return any(self._is_kept(number) for number in range(len(self.trained)))

    def check_not_of_step(self) -> None:
        """Check that no shard has added to the sum that an earlier step has left; others have not
        got it.

        Raises:
            ConfigError: otherwise.
        """
        if any(
            is_of_step and self._is_kept(number) for number, is_of_step in enumerate(self._of_step)
        ):
            raise ConfigError(
                "gradients",
                "optimizer.zero_grad() in each shard, or after the step",
                found="gradients of an earlier step that a shard has added to",
            )

    def check_unchanged(self) -> None:
        """Check that gradients are as the latest backward pass has left them, or gone.

        Raises:
            ConfigError: if one has been changed by hand. It is that of one's own samples only, so
                that anything but a multiple depends on how the batch is divided.
        """
        norms: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, p in enumerate(self.trained):
            gradient = p.grad
            (after, version) = self._after[number]
            if gradient is None:
                continue
            # reached by no pass; a loop may set what torch.autograd.grad() has given
            if after is None:
                after, version = self._opened[number]
                unchanged = gradient is not after or gradient._version == version
            else:
                unchanged = gradient is after and gradient._version == version
            if not unchanged and bool(gradient.any()):
                raise _changed()
            norm = self._norms[number]
            if norm is not None and unchanged:
                norms.append((norm, _norm(gradient)))
        if norms:
            before, now = (torch.stack([pair[side] for pair in norms]) for side in (0, 1))
            if not torch.allclose(before, now, rtol=1e-5, atol=0.0, equal_nan=True) and bool(
                now.any()
            ):
                raise _changed()

    def refuse(self, why: Refusal) -> None:
        """Record that gradients of the backward pass that has just ended may be no part of a
        step.
        """
        for number, p in enumerate(self.trained):
            if id(p) in why.parameters and p.grad is not None and self._passes[number]:
                passes = self._passes[number]
                self._refused.append(_Refused(why, number, p.grad, p.grad._version, passes))
                return

    def check_allowed(self, counted: bool) -> list[torch.Tensor]:
        """Raise the error of a pass that `refuse` was told of, if its gradients are still there.

        Args:
            counted: whether the step has a count.

        Returns:
            The numbers of labels that losses of this step have ignored, none of which may be
            anything but 0: they are on an accelerator, and not known yet.
        """
        ignored = []
        for refused in self._refused:
            if counted and refused.why.unless_counted:
                continue
            gradient = refused.gradient
            later = self._passes[refused.number] - refused.passes
            is_there = self.trained[refused.number].grad is gradient
            if is_there and gradient._version - refused.version == later:
                if refused.why.doubt:
                    _log.warning("%s", refused.why.doubt)
                elif refused.why.ignored is None:
                    raise refused.why.error
                else:
                    ignored.append(refused.why.ignored)
        return ignored


def multiply(gradients: Gradients, factor: float) -> None:
    """Multiply the gradients that there are by a number, in place."""
    present = [gradient for gradient in gradients if gradient is not None]
    if present:
        torch._foreach_mul_(present, factor)


def _recorder(
    owner: Callable[[], ShardGradients | None], number: int
) -> Callable[[nn.Parameter], None]:
    def record(parameter: nn.Parameter) -> None:
        gradients = owner()
        gradient = parameter.grad
        if gradients is not None and gradient is not None:
            gradients.record(number, gradient)

    return record


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(full_precision(gradient.detach()))
    return norm.float()


def _changed() -> ConfigError:
    return ConfigError(
        "gradients",
        "gradients that are not changed between backward() and step(), e.g. clipped or unscaled",
        found="others than backward() has left, which on several workers are those of one's own "
        "samples only",
        hint="Use max_grad_norm= of lockstep.prepare(), with math.inf to measure the norm only, "
        "which is then in optimizer.grad_norm; or optimizer.register_step_pre_hook(), which "
        "sees those of the global batch.",
    )
