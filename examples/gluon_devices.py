"""Gluon's way to train on a list of devices, with lockstep.compat.gluon in place of MXNet.

python examples/gluon_devices.py [NUMBER OF DEVICES]
"""

import sys
import time

import torch

import lockstep
from lockstep.compat import gluon
from lockstep.compat.gluon import autograd, cpu, gpu, init, nd, nn
from lockstep.compat.gluon import loss as gloss
from lockstep.compat.gluon import utils as gutils


class Residual(nn.HybridBlock):
    """Two convolutions and a way around them."""

    def __init__(self, channels, use_1x1conv=False, strides=1):
        super().__init__()
        self.conv1 = nn.Conv2D(channels, kernel_size=3, padding=1, strides=strides)
        self.conv2 = nn.Conv2D(channels, kernel_size=3, padding=1)
        self.conv3 = nn.Conv2D(channels, kernel_size=1, strides=strides) if use_1x1conv else None
        self.bn1 = nn.BatchNorm()
        self.bn2 = nn.BatchNorm()

    def hybrid_forward(self, F, x):  # noqa: D102, N803 - Gluon's name for it
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (self.conv3(x) if self.conv3 is not None else x))


def make_net():
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(16, kernel_size=3, strides=2, padding=1), nn.BatchNorm(), nn.Activation("relu")
    )
    net.add(Residual(16), Residual(32, use_1x1conv=True, strides=2))
    net.add(nn.MaxPool2D(3), nn.Dense(10))
    return net


def accuracy(net, data, ctx):
    images, labels = data.collated_batch(range(len(data)))
    (images,) = gutils.split_and_load(images, [ctx])
    return (net(images).argmax(1).cpu() == labels).float().mean().item()


def train(net, devices, batch_size=64, lr=0.05, epochs=5):
    training, test = lockstep.data.digits()
    ctx = [gpu(i) if torch.accelerator.is_available() else cpu(i) for i in range(devices)]
    print("running on:", ctx)
    net.initialize(init=init.MSRAPrelu(), ctx=ctx, force_reinit=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr, "momentum": 0.9})
    loss = gloss.SoftmaxCrossEntropyLoss()
    for epoch in range(epochs):
        start = time.perf_counter()
        for indices in torch.randperm(len(training)).split(batch_size):
            images, labels = training.collated_batch(indices)
            parts = gutils.split_and_load(images, ctx, even_split=False)
            targets = gutils.split_and_load(labels, ctx, even_split=False)
            with autograd.record():
                losses = [loss(net(x), y) for x, y in zip(parts, targets, strict=True)]
            for one in losses:
                one.backward()
            trainer.step(len(images))
        nd.waitall()
        seconds = time.perf_counter() - start
        print(
            f"epoch {epoch + 1}, time {seconds:.1f} sec, test acc {accuracy(net, test, ctx[0]):.2f}"
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    train(make_net(), int(sys.argv[1]) if len(sys.argv) > 1 else 2)
