"""What a sample is, for whoever looks for it: its file, its text, the range of its values, and a
picture of it.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset

from ..parallel.nested import tensors_of
from ..system.terminal_text import plain

_MOST_TEXT = 200
_LEAST_SIDE = 8  # of an image, in pixels


def describe(dataset: Any, index: int, data: Any) -> str:
    """Return what a sample is, in a few words.

    Args:
        dataset: the data set.
        index: the number of the sample in it.
        data: a batch of the sample alone, as the step has it.
    """
    parts = [_place(dataset, index)]
    decode = getattr(dataset, "decode", None)
    for tensor in tensors_of(data):
        value = tensor[0] if tensor.dim() else tensor
        if callable(decode) and value.dim() == 1 and not value.is_floating_point():
            with suppress(Exception):  # of the user's data set
                parts.append(repr(plain(str(decode(value.tolist())))[:_MOST_TEXT]))
                break
        if value.numel() == 1:
            number = value.item()
            parts.append(f"label {number}" if isinstance(number, int) else f"value {number:.4g}")
        elif value.numel():
            numbers = value.float()
            low, high = _range(numbers)
            bad = numbers.numel() - int(torch.isfinite(numbers).sum())
            besides = f" and {bad} not finite" if bad else ""
            parts.append(f"{list(value.shape)} from {low:.4g} to {high:.4g}{besides}")
    return ", ".join(part for part in parts if part)


def _place(dataset: Any, index: int) -> str:
    """Return the file that a sample lies in, where the data set says so; "" elsewhere."""
    while isinstance(dataset, Subset):
        index = int(dataset.indices[index])
        dataset = dataset.dataset
    with suppress(Exception):  # of the user's data set
        if hasattr(dataset, "locate"):
            path, record = dataset.locate(index)
            return plain(f"{path}, record {record}")
        for name in ("samples", "imgs", "paths", "files"):
            listed = getattr(dataset, name, None)
            if isinstance(listed, (list, tuple)) and len(listed) == len(dataset):
                entry = listed[index]
                return plain(str(entry[0] if isinstance(entry, tuple) else entry))
    return ""


class Picture(NamedTuple):
    """The picture of a sample.

    Attributes:
        path: of the PNG file; "" where none was written.
        why_not: why the image of a sample was not written, a clause; "" where it was, and for a
            sample without an image.
    """

    path: str = ""
    why_not: str = ""


def picture(folder: str, index: int, data: Any) -> Picture:
    """Write the image of a sample to a PNG file.

    Values from the smallest to the largest that is finite become black to white; others are black.

    Args:
        folder: for the file; it is made if there is an image.
        index: the number of the sample.
        data: a batch of the sample alone: its image is the first tensor of shape (1, C, H, W) or
            (1, H, W), with 1, 3 or 4 channels.
    """
    tensor = next((t[0] for t in tensors_of(data) if t.dim() in (3, 4) and t.shape[0] == 1), None)
    if tensor is None or (tensor.dim() == 3 and tensor.shape[0] not in (1, 3, 4)):
        return Picture()
    if min(tensor.shape[-2:]) < _LEAST_SIDE:
        return Picture()
    try:
        from PIL import Image
    except ImportError:
        return Picture(why_not="Pillow is not installed (pip install pillow)")
    values = tensor.detach().cpu().double()
    is_finite = torch.isfinite(values)
    low, high = _range(values)
    scaled = torch.where(is_finite, (values - low) / ((high - low) or 1.0) * 255, 0.0)
    grey = scaled.round().to(torch.uint8)
    pixels = grey.permute(1, 2, 0).squeeze(-1) if grey.dim() == 3 else grey
    path = Path(folder, f"sample-{index}.png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(path)
    except OSError as error:
        return Picture(why_not=f"{path}: {error.strerror or error}")
    return Picture(str(path))


def _range(values: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest of the finite values; NaN and NaN where none is."""
    finite = values[torch.isfinite(values)]
    if not finite.numel():
        return math.nan, math.nan
    return float(finite.min()), float(finite.max())
