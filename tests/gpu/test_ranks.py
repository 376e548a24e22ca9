"""Ranks on GPUs: NCCL with a single rank; two ranks over NCCL where there are two GPUs, else over
Gloo on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from support.gpu import DEVICE, ON_GPU, only_on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


SHARED = ON_GPU and torch.cuda.device_count() < 2


def on_two(body: Callable[[], Any]) -> Any:
    """Run `body` on two ranks, which share the GPU where there is one only; returns the result of
    rank 0.
    """

    def work() -> Any:
        if SHARED:
            dist.init_process_group("gloo")
        lockstep.init(DEVICE)
        return body()

    return lockstep.launch(work, workers=2)


@only_on_gpu
def test_one_rank_uses_nccl() -> None:
    def work() -> tuple[str, float, float]:
        comm = lockstep.init(DEVICE)
        total, on_cpu = torch.ones(4, device=comm.device), torch.ones(4)
        dist.all_reduce(total)
        dist.all_reduce(on_cpu)
        return str(dist.get_backend_config()), float(total.sum()), float(on_cpu.sum())

    assert lockstep.launch(work, workers=1) == ("cpu:shm,cuda:nccl", 4.0, 4.0)


@only_on_gpu
def test_more_ranks_than_gpus_are_an_error() -> None:
    def work() -> None:
        lockstep.init(DEVICE)

    with pytest.raises(
        lockstep.LockstepError, match="at most as many workers on a node as it has GPUs"
    ):
        lockstep.launch(work, workers=1 + torch.cuda.device_count())


def collectives(device: torch.device) -> dict[str, torch.Tensor]:
    """What each collective gives, on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def values(count: int, seed: int = rank, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (
            torch.randn(count, generator=torch.Generator().manual_seed(seed))
            .mul(8)
            .to(dtype)
            .to(device)
        )

    found: dict[str, torch.Tensor] = {}
    for count in (1, 1000, 9_000_000):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            found[f"sum of {count} {dtype}"] = tensor = values(count, dtype=dtype)
            dist.all_reduce(tensor)
        found[f"largest of {count}"] = tensor = values(count)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        found[f"broadcast {count}"] = tensor = values(count)
        dist.broadcast(tensor, 1)
        found[f"reduced {count}"] = tensor = values(count)
        dist.reduce(tensor, 0)
        parts = [values(count) for _ in range(size)]
        dist.all_gather(parts, values(count))
        found[f"gathered {count}"] = torch.cat(parts)
        found[f"whole {count}"] = whole = torch.empty(size * count, device=device)
        dist.all_gather_into_tensor(whole, values(count))
        found[f"scattered sum {count}"] = part = torch.empty(count, device=device)
        dist.reduce_scatter_tensor(part, values(size * count))
        found[f"all to all {count}"] = exchanged = torch.empty(size * count, device=device)
        dist.all_to_all_single(exchanged, values(size * count))
    found["strided"] = strided = values(40).view(8, 5).t()
    dist.all_reduce(strided)
    if SHARED:  # Gloo ends the process for a message on the GPU
        return found
    received = torch.empty(1000, device=device)
    receiving = dist.irecv(received, (rank - 1) % size)
    dist.send(values(1000), (rank + 1) % size)
    receiving.wait()
    found["received"] = received
    batch = torch.empty(1000, device=device)
    operations = [dist.P2POp(dist.isend, values(1000), (rank + 1) % size)]
    operations.append(dist.P2POp(dist.irecv, batch, (rank - 1) % size))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    found["received in a batch"] = batch
    dist.barrier()
    return found


def test_collectives_give_the_bits_of_the_cpu() -> None:
    def body() -> list[str]:
        device = lockstep.init().device
        on_gpu, on_cpu = collectives(device), collectives(torch.device("cpu"))
        return [name for name, tensor in on_cpu.items() if not tensor.equal(on_gpu[name].cpu())]

    assert on_two(body) == []


@only_on_gpu
@pytest.mark.skipif(not SHARED, reason="NCCL has messages on the GPU")
def test_messages_of_gloo_are_on_the_cpu() -> None:
    def body() -> None:
        comm = lockstep.init()
        comm.isend(torch.ones(2, device=comm.device), 1 - comm.rank)

    with pytest.raises(
        lockstep.LockstepError,
        match="tensor: expected one on the CPU, as Gloo's messages are, got cuda:0",
    ):
        on_two(body)


def test_work_before_and_after_a_collective_is_in_order() -> None:
    """Streams are ordered without the host: nothing waits there."""

    def body() -> bool:
        rank, busy = dist.get_rank(), torch.randn(*[2048 if ON_GPU else 32] * 2, device=DEVICE)
        right = []
        for number in range(60):
            if (number + rank) % 3 == 0:
                for _ in range(20):
                    busy = busy @ busy / busy.norm()
            tensor = torch.full((1 << 20,), float(number + rank), device=DEVICE)
            dist.all_reduce(tensor)
            right.append(tensor.eq(2 * number + 1).all())
            tensor.fill_(-1)
        return bool(torch.stack(right).all())

    assert on_two(body)


def fit(**options: Any) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(4 * 26**2, 10),
    ]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    trainer = lockstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), 64, callbacks=[], **options)
    data = lockstep.data.synthetic(train=300, test=8)[0]
    history = trainer.fit(data, 2)
    return lockstep.fingerprint(model, optimizer), [row["train_loss"] for row in history]


def test_one_worker_and_two_have_the_same_bits() -> None:
    def body() -> tuple[str, list[float]]:
        return fit(virtual_workers=4)

    def alone() -> tuple[str, list[float]]:
        lockstep.init(DEVICE)
        return body()

    assert on_two(body) == lockstep.launch(alone, workers=1)


def own_loop(**options: Any) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Flatten(), nn.Linear(28 * 28, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = lockstep.data.synthetic(train=300, test=8)[0]
    data: Any = torch.utils.data.DataLoader(images, batch_size=64, shuffle=True)
    model, optimizer, data = lockstep.prepare(model, optimizer, data, **options)
    losses = []
    for _ in range(2):
        for inputs, labels in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            mean = optimizer.step(loss=loss)
            if optimizer.stepped:
                losses.append(float(mean))
    return lockstep.fingerprint(model, optimizer), losses


def test_a_loop_with_prepare_has_the_same_bits_on_one_worker_and_two() -> None:
    def body() -> tuple[str, list[float]]:
        return own_loop(virtual_workers=4)

    def alone() -> tuple[str, list[float]]:
        lockstep.init(DEVICE)
        return body()

    assert on_two(body) == lockstep.launch(alone, workers=1)


def test_two_workers_have_the_losses_of_one() -> None:
    def body() -> tuple[str, list[float]]:
        return fit()

    def alone() -> tuple[str, list[float]]:
        lockstep.init(DEVICE)
        return body()

    # dropout differs by the worker
    assert on_two(body)[1] == pytest.approx(lockstep.launch(alone, workers=1)[1], rel=0.2)


def test_plain_ddp() -> None:
    def body() -> bool:
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)).to(DEVICE)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 64, device=DEVICE)).square().mean().backward()
            optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        others = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(others, flat)
        return others[0].equal(others[1])

    assert on_two(body)


def test_sync_batchnorm() -> None:
    def body() -> tuple[torch.Tensor, torch.Tensor]:
        comm = lockstep.init()
        layer: Any = lockstep.prepare_model(nn.BatchNorm1d(3), comm, sync_batchnorm=True)
        whole = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        parts = whole.split(5) if comm.size > 1 else [whole]
        layer(parts[comm.rank]).sum().backward()
        return layer.running_mean.cpu(), layer.running_var.cpu()

    expected = nn.BatchNorm1d(3)
    expected(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))
    mean, variance = on_two(body)
    torch.testing.assert_close(mean, expected.running_mean)
    torch.testing.assert_close(variance, expected.running_var)


def test_horovod() -> None:
    def body() -> tuple[float, list[float]]:
        import lockstep.compat.horovod.torch as hvd

        hvd.init()
        total = hvd.allreduce(torch.full((3,), float(hvd.rank()), device=DEVICE), op=hvd.Sum)
        gathered = hvd.allgather(torch.full((1 + hvd.rank(),), float(hvd.rank()), device=DEVICE))
        model = nn.Linear(4, 2).to(DEVICE)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters()
        )
        model(torch.ones(2, 4, device=DEVICE)).sum().backward()
        optimizer.step()
        return float(total.sum()), gathered.tolist()

    assert on_two(body) == (3.0, [0.0, 1.0, 1.0])


def test_tensors_arrive_on_the_cpu() -> None:
    def work(sent: torch.Tensor) -> tuple[str, torch.Tensor, nn.Module]:
        return str(sent.device), torch.ones(3, device=DEVICE), nn.Linear(2, 2, device=DEVICE)

    device, tensor, layer = lockstep.launch(work, torch.ones(2, device=DEVICE), workers=1)
    assert device == "cpu"
    assert tensor.equal(torch.ones(3))
    assert {str(parameter.device) for parameter in layer.parameters()} == {"cpu"}


def test_a_stop_is_heard() -> None:
    def work() -> list[bool]:
        from lockstep.training.stop_signals import StopSignals
        from lockstep.training.stopping import StopRequests

        stop_requests = StopRequests(lockstep.init(DEVICE), StopSignals())
        return [stop_requests.poll() for _ in range(10)]

    assert lockstep.launch(work, workers=1) == [False] * 10
