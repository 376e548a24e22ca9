"""Reads MDS folders, the format of MosaicML Streaming: an ``index.json`` and the shards that it
names.

The format is that of `MDSWriter` in https://github.com/mosaicml/streaming
(streaming/base/format/mds). A shard has the number of samples (uint32), the offsets of the samples
and of the end (uint32), a description as JSON, and the samples: the sizes (uint32) of the columns
of variable size, and then the columns.
"""

from __future__ import annotations

import bz2
import io
import json
import zlib
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import arguments
from ...errors import ConfigError
from ..shard_readers import Blocks

INDEX = "index.json"

_SAMPLES = 1000  # in a block of a shard that is not compressed


class _Shard(NamedTuple):
    """What the index says of a shard."""

    name: str
    size: int  # of the file
    raw_size: int  # of the shard when it is not compressed
    samples: int
    compression: str  # "" for none
    columns: tuple[tuple[str, str, int], ...]  # (name, encoding, size in bytes or 0)


class Mds:
    """Reads MDS folders, by the path of their ``index.json``: a sample is a dict of values by
    column.

    A block is a run of 1000 samples of a shard, or a compressed shard. Compression with gzip, bzip2
    and zstd is read. Columns of the encodings ``pkl`` (pickle, which can run any program) and
    ``list[...]`` are not.
    """

    def blocks(self, path: Path) -> Blocks:
        """Return the blocks of all shards, from the index."""
        sizes = []
        places = []
        for number, shard in enumerate(_read_index(path)):
            for name, encoding, _ in shard.columns:
                _decoder(name, encoding)
            step = shard.samples if shard.compression else _SAMPLES
            for first in range(0, shard.samples, step or 1):
                sizes.append(min(step, shard.samples - first))
                places.append((number, first, sizes[-1]))
        return sizes, places

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the samples of the block."""
        number, first, count = place
        shard = _read_index(path)[number]
        try:
            data, offsets = _read_samples(path.parent / shard.name, shard, first, count)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise ValueError(f"shard {shard.name}: {error}") from None
        return _Samples(shard, data, offsets)


def _read_index(path: Path) -> list[_Shard]:
    return _parse_index(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _parse_index(path: Path, _: int) -> list[_Shard]:
    try:
        shards = json.loads(path.read_bytes())["shards"]
        return [_shard(entry) for entry in shards]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not an index of MDS shards: {type(error).__name__}: {error}") from None


def _shard(entry: dict[str, Any]) -> _Shard:
    if entry["format"] != "mds":
        raise ValueError(f"format {entry['format']!r}")
    stored = entry["zip_data"] or entry["raw_data"]
    name = PurePosixPath(stored["basename"])
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"a shard outside of the folder: {name}")
    columns = zip(
        entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True
    )
    return _Shard(
        str(name),
        int(stored["bytes"]),
        int(entry["raw_data"]["bytes"]),
        int(entry["samples"]),
        str(entry["compression"] or "") if entry["zip_data"] else "",
        tuple((str(column), str(encoding), int(size or 0)) for column, encoding, size in columns),
    )


def _read_samples(
    path: Path, shard: _Shard, first: int, count: int
) -> tuple[bytes, NDArray[np.int64]]:
    """Return the bytes of some samples of a shard, and where each of them begins, and the last
    ends.
    """
    if path.stat().st_size != shard.size:
        raise ValueError(f"{path.stat().st_size} bytes, in the index {shard.size}")
    with path.open("rb") as stored:
        file = stored if not shard.compression else io.BytesIO(_decompress(stored.read(), shard))
        stored_count = int(np.frombuffer(file.read(4), np.uint32)[0])
        if stored_count != shard.samples:
            raise ValueError(f"{stored_count} samples, in the index {shard.samples}")
        file.seek(4 + 4 * first)
        offsets = np.frombuffer(file.read(4 * (count + 1)), np.uint32).astype(np.int64)
        if (
            len(offsets) != count + 1
            or (np.diff(offsets) < 0).any()
            or offsets[-1] > shard.raw_size
        ):
            raise ValueError("the offsets of its samples are damaged")
        file.seek(int(offsets[0]))
        data = file.read(int(offsets[-1] - offsets[0]))
    return data, offsets - offsets[0]


def _decompress(data: bytes, shard: _Shard) -> bytes:
    """Decompress a shard, to no more than the size that the index states."""
    kind = shard.compression.partition(":")[0]
    limit = shard.raw_size + 1
    if kind == "gz":
        raw = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(data, limit)
    elif kind == "bz2":
        raw = bz2.BZ2Decompressor().decompress(data, limit)
    elif kind == "zstd":
        arguments.require_package("pyarrow", f"{shard.name}, compressed with zstd,", "streams")
        import pyarrow

        raw = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd").read(limit)
    else:
        raise ConfigError(
            "read",
            "MDS shards compressed with gz, bz2 or zstd, or not",
            found=f"{kind} ({shard.name})",
        )
    if len(raw) != shard.raw_size:
        raise ValueError(f"it does not have {shard.raw_size} bytes when it is decompressed")
    return raw


class _Samples(Sequence[Any]):
    """Samples of a shard, each decoded when it is taken."""

    def __init__(self, shard: _Shard, data: bytes, offsets: NDArray[np.int64]) -> None:
        self._shard = shard
        self._data = data
        self._offsets = offsets
        self._columns = [
            (name, _decoder(name, encoding), size) for name, encoding, size in shard.columns
        ]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        data = self._data[self._offsets[index] : self._offsets[index + 1]]
        variable = sum(not size for _, _, size in self._columns)
        stored = iter(np.frombuffer(data[: 4 * variable], np.uint32).tolist())
        sizes = [size or next(stored, 0) for _, _, size in self._columns]
        at = 4 * variable
        sample = {}
        if at + sum(sizes) != len(data):
            raise ValueError(f"shard {self._shard.name}: the sizes of its columns do not fit")
        for (name, decode, _), size in zip(self._columns, sizes, strict=True):
            try:
                sample[name] = decode(data[at : at + size])
                at = at + size
            except (ArithmeticError, LookupError, OSError, ValueError) as error:
                raise ValueError(f"shard {self._shard.name}, column {name}: {error}") from None
        return sample


_SCALARS = (
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)

_ARRAY_TYPES = dict(
    zip(
        (8, 16, 32, 64, 9, 17, 33, 65, 18, 34, 66),
        _SCALARS,
        strict=True,
    )
)


def _decoder(column: str, encoding: str) -> Callable[[bytes], Any]:
    """Return the function that decodes the values of a column.

    Raises:
        ConfigError: for an encoding that is not read.
    """
    kind, _, options = encoding.partition(":")
    dtype, _, shape = options.partition(":")
    if kind == "ndarray" and dtype in ("", *_SCALARS):
        return partial(
            _array, dtype=dtype, shape=tuple(map(int, shape.split(","))) if shape else ()
        )
    if kind in _SCALARS:
        return lambda data: np.frombuffer(data, kind)[0]
    if kind in _DECODERS:
        return _DECODERS[kind]
    hint = "Pickle can run any program." if kind == "pkl" else ""
    known = ", ".join(["ndarray", *_SCALARS, *_DECODERS])
    raise ConfigError(
        "read", f"MDS columns of {known}", found=f"{encoding} of column {column}", hint=hint
    )


def _array(data: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    at = 0
    if not dtype:
        dtype = _ARRAY_TYPES[data[0]]
        at = 1
    if not shape:
        dimensions = data[at] >> 2
        kind = np.dtype(f"uint{8 << data[at] % 4}")
        shape = tuple(np.frombuffer(data, kind, dimensions, at + 1).tolist())
        at += 1 + dimensions * kind.itemsize
    values: NDArray[Any] = np.frombuffer(data, np.dtype(dtype), offset=at).reshape(shape)
    return np.array(values)  # torch takes only arrays that can be written to


def _image(data: bytes) -> Any:
    arguments.require_package("pillow", "Stream() of images in MDS shards", "streams", "PIL")
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=["JPEG", "PNG"])
    image.load()
    return image


def _raw_image(data: bytes) -> Any:
    arguments.require_package("pillow", "Stream() of images in MDS shards", "streams", "PIL")
    from PIL import Image

    width, height, mode = np.frombuffer(data, np.uint32, 3).tolist()
    return Image.frombytes(data[12 : 12 + mode].decode(), (width, height), data[12 + mode :])


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda data: int(np.frombuffer(data, np.int64)[0]),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": json.loads,
    "jpeg": _image,
    "png": _image,
    "pil": _raw_image,
}
