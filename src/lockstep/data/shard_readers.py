"""Readers of plain shards, one for each format: JSON lines, Parquet, Arrow, tar files and token files."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .. import arguments
from ..registry import Registry

__all__ = ["READERS", "Arrow", "Blocks", "JsonLines", "Parquet", "ShardReader", "Tar", "Tokens"]

Blocks = tuple[Sequence[int] | NDArray[np.int64], Sequence[Any] | NDArray[np.int64]]
"""(the number of samples in each block of a file, the place of each block: a whole number, or a tuple of them)."""

READERS = Registry(
    "read",
    {
        "jsonl": "lockstep.data.shard_readers:JsonLines",
        "parquet": "lockstep.data.shard_readers:Parquet",
        "arrow": "lockstep.data.shard_readers:Arrow",
        "tar": "lockstep.data.shard_readers:Tar",
        "bin": "lockstep.data.shard_readers:Tokens",
        "mds": "lockstep.data.mds:Mds",
    },
)

_BLOCK_BYTES = 4 << 20  # blocks of jsonl and tar files end after this many bytes, or after their number of samples


class ShardReader(Protocol):
    """Reads the samples of a file in blocks: samples that lie together and are read together.

    An exception of a method ends the run with one line that names the file and the block. A reader is pickled for
    loader processes. It may have an attribute `index_name`, a text that says in which way `blocks` divides a file: then
    the result of `blocks` is kept in a file, and used again as long as size, modification time and that text are the
    same.
    """

    def blocks(self, path: Path) -> Blocks:
        """Return the sizes of the blocks of a file, in samples, and their places: what `read` needs to find them."""

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the samples of the block at `place`; they may be decoded when they are taken from the sequence."""


class _Decoded(Sequence[Any]):
    """Records of which each is decoded when it is taken."""

    def __init__(self, records: Sequence[Any], decode: Callable[[Any], Any]) -> None:
        self._records, self._decode = records, decode

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._decode(self._records[index])


def _read_range(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(stop - start)
    if len(data) != stop - start:
        raise ValueError(f"ends at byte {start + len(data)}, within the block")
    return data


class _Runs:
    """Groups records that follow each other in a file into blocks."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.sizes: list[int] = []
        self.places: list[tuple[int, int]] = []
        self._start = self._count = 0

    def add(self, stop: int) -> None:
        """Add a record that ends at byte `stop`."""
        self._count += 1
        if self._count == self._samples or stop - self._start >= _BLOCK_BYTES:
            self.end(stop)

    def end(self, stop: int) -> None:
        """End the current block at byte `stop`."""
        if self._count:
            self.sizes.append(self._count)
            self.places.append((self._start, stop))
        self._start, self._count = stop, 0


class JsonLines:
    """Reads ``.jsonl`` files: a sample is the value on one line; empty lines do not count."""

    index_name = "jsonl 1000"

    def blocks(self, path: Path) -> Blocks:
        """Return the blocks: runs of 1000 lines, or of 4 MiB."""
        runs, stop = _Runs(1000), 0
        with path.open("rb") as file:
            for line in file:
                stop += len(line)
                if not _is_empty(line):
                    runs.add(stop)
        runs.end(stop)
        return runs.sizes, runs.places

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the values of the block's lines, which are parsed when they are taken."""
        lines = _read_range(path, *place).split(b"\n")
        return _Decoded([line for line in lines if not _is_empty(line)], json.loads)


def _is_empty(line: bytes) -> bool:
    return line in (b"", b"\r", b"\n", b"\r\n")


class Tokens:
    """Reads ``.bin`` files: tokens as numbers of one type, without a header.

    Sample i of a file is ``(tokens[i * n : (i + 1) * n], tokens[i * n + 1 : (i + 1) * n + 1])`` for n = `block_size`:
    inputs and targets, two int64 tensors of shape (n,). Tokens at the end that fill no sample are left out.

    Args:
        block_size: tokens in a sample.
        dtype: "uint16", "uint32", "int32" or "int64", in the byte order of this machine.

    Raises:
        ConfigError: an argument is invalid.
    """

    _TYPES = ("uint16", "uint32", "int32", "int64")

    def __init__(self, block_size: int | None = None, dtype: str = "uint16") -> None:
        expected = "the number of tokens in a sample of a .bin file"
        self.block_size = arguments.whole("block_size", block_size, least=1, expected=expected)
        self._dtype = np.dtype(arguments.choice("dtype", str(dtype), self._TYPES))
        # Blocks may be small: files of tokens are read at any place, without decoding.
        self._samples = max(1, (1 << 18) // (self.block_size * self._dtype.itemsize))

    def blocks(self, path: Path) -> Blocks:
        """Return the blocks: runs of samples of 256 KiB."""
        size = path.stat().st_size
        if size % self._dtype.itemsize:
            raise ValueError(f"its size of {size} bytes is no multiple of the {self._dtype.itemsize} of {self._dtype}")
        samples = max(0, size // self._dtype.itemsize - 1) // self.block_size
        starts = np.arange(0, samples, self._samples, dtype=np.int64)
        sizes = np.minimum(starts + self._samples, samples) - starts
        return sizes, np.stack([starts, sizes], 1)

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the samples of the block."""
        start, samples = place
        # A memory-mapped file that another program cuts would end this process with a signal; reading raises an error.
        count, offset = samples * self.block_size + 1, start * self.block_size * self._dtype.itemsize
        tokens = np.fromfile(path, self._dtype, count, offset=offset)
        if len(tokens) != count:
            raise ValueError(f"{len(tokens)} tokens, expected {count}")
        return _Decoded(range(0, count - 1, self.block_size), lambda begin: self._sample(tokens, begin))

    def _sample(self, tokens: NDArray[Any], begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        block = torch.from_numpy(tokens[begin : begin + self.block_size + 1].astype(np.int64))
        return block[:-1], block[1:]


# --- tar --------------------------------------------------------------------------------------------------------------

_TAR_UNIT = 512


class Tar:
    """Reads ``.tar`` files: consecutive files with the same name up to the first dot are one sample, as in WebDataset.

    A sample is a dict: ``"__key__"`` is that name with its folder, and each ending, such as ``"jpg"`` or ``"seg.png"``,
    has the bytes of its file.
    """

    index_name = "tar 100"

    def blocks(self, path: Path) -> Blocks:
        """Return the blocks: runs of 100 samples, or of 4 MiB."""
        runs, key, end = _Runs(100), None, 0
        with path.open("rb") as file:
            for member in _members(file):
                found = _split_name(member.name)[0]
                if key is not None and found != key:
                    runs.add(end)
                key, end = found, _end_of(member)
            # A damaged header in the middle looks to `tarfile` like the end of the archive.
            if file.read(_TAR_UNIT) != bytes(_TAR_UNIT):
                raise ValueError(f"cut off or damaged after byte {end}: it has no mark of its end there")
        if key is not None:
            runs.add(end)
        runs.end(end)
        return runs.sizes, runs.places

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the samples of the block."""
        data = _read_range(path, *place)
        samples: list[dict[str, Any]] = []
        for member in _members(io.BytesIO(data)):
            key, ending = _split_name(member.name)
            if not samples or samples[-1]["__key__"] != key:
                samples.append({"__key__": key})
            if ending in samples[-1]:
                raise ValueError(f"it has two files {member.name}")
            samples[-1][ending] = data[member.offset_data : member.offset_data + member.size]
        return samples


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Iterate over the files in a tar file, without folders and links; leave `file` behind the last entry."""
    try:
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the caller closes the file
    except tarfile.ReadError as error:
        raise ValueError(f"not a tar file without compression: {error}") from None
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined] # it would keep all of them
        if member.issparse():
            raise ValueError(f"{member.name} is a sparse file, which is not read")
        if member.isreg():
            yield member
    file.seek(archive.offset)


def _end_of(member: tarfile.TarInfo) -> int:
    return member.offset_data + -(-member.size // _TAR_UNIT) * _TAR_UNIT


def _split_name(name: str) -> tuple[str, str]:
    """Return the key of a file in a tar file, and its ending in lower case."""
    folder, slash, last = name.rpartition("/")
    stem, _, ending = last.partition(".")
    return folder + slash + stem, ending.lower()


# --- Parquet and Arrow ------------------------------------------------------------------------------------------------


class Parquet:
    """Reads ``.parquet`` files with pyarrow: a sample is a row, a dict of Python values by column.

    A list of numbers is a NumPy array. A block is a row group, which is decoded as a whole.

    Args:
        columns: names of the columns that are read; None for all of them.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        arguments.require_package("pyarrow", "Stream() of Parquet files", "streams")
        self._columns = None if columns is None else list(columns)

    def blocks(self, path: Path) -> Blocks:
        """Return the row groups, from the end of the file."""
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            _check_columns(self._columns, file.schema_arrow.names)
            metadata = file.metadata
            rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return rows, range(len(rows))

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the rows of a row group."""
        from pyarrow import parquet

        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            # Without threads: a loader process is one of several already.
            return _rows(file.read_row_group(place[0], columns=self._columns, use_threads=False))


class Arrow:
    """Reads ``.arrow`` files with pyarrow, of Arrow's file and of its stream format (as written by `datasets`).

    A sample is a row, as of `Parquet`. A block is a record batch.

    Args:
        columns: names of the columns that are read; None for all of them.

    Raises:
        ConfigError: pyarrow is not installed.
    """

    _MAGIC = b"ARROW1"

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        arguments.require_package("pyarrow", "Stream() of Arrow files", "streams")
        self._columns = None if columns is None else list(columns)

    def blocks(self, path: Path) -> Blocks:
        """Return the record batches; of the stream format, it reads the header of each."""
        import pyarrow

        with pyarrow.memory_map(str(path)) as source:
            if source.read(len(self._MAGIC)) == self._MAGIC:
                file = pyarrow.ipc.open_file(source)
                _check_columns(self._columns, file.schema.names)
                batches = range(file.num_record_batches)
                return [file.get_batch(number).num_rows for number in batches], [(number, -1) for number in batches]
            return self._stream_blocks(source)

    def _stream_blocks(self, source: Any) -> Blocks:
        import pyarrow

        source.seek(0)
        schema = pyarrow.ipc.read_schema(source)
        _check_columns(self._columns, schema.names)
        if any(pyarrow.types.is_dictionary(field.type) for field in schema):
            raise ValueError("dictionary columns in Arrow's stream format are not read; write Arrow's file format")
        sizes: list[int] = []
        places: list[tuple[int, int]] = []
        start = source.tell()
        while source.tell() < source.size():
            try:
                message = pyarrow.ipc.read_message(source)
            except EOFError:  # the mark of the end
                return sizes, places
            batch = pyarrow.ipc.read_record_batch(message, schema)
            sizes.append(batch.num_rows)
            places.append((start, source.tell()))
            start = source.tell()
        raise ValueError(f"cut off at byte {start}: it has no mark of its end")

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the rows of a record batch."""
        import pyarrow

        start, stop = place
        with pyarrow.OSFile(str(path)) as source:
            if stop < 0:
                batch = pyarrow.ipc.open_file(source).get_batch(start)
            else:
                schema = pyarrow.ipc.read_schema(source)
                source.seek(start)
                batch = pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(source), schema)
        batch.validate(full=True)
        table = pyarrow.Table.from_batches([batch])
        return _rows(table if self._columns is None else table.select(self._columns))


def _check_columns(columns: Sequence[str] | None, names: Sequence[str]) -> None:
    missing = [column for column in columns or () if column not in names]
    if missing:
        raise ValueError(f"it has no column {missing[0]!r}, only {', '.join(names)}")


def _rows(table: Any) -> Sequence[Any]:
    """Return the rows of a table of pyarrow, each made when it is taken."""
    import pyarrow

    columns = {}
    for name in table.column_names:
        column = table.column(name)
        chunk = column.chunk(0) if column.num_chunks == 1 else pyarrow.concat_arrays(column.chunks or [])
        columns[name] = chunk, _value_reader(chunk.type)
    return _Decoded(
        range(table.num_rows), lambda row: {name: take(chunk[row]) for name, (chunk, take) in columns.items()}
    )


def _value_reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that makes a value for Python of a scalar of pyarrow's type `kind`."""
    from pyarrow import types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        return _array
    return _python


def _array(scalar: Any) -> Any:
    if not scalar.is_valid:
        return None
    if scalar.values.null_count:
        return scalar.as_py()
    return scalar.values.to_numpy(zero_copy_only=False).copy()  # torch takes only arrays that can be written to


def _python(scalar: Any) -> Any:
    return scalar.as_py()
