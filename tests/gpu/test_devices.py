"""A list of devices in one process: the GPU twice, and the GPU with the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from support.gpu import DEVICE, ON_GPU

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

FIRST = "cuda:0" if ON_GPU else "cpu"
LISTS = [[FIRST], [FIRST, FIRST], [FIRST, "cpu"]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize("devices", LISTS, ids=str)
def test_data_parallel_has_the_gradients_of_one_device(devices: list[str]) -> None:
    alone, inputs, labels = model(), torch.randn(18, 1, 28, 28), torch.randint(0, 10, (18,))
    nn.functional.cross_entropy(alone(inputs), labels).backward()
    spread = lockstep.DataParallel(model(), devices, loss=nn.CrossEntropyLoss())
    spread(inputs, target=labels).backward()
    for a, b in zip(spread.parameters(), alone.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("devices", LISTS, ids=str)
def test_the_strategy_replicas_has_the_losses_of_one_device(devices: list[str]) -> None:
    lockstep.init(DEVICE)
    histories = []
    for options in ({}, {"strategy": "replicas", "devices": devices}):
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), 0.05)
        trainer = lockstep.Trainer(
            trained, optimizer, nn.CrossEntropyLoss(), 64, callbacks=[], **options
        )
        data = lockstep.data.synthetic(train=256, test=8)[0]
        histories.append([row["train_loss"] for row in trainer.fit(data, 2)])
    assert histories[1] == pytest.approx(histories[0], rel=1e-3)


def test_gluon() -> None:
    from lockstep.compat import gluon
    from lockstep.compat.gluon import autograd, cpu, gpu, init
    from lockstep.compat.gluon import loss as gloss
    from lockstep.compat.gluon import nn as gnn
    from lockstep.compat.gluon import utils as gutils

    ctx = [gpu(0), gpu(0)] if ON_GPU else [cpu(0), cpu(1)]
    net = gnn.HybridSequential()
    net.add(gnn.Dense(16, activation="relu"), gnn.Dense(4))
    net.initialize(init=init.Xavier(), ctx=ctx)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss = gloss.SoftmaxCrossEntropyLoss()
    images, labels = torch.randn(12, 8), torch.randint(0, 4, (12,))
    seen = []
    for _ in range(10):
        parts, targets = (gutils.split_and_load(each, ctx) for each in (images, labels))
        with autograd.record():
            losses = [loss(net(part), target) for part, target in zip(parts, targets, strict=True)]
        autograd.backward(losses)
        trainer.step(12)
        seen.append(float(sum(each.sum() for each in losses)))
    assert seen[-1] < seen[0]
