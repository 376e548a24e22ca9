"""The observer in a process of one worker: which steps it records of which scripts, and what it
leaves as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _global_module_registration_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import observers
from lockstep.messages import decode
from lockstep.planning.observer import ObserverSettings, ProfileRecorded, StepObserver, profile_file
from lockstep.planning.step_profile import Profile

STEPS = 12
DATA = TensorDataset(torch.arange(32 * 64 * 4.0).view(-1, 4) / 1e4, torch.ones(32 * 64, 1))


@pytest.fixture
def observe(tmp_path: Path) -> Iterator[Callable[..., Profile]]:
    observers = []

    def run(script: Callable[[], Any], smallest_share: float = 0.25) -> Profile:
        settings = ObserverSettings(str(tmp_path), STEPS, smallest_share)
        observers.append(StepObserver(settings))
        observers[-1].install()
        try:
            script()
        except ProfileRecorded as end:
            assert end.code == 0
        finally:
            observers[-1].finish()
        return decode(profile_file(tmp_path, 0).read_bytes(), Profile)

    yield run
    for observer in observers:
        observer.finish()


def own_loop(
    model: nn.Module, batch_size: int = 64, after_step: Callable[[], Any] = lambda: None
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(4):
        for inputs, targets in DataLoader(DATA, batch_size):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == 0.1
            after_step()


def test_an_own_loop_is_recorded_with_batches_of_several_sizes(
    observe: Callable[..., Profile],
) -> None:
    model = nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 1))
    before = [p.clone() for p in model.parameters()]
    found = observe(lambda: own_loop(model))
    assert all(map(torch.equal, model.parameters(), before))  # nothing is trained
    assert (found.batch, found.global_batch, found.virtual_workers, found.ddp) == (64, 0, 0, False)
    assert found.gradients == (8192, 2048, 2048, 4)
    assert [step.samples for step in found.steps] == [64] * 4 + [32] * 3 + [16] * 3 + [64] * 3
    first = found.steps[1]
    assert first.compute_s > 0 and first.wait_s == 0 and len(first.passes) == 1
    last_layer, first_layer = first.ready_s[2], first.ready_s[0]
    assert 0 < last_layer < first_layer <= first.passes[0].backward_s + 1e-9
    assert sum(bool(step.ready_s) for step in found.steps) == 4  # one in each block
    assert sorted({samples for samples, _ in found.noise}) == [16, 64]
    (few, low), (many, high) = sorted(found.memory)
    assert (few, many) == (16, 64) and high - low > 48 * 512 * 4


def test_an_update_has_the_learning_rate_of_the_user(observe: Callable[..., Profile]) -> None:
    class Inverse(torch.optim.SGD):
        rates: ClassVar[list[float]] = []

        def step(self, closure: Any = None) -> Any:
            self.rates.append(1 / self.param_groups[0]["lr"])  # as methods that estimate it do
            return super().step(closure)

    def script() -> None:
        optimizer = Inverse(model.parameters(), lr=0.5, momentum=0.9)
        for inputs, targets in DataLoader(DATA, 32):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    model = nn.Linear(4, 1)
    before = [p.clone() for p in model.parameters()]
    observe(script)
    assert set(Inverse.rates) == {2.0}
    assert all(map(torch.equal, model.parameters(), before))


def test_the_smallest_share_bounds_the_sizes() -> None:
    assert ObserverSettings("", 30, 1.0).shares() == [1.0]
    assert ObserverSettings("", 30, 0.25).shares() == [1.0, 0.5, 0.25]
    assert ObserverSettings("", 30, 1 / 64).shares() == pytest.approx(
        [64 ** (-i / 4) for i in range(5)]
    )


def trainer(tmp_path: Path, **options: Any) -> None:
    torch.manual_seed(0)
    train, _ = lockstep.data.synthetic(train=1024)
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = lockstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        32,
        run_dir=tmp_path / "mine",
        callbacks=[],
        **options,
    )
    run.fit(train, epochs=5)


def test_a_trainer_is_recorded_and_its_run_directory_not_touched(
    observe: Callable[..., Profile], tmp_path: Path
) -> None:
    found = observe(lambda: trainer(tmp_path))
    assert not (tmp_path / "mine").exists()
    assert (found.batch, found.global_batch, found.virtual_workers) == (32, 32, 0)
    assert [step.samples for step in found.steps] == [32] * 4 + [16] * 3 + [8] * 3 + [32] * 3
    assert all(step.loader_s > 0 and step.other_s >= 0 for step in found.steps)


def test_virtual_workers_are_recorded_pass_by_pass(
    observe: Callable[..., Profile], tmp_path: Path
) -> None:
    found = observe(lambda: trainer(tmp_path, virtual_workers=4))
    assert (found.batch, found.global_batch, found.virtual_workers) == (32, 32, 4)
    assert {step.samples for step in found.steps} == {32}
    assert {len(step.passes) for step in found.steps} == {4}
    parameters = 4 * (28 * 28 * 10 + 10)
    assert (
        all(size == 32 and 3 * parameters < peak < 4 * parameters for size, peak in found.memory)
        and found.memory
    )
    assert sorted({samples for samples, _ in found.noise}) == [8, 32]


def test_a_loop_over_an_ordered_reducer_is_recorded(observe: Callable[..., Profile]) -> None:
    def script() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reducer = lockstep.invariance.OrderedReducer(model.parameters(), virtual_workers=4)
        for step in range(100):
            inputs, targets = DATA[step * 16 : step * 16 + 16]
            for shard in reducer:
                part = reducer.part((inputs, targets), shard)
                (
                    nn.functional.mse_loss(model(inputs[part]), targets[part], reduction="sum") / 16
                ).backward()
            optimizer.step()

    found = observe(script)
    assert (found.batch, found.global_batch, found.virtual_workers) == (16, 16, 4)
    assert {(step.samples, len(step.passes)) for step in found.steps} == {(16, 4)}


def test_gradients_are_accumulated_over_batches(observe: Callable[..., Profile]) -> None:
    def script() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (inputs, targets) in enumerate(DataLoader(DATA, 16)):
            nn.functional.mse_loss(model(inputs), targets).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    found = observe(script, smallest_share=1.0)
    assert found.batch == 32 and {(step.samples, len(step.passes)) for step in found.steps} == {
        (32, 2)
    }


def test_a_script_that_ends_early_has_the_steps_that_there_were(
    observe: Callable[..., Profile],
) -> None:
    def script() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in DataLoader(DATA, 256):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    assert len(observe(script).steps) == 4  # of 8 steps, after 4 to warm up


def test_the_group_is_that_of_the_steps_though_the_script_destroys_it(
    observe: Callable[..., Profile],
) -> None:
    """Otherwise every rank takes itself for rank 0 at the end, and writes that one's profile."""

    def script() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            own_loop(nn.Linear(4, 1))
        finally:
            dist.destroy_process_group()

    assert observe(script).backend == "gloo"


def test_no_handler_of_exceptions_stops_the_end(observe: Callable[..., Profile]) -> None:
    ended = []

    def script() -> None:
        try:
            own_loop(nn.Linear(4, 1))
        except Exception:
            raise AssertionError("an Exception") from None
        finally:
            ended.append(True)
        raise AssertionError("went on")

    # blocks of four: 16 steps, without the first ones of three blocks, which follow another size
    assert len(observe(script).steps) == 13 and ended == [True]


def test_everything_is_as_before_afterwards(observe: Callable[..., Profile]) -> None:
    import torch.utils.data.dataloader as loaders

    def patched() -> list[Any]:
        return [
            torch.autograd._engine_run_backward,
            loaders._BaseDataLoaderIter.__next__,
            observers.active(),
            len(_global_module_registration_hooks),
            len(_global_optimizer_pre_hooks),
            len(_global_optimizer_post_hooks),
        ]

    before, model = patched(), nn.Linear(4, 1)
    observe(lambda: own_loop(model))
    assert patched() == before
    assert not any(p._backward_hooks for p in model.parameters())
