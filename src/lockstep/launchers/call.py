"""A function call on its way to other processes, and its value on the way back."""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from .. import environment
from ..errors import ConfigError

__all__ = ["call", "pack", "pack_call", "unpack"]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value, and brings tensors of any device onto the CPU: the reader may lack the device."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(self.proto)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


def pack(value: object) -> bytes:
    """`value` as bytes that another process of this Python can rebuild by value; device tensors arrive on the CPU."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """What `pack` packed. Only for bytes that this program has written itself."""
    return cloudpickle.loads(data)


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call ``fn(*args, **kwargs)`` as bytes.

    Raises:
        ConfigError: naming the function or the argument that cannot be sent.
    """
    try:
        return pack((fn, args, kwargs))
    except Exception as error:
        parts: dict[str, object] = {"fn": fn}
        parts |= {f"args[{i}]": value for i, value in enumerate(args)} | kwargs
        for name, value in parts.items():
            _check_part(name, value)
        raise _not_packable("fn and its arguments", type(fn).__name__, error) from None


def _check_part(name: str, value: object) -> None:
    try:
        pack(value)
    except Exception as error:
        raise _not_packable(name, value, error) from None


def _not_packable(name: str, value: object, error: Exception) -> ConfigError:
    hint = f"Make it inside the function instead: {type(error).__name__}: {error}"
    return ConfigError(name, "something that can be sent to another process", value, hint)


def call(path: Path) -> bytes | None:
    """Do the call packed in the file `path`, as a worker; rank 0 returns its value, packed, unless that is None."""
    fn, args, kwargs = unpack(path.read_bytes())
    # the function chooses its own way to start processes: what it defines cannot be found by name in a new interpreter
    multiprocessing.set_start_method(None, force=True)
    value = fn(*args, **kwargs)
    return pack(value) if value is not None and environment.find_world().is_first else None
