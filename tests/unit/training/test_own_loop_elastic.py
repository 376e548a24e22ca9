"""Loops of `prepare` in an elastic job, with one worker at a time: what is repeated, who gets what,
and what is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import lockstep
from lockstep.elastic.membership import View
from lockstep.errors import ConfigError, InterruptedRunError, MembershipChangedError
from lockstep.training import feed, recovery
from lockstep.training.prepared import prepared_loop
from lockstep.training.prepared.prepared_optimizer import PreparedOptimizer
from support.elastic_group import Group, share


@pytest.fixture(autouse=True)
def nothing_is_repeated_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_repeat", None)


class Failures:
    """Workers that are lost at places such as "step 4", each once."""

    def __init__(self, *places: str) -> None:
        self.places = list(places)

    def pass_by(self, place: str) -> None:
        if place in self.places:
            self.places.remove(place)
            raise MembershipChangedError(0)


Use = Callable[[Any, Failures], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Let the next `prepare` be that of a worker of a group, in which workers are lost."""
    original = PreparedOptimizer._check_replicas
    monkeypatch.setattr(recovery, "share", share)

    def let(comm: Any, failures: Failures) -> None:
        def check(self: Any, marks: Any) -> None:  # the last collective before the update
            failures.pass_by(f"step {self.steps_done}")
            original(self, marks)

        monkeypatch.setattr(
            prepared_loop, "recovery_of", lambda *_, **__: recovery.ElasticRecovery(comm)
        )
        monkeypatch.setattr(PreparedOptimizer, "_check_replicas", check)

    return let


class Alone(Group):
    """A group that goes on with the same worker."""

    def __init__(self) -> None:
        super().__init__(0, [])

    def regroup_until(self, commit: Any, adapt: Any, *_: Any) -> None:
        adapt(View(1, (0,), (0,), (commit(),), 0))


def prepare(virtual_workers: int | None = 2, *more: Any, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(36, 3), torch.randint(0, 2, (36,)))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler, average = ExponentialLR(optimizer, 0.5), AveragedModel(model, use_buffers=True)
    loader = lockstep.Loader(data, 4, seed=1, virtual_workers=virtual_workers)
    given = model, optimizer, scheduler, average, loader, *more
    prepared: tuple[Any, ...] = lockstep.prepare(*given, virtual_workers=virtual_workers, **options)
    return prepared


def train(comm: Any, failures: Failures, virtual_workers: int | None = 2) -> dict[str, Any]:
    """Nine batches of one or two shards, with what bodies do beside the step, and after each of
    them an evaluation.
    """
    seen: dict[str, Any] = {"values": []}
    model, optimizer, scheduler, average, loader = prepare(
        virtual_workers, max_grad_norm=1.0, state={"seen": seen}
    )
    for batch in loader.batches():
        if comm is not None:
            comm.client.wants_to_regroup = f"batch {batch.step}" in failures.places
        for inputs, targets in optimizer.shards(batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            if virtual_workers is None:  # else it would be another one in the second shard
                optimizer.param_groups[0]["weight_decay"] = (
                    0.1 + 0.5 * optimizer.param_groups[0]["weight_decay"]
                )
            mean = optimizer.step(loss=loss)
            scheduler.step()
            average.update_parameters(model)
            if optimizer.stepped:
                optimizer.param_groups[0]["momentum"] *= 0.9
                seen["values"] += [batch.step, float(mean), float(optimizer.grad_norm)]
                seen["values"] += [
                    optimizer.param_groups[0][name] for name in ("lr", "weight_decay", "momentum")
                ]

        def measure(number: int = batch.step) -> float:
            failures.pass_by(f"evaluation {number}")
            return float(sum(buffer.double().sum() for buffer in model.buffers()))

        seen["values"].append(recovery.repeated(measure))
    tensors = [*model.state_dict().values(), *average.state_dict().values()]
    counted = {**loader._loop.parts.state_dict(), **loader._loop.losses.state_dict()}
    return {"sums": [tensor.double().sum().item() for tensor in tensors], **counted, **seen}


@pytest.mark.parametrize("virtual_workers", [None, 2])
@pytest.mark.parametrize("place", ["step 4", "evaluation 4", "step 8"])
def test_the_bodies_of_a_batch_run_again(place: str, virtual_workers: int | None, use: Use) -> None:
    undisturbed = train(None, Failures(), virtual_workers)
    comm, failures = Alone(), Failures(place)
    use(comm, failures)
    assert train(comm, failures, virtual_workers) == undisturbed and not failures.places
    assert comm.client.entered == [0]


@pytest.mark.parametrize("virtual_workers", [None, 2])
@pytest.mark.parametrize(
    ("ahead", "behind", "commit"),
    [
        (
            "evaluation 4",
            "step 4",
            (0, 6),
        ),  # one has not got the result of a step, after which the other has gone on
        ("step 5", "evaluation 4", (0, 7)),  # one has not got the result of an evaluation
        ("batch 4", "", ()),  # one joins after a batch
    ],
)
def test_who_is_behind_gets_what_it_has_not_done(
    ahead: str, behind: str, commit: Any, virtual_workers: int | None, use: Use
) -> None:
    undisturbed = train(None, Failures(), virtual_workers)
    first, failures = Group(0, [], commit), Failures(ahead)
    use(first, failures)
    assert train(first, failures, virtual_workers) == undisturbed
    second, failures = Group(1, list(first.sent), commit), Failures(behind)
    second.commits = first.commits
    use(second, failures)
    assert train(second, failures, virtual_workers) == undisturbed
    assert second.sent == []


class Completing(Group):
    """A worker that another one joins while it waits for all to have completed a training."""

    def __init__(self, rank: int, sent: list[Any]) -> None:
        super().__init__(rank, sent)
        if rank == 0:
            places = Failures("complete")
            self.client.complete = lambda: places.pass_by("complete") or True  # type: ignore[func-returns-value]

    def regroup_until(self, commit: Any, adapt: Any, *_: Any) -> None:
        super().regroup_until(commit, adapt, at_boundary=self.rank == 0)


def test_an_evaluation_beside_loops_is_not_done_again_by_who_joins_after_it(use: Use) -> None:
    evaluated = []

    def evaluate() -> Any:
        evaluated.append(worker.rank)
        return {"accuracy": 0.5}

    for worker in (first := Completing(0, []), Completing(1, first.sent)):
        worker.commits = first.commits
        use(worker, Failures())
        prepared = prepare()  # whose loops evaluations belong to
        assert recovery.repeated(evaluate) == {"accuracy": 0.5}
        del prepared
    assert evaluated == [0]


# --- what is not repeated
# ---------------------------------------------------------------------------------------------


def step_twice(model: Any, optimizer: Any, scheduler: Any, average: Any, loader: Any) -> None:
    for number, (inputs, targets) in enumerate(loader):
        F.cross_entropy(model(inputs), targets).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def never_zero(model: Any, optimizer: Any, scheduler: Any, average: Any, loader: Any) -> None:
    for inputs, targets in loader:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def beside(act: str) -> Callable[..., None]:
    """A loop with something beside the step, before it or after it."""

    def loop(model: Any, optimizer: Any, scheduler: Any, average: Any, loader: Any) -> None:
        own_scheduler, own_average = ExponentialLR(optimizer, 0.5), AveragedModel(model)
        others = iter(loader)
        for inputs, targets in loader:
            optimizer.zero_grad()
            if act == "loader":
                inputs, targets = next(others)
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            if act == "early scheduler":
                optimizer._opt_called = True  # torch warns otherwise
                scheduler.step()
            if act == "early average":
                average.update_parameters(model)
            if act == "whole batch":
                lockstep.whole_batch(loss[None].expand(len(inputs)))
            optimizer.step()
            if act == "scheduler":
                own_scheduler.step()
            if act == "average":
                own_average.update_parameters(model)
            if act == "pass":
                model(inputs)
            if act == "clamp":
                with torch.no_grad():
                    model[0].weight.clamp_(-0.1, 0.1)

    return loop


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        (step_twice, "a batch without a step of the optimizer"),
        (never_zero, "gradients that stay for a later step"),
        (beside("loader"), "several loaders in one loop"),
        (beside("early scheduler"), "a scheduler that is stepped before the optimizer"),
        (beside("early average"), "an AveragedModel that is updated before the optimizer's step"),
        (beside("whole batch"), "lockstep.whole_batch()"),
        (beside("scheduler"), "a scheduler in its bodies that lockstep.prepare() was not given"),
        (beside("average"), "an AveragedModel in its bodies that lockstep.prepare() was not given"),
        (beside("clamp"), "parameters that are changed beside the step"),
        (beside("pass"), "forward passes after the optimizer's step"),
    ],
)
def test_a_loop_that_cannot_be_repeated_is_outside_of_a_training(
    loop: Any, why: str, use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepare(None)
    loop(*prepared)
    undisturbed = [tensor.clone() for tensor in prepared[0].state_dict().values()]
    comm = Alone()
    use(comm, Failures())
    prepared = prepare(None)
    with caplog.at_level(logging.WARNING):
        loop(*prepared)
    said = [record.message for record in caplog.records if "in an elastic job" in record.message]
    assert len(said) == 1 and f"with {why}: no worker can join or leave" in said[0], said
    assert comm.client.entered in ([], [0, -1])
    assert all(map(torch.equal, prepared[0].state_dict().values(), undisturbed))


def test_a_loop_that_is_left_is_outside_of_a_training_from_there_on(use: Use) -> None:
    comm = Alone()
    use(comm, Failures())
    model, optimizer, _, _, loader = prepare()
    for _ in range(2):
        for inputs, targets in loader:
            if loader.state_dict()["step"] == 4:
                break
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert comm.client.entered == [0, -1, 1, -1] and comm.keeps_values


@pytest.mark.parametrize("last", [4, 9], ids=["within the epoch", "at its last batch"])
def test_an_epoch_after_one_that_was_left_begins_with_its_first_batch_also_after_a_loss(
    last: int, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = Failures("load 1")
    use(Alone(), failures)
    model, optimizer, _, _, loader = prepare()
    loads = [0]

    def copied(*args: Any) -> Any:
        place = f"load {loads[0]}"
        loads[0] += 1
        failures.pass_by(place)  # before the first batch of the second loop
        return original(*args)

    original = feed.copied
    monkeypatch.setattr(feed, "copied", copied)
    steps: list[list[int]] = [[], []]
    for epoch in range(2):
        for inputs, targets in loader:
            steps[epoch].append(loader.state_dict()["step"])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if epoch == 0 and steps[0][-1] == last:
                break
    assert not failures.places
    assert sorted(set(steps[1])) == list(range(1, 10)), steps


def test_passes_after_the_step_of_a_later_batch_are_refused(use: Use) -> None:
    use(Alone(), Failures())
    model, optimizer, _, _, loader = prepare()
    with pytest.raises(
        ConfigError, match="got one after it, in training mode, which has changed buffers"
    ):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if loader.state_dict()["step"] == 3:
                model(inputs)


def test_a_signal_to_the_job_ends_the_loop(use: Use) -> None:
    comm: Any = Alone()
    use(comm, Failures())
    model, optimizer, _, _, loader = prepare()
    with pytest.raises(InterruptedRunError, match="stopped by SIGTERM after step 4"):
        for inputs, targets in loader:
            comm.client.stop_signal = 15 * (loader.state_dict()["step"] == 4)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def test_several_optimizers_are_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = recovery.Recovery()
    missing.is_missing = True
    monkeypatch.setattr(
        prepared_loop,
        "recovery_of",
        lambda _, can_regroup: recovery.Recovery() if can_regroup else missing,
    )
    prepare()
    assert not caplog.records
    other = nn.Linear(3, 2)
    lockstep.prepare(other, torch.optim.SGD(other.parameters(), 0.1))
    loader = lockstep.Loader(TensorDataset(torch.randn(4, 3)), 2)
    more = torch.optim.SGD(other.parameters(), 0.1)
    lockstep.prepare(other, torch.optim.SGD(other.parameters(), 0.1), more, loader)
    said = [record.message.partition(", with ")[2].partition(":")[0] for record in caplog.records]
    assert said == ["no loader", "2 optimizers"]
