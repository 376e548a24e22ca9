"""What `lockstep.prepare` refuses, and what it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError
from lockstep.parallel.sync_batchnorm import SyncBatchNorm

DATA = TensorDataset(torch.randn(6, 2))


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1)


def test_objects_come_back_in_order_and_a_single_one_alone() -> None:
    model = nn.Linear(2, 1)
    optimizer = optimizer_of(model)
    loader, ours, same = lockstep.prepare(DataLoader(DATA, 2), optimizer, model)
    assert ours is optimizer and same is model and len(loader) == 3 and loader.dataset is DATA
    assert lockstep.prepare(model) is model


@pytest.mark.parametrize(
    ("objects", "options", "message"),
    [
        ([3], {}, "objects: expected modules, optimizers, DataLoaders or lockstep.Loaders"),
        ([DataLoader(DATA, 2)], {}, "objects: expected at least one module"),
        ([nn.Linear(2, 1)], {"precision": "fp16"}, "precision: expected fp32 or bf16"),
        ([nn.Linear(2, 1)], {"max_grad_norm": 0}, "max_grad_norm: expected a number above 0"),
        (
            [nn.Linear(2, 1)],
            {"max_grad_norm": "1"},
            "max_grad_norm: expected a number above 0, got '1'",
        ),
        ([nn.Linear(2, 1)], {"threads": 2}, "threads: expected none without virtual workers"),
        (
            [nn.Linear(2, 1), lockstep.Loader(DATA, 2)],
            {"virtual_workers": 2},
            "virtual_workers: expected 2",
        ),
        (
            [nn.Linear(2, 1), optimizer_of(nn.Linear(2, 1))],
            {},
            "parameters of the model that is trained",
        ),
    ],
)
def test_bad_arguments_are_named(objects: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lockstep.prepare(*objects, **options)


def test_a_model_that_ddp_wraps_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        with pytest.raises(ConfigError, match="a DistributedDataParallel, which sums them as well"):
            lockstep.prepare(model, optimizer_of(model))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("later", [False, True])
def test_synchronised_batch_norm_is_refused_with_virtual_workers(later: bool) -> None:
    """It had the statistics of the shards that workers computed at the same time, in silence."""
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    comm = lockstep.init("cpu")
    if not later:
        lockstep.prepare_model(model, comm, sync_batchnorm=True)
        lockstep.prepare(model, optimizer_of(model))
        with pytest.raises(ConfigError, match="got sync_batchnorm of 1: the body of the loop runs"):
            lockstep.prepare(model, virtual_workers=2)
        return
    model, loader = lockstep.prepare(model, DataLoader(DATA, 2), virtual_workers=2)
    model[1] = SyncBatchNorm(4)
    with pytest.raises(ConfigError, match="got sync_batchnorm of 1: the body of the loop runs"):
        next(iter(loader))


def test_synchronised_batch_norm_of_torch_and_counts_beside_it_are_refused() -> None:
    """Gradients of means over parts of different sizes were added up as if they were alike."""
    model = nn.Sequential(nn.Linear(2, 4), nn.SyncBatchNorm(4))
    with pytest.raises(ConfigError, match="got torch's SyncBatchNorm at 1, whose gradients are"):
        lockstep.prepare(model)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    model = lockstep.prepare_model(model, lockstep.init("cpu"), sync_batchnorm=True)
    model, optimizer, loader = lockstep.prepare(model, optimizer_of(model), DataLoader(DATA, 3))
    (part,) = next(iter(loader))
    model(part).square().mean().backward()
    with pytest.raises(ConfigError, match="count: expected none with synchronised batch norm"):
        optimizer.step(count=3)
    model.eval()  # of fixed statistics
    optimizer.step(count=3)


@pytest.mark.parametrize("name", ["sampler", "set_epoch", "batch_sampler"])
def test_a_loader_says_what_it_has_no_sampler_for(name: str) -> None:
    loader = lockstep.prepare(nn.Linear(2, 1), DataLoader(DATA, 2))[1]
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': it is not needed: each ep"):
        getattr(loader, name)
    with pytest.raises(AttributeError, match=r"no attribute 'samplr'$"):
        loader.samplr  # noqa: B018
    assert not hasattr(loader, "set_epoch")


def test_an_optimizer_is_prepared_once() -> None:
    model = nn.Linear(2, 1)
    optimizer = lockstep.prepare(model, optimizer_of(model))[1]
    with pytest.raises(ConfigError, match=r"each optimizer in one call of prepare"):
        lockstep.prepare(model, optimizer)


def test_an_optimizer_whose_step_needs_a_closure_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(
        ConfigError, match="optimizer: expected one that takes a step from existing gradients"
    ):
        lockstep.prepare(model, torch.optim.LBFGS(model.parameters()))


def test_a_closure_and_a_step_outside_of_several_shards_are_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = lockstep.prepare(model, optimizer_of(model), virtual_workers=2)[1]
    with pytest.raises(ConfigError, match="closure: expected none"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ConfigError, match="step within a loop over the prepared loader"):
        optimizer.step()


def test_gradients_clipped_by_hand_are_refused_on_one_worker_too() -> None:
    model = nn.Linear(4, 3)
    model, optimizer = lockstep.prepare(model, optimizer_of(model))
    model(torch.randn(5, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(
        ConfigError,
        match=r"gradients: expected gradients that are not changed .* max_grad_norm= of",
    ):
        optimizer.step()


def test_random_generators_are_as_before_after_a_batch() -> None:
    model = nn.Linear(2, 1)
    loader = lockstep.prepare(model, DataLoader(DATA, 2), virtual_workers=2)[1]
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    draws = [torch.rand(1) for _ in loader]
    assert len(draws) == 6 and len(torch.cat(draws).unique()) == 6
    assert torch.equal(torch.rand(2), expected)
