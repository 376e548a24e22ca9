"""Two devices compute at once: the CPU and an accelerator, or two halves of the CPU where there is
none.

python examples/cpu_and_gpu.py [SIZE]        of the matrices on the CPU
"""

import sys
import time

import torch

from lockstep.replicas import Threads, parallel_apply


def multiply(x):
    """Ten products; returns when they are there."""
    results = [x @ x for _ in range(10)]
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
    return results[-1]


def main(size=1000):
    torch.manual_seed(0)
    has_accelerator = torch.accelerator.is_available()
    other = torch.accelerator.current_accelerator() if has_accelerator else torch.device("cpu")
    # an accelerator has more to do in the same time
    inputs = [
        torch.rand(size, size),
        torch.rand(*[3 * size if has_accelerator else size] * 2, device=other),
    ]
    devices = [x.device for x in inputs]
    threads = Threads(2)

    def run(x):
        return parallel_apply([multiply], [x], devices=[x.device])[0]

    def run_both():
        return parallel_apply([multiply] * 2, inputs, devices=devices, threads=threads)

    run_both()  # the first call of an operation takes longer
    expected = []
    apart = 0.0
    for x in inputs:
        start = time.perf_counter()
        expected.append(run(x))
        apart += time.perf_counter() - start
        print(f"on {x.device!s:7} {time.perf_counter() - start:.3f} s")
    start = time.perf_counter()
    found = run_both()
    together = time.perf_counter() - start
    same = all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
    print(f"at once    {together:.3f} s, one after the other {apart:.3f} s, the same: {same}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
