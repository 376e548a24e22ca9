"""`lockstep.prepare(..., shard_optimizer=True)` computes what it does without, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.parallel.fingerprints import fingerprint_of
from support.classifier import make_classifier, make_samples
from support.outcome import RanksFailedError
from support.pool import Pool

SAMPLES, BATCH = 44, 16  # the last batch is smaller


def whole(model: nn.Module, optimizer: Any) -> str:
    """The fingerprint of the model and of the optimizer's whole state."""
    entries = {**dict(model.named_parameters()), **model.state_dict()}
    return fingerprint_of(entries, optimizer.full_state_dict())


def trained(
    shard_optimizer: bool,
    virtual_workers: int | None = 6,
    epochs: int = 2,
    saved: Path | None = None,
    resumed: Path | None = None,
    counts: bool = False,
    accumulates: bool = False,
) -> list[Any]:
    """The fingerprint, the losses and norms, after some epochs; with what a checkpoint needs."""
    model = make_classifier()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler: Any = ExponentialLR(optimizer, 0.9)
    loader: Any = DataLoader(make_samples(SAMPLES), BATCH, shuffle=True)
    model, optimizer, scheduler, loader = lockstep.prepare(
        *(model, optimizer, scheduler, loader),
        virtual_workers=virtual_workers,
        max_grad_norm=0.5,
        shard_optimizer=shard_optimizer,
    )
    objects = {"model": model, "scheduler": scheduler, "loader": loader}
    if resumed is not None:
        state = torch.load(resumed, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        for name, each in objects.items():
            each.load_state_dict(state[name])
    seen = []
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(loader):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            if accumulates and loader.state_dict()["step"] % 2 == 1:
                continue
            mean = optimizer.step(loss=loss, count=len(inputs) if counts else None)
            optimizer.zero_grad()
            scheduler.step()
            if optimizer.stepped:
                seen += [float(mean), float(optimizer.grad_norm)]
            del number
    if saved is not None:
        state = {name: each.state_dict() for name, each in objects.items()}
        state["optimizer"] = optimizer.full_state_dict()
        if lockstep.init().rank == 0:
            torch.save(state, saved)
    return [whole(model, optimizer), seen]


def test_equal_bits_at_any_number_of_workers(pool: Pool) -> None:
    expected = pool.run(trained, False, workers=1)
    assert pool.run(trained, True, workers=1) == expected
    for workers, backend in ((2, "shm"), (3, "shm"), (2, "gloo"), (3, "gloo")):
        found = pool.run(trained, True, workers=workers, backend=backend)
        assert found == expected * workers


@pytest.mark.parametrize("options", [{"counts": True}, {"accumulates": True}])
def test_equal_bits_of_other_loops(pool: Pool, options: dict[str, bool]) -> None:
    expected = pool.run(trained, False, **options, workers=1)
    assert pool.run(trained, True, **options, workers=3) == expected * 3


def test_equal_bits_without_virtual_workers(pool: Pool) -> None:
    for workers in (1, 2, 3):
        expected = pool.run(trained, False, None, workers=workers)
        assert pool.run(trained, True, None, workers=workers) == expected


@pytest.mark.parametrize(
    ("first", "second"),
    [((3, True), (2, True)), ((2, True), (1, False)), ((1, False), (3, True))],
)
def test_checkpoints_at_other_numbers_of_workers(
    pool: Pool, tmp_path: Path, first: tuple[int, bool], second: tuple[int, bool]
) -> None:
    expected = pool.run(trained, False, workers=1)[0]
    workers, shards = first
    pool.run(trained, shards, 6, 1, tmp_path / "saved", workers=workers)
    workers, shards = second
    found = pool.run(trained, shards, 6, 1, None, tmp_path / "saved", workers=workers)
    assert [each[0] for each in found] == [expected[0]] * workers


def adversaries(shard_optimizer: bool) -> list[str]:
    """Two optimizers, one of which steps with the other's model in its graph."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 16), nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 1))
    optimizers: list[Any] = [torch.optim.Adam(each.parameters()) for each in (generator, critic)]
    loader: Any = DataLoader(TensorDataset(make_samples(SAMPLES).tensors[0]), BATCH)
    *_, loader = lockstep.prepare(
        *(generator, critic, *optimizers, loader),
        virtual_workers=6,
        shard_optimizer=shard_optimizer,
    )
    of_generator, of_critic = optimizers
    for batch in loader.batches():
        for (real,) in of_critic.shards(batch):
            of_critic.zero_grad()
            fake = generator(torch.randn(len(real), 4)).detach()
            (critic(fake).mean() - critic(real).mean()).backward()
            of_critic.step()
        for (real,) in of_generator.shards(batch):
            of_generator.zero_grad()
            (-critic(generator(torch.randn(len(real), 4)))).mean().backward()
            of_generator.step()
    return [whole(generator, of_generator), whole(critic, of_critic)]


def test_two_optimizers(pool: Pool) -> None:
    expected = pool.run(adversaries, False, workers=1)
    for workers in (1, 3):
        assert pool.run(adversaries, True, workers=workers) == expected * workers


def make_prepared(change: Callable[[Any], Any] = lambda optimizer: optimizer) -> tuple[Any, ...]:
    model = make_classifier()
    optimizer = change(torch.optim.Adagrad(model.parameters(), 0.01))  # its state is made at once
    loader: Any = DataLoader(make_samples(SAMPLES), BATCH)
    prepared: tuple[Any, ...] = lockstep.prepare(
        model, optimizer, loader, virtual_workers=6, shard_optimizer=True
    )
    return prepared


def train(model: nn.Module, optimizer: Any, loader: Any, zeroes: bool = True) -> None:
    for inputs, targets in loader:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()


def test_a_state_dict_is_a_part_and_no_other_worker_or_run_loads_it(
    pool: Pool, tmp_path: Path
) -> None:
    def run() -> tuple[int, int, list[str]]:
        model, optimizer, loader = make_prepared()
        train(model, optimizer, loader)
        part, full = optimizer.state_dict(), optimizer.full_state_dict()
        rank = lockstep.init().rank
        before = whole(model, optimizer)
        optimizer.load_state_dict(part)  # its own
        optimizer.load_state_dict(full)
        assert len(optimizer.state) == len(part["state"])
        assert whole(model, optimizer) == before
        parts = lockstep.init().allgather_object(part)
        errors = []
        for target in (optimizer, lockstep.prepare(*make_alone())[1]):
            with pytest.raises(lockstep.errors.ConfigError) as raised:
                target.load_state_dict(parts[1 - rank])
            errors.append(str(raised.value))
        return len(part["state"]), len(full["state"]), errors

    def make_alone() -> tuple[nn.Module, Any]:
        model = make_classifier()
        return model, torch.optim.Adagrad(model.parameters(), 0.01)

    found = pool.run(run, workers=2)
    assert sum(own for own, _, _ in found) == found[0][1] == 8
    for rank, (_, _, errors) in enumerate(found):
        for said in errors:
            assert f"got the part that rank {1 - rank} of 2 workers had" in said
            assert "optimizer.full_state_dict()" in said


@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_of_an_earlier_step_are_refused(pool: Pool, workers: int) -> None:
    """A worker has those of its own parameters alone, and would silently add to these only."""

    def run() -> None:
        train(*make_prepared(), zeroes=False)

    with pytest.raises(RanksFailedError, match="gradients of an earlier step that a shard has"):
        pool.run(run, workers=workers)


def test_what_couples_tensors_is_refused(pool: Pool) -> None:
    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.steps = getattr(self, "steps", 0) + 1
            every = [p for group in self.param_groups for p in group["params"]]
            if self.steps > 4:
                torch.nn.utils.clip_grad_norm_(every, 1.0)
            return super().step(closure)

    def late() -> None:
        prepared = make_prepared(lambda optimizer: Late(optimizer.param_groups[0]["params"], 0.1))
        train(*prepared)
        train(*prepared)

    def with_another_parameter() -> None:
        model, optimizer, loader = make_prepared()
        train(model, optimizer, loader)
        model.append(nn.Linear(5, 5))
        optimizer.add_param_group({"params": list(model[7].parameters())})
        train(model, optimizer, loader)

    for run, said in (
        (late, "got Late, whose update of one tensor depends on the gradients of others"),
        (with_another_parameter, "the parameters that it had before the first step"),
    ):
        with pytest.raises(RanksFailedError, match=said):
            pool.run(run, workers=2)
