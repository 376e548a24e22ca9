"""A tree of plain values and tensors as JSON beside safetensors, and back, one tensor after the other."""

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

from .errors import CheckpointError, ConfigError

__all__ = [
    "MAX_DEPTH",
    "MAX_JSON",
    "Entry",
    "Json",
    "Opened",
    "Piece",
    "StoredTensor",
    "TensorFile",
    "Tree",
    "blocks",
    "check_storable",
    "check_tensors",
    "code_of",
    "copy_piece",
    "cpu_copy",
    "dtype_of",
    "from_json",
    "is_storable_name",
    "pack",
    "to_json",
    "unpack",
    "write_bytes",
    "write_tensors",
]

# Written with Sequence and Mapping because they are covariant: a dict[str, Tensor] is a Tree to the type checker.
Tree: TypeAlias = None | bool | int | float | str | Tensor | Sequence["Tree"] | Mapping[Any, "Tree"]
Json: TypeAlias = Any

MAX_DEPTH = 64
"""Levels of nesting that a tree may have; more is taken for a list that contains itself, or for an attack."""

MAX_JSON = 64 * 1024**2
"""Bytes that the plain values of one tree may take as JSON; some ten million numbers, which belong in a tensor."""

# Python itself refuses to turn integers of more than 4300 decimal digits (14 000 bits) into text and back.
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
# torch can write and read numbers of these as they are; safetensors has one kind of complex numbers, of 64 bits.
_STORED = {**_REAL, "C64": torch.complex64}
_CODES = {dtype: code for code, dtype in _STORED.items()}

_BLOCK = 16 * 2**20
"""Bytes of a tensor that are copied at a time, where it cannot be written from or read to its place directly."""

_MOST_OPEN = 64
"""Files of one checkpoint that are open at a time; a process may often have no more than 1024 of all kinds."""


def pack(tree: Tree, spread: bool = False) -> tuple[Json, dict[str, Tensor]]:
    """Take a tree apart into a JSON value and the tensors that it refers to.

    A tree is None, a bool, int, float, str or tensor, or a list, tuple or dict of trees; keys are str or int.
    Tuples, integer keys, the order of keys, NaN, infinities and -0.0 come back from `unpack` as they were. Every
    dict comes back as a dict, whatever its subclass, and every parameter as a tensor without gradient. Tensors come
    back on the CPU; two that shared memory no longer do.

    Args:
        tree: the tree.
        spread: whether tensors may be a DTensor, spread over workers.

    Returns:
        the JSON value, and all tensors without gradients, of types that safetensors stores (a complex one as its real
        view, with a last dimension of 2). They are those of the tree, not copies.

    Raises:
        ConfigError: naming the place in the tree, for anything else that is found there.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(tree, (), tensors, spread), tensors


def unpack(value: Json, tensors: Mapping[str, Tensor | StoredTensor]) -> Any:
    """The tree that `pack` took apart; nothing in `value` is ever executed or imported.

    Raises:
        ValueError: `value` is not what `pack` makes, or does not use each of `tensors` exactly once.
    """
    unused = dict(tensors)
    tree = _unpack(value, (), unused)
    if unused:
        raise ValueError(f"tensors that the tree does not use: {', '.join(sorted(unused)[:5])}")
    return tree


def check_storable(tensor: object, where: str, spread: bool = False) -> Tensor:
    """`tensor` without its gradient.

    Args:
        tensor: what is to be stored.
        where: its place, for the error.
        spread: whether it may be a DTensor.

    Raises:
        ConfigError: naming `where`, if it is no plain dense tensor with values, or of a type that cannot be stored.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(where, "a tensor", found=f"an object of {_type_name(tensor)}")
    found = tensor.detach()
    plain = type(tensor) in (Tensor, nn.Parameter) or (spread and hasattr(found, "to_local"))
    if not plain or tensor.layout is not torch.strided or tensor.is_meta:
        kind = f"a {tensor.layout} {type(tensor).__name__} on {tensor.device}"
        hint = "Turn it into one first: full_tensor() for a DTensor, to_dense() for a sparse tensor."
        raise ConfigError(where, "a plain dense tensor", found=kind, hint=hint)
    if tensor.dtype not in _CODES and tensor.dtype not in _COMPLEX.values():
        raise ConfigError(where, "a tensor of a type that safetensors stores", found=f"a tensor of {tensor.dtype}")
    return found


def to_json(argument: str, value: Json, indent: int | None = None) -> bytes:
    """The ASCII text of a packed value; the same value always gives the same text.

    Raises:
        ConfigError: naming `argument`, if it takes more than MAX_JSON bytes.
    """
    data = json.dumps(value, allow_nan=False, indent=indent).encode("ascii")
    if len(data) > MAX_JSON:
        hint = "Put long rows of numbers into tensors."
        raise ConfigError(
            argument, f"at most {MAX_JSON:,} bytes of plain values", found=f"{len(data):,} bytes", hint=hint
        )
    return data


def from_json(data: bytes) -> Json:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or too long or too deeply nested to be one of ours.
    """
    if len(data) > MAX_JSON:
        raise ValueError(f"expected at most {MAX_JSON:,} bytes of JSON, got {len(data):,}")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_storable_name(name: str) -> bool:
    """Whether a tensor of this name can stand in a safetensors file."""
    # It writes names in UTF-8, which has no lone surrogates, and keeps one name for itself.
    return name != "__metadata__" and not any("\ud800" <= letter <= "\udfff" for letter in name)


# --- files of tensors ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """What is known of a file: its size in bytes and the SHA-256 of its content, in hexadecimal digits."""

    size: int
    sha256: str


def write_bytes(path: Path, data: bytes) -> Entry:
    """Write a new file.

    Raises:
        OSError: it could not be written; a part of it may be there.
    """
    with path.open("xb") as stream:
        stream.write(data)
    return Entry(len(data), hashlib.sha256(data).hexdigest())


def check_tensors(argument: str, tensors: Mapping[str, Tensor]) -> None:
    """See that a safetensors file can hold `tensors`, which are `check_storable`.

    Raises:
        ConfigError: naming `argument`, for a name or a type that safetensors does not store.
    """
    for name, tensor in tensors.items():
        if not is_storable_name(name):
            raise ConfigError(argument, "names that safetensors can store", name)
        if tensor.dtype not in _CODES:
            raise ConfigError(argument, "tensors of types that safetensors stores", found=str(tensor.dtype))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], flush: bool = False) -> Entry:
    """Write a new safetensors file, one tensor after the other, with its checksum on the way.

    The same tensors always give the same bytes. Beside them no more than 16 MiB of memory are used, whatever their
    size and wherever they are; one row of a tensor in an unusual order of dimensions may need more.

    Args:
        path: where there is no file yet.
        tensors: plain dense ones on any device, see `check_tensors`.
        flush: whether the content is flushed to the device.

    Raises:
        OSError: it could not be written; a part of it may be there.
    """
    # Wide types first, so that each tensor begins at a multiple of its width: other readers map files into memory.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    digest, size = hashlib.sha256(), 0
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
    header: dict[str, Json] = {"__metadata__": {"format": "pt"}}  # other readers of the format ask for this note
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield from _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    direct = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if direct:
        yield _raw(tensor)
        return
    for block in blocks(tensor.shape, tensor.element_size()):
        yield _raw(cpu_copy(tensor[block]))


def cpu_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in the host's memory, wherever and in whatever strides `tensor` is held."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _raw(tensor: Tensor) -> memoryview:
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def blocks(shape: Sequence[int], width: int, most: int = _BLOCK) -> Iterator[tuple[slice, ...]]:
    """Cut a tensor into blocks of at most `most` bytes that follow each other in memory, in that order.

    Args:
        shape: of the tensor.
        width: bytes of one element.
        most: bytes of a block; a single element may be larger.
    """
    if not shape:
        yield ()
        return
    row = width * math.prod(shape[1:])
    if row <= most:
        rows = max(1, most // max(1, row))
        yield from ((slice(start, min(start + rows, shape[0])),) for start in range(0, shape[0], rows))
        return
    for index in range(shape[0]):
        yield from ((slice(index, index + 1), *inner) for inner in blocks(shape[1:], width, most))


def dtype_of(code: Json) -> torch.dtype:
    """The type that safetensors calls `code`.

    Raises:
        ValueError: there is none, here at least.
    """
    if not isinstance(code, str) or code not in _STORED:
        raise ValueError(f"a tensor of the unknown type {str(code)[:20]}")
    return _STORED[code]


def code_of(dtype: torch.dtype) -> str:
    """What safetensors calls a type that it stores."""
    return _CODES[dtype]


Opened: TypeAlias = deque["weakref.ref[TensorFile]"]
"""Those of the files that are read together which are open, the oldest first."""


class TensorFile:
    """A safetensors file, opened when something is first asked for; nothing of it is read before it is needed.

    Args:
        path: where it is.
        name: what errors call it.
        together: of files that are read together; of many, only those opened last stay open.
    """

    def __init__(self, path: Path, name: str, together: Opened | None = None) -> None:
        self.path, self.name = path, name
        self._together: Opened = deque() if together is None else together
        self._places: dict[str, _Place] = {}
        self._descriptor: int | None = None
        self._close: Callable[[], object] = int

    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors in it, in the order of their names.

        Raises:
            ValueError: it is no safetensors file, or has tensors of a type that torch has not.
            OSError: it cannot be read.
        """
        self._open()
        return {name: self._stored(name, place) for name, place in sorted(self._places.items())}

    def _stored(self, name: str, place: _Place) -> StoredTensor:
        piece = Piece(self, name, (0,) * len(place.shape), place.shape, place.dtype)
        return StoredTensor(place.dtype, place.shape, (piece,))

    def read(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, on the CPU; no more than that is read.

        Args:
            name: of the tensor.
            region: from where to where, for each dimension.

        Raises:
            CheckpointError: it cannot be read, or makes no sense.
        """
        try:
            descriptor = self._open()
            if name not in self._places:
                raise ValueError(f"there is no tensor {name[:80]!r}")
            return _read(descriptor, self._places[name], region)
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{self.path.parent}: {self.name}: cannot be read: {reason}") from error
        except ValueError as error:
            raise self.senseless(error) from error

    def senseless(self, what: object) -> CheckpointError:
        """The error for content that is not what it should be."""
        return CheckpointError(f"{self.path.parent}: {self.name}: its content makes no sense: {str(what)[:200]}")

    def _open(self) -> int:
        if self._descriptor is None:
            descriptor = self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self._close = weakref.finalize(self, os.close, descriptor)
            self._together.append(weakref.ref(self))  # a cycle would keep files open until it is collected
            if len(self._together) > _MOST_OPEN and (oldest := self._together.popleft()()) is not None:
                oldest._close()
                oldest._descriptor = None
            self._places = self._places or _places(self.path, descriptor)
        return self._descriptor


@dataclass(frozen=True)
class _Place:
    """Where a tensor is in a file, and what it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def _places(path: Path, descriptor: int) -> dict[str, _Place]:
    """What the header of a safetensors file says; the library has found it to be in order.

    The library tells no places, and reads a whole tensor for any part of it; mapped into memory, a file that is cut off
    or a device that fails would end the process with a signal.

    Raises:
        ValueError: it is no safetensors file.
    """
    try:
        with safe_open(path, "pt"):
            pass
    except OSError:
        raise
    except Exception as error:  # it raises as many kinds of errors as it has checks
        raise ValueError(str(error) or type(error).__name__) from error
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = json.loads(os.pread(descriptor, length, 8))
    end = os.fstat(descriptor).st_size
    return {name: _place(told, 8 + length, end) for name, told in header.items() if name != "__metadata__"}


def _place(told: Json, start: int, end: int) -> _Place:
    dtype, shape = dtype_of(told["dtype"]), tuple(told["shape"])
    begin, stop = (start + offset for offset in told["data_offsets"])
    if not start <= begin <= stop <= end or stop - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor that is not where the header says")
    return _Place(dtype, shape, begin)


def _read(descriptor: int, place: _Place, region: tuple[slice, ...]) -> Tensor:
    bounds = [(part.start, part.stop) for part in region]
    if len(bounds) != len(place.shape) or any(
        not 0 <= start <= stop <= size for (start, stop), size in zip(bounds, place.shape, strict=True)
    ):
        raise ValueError(f"a tensor of shape {list(place.shape)} has no part {bounds}")
    found = torch.empty([stop - start for start, stop in bounds], dtype=place.dtype, device="cpu")
    data, done = _raw(found), 0
    for offset, size in _runs(place.shape, bounds):
        begin, size = place.begin + offset * place.dtype.itemsize, size * place.dtype.itemsize
        _read_into(descriptor, data[done : done + size], begin)
        done += size
    return found


def _runs(shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where the elements of a part of a tensor are that follow each other in memory: (the first of them, how many)."""
    whole = len(shape)  # from this dimension on the part has everything
    while whole and bounds[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    inner = math.prod(shape[whole:])
    if not whole:
        yield 0, inner
        return
    first, last = bounds[whole - 1]
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(whole)]
    for place in itertools.product(*(range(start, stop) for start, stop in bounds[: whole - 1])):
        outer = sum(index * stride for index, stride in zip(place, strides, strict=False))
        yield outer + first * inner, (last - first) * inner


def _read_into(descriptor: int, data: memoryview, begin: int) -> None:
    stream = io.FileIO(descriptor, closefd=False)
    stream.seek(begin)
    while data:
        count = stream.readinto(data)
        if not count:
            raise ValueError("it is cut off")
        data = data[count:]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, which is a tensor by itself in a file.

    Attributes:
        file: that file.
        name: under which it is there.
        offsets: where the box begins, in elements, for each dimension.
        sizes: its extent, for each dimension.
        dtype: of its numbers.
    """

    file: TensorFile
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is in files.

    Attributes:
        stored_dtype: of the numbers in the files.
        stored_shape: of the whole, as it is in the files.
        pieces: which make it up.
        is_complex: whether the files have the real view of a complex tensor, with a last dimension of 2.
    """

    stored_dtype: torch.dtype
    stored_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    is_complex: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that is read."""
        return _COMPLEX[self.stored_dtype] if self.is_complex else self.stored_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that is read."""
        return self.stored_shape[:-1] if self.is_complex else self.stored_shape

    def read(self) -> Tensor:
        """The tensor, on the CPU.

        Raises:
            CheckpointError: it cannot be read.
        """
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(found)
        return found

    def read_into(self, target: Tensor) -> None:
        """Read the whole into a plain tensor of the same shape, on any device and of any type; a block at a time.

        Raises:
            CheckpointError: it cannot be read.
        """
        real = torch.view_as_real(target) if self.is_complex else target
        for piece in self.pieces:
            box = tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.sizes, strict=True))
            copy_piece(real[box], piece, (0,) * len(box))

    def as_complex(self) -> StoredTensor:
        """The complex tensor that this is the real view of.

        Raises:
            ValueError: it is none.
        """
        _check_real_view(self.stored_dtype, self.stored_shape)
        return replace(self, is_complex=True)


def copy_piece(target: Tensor, piece: Piece, offsets: Sequence[int]) -> None:
    """Read the part of a piece that begins at `offsets` in it, and is as large as `target`, into `target`.

    Raises:
        CheckpointError: it cannot be read.
    """
    for block in blocks(target.shape, target.element_size()):
        filled = (*block, *(slice(0, size) for size in target.shape[len(block) :]))
        region = tuple(
            slice(begin + part.start, begin + part.stop) for begin, part in zip(offsets, filled, strict=True)
        )
        _copy_region(target[block], piece, region)


def _copy_region(target: Tensor, piece: Piece, region: tuple[slice, ...]) -> None:
    # A function of its own, so that a block is gone before the next one is read.
    found = piece.file.read(piece.name, region)
    if (found.shape, found.dtype) != (target.shape, piece.dtype):
        got = f"{found.dtype} of shape {list(found.shape)} in {piece.name[:80]!r}"
        raise piece.file.senseless(f"expected {piece.dtype} of shape {list(target.shape)}, got {got}")
    target.copy_(found)


def _pack(node: object, path: tuple[object, ...], tensors: dict[str, Tensor], spread: bool) -> Json:
    if len(path) > MAX_DEPTH:
        raise ConfigError(_spell(path[:4]), f"at most {MAX_DEPTH} levels of nesting", found="deeper nesting")
    kind = type(node)
    if isinstance(node, Tensor):
        return _pack_tensor(node, path, tensors, spread)
    if isinstance(node, dict):
        return _pack_dict(node, path, tensors, spread)
    if isinstance(node, (list, tuple)) and kind in (list, tuple):
        items = [_pack(item, (*path, index), tensors, spread) for index, item in enumerate(node)]
        return items if kind is list else {"$tuple": items}
    # Subclasses (numpy.float64, IntEnum, …) are refused, because they would come back as something else.
    if isinstance(node, float) and kind is float:
        return node if math.isfinite(node) else {"$float": repr(node)}
    if node is None or kind in (bool, str) or (isinstance(node, int) and _fits(node)):
        return node
    raise _refused(path, node)


def _pack_tensor(tensor: Tensor, path: tuple[object, ...], tensors: dict[str, Tensor], spread: bool) -> Json:
    found, key = check_storable(tensor, _spell(path), spread), str(len(tensors))
    tensors[key] = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
    return {"$complex" if found.is_complex() else "$tensor": key}


def _pack_dict(node: dict[Any, object], path: tuple[object, ...], tensors: dict[str, Tensor], spread: bool) -> Json:
    for key in node:
        if type(key) is not str and not _fits(key):
            raise ConfigError(_spell(path), "keys of type str or int", found=f"the key {key!r} of {_type_name(key)}")
    items = [(key, _pack(value, (*path, key), tensors, spread)) for key, value in node.items()]
    if all(type(key) is str and not key.startswith("$") for key in node):
        return dict(items)
    return {"$items": [[key, value] for key, value in items]}


def _fits(number: object) -> bool:
    return type(number) is int and number.bit_length() <= _MAX_INT_BITS


def _refused(path: tuple[object, ...], node: object) -> ConfigError:
    expected = "None, bool, int, float, str, a tensor, or a list, tuple or dict of these"
    if type(node) is int:
        return ConfigError(
            _spell(path), f"an integer of at most {_MAX_INT_BITS} bits", found=f"{node.bit_length()} bits"
        )
    hint = ""
    if type(node).__module__ == "numpy":
        hint = "Use .item() for a NumPy scalar and torch.from_numpy() for an array."
    return ConfigError(_spell(path), expected, found=f"an object of {_type_name(node)}", hint=hint)


def _type_name(obj: object) -> str:
    return f"type {type(obj).__module__}.{type(obj).__qualname__}"


def _spell(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path)) or "the tree"


def _unpack(value: Json, path: tuple[object, ...], unused: dict[str, Tensor | StoredTensor]) -> Any:
    if len(path) > MAX_DEPTH:
        raise ValueError(f"{_spell(path[:4])}: more than {MAX_DEPTH} levels of nesting")
    if isinstance(value, list):
        return [_unpack(item, (*path, index), unused) for index, item in enumerate(value)]
    if isinstance(value, dict):
        if any(not isinstance(key, str) or key.startswith("$") for key in value):
            return _unpack_tagged(value, path, unused)
        return {key: _unpack(item, (*path, key), unused) for key, item in value.items()}
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    raise ValueError(f"{_spell(path)}: {value!r} has no place in a packed tree")


def _unpack_tagged(value: dict[Any, Json], path: tuple[object, ...], unused: dict[str, Tensor | StoredTensor]) -> Any:
    (tag, content), *more = value.items()
    if not more and tag == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if not more and tag == "$tuple" and isinstance(content, list):
        return tuple(_unpack(content, path, unused))
    if not more and tag == "$items" and isinstance(content, list):
        return _unpack_items(content, path, unused)
    if not more and tag in ("$tensor", "$complex") and isinstance(content, str):
        return _unpack_tensor(tag, content, path, unused)
    raise ValueError(f"{_spell(path)}: {str(value)[:80]} has no meaning in a packed tree")


def _unpack_items(
    content: list[Json], path: tuple[object, ...], unused: dict[str, Tensor | StoredTensor]
) -> dict[str | int, Any]:
    tree: dict[str | int, Any] = {}
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int) or pair[0] in tree:
            raise ValueError(f"{_spell(path)}: {str(pair)[:80]} is not a new key with its value")
        tree[pair[0]] = _unpack(pair[1], (*path, pair[0]), unused)
    return tree


def _unpack_tensor(
    tag: str, key: str, path: tuple[object, ...], unused: dict[str, Tensor | StoredTensor]
) -> Tensor | StoredTensor:
    if key not in unused:
        raise ValueError(f"{_spell(path)}: tensor {key[:80]!r} is missing, or used twice")
    tensor = unused.pop(key)
    if tag == "$tensor":
        return tensor
    try:
        if isinstance(tensor, StoredTensor):
            return tensor.as_complex()
        _check_real_view(tensor.dtype, tensor.shape)
    except ValueError as error:
        raise ValueError(f"{_spell(path)}: {error}") from None
    return torch.view_as_complex(tensor)


def _check_real_view(dtype: torch.dtype, shape: Sequence[int]) -> None:
    if dtype not in _COMPLEX or tuple(shape[-1:]) != (2,):
        raise ValueError(f"{dtype} of shape {tuple(shape)} is no complex tensor")
