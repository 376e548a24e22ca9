"""Data-parallel training ends with the parameters of one process, whichever way it is set up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from support.conformance import Ranks

STEPS, FEATURES, CLASSES, BATCH = (
    4,
    20,
    5,
    12,
)  # a batch of 12 is dealt out evenly to 2, 3 and 4 ranks


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)
    )


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, FEATURES, generator=source), torch.randint(
        CLASSES, (BATCH,), generator=source
    )


def own_part(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def train(
    model: nn.Module, part: Callable[[Tensor], Tensor] = own_part, steps: int = STEPS
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(steps):
        inputs, targets = make_batch(step)
        optimizer.zero_grad()
        cross_entropy(model(part(inputs)), part(targets)).backward()
        optimizer.step()


def expect_equal(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    """The model is the reference but for rounding, and the same bits on all ranks."""
    for (name, value), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(
            value, expected, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
        everywhere = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        with torch.no_grad():
            dist.all_gather(everywhere, value)
        assert all(torch.equal(one, value) for one in everywhere), (
            f"{name} is not the same on all ranks"
        )


def whole(tensor: Tensor) -> Tensor:
    return tensor


# --- ways to set up DDP
# ---------------------------------------------------------------------------------------


def bfloat16_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    """Average in bfloat16; torch's own hook of this kind wants a GPU."""
    short = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()
    future = dist.all_reduce(short, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def plain(options: dict[str, Any], hook: Callable[..., Any] | None, tolerance: float) -> None:
    reference = make_model()
    model = copy.deepcopy(reference)
    if dist.get_rank() > 0:
        nn.init.zeros_(model[0].weight)  # rank 0's are sent to all at the start
    wrapped = DistributedDataParallel(model, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    train(wrapped)
    train(reference, whole)
    expect_equal(model, reference, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.005},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.005},
    ],
    ids=str,
)
def test_ddp(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.run(plain, options, None, 1e-5)


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        (default_hooks.allreduce_hook, 1e-5),
        (default_hooks.fp16_compress_hook, 5e-3),
        (bfloat16_hook, 3e-2),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 5e-3),
    ],
    ids=["allreduce", "fp16", "bf16", "fp16 around allreduce"],
)
def test_ddp_with_a_communication_hook(
    ranks: Ranks, hook: Callable[..., Any], tolerance: float
) -> None:
    ranks.run(plain, {}, hook, tolerance)


def low_rank() -> None:
    """PowerSGD is an approximation; with as much rank as the gradients have it is exact but for
    rounding.
    """
    reference, model = make_model(), make_model()
    wrapped = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0.01
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(wrapped)
    train(reference, whole)
    expect_equal(model, reference, 0.2)
    assert state.iter > 2


def test_ddp_with_power_sgd(ranks: Ranks) -> None:
    ranks.run(low_rank)


# --- what DDP has to cope with
# --------------------------------------------------------------------------------


class Branches(nn.Module):
    """Uses one of its two branches; which one the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.never = nn.Linear(2, 2)

    def forward(self, inputs: Tensor, branch: int) -> Tensor:
        return self.first(inputs) if branch == 0 else self.second(inputs)


def unused_parameters() -> None:
    """Ranks use different branches, and one layer is used by none."""
    torch.manual_seed(3)
    reference = Branches()
    model = copy.deepcopy(reference)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    inputs, targets = make_batch(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    cross_entropy(wrapped(own_part(inputs), rank % 2), own_part(targets)).backward()
    parts = zip(inputs.chunk(size), targets.chunk(size), strict=True)
    losses = [cross_entropy(reference(x, peer % 2), y) for peer, (x, y) in enumerate(parts)]
    (sum(losses) / size).backward()  # type: ignore[union-attr]
    for value, expected in zip(model.parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert value.grad is None
        else:
            torch.testing.assert_close(value.grad, expected.grad, rtol=0, atol=1e-6)


def accumulated() -> None:
    """Two of three backward passes are not synchronized."""
    reference, model = make_model(), make_model()
    wrapped = DistributedDataParallel(model)
    for step in range(2):
        inputs, targets = make_batch(step)
        with wrapped.no_sync():
            cross_entropy(wrapped(own_part(inputs)), own_part(targets)).backward()
    inputs, targets = make_batch(2)
    cross_entropy(wrapped(own_part(inputs)), own_part(targets)).backward()
    for step in range(3):
        inputs, targets = make_batch(step)
        cross_entropy(reference(inputs), targets).backward()
    for value, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(value.grad, expected.grad, rtol=0, atol=1e-6)


def buffers() -> None:
    """Rank 0's running statistics are sent to all before each forward pass."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    train(DistributedDataParallel(model), steps=3)
    model(make_batch(0)[0])
    wrapped = DistributedDataParallel(model)
    wrapped(own_part(make_batch(0)[0]))
    counts = torch.stack([buffer.double().sum() for buffer in model.buffers()])
    dist.all_reduce(counts[-1:], dist.ReduceOp.MAX)
    assert counts[-1].item() == 5


def several_models() -> None:
    """Two models in two groups, trained by turns."""
    groups = [dist.new_group(), dist.new_group()]
    references, models = [make_model(), make_model()], [make_model(), make_model()]
    pairs = zip(models, groups, strict=True)
    wrapped = [DistributedDataParallel(model, process_group=group) for model, group in pairs]
    for steps in (1, 2):
        for model, reference in zip(wrapped, references, strict=True):
            train(model, steps=steps)
            train(reference, whole, steps=steps)
    for model, reference in zip(models, references, strict=True):
        expect_equal(model, reference)


def half_precision(dtype: torch.dtype) -> None:
    """Gradients of a half type are averaged; the sum over ranks is right within its resolution."""
    model = nn.Linear(FEATURES, CLASSES).to(dtype)
    wrapped = DistributedDataParallel(model)
    inputs = torch.full((2, FEATURES), dist.get_rank() + 1.0, dtype=dtype)
    wrapped(inputs).sum().backward()
    size = dist.get_world_size()
    mean = 2 * sum(range(1, size + 1)) / size
    torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight, mean))


def sparse() -> None:
    """Gradients of a sparse embedding: each rank has touched other rows."""
    torch.manual_seed(0)
    reference = nn.Embedding(50, 4, sparse=True)
    model = copy.deepcopy(reference)
    wrapped = DistributedDataParallel(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [torch.tensor([1, 5 + peer, 5 + peer, 30]) for peer in range(size)]
    for _ in range(2):
        wrapped(rows[rank]).square().sum().backward()
        (sum(reference(part).square().sum() for part in rows) / size).backward()  # type: ignore[union-attr]
    assert model.weight.grad is not None and model.weight.grad.is_sparse
    torch.testing.assert_close(model.weight.grad.to_dense(), reference.weight.grad.to_dense())


@pytest.mark.parametrize(
    "body",
    [
        unused_parameters,
        accumulated,
        buffers,
        several_models,
        partial(half_precision, torch.bfloat16),
        partial(half_precision, torch.half),
        sparse,
    ],
    ids=lambda body: getattr(body, "__name__", "half types"),
)
def test_ddp_copes_with(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks.run(body)


def sampled() -> None:
    """The usual program: a sampler deals out a data set; each epoch in another order."""
    inputs, targets = map(torch.cat, zip(*(make_batch(step) for step in range(3)), strict=True))
    sampler: Any = DistributedSampler(TensorDataset(inputs, targets), shuffle=True, seed=4)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    seen = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            loss = cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
            seen.append(features)
    everyones = [
        torch.empty(36 * 3 // dist.get_world_size(), FEATURES) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(everyones, torch.cat(seen))
    assert torch.equal(torch.cat(everyones).sort(0).values, inputs.repeat(3, 1).sort(0).values)


def test_a_program_with_a_distributed_sampler(ranks: Ranks) -> None:
    ranks.run(sampled)
