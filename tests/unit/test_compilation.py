"""Models run compiled where they can be, and are saved as programs that give the same."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep import compilation
from lockstep.compilation import compile_or_fallback
from lockstep.errors import ConfigError, LockstepError


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    torch.compiler.reset()


class Branching(nn.Module):
    """Its way depends on a value, so it is no single program."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            return y + 1
        return y - 1


def test_the_model_stays_the_same_object_with_the_same_results() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).eval()
    names, x = list(model.state_dict()), torch.randn(4, 3)
    expected = model(x)
    programs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        programs.append(graph)
        return graph.forward

    assert compile_or_fallback(model, backend=backend) is model
    torch.testing.assert_close(model(x), expected)
    assert len(programs) == 1
    assert list(model.state_dict()) == names
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)


def test_models_have_programs_of_their_own() -> None:
    x, calls = torch.randn(4, 3), []
    for number in range(10):  # more than the programs that torch keeps of one piece of code
        model = compile_or_fallback(
            nn.Sequential(*(nn.Tanh() for _ in range(number % 9 + 1))), backend="eager"
        )
        model.register_forward_hook(lambda *_, number=number: calls.append(number))
        torch.testing.assert_close(
            model(x), nn.Sequential.forward(model, x)
        )  # a fallback would warn: an error here
    assert calls == list(range(10))


def test_only_modules_are_compiled() -> None:
    with pytest.raises(ConfigError, match="model: expected a module, got function"):
        compile_or_fallback(lambda x: x)  # type: ignore[arg-type]


def test_what_is_no_single_program_is_compiled_in_parts() -> None:
    model = compile_or_fallback(Branching(), backend="eager")
    x = torch.randn(4, 3)
    with pytest.warns(
        RuntimeWarning, match="Branching runs in parts, not as one program: .*[Dd]ata-dependent"
    ):
        found = model(x)
    torch.testing.assert_close(found, Branching.forward(model, x))
    model(x)  # said once


def test_what_cannot_be_compiled_runs_as_before() -> None:
    tried = []

    def backend(graph: object, _: object) -> object:
        tried.append(graph)
        raise RuntimeError("no compiler here")

    model = compile_or_fallback(nn.Linear(3, 2), backend=backend)
    x = torch.randn(4, 3)
    with pytest.warns(
        RuntimeWarning, match="Linear runs uncompiled, not in parts: .*no compiler here"
    ):
        found = model(x)
    count = len(tried)
    model(torch.randn(5, 3))  # said and tried once
    assert len(tried) == count
    torch.testing.assert_close(found, nn.functional.linear(x, model.weight, model.bias))


def test_a_mistake_in_the_call_is_the_models_own_error_and_changes_nothing() -> None:
    programs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        programs.append(graph)
        return graph.forward

    model = compile_or_fallback(nn.Linear(3, 2), backend=backend)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(4, 5))
    model(torch.zeros(4, 3))  # a fallback would warn, which is an error in tests
    assert len(programs) == 1


def test_the_saved_program_takes_other_numbers_of_samples(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    written = lockstep.export(model, torch.randn(4, 3), tmp_path / "model.pt2", onnx=False)
    assert written == [tmp_path / "model.pt2"]
    assert model.training
    x = torch.randn(7, 3)
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(x), model.eval()(x))


def test_a_model_on_several_devices_is_saved_as_one(tmp_path: Path) -> None:
    model = lockstep.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])
    lockstep.export(model, (torch.randn(4, 3),), tmp_path / "model.pt2", onnx=False)
    x = torch.randn(2, 3)
    torch.testing.assert_close(
        torch.export.load(tmp_path / "model.pt2").module()(x), model.module(x)
    )


class Doubling(nn.Module):
    """Has an attribute of the name that wrappers give the model within."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.module(x) * 2
        return found / (x[:, :1] != 0)  # infinite where x is zero, and not a number where both are


def test_a_model_with_an_inner_module_is_saved_whole(tmp_path: Path) -> None:
    model, x = Doubling(), torch.zeros(2, 3)
    with torch.no_grad():
        model.module.bias[0] = 0
    lockstep.export(model, x, tmp_path / "model.pt2", onnx=False)
    found = torch.export.load(tmp_path / "model.pt2").module()(x)
    assert found.isnan().any()
    torch.testing.assert_close(found, model(x), equal_nan=True)


@pytest.mark.parametrize(
    ("name", "said"), [("model.onnx", "another suffix"), ("none/model.pt2", "an existing folder")]
)
def test_paths_that_cannot_be_written(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"path: expected .*{said}"):
        lockstep.export(nn.Linear(3, 2), torch.randn(4, 3), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_traced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a module that torch\.export can trace, got Branching"):
        lockstep.export(Branching(), torch.randn(4, 3), tmp_path / "model.pt2", onnx=False)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_gives_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = compilation._trace

    def other(model: nn.Module, *args: object) -> object:
        with torch.no_grad():
            model.weight.add_(1)
        return traced(model, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(compilation, "_trace", other)
    with pytest.raises(
        LockstepError, match="expected the archive program to give the model's outputs"
    ):
        lockstep.export(nn.Linear(3, 2), torch.randn(4, 3), tmp_path / "model.pt2", onnx=False)
    assert list(tmp_path.iterdir()) == []


needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="the extra onnx is not installed",
)


@needs_onnx
@pytest.mark.leaks("onnxruntime keeps a file open, and the exporter's progress bar a thread")
def test_onnx_goes_beside_the_archive(tmp_path: Path) -> None:
    written = lockstep.export(nn.Linear(3, 2), torch.randn(4, 3), tmp_path / "model.pt2", onnx=True)
    assert [file.name for file in written] == ["model.pt2", "model.onnx"]


def test_onnx_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_ONNX", ("no_such_package",))
    with pytest.raises(
        ConfigError, match=r"^onnx needs the package no_such_package: .*lockstep-train\[onnx\]"
    ):
        lockstep.export(nn.Linear(3, 2), torch.randn(4, 3), tmp_path / "model.pt2", onnx=True)
    written = lockstep.export(nn.Linear(3, 2), torch.randn(4, 3), tmp_path / "model.pt2")
    assert [file.name for file in written] == ["model.pt2"]


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor


def test_arguments_that_are_no_tensors(tmp_path: Path) -> None:
    lockstep.export(Scaled(), (torch.randn(4, 3), 2.0), tmp_path / "model.pt2", onnx=False)
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert program(torch.ones(2, 3), 2.0).tolist() == [[2.0] * 3] * 2


class Bessel(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x)


@needs_onnx
@pytest.mark.leaks("the exporter's progress bar is a thread")
def test_a_model_without_an_onnx_form(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"one that has an ONNX form, got .*bessel"):
        lockstep.export(Bessel(), torch.randn(4, 3), tmp_path / "model.pt2", onnx=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.warns(RuntimeWarning, match=r"no ONNX file was written\. .*bessel"):
        assert lockstep.export(Bessel(), torch.randn(4, 3), tmp_path / "model.pt2") == [
            tmp_path / "model.pt2"
        ]
