"""CUDA graphs of a step: its forward and backward passes, and its update, are recorded once and replayed.

On a small model the host needs longer to start kernels than the GPU to run them. A graph starts all of them at once
(PyTorch's documentation, "CUDA Graphs"). A replay does what the recorded pass did: the same kernels, on the same
memory. So inputs are copied into the memory of the recorded ones; a graph is for one shape of the data, one set of
layers in training mode and one set of trained parameters; and it is compared with two ordinary passes before it is
used, as a model whose Python code decides something anew at each step would be replayed with the first decision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..data.nested import map_tensors, tensors_of
from ..invariance.randomness import preserve_generators
from .precision import Precision

__all__ = ["EagerPass", "Graph", "Graphs", "Pass", "PassGraphs", "UpdateGraph", "begin_pass"]

_log = logging.getLogger(__name__)

# A pass is recorded after so many ordinary ones of the same kind: libraries choose and load their kernels in the first.
_WARM_UP = 3
_CHECKED = 2  # replays, in a step each, that are compared with ordinary passes before any is used
_MOST = 4  # graphs of passes; each keeps the memory of a pass
_MOST_KINDS = 64
_TOLERANCE = 1e-2  # between the norms of both gradients: kernels that add in no fixed order differ in rounding
_MOST_UPDATES = 8  # times that an update is recorded anew because hyperparameters have changed


class Graph(Protocol):
    """Records what a function does on a device, and does it again."""

    def record(self, body: Callable[[], Any]) -> Any:
        """Record `body`, and return what it returns: tensors in memory that each replay writes."""

    def replay(self) -> None:
        """Do it again."""


class _CudaGraph:
    """A graph of CUDA.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph = device, torch.cuda.CUDAGraph()

    def record(self, body: Callable[[], Any]) -> Any:
        # other threads, such as those that copy batches, may go on meanwhile
        with torch.cuda.device(self._device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            return body()

    def replay(self) -> None:
        self._graph.replay()


class _UnusableError(Exception):
    """A step cannot be replayed; the text says why."""


class Graphs:
    """The graphs of a training step.

    Args:
        device: the device.
        model: the model.
        reason: why no graphs can be recorded; "" if they can.
        speaks: whether this worker logs why there are no graphs.
        make: makes a graph; one of CUDA when None.
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        reason: str = "",
        speaks: bool = True,
        make: Callable[[], Graph] | None = None,
    ) -> None:
        if make is None and device.type != "cuda":
            reason = f"the device is {device.type}"
        self._speaks, make_graph = speaks, make or partial(_CudaGraph, device)
        self.passes = PassGraphs(device, model, make_graph, self._fall_back)
        self.update = UpdateGraph(make_graph, self._fall_back)
        if reason:
            self.passes.is_off = self.update.is_off = True
            self._fall_back("steps", reason)

    def _fall_back(self, what: str, reason: str) -> None:
        if self._speaks:
            _log.warning("cuda_graphs: %s run without graphs: %s", what, reason)


# --- Forward and backward passes --------------------------------------------------------------------------------------


class Pass(Protocol):
    """The passes of one part of a batch.

    Attributes:
        total: the sum of the loss, a 0-dim tensor without autograd.
        count: what it is a sum over.
    """

    total: torch.Tensor
    count: torch.Tensor | int

    def backward(self) -> None:
        """Add the gradients of the sum times the scale to those of the parameters."""


class EagerPass:
    """An ordinary pass: the forward pass is run at once.

    Args:
        loss: (data, samples) → (sum of the loss, count).
        precision: the precision of the passes.
        data: the part of the batch.
        size: its samples.
        scale: factor of the loss before the backward pass.

    Attributes:
        scaled: the loss times the scale, a 0-dim tensor.
    """

    def __init__(self, loss: Any, precision: Precision, data: Any, size: int, scale: float) -> None:
        with precision.autocast():
            total, self.count = loss(data, size)
        self.total = total.detach()
        self._precision = precision
        self.scaled: torch.Tensor = total * scale

    def backward(self) -> None:
        """See `Pass`."""
        self._precision.backward(self.scaled)


def begin_pass(
    graphs: PassGraphs | None, loss: Any, precision: Precision, data: Any, size: int, scale: float, several: bool
) -> Pass:
    """Begin the passes of a part of a batch, see `PassGraphs.begin`; as usual without graphs."""
    if graphs is None:
        return EagerPass(loss, precision, data, size, scale)
    return graphs.begin(loss, precision, data, size, scale, several)


class _RecordedPass:
    """The recorded passes of one kind of data.

    Args:
        graph: records them.
        loss, precision, data, size, scale: see `EagerPass`.
        parameters: those that are trained.
        model: whose buffers the passes may change.

    Attributes:
        total, count: see `Pass`; of the last replay, as the gradients.
        gradients: in the order of the parameters; None for those that the loss does not use.

    Raises:
        _UnusableError: a replay would not change the model's buffers as a pass does.
        RuntimeError: the passes cannot be recorded.
    """

    def __init__(
        self,
        graph: Graph,
        loss: Any,
        precision: Precision,
        data: Any,
        size: int,
        scale: float,
        parameters: Sequence[nn.Parameter],
        model: nn.Module,
    ) -> None:
        self._graph, self.parameters = graph, parameters
        self._data = map_tensors(torch.clone, data)
        self._inputs = tensors_of(self._data)
        buffers = dict(model.named_buffers())
        versions = {name: buffer._version for name, buffer in buffers.items()}

        def body() -> tuple[torch.Tensor, torch.Tensor | int, tuple[torch.Tensor | None, ...]]:
            with precision.autocast():
                total, count = loss(self._data, size)
            scaled = precision.scaled(total * scale)
            return total.detach(), count, torch.autograd.grad(scaled, parameters, allow_unused=True)

        self.total, self.count, self.gradients = graph.record(body)
        after = dict(model.named_buffers())
        if replaced := [name for name, buffer in buffers.items() if after.get(name) is not buffer]:
            raise _UnusableError(f"a forward pass replaces the buffer {replaced[0]}, in place of changing its values")
        self._changed = [buffer for name, buffer in buffers.items() if buffer._version != versions[name]]

    def replay(self, data: Any) -> None:
        """Run the passes on other data of the same kind."""
        torch._foreach_copy_(self._inputs, tensors_of(data))
        self._graph.replay()
        torch.autograd.graph.increment_version(self._changed)  # as an ordinary pass: it tells which buffers change


class _ReplayedPass:
    """A pass that has been replayed.

    Args:
        recorded: the passes, just replayed.
        keeps: whether the gradients are to outlast the next replay, which overwrites those of this one.
    """

    def __init__(self, recorded: _RecordedPass, keeps: bool) -> None:
        self._recorded, self._keeps = recorded, keeps
        self.total, self.count = recorded.total, recorded.count

    def backward(self) -> None:
        """See `Pass`."""
        pairs = zip(self._recorded.parameters, self._recorded.gradients, strict=True)
        found = [(p, gradient) for p, gradient in pairs if gradient is not None]
        added = [(p.grad, gradient) for p, gradient in found if p.grad is not None]
        if added:
            torch._foreach_add_([old for old, _ in added], [new for _, new in added])
        first = [(p, gradient) for p, gradient in found if p.grad is None]
        given = [gradient for _, gradient in first]
        if self._keeps and given:
            given = [torch.empty_like(gradient) for gradient in given]
            torch._foreach_copy_(given, [gradient for _, gradient in first])
        for (p, _), gradient in zip(first, given, strict=True):
            p.grad = gradient


class PassGraphs:
    """Runs passes, from the graph of their kind where there is one.

    Args:
        device: the device.
        model: the model.
        make: makes a graph.
        fall_back: called with (what, reason) when there will be no graphs.

    Attributes:
        is_off: whether all passes run as usual.
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        make: Callable[[], Graph],
        fall_back: Callable[[str, str], None],
    ) -> None:
        self._device, self._model, self._make, self._fall_back = device, model, make, fall_back
        self.is_off = False
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: other parameters are trained, or the model has other layers."""
        self._layers = list(self._model.modules())
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        self._seen: dict[Any, int] = {}
        self._recorded: dict[Any, _RecordedPass] = {}

    def begin(self, loss: Any, precision: Precision, data: Any, size: int, scale: float, several: bool = False) -> Pass:
        """Begin the passes of a part of a batch; returns them after the forward pass, or after both from a graph.

        Args:
            loss, precision, data, size, scale: see `EagerPass`.
            several: whether the step has further passes, so that gradients are needed after the next replay.
        """
        recorded = None
        if not self.is_off and size:
            try:
                recorded = self._recorded_pass(loss, precision, data, size, scale)
            except _UnusableError as error:
                self.forget()
                self.is_off = True
                self._fall_back("passes", str(error))
        if recorded is None:
            return EagerPass(loss, precision, data, size, scale)
        recorded.replay(data)
        return _ReplayedPass(recorded, several)

    def _recorded_pass(
        self, loss: Any, precision: Precision, data: Any, size: int, scale: float
    ) -> _RecordedPass | None:
        """Return the recorded passes for `data`; None if they are to run as usual this time.

        Raises:
            _UnusableError: no pass can be recorded, or replayed.
        """
        key = self._kind(data, size, scale)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if len(self._seen) > _MOST_KINDS:
            raise _UnusableError(f"the data has more than {_MOST_KINDS} shapes")
        if seen <= _WARM_UP or (key not in self._recorded and len(self._recorded) == _MOST):
            return None
        arguments = loss, precision, data, size, scale
        if key not in self._recorded:
            self._recorded[key] = self._record(*arguments)
        recorded = self._recorded[key]
        if seen <= _WARM_UP + _CHECKED:
            self._check(recorded, *arguments)
            return None
        return recorded

    def _kind(self, data: Any, size: int, scale: float) -> Any:
        """Return what must be the same for a replay.

        Raises:
            _UnusableError: the data has something that a replay would not read.
        """
        kinds: list[Any] = []

        def note(tensor: torch.Tensor) -> None:
            if tensor.device != self._device or tensor.layout is not torch.strided:
                raise _UnusableError(f"the data has a tensor on {tensor.device}, whose values a replay would not read")
            kinds.append((tensor.shape, tensor.stride(), tensor.dtype))

        rest = map_tensors(note, data)
        return repr(rest), tuple(kinds), size, scale, tuple([layer.training for layer in self._layers])

    def _record(self, loss: Any, precision: Precision, data: Any, size: int, scale: float) -> _RecordedPass:
        try:
            with _without_trace(self._model, self._device):
                return _RecordedPass(self._make(), loss, precision, data, size, scale, self._trained, self._model)
        except RuntimeError as error:  # the model waits for the device, or uses what cannot be recorded
            raise _UnusableError(_cause(error)) from None

    def _check(
        self, recorded: _RecordedPass, loss: Any, precision: Precision, data: Any, size: int, scale: float
    ) -> None:
        """Compare a replay with an ordinary pass.

        Raises:
            _UnusableError: they differ.
        """
        with _without_trace(self._model, self._device):
            with precision.autocast():
                total, _ = loss(data, size)
            expected = torch.autograd.grad(precision.scaled(total * scale), self._trained, allow_unused=True)
        with _without_trace(self._model, self._device):
            recorded.replay(data)
        if not _is_close([total.detach()], [recorded.total]) or not _is_close(expected, recorded.gradients):
            raise _UnusableError(
                "a replay gives another result than the pass itself: the model does something else at each step, such "
                "as drawing random numbers outside of torch"
            )


@contextmanager
def _without_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the model's buffers and the random generators after a `with` block.

    Their versions do not tell which buffers have changed: batch norm changes its running statistics without one.
    """
    saved = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    with preserve_generators(device):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, values in saved:
                    module._buffers[name] = buffer
                    buffer.copy_(values)


def _is_close(expected: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> bool:
    """Return whether all tensors together differ by less than the tolerance; waits for the device."""
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None and b is not None]
    if len(pairs) != sum(a is not None for a in expected) or len(pairs) != sum(b is not None for b in found):
        return False
    if not pairs:
        return True
    norm = torch.stack([a.float().norm() for a, _ in pairs]).norm()
    difference = torch.stack([(a.float() - b.float()).norm() for a, b in pairs]).norm()
    return bool(difference <= _TOLERANCE * norm) or bool(~torch.isfinite(norm))


def _cause(error: BaseException) -> str:
    """Return the first line of the error that has ended a recording; the end of it raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# --- The update -------------------------------------------------------------------------------------------------------

Apply = Callable[[torch.Tensor | None], torch.Tensor | None]
"""Updates the parameters with the gradients times a 0-dim tensor, if there is one; returns the norm, if it is asked."""


class UpdateGraph:
    """Runs the update of the parameters, from a graph where that is possible.

    The learning rate is a number in memory of the device that each replay reads; other hyperparameters are part of the
    graph, which is recorded anew when they change.

    Args:
        make: makes a graph.
        fall_back: called with (what, reason) when there will be no graph.

    Attributes:
        is_off: whether all updates run as usual.
    """

    def __init__(self, make: Callable[[], Graph], fall_back: Callable[[str, str], None]) -> None:
        self._make, self._fall_back = make, fall_back
        self.is_off = False
        self._key: Any = None
        self._seen = self._times_recorded = 0
        self._graph: Graph | None = None
        self._state: list[torch.Tensor] = []  # what the graph reads and writes
        self._gradients: list[torch.Tensor] = []
        self._rates: list[torch.Tensor] = []
        self._last_rates: list[float] = []
        self._correction: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None

    def run(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        precision: Precision,
        correction: torch.Tensor | None,
        apply: Apply,
    ) -> torch.Tensor | None:
        """Update the parameters.

        Args:
            optimizer: the optimizer.
            parameters: its parameters, with gradients where they require them.
            precision: the precision of the step.
            correction: 0-dim tensor, a factor of the gradients, if there is one.
            apply: the ordinary update, which uses all of them.

        Returns:
            What `apply` returns.
        """
        if not self.is_off:
            self._consider(optimizer, parameters, precision, correction, apply)
        if self._graph is None:
            return apply(correction)
        return self._replay(optimizer, parameters, correction)

    def _give_up(self, reason: str) -> None:
        self.is_off, self._graph = True, None
        self._fall_back("updates", reason)

    def _consider(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        precision: Precision,
        correction: torch.Tensor | None,
        apply: Apply,
    ) -> None:
        """Record the update, if it has been of one kind for some steps; drop the graph of another kind."""
        if reason := _why_not(optimizer, precision):
            self._give_up(reason)
            return
        key = _hyperparameters(optimizer), correction is None
        state = _state_of(optimizer, parameters)
        is_same = key == self._key and len(state) == len(self._state)
        is_same = is_same and all(a is b for a, b in zip(state, self._state, strict=True))
        self._seen = self._seen + 1 if is_same else 0
        if not is_same:
            self._key, self._state, self._graph = key, state, None
        if self._graph is not None or self._seen < _WARM_UP:
            return
        self._times_recorded += 1
        if self._times_recorded > _MOST_UPDATES:
            self._give_up("hyperparameters other than the learning rate change often")
            return
        try:
            self._record(optimizer, parameters, correction, apply)
        except RuntimeError as error:
            self._give_up(_cause(error))

    def _record(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        correction: torch.Tensor | None,
        apply: Apply,
    ) -> None:
        graph = self._make()
        self._gradients = [p.grad for p in parameters if p.grad is not None]
        self._correction = None if correction is None else correction.clone()
        device = self._gradients[0].device
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self._last_rates = []
        with _recordable(optimizer, self._rates):
            self._state = _state_of(optimizer, parameters)  # steps of Adam are on the device now
            self._norm = graph.record(lambda: apply(self._correction))
        self._graph = graph

    def _replay(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], correction: torch.Tensor | None
    ) -> torch.Tensor | None:
        assert self._graph is not None
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if rates != self._last_rates:
            for tensor, rate in zip(self._rates, rates, strict=True):
                tensor.fill_(rate)
            self._last_rates = rates
        if correction is not None and self._correction is not None:
            self._correction.copy_(correction)
        trained = [p for p in parameters if p.grad is not None]
        pairs = zip(self._gradients, trained, strict=True)
        moved = [(own, p, p.grad) for own, p in pairs if p.grad is not None and p.grad is not own]
        if moved:
            torch._foreach_copy_([own for own, _, _ in moved], [gradient for _, _, gradient in moved])
            for own, p, _ in moved:
                p.grad = own
        self._graph.replay()
        torch.autograd.graph.increment_version(trained)
        return None if self._norm is None else self._norm.clone()


def _why_not(optimizer: Optimizer, precision: Precision) -> str:
    """Return why an update cannot be recorded; "" if it can."""
    if precision.name == "fp16":
        return "with fp16 the host decides whether a step is skipped"
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"{type(optimizer).__name__} is not SGD, Adam or AdamW of torch"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks, which a replay would not call"
    if any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups):
        return "the learning rate is a tensor"
    return ""


_NOT_IN_KEY = ("params", "lr", "initial_lr")


def _hyperparameters(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    return [
        tuple([(name, value) for name, value in group.items() if name not in _NOT_IN_KEY])
        for group in optimizer.param_groups
    ]


def _state_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return the tensors that an update reads and writes, beside the gradients."""
    found: list[torch.Tensor] = []
    for p in parameters:
        if p.grad is None:
            continue
        found.append(p)
        found += [value for value in optimizer.state.get(p, {}).values() if isinstance(value, torch.Tensor)]
    return found


@contextmanager
def _recordable(optimizer: Optimizer, rates: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the optimizer read its learning rates from `rates`, and count steps on the device, within a `with` block."""
    before = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = True
        else:
            group["fused"] = True  # the only form of SGD that takes a rate in memory of the device
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.to(rates[0].device)
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)
