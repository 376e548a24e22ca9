"""Reads the Python version of CIFAR-10 without executing its pickles."""

from __future__ import annotations

import gzip
import io
import pickle
import pickletools
import reprlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError

ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_BATCHES = ("test_batch",)
BATCHES = TRAIN_BATCHES + TEST_BATCHES

_CHANNELS = 3
_SIDE = 32
_CLASSES = 10
_PIXELS = _CHANNELS * _SIDE * _SIDE
# A published batch has 31 MB and the unpacked archive 186 MB.
_LARGEST_BATCH = 64 << 20
_LARGEST_ARCHIVE = 256 << 20
_DOWNLOAD_AGAIN = "Remove it and download it again."

# What these opcodes build may be nested: a million deep it would exhaust the C stack; and if both
# halves of a pair are the same pair, and so on, each level doubles the time of its hash. A batch
# needs 14 of them.
_NESTING = frozenset(
    ["EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "BUILD", "INST", "OBJ"]
)
_MAX_NESTING = 24
# The memo is as long as its highest index, which the file chooses: up to 64 GiB. A batch needs
# 30,000 entries.
_MAX_MEMO_INDEX = 1 << 20
# The global names that numpy and Python write into such a pickle → their roles for `_Global`.
_ROLES = {
    ("numpy.core.multiarray", "_reconstruct"): "array",
    ("numpy._core.multiarray", "_reconstruct"): "array",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
}

# File name → images, labels.
Batches = dict[str, tuple[Tensor, Tensor]]


def read_folder(folder: Path) -> Batches:
    """Read every batch in an unpacked ``cifar-10-batches-py``.

    Returns:
        File name → (images as uint8 of shape (n, 3, 32, 32), labels as int64 of shape (n,)).

    Raises:
        DataError: naming the file, when a batch is missing, cannot be read or is damaged.
    """
    return {name: parse_batch(f"{folder / name}", _read_file(folder / name)) for name in BATCHES}


def read_archive(path: Path) -> Batches:
    """Read every batch in ``cifar-10-python.tar.gz`` in one pass, without unpacking it to disk.

    Returns:
        As :func:`read_folder`.

    Raises:
        DataError: the archive or a member of it is missing or damaged; names it.
    """
    batches: Batches = {}
    try:
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) as unpacked:
            for name, data in _members(path, _SizeLimited(path, unpacked)):
                batches[name] = parse_batch(f"{path} ({FOLDER}/{name})", data)
                if len(batches) == len(BATCHES):
                    return batches
    except FileNotFoundError:
        raise DataError(
            f"{path}: expected the archive of CIFAR-10, got no file of this name"
        ) from None
    except DataError:
        raise
    except Exception as error:  # damaged archives make tarfile and gzip raise almost anything
        raise DataError(
            f"{path}: expected an undamaged .tar.gz archive, got {_reason(error)}. "
            f"{_DOWNLOAD_AGAIN}"
        ) from None
    missing = [name for name in BATCHES if name not in batches]
    raise DataError(
        f"{path}: expected the batches of CIFAR-10 in {FOLDER}/, got none named "
        f"{', '.join(missing)}"
    )


def parse_batch(source: str, data: bytes) -> tuple[Tensor, Tensor]:
    """Parse the bytes of one batch file into images and labels.

    Source: the layout is described on the page of the data set, "The CIFAR-10 dataset", Krizhevsky
    2009: a pickled dictionary with ``data``, uint8 rows of 1024 red, 1024 green and 1024 blue
    values, and ``labels``, a list.

    The pickle cannot run code: the few global names that it may refer to resolve to stand-ins that
    only record their arguments, and what would get past that is refused, see `_check_opcodes`.

    Args:
        source: the file's name in errors.
        data: its bytes.

    Returns:
        uint8 of shape (n, 3, 32, 32) and int64 of shape (n,).

    Raises:
        DataError: the bytes are anything else; names `source`.
    """
    try:
        _check_opcodes(data)
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # bytes that are no pickle make unpicklers raise almost anything
        raise DataError(
            f"{source}: expected a pickled CIFAR-10 batch, got {_reason(error)}"
        ) from None
    if not isinstance(content, dict):
        raise DataError(
            f"{source}: expected a dictionary with 'data' and 'labels', got "
            f"{type(content).__name__}"
        )
    images = _to_images(source, _entry(source, content, "data"))
    return images, _to_labels(source, _entry(source, content, "labels"), len(images))


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BATCH + 1)
    except FileNotFoundError:
        raise DataError(f"{path}: expected a batch of CIFAR-10, got no file of this name") from None
    except OSError as error:
        raise DataError(
            f"{path}: expected a file that can be read, got {error.strerror or error}"
        ) from None
    if len(data) > _LARGEST_BATCH:
        raise DataError(f"{path}: expected a batch of at most {_LARGEST_BATCH} bytes, got more")
    return data


class _SizeLimited(io.BufferedIOBase):
    """A stream that raises an error once a damaged or hostile archive unpacks to more than the
    limit.
    """

    def __init__(self, path: Path, stream: gzip.GzipFile) -> None:
        self._path = path
        self._stream = stream
        self._remaining = _LARGEST_ARCHIVE

    def read(self, size: int | None = -1, /) -> bytes:
        allowed = self._remaining + 1
        data = self._stream.read(allowed if size is None or size < 0 else min(size, allowed))
        self._remaining -= len(data)
        if self._remaining < 0:
            raise DataError(
                f"{self._path}: expected at most {_LARGEST_ARCHIVE} bytes when unpacked, got more"
            )
        return data


def _members(path: Path, stream: _SizeLimited) -> Iterator[tuple[str, bytes]]:
    # In stream mode: finding members by name would unpack the whole archive first, then again for
    # each member.
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            if folder != FOLDER or name not in BATCHES or not member.isreg():
                continue
            if member.size > _LARGEST_BATCH:
                raise DataError(
                    f"{path} ({member.name}): expected at most {_LARGEST_BATCH} bytes, got "
                    f"{member.size}"
                )
            content = archive.extractfile(member)
            assert content is not None  # a regular file has a content
            yield name, content.read()


class _Global:
    """Stands for a function or class that a pickle refers to."""

    __slots__ = ("role",)

    def __init__(self, role: str) -> None:
        self.role = role

    def __call__(self, *arguments: Any) -> Any:
        if self.role != "encode":
            return _Instance(self.role, arguments)
        text, codec = arguments
        if codec != "latin1" or not isinstance(text, str):
            raise pickle.UnpicklingError("text that is not latin1")
        return text.encode("latin1")


class _Instance:
    """Stands for an object that such a function would have created: records its arguments and
    state.
    """

    __slots__ = ("arguments", "role", "state")

    def __init__(self, role: str, arguments: tuple[Any, ...]) -> None:
        self.role = role
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Resolves global names to new stand-ins, so that one pickle cannot affect the next."""

    def find_class(self, module: str, name: str) -> _Global:
        role = _ROLES.get((module, name))
        if role is None:
            raise pickle.UnpicklingError(f"the name {module}.{name}, which is not allowed")
        return _Global(role)


def _check_opcodes(data: bytes) -> None:
    """Check what the unpickler would do without asking for a name, or before.

    Raises:
        UnpicklingError: for objects from the extension registry, whose cache is not asked for by
            name; or if the pickle would exhaust the stack or the memory.
    """
    nesting = 0
    for opcode, argument, _ in pickletools.genops(data):
        nesting += opcode.name in _NESTING
        if opcode.name.startswith("EXT") or nesting > _MAX_NESTING:
            raise pickle.UnpicklingError(f"the opcode {opcode.name}, which is not allowed here")
        if opcode.name.endswith("PUT") and int(argument or 0) > _MAX_MEMO_INDEX:
            raise pickle.UnpicklingError(f"a memo of {argument} entries")


def _entry(source: str, content: dict[Any, Any], key: str) -> Any:
    # Python 2 wrote str as bytes.
    for spelling in (key.encode(), key):
        if spelling in content:
            return content[spelling]
    raise DataError(f"{source}: expected an entry {key!r}, got {reprlib.repr(list(content))}")


def _to_images(source: str, array: Any) -> Tensor:
    if not isinstance(array, _Instance) or array.role != "array":
        raise DataError(f"{source}: expected 'data' as an array, got {type(array).__name__}")
    try:
        _, (rows, columns), dtype, fortran_order, raw = array.state
        kind = dtype.arguments[0]
    except (TypeError, ValueError, AttributeError, IndexError):
        raise DataError(
            f"{source}: expected 'data' as a two-dimensional array, got something else"
        ) from None
    if kind not in ("u1", b"u1"):
        raise DataError(f"{source}: expected 'data' of type u1 (uint8), got {reprlib.repr(kind)}")
    if fortran_order:
        raise DataError(
            f"{source}: expected 'data' row by row (C order), got it column by column (Fortran "
            "order)"
        )
    # No memory is allocated for the stated shape: it must match the number of bytes.
    if (
        type(rows) is not int
        or columns != _PIXELS
        or not isinstance(raw, bytes)
        or not 0 < len(raw) == rows * _PIXELS
    ):
        size = len(raw) if isinstance(raw, bytes) else "no"
        shape = reprlib.repr((rows, columns))
        raise DataError(
            f"{source}: expected 'data' of shape (n, {_PIXELS}), got shape {shape} with {size} "
            "bytes"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(rows, _CHANNELS, _SIDE, _SIDE)


def _to_labels(source: str, labels: Any, rows: int) -> Tensor:
    if not isinstance(labels, list) or len(labels) != rows:
        got = f"{len(labels)}" if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{source}: expected 'labels' as a list of {rows} numbers, got {got}")
    for label in labels:
        if type(label) is not int or not 0 <= label < _CLASSES:
            raise DataError(
                f"{source}: expected labels from 0 to {_CLASSES - 1}, got {reprlib.repr(label)}"
            )
    return torch.tensor(labels, dtype=torch.int64)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
