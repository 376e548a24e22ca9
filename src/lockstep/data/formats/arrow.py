"""Arrow files: a sample is a row of a table of pyarrow, and a block is a record batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import arguments
from ..shard_readers import Blocks, Decoded


class Arrow:
    """Reads ``.arrow`` files with pyarrow, of Arrow's file and of its stream format (as written by
    `datasets`).

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
                check_columns(self._columns, file.schema.names)
                batches = range(file.num_record_batches)
                return [file.get_batch(number).num_rows for number in batches], [
                    (number, -1) for number in batches
                ]
            return self._stream_blocks(source)

    def _stream_blocks(self, source: Any) -> Blocks:
        import pyarrow

        source.seek(0)
        schema = pyarrow.ipc.read_schema(source)
        check_columns(self._columns, schema.names)
        if any(pyarrow.types.is_dictionary(field.type) for field in schema):
            raise ValueError(
                "dictionary columns in Arrow's stream format are not read; write Arrow's file "
                "format"
            )
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
        return rows_of(table if self._columns is None else table.select(self._columns))


def check_columns(columns: Sequence[str] | None, names: Sequence[str]) -> None:
    """Check that a table has the columns that are asked for, if some are.

    Raises:
        ValueError: naming one that it has not.
    """
    missing = [column for column in columns or () if column not in names]
    if missing:
        raise ValueError(f"it has no column {missing[0]!r}, only {', '.join(names)}")


def rows_of(table: Any) -> Sequence[Any]:
    """Return the rows of a table of pyarrow, each made when it is taken."""
    import pyarrow

    columns = {}
    for name in table.column_names:
        column = table.column(name)
        chunk = (
            column.chunk(0)
            if column.num_chunks == 1
            else pyarrow.concat_arrays(column.chunks or [])
        )
        columns[name] = chunk, _value_reader(chunk.type)
    return Decoded(
        range(table.num_rows),
        lambda row: {name: take(chunk[row]) for name, (chunk, take) in columns.items()},
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
    # torch takes only arrays that can be written to
    return scalar.values.to_numpy(zero_copy_only=False).copy()


def _python(scalar: Any) -> Any:
    return scalar.as_py()
