"""Reads the IDX files in which MNIST and its relatives are published."""

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

__all__ = ["read_idx", "read_pair"]

_TYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}
_CONTENTS = {1: "labels", 3: "images"}
_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = 1 << 20
_AGAIN = "Remove it and fetch it again."
# A few kilobytes of gzip can claim, and hold, gigabytes of zeros. The largest published set of this kind (EMNIST by
# class) has 0.6 GB.
_LARGEST_UNPACKED = 1 << 30


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The array in an IDX file, plain or gzip-compressed where its name ends in ``.gz``.

    Source: the format is described with "The MNIST database of handwritten digits", LeCun, Cortes, Burges:
    two zero bytes, a type code, the number of dimensions, their sizes as big-endian 32-bit integers, the items.

    Args:
        path: the file.
        dimensions: how many the array must have: 1 for labels (magic 0x00000801), 3 for images (0x00000803).

    Returns:
        uint8 with the shape that the file states.

    Raises:
        DataError: naming the file, what was expected and what came, when it is missing, cannot be read, is not what
            its name says, holds another kind of array, or is shorter or longer than its header states.
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
        raise DataError(f"{path}: expected a whole gzip file, got one that is cut off. {_AGAIN}") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: expected an undamaged gzip file, got {error}. {_AGAIN}") from None
    except OSError as error:
        raise DataError(f"{path}: expected a file that can be read, got {error.strerror or error}") from None


def read_pair(images: Path, labels: Path, classes: int) -> tuple[Tensor, Tensor]:
    """Images and their labels from two IDX files.

    Returns:
        The images as uint8 of shape (n, 1, height, width); the labels as int64 of shape (n,).

    Raises:
        DataError: as :func:`read_idx`, when the two files differ in number, and for labels from `classes` on.
    """
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise DataError(
            f"{labels}: expected {len(pixels)} labels, one for each image in {images.name}, got {len(numbers)}"
        )
    if int(numbers.max()) >= classes:
        raise DataError(f"{labels}: expected labels from 0 to {classes - 1}, got {int(numbers.max())}")
    return pixels.unsqueeze(1), numbers.to(torch.int64)


def _read_plain(path: Path, file: BinaryIO, dimensions: int) -> Tensor:
    shape = _read_shape(path, file, dimensions)
    expected, got = math.prod(shape), path.stat().st_size - file.tell()
    if got != expected:
        raise _wrong_length(path, shape, expected, f"{got}")
    return _to_tensor(path, _read_up_to(file, expected), shape)


def _read_unpacked(path: Path, file: gzip.GzipFile, dimensions: int) -> Tensor:
    shape = _read_shape(path, file, dimensions)
    expected = math.prod(shape)
    if expected > _LARGEST_UNPACKED:
        raise DataError(
            f"{path}: expected at most {_LARGEST_UNPACKED} bytes in a compressed file, got a header that states "
            f"{expected}. If that is true, unpack the file first"
        )
    # One byte more than stated: it tells a longer file, and makes gzip compare its checksum at the end.
    return _to_tensor(path, _read_up_to(file, expected + 1), shape)


def _check_gzip(path: Path, raw: BinaryIO) -> None:
    magic = raw.read(2)
    raw.seek(0)
    if magic != _GZIP_MAGIC:
        raise DataError(
            f"{path}: expected a gzip file (first bytes {_GZIP_MAGIC.hex()}), got first bytes {magic.hex() or 'none'}"
        )


def _read_shape(path: Path, file: BinaryIO | gzip.GzipFile, dimensions: int) -> tuple[int, ...]:
    expected = struct.pack(">HBB", 0, 0x08, dimensions)
    magic = file.read(4)
    if magic != expected:
        raise DataError(
            f"{path}: expected magic number 0x{expected.hex()} ({_describe(expected)}), "
            f"got {f'0x{magic.hex()}' if magic else 'an empty file'} ({_describe(magic)})"
        )
    sizes = file.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise DataError(
            f"{path}: expected a header of {4 + 4 * dimensions} bytes, got {4 + len(sizes)}: it is cut off. {_AGAIN}"
        )
    shape = struct.unpack(f">{dimensions}I", sizes)
    if 0 in shape:
        raise DataError(f"{path}: expected at least one item in every dimension, got shape {shape}")
    return shape


def _describe(magic: bytes) -> str:
    if magic.startswith(_GZIP_MAGIC):
        return "a gzip file, whose name must end in .gz"
    if len(magic) < 4:
        return "the header is cut off"
    if magic[:2] != b"\0\0" or magic[2] not in _TYPES:
        return "no IDX file"
    kind = _TYPES[magic[2]]
    return f"{_CONTENTS.get(magic[3], 'array')}: {kind} with {magic[3]} dimension{'s' * (magic[3] != 1)}"


def _read_up_to(file: BinaryIO | gzip.GzipFile, size: int) -> bytearray:
    # In blocks, since read(size) would set aside `size` bytes before a single one has been seen.
    found = bytearray()
    while len(found) < size and (block := file.read(min(_BLOCK, size - len(found)))):
        found += block
    return found


def _to_tensor(path: Path, items: bytearray, shape: tuple[int, ...]) -> Tensor:
    expected = math.prod(shape)
    if len(items) != expected:
        raise _wrong_length(path, shape, expected, f"{len(items)}" if len(items) < expected else "more")
    return torch.frombuffer(items, dtype=torch.uint8).view(shape)


def _wrong_length(path: Path, shape: tuple[int, ...], expected: int, got: str) -> DataError:
    return DataError(f"{path}: expected {expected} bytes after the header, for shape {shape}, got {got}. {_AGAIN}")
