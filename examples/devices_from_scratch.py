"""Data parallelism by hand: parameters, parts of a batch and gradients on a list of devices, in one
process.

python examples/devices_from_scratch.py [DEVICE ...]      e.g. cpu cpu, or cuda:0 cuda:1
"""

import sys
import time
from functools import partial

import torch
import torch.nn.functional as F

import lockstep
from lockstep.replicas import Threads, allreduce_, parallel_apply, replicate, scatter


def make_parameters():
    """LeNet's. Weights are Kaiming's: with a standard deviation of 0.01 the first epochs would
    learn nothing.
    """
    shapes = [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]
    weights = [torch.nn.init.kaiming_normal_(torch.empty(shape)) for shape in shapes]
    return [
        tensor.requires_grad_()
        for weight in weights
        for tensor in (weight, torch.zeros(len(weight)))
    ]


def lenet(images, parameters):
    w1, b1, w2, b2, w3, b3, w4, b4 = parameters
    hidden = F.avg_pool2d(F.relu(F.conv2d(images, w1, b1)), 2)
    hidden = F.avg_pool2d(F.relu(F.conv2d(hidden, w2, b2)), 2).flatten(1)
    return F.linear(F.relu(F.linear(hidden, w3, b3)), w4, b4)


def forward_and_backward(parameters, images, labels):
    """The sum of one device's losses; the gradients are in its parameters."""
    loss = F.cross_entropy(lenet(images, parameters), labels, reduction="sum")
    loss.backward()
    return loss.detach()


def train_batch(images, labels, replicas, devices, lr, threads):
    parts = scatter((images, labels), devices)
    passes = [partial(forward_and_backward, parameters) for parameters in replicas]
    losses = parallel_apply(passes, parts, threads=threads)
    for copies in zip(*replicas, strict=True):  # the copies of one parameter
        allreduce_([copy.grad for copy in copies])
    with torch.no_grad():
        for parameters in replicas:
            for parameter in parameters:
                parameter -= lr * parameter.grad / len(images)  # the mean over the whole batch
                parameter.grad = None
    return sum(float(loss) for loss in losses) / len(images)


def accuracy(data, parameters, device):
    images, labels = data.collated_batch(range(len(data)))
    with torch.no_grad():
        return (
            (lenet(images.to(device), parameters).argmax(1).cpu() == labels).float().mean().item()
        )


def train(devices, epochs=5, batch_size=64, lr=0.1):
    training, test = lockstep.data.digits()
    torch.manual_seed(0)
    replicas = replicate(make_parameters(), devices)
    threads = Threads(len(devices))
    print(f"running on {', '.join(devices)}")
    for epoch in range(epochs):
        start = time.perf_counter()
        for indices in torch.randperm(len(training)).split(batch_size):
            train_batch(*training.collated_batch(indices), replicas, devices, lr, threads)
        seconds = time.perf_counter() - start
        reached = accuracy(test, replicas[0], devices[0])
        print(f"epoch {epoch + 1}  time {seconds:.2f} s  test accuracy {reached:.2%}")


if __name__ == "__main__":
    train(sys.argv[1:] or ["cpu", "cpu"])
