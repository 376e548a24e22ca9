"""Steps from graphs: what is replayed is what a step does, and where it would not be, steps run as usual.

A graph of CUDA needs a GPU (tests/gpu). Here one stands in that runs the recorded function again, on the memory of the
recorded tensors.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.data.loader import Batch
from lockstep.training import step as step_module
from lockstep.training.cuda_graphs import Graphs, PassGraphs
from lockstep.training.precision import Precision
from lockstep.training.step import TrainStep

CPU = torch.device("cpu")


class FakeGraph:
    """Runs the recorded function again, and writes its results where those of the recording are.

    Args:
        preserved: tensors that the recording must not change, as that of a device changes nothing.
        optimizer: one whose hyperparameters are those of the recording when it is replayed.
    """

    def __init__(
        self,
        preserved: Callable[[], Sequence[torch.Tensor]] = tuple,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._preserved, self._optimizer = preserved, optimizer
        self.replays = 0

    def refusing_waits(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, body: Callable[[], Any]) -> Any:
        self._body = body
        saved = [(tensor, tensor.detach().clone()) for tensor in self._preserved()]
        self._groups = self._hyperparameters()
        self._results = body()
        with torch.no_grad():
            for tensor, values in saved:
                if not tensor.equal(values):  # only an update changes them
                    tensor.copy_(values)
        return self._results

    def replay(self) -> None:
        self.replays += 1
        now = self._hyperparameters()
        self._set(self._groups)
        for old, new in zip(flat(self._results), flat(self._body()), strict=True):
            old.copy_(new)
        self._set(now)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else [dict(group) for group in self._optimizer.param_groups]

    def _set(self, groups: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups if self._optimizer else [], groups, strict=True):
            group.update(values)


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, (tuple, list)):
        return [tensor for each in results for tensor in flat(each)]
    return [results.detach()] if isinstance(results, torch.Tensor) else []


class Net(nn.Module):
    """Layers whose passes draw random numbers and change buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class DrawsInPython(Net):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * random.random()


class ReplacesBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return super().forward(inputs)


class Waits(Net):
    """Fails where a device would refuse to be waited for."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if RECORDING:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more lines")
        return super().forward(inputs)


RECORDING: list[bool] = []


class FrozenGraph(FakeGraph):
    """Python's part of the function is not run again: what it has drawn stays."""

    def record(self, body: Callable[[], Any]) -> Any:
        self._drawn = random.getstate()
        return super().record(body)

    def replay(self) -> None:
        now = random.getstate()
        random.setstate(self._drawn)
        super().replay()
        random.setstate(now)


class RefusingGraph(FakeGraph):
    """Refuses to wait while it is recorded, and in the pass before that, or in the recording alone."""

    looks_before = True

    @contextmanager
    def refusing_waits(self) -> Iterator[None]:
        RECORDING.extend([True] * self.looks_before)
        try:
            yield
        finally:
            RECORDING.clear()

    def record(self, body: Callable[[], Any]) -> Any:
        RECORDING.append(True)
        try:
            return super().record(body)
        finally:
            RECORDING.clear()


class FailingGraph(RefusingGraph):
    looks_before = False


def batch_of(inputs: torch.Tensor, labels: torch.Tensor) -> Batch:
    size = len(inputs)
    return Batch((inputs, labels), torch.arange(size), size, size, 0, 0)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        inputs, labels = torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        made.append(batch_of(inputs, labels))
    return made


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Run:
    """A training of some steps.

    Args:
        graphs: whether from graphs.
        model: the kind of the model.
        kind: of the graphs.
        optimizer: makes the optimizer.
        options: of the `TrainStep`.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        graphs: bool,
        model: Callable[[], nn.Module] = Net,
        kind: type[FakeGraph] = FakeGraph,
        optimizer: Callable[..., torch.optim.Optimizer] = MOMENTUM,
        **options: Any,
    ) -> None:
        self.made: list[FakeGraph] = []
        torch.manual_seed(0)
        random.seed(0)
        self.model = model()
        self.optimizer = optimizer(self.model.parameters())

        def make() -> FakeGraph:
            self.made.append(kind(self.preserved, self.optimizer))
            return self.made[-1]

        monkeypatch.setattr(step_module, "Graphs", partial(Graphs, make=make))
        self.step = TrainStep(self.model, self.optimizer, nn.CrossEntropyLoss(), cuda_graphs=graphs, **options)
        self.losses: list[float] = []

    def preserved(self) -> list[torch.Tensor]:
        """What an update changes."""
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        return [*self.model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]

    def train(self, count: int, start: int = 0) -> Run:
        for batch in batches(start + count)[start:]:
            self.losses.append(float(self.step(batch)))
        return self

    @property
    def replays(self) -> list[int]:
        return [graph.replays for graph in self.made]


def assert_same(found: Run, expected: Run) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for (name, a), b in zip(found.model.state_dict().items(), expected.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"virtual_workers": 4},
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.5, "schedule": lambda step: 1 / (1 + step)},
    ],
    ids=["plain", "virtual workers", "accumulated", "clipped, with a schedule"],
)
def test_steps_from_graphs_are_the_same(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    found, expected = (Run(monkeypatch, graphs, **options).train(12) for graphs in (True, False))
    assert len(found.made) == 2, "one for passes, one for updates"
    assert all(count >= 8 for count in found.replays), found.replays
    assert_same(found, expected)


def test_a_graph_is_for_one_shape_and_one_set_of_layers_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for graphs in (True, False):
        run = Run(monkeypatch, graphs)
        for number, batch in enumerate(batches(24)):
            if number == 12:
                run.model.layers[1].eval()
            size = 16 if number % 6 else 7
            run.losses.append(float(run.step(batch_of(*(tensor[:size] for tensor in batch.data)))))
        runs.append(run)
    assert len(runs[0].made) == 3, "of whole batches in both modes, and of updates; the short ones came too rarely"
    assert_same(*runs)


def test_frozen_parameters_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for graphs in (True, False):
        run = Run(monkeypatch, graphs).train(6)
        run.model.layers[0].requires_grad_(False)
        runs.append(run.train(8, 6))
    assert len(runs[0].made) == 4
    assert_same(*runs)


def test_another_hyperparameter_or_state_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for graphs in (True, False):
        run = Run(monkeypatch, graphs).train(6)
        saved = run.optimizer.state_dict()
        run.optimizer.param_groups[0]["momentum"] = 0.5
        run.train(6, 6)
        run.optimizer.load_state_dict(saved)
        runs.append(run.train(6, 12))
    assert len(runs[0].made) == 4, "one for passes, three for updates"
    assert_same(*runs)


@pytest.mark.parametrize(
    ("model", "kind", "reason"),
    [
        (DrawsInPython, FrozenGraph, "gives another result than the pass itself"),
        (ReplacesBuffer, FakeGraph, "a forward pass replaces the buffer calls,"),
        (Waits, RefusingGraph, "operation not permitted when stream is capturing"),
        (Waits, FailingGraph, "operation not permitted when stream is capturing"),
    ],
)
def test_a_model_that_cannot_be_replayed_is_trained_as_usual(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: type[nn.Module],
    kind: type[FakeGraph],
    reason: str,
) -> None:
    expected = Run(monkeypatch, False, model).train(10)
    with caplog.at_level(logging.WARNING):
        found = Run(monkeypatch, True, model, kind).train(10)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("cuda_graphs: passes run without graphs: ")
    assert reason in said
    assert "\n" not in said
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (partial(torch.optim.Adagrad, lr=0.1), "Adagrad is not SGD, Adam or AdamW of torch"),
        (partial(torch.optim.SGD, lr=torch.tensor(0.1)), "the learning rate is a tensor"),
    ],
)
def test_an_update_that_cannot_be_recorded_runs_as_usual(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, optimizer: Any, reason: str
) -> None:
    expected = Run(monkeypatch, False, optimizer=optimizer).train(8)
    with caplog.at_level(logging.WARNING):
        found = Run(monkeypatch, True, optimizer=optimizer).train(8)
    assert [record.getMessage() for record in caplog.records] == [f"cuda_graphs: updates run without graphs: {reason}"]
    assert len(found.made) == 1
    assert_same(found, expected)


class Added(Net):
    """Parameters that autograd gives one tensor as their gradients, and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(3)) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + (self.a + self.b) + self.c.sum()


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.1}, {"virtual_workers": 4, "max_grad_norm": 0.1}], ids=str)
def test_gradients_do_not_share_memory(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    assert_same(*(Run(monkeypatch, graphs, Added, **options).train(10) for graphs in (True, False)))


def test_hooks_of_parameters_are_called_at_each_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, called = Run(monkeypatch, True), []
    with caplog.at_level(logging.WARNING):
        run.model.layers[0].weight.register_post_accumulate_grad_hook(lambda p: called.append(1))
        run.train(9)
    assert len(called) == 9
    assert "passes run without graphs: parameters have hooks of" in caplog.text


def test_another_memory_of_a_parameter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for graphs in (True, False):
        run = Run(monkeypatch, graphs).train(8)
        weight = run.model.layers[0].weight
        weight.data = weight.data.clone() * 2
        runs.append(run.train(8, 8))
    assert len(runs[0].made) == 4
    assert_same(*runs)


def test_a_run_that_records_later_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that resumes: the updates before the recording are those of the graph."""
    straight = Run(monkeypatch, True).train(20)
    resumed = Run(monkeypatch, True).train(10)
    again = Run(monkeypatch, True)
    again.model.load_state_dict(resumed.model.state_dict())
    again.optimizer.load_state_dict(resumed.optimizer.state_dict())
    again.step.load_state_dict(resumed.step.state_dict())
    again.train(10, 10)
    assert again.losses == straight.losses[10:]
    for a, b in zip(again.model.parameters(), straight.model.parameters(), strict=True):
        assert a.equal(b)


def test_hyperparameters_that_always_change_end_the_search(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(monkeypatch, True)
    with caplog.at_level(logging.WARNING):
        for batch in batches(60):
            run.optimizer.param_groups[0]["momentum"] *= 0.99
            run.step(batch)
    assert "updates run without graphs: hyperparameters other than the learning rate change often" in caplog.text


def test_hooks_of_an_optimizer_are_called_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run, called = Run(monkeypatch, True), []
    run.optimizer.register_step_post_hook(lambda *_: called.append(1))
    run.train(8)
    assert len(called) == 8


def test_on_the_cpu_a_line_says_that_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    with caplog.at_level(logging.WARNING):
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), cuda_graphs=True)
        for batch in batches(6):
            step(batch)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["cuda_graphs: steps run without graphs: the device is cpu"]


def test_data_that_a_replay_would_not_read_is_not_replayed() -> None:
    reasons: list[tuple[str, str]] = []
    model = nn.Linear(6, 3)
    graphs = PassGraphs(torch.device("meta"), model, FakeGraph, lambda *said: reasons.append(said))

    def loss(data: torch.Tensor, size: int) -> tuple[torch.Tensor, int]:
        return model(data).sum(), size

    begun = graphs.begin(loss, Precision("fp32", CPU), torch.ones(2, 6), 2, 0.5)
    begun.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.eq(1.0).all()
    assert reasons == [("passes", "the data has a tensor on cpu, whose values a replay would not read")]


def test_values_beside_tensors_belong_to_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number in the data decides what the model does; a replay would do what it did for another number."""
    made: list[FakeGraph] = []
    model = nn.Linear(6, 3)

    def make() -> FakeGraph:
        made.append(FakeGraph())
        return made[-1]

    def loss(data: tuple[torch.Tensor, float], size: int) -> tuple[torch.Tensor, int]:
        return (model(data[0]) * data[1]).sum(), size

    graphs = PassGraphs(CPU, model, make, lambda *said: pytest.fail(str(said)))
    for number in range(12):
        factor = float(number % 2)
        model.zero_grad()
        graphs.begin(loss, Precision("fp32", CPU), (torch.ones(2, 6), factor), 2, 1.0).backward()
        assert model.weight.grad is not None
        assert model.weight.grad.eq(2.0 * factor).all()
    assert [graph.replays for graph in made] == [3, 3]  # 2 are compared with ordinary passes


def test_data_of_ever_other_shapes_end_the_search(caplog: pytest.LogCaptureFixture) -> None:
    model, reasons = nn.Linear(6, 3), []
    graphs = PassGraphs(CPU, model, FakeGraph, lambda *said: reasons.append(said))

    def loss(data: torch.Tensor, size: int) -> tuple[torch.Tensor, int]:
        return model(data).sum(), size

    for size in range(1, 70):
        graphs.begin(loss, Precision("fp32", CPU), torch.ones(size, 6), size, 1.0).backward()
    assert reasons == [("passes", "the data has more than 64 shapes")]
