"""`lockstep.elastic.steps`: an ordinary loop over all batches; in an elastic job, what workers that
are behind get.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError, MembershipChangedError
from lockstep.training import recovery
from lockstep.training.model_state import StateOfStep
from lockstep.training.step.train_step import TrainStep
from support.elastic_group import Group, share


def make(
    virtual_workers: int | None = None, own_scheduler: bool = True
) -> tuple[Loader, TrainStep]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(10, 3), torch.randint(0, 2, (10,)))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = None if own_scheduler else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loss_fn = nn.CrossEntropyLoss()
    step = TrainStep(
        model, optimizer, loss_fn, virtual_workers=virtual_workers, scheduler=scheduler
    )
    return Loader(data, 4, virtual_workers=virtual_workers), step


def test_every_batch_of_every_epoch_comes_once() -> None:
    loader, step = make()
    training = lockstep.elastic.steps(loader, step, 2)
    seen = [(batch.epoch, batch.step, training.epoch, training.ends_epoch) for batch in training]
    assert seen == [(e, s, e, s == 2) for e in range(2) for s in range(3)]
    assert list(training) == []


def test_the_loop_is_that_over_epochs_and_batches() -> None:
    (loader, step), losses = make(), []
    for epoch in range(2):
        losses += [float(step(batch)) for batch in loader.epoch(epoch)]
    loader, again = make()
    assert [float(again(batch)) for batch in lockstep.elastic.steps(loader, again, 2)] == losses
    assert torch.equal(again.model.weight, step.model.weight)


@pytest.mark.parametrize("done", [2, 3])
def test_it_begins_at_the_position_of_the_loader(done: int) -> None:
    loader, step = make()
    batches = iter(loader.epoch(0))
    for _ in range(done):
        next(batches)
    position = loader.state_dict()
    loader, step = make()
    loader.load_state_dict(position)
    seen = [(batch.epoch, batch.step) for batch in lockstep.elastic.steps(loader, step, 2)]
    assert seen == [(e, s) for e in range(2) for s in range(3)][done:]


def test_stop_ends_the_loop_after_the_batch() -> None:
    loader, step = make()
    training = lockstep.elastic.steps(loader, step, 3)
    seen = []
    for batch in training:
        seen.append(batch.step)
        if batch.step == 1:
            training.stop()
    assert seen == [0, 1]


def test_call_returns_the_result() -> None:
    training = lockstep.elastic.steps(*make())
    assert training.call(lambda a, b=0: (a, b), 1, b=2) == (1, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loader": [1, 2]}, "loader: expected a lockstep.Loader, got list"),
        ({"step": print}, "step: expected a lockstep.TrainStep, got builtin_function_or_method"),
        ({"epochs": 0}, "epochs: expected a whole number of at least 1, got 0"),
        ({"epochs": True}, "epochs: expected a whole number of at least 1, got True"),
        ({"state": [1]}, "state: expected a dict of objects by name, got list"),
        (
            {"state": {"n": 3}},
            r"state\['n'\]: expected an object with state_dict\(\) and load_",
        ),
        (
            {"loader": make(2)[0]},
            "virtual_workers: expected None, the step's, in the Loader as well, got 2",
        ),
    ],
)
def test_bad_arguments(change: dict[str, Any], said: str) -> None:
    loader, step = make()
    with pytest.raises(ConfigError, match=said):
        lockstep.elastic.steps(**{"loader": loader, "step": step, "epochs": 1, **change})


# --- in an elastic job, with one worker at a time
# ---------------------------------------------------------------------


def train(comm: Any, fails: str, own_scheduler: bool = True, hook: Any = None) -> dict[str, Any]:
    """Train, with an operation that fails once, such as "step 4" or "call 4", or others that join
    after "body 4".
    """
    loader, step = make(own_scheduler=own_scheduler)
    optimizer: Any = step.optimizer
    seen: dict[str, Any] = {"losses": []}
    scheduler: Any = (
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if own_scheduler else None
    )
    failures = [fails]
    run = step._run

    def attempt(batch: Any, requests: float) -> Any:
        fail(f"step {batch.epoch * 3 + batch.step}")
        return run(batch, requests)

    def fail(place: str) -> None:
        if place in failures:
            failures.remove(place)
            raise MembershipChangedError(0)

    step._run = attempt  # type: ignore[method-assign]
    step.recovery = recovery.ElasticRecovery(comm)
    state = {"scheduler": scheduler, "seen": seen} if own_scheduler else {"seen": seen}
    training = lockstep.elastic.steps(loader, step, 3, state=state)
    for batch in training:
        number = batch.epoch * 3 + batch.step
        comm.client.wants_to_regroup = f"body {number}" in failures
        loss = float(step(batch))
        if hook is not None:
            hook(step)
        if own_scheduler:
            scheduler.step()
        seen["losses"].append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["momentum"] *= 0.9
        seen["losses"].append((number, loss))
        training.call(lambda at=number: fail(f"call {at}"))
        seen["losses"].append(training.call(lambda at=number: fail(f"again {at}") or 7 * at))
        seen["losses"].append(optimizer.param_groups[0]["momentum"])
        seen["losses"].append(float(torch.rand(())))
    return {
        "weight": step.model.weight,
        "lr": optimizer.param_groups[0]["lr"],
        "steps": step.steps_done,
        **seen,
    }


@pytest.mark.parametrize("own_scheduler", [True, False])
@pytest.mark.parametrize(
    ("ahead", "behind", "commit"),
    [
        ("body 4", "", ()),  # one joins after a body
        ("body 5", "", ()),  # the last one of an epoch
        (
            "call 4",
            "step 4",
            (0, 12),
        ),  # one has not got the result of a step, after which the other has gone on
        ("again 5", "call 5", (0, 16)),  # one has not got the result of a call
    ],
)
def test_who_is_behind_gets_what_it_has_not_done(
    ahead: str, behind: str, commit: Any, own_scheduler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "share", share)
    undisturbed = train(Group(0, []), "", own_scheduler)
    first = Group(0, [], commit)
    found = train(first, ahead, own_scheduler)
    second = Group(1, list(first.sent), commit)
    second.commits = first.commits
    for each in (found, train(second, behind, own_scheduler)):
        assert torch.equal(each.pop("weight"), undisturbed["weight"])
        assert each == {name: value for name, value in undisturbed.items() if name != "weight"}
    assert second.sent == []


def test_a_model_that_the_body_changes_beside_the_step_is_refused_at_once() -> None:
    def clamp(step: Any) -> None:
        with torch.no_grad():
            step.model.weight.clamp_(-0.1, 0.1)

    with pytest.raises(ConfigError, match="got a change between two steps"):
        train(Group(0, []), "", hook=clamp)


def test_a_buffer_that_the_program_has_changed_is_not_given_to_who_would_change_it_again() -> None:
    _, step = make()
    step.model.register_buffer("seen", torch.zeros(2))
    state = StateOfStep(step)
    state.commit(None)
    step.model.seen.add_(1)  # type: ignore[operator, union-attr]
    state.begin()
    with pytest.raises(ConfigError, match="got a change between two steps"):
        state.load_operations(state.of_operations())


def test_what_an_operation_has_changed_that_was_not_done_is_no_change_of_the_program() -> None:
    _, step = make()
    step.model.register_buffer("seen", torch.zeros(2))
    state = StateOfStep(step)

    def touch() -> None:
        with torch.no_grad():
            step.model.seen.add_(0.0)  # type: ignore[operator, union-attr]

    state.commit(None)
    state.begin()
    touch()
    state.undo()
    state.leave()
    assert not state.of_operations()["changed"]
    touch()
    state.begin()
    state.undo()
    assert state.of_operations()["changed"]
    state.commit(None)
    assert not state.of_operations()["changed"]
    touch()
    state.leave()
    assert state.of_operations()["changed"]
