"""Parameters, optimizer state and tensors that are spread over the ranks, and checkpoints of
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from support.conformance import Ranks

# torch's caches keep device meshes; Gloo's files are open for as long as somebody holds its group
KEPT = pytest.mark.leaks("a device mesh outlives its job, and its group with it")
pytestmark = pytest.mark.parametrize(
    "transport", [pytest.param("gloo", marks=KEPT), "shm", "mpi4py"]
)

FEATURES, CLASSES, BATCH = 20, 5, 12


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, CLASSES)
    )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    share: tuple[int, int] = (0, 1),
    steps: int = 4,
) -> None:
    """Train on part `share[0]` of `share[1]` of each batch."""
    for step in range(steps):
        source = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, FEATURES, generator=source).chunk(share[1])[share[0]]
        targets = torch.randint(CLASSES, (BATCH,), generator=source).chunk(share[1])[share[0]]
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def own_share() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def expect_equal(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, value), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert full.shape == expected.shape, name
        torch.testing.assert_close(
            full, expected, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- FSDP2
# --------------------------------------------------------------------------------------------------


def shard(model: nn.Sequential, **options: Any) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp(options: dict[str, Any]) -> None:
    reference, model = make_model(), make_model()
    sharded = shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    assert isinstance(model[0].weight, DTensor)
    train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.3), own_share())
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.3))
    expect_equal(sharded, reference, 0.01 if options.get("mp_policy") else 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ],
    ids=["plain", "kept after forward", "bfloat16"],
)
def test_fully_shard(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.run(fsdp, options)


def hybrid() -> None:
    """Shards within one dimension of the mesh, replicas along the other."""
    reference, model = make_model(), make_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = shard(model, mesh=mesh)
    train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.3), own_share())
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.3))
    expect_equal(sharded, reference)


@pytest.mark.parametrize("size", [4])
def test_fully_shard_on_a_mesh_of_two_dimensions(ranks: Ranks) -> None:
    ranks.run(hybrid)


# --- DTensor
# --------------------------------------------------------------------------------------------------


def redistributed() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    full = torch.arange(70.0).view(7, 10)
    for start in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(full, mesh, [start])
        for goal in (Shard(1), Replicate(), Shard(0), Shard(1)):
            tensor = tensor.redistribute(mesh, [goal])
            assert tensor.placements == (goal,)
            assert torch.equal(tensor.full_tensor(), full)
    one, other = (
        distribute_tensor(full, mesh, [Shard(0)]),
        distribute_tensor(full.T.contiguous(), mesh, [Shard(0)]),
    )
    assert torch.equal((one @ other).full_tensor(), full @ full.T)
    assert one.sum().full_tensor().item() == full.sum().item()
    assert one.max().full_tensor().item() == 69


def tensor_parallel() -> None:
    """A linear layer whose rows are spread over the ranks, and its gradients."""
    torch.manual_seed(0)
    reference = nn.Linear(12, 24)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer: Any = distribute_module(
        copy.deepcopy(reference),
        mesh,
        lambda _, module, mesh: [
            module.register_parameter(
                name, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
            )
            for name, value in list(module.named_parameters(recurse=False))
        ],
    )
    inputs = torch.randn(6, 12)
    out = layer(distribute_tensor(inputs, mesh, [Replicate()]))
    out.square().sum().backward()
    expected = reference(inputs)
    expected.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), expected)
    torch.testing.assert_close(layer.weight.grad.full_tensor(), reference.weight.grad)


@pytest.mark.parametrize("body", [redistributed, tensor_parallel])
def test_dtensor(ranks: Ranks, body: Callable[[], None]) -> None:
    ranks.run(body)


# --- checkpoints
# ----------------------------------------------------------------------------------------------


def save_and_load(folder: Path) -> None:
    """Saved from FSDP's shards, loaded into a new model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved = shard(make_model(), mesh=mesh)
    train(saved, torch.optim.SGD(saved.parameters(), lr=0.3), own_share())
    dcp.save({"model": saved.state_dict(), "step": 4}, checkpoint_id=folder)
    fresh = make_model()
    nn.init.zeros_(fresh[0].weight)
    loaded = shard(fresh, mesh=mesh)
    state = {"model": loaded.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    assert state["step"] == 4
    for one, other in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())


def test_distributed_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_and_load, tmp_path)


# --- the optimizer's state
# ------------------------------------------------------------------------------------


def zero_redundancy() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    reference, model = make_model(), make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01)
    train(wrapped, optimizer, own_share())
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01))
    expect_equal(model, reference)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_zero_redundancy_optimizer(ranks: Ranks) -> None:
    ranks.run(zero_redundancy)


# --- inputs of different lengths
# ------------------------------------------------------------------------------


def uneven_inputs() -> None:
    """Rank r has 2 + r batches; those who are done shadow the collectives of the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    with Join([wrapped]):
        for _ in range(2 + rank):
            optimizer.zero_grad()
            wrapped(torch.full((1, 3), rank + 1.0)).sum().backward()
            optimizer.step()
    steps = [
        sum(peer + 1 for peer in range(size) if step < 2 + peer) / size for step in range(1 + size)
    ]
    final = model.weight.detach()[0, 0].item()
    assert abs(final + sum(steps)) < 1e-5 * len(steps), (final, steps)


def test_join_with_uneven_inputs(ranks: Ranks) -> None:
    ranks.run(uneven_inputs)
