"""Results are copied away while the next ones are computed, although each copy needs its result to
be there.

python examples/copy_overlap.py [SIZE]        of the matrices

On an accelerator the copies have a stream of their own, and go to pinned memory. Without one a
thread copies, which shows the same order of things, and gains what a second core can.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch


def compute(x, results=10):
    for _ in range(results):
        yield x @ x


class Stream:
    """Copies in a stream beside that of the computation."""

    def __init__(self, device):
        self.device = device
        self.stream = torch.Stream(device)

    def copy(self, result):  # noqa: D102
        self.stream.wait_stream(
            torch.accelerator.current_stream(self.device)
        )  # until it has been computed
        result.record_stream(self.stream)  # its memory is not used again before it has been copied
        with self.stream:
            return result.to("cpu", non_blocking=True)

    def finish(self, copies):  # noqa: D102
        torch.accelerator.synchronize(self.device)
        return copies


class Thread:
    """Copies in a thread beside that of the computation."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(max_workers=1)

    def copy(self, result):  # noqa: D102
        return self.thread.submit(result.clone)

    def finish(self, copies):  # noqa: D102
        return [copy.result() for copy in copies]


def one_after_the_other(x, copier):
    results = list(compute(x))
    copier.finish([])
    return copier.finish([copier.copy(result) for result in results])


def overlapping(x, copier):
    return copier.finish([copier.copy(result) for result in compute(x)])


def seconds(work, *args):
    start = time.perf_counter()
    found = work(*args)
    return time.perf_counter() - start, found


def main(size=1500):
    has_accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if has_accelerator else torch.device("cpu")
    copier = Stream(device) if has_accelerator else Thread()
    torch.manual_seed(0)
    x = torch.rand(size, size, device=device)
    overlapping(x, copier)  # pinned memory and threads are made once
    apart, expected = seconds(one_after_the_other, x, copier)
    together, found = seconds(overlapping, x, copier)
    print(f"on {device}, copies by a {type(copier).__name__.lower()}")
    print(f"computed, then copied:  {apart:.3f} s")
    print(
        f"copied while computing: {together:.3f} s, the same: "
        f"{torch.equal(expected[-1], found[-1])}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
