"""What the benchmarks share: the data, the machine's description, spreads of ratios, tables and
where they go.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import lockstep
from lockstep.data import ImageSet
from lockstep.errors import DataError

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS = Path(__file__).resolve().parent / "results"

Side = TypeVar("Side", bound=Hashable)


def wide_mlp() -> nn.Module:
    """10.0 M parameters, most of them in two layers: much to exchange for what there is to
    compute.
    """
    layers = [
        nn.Linear(28 * 28, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
    ]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(2048, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lockstep.models.lenet,
    "resnet18": lockstep.models.resnet18,
    "mlp": wide_mlp,
}
TITLES = {"lenet": "LeNet", "resnet18": "ResNet-18", "mlp": "MLP of 10 M parameters"}

# Small enough that neither model diverges on a few hundred images seen many times over: a loss that
# overflows, or numbers that become denormal, would be timed instead of training.
LR = 0.01
MOMENTUM = 0.9


def make_model(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with the same first values in every process, and its optimizer."""
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to give nothing back to the system; whether there is such an
    allocator.

    By default it returns large tensors to the system when they are freed, or does not: that hangs
    on what happens to lie above them on the heap. Where it does, every step pays for the same pages
    anew: one side of `overhead.py` had 11,600 page faults a step and took 118 ms, another 1,700 and
    99 ms, and with this 94 ms were all alike. Luck of that size must not decide a comparison.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # M_MMAP_MAX and M_TRIM_THRESHOLD of <malloc.h>
    no_mapping = (-4, 0)
    no_trimming = (-1, 2**31 - 1)
    return bool(mallopt(*no_mapping) and mallopt(*no_trimming))


def load_images(count: int) -> ImageSet:
    """The first `count` images of Fashion-MNIST, or as many synthetic ones of the same shape where
    it is not there.
    """
    try:
        found, _ = lockstep.data.fashion_mnist(download=False)
    except DataError:
        found, _ = lockstep.data.synthetic(train=count)
    return ImageSet(
        found.images[:count], found.labels[:count], found.classes, found.name, found.mean, found.std
    )


@dataclass(frozen=True)
class Spread:
    """The median of some values, with the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def text(self, digits: int = 3) -> str:
        """E.g. "1.010 (1.008 to 1.013)"."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def ratio(
    values: Mapping[Side, Sequence[float]], above: Side, below: Side, scale: float = 1.0
) -> dict[str, float]:
    """The spread of two sides' ratios, one a round, times `scale`; as JSON keeps it."""
    return asdict(
        Spread.of([scale * a / b for a, b in zip(values[above], values[below], strict=True)])
    )


def describe_machine() -> dict[str, Any]:
    """What a figure depends on and whoever reads it wants to know; taken before anything is
    measured.
    """
    pages = os.sysconf("SC_PHYS_PAGES")
    size = os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": os.cpu_count(),
        "memory_gib": round(pages * size / 2**30),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )


def machine_line(machine: dict[str, Any], data: str) -> str:
    """The machine in one sentence, for below a table."""
    return (
        f"{machine['date']}; {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; Python {machine['python']}, torch {machine['torch']}; "
        f"{data}; load average {machine['load_average_before']} before and "
        f"{machine['load_average_after']} after."
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write_between(path: Path, name: str, text: str) -> None:
    """Replace what stands between the lines ``<!-- name:begin -->`` and ``<!-- name:end -->`` of a
    file.
    """
    begin = f"<!-- {name}:begin -->"
    end = f"<!-- {name}:end -->"
    old = path.read_text()
    if begin not in old or end not in old:
        raise SystemExit(f"{path}: expected the lines {begin} and {end}, found at most one of them")
    before = old.partition(begin)[0]
    after = old.partition(end)[2]
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Keep everything that was measured, so that a table can be checked and made again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
