"""Texts and numbers that tell whether two trained models, or two batches, are bit for bit the same."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import ConfigError

__all__ = ["INTEGERS", "checksum", "checksum_of", "fingerprint", "fingerprint_of", "mixed", "plain_names"]

T = TypeVar("T")


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...


def fingerprint(model: nn.Module, optimizer: Optimizer | None = None) -> str:
    """The SHA-256 of a model's parameters and buffers, and of the state of its optimizer.

    It covers every entry of ``state_dict()``, every parameter, and the optimizer's state of each parameter (not its
    options, such as the learning rate), with name, type, shape and raw bytes. It does not depend on the device, on
    the order in which entries were made, nor on a wrapper such as DistributedDataParallel or ``torch.compile``.

    Returns:
        64 hexadecimal digits.

    Raises:
        ConfigError: something in there is neither a plain dense tensor nor a plain value.
    """
    entries = {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict()}
    return fingerprint_of(entries, None if optimizer is None else optimizer.state_dict())


def fingerprint_of(entries: Mapping[str, Any], optimizer: Mapping[str, Any] | None = None) -> str:
    """The same of a model's parameters and buffers by name, and of an optimizer's state dict.

    Raises:
        ConfigError: as `fingerprint`.
    """
    digest = hashlib.sha256(b"lockstep fingerprint 1\n")
    _feed(digest, plain_names(entries), "model")
    if optimizer is not None:
        _feed(digest, optimizer["state"], "optimizer")
    return digest.hexdigest()


# Of as many bytes as a value: with them its bits are read.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number; times it, bits of low places come into all higher ones
_AT_ONCE = 1 << 18  # numbers of 8 bytes, so that what is in between takes little beside a model, and stays in the cache


def checksum(tensor: Tensor) -> Tensor:
    """A 64-bit sum over the bits and places of a dense tensor's values; computed where the tensor is.

    Nothing waits for the device. It is made to find faults, not to resist who looks for another tensor with the same.

    Returns:
        0-dim tensor of int64.
    """
    dense = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).contiguous().reshape(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    if bits.numel() * bits.element_size() % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0:
        bits = bits.view(torch.int64)  # ten times as fast as to widen each
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, part in enumerate(torch.split(bits, _AT_ONCE)):
        places = torch.arange(len(part), device=part.device) + number * _AT_ONCE
        total = total + mixed(part, places).sum()
    return total


def mixed(bits: Tensor, places: Tensor) -> Tensor:
    """Numbers made of whole numbers and their places, of which each bit makes a difference for many others."""
    wide = bits.to(torch.int64)
    return (wide ^ (wide >> 32)) * ((places * _ODD) | 1)


def checksum_of(tensors: Sequence[Tensor]) -> Tensor:
    """One 62-bit number for several tensors on one device, in order, with their shapes and dtypes.

    Returns:
        0-dim tensor of int64, at least 0.
    """
    kinds = zlib.crc32(repr([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]).encode())
    if not tensors:
        return torch.tensor(kinds)
    sums = torch.stack([checksum(tensor) for tensor in tensors])
    total = mixed(sums, torch.arange(len(sums), device=sums.device)).sum() + kinds
    return (total ^ (total >> 31)) & ((1 << 62) - 1)


def plain_names(state_dict: Mapping[str, T]) -> dict[str, T]:
    """The entries under the names that the bare model gives them, in the same order.

    Removed are the ``_orig_mod`` of ``torch.compile`` wherever it stands, and a ``module`` of
    DistributedDataParallel or DataParallel that leads all names.

    Raises:
        ConfigError: two entries would have the same name.
    """
    parts = [[part for part in name.split(".") if part != "_orig_mod"] for name in state_dict]
    while parts and all(len(names) > 1 and names[0] == "module" for names in parts):
        parts = [names[1:] for names in parts]
    plain = dict(zip((".".join(names) for names in parts), state_dict.values(), strict=True))
    if len(plain) < len(state_dict):
        raise ConfigError(
            "state_dict", "names that differ without 'module.' and '_orig_mod.'", found=", ".join(state_dict)
        )
    return plain


def _feed(digest: _Digest, node: object, where: str) -> None:
    # Each piece is preceded by its kind and size, so that no two different trees give the same stream of bytes.
    kind = type(node).__name__
    if isinstance(node, Tensor):
        _head(digest, "tensor", str(node.dtype), list(node.shape))
        digest.update(_raw(node, where))
    elif isinstance(node, dict) and all(type(key) in (str, int) for key in node):
        _head(digest, "dict", len(node))
        for key in sorted(node, key=lambda key: (type(key).__name__, key)):
            _head(digest, type(key).__name__, key)
            _feed(digest, node[key], f"{where}.{key}")
    elif isinstance(node, (list, tuple)) and type(node) in (list, tuple):
        _head(digest, kind, len(node))
        for index, item in enumerate(node):
            _feed(digest, item, f"{where}.{index}")
    elif node is None or type(node) in (bool, int, float, str):
        _head(digest, kind, repr(node))
    else:
        raise ConfigError(where, "a tensor or a plain value", found=f"an object of type {kind}")


def _head(digest: _Digest, *fields: object) -> None:
    digest.update(json.dumps(fields).encode() + b"\n")


def _raw(tensor: Tensor, where: str) -> Any:
    """The bytes of `tensor` in row-major order, as an array of uint8."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        kind = f"a {tensor.layout} {type(tensor).__name__} on {tensor.device}"
        raise ConfigError(where, "a plain dense tensor", found=kind, hint="Gather a DTensor first, with full_tensor().")
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # By way of bytes, because NumPy has no bfloat16; flat, because a view of another size needs a dimension.
    return dense.reshape(-1).view(torch.uint8).numpy()
