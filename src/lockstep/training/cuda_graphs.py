"""CUDA graphs of a step: its forward and backward passes, and its update, are recorded once and replayed.

On a small model the host needs longer to start kernels than the GPU to run them. A graph starts all of them at once
(PyTorch's documentation, "CUDA Graphs"). A replay does what the recorded pass did: the same kernels, on the same
memory. So inputs are copied into the memory of the recorded ones; a graph is for one shape of the data, one set of
layers in training mode and one set of trained parameters; and it is compared with two ordinary passes before it is
used, as a model whose Python code decides something anew at each step would be replayed with the first decision.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizers

from ..data.nested import map_tensors, tensors_of
from ..invariance.gradient_buckets import separate_gradients
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
_MOST_CHANGES = 50  # of hyperparameters other than the learning rate, after which updates are no longer recorded


class Graph(Protocol):
    """Records what a function does on a device, and does it again."""

    def refusing_waits(self) -> AbstractContextManager[object]:
        """Return a context manager in which waiting for the device is a RuntimeError, as while recording."""

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

    @contextmanager
    def refusing_waits(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def record(self, body: Callable[[], Any]) -> Any:
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream(self._device)
        # other threads, such as those that copy batches, may go on meanwhile
        recording = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        try:
            with torch.cuda.device(self._device), _any_stream(), recording:
                return body()
        except BaseException:
            torch.cuda.set_stream(stream)  # torch stays on that of the recording
            _end_failed_recording(self._device, self._graph, pool)
            raise

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def _any_stream() -> Iterator[None]:
    """Let parameters be recorded whose gradients have been accumulated before, which was on another stream."""
    allow = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if allow is None:
        yield
        return
    allow(True)
    try:
        yield
    finally:
        allow(False)


_FAILED: list[torch.cuda.CUDAGraph] = []  # of which torch may still know something; they are few


def _end_failed_recording(device: torch.device, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Put torch back into the state outside of a recording: before 2.13 a failed one leaves parts of it open."""
    _FAILED.append(graph)
    with suppress(RuntimeError, AttributeError):  # the allocator: fails where it has been ended
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    again, tensor = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
    with suppress(RuntimeError), torch.cuda.device(device), torch.cuda.graph(again):  # the random generator
        tensor.add_(1)


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
        del self.scaled  # autograd's nodes belong to this stream: none of them may meet the recording of a later pass


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
            gradients = torch.autograd.grad(precision.scaled(total * scale), parameters, allow_unused=True)
            return total.detach(), count, separate_gradients(parameters, gradients)

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
        is_paused: whether those of this step do, because it is not known yet what the loss is a mean over.
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        make: Callable[[], Graph],
        fall_back: Callable[[str, str], None],
    ) -> None:
        self._device, self._model, self._make, self._fall_back = device, model, make, fall_back
        self.is_off = self.is_paused = False
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: other parameters are trained, or the model has other layers."""
        self._layers = list(self._model.modules())
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        self._seen: dict[Any, int] = {}
        self._recorded: dict[Any, _RecordedPass] = {}

    def refuse_hooks(self) -> None:
        """Turn the graphs off if parameters have hooks for accumulated gradients, which a replay would not call."""
        if not self.is_off and any(p._post_accumulate_grad_hooks for p in self._trained):
            self._give_up("parameters have hooks of register_post_accumulate_grad_hook()")

    def _give_up(self, reason: str) -> None:
        self.forget()
        self.is_off = True
        self._fall_back("passes", reason)

    def begin(self, loss: Any, precision: Precision, data: Any, size: int, scale: float, several: bool = False) -> Pass:
        """Begin the passes of a part of a batch; returns them after the forward pass, or after both from a graph.

        Args:
            loss, precision, data, size, scale: see `EagerPass`.
            several: whether the step has further passes, so that gradients are needed after the next replay.
        """
        recorded = None
        if size and not self.is_off and not self.is_paused:
            try:
                recorded = self._recorded_pass(loss, precision, data, size, scale)
            except _UnusableError as error:
                self._give_up(str(error))
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
        modes = tuple([layer.training for layer in self._layers])
        addresses = tuple([p.data_ptr() for p in self._trained])
        return repr(rest), tuple(kinds), size, scale, modes, addresses

    def _record(self, loss: Any, precision: Precision, data: Any, size: int, scale: float) -> _RecordedPass:
        graph = self._make()
        try:
            with _without_trace(self._model, self._device), graph.refusing_waits():
                self._gradients_of(loss, precision, data, size, scale)  # a recording that fails is hard to end
            with _without_trace(self._model, self._device):
                return _RecordedPass(graph, loss, precision, data, size, scale, self._trained, self._model)
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
            total, expected = self._gradients_of(loss, precision, data, size, scale)
        with _without_trace(self._model, self._device):
            recorded.replay(data)
        if not _is_close([total], [recorded.total]) or not _is_close(expected, recorded.gradients):
            raise _UnusableError(
                "a replay gives another result than the pass itself: the model does something else at each step, such "
                "as drawing random numbers outside of torch"
            )

    def _gradients_of(
        self, loss: Any, precision: Precision, data: Any, size: int, scale: float
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Return the sum of the loss and the gradients of an ordinary pass."""
        with precision.autocast():
            total, _ = loss(data, size)
        scaled = precision.scaled(total * scale)
        return total.detach(), torch.autograd.grad(scaled, self._trained, allow_unused=True)


@contextmanager
def _without_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the model's buffers and the random generators after a `with` block.

    Batch norm changes its running statistics without a new version of them; other buffers keep theirs if they have not
    changed, as those that do are sent to other workers.
    """
    saved = [
        (m, name, b, b._version, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]
    with preserve_generators(device):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, version, values in saved:
                    module._buffers[name] = buffer
                    if buffer._version != version or isinstance(module, _NormBase):
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
    graph, which is recorded anew when they change. Updates before that run in the same form: a run that resumes, and
    records later than one that was not interrupted, has the same bits.

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
        self._seen = self._changes = 0
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
        if not self.is_off and (reason := _why_not(optimizer, precision)):
            self._give_up(optimizer, reason)
        if self.is_off:
            return apply(correction)
        self._set_rates(optimizer, parameters)
        if self._is_due(optimizer, parameters, correction):
            try:
                self._record(optimizer, parameters, correction, apply)
            except RuntimeError as error:
                self._give_up(optimizer, _cause(error))
        if self.is_off:
            return apply(correction)
        if self._graph is None:
            with _recordable(optimizer, self._rates):
                return apply(correction)
        return self._replay(parameters, correction)

    def _give_up(self, optimizer: Optimizer, reason: str) -> None:
        self.is_off, self._graph = True, None
        for group in optimizer.param_groups:  # steps that are counted on the device would be waited for
            if not group.get("capturable") and not group.get("fused"):
                _move_steps(optimizer, group["params"], torch.device("cpu"))
        self._fall_back("updates", reason)

    def _set_rates(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Write the learning rates of this step where an update reads them."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if len(self._rates) != len(rates):
            self._rates = [torch.zeros((), device=parameters[0].device) for _ in rates]
            self._last_rates, self._key = [], None
        if rates != self._last_rates:
            for tensor, rate in zip(self._rates, rates, strict=True):
                tensor.fill_(rate)
            self._last_rates = rates

    def _is_due(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], correction: torch.Tensor | None
    ) -> bool:
        """Return whether to record now: updates have been of one kind for some steps. Drops a graph of another kind."""
        key = _hyperparameters(optimizer), correction is None, [p.data_ptr() for p in parameters]
        state = _state_of(optimizer, parameters)
        if key == self._key and len(state) == len(self._state) and all(map(operator.is_, state, self._state)):
            self._seen += 1
            return self._graph is None and self._seen >= _WARM_UP
        self._key, self._state, self._graph, self._seen = key, state, None, 0
        self._changes += 1
        if self._changes == _MOST_CHANGES:
            self._give_up(optimizer, "hyperparameters other than the learning rate change often")
        return False

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
        with _recordable(optimizer, self._rates):
            self._norm = graph.record(lambda: apply(self._correction))
        self._graph = graph

    def _replay(self, parameters: Sequence[nn.Parameter], correction: torch.Tensor | None) -> torch.Tensor | None:
        assert self._graph is not None
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
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if any((*hooks, optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)):
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
            _move_steps(optimizer, group["params"], rate.device)
        else:
            group["fused"], group["foreach"] = True, False  # the only form of SGD that takes a rate on the device
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)


def _move_steps(optimizer: Optimizer, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Move the counts of steps that Adam keeps for each parameter."""
    for p in parameters:
        state = optimizer.state.get(p, {})
        if isinstance(step := state.get("step"), torch.Tensor) and step.device != device:
            state["step"] = step.to(device)
