"""Serialises a tree of plain values and tensors as JSON and safetensors, and reads it back, one
tensor at a time.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError

# Written with Sequence and Mapping because they are covariant: a dict[str, Tensor] is a Tree to the
# type checker.
Tree: TypeAlias = None | bool | int | float | str | Tensor | Sequence["Tree"] | Mapping[Any, "Tree"]
Json: TypeAlias = Any

_Path: TypeAlias = tuple[object, ...]

MAX_DEPTH = 64
"""Maximum depth of nesting; a deeper tree is a list that contains itself, or an attack."""

MAX_JSON = 64 * 1024**2
"""Maximum bytes of the plain values of one tree as JSON: some ten million numbers, which belong in
a tensor.
"""

# Python converts integers to text and back only up to 4300 decimal digits (14 000 bits).
_MAX_INT_BITS = 8192
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_REAL = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# safetensors stores complex numbers of 64 bits only.
_STORED = {**_REAL, "C64": torch.complex64}
_CODES = {dtype: code for code, dtype in _STORED.items()}

_BLOCK = 16 * 2**20
"""Bytes of a tensor that are copied at a time if it cannot be written or read without a copy."""

_MAX_OPEN = 64
"""Maximum number of open files of one checkpoint; the usual limit of a process is 1024 files of all
kinds.
"""


def pack(tree: Tree, allow_dtensor: bool = False) -> tuple[Json, dict[str, Tensor]]:
    """Convert a tree to a JSON value and the tensors that it refers to.

    A tree is None, a bool, int, float, str or tensor, or a list, tuple or dict of trees; keys are
    str or int. `unpack` restores tuples, integer keys, the order of keys, NaN, infinities and -0.0.
    It returns every subclass of dict as a dict, and every parameter as a tensor without gradient,
    on the CPU; tensors that shared memory no longer do.

    Args:
        tree: the tree.
        allow_dtensor: whether tensors may be a DTensor.

    Returns:
        the JSON value, and all tensors without gradients, of types that safetensors stores (a
        complex one as its real view, with a last dimension of 2). They are those of the tree, not
        copies.

    Raises:
        ConfigError: the tree holds anything else; names its place in the tree.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(tree, (), tensors, allow_dtensor), tensors


def unpack(value: Json, tensors: Mapping[str, Tensor | StoredTensor]) -> Any:
    """Restore the tree from the results of `pack`; nothing in `value` is executed or imported.

    Raises:
        ValueError: `value` is not a result of `pack`, or does not use each of `tensors` exactly
            once.
    """
    unused = dict(tensors)
    tree = _unpack(value, (), unused)
    if unused:
        raise ValueError(f"tensors that the tree does not use: {', '.join(sorted(unused)[:5])}")
    return tree


def check_storable(tensor: object, where: str, allow_dtensor: bool = False) -> Tensor:
    """Check that `tensor` can be stored, and return it without its gradient.

    Args:
        tensor: the object to store.
        where: its place, for the error message.
        allow_dtensor: whether it may be a DTensor.

    Raises:
        ConfigError: it is not a plain dense tensor with values, or is of a type that cannot be
            stored; names `where`.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(where, "a tensor", found=f"an object of {_type_name(tensor)}")
    detached = tensor.detach()
    plain = type(tensor) in (Tensor, nn.Parameter) or (
        allow_dtensor and hasattr(detached, "to_local")
    )
    if not plain or tensor.layout is not torch.strided or tensor.is_meta:
        kind = f"a {tensor.layout} {type(tensor).__name__} on {tensor.device}"
        hint = "Convert it first: full_tensor() for a DTensor, to_dense() for a sparse tensor."
        raise ConfigError(where, "a plain dense tensor", found=kind, hint=hint)
    if tensor.dtype not in _CODES and tensor.dtype not in _COMPLEX.values():
        raise ConfigError(
            where, "a tensor of a type that safetensors stores", found=f"a tensor of {tensor.dtype}"
        )
    return detached


def to_json(argument: str, value: Json, indent: int | None = None) -> bytes:
    """Return the ASCII text of a packed value; the same value always gives the same text.

    Raises:
        ConfigError: it has more than MAX_JSON bytes; names `argument`.
    """
    data = json.dumps(value, allow_nan=False, indent=indent).encode("ascii")
    if len(data) > MAX_JSON:
        hint = "Put long lists of numbers into tensors."
        raise ConfigError(
            argument,
            f"at most {MAX_JSON:,} bytes of plain values",
            found=f"{len(data):,} bytes",
            hint=hint,
        )
    return data


def from_json(data: bytes) -> Json:
    """Parse a JSON text.

    Raises:
        ValueError: it is not JSON, has more than MAX_JSON bytes, or is nested too deeply.
    """
    if len(data) > MAX_JSON:
        raise ValueError(f"expected at most {MAX_JSON:,} bytes of JSON, got {len(data):,}")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_storable_name(name: str) -> bool:
    """Return whether a safetensors file can hold a tensor of this name."""
    # It stores names in UTF-8, which has no lone surrogates, and reserves one name.
    return name != "__metadata__" and not any("\ud800" <= letter <= "\udfff" for letter in name)


@dataclass(frozen=True)
class Entry:
    """A file in the manifest: its size in bytes and the SHA-256 of its content, in hexadecimal
    digits.
    """

    size: int
    sha256: str


def write_bytes(path: Path, data: bytes) -> Entry:
    """Write a new file.

    Raises:
        OSError: it could not be written; a part of it may have been.
    """
    with path.open("xb") as stream:
        stream.write(data)
    return Entry(len(data), hashlib.sha256(data).hexdigest())


def check_tensors(argument: str, tensors: Mapping[str, Tensor]) -> None:
    """Check that a safetensors file can hold `tensors`, which have passed `check_storable`.

    Raises:
        ConfigError: safetensors does not store one of the names or types; names `argument`.
    """
    for name, tensor in tensors.items():
        if not is_storable_name(name):
            raise ConfigError(argument, "names that safetensors can store", name)
        if tensor.dtype not in _CODES:
            raise ConfigError(
                argument, "tensors of types that safetensors stores", found=str(tensor.dtype)
            )


def write_tensors(path: Path, tensors: Mapping[str, Tensor], flush: bool = False) -> Entry:
    """Write a new safetensors file, one tensor after the other, and compute its checksum meanwhile.

    The same tensors always give the same bytes. It uses at most 16 MiB of additional memory,
    whatever the size and device of the tensors; one row of a tensor with permuted strides may need
    more.

    Args:
        path: the file, which must not exist.
        tensors: plain dense tensors on any device, see `check_tensors`.
        flush: flush the content to the storage device (fsync).

    Raises:
        OSError: it could not be written; a part of it may have been.
    """
    # Wide types first, so that each tensor is aligned to its width: other readers map the file into
    # memory.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as stream:
        for data in _content(ordered):
            digest.update(data)
            stream.write(data)
            size += len(data)
        if flush:
            stream.flush()
            os.fsync(stream.fileno())
    return Entry(size, digest.hexdigest())


def _content(ordered: Sequence[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    header: dict[str, Json] = {
        "__metadata__": {"format": "pt"}
    }  # other readers of the format require it
    end = 0
    for name, tensor in ordered:
        start = end
        end = end + tensor.nbytes
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield from _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    direct = (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
    if direct:
        yield _raw(tensor)
        return
    for block in blocks(tensor.shape, tensor.element_size()):
        yield _raw(cpu_copy(tensor[block]))


def cpu_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in CPU memory of a `tensor` on any device and with any strides."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _raw(tensor: Tensor) -> memoryview:
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def blocks(
    shape: Sequence[int], width: int, max_bytes: int = _BLOCK
) -> Iterator[tuple[slice, ...]]:
    """Cut a tensor into contiguous blocks of at most `max_bytes`, in memory order.

    Args:
        shape: the tensor's shape.
        width: bytes of one element.
        max_bytes: the maximum size of a block; a single element may be larger.
    """
    if not shape:
        yield ()
        return
    row = width * math.prod(shape[1:])
    if row <= max_bytes:
        rows = max(1, max_bytes // max(1, row))
        yield from (
            (slice(start, min(start + rows, shape[0])),) for start in range(0, shape[0], rows)
        )
        return
    for index in range(shape[0]):
        yield from (
            (slice(index, index + 1), *inner) for inner in blocks(shape[1:], width, max_bytes)
        )


def dtype_of(code: Json) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype `code`.

    Raises:
        ValueError: Lockstep does not know the code.
    """
    if not isinstance(code, str) or code not in _STORED:
        raise ValueError(f"a tensor of the unknown type {str(code)[:20]}")
    return _STORED[code]


def code_of(dtype: torch.dtype) -> str:
    """Return the safetensors code of a dtype that it stores."""
    return _CODES[dtype]


OpenFiles: TypeAlias = deque["weakref.ref[TensorFile]"]
"""The open ones of the files that are read together, the one opened first at the left."""


class TensorFile:
    """A safetensors file, opened at the first access; only the requested parts are read.

    Args:
        path: the file.
        name: its name in errors.
        open_files: shared by the files that are read together; of many files, only those opened
            last stay open.
    """

    def __init__(self, path: Path, name: str, open_files: OpenFiles | None = None) -> None:
        self.path = path
        self.name = name
        self._open_files: OpenFiles = deque() if open_files is None else open_files
        self._header: dict[str, _HeaderEntry] = {}
        self._descriptor: int | None = None
        self._close: Callable[[], object] = int

    def tensors(self) -> dict[str, StoredTensor]:
        """Return all tensors of the file, sorted by name.

        Raises:
            ValueError: it is not a safetensors file, or has tensors of a type that torch does not
                have.
            OSError: it cannot be read.
        """
        self._open()
        tensors = {}
        for name, entry in sorted(self._header.items()):
            whole = Piece(self, name, (0,) * len(entry.shape), entry.shape, entry.dtype)
            tensors[name] = StoredTensor(entry.dtype, entry.shape, (whole,))
        return tensors

    def read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor into CPU memory.

        Args:
            name: the tensor's name.
            region: the range in each dimension.

        Raises:
            CheckpointError: it cannot be read, or is invalid.
        """
        try:
            descriptor = self._open()
            if name not in self._header:
                raise ValueError(f"there is no tensor {name[:80]!r}")
            return _read(descriptor, self._header[name], region)
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(
                f"{self.path.parent}: {self.name}: cannot be read: {reason}"
            ) from error
        except ValueError as error:
            raise self.invalid_content(error) from error

    def invalid_content(self, reason: object) -> CheckpointError:
        """Return the error for invalid content."""
        return CheckpointError(
            f"{self.path.parent}: {self.name}: its content is invalid: {str(reason)[:200]}"
        )

    def _open(self) -> int:
        if self._descriptor is None:
            descriptor = self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self._close = weakref.finalize(self, os.close, descriptor)
            # a reference cycle would keep files open until it is collected
            self._open_files.append(weakref.ref(self))
            if (
                len(self._open_files) > _MAX_OPEN
                and (oldest := self._open_files.popleft()()) is not None
            ):
                oldest._close()
                oldest._descriptor = None
            self._header = self._header or _read_header(self.path, descriptor)
        return self._descriptor


@dataclass(frozen=True)
class _HeaderEntry:
    """A tensor in the header of a safetensors file; `begin` is its offset in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def _read_header(path: Path, descriptor: int) -> dict[str, _HeaderEntry]:
    """Read the header of a safetensors file, after the library safetensors has validated it.

    The library itself does not return offsets, and reads a whole tensor for any part of it. Mapped
    into memory, a truncated file or a failing device would end the process with a signal.

    Raises:
        ValueError: it is not a safetensors file.
    """
    try:
        with safe_open(path, "pt"):
            pass
    except OSError:
        raise
    except Exception as error:  # the library raises many kinds of errors
        raise ValueError(str(error) or type(error).__name__) from error
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = json.loads(os.pread(descriptor, length, 8))
    end = os.fstat(descriptor).st_size
    return {
        name: _header_entry(fields, 8 + length, end)
        for name, fields in header.items()
        if name != "__metadata__"
    }


def _header_entry(fields: Json, start: int, end: int) -> _HeaderEntry:
    dtype = dtype_of(fields["dtype"])
    shape = tuple(fields["shape"])
    begin, stop = (start + offset for offset in fields["data_offsets"])
    if not start <= begin <= stop <= end or stop - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor with invalid offsets in the header")
    return _HeaderEntry(dtype, shape, begin)


def _read(descriptor: int, entry: _HeaderEntry, region: tuple[slice, ...]) -> Tensor:
    bounds = [(part.start, part.stop) for part in region]
    if len(bounds) != len(entry.shape) or any(
        not 0 <= start <= stop <= size
        for (start, stop), size in zip(bounds, entry.shape, strict=True)
    ):
        raise ValueError(f"a tensor of shape {list(entry.shape)} has no region {bounds}")
    tensor = torch.empty([stop - start for start, stop in bounds], dtype=entry.dtype, device="cpu")
    data = _raw(tensor)
    done = 0
    for offset, size in _contiguous_runs(entry.shape, bounds):
        begin = entry.begin + offset * entry.dtype.itemsize
        size = size * entry.dtype.itemsize
        _read_into(descriptor, data[done : done + size], begin)
        done += size
    return tensor


def _contiguous_runs(
    shape: Sequence[int], bounds: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield (offset, number of elements) for each contiguous run of a region of a tensor, in
    elements.
    """
    full = len(shape)  # from this dimension on, the region spans the whole tensor
    while full and bounds[full - 1] == (0, shape[full - 1]):
        full -= 1
    inner = math.prod(shape[full:])
    if not full:
        yield 0, inner
        return
    first, last = bounds[full - 1]
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(full)]
    for index in itertools.product(*(range(start, stop) for start, stop in bounds[: full - 1])):
        outer = sum(number * stride for number, stride in zip(index, strides, strict=False))
        yield outer + first * inner, (last - first) * inner


def _read_into(descriptor: int, data: memoryview, begin: int) -> None:
    stream = io.FileIO(descriptor, closefd=False)
    stream.seek(begin)
    while data:
        count = stream.readinto(data)
        if not count:
            raise ValueError("it is truncated")
        data = data[count:]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, stored as a tensor in a file.

    Attributes:
        file: the file.
        name: its name in the file.
        offsets: the start of the box in each dimension, in elements.
        sizes: its size in each dimension.
        dtype: its dtype.
    """

    file: TensorFile
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in one or more files.

    Attributes:
        stored_dtype: the dtype in the files.
        stored_shape: the shape of the whole tensor in the files.
        pieces: the boxes that cover it.
        is_complex: whether the files hold the real view of a complex tensor, with a last dimension
            of 2.
    """

    stored_dtype: torch.dtype
    stored_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    is_complex: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that `read` returns."""
        return _COMPLEX[self.stored_dtype] if self.is_complex else self.stored_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that `read` returns."""
        return self.stored_shape[:-1] if self.is_complex else self.stored_shape

    def read(self) -> Tensor:
        """Read the tensor into CPU memory.

        Raises:
            CheckpointError: it cannot be read.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(tensor)
        return tensor

    def read_into(self, target: Tensor) -> None:
        """Read the tensor into a plain one of the same shape, on any device and of any dtype, a
        block at a time.

        Raises:
            CheckpointError: it cannot be read.
        """
        real = torch.view_as_real(target) if self.is_complex else target
        for piece in self.pieces:
            box = tuple(
                slice(start, start + size)
                for start, size in zip(piece.offsets, piece.sizes, strict=True)
            )
            copy_piece(real[box], piece, (0,) * len(box))

    def as_complex(self) -> StoredTensor:
        """Return the complex tensor of which this is the real view.

        Raises:
            ValueError: it cannot be a real view.
        """
        _check_real_view(self.stored_dtype, self.stored_shape)
        return replace(self, is_complex=True)


def copy_piece(target: Tensor, piece: Piece, offsets: Sequence[int]) -> None:
    """Read the box of a piece that begins at `offsets` in it and has the shape of `target` into
    `target`.

    Raises:
        CheckpointError: it cannot be read.
    """
    for block in blocks(target.shape, target.element_size()):
        filled = (*block, *(slice(0, size) for size in target.shape[len(block) :]))
        region = tuple(
            slice(begin + part.start, begin + part.stop)
            for begin, part in zip(offsets, filled, strict=True)
        )
        _copy_region(target[block], piece, region)


def _copy_region(target: Tensor, piece: Piece, region: tuple[slice, ...]) -> None:
    # A separate function, so that a block is freed before the next one is read.
    block = piece.file.read(piece.name, region)
    if (block.shape, block.dtype) != (target.shape, piece.dtype):
        got = f"{block.dtype} of shape {list(block.shape)} in {piece.name[:80]!r}"
        raise piece.file.invalid_content(
            f"expected {piece.dtype} of shape {list(target.shape)}, got {got}"
        )
    target.copy_(block)


def _pack(node: object, path: _Path, tensors: dict[str, Tensor], allow_dtensor: bool) -> Json:
    if len(path) > MAX_DEPTH:
        raise ConfigError(
            _path_text(path[:4]), f"at most {MAX_DEPTH} levels of nesting", found="deeper nesting"
        )
    kind = type(node)
    if isinstance(node, Tensor):
        return _pack_tensor(node, path, tensors, allow_dtensor)
    if isinstance(node, dict):
        return _pack_dict(node, path, tensors, allow_dtensor)
    if isinstance(node, (list, tuple)) and kind in (list, tuple):
        items = [
            _pack(item, (*path, index), tensors, allow_dtensor) for index, item in enumerate(node)
        ]
        return items if kind is list else {"$tuple": items}
    # Subclasses (numpy.float64, IntEnum, …) are refused: `unpack` would return another type.
    if isinstance(node, float) and kind is float:
        return node if math.isfinite(node) else {"$float": repr(node)}
    if node is None or kind in (bool, str) or (isinstance(node, int) and _is_storable_int(node)):
        return node
    raise _unsupported_error(path, node)


def _pack_tensor(
    tensor: Tensor, path: _Path, tensors: dict[str, Tensor], allow_dtensor: bool
) -> Json:
    detached = check_storable(tensor, _path_text(path), allow_dtensor)
    key = str(len(tensors))
    tensors[key] = (
        torch.view_as_real(detached.resolve_conj()) if detached.is_complex() else detached
    )
    return {"$complex" if detached.is_complex() else "$tensor": key}


def _pack_dict(
    node: dict[Any, object], path: _Path, tensors: dict[str, Tensor], allow_dtensor: bool
) -> Json:
    for key in node:
        if type(key) is not str and not _is_storable_int(key):
            raise ConfigError(
                _path_text(path),
                "keys of type str or int",
                found=f"the key {key!r} of {_type_name(key)}",
            )
    items = [
        (key, _pack(value, (*path, key), tensors, allow_dtensor)) for key, value in node.items()
    ]
    if all(type(key) is str and not key.startswith("$") for key in node):
        return dict(items)
    return {"$items": [[key, value] for key, value in items]}


def _is_storable_int(number: object) -> bool:
    return type(number) is int and number.bit_length() <= _MAX_INT_BITS


def _unsupported_error(path: _Path, node: object) -> ConfigError:
    expected = "None, bool, int, float, str, a tensor, or a list, tuple or dict of these"
    if type(node) is int:
        return ConfigError(
            _path_text(path),
            f"an integer of at most {_MAX_INT_BITS} bits",
            found=f"{node.bit_length()} bits",
        )
    hint = ""
    if type(node).__module__ == "numpy":
        hint = "Use .item() for a NumPy scalar and torch.from_numpy() for an array."
    return ConfigError(
        _path_text(path), expected, found=f"an object of {_type_name(node)}", hint=hint
    )


def _type_name(obj: object) -> str:
    return f"type {type(obj).__module__}.{type(obj).__qualname__}"


def _path_text(path: _Path) -> str:
    return ".".join(map(str, path)) or "the tree"


def _unpack(value: Json, path: _Path, unused: dict[str, Tensor | StoredTensor]) -> Any:
    if len(path) > MAX_DEPTH:
        raise ValueError(f"{_path_text(path[:4])}: more than {MAX_DEPTH} levels of nesting")
    if isinstance(value, list):
        return [_unpack(item, (*path, index), unused) for index, item in enumerate(value)]
    if isinstance(value, dict):
        if any(not isinstance(key, str) or key.startswith("$") for key in value):
            return _unpack_tagged(value, path, unused)
        return {key: _unpack(item, (*path, key), unused) for key, item in value.items()}
    if (
        value is None
        or type(value) in (bool, int, str)
        or (type(value) is float and math.isfinite(value))
    ):
        return value
    raise ValueError(f"{_path_text(path)}: {value!r} is not valid in a packed tree")


def _unpack_tagged(
    value: dict[Any, Json], path: _Path, unused: dict[str, Tensor | StoredTensor]
) -> Any:
    (tag, content), *more = value.items()
    if not more and tag == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if not more and tag == "$tuple" and isinstance(content, list):
        return tuple(_unpack(content, path, unused))
    if not more and tag == "$items" and isinstance(content, list):
        return _unpack_items(content, path, unused)
    if not more and tag in ("$tensor", "$complex") and isinstance(content, str):
        return _unpack_tensor(tag, content, path, unused)
    raise ValueError(f"{_path_text(path)}: {str(value)[:80]} is not valid in a packed tree")


def _unpack_items(
    content: list[Json], path: _Path, unused: dict[str, Tensor | StoredTensor]
) -> dict[str | int, Any]:
    tree: dict[str | int, Any] = {}
    for pair in content:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or type(pair[0]) not in (str, int)
            or pair[0] in tree
        ):
            raise ValueError(
                f"{_path_text(path)}: {str(pair)[:80]} is not a new key with its value"
            )
        tree[pair[0]] = _unpack(pair[1], (*path, pair[0]), unused)
    return tree


def _unpack_tensor(
    tag: str, key: str, path: _Path, unused: dict[str, Tensor | StoredTensor]
) -> Tensor | StoredTensor:
    if key not in unused:
        raise ValueError(f"{_path_text(path)}: tensor {key[:80]!r} is missing, or used twice")
    tensor = unused.pop(key)
    if tag == "$tensor":
        return tensor
    try:
        if isinstance(tensor, StoredTensor):
            return tensor.as_complex()
        _check_real_view(tensor.dtype, tensor.shape)
    except ValueError as error:
        raise ValueError(f"{_path_text(path)}: {error}") from None
    return torch.view_as_complex(tensor)


def _check_real_view(dtype: torch.dtype, shape: Sequence[int]) -> None:
    if dtype not in _COMPLEX or tuple(shape[-1:]) != (2,):
        raise ValueError(f"{dtype} of shape {tuple(shape)} is not a complex tensor")
