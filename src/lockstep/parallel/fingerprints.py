"""Hashes and checksums that compare models and batches bit by bit."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.names import plain_names
from ..errors import ConfigError
from .optimizer_parts import part_of

__all__ = [
    "INTEGERS",
    "checksum",
    "checksum_of",
    "combined_checksum",
    "fingerprint",
    "fingerprint_of",
    "kind_of",
    "mix_bits",
    "state_entries",
]


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...


def fingerprint(model: nn.Module, optimizer: Optimizer | None = None) -> str:
    """Return the SHA-256 of a model's parameters and buffers, and of the state of its optimizer.

    The hash covers every entry of ``state_dict()``, every parameter, and the optimizer's state of
    each parameter (not its hyperparameters, such as the learning rate), with name, type, shape and
    raw bytes. It is independent of the device, of the order in which entries were created, and of
    wrappers such as DistributedDataParallel or ``torch.compile``.

    Args:
        model: the model.
        optimizer: its optimizer; the hash is that of the model alone when None.

    Returns:
        64 hexadecimal digits.

    Raises:
        ConfigError: if a value is neither a plain dense tensor nor a plain Python value, or the
            optimizer's state is divided among the workers.

    Examples:
        >>> import copy, lockstep
        >>> model = lockstep.models.mlp()
        >>> lockstep.fingerprint(model) == lockstep.fingerprint(copy.deepcopy(model))
        True
    """
    if optimizer is not None and part_of(optimizer.param_groups) is not None:
        raise ConfigError(
            "optimizer",
            "one whose whole state this worker has",
            found="one of shard_optimizer=True",
            hint="TrainStep.fingerprint(), or trainer.step.fingerprint(), covers all of it; all "
            "workers call it. After lockstep.prepare(), lockstep.fingerprint(model) is that of the "
            "weights.",
        )
    entries = {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict()}
    return fingerprint_of(entries, None if optimizer is None else optimizer.state_dict())


def fingerprint_of(entries: Mapping[str, Any], optimizer: Mapping[str, Any] | None = None) -> str:
    """Return the fingerprint of parameters and buffers by name, and of an optimizer's state dict.

    Raises:
        ConfigError: as `fingerprint`.
    """
    digest = hashlib.sha256(b"lockstep fingerprint 1\n")
    _update(digest, plain_names(entries), "model")
    if optimizer is not None:
        _update(digest, optimizer["state"], "optimizer")
    return digest.hexdigest()


# Size of a value in bytes → the integer dtype of that size, to view the value's bits.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# signed odd multiplier: low bits of a factor reach all higher bits of the product
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
# values of 8 bytes: temporary tensors stay in the cache and are small compared with a model
_CHUNK = 1 << 18


def checksum(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum over the bits and positions of a dense tensor's values, computed on
    its device.

    It does not wait for the device. It detects faults; it is not cryptographic.

    Returns:
        0-dim tensor of int64.
    """
    dense = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).contiguous().reshape(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    if (
        bits.numel() * bits.element_size() % 8 == 0
        and flat.storage_offset() * flat.element_size() % 8 == 0
    ):
        bits = bits.view(torch.int64)  # ten times as fast as widening each value
    sums = []
    for number, chunk in enumerate(torch.split(bits, _CHUNK)):
        factors = _factors(len(chunk), chunk.device)
        if number:
            # the lowest 64 bits, as a signed number
            offset = (number * _CHUNK * _ODD + (1 << 63)) % (1 << 64) - (1 << 63)
            factors = factors + offset
        # As `mix_bits`, with half of the operations.
        wide = chunk.to(torch.int64)
        mixed = wide >> 32
        mixed ^= wide
        mixed *= factors
        sums.append(mixed.sum())
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


_FACTORS: dict[torch.device, Tensor] = {}


def _factors(count: int, device: torch.device) -> Tensor:
    """Return the factors of `mix_bits` for the first positions, at most `_CHUNK`; they are kept.

    Those of later chunks are larger by a multiple of `_CHUNK`, which is even.
    """
    kept = _FACTORS.get(device)
    if kept is None or len(kept) < count:
        kept = (torch.arange(count, device=device) * _ODD) | 1
        if type(kept) is Tensor:  # and not a fake one of a mode
            _FACTORS[device] = kept
    return kept[:count]


def mix_bits(bits: Tensor, positions: Tensor) -> Tensor:
    """Hash integers together with their positions; each bit of the input changes many bits of the
    output.

    Args:
        bits: whole numbers.
        positions: of the same shape, on the same device.

    Returns:
        A new tensor of int64.
    """
    wide = bits.to(torch.int64)
    mixed = wide >> 32
    mixed ^= wide
    factors = positions * _ODD
    factors |= 1
    mixed *= factors
    return mixed


def checksum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return one 62-bit checksum of several tensors on one device: their order, values, shapes and
    dtypes.

    Returns:
        0-dim tensor of int64, at least 0.
    """
    kinds = [kind_of(tensor) for tensor in tensors]
    if not tensors:
        return combined_checksum(kinds, torch.empty(0, dtype=torch.int64))
    return combined_checksum(kinds, torch.stack([checksum(tensor) for tensor in tensors]))


def state_entries(optimizer: Optimizer) -> list[list[tuple[Any, Any]]]:
    """Return (name, value) of all that an optimizer has of each of its parameters, group by group,
    in the order of the names; nothing of a parameter whose state another worker has.
    """

    def order(entry: tuple[Any, Any]) -> tuple[str, Any]:
        return type(entry[0]).__name__, entry[0]

    return [
        sorted(optimizer.state.get(p, {}).items(), key=order)
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def kind_of(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return what `checksum_of` covers of a tensor besides its values."""
    return tensor.dtype, tuple(tensor.shape)


def combined_checksum(kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]], sums: Tensor) -> Tensor:
    """Return `checksum_of` of tensors, given the `kind_of` and the `checksum` of each."""
    number = zlib.crc32(repr(list(kinds)).encode())
    if not kinds:
        return torch.tensor(number)
    total = mix_bits(sums, torch.arange(len(sums), device=sums.device)).sum() + number
    return (total ^ (total >> 31)) & ((1 << 62) - 1)


def _update(digest: _Digest, node: object, path: str) -> None:
    """Hash a tree of dicts, lists, tensors and plain values; `path` names `node` in errors."""
    # The kind and the size precede each value, so that no two different trees give the same stream
    # of bytes.
    kind = type(node).__name__
    if isinstance(node, Tensor):
        _update_header(digest, "tensor", str(node.dtype), list(node.shape))
        digest.update(_raw_bytes(node, path))
    elif isinstance(node, dict) and all(type(key) in (str, int) for key in node):
        _update_header(digest, "dict", len(node))
        for key in sorted(node, key=lambda key: (type(key).__name__, key)):
            _update_header(digest, type(key).__name__, key)
            _update(digest, node[key], f"{path}.{key}")
    elif isinstance(node, (list, tuple)) and type(node) in (list, tuple):
        _update_header(digest, kind, len(node))
        for index, item in enumerate(node):
            _update(digest, item, f"{path}.{index}")
    elif node is None or type(node) in (bool, int, float, str):
        _update_header(digest, kind, repr(node))
    else:
        raise ConfigError(path, "a tensor or a plain value", found=f"an object of type {kind}")


def _update_header(digest: _Digest, *fields: object) -> None:
    digest.update(json.dumps(fields).encode() + b"\n")


def _raw_bytes(tensor: Tensor, path: str) -> Any:
    """Return the bytes of `tensor` in row-major order, as an array of uint8."""
    if (
        type(tensor) not in (Tensor, nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_meta
    ):
        kind = f"a {tensor.layout} {type(tensor).__name__} on {tensor.device}"
        raise ConfigError(
            path,
            "a plain dense tensor",
            found=kind,
            hint="Gather a DTensor first, with full_tensor().",
        )
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # As bytes, because NumPy has no bfloat16; flat, because a view of another element size needs a
    # dimension.
    return dense.reshape(-1).view(torch.uint8).numpy()
