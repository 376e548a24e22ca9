"""The ways to train, on an accelerator played by the toy device: the numbers are the CPU's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.communicator.adasum import adasum_hook
from lockstep.data.loader import Loader
from lockstep.training.evaluate import accuracy, evaluate
from support import toy_device
from support.pool import Pool


def data(samples: int = 96) -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 8, generator=draws)
    return TensorDataset(x, (x.sum(1) > 0).long())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
    )


def start(device: str) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    toy_device.register()
    comm = lockstep.init(device)
    trained = model()
    return comm, trained, torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9)


def weights(trained: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in trained.state_dict().items()}


def train_step(device: str) -> Any:
    _, trained, optimizer = start(device)
    step = lockstep.TrainStep(trained, optimizer, nn.CrossEntropyLoss(), max_grad_norm=1.0)
    losses = [float(step(batch)) for epoch in range(2) for batch in Loader(data(), 24).epoch(epoch)]
    return losses, weights(trained)


def own_loop(device: str, **options: Any) -> Any:
    _, trained, optimizer = start(device)
    loader = DataLoader(data(), 24, shuffle=True)
    trained, optimizer, loader = lockstep.prepare(trained, optimizer, loader, **options)
    losses = []
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(trained(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses, weights(trained)


def own_loop_with_virtual_workers(device: str) -> Any:
    return own_loop(device, virtual_workers=6)


def evaluation(device: str) -> Any:
    _, trained, _ = start(device)
    comm = lockstep.init()
    trained.to(comm.device)
    loader = Loader(data(90), 24, shuffle=False)
    found = evaluate(
        trained,
        loader,
        nn.CrossEntropyLoss(),
        {"accuracy": accuracy, "whole": lockstep.whole_set(error)},
    )
    return list(found.values()), {}


def error(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float((outputs.argmax(1) != targets).float().mean())


def prediction(device: str) -> Any:
    _, trained, optimizer = start(device)
    trainer = lockstep.Trainer(trained, optimizer, nn.CrossEntropyLoss(), 24, callbacks=[])
    return [], {"predicted": torch.as_tensor(trainer.predict(data(90)).cpu())}


def replicas(device: str) -> Any:
    _, trained, optimizer = start(device)
    trained[3] = nn.Identity()  # each replica draws its own numbers
    trainer = lockstep.Trainer(
        trained,
        optimizer,
        nn.CrossEntropyLoss(),
        24,
        callbacks=[],
        strategy="replicas",
        devices=[device, device],
    )
    trainer.fit(data(), 2)
    return [row["train_loss"] for row in trainer.history], weights(trained)


def horovod(device: str) -> Any:
    toy_device.register()
    import lockstep.compat.horovod.torch as hvd

    lockstep.init(device)
    hvd.init()
    trained = model().to(lockstep.init().device)
    trained[3] = nn.Identity()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=trained.named_parameters())
    hvd.broadcast_parameters(trained.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    inputs, labels = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in data().tensors)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(trained(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
    hvd.shutdown()
    return losses, {name: p.detach().cpu() for name, p in trained.named_parameters()}


def gluon(device: str) -> Any:
    toy_device.register()
    from lockstep.compat import gluon
    from lockstep.compat.gluon import autograd, cpu, gpu, init
    from lockstep.compat.gluon import loss as gloss
    from lockstep.compat.gluon import nn as gnn
    from lockstep.compat.gluon import utils as gutils

    contexts = [cpu(0), cpu(1)] if device == "cpu" else [gpu(0), gpu(0)]
    torch.manual_seed(0)
    net = gnn.HybridSequential()
    net.add(gnn.Dense(16, activation="relu"), gnn.Dense(2))
    net.initialize(init=init.Xavier(), ctx=contexts)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss = gloss.SoftmaxCrossEntropyLoss()
    losses = []
    for _ in range(4):
        parts, targets = (gutils.split_and_load(each, contexts) for each in data().tensors)
        with autograd.record():
            each = [loss(net(part), target) for part, target in zip(parts, targets, strict=True)]
        autograd.backward(each)
        trainer.step(96)
        losses.append(sum(float(one.sum()) for one in each))
    return losses, {}


EXACT = [train_step, own_loop_with_virtual_workers, evaluation, prediction]
ROUNDED = [own_loop, horovod]


def check_equal(found: Any, expected: Any, exact: bool = True) -> None:
    for (losses, tensors), (on_cpu, tensors_on_cpu) in zip(found, expected, strict=True):
        assert losses == pytest.approx(on_cpu, rel=1e-6) and all(map(math.isfinite, losses))
        assert tensors.keys() == tensors_on_cpu.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                tensor, tensors_on_cpu[name], **({"rtol": 0.0, "atol": 0.0} if exact else {})
            )


def on_both(pool: Pool, path: Callable[..., Any], workers: int, *arguments: Any) -> tuple[Any, Any]:
    options: dict[str, Any] = {"workers": workers, "init": False, "env": toy_device.ONE_EACH}
    return pool.run(path, "toy", *arguments, **options), pool.run(
        path, "cpu", *arguments, **options
    )


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("path", [*EXACT, *ROUNDED])
def test_a_way_to_train(toy_pool: Pool, path: Callable[[str], Any], workers: int) -> None:
    found, expected = on_both(toy_pool, path, workers)
    # in shared memory, three workers are summed in another order than over Gloo
    check_equal(found, expected, exact=path in EXACT and (workers < 3 or path is not train_step))


@pytest.mark.parametrize("path", [replicas, gluon])
def test_several_devices_in_a_process(toy_pool: Pool, path: Callable[[str], Any]) -> None:
    check_equal(*on_both(toy_pool, path, 1), exact=False)


# --- checkpoints
# --------------------------------------------------------------------------------------------------


def epochs(device: str, folder: Path, until: int, background: bool = False) -> Any:
    _, trained, optimizer = start(device)
    trainer = lockstep.Trainer(
        trained,
        optimizer,
        nn.CrossEntropyLoss(),
        24,
        callbacks=[lockstep.callbacks.Checkpoints(every="1epoch")],
        run_dir=folder,
        async_save=background,
    )
    trainer.fit(data(), until, resume="latest")
    return [row["train_loss"] for row in trainer.history], weights(trained)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("first", "then"), [("toy", "toy"), ("toy", "cpu"), ("cpu", "toy")])
def test_a_run_goes_on_from_a_checkpoint_on_another_device(
    toy_pool: Pool, tmp_path: Path, first: str, then: str, workers: int
) -> None:
    options: dict[str, Any] = {"workers": workers, "init": False, "env": toy_device.ONE_EACH}
    toy_pool.run(epochs, first, tmp_path / "run", 1, True, **options)
    resumed = toy_pool.run(epochs, then, tmp_path / "run", 3, **options)
    whole = toy_pool.run(epochs, "cpu", tmp_path / "whole", 3, **options)
    check_equal(resumed, whole)


def adasum(device: str) -> Any:
    toy_device.register()
    comm = lockstep.init(device)
    trained = nn.Linear(8, 2).to(comm.device)
    wrapped = nn.parallel.DistributedDataParallel(trained)
    wrapped.register_comm_hook(None, adasum_hook)
    inputs, _ = data(12).tensors
    wrapped(inputs[comm.rank :: comm.size].to(comm.device)).sum().backward()
    return [], {name: p.grad.cpu() for name, p in trained.named_parameters()}


def test_the_hook_of_ddp_that_combines_gradients(toy_pool: Pool) -> None:
    check_equal(*on_both(toy_pool, adasum, 2))


def images_on_the_device() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches made on the device where what is made is for inference alone, and from parts of other
    indices.
    """
    toy_device.register()
    comm = lockstep.init("toy")
    images = lockstep.data.synthetic(train=100, test=8)[0]
    there = images.to(comm.device)
    found = []
    with torch.inference_mode():
        for batch in Loader(there, 32, comm=comm).epoch(0):
            found.append((batch.data[1].cpu(), images.labels[batch.indices]))
    whole = torch.arange(100)
    of_bytes = whole.view(torch.uint8)[80:160].view(
        torch.int64
    )  # parts of a tensor of another dtype
    for index in (whole[7:12], whole[7:12], whole.flip(0)[3:9], whole.view(20, 5)[:, 1], of_bytes):
        found.append((there.collated_batch(index)[1].cpu(), images.labels[index]))
    whole.add_(1).clamp_(max=99)
    found.append((there.collated_batch(whole[7:12])[1].cpu(), images.labels[8:13]))
    return found


def test_images_on_the_device_are_those_of_the_indices(toy_pool: Pool) -> None:
    (found,) = toy_pool.run(images_on_the_device, workers=1, init=False)
    for labels, expected in found:
        assert torch.equal(labels, expected)


def count_on_the_host() -> tuple[list[float], bool]:
    toy_device.register()
    lockstep.init("toy")
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)

    def summed(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.cross_entropy(output, target, reduction="sum"), torch.tensor(
            len(output)
        )

    step = lockstep.TrainStep(trained, optimizer, summed)
    results = [step.run(batch) for batch in Loader(data(), 24).epoch(0)]
    return [float(result.loss) for result in results], any(
        torch.is_tensor(each.on_hand[1]) for each in results
    )


def test_a_count_on_the_host_stays_there(toy_pool: Pool) -> None:
    ((losses, on_device),) = toy_pool.run(count_on_the_host, workers=1, init=False)
    assert not on_device
    assert all(map(math.isfinite, losses))
