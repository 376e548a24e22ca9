"""What is compared of a sample of a data set: its values, the same in every process where the
sample is the same.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import logging
import math
import os
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..parallel.shards import mix

_log = logging.getLogger(__name__)


class Leaf(NamedTuple):
    """What is compared of a tensor, an array, or any other value in a sample.

    Attributes:
        kind: type and shape.
        bits: a checksum of the value.
        sketch: projections of its numbers and, last, their norm, where rounding may make them
            differ; else None.
        tolerance: the difference relative to the norm that rounding may make.
        text: a single value, for messages; "" for the numbers of a tensor or an array.
        is_path: whether it is the path of a file.
        of_object: whether it is in an attribute of an object that is no container.
    """

    kind: str
    bits: int
    sketch: tuple[float, ...] | None = None
    tolerance: float = 0.0
    text: str = ""
    is_path: bool = False
    of_object: bool = False


Digest = dict[str, Leaf]
"""The leaves of a sample by their place in it, such as "[0]" or "['label']"; "" for a sample that
is one leaf.
"""

# A sample may be an object of any size, even one that contains itself: so many values are compared,
# so many are looked at to count the others, and so deep.
_MAX_LEAVES = 64
_MAX_VISITED = 2000
_MAX_DEPTH = 8
_MAX_BYTES = 1 << 28  # of an object that is read as an array
_MAX_VALUES = 1 << 22  # of a larger tensor, so many values at equal distances are compared


def digest_of(sample: Any) -> Digest:
    """Return the digest of a sample: the same in every process for the same values.

    Values are compared by what they are, not where: of objects of any other class the attributes
    count, and addresses in a `repr` do not. Of paths of files only the last part counts, as hosts
    may keep the files in other folders.
    """
    digest: Digest = {}
    rest = 0
    try:
        # an object may lead to all others of the program
        for path, leaf in islice(_leaves(sample, "", 0), _MAX_VISITED):
            if len(digest) < _MAX_LEAVES:
                digest[path] = leaf
            elif not leaf.of_object:  # one of an object may be refused or not, see `differences`
                rest = mix(
                    (
                        rest,
                        zlib.crc32(path.encode(errors="replace")),
                        zlib.crc32(leaf.kind.encode()),
                        leaf.bits,
                    )
                )
    # of a class that cannot be looked into; what was found until then is compared
    except Exception:
        _log.debug("a sample cannot be compared as a whole", exc_info=True)
    if rest:
        digest["…"] = Leaf("further values", rest, text="further values")
    return digest


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Leaf]]:
    leaf = _leaf(value)
    if leaf is not None:
        yield path, leaf
    elif depth == _MAX_DEPTH:
        yield path, _mark(type(value).__name__)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from _leaves(value[key], f"{path}[{_text(key)}]", depth + 1)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, item in zip(value._fields, value, strict=True):
            yield from _leaves(item, f"{path}.{name}", depth + 1)
    elif isinstance(value, (tuple, list)):
        yield path, _mark(f"{type(value).__name__} of {len(value)}")
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{number}]", depth + 1)
    elif isinstance(value, AbstractSet):
        # its order differs among processes
        kind = f"{type(value).__name__} of {len(value)}"
        yield path, Leaf(kind, mix(sorted(map(_bits_of_item, value))), text=kind)
    elif isinstance(value, torch.Tensor):
        yield from _leaves_of_tensor(value, path, depth)
    else:
        yield from _leaves_of_object(value, path, depth)


def _mark(kind: str, bits: int = 0) -> Leaf:
    """Return the leaf that says what a container or an object is, apart from what it has."""
    return Leaf(kind, bits, text=kind)


def _bits_of_item(item: Any) -> int:
    leaves = [
        (path, leaf.kind, leaf.bits) for path, leaf in digest_of(item).items() if not leaf.of_object
    ]
    return zlib.crc32(repr(leaves).encode(errors="replace"))


_PLAIN = (
    *(str, bytes, bytearray, int, bool, type(None), complex, range, slice, type(Ellipsis)),
    *(
        decimal.Decimal,
        fractions.Fraction,
        datetime.date,
        datetime.time,
        datetime.timedelta,
        uuid.UUID,
    ),
    *(torch.dtype, torch.Size, np.dtype),
)


def _leaf(value: Any) -> Leaf | None:
    """Return a value as a leaf; None for one that consists of others, or of which only the class
    says what it is.
    """
    if isinstance(value, enum.Enum):
        return Leaf(type(value).__name__, zlib.crc32(value.name.encode()), text=value.name)
    if isinstance(value, os.PathLike):
        path = os.fsdecode(value)
        return Leaf(
            "path",
            zlib.crc32(_last_part(path).encode(errors="replace")),
            text=_shown(path),
            is_path=True,
        )
    if type(value) is float:
        number = torch.tensor([value], dtype=torch.float64, device="cpu")
        return _leaf_of_numbers("float", number)._replace(text=repr(value))
    if isinstance(value, str):
        bits = zlib.crc32(_text(value).encode(errors="replace"))
        return Leaf("str", bits, text=_shown(value), is_path=_is_path(value))
    if isinstance(value, _PLAIN):
        text = repr(value)
        return Leaf(
            type(value).__name__, zlib.crc32(text.encode(errors="replace")), text=_short(text)
        )
    if type(value) in (list, tuple) and value:
        return _leaf_of_list(value)
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided and not value.is_quantized and not value.is_nested
        return _leaf_of_tensor(value) if strided and value.device.type != "meta" else None
    array = value if isinstance(value, (np.ndarray, np.generic)) else _as_array(value)
    if array is None or (isinstance(array, np.ndarray) and array.dtype.hasobject):
        return None
    return _leaf_of_array(np.asarray(array), "" if array is value else f"{type(value).__name__} ")


def _leaf_of_list(values: Sequence[Any]) -> Leaf | None:
    """Return a list of numbers as one leaf; None for a list of anything else."""
    types = set(map(type, values))
    if types == {int}:
        text = repr(list(values))
        return Leaf(f"list of {len(values)} int", zlib.crc32(text.encode()), text=_short(text))
    if types <= {int, float}:
        numbers = torch.tensor(list(map(float, values)), dtype=torch.float64, device="cpu")
        return _leaf_of_numbers(f"list of {len(values)} float", numbers)._replace(
            text=_shown(values[:8])
        )
    return None


def _text(value: Any) -> str:
    """Return a value for a comparison: of what looks like the path of a file, only its last
    part.
    """
    if isinstance(value, str) and value.startswith(os.sep) and "\n" not in value:
        value = _last_part(value)
    return _without_addresses(repr(value))


def _last_part(path: str) -> str:
    return path.rpartition(os.sep)[2]


@lru_cache(maxsize=256)
def _is_folder(path: str) -> bool:
    return Path(path).is_dir()


def _is_path(value: str) -> bool:
    """Return whether a string is the path of a file: the first folder in it is one of this host.

    Labels begin with a slash too, such as /m/01yrx of Open Images.
    """
    first, slash, _ = value[1:].partition(os.sep)
    return (
        value.startswith(os.sep)
        and slash != ""
        and "\n" not in value
        and _is_folder(os.sep + first)
    )


_SHOWN = 60  # characters of a value in a message


def _shown(value: Any) -> str:
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _without_addresses(text: str) -> str:
    return re.sub(r"\b0x[0-9a-fA-F]+", "0x", text)


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return what offers itself as an array, such as an image of PIL, or a column of pandas; None
    for the rest.
    """
    if isinstance(value, type) or not (
        hasattr(value, "__array_interface__") or hasattr(value, "__array__")
    ):
        return None
    if getattr(value, "nbytes", 0) > _MAX_BYTES:  # such as a whole file that is not in memory
        return None
    try:
        return np.asarray(value)
    except Exception:  # of any library; its attributes are compared then
        return None


def _leaf_of_array(array: np.ndarray[Any, Any], prefix: str) -> Leaf:
    kind = f"{prefix}array {array.dtype} {list(array.shape)}"
    if array.dtype.kind in "fiubc":
        native = np.ascontiguousarray(
            array.astype(array.dtype.newbyteorder("="), copy=False)
        ).reshape(-1)
        if native.dtype in (np.float16, np.float32, np.float64, np.uint8):
            # a copy where it cannot be written to, of which torch would warn
            return _leaf_of_numbers(
                kind, torch.from_numpy(native if native.flags.writeable else native.copy())
            )
        return Leaf(
            kind,
            zlib.crc32(native.view(np.uint8).data),
            text="" if array.size > 1 else str(array.tolist()),
        )
    # of texts, dates and records
    return Leaf(kind, zlib.crc32(np.ascontiguousarray(array).tobytes()), text=_short(repr(array)))


def _leaf_of_tensor(tensor: torch.Tensor) -> Leaf:
    plain = tensor.detach().as_subclass(torch.Tensor)
    kind = f"tensor {str(plain.dtype).removeprefix('torch.')} {list(plain.shape)}"
    plain = plain.resolve_conj().resolve_neg()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
    return _leaf_of_numbers(kind, flat)


def _leaf_of_numbers(kind: str, flat: torch.Tensor) -> Leaf:
    if flat.numel() > _MAX_VALUES:
        flat = flat[:: -(-flat.numel() // _MAX_VALUES)]
    flat = flat.cpu().contiguous()
    text = "" if flat.numel() > 1 else str(flat.tolist())
    bits = zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
    tolerance = _tolerance(flat)
    return Leaf(kind, bits, _sketch(flat) if tolerance else None, tolerance, text)


def _tolerance(flat: torch.Tensor) -> float:
    """Return the difference, relative to the norm, that other processors and libraries may make of
    the same sample.
    """
    if flat.dtype is torch.uint8:  # decoders of JPEG round differently, by 1 or 2 of 255
        return 0.02 if flat.numel() >= 1024 else 0.0
    if not flat.is_floating_point() or not flat.numel():
        return 0.0
    if flat.element_size() == 8:
        return 1e-9
    if flat.element_size() == 4:
        return 1e-5 if flat.numel() >= 16 else 1e-6
    return 4 * torch.finfo(flat.dtype).eps


# A sketch has so many projections onto random signs. The signs of a value are the product of those
# of its row and of its column in a table of this width: fewer random numbers than values.
_PROJECTIONS = 8
_WIDTH = 1024


@lru_cache(maxsize=1)
def _signs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random signs: those of the rows into which values are folded, and of the columns in
    each projection.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 2, (_MAX_VALUES // _WIDTH,), generator=generator, device="cpu") * 2 - 1
    columns = torch.randint(0, 2, (_WIDTH, _PROJECTIONS), generator=generator, device="cpu") * 2 - 1
    return rows.double(), columns.double()


def _sketch(flat: torch.Tensor) -> tuple[float, ...]:
    """Return random projections of values, and their norm: the distance of two sketches is about
    that of the values.

    Source: Johnson and Lindenstrauss, "Extensions of Lipschitz mappings into a Hilbert space",
    1984.
    """
    rows, columns = _signs()
    width = min(_WIDTH, flat.numel())
    whole = flat.numel() // width * width
    dtype = torch.float64 if flat.element_size() == 8 or flat.numel() < 4096 else torch.float32
    values = torch.nan_to_num(flat.to(dtype), nan=700.0, posinf=1000.0, neginf=-1000.0)
    # sums and not products of matrices, whose libraries have threads that a loader process does not
    # inherit
    folded = (values[:whole].view(-1, width) * rows[: whole // width].to(dtype)[:, None]).sum(0)
    if whole < flat.numel():
        folded[: flat.numel() - whole] += values[whole:] * rows[whole // width].to(dtype)
    projections = (folded.double()[:, None] * columns[:width]).sum(0) / math.sqrt(_PROJECTIONS)
    return (*projections.tolist(), float(values.square().sum().sqrt()))


def _leaves_of_tensor(tensor: torch.Tensor, path: str, depth: int) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves of a tensor that is not dense, or has no values."""
    kind = f"{str(tensor.layout).removeprefix('torch.')} tensor {tensor.dtype} {_shape(tensor)}"
    try:
        if tensor.is_nested:
            parts: Any = list(tensor.detach().unbind())
        elif tensor.is_quantized:
            parts = [tensor.detach().int_repr()]
        elif tensor.layout is torch.sparse_coo:
            coalesced = tensor.detach().coalesce()
            parts = [coalesced.indices(), coalesced.values()]
        elif tensor.device.type == "meta":
            parts = []
        else:
            parts = [tensor.detach().to_dense()]
    except (RuntimeError, NotImplementedError):  # of a layout that torch cannot convert
        parts = []
    yield path, _mark(kind)
    yield from _leaves(parts, path, depth + 1)


def _shape(tensor: torch.Tensor) -> str:
    try:
        return str(list(tensor.shape))
    except RuntimeError:  # of a nested tensor
        return ""


def _leaves_of_object(value: Any, path: str, depth: int) -> Iterator[tuple[str, Leaf]]:
    kind = type(value).__qualname__
    if isinstance(value, np.ndarray):
        yield from _leaves(value.tolist(), path, depth + 1)
        return
    if is_dataclass(value) and not isinstance(value, type):
        yield path, _mark(kind)
        for attribute in fields(value):
            yield from _leaves(
                getattr(value, attribute.name, None), f"{path}.{attribute.name}", depth + 1
            )
        return
    if callable(value):  # a function, or a class
        yield path, _mark(kind, zlib.crc32(getattr(value, "__qualname__", kind).encode()))
        return
    attributes = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        attributes |= {
            name: getattr(value, name, None) for name in names if not name.startswith("__")
        }
    if attributes:
        yield path, _mark(kind)
        for name in sorted(attributes):
            for place, leaf in _leaves(attributes[name], f"{path}.{name}", depth + 1):
                yield place, leaf._replace(of_object=True)
        return
    try:
        text = _without_addresses(repr(value))
    except Exception:  # of any class
        text = ""
    # an open file, a lock or a pointer says here where it is in this process
    yield (
        path,
        Leaf(
            kind,
            zlib.crc32(text.encode(errors="replace")),
            text=_short(text) or kind,
            of_object=True,
        ),
    )
