"""Reads IDX files, the format of MNIST and similar data sets."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import DataError

_TYPES = {
    0x08: "uint8",
    0x09: "int8",
    0x0B: "int16",
    0x0C: "int32",
    0x0D: "float32",
    0x0E: "float64",
}
_CONTENTS = {1: "labels", 3: "images"}
_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = 1 << 20
_DOWNLOAD_AGAIN = "Remove it and download it again."
# A few kilobytes of gzip can hold gigabytes of zeros. The largest published data set of this format
# (EMNIST by class) has 0.6 GB.
_LARGEST_UNPACKED = 1 << 30


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read the array in an IDX file, gzip-compressed if its name ends in ``.gz``.

    Source: the format is described with "The MNIST database of handwritten digits", LeCun, Cortes,
    Burges: two zero bytes, a type code, the number of dimensions, their sizes as big-endian 32-bit
    integers, the items.

    Args:
        path: the file.
        dimensions: the required number of dimensions: 1 for labels (magic 0x00000801), 3 for images
            (0x00000803).

    Returns:
        uint8 with the shape in the file's header.

    Raises:
        DataError: the file is missing, cannot be read, is not in the format of its name, holds
            another kind of array, or is shorter or longer than its header states; names the file,
            what was expected and what was found.
    """
    try:
        with path.open("rb") as raw:
            if path.suffix != ".gz":
                return _read_plain(path, raw, dimensions)
            _check_gzip(path, raw)
            with gzip.GzipFile(fileobj=raw) as unpacked:
                return _read_unpacked(path, unpacked, dimensions)
    except FileNotFoundError:
        raise DataError(f"{path}: expected an IDX file, got no file of this name") from None
    except EOFError:
        raise DataError(
            f"{path}: expected a complete gzip file, got a truncated one. {_DOWNLOAD_AGAIN}"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: expected an undamaged gzip file, got {error}. {_DOWNLOAD_AGAIN}"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path}: expected a file that can be read, got {error.strerror or error}"
        ) from None


def read_pair(images: Path, labels: Path, classes: int) -> tuple[Tensor, Tensor]:
    """Read images and their labels from two IDX files.

    Returns:
        The images as uint8 of shape (n, 1, height, width); the labels as int64 of shape (n,).

    Raises:
        DataError: as :func:`read_idx`; or the numbers of images and labels differ, or a label is
            not below `classes`.
    """
    pixels = read_idx(images, 3)
    numbers = read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise DataError(
            f"{labels}: expected {len(pixels)} labels, one for each image in {images.name}, got "
            f"{len(numbers)}"
        )
    if int(numbers.max()) >= classes:
        raise DataError(
            f"{labels}: expected labels from 0 to {classes - 1}, got {int(numbers.max())}"
        )
    return pixels.unsqueeze(1), numbers.to(torch.int64)


def _read_plain(path: Path, file: BinaryIO, dimensions: int) -> Tensor:
    shape = _read_shape(path, file, dimensions)
    expected = math.prod(shape)
    got = path.stat().st_size - file.tell()
    if got != expected:
        raise _wrong_length(path, shape, expected, f"{got}")
    return _to_tensor(path, _read_up_to(file, expected), shape)


def _read_unpacked(path: Path, file: gzip.GzipFile, dimensions: int) -> Tensor:
    shape = _read_shape(path, file, dimensions)
    expected = math.prod(shape)
    if expected > _LARGEST_UNPACKED:
        raise DataError(
            f"{path}: expected at most {_LARGEST_UNPACKED} bytes in a compressed file, got a "
            f"header that states {expected}. If that is true, unpack the file first"
        )
    # One byte more than stated detects a longer file, and makes gzip verify its checksum at the
    # end.
    return _to_tensor(path, _read_up_to(file, expected + 1), shape)


def _check_gzip(path: Path, raw: BinaryIO) -> None:
    magic = raw.read(2)
    raw.seek(0)
    if magic != _GZIP_MAGIC:
        raise DataError(
            f"{path}: expected a gzip file (first bytes {_GZIP_MAGIC.hex()}), got first bytes "
            f"{magic.hex() or 'none'}"
        )


def _read_shape(path: Path, file: BinaryIO | gzip.GzipFile, dimensions: int) -> tuple[int, ...]:
    expected = struct.pack(">HBB", 0, 0x08, dimensions)
    magic = file.read(4)
    if magic != expected:
        begins_with = f"0x{magic.hex()}" if magic else "an empty file"
        raise DataError(
            f"{path}: expected magic number 0x{expected.hex()} ({_describe(expected)}), "
            f"got {begins_with} ({_describe(magic)})"
        )
    sizes = file.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise DataError(
            f"{path}: expected a header of {4 + 4 * dimensions} bytes, got {4 + len(sizes)}: it "
            f"is truncated. {_DOWNLOAD_AGAIN}"
        )
    shape = struct.unpack(f">{dimensions}I", sizes)
    if 0 in shape:
        raise DataError(f"{path}: expected at least one item in every dimension, got shape {shape}")
    return shape


def _describe(magic: bytes) -> str:
    if magic.startswith(_GZIP_MAGIC):
        return "a gzip file, whose name must end in .gz"
    if len(magic) < 4:
        return "the header is truncated"
    if magic[:2] != b"\0\0" or magic[2] not in _TYPES:
        return "not an IDX file"
    kind = _TYPES[magic[2]]
    return (
        f"{_CONTENTS.get(magic[3], 'array')}: {kind} with {magic[3]} "
        f"dimension{'s' * (magic[3] != 1)}"
    )


def _read_up_to(file: BinaryIO | gzip.GzipFile, size: int) -> bytearray:
    # In blocks: read(size) would allocate `size` bytes before it reads the first one.
    data = bytearray()
    while len(data) < size and (block := file.read(min(_BLOCK, size - len(data)))):
        data += block
    return data


def _to_tensor(path: Path, items: bytearray, shape: tuple[int, ...]) -> Tensor:
    expected = math.prod(shape)
    if len(items) != expected:
        raise _wrong_length(
            path, shape, expected, f"{len(items)}" if len(items) < expected else "more"
        )
    return torch.frombuffer(items, dtype=torch.uint8).view(shape)


def _wrong_length(path: Path, shape: tuple[int, ...], expected: int, got: str) -> DataError:
    return DataError(
        f"{path}: expected {expected} bytes after the header, for shape {shape}, got {got}. "
        f"{_DOWNLOAD_AGAIN}"
    )
