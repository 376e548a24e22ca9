"""A data set in sharded files, and the order in which its samples are read."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from torch.utils.data import Dataset

from .. import arguments, environment
from ..activity import Activity
from ..errors import ConfigError, DataError, LockstepError
from ..system import atomic_files
from .fetching import describe_exception
from .formats.mds import INDEX
from .shard_readers import FORMAT_OF_SUFFIX, READERS, ShardReader
from .stream_order import Integers, OrderSettings, StreamOrder


class Stream(Dataset[Any]):
    """A map-style data set whose samples lie in files, in blocks that are read together.

    A `Loader`, and so `Trainer.fit`, reads it in an order that keeps to few blocks at a time: see
    `StreamOrder`. The order depends on seed, epoch, global batch size, `shuffle_window`, `lanes`
    and the files, not on the number of workers or loader processes; each worker reads little more
    than its own part of the files. A position of the order is found without reading what lies
    before it.

    Samples are counted when it is made: for Parquet, Arrow and MDS from what the files say, for
    tokens from the size of the file. JSON lines and tar files are read once as a whole; the result
    is kept in a hidden file beside each of them, or one in the folder of more than 16, or in
    ``~/.cache/lockstep/index`` if that folder cannot be written.

    Indexing it by hand reads the block of the sample, and keeps the last 4 blocks.

    Args:
        files: a path, a pattern such as ``"data/*.parquet"`` (in the order of the names), or a
            sequence of them; a folder with an ``index.json`` is one of MosaicML Streaming (MDS).
        read: the format: "jsonl", "parquet", "arrow", "tar", "bin" (tokens) or "mds"; by the ending
            of each file if None. Or a reader of your own, see `ShardReader`.
        map: makes of a sample of the file what the data set returns; on the processes that load,
            after the random generators were seeded for that sample.
        shuffle_window: number of samples, over all lanes, among which the order is random; blocks
            are shuffled in any case. More samples need more memory if blocks are smaller than
            ``shuffle_window / lanes`` samples.
        lanes: number of places in the shuffled sequence of blocks from which each batch takes
            samples. All workers together hold at least this many blocks in memory.
        **options: of the reader of that name: `block_size` and `dtype` of "bin", `columns` of
            "parquet" and "arrow".

    Raises:
        ConfigError: an argument is invalid, a file does not exist, or a pattern matches none.
        DataError: a file is damaged, cannot be read, or there are no samples; names the file.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        read: str | ShardReader | None = None,
        *,
        map: Callable[[Any], Any] | None = None,
        shuffle_window: int = 16_384,
        lanes: int = 32,
        **options: Any,
    ) -> None:
        self.shuffle_window = arguments.whole("shuffle_window", shuffle_window, least=1)
        self.lanes = arguments.whole("lanes", lanes, least=1)
        self._map = map
        self._files = _open_files(_find_files(files), read, options)
        # behind the last block of each file
        self._file_blocks = np.cumsum([len(file.sizes) for file in self._files])
        self.block_sizes: Integers = np.concatenate([file.sizes for file in self._files])
        if not len(self.block_sizes):
            raise DataError(f"{self.name}: no samples")
        self._ends = np.cumsum(self.block_sizes)
        self._reader = BlockReader(self, 4)
        # kept, because a position in the data has it, which a trainer notes at each step
        self._files_digest = self._digest_of_files()

    def _digest_of_files(self) -> str:
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(
                f"{file.path.name}\0{len(file.sizes)}\0".encode()
                + file.sizes.astype("<i8").tobytes()
            )
        return f"{len(self._files)} from {self._files[0].path.name}, {digest.hexdigest()[:16]}"

    @property
    def name(self) -> str:
        """The files in a few words, for messages."""
        first = self._files[0].path
        more = len(self._files) - 1
        return f"{first} and {more} more files" if more else str(first)

    def __repr__(self) -> str:
        return f"Stream({self.name}: {len(self)} samples)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reader = BlockReader(self, 4)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._reader[index % len(self)]

    def epoch_order(
        self, global_batch_size: int, seed: int, epoch: int, shuffle: bool
    ) -> StreamOrder:
        """Return the order of an epoch.

        Args:
            global_batch_size: samples in one step, over all workers.
            seed: the seed of the order.
            epoch: the number of the epoch, from 0.
            shuffle: whether blocks are shuffled; else the order is that of the files.
        """
        settings = OrderSettings(
            global_batch_size, seed, epoch, shuffle, self.shuffle_window, self.lanes
        )
        return StreamOrder(self.block_sizes, settings)

    def order_settings(self) -> dict[str, Any]:
        """Return what the order depends on, beside the arguments of `epoch_order`, for a
        checkpoint.

        Of the files these are names without folders, and a digest of names and sizes of blocks:
        files can be moved.
        """
        return {
            "shuffle_window": self.shuffle_window,
            "lanes": self.lanes,
            "files": self._files_digest,
        }

    def reader(self) -> BlockReader:
        """Return a reader with a cache of its own, which keeps the blocks that it is told to."""
        return BlockReader(self, 1)

    def locate(self, index: int) -> tuple[Path, int]:
        """Return the file that a sample lies in, and its number among the records of that file,
        from 0.

        Args:
            index: of the sample in the data set.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        block, offset = self.find(index)
        file, number = self._file_of(block)
        return file.path, int(file.sizes[:number].sum()) + offset

    def find(self, index: int) -> tuple[int, int]:
        """Return the block of a sample, and its number in the block.

        Args:
            index: the number of a sample, from 0.
        """
        block = int(np.searchsorted(self._ends, index, side="right"))
        return block, index - int(self._ends[block] - self.block_sizes[block])

    def read_block(self, block: int) -> Sequence[Any]:
        """Read a block.

        Args:
            block: the number of a block, from 0.

        Raises:
            DataError: it cannot be read, or its file has changed since the data set was made; names
                both.
        """
        file, number = self._file_of(block)
        try:
            if file.state != _state_of(file.path):
                raise ValueError("the file has changed since its samples were counted")
            samples = file.reader.read(file.path, tuple(file.places[number].tolist()))
            if len(samples) != file.sizes[number]:
                raise ValueError(f"{len(samples)} samples, expected {file.sizes[number]}")
            return samples
        except LockstepError:
            raise
        except Exception as error:
            first = int(file.sizes[:number].sum())
            last = first + int(file.sizes[number]) - 1
            problem = f"{file.path}: block {number} (records {first} to {last}): {_text(error)}"
            raise DataError(problem) from error if environment.debugging() else None

    def take(self, samples: Sequence[Any], block: int, offset: int) -> Any:
        """Return a sample of a block that was read.

        Args:
            samples: what `read_block` has returned.
            block: the number of that block.
            offset: the number of the sample in the block.

        Raises:
            DataError: it cannot be decoded, or `map` raised an exception; names file, record and
                sample.
        """
        try:
            sample = samples[offset]
        except LockstepError:
            raise
        except Exception as error:
            raise self._sample_error(block, offset, _text(error)) from (
                error if environment.debugging() else None
            )
        if self._map is None:
            return sample
        try:
            return self._map(sample)
        except LockstepError:
            raise
        except Exception as error:
            problem = describe_exception(error)
            raise self._sample_error(block, offset, problem) from (
                error if environment.debugging() else None
            )

    def _sample_error(self, block: int, offset: int, problem: str) -> DataError:
        sample = int(self._ends[block] - self.block_sizes[block]) + offset
        path, record = self.locate(sample)
        return DataError(f"{path}: record {record} (sample {sample} of the stream): {problem}")

    def _file_of(self, block: int) -> tuple[_File, int]:
        """Return the file of a block, and the number of the block in it."""
        number = int(np.searchsorted(self._file_blocks, block, side="right"))
        return self._files[number], block - int(self._file_blocks[number]) + len(
            self._files[number].sizes
        )


class BlockReader:
    """Takes samples from a stream, and keeps the blocks that were read.

    Args:
        stream: the stream.
        blocks: number of blocks that it keeps, unless `keep` says which.
    """

    def __init__(self, stream: Stream, blocks: int) -> None:
        self._stream = stream
        self._limit = blocks
        self._kept: frozenset[int] = frozenset()
        self._blocks: OrderedDict[int, Sequence[Any]] = OrderedDict()

    def keep(self, blocks: Iterable[int]) -> None:
        """Keep these blocks from now on, once they are read, and drop others."""
        self._kept = frozenset(blocks)
        self._blocks = OrderedDict(
            (block, data) for block, data in self._blocks.items() if block in self._kept
        )

    def __getitem__(self, index: int) -> Any:
        block, offset = self._stream.find(index)
        samples = self._blocks.get(block)
        if samples is None:
            samples = self._blocks[block] = self._stream.read_block(block)
            while len(self._blocks) > max(self._limit, len(self._kept | {block})):
                self._blocks.popitem(last=False)
        elif not self._kept:
            self._blocks.move_to_end(block)
        return self._stream.take(samples, block, offset)


def _text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _File(NamedTuple):
    """A file, and its blocks."""

    path: Path
    # size in bytes and modification time in nanoseconds when the blocks were found
    state: tuple[int, int]
    reader: ShardReader
    sizes: Integers  # of the blocks, in samples
    places: Integers  # of the blocks, shape (blocks, numbers that a place has)


class _Index(msgspec.Struct, frozen=True):
    """The blocks of a file as they are kept, with what they hold for."""

    reader: str
    state: tuple[int, int]
    sizes: list[int]
    places: list[list[int]]


def _find_files(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the paths of files given as paths and patterns."""
    names = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not names:
        raise ConfigError("files", "at least one file", got=names)
    paths: list[Path] = []
    for given_name in names:
        name = str(arguments.path("files", given_name, "paths or patterns of files").expanduser())
        if not has_magic(name) or Path(name).exists():
            paths.append(_existing(Path(name)))
            continue
        matches = sorted(glob(name, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute patterns
        if not matches:
            raise ConfigError("files", "a pattern that matches files", got=str(given_name))
        paths += map(_existing, map(Path, matches))
    return paths


def _existing(path: Path) -> Path:
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - once, for thousands of files
    except OSError:
        mode = 0
    if stat.S_ISDIR(mode):
        index = path / INDEX
        if not index.is_file():
            hint = f'For the files in it, give a pattern such as "{path}/*.parquet".'
            raise ConfigError(
                "files",
                "files, or folders with an index.json",
                found=f"the folder {path}",
                hint=hint,
            )
        return index
    if not stat.S_ISREG(mode):
        raise ConfigError("files", "files that exist", got=str(path))
    return path


def _open_files(
    paths: Sequence[Path], read: str | ShardReader | None, options: dict[str, Any]
) -> list[_File]:
    """Find the blocks of files; of many files in one folder, from one index of the folder."""
    readers: dict[str, ShardReader] = {}
    chosen: list[ShardReader] = []
    # the numbers of files with indices, by folder and reader
    by_folder: dict[tuple[Path, str], list[int]] = {}
    for number, path in enumerate(paths):
        if read is None or isinstance(read, str):
            name = read or _format_of(path)
            if name not in readers:
                readers[name] = _make_reader(name, options)
            chosen.append(readers[name])
        else:
            chosen.append(read)
        index = getattr(chosen[-1], "index_name", "")
        if index:
            by_folder.setdefault((path.parent, index), []).append(number)
    files: list[_File | None] = [None] * len(paths)
    with Activity("lockstep: opening the files of a stream") as activity:
        for (folder, index), numbers in by_folder.items():
            if len(numbers) > _MANY:
                activity.text = (
                    f"lockstep: counting the samples of {len(numbers)} files in {folder}"
                )
                opened = _open_folder(
                    folder, index, [paths[number] for number in numbers], chosen[numbers[0]]
                )
                for number, file in zip(numbers, opened, strict=True):
                    files[number] = file
        for number, path in enumerate(paths):
            if files[number] is None:
                activity.text = f"lockstep: counting the samples of {path}"
                files[number] = _open_file(path, chosen[number])
    return [file for file in files if file is not None]


def _format_of(path: Path) -> str:
    if path.name == INDEX:
        return "mds"
    name = FORMAT_OF_SUFFIX.get(path.suffix.lower())
    if name is None:
        hint = (
            f"Or give the format: read= one of {', '.join(READERS.names())}, or a reader of your "
            "own."
        )
        raise ConfigError(
            "files", f"names that end with {', '.join(FORMAT_OF_SUFFIX)}", got=path.name, hint=hint
        )
    return name


def _make_reader(name: str, options: dict[str, Any]) -> ShardReader:
    reader: ShardReader
    try:
        reader = READERS.load(name)(**options)
    except TypeError as error:
        raise ConfigError(
            "Stream()", f'options of the format "{name}"', found=f"{options}: {error}"
        ) from None
    return reader


def _open_file(path: Path, reader: ShardReader, keep: bool = True) -> _File:
    """Find the blocks of a file.

    Args:
        path: the file.
        reader: of its format.
        keep: whether its blocks are looked up and kept in an index of its own.

    Raises:
        DataError: it cannot be read; names the file.
    """
    try:
        state = _state_of(path)
        sizes, places = _blocks(path, reader, state) if keep else reader.blocks(path)
        if _state_of(path) != state:
            raise ValueError("it changed while it was read")
        return _checked(path, state, reader, sizes, places)
    except LockstepError:
        raise
    except Exception as error:
        kind = type(reader).__name__
        raise DataError(f"{path}: {_text(error)} ({kind})") from (
            error if environment.debugging() else None
        )


def _checked(
    path: Path, state: tuple[int, int], reader: ShardReader, sizes: Any, places: Any
) -> _File:
    counts = np.asarray(sizes, dtype=np.int64).reshape(-1)
    table = (
        np.asarray(places, dtype=np.int64).reshape(len(counts), -1)
        if len(counts)
        else np.zeros((0, 1), np.int64)
    )
    if (counts < 0).any():
        raise ValueError(f"a block of {counts.min()} samples")
    return _File(path, state, reader, counts[counts > 0], table[counts > 0])


def _state_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _blocks(path: Path, reader: ShardReader, state: tuple[int, int]) -> Any:
    """Return sizes and places of the blocks: from a kept index if the reader has a name for it,
    else from the file.
    """
    name = getattr(reader, "index_name", "")
    if not name:
        return reader.blocks(path)
    with _locked(path):
        index = _load_index(path, name, state)
        if index is None:
            blocks = _checked(path, state, reader, *reader.blocks(path))
            index = _Index(name, state, blocks.sizes.tolist(), blocks.places.tolist())
            if _state_of(path) == state:
                _save_index(path, index)
    return index.sizes, index.places


# Of more files in a folder than this there is one index: 20,000 indices of a file each took 21 s to
# write, and 5 s to read again; that of a folder takes a tenth of it.
_MANY = 16


def _open_folder(
    folder: Path, name: str, paths: Sequence[Path], reader: ShardReader
) -> list[_File]:
    """Find the blocks of many files of a folder, and keep them in one index.

    Raises:
        DataError: a file cannot be read; names the file.
    """
    with _locked(folder):
        kept = _load_folder_index(folder)
        known = kept.get(name, {})
        files = []
        counted = 0
        for path in paths:
            entry = known.get(path.name)
            file = None if entry is None else _file_of_entry(path, entry, reader)
            if file is None:
                file = _open_file(path, reader, keep=False)
                known[path.name] = (file.state, file.sizes.tolist(), file.places.tolist())
                counted += 1
            files.append(file)
        if counted:
            _save_folder_index(folder, {**kept, name: known})
    return files


_Entry = tuple[tuple[int, int], list[int], list[list[int]]]
"""Of a file in the index of its folder: its state, and sizes and places of its blocks."""

_FolderIndex = dict[str, dict[str, _Entry]]
"""Entries by the index name of their reader and the name of the file."""


def _file_of_entry(path: Path, entry: _Entry, reader: ShardReader) -> _File | None:
    """Return a file as its folder's index has it; None if it has changed since."""
    state, sizes, places = entry
    status = os.stat(path)  # noqa: PTH116 - thousands of files
    if (status.st_size, status.st_mtime_ns) != state or not _fits(_Index("", state, sizes, places)):
        return None
    table = np.array(places, np.int64) if places else np.zeros((0, 1), np.int64)
    return _File(path, state, reader, np.array(sizes, np.int64), table)


def _load_folder_index(folder: Path) -> _FolderIndex:
    for kept in _index_paths(folder / _FOLDER):
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(kept.read_bytes(), type=_FolderIndex)
    return {}


def _save_folder_index(folder: Path, index: _FolderIndex) -> None:
    for kept in _index_paths(folder / _FOLDER):
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write_bytes(kept, msgspec.json.encode(index))
            return


_FOLDER = "folder"  # in the place of the name of a file, in the name of an index


def _index_paths(path: Path) -> Iterator[Path]:
    """Return where the index of a file may be kept, in the order of preference."""
    yield path.with_name(f".{path.name}.lockstep-index.json")
    with suppress(RuntimeError):  # no home folder
        key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
        yield Path.home() / ".cache" / "lockstep" / "index" / f"{key}.json"


def _load_index(path: Path, name: str, state: tuple[int, int]) -> _Index | None:
    """Return the index of a file, None if there is none for the file as it is now."""
    for kept in _index_paths(path):
        with suppress(OSError, msgspec.DecodeError):
            index: _Index = msgspec.json.decode(kept.read_bytes(), type=_Index)
            if index.reader == name and index.state == state and _fits(index):
                return index
    return None


def _fits(index: _Index) -> bool:
    widths = set(map(len, index.places))
    return (
        len(index.sizes) == len(index.places)
        and len(widths) <= 1
        and min(index.sizes, default=1) > 0
    )


def _save_index(path: Path, index: _Index) -> None:
    """Keep the index of a file, where that is possible."""
    for kept in _index_paths(path):
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write_bytes(kept, msgspec.json.encode(index))
            return


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file, so that of several workers one counts its samples and the others wait, and then
    read its index.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems lock no file that is open for reading; on these each worker
        # counts.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
