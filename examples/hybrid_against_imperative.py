"""The same model run operation by operation, and as a compiled program; then saved as a program of
its own.

python examples/hybrid_against_imperative.py [BACKEND]

BACKEND is that of torch.compile, "inductor" when none is given.

A program is not always the quicker one: a small model may lose more by the checks before each call
than it gains.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

import lockstep
from lockstep.compilation import compile_or_fallback


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(512, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 2),
    )


def seconds(model, inputs, calls=1000):
    with torch.no_grad():
        model(inputs)  # compiling is not counted
        start = time.perf_counter()
        for _ in range(calls):
            model(inputs)
        return time.perf_counter() - start


def main(backend="inductor"):
    inputs = torch.randn(2, 512)
    imperative = make_model()
    hybrid = compile_or_fallback(make_model(), backend=backend)
    difference = (imperative(inputs) - hybrid(inputs)).abs().max().item()
    print(f"imperative: {seconds(imperative, inputs):.4f} s for 1000 calls")
    print(
        f"hybrid:     {seconds(hybrid, inputs):.4f} s, outputs differ by at most {difference:.1e}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for file in lockstep.export(imperative, inputs, Path(folder) / "mlp.pt2"):
            print(f"saved {file.name}, {file.stat().st_size} bytes")
        program = torch.export.load(Path(folder) / "mlp.pt2").module()
    more = torch.randn(5, 512)
    print(
        "the program on 5 samples: the same as the model: "
        f"{torch.allclose(program(more), imperative(more))}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
