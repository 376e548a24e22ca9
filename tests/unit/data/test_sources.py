"""The named data sets: where they are looked for, and what is said when they are not there."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep import data
from lockstep.data import cifar, sets
from lockstep.data.download import RemoteFile
from lockstep.data.image_set import ImageSet
from lockstep.errors import ConfigError, DataError

REAL = Path("/usr/share/datasets/fashion-mnist")
REAL_SET = sets._FASHION_MNIST
Asked = list[tuple[list[str], Path]]


def idx_files(train: int = 3, test: int = 2) -> dict[str, bytes]:
    files = {}
    for part, n in (("train", train), ("t10k", test)):
        files[f"{part}-images-idx3-ubyte"] = struct.pack(">4I", 0x803, n, 28, 28) + bytes(n * 784)
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">2I", 0x801, n) + bytes(range(n))
    return files


def put(folder: Path, files: dict[str, bytes], rename: Callable[[str], str] = str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / rename(name)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return folder


def cifar_files(rows: int = 2) -> dict[str, bytes]:
    batch = {"data": np.zeros((rows, 3072), dtype=np.uint8), "labels": [1] * rows}
    return dict.fromkeys(cifar.BATCHES, pickle.dumps(batch, 2))


def cifar_archive(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / cifar.ARCHIVE, "w:gz") as tar:
        for name, content in cifar_files().items():
            member = tarfile.TarInfo(f"{cifar.FOLDER}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return folder


def sizes(sets: tuple[ImageSet, ImageSet]) -> tuple[int, int]:
    return len(sets[0]), len(sets[1])


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home folder and a system folder of our own."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(sets, "_FASHION_MNIST", replace(REAL_SET, installed=(tmp_path / "system",)))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What was to be downloaded, and where to; it is made up on the spot."""
    requests: Asked = []

    def fetch(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
        requests.append(([file.name for file in files], folder))
        for file in files:
            assert all(address.endswith(f"/{file.name}") for address in file.addresses)
            if file.name == cifar.ARCHIVE:
                cifar_archive(folder)
            else:
                put(folder, {file.name: idx_files(5, 4)[file.name.removesuffix(".gz")]})
        return [folder / file.name for file in files]

    monkeypatch.setattr(sets, "fetch", fetch)
    return requests


@pytest.mark.parametrize(
    "rename",
    [
        str,
        "{}.gz".format,
        lambda n: n.replace("-idx", ".idx"),
        lambda n: n.replace("-idx", ".idx") + ".gz",
    ],
    ids=["plain", "gz", "dotted", "dotted gz"],
)
@pytest.mark.parametrize(
    ("load", "layout"),
    [
        (sets.mnist, ""),
        (sets.mnist, "MNIST/raw"),
        (sets.fashion_mnist, ""),
        (sets.fashion_mnist, "FashionMNIST/raw"),
    ],
)
def test_files_are_found_in_the_folder_given(
    tmp_path: Path,
    asked: Asked,
    load: Callable[[Path], tuple[ImageSet, ImageSet]],
    layout: str,
    rename: Callable[[str], str],
) -> None:
    put(tmp_path / "data" / layout, idx_files(), rename)
    assert sizes(load(tmp_path / "data")) == (3, 2)
    assert asked == []


def test_names_and_classes(tmp_path: Path) -> None:
    put(tmp_path / "data", idx_files())
    train, test = sets.fashion_mnist(str(tmp_path / "data"))
    assert train.name == test.name == "fashion-mnist"
    assert train.classes[9] == "Ankle boot" and len(train.classes) == 10
    assert sets.mnist(tmp_path / "data")[0].classes == tuple("0123456789")


def test_without_a_folder_the_system_comes_first_then_the_cache(
    tmp_path: Path, asked: Asked
) -> None:
    cache = put(tmp_path / "home" / ".cache" / "lockstep" / "fashion-mnist", idx_files(3, 2))
    assert sizes(sets.fashion_mnist()) == (3, 2)
    put(tmp_path / "system", idx_files(7, 6))
    assert sizes(sets.fashion_mnist()) == (7, 6)
    assert sizes(sets.fashion_mnist(cache)) == (3, 2)
    assert asked == []


def test_a_folder_that_is_given_is_the_only_one_looked_into(tmp_path: Path) -> None:
    put(tmp_path / "system", idx_files())
    with pytest.raises(DataError) as caught:
        sets.fashion_mnist(tmp_path / "data", download=False)
    names = ", ".join(f"{name}.gz" for name in idx_files())
    places = f"{tmp_path / 'data'} or {tmp_path / 'data' / 'FashionMNIST' / 'raw'}"
    assert str(caught.value).startswith(
        f"fashion-mnist: expected {names} in {places}, got no such file. Put them"
    )


def test_only_what_is_missing_is_downloaded(tmp_path: Path, asked: Asked) -> None:
    files = idx_files(5, 2)
    del files["t10k-images-idx3-ubyte"], files["t10k-labels-idx1-ubyte"]
    put(tmp_path / "data" / "MNIST" / "raw", files)
    assert sizes(sets.mnist(tmp_path / "data")) == (5, 4)
    assert asked == [
        (["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"], tmp_path / "data")
    ]


@pytest.mark.parametrize(
    ("load", "name"),
    [(sets.mnist, "mnist"), (sets.fashion_mnist, "fashion-mnist"), (sets.cifar10, "cifar10")],
)
def test_downloads_go_into_the_cache_and_are_found_there(
    tmp_path: Path, asked: Asked, load: Callable[[], tuple[ImageSet, ImageSet]], name: str
) -> None:
    first, second = load(), load()
    assert sizes(first) == sizes(second)
    assert [folder for _, folder in asked] == [tmp_path / "home" / ".cache" / "lockstep" / name]


@pytest.mark.parametrize("load", [sets.mnist, sets.fashion_mnist, sets.cifar10])
def test_a_file_where_a_folder_should_be(tmp_path: Path, load: Callable[[Path], object]) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"data_dir: expected a folder, got .*file") as caught:
        load(tmp_path / "file")
    assert caught.value.argument == "data_dir"


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(DataError, match="mnist: expected a home folder"):
        sets.mnist()


def test_a_folder_that_must_not_be_looked_into_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    system, is_file = tmp_path / "system", Path.is_file

    def refuse(path: Path) -> bool:
        if system in path.parents:
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert sizes(sets.fashion_mnist()) == (5, 4)
    assert len(asked) == 1


def test_mislabelled_files_are_named(tmp_path: Path) -> None:
    files = idx_files()
    files["t10k-images-idx3-ubyte"] = files["t10k-labels-idx1-ubyte"]
    put(tmp_path / "data", files)
    with pytest.raises(
        DataError, match=r"t10k-images-idx3-ubyte: expected magic .*images.* got .*labels"
    ):
        sets.mnist(tmp_path / "data")


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    files = idx_files()
    files["t10k-images-idx3-ubyte"] = struct.pack(">4I", 0x803, 2, 8, 9) + bytes(2 * 72)
    put(tmp_path / "data", files)
    with pytest.raises(
        DataError, match="t10k-images-idx3-ubyte: expected images of 28x28, got 8x9"
    ):
        sets.mnist(tmp_path / "data")


@pytest.mark.parametrize("layout", ["", cifar.FOLDER])
def test_cifar10_in_a_folder(tmp_path: Path, asked: Asked, layout: str) -> None:
    put(tmp_path / "data" / layout, cifar_files())
    train, test = sets.cifar10(tmp_path / "data")
    assert (len(train), len(test)) == (10, 2)
    assert train.shape == (3, 32, 32) and train.labels.tolist() == [1] * 10
    assert train.classes[1] == "automobile" and train.name == "cifar10"
    assert asked == []


def test_cifar10_in_an_archive_also_beside_half_a_folder(tmp_path: Path, asked: Asked) -> None:
    cifar_archive(tmp_path / "data")
    assert sizes(sets.cifar10(tmp_path / "data")) == (10, 2)
    half = cifar_files()
    del half["test_batch"]
    put(tmp_path / "data" / cifar.FOLDER, half)
    assert sizes(sets.cifar10(tmp_path / "data")) == (10, 2)
    assert asked == []


def test_cifar10_that_is_missing(tmp_path: Path, asked: Asked) -> None:
    with pytest.raises(
        DataError, match=r"cifar10: expected cifar-10-python\.tar\.gz in .*data, got no such file"
    ):
        sets.cifar10(tmp_path / "data", download=False)
    assert sizes(sets.cifar10(tmp_path / "data")) == (10, 2)
    assert asked == [([cifar.ARCHIVE], tmp_path / "data")]


def test_every_source_gives_two_image_sets() -> None:
    assert sizes(sets.synthetic(train=4, test=3)) == (4, 3)
    assert sizes(sets.digits()) == (1437, 360)


@pytest.mark.parametrize("name", sets.__all__)
def test_no_module_hides_a_source_of_its_name(name: str) -> None:
    # importing a submodule sets it as an attribute of its package, over whatever the package offers
    # there
    assert getattr(data, name) is getattr(sets, name)


@pytest.mark.skipif(
    not REAL.is_dir(), reason=f"no Fashion-MNIST in {REAL} (Debian: dataset-fashion-mnist)"
)
def test_the_real_fashion_mnist() -> None:
    train, test = sets.fashion_mnist(REAL, download=False)
    assert sizes((train, test)) == (60_000, 10_000)
    assert train.shape == (1, 28, 28)
    assert torch.bincount(train.labels).tolist() == [6_000] * 10
    assert torch.bincount(test.labels).tolist() == [1_000] * 10
    pixels = train.images.double() / 255
    assert (
        round(float(pixels.mean()), 4),
        round(float(pixels.std(correction=0)), 4),
    ) == REAL_SET.scale
