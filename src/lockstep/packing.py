"""A tree of plain values and tensors as JSON beside safetensors, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn

from .errors import ConfigError

__all__ = [
    "MAX_DEPTH",
    "MAX_JSON",
    "Json",
    "Tree",
    "from_json",
    "from_safetensors",
    "is_storable_name",
    "pack",
    "portable",
    "to_json",
    "to_safetensors",
    "unpack",
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
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def pack(tree: Tree) -> tuple[Json, dict[str, Tensor]]:
    """Take a tree apart into a JSON value and the tensors that it refers to.

    A tree is None, a bool, int, float, str or tensor, or a list, tuple or dict of trees; keys are str or int.
    Tuples, integer keys, the order of keys, NaN, infinities and -0.0 come back from `unpack` as they were. Every
    dict comes back as a dict, whatever its subclass, and every parameter as a tensor without gradient. Tensors come
    back on the CPU; two that shared memory no longer do.

    Returns:
        the JSON value, and contiguous copies on the CPU of all tensors, of types that safetensors stores (a complex
        one as its real view, with a last dimension of 2).

    Raises:
        ConfigError: naming the place in the tree, for anything else that is found there.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(tree, (), tensors), tensors


def unpack(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `pack` took apart; nothing in `value` is ever executed or imported.

    Raises:
        ValueError: `value` is not what `pack` makes, or does not use each of `tensors` exactly once.
    """
    unused = dict(tensors)
    tree = _unpack(value, (), unused)
    if unused:
        raise ValueError(f"tensors that the tree does not use: {', '.join(sorted(unused)[:5])}")
    return tree


def portable(tensor: object, where: str) -> Tensor:
    """A contiguous copy of `tensor` on the CPU that shares its memory with no other.

    Raises:
        ConfigError: naming `where`, if it is no plain dense tensor with values, or of a type that cannot be stored.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(where, "a tensor", found=f"an object of {_type_name(tensor)}")
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        kind = f"a {tensor.layout} {type(tensor).__name__} on {tensor.device}"
        hint = "Turn it into one first: full_tensor() for a DTensor, to_dense() for a sparse tensor."
        raise ConfigError(where, "a plain dense tensor", found=kind, hint=hint)
    if tensor.dtype not in _REAL and tensor.dtype not in _COMPLEX.values():
        raise ConfigError(where, "a tensor of a type that safetensors stores", found=f"a tensor of {tensor.dtype}")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


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


def to_safetensors(argument: str, tensors: dict[str, Tensor]) -> bytes:
    """The safetensors file of `portable` tensors.

    Raises:
        ConfigError: naming `argument`, for a name or a type that the installed safetensors does not store.
    """
    for name in tensors:
        if not is_storable_name(name):
            raise ConfigError(argument, "names that safetensors can store", name)
    try:
        # Other readers of the format ask for this note.
        return safetensors.torch.save(tensors, metadata={"format": "pt"})
    except (KeyError, ValueError, safetensors.SafetensorError):
        types = ", ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
        raise ConfigError(argument, "tensors of types that safetensors stores", found=types) from None


def from_safetensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU, in memory of their own.

    Raises:
        ValueError: it is no safetensors file.
    """
    try:
        return safetensors.torch.load(data)
    # The library checks in several places, and raises as many kinds of errors, AssertionError among them.
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error


def is_storable_name(name: str) -> bool:
    """Whether a tensor of this name can stand in a safetensors file."""
    # It writes names in UTF-8, which has no lone surrogates, and keeps one name for itself.
    return name != "__metadata__" and not any("\ud800" <= letter <= "\udfff" for letter in name)


def _pack(node: object, path: tuple[object, ...], tensors: dict[str, Tensor]) -> Json:
    if len(path) > MAX_DEPTH:
        raise ConfigError(_spell(path[:4]), f"at most {MAX_DEPTH} levels of nesting", found="deeper nesting")
    kind = type(node)
    if isinstance(node, Tensor):
        return _pack_tensor(node, path, tensors)
    if isinstance(node, dict):
        return _pack_dict(node, path, tensors)
    if isinstance(node, (list, tuple)) and kind in (list, tuple):
        items = [_pack(item, (*path, index), tensors) for index, item in enumerate(node)]
        return items if kind is list else {"$tuple": items}
    # Subclasses (numpy.float64, IntEnum, …) are refused, because they would come back as something else.
    if isinstance(node, float) and kind is float:
        return node if math.isfinite(node) else {"$float": repr(node)}
    if node is None or kind in (bool, str) or (isinstance(node, int) and _fits(node)):
        return node
    raise _refused(path, node)


def _pack_tensor(tensor: Tensor, path: tuple[object, ...], tensors: dict[str, Tensor]) -> Json:
    copy, key = portable(tensor, _spell(path)), str(len(tensors))
    tensors[key] = torch.view_as_real(copy) if copy.is_complex() else copy
    return {"$complex" if copy.is_complex() else "$tensor": key}


def _pack_dict(node: dict[Any, object], path: tuple[object, ...], tensors: dict[str, Tensor]) -> Json:
    for key in node:
        if type(key) is not str and not _fits(key):
            raise ConfigError(_spell(path), "keys of type str or int", found=f"the key {key!r} of {_type_name(key)}")
    items = [(key, _pack(value, (*path, key), tensors)) for key, value in node.items()]
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


def _unpack(value: Json, path: tuple[object, ...], unused: dict[str, Tensor]) -> Any:
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


def _unpack_tagged(value: dict[Any, Json], path: tuple[object, ...], unused: dict[str, Tensor]) -> Any:
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


def _unpack_items(content: list[Json], path: tuple[object, ...], unused: dict[str, Tensor]) -> dict[str | int, Any]:
    tree: dict[str | int, Any] = {}
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int) or pair[0] in tree:
            raise ValueError(f"{_spell(path)}: {str(pair)[:80]} is not a new key with its value")
        tree[pair[0]] = _unpack(pair[1], (*path, pair[0]), unused)
    return tree


def _unpack_tensor(tag: str, key: str, path: tuple[object, ...], unused: dict[str, Tensor]) -> Tensor:
    if key not in unused:
        raise ValueError(f"{_spell(path)}: tensor {key[:80]!r} is missing, or used twice")
    tensor = unused.pop(key)
    if tag == "$tensor":
        return tensor
    if tensor.dtype not in _COMPLEX or tensor.shape[-1:] != (2,):
        raise ValueError(f"{_spell(path)}: {tensor.dtype} of shape {tuple(tensor.shape)} is no complex tensor")
    return torch.view_as_complex(tensor)
