"""Measures how many images per second are loaded: by a Loader, from tar files, and by a DataLoader
of torch.

The images are JPEG files of 256 × 256 noisy pixels, decoded by Pillow, cut at a random place to 224
× 224 and converted to tensors. Each side has two loader processes and batches of 32, and nothing
but loading happens in the main process. The sides are `torch.utils.data.DataLoader` over the
folder, `lockstep.Loader` over the folder, `lockstep.Loader` over a `lockstep.data.Stream` of tar
files with the same images, and, where it is installed, LitData's `StreamingDataLoader` over its own
format with the bytes of the same files. All are started at once and take turns: a round is an epoch
of each, every second round in the opposite order; the first round is not counted. A round gives one
ratio; the median over the rounds counts.

    python benchmarks/image_loading.py             # some two minutes on two idle cores
    python benchmarks/image_loading.py --quick     # a smoke run; its figures say nothing
    python benchmarks/image_loading.py --write     # also the table in docs/data.md
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import lockstep
from common import Spread, describe_machine, markdown_table, ratio
from frame import Benchmark

BENCHMARK = Benchmark("image_loading", __doc__, "data.md")
IMAGES = 1536
SIZE = 256
CROP = 224
BATCH = 32
PROCESSES = 2
ROUNDS = 10
SHARDS = 8
TITLES = {
    "torch": "`DataLoader` of torch",
    "lockstep": "`lockstep.Loader`",
    "stream": "`lockstep.Loader` over a `Stream` of tar files",
    "litdata": "LitData's `StreamingDataLoader`",
}


def decode(file: Any) -> torch.Tensor:
    """Return a random part of an image, float32 of shape (3, CROP, CROP)."""
    pixels = torch.from_numpy(np.array(Image.open(file).convert("RGB")))
    top, left = torch.randint(SIZE - CROP, (2,)).tolist()
    return pixels[top : top + CROP, left : left + CROP].permute(2, 0, 1).float() / 255


class Folder(Dataset[Any]):
    """The images of a folder."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return decode(self.paths[index]), index % 10


def of_tar(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return what `Folder` does of a sample of a tar file."""
    return decode(io.BytesIO(sample["jpg"])), int(sample["__key__"]) % 10


def write_images(folder: Path, count: int) -> None:
    """Write the images, and tar files of them."""
    draw = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        coarse.resize((SIZE, SIZE)).save(folder / f"{number:06}.jpg", quality=90)
    paths = sorted(folder.glob("*.jpg"))
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for path in paths[shard::SHARDS]:
                archive.add(path, path.name)


def whole_file(path: str) -> dict[str, Any]:
    """Return what LitData keeps of an image."""
    return {"jpg": Path(path).read_bytes(), "label": int(Path(path).stem) % 10}


def of_litdata(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return what `Folder` does of such a sample."""
    return decode(io.BytesIO(sample["jpg"])), sample["label"]


def litdata_loader(images: Path, folder: Path) -> Iterable[Any]:
    """Write the images in the format of LitData, and return its loader of them."""
    import litdata

    litdata.optimize(
        fn=whole_file,
        inputs=[str(path) for path in sorted(images.glob("*.jpg"))],
        output_dir=str(folder),
        chunk_bytes="4MB",
        num_workers=1,
        verbose=False,
    )
    data = litdata.StreamingDataset(str(folder), shuffle=True, transform=of_litdata)
    loader: Iterable[Any] = litdata.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=PROCESSES, persistent_workers=True
    )
    return loader


def read_epoch(batches: Iterable[Any]) -> float:
    """Return the images per second of an epoch."""
    began = time.perf_counter()
    images = 0
    for inputs, _ in batches:
        images += len(inputs)
    return images / (time.perf_counter() - began)


def measure(images: int, rounds: int) -> dict[str, list[float]]:
    """Return the images per second of each side in each round."""
    torch.set_num_threads(1)
    lockstep.init("cpu")
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as name,
        tempfile.TemporaryDirectory(prefix="benchmark-") as other,
    ):
        folder = Path(name)
        write_images(folder, images)
        data = Folder(folder)
        stream = lockstep.data.Stream(f"{folder}/*.tar", map=of_tar)
        theirs = DataLoader(
            data, BATCH, shuffle=True, num_workers=PROCESSES, persistent_workers=True
        )
        with (
            lockstep.Loader(data, BATCH, num_workers=PROCESSES) as ours,
            lockstep.Loader(stream, BATCH, num_workers=PROCESSES) as from_tar,
        ):
            sides: dict[str, Callable[[], Iterable[Any]]] = {
                "torch": lambda: theirs,
                "lockstep": lambda: ours,
                "stream": lambda: from_tar,
            }
            if importlib.util.find_spec("litdata") is not None:
                streaming = litdata_loader(folder, Path(other))
                sides["litdata"] = lambda: streaming
            speeds: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(rounds + 1):
                print(f"\rround {number} of {rounds}", end="", flush=True)
                for side in list(sides)[:: 1 if number % 2 else -1]:
                    speed = read_epoch(sides[side]())
                    if number:
                        speeds[side].append(speed)
    print()
    return speeds


def as_table(speeds: dict[str, list[float]]) -> str:
    """A row for each side."""
    rows = [
        [
            TITLES[side],
            f"{Spread.of(speeds[side]).median:,.0f}",
            Spread(**ratio(speeds, side, "torch")).text(2),
        ]
        for side in speeds
    ]
    return markdown_table([f"{PROCESSES} loader processes", "images/s", "over torch"], rows)


def parse() -> argparse.Namespace:
    return BENCHMARK.parse(BENCHMARK.parser(f"{ROUNDS}"))


def main() -> None:
    args = parse()
    machine = describe_machine()
    images, rounds = (64, 1) if args.quick else (IMAGES, args.rounds or ROUNDS)
    speeds = measure(images, rounds)
    found = {side: asdict(Spread.of(values)) for side, values in speeds.items()}
    BENCHMARK.publish(
        args,
        machine,
        as_table(speeds),
        f"{images:,} JPEG files",
        speeds=speeds,
        images_per_second=found,
    )


if __name__ == "__main__":
    main()
