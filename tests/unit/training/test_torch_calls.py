"""What is left out of torch's wrappers changes nothing: hooks, profilers and own methods still have
their effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import StepLR
from torch.overrides import TorchFunctionMode

from lockstep.training.step import torch_calls
from lockstep.training.step.torch_calls import (
    FirstGradients,
    clear_gradients,
    run_backward,
    take_step,
)

pytestmark = pytest.mark.usefixtures("as_in_a_new_process")


def sgd(kind: type[SGD] = SGD) -> SGD:
    """Return an optimizer of one parameter of 1.0 with a gradient of 1.0: a step makes it 0.0."""
    parameter = nn.Parameter(torch.ones(()))
    parameter.grad = torch.ones(())
    return kind([parameter], lr=1.0)


def value(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["params"][0].detach())


@pytest.fixture
def wrapper_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that torch's wrappers record for a profiler, one for each call of a wrapper."""
    calls: list[str] = []
    record = torch.autograd.profiler.record_function

    def noted(name: str, *args: Any) -> Any:
        calls.append(name)
        return record(name, *args)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", noted)
    return calls


def test_a_step_is_taken_without_the_wrapper(wrapper_calls: list[str]) -> None:
    optimizer = sgd()
    take_step(optimizer)
    assert value(optimizer) == 0
    assert not wrapper_calls


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.10
def test_a_profiler_sees_the_step_and_the_clearing() -> None:
    optimizer = sgd()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_step(optimizer)
        clear_gradients(optimizer, optimizer.param_groups[0]["params"])
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= names
    assert value(optimizer) == 0


def of_the_optimizer(optimizer: Optimizer, note: Callable[..., None]) -> Any:
    return optimizer.register_step_pre_hook(note)


def after_the_step(optimizer: Optimizer, note: Callable[..., None]) -> Any:
    return optimizer.register_step_post_hook(note)


def of_all(_: Optimizer, note: Callable[..., None]) -> Any:
    return optimizer_module.register_optimizer_step_pre_hook(note)


def of_all_after(_: Optimizer, note: Callable[..., None]) -> Any:
    return optimizer_module.register_optimizer_step_post_hook(note)


@pytest.mark.parametrize("register", [of_the_optimizer, after_the_step, of_all, of_all_after])
def test_hooks_are_called(register: Callable[..., Any]) -> None:
    optimizer, seen = sgd(), list[Optimizer]()
    handle = register(optimizer, lambda which, *_: seen.append(which))
    try:
        take_step(optimizer)
    finally:
        handle.remove()
    assert seen == [optimizer]
    assert value(optimizer) == 0


def test_the_step_of_a_subclass_is_taken(wrapper_calls: list[str]) -> None:
    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.own = True

    optimizer = sgd(Own)
    take_step(optimizer)
    assert optimizer.own and value(optimizer) == 0  # type: ignore[attr-defined]


def test_the_step_of_an_optimizer_itself_is_taken() -> None:
    optimizer = sgd()
    StepLR(optimizer, 1)  # puts another step there, and warns when it was not called
    assert "step" in optimizer.__dict__
    take_step(optimizer)
    assert optimizer._opt_called and value(optimizer) == 0  # type: ignore[attr-defined]


def test_what_a_program_puts_around_the_step_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    original: Any = SGD.step

    @functools.wraps(original)  # which copies the marks of torch's wrapper
    def step(optimizer: SGD, *args: Any) -> Any:
        called.append(optimizer)
        return original(optimizer, *args)

    monkeypatch.setattr(SGD, "step", step)
    optimizer = sgd()
    take_step(optimizer)
    assert called == [optimizer] and value(optimizer) == 0


def without_the_wrapper(_: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_calls, "_WRAPPER", None)


def without_the_profiler(_: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_calls, "_profiler_runs", lambda: True)


def without_hooks_of_all(_: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_calls, "optimizer_module", object())


@pytest.mark.parametrize(
    "leave_out", [without_the_wrapper, without_the_profiler, without_hooks_of_all]
)
def test_the_public_step_is_called_where_torch_has_other_parts(
    leave_out: Callable[[Optimizer, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    wrapper_calls: list[str],
) -> None:
    optimizer = sgd()
    leave_out(optimizer, monkeypatch)
    take_step(optimizer)
    assert value(optimizer) == 0
    assert wrapper_calls == ["Optimizer.step#SGD.step"]


def test_gradients_are_cleared_without_the_wrapper(wrapper_calls: list[str]) -> None:
    optimizer = sgd()
    clear_gradients(optimizer, optimizer.param_groups[0]["params"])
    assert optimizer.param_groups[0]["params"][0].grad is None
    assert not wrapper_calls


def test_a_zero_grad_of_its_own_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            self.cleared = set_to_none

    optimizer = sgd(Own)
    clear_gradients(optimizer, optimizer.param_groups[0]["params"])
    assert optimizer.cleared  # type: ignore[attr-defined]
    called = []
    plain = sgd()
    monkeypatch.setattr(plain, "zero_grad", lambda set_to_none: called.append(set_to_none))
    clear_gradients(plain, plain.param_groups[0]["params"])
    assert called == [True]


class Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def test_a_backward_pass_begins_with_the_factor() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = (x * x).sum()
    run_backward(loss, FirstGradients().of(loss, 0.25))
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 1.0]


def test_a_mode_sees_the_backward_pass() -> None:
    x = torch.ones((), requires_grad=True)
    with Noting() as of_torch:
        torch.autograd.backward(x * 2, torch.ones(()))
    x.grad = None
    with Noting() as mode:
        run_backward(x * 2, torch.ones(()))
    assert (
        mode.called == of_torch.called
    )  # with torch.autograd.backward among them, but in torch 2.10
    assert x.grad == 2


def test_another_public_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torch.autograd, "backward", lambda *arguments: called.append(arguments))
    run_backward(torch.ones((), requires_grad=True) * 2, torch.ones(()))
    assert len(called) == 1


def test_the_public_backward_is_called_where_torch_has_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones((), requires_grad=True)
    loss, engine = x * 2, getattr(torch.autograd, "_engine_run_backward")  # noqa: B009
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    public: list[Any] = []

    def backward(tensor: Any, gradient: Any) -> None:
        public.append(tensor)
        engine(
            (tensor,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    monkeypatch.setattr(torch.autograd, "backward", backward)
    run_backward(loss, torch.ones(()))
    assert public == [loss] and x.grad == 2


def test_first_gradients_are_kept_and_made_again_when_a_hook_has_changed_one() -> None:
    first, loss = FirstGradients(), torch.ones((), requires_grad=True) * 2
    kept = first.of(loss, 0.5)
    assert first.of(loss, 0.5) is kept and first.of(loss, 0.25) is not kept
    assert first.of(loss.double(), 0.5).dtype == torch.float64
    kept.mul_(3)
    assert first.of(loss, 0.5) == 0.5
    for number in range(200):
        first.of(loss, float(number))
    assert len(first._kept) <= 64
