"""What a training does about a spike: it stops, skips the step, or goes back to a copy of its
state.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import arguments
from ..data.loader import Batch
from ..errors import DivergedError, counted
from ..parallel.nested import map_tensors
from ..training.step.guards import Decision, Guard, PendingStep
from ..training.step.train_step import TrainStep
from .faults import FoundFault
from .spike_check import SpikeCheck
from .spikes import Spike, SpikeDetector, SpikeRule

ACTIONS = ("stop", "skip", "rollback")

LEFT_OUT = "left_out"
"""The column of the history with the number of steps whose updates were left out."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnSpike:
    """What a training does about a step that stands out by its loss, or the norm of its gradient or
    buffers.

    Args:
        action: "stop" ends the training with a `DivergedError` before the update. "skip" leaves the
            update out. "rollback" also takes back the updates since the last copy of the state in
            memory, and goes on with the batch after the spike: to compute these steps again, with
            equal bits, would lead to the same spike.
        copy_every: for "rollback": steps between two copies. One is also made when a checkpoint is
            written or loaded, so that a resumed run has the same; and when the workers of an
            elastic job change, so that a rollback soon after that takes back fewer steps than in a
            job whose workers stay. It takes as much memory, on the device, as parameters, buffers
            and the optimizer's state.
        limit: number of steps with a spike in a row after which the next one ends the training.
        rule: what counts as a spike.

    Raises:
        ConfigError: for invalid arguments.
    """

    action: str
    copy_every: int = 20
    limit: int = 3
    rule: SpikeRule = field(default_factory=SpikeRule)

    def __post_init__(self) -> None:
        arguments.choice("on_spike", self.action, ACTIONS)
        arguments.whole("copy_every", self.copy_every, least=1)
        arguments.whole("limit", self.limit, least=0)
        arguments.instance("rule", self.rule, SpikeRule, "a SpikeRule")


class StateCopy:
    """A copy of a training's state on the devices where it is; hyperparameters and the number of
    steps are not in it.

    Args:
        step: the training step, between two steps.

    Attributes:
        steps_done: the number of steps that the training had done.
    """

    def __init__(self, step: TrainStep) -> None:
        self.steps_done = step.steps_done
        self._step = step
        self._parameters = [(p, p.detach().clone()) for p in step.model.parameters()]
        self._buffers = [
            (layer, name, None if buffer is None else buffer.detach().clone())
            for layer in (*step.model.modules(), *step.loss.modules.modules())
            for name, buffer in layer._buffers.items()
        ]
        self._optimizer = {key: _copied(state) for key, state in step.optimizer.state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Give model and optimizer the values of the copy; what the optimizer had no state of then
        has none again.
        """
        for parameter, values in self._parameters:
            parameter.copy_(values)
        for layer, name, saved in self._buffers:
            _restore_buffer(layer, name, saved)
        state = self._step.optimizer.state
        for key in [key for key in state if key not in self._optimizer]:
            del state[key]
        for key, values in self._optimizer.items():
            state[key] = _copied(values)


def _copied(state: Any) -> Any:
    """Return a copy of a parameter's optimizer state."""
    return map_tensors(lambda tensor: tensor.detach().clone(), copy.copy(state))


def _restore_buffer(layer: nn.Module, name: str, values: torch.Tensor | None) -> None:
    current = layer._buffers.get(name)
    if (
        current is None
        or values is None
        or current.shape != values.shape
        or current.dtype != values.dtype
    ):
        layer._buffers[name] = None if values is None else values.clone()
    else:
        current.copy_(values)


class SpikeGuard(Guard):
    """Decides about spikes, from the reduced loss and norms: so all workers do alike, whatever
    their number. With virtual workers a step with a spike is computed again before, in case that
    not the data but a worker is wrong (`SpikeCheck`).

    On an accelerator the host waits for the device once a step, as the update depends on what it
    reads.

    Args:
        step: the training step.
        on_spike: what to do.

    Attributes:
        left_out: the steps with a spike whose updates were left out, each as (the first step whose
            update was left out for it, the step itself, what stood out).
    """

    name = "spikes"

    def __init__(self, step: TrainStep, on_spike: OnSpike) -> None:
        self.left_out: list[tuple[int, int, str]] = []
        self._step = step
        self._on_spike = on_spike
        self._detector = SpikeDetector(on_spike.rule)
        self._check = SpikeCheck(step)
        self._in_a_row = 0
        self._copy: StateCopy | None = None
        self._spike: Spike | None = None  # of the step in progress

    @property
    def faults(self) -> list[FoundFault]:
        """The faults of workers that steps with a spike have shown, on all ranks the same."""
        return self._check.faults

    def before_passes(self, step: int, batch: Batch) -> None:
        """Copy the state, if it is time; while steps are being left out, it is still that of the
        last copy.
        """
        self._check.begin_step()
        is_due = self._copy is None or step % self._on_spike.copy_every == 0
        if self._on_spike.action == "rollback" and is_due:
            self._copy = None  # its memory, before the next one takes as much
            self._copy = StateCopy(self._step)

    def before_update(self, pending: PendingStep) -> Decision:
        """Skip a step with a spike, after it was computed again.

        Raises:
            DivergedError: if the training is to stop, naming the step and what stands out.
            FaultyWorkerError, MembershipChangedError: if a worker is wrong, see `SpikeCheck`.
        """
        values = _values(pending)
        self._spike = spike = self._detector.spike(values)
        if self._check.wants_repeat(pending, values, spike is not None):
            return Decision.REPEAT
        if spike is None:
            return Decision.GO
        if self._on_spike.action != "stop" and self._in_a_row < self._on_spike.limit:
            return Decision.SKIP
        text = f"step {pending.step} has a spike: {spike}"
        if self._in_a_row:
            row = [str(step) for _, step, _ in self.left_out[-self._in_a_row :]]
            left_out = f"{counted(self._in_a_row, 'step')} before it have been left out in a row"
            text += f"; {left_out} ({', '.join(row)})"
        hint = "Lower the learning rate, warm it up, clip the gradients, or look at the samples."
        raise DivergedError(f"{text}. {hint}")

    def after_step(self, pending: PendingStep) -> None:
        """Note the step; after a skipped one, go back to the copy if that was chosen."""
        self._check.tell_guards(pending)
        spike = self._spike
        if pending.error is not None:
            return
        if spike is None or pending.decision is not Decision.SKIP:
            self._detector.note(_values(pending))
            self._in_a_row = 0
            return
        first = pending.step
        if self._copy is not None:
            first = self._copy.steps_done if not self._in_a_row else pending.step
            self._copy.restore()
            pending.notes["restored"] = self._copy.steps_done
        self._in_a_row += 1
        self.left_out.append((first, pending.step, str(spike)))
        pending.notes["spike"] = spike
        if self._step.comm.rank == 0:
            steps = (
                f"step {first} is"
                if first == pending.step
                else f"steps {first} to {pending.step} are"
            )
            _log.warning(
                "%s left out of the training: in step %d %s (on_spike)", steps, pending.step, spike
            )

    def on_checkpoint(self) -> None:
        """Copy the state before the next step: a run that resumes from the checkpoint can have no
        older copy.
        """
        self._copy = None

    def on_regroup(self) -> None:
        """Copy the state before the next step: workers that join can have no older copy."""
        self._copy = None
        self._check.forget_ranks()

    def on_row(self, row: dict[str, float], since: int) -> None:
        """Add the number of steps since the last row whose updates were left out."""
        if self._on_spike.action != "stop":
            row[LEFT_OUT] = float(
                sum(1 + step - first for first, step, _ in self.left_out if step >= since)
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what has been noted; the copy is not in it, see `on_checkpoint`."""
        return {
            "detector": self._detector.state_dict(),
            "in_a_row": self._in_a_row,
            "left_out": [list(entry) for entry in self.left_out],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._detector.load_state_dict(state["detector"])
        self._in_a_row = int(state["in_a_row"])
        self.left_out = [
            (int(first), int(step), str(what)) for first, step, what in state["left_out"]
        ]
        self._copy = None


def _values(pending: PendingStep) -> dict[str, float]:
    """Return the numbers to look at; without the norm of a gradient that has overflowed, which fp16
    deals with.
    """
    measured = pending.measured
    values = measured._asdict()
    if pending.has_overflowed:
        del values["gradient_norm"]
    return values


def make_guard(step: TrainStep, on_spike: str | OnSpike) -> SpikeGuard:
    """Return the guard for the argument `on_spike` of `Trainer`.

    Raises:
        ConfigError: for an invalid argument.
    """
    if isinstance(on_spike, str):
        on_spike = OnSpike(on_spike)
    expected = f"one of {', '.join(ACTIONS)}, or lockstep.OnSpike(...)"
    arguments.instance("on_spike", on_spike, OnSpike, expected)
    return SpikeGuard(step, on_spike)
