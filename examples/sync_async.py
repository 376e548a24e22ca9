"""A program that waits for every step, and one that goes on: their time, and the memory of what has
piled up.

python examples/sync_async.py [STEPS]

One thread trains, as a device does; the program makes batches and hands them over. If it waits for
the loss of each step, the device has nothing to do meanwhile. If it never waits, batches pile up.
With a bound of a few steps it has the speed of the one and the memory of the other;
`lockstep.Trainer(max_steps_in_flight=...)` does that by itself. The memory that counts is the peak:
once all steps are done, what had piled up is gone, and looking then would miss it.
"""

import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch


def make_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def train(steps, in_flight):
    """The mean loss, and the largest number of bytes in batches that were waiting or being
    computed.
    """
    step = make_step()
    losses = []
    waiting = deque()
    peak = 0
    draws = torch.Generator().manual_seed(1)
    with ThreadPoolExecutor(max_workers=1) as device:
        for _ in range(steps):
            inputs = torch.randn(512, 512, generator=draws)
            targets = torch.ones(512, 1)
            size = inputs.nbytes + targets.nbytes
            waiting.append((device.submit(step, inputs, targets), size))
            peak = max(peak, sum(size for step_, size in waiting if not step_.done()))
            while len(waiting) >= in_flight:  # the oldest is the first to end
                losses.append(waiting.popleft()[0].result())
        losses += [submitted.result() for submitted, _ in waiting]
    return sum(losses) / steps, peak


def main(steps=60):
    torch.set_num_threads(1)
    train(3, 1)  # the first steps of a program take longer
    for name, in_flight in {
        "each waited for": 1,
        "at most 3 under way": 3,
        "no bound": steps + 1,
    }.items():
        start = time.perf_counter()
        loss, peak = train(steps, in_flight)
        seconds = time.perf_counter() - start
        print(
            f"{name:20} {seconds:.2f} s  at most {peak / 2**20:6.1f} MB of batches held  mean "
            f"loss {loss:.6f}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
