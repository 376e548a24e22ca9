"""What a larger batch does to learning, and what the linear scaling rule and a warm-up do about it.

python examples/large_batches.py [EPOCHS]

More workers make larger batches worth while: each has enough to do. But an epoch then has fewer
steps, and with the same learning rate it learns less. The rule is to raise the learning rate as the
batch: k times the samples in a step, k times the rate (Goyal et al., 2017). At first that is too
large, so it begins small and grows over the first epoch. That brings back a part of what was lost:
here 24 times the batch is much. `lockstep train` has --base-batch-size and --warmup-epochs for the
two.
"""

import math
import sys
import time

import torch

import lockstep


def make_model():
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(28 * 28, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )


def train(epochs, batch, lr, warmup_epochs=0):
    """Test accuracy after the last epoch, and the number of steps."""
    training, test = lockstep.data.digits()
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    loss_fn = torch.nn.CrossEntropyLoss()
    steps = math.ceil(len(training) / batch)  # of an epoch
    schedule = lockstep.make_schedule("constant", epochs * steps, warmup_epochs * steps)
    step = lockstep.TrainStep(model, optimizer, loss_fn, schedule=schedule)
    loader = lockstep.Loader(training, global_batch_size=batch)
    for epoch in range(epochs):
        for samples in loader.epoch(epoch):
            step(samples)
    return lockstep.evaluate(model, lockstep.Loader(test, global_batch_size=360), loss_fn)[
        "accuracy"
    ], epochs * steps


def main(epochs=4, small=16, large=384, lr=0.01):
    comm = lockstep.init()
    scaled = lr * large / small
    ways = {
        "small batch": (small, lr, 0),
        "large batch, same rate": (large, lr, 0),
        "large batch, scaled rate": (large, scaled, 0),
        "large batch, scaled rate, warm-up": (large, scaled, 1),
    }
    for name, (batch, rate, warmup) in ways.items():
        start = time.perf_counter()
        accuracy, steps = train(epochs, batch, rate, warmup)
        seconds = time.perf_counter() - start
        if comm.rank == 0:
            print(
                f"{name:34} batch {batch:3}  rate {rate:.2f}  {steps:3} steps in {seconds:.1f} s"
                f"  test accuracy {accuracy:.2%}"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
