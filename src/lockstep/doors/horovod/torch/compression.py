"""How tensors are made smaller before they are sent, and large again."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """What a class for `compression` has; any class with these two methods will do."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What is sent, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """A tensor as the one that was compressed."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """`tensor`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """`tensor`."""
        return tensor


class _Half(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Numbers with a point as half as many bytes or fewer; others as they are."""
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """`tensor` in the dtype that it had."""
        return tensor.to(ctx)


class FP16Compressor(_Half):
    """Sends float16."""

    dtype = torch.float16


class BF16Compressor(_Half):
    """Sends bfloat16, which has the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """Those there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
