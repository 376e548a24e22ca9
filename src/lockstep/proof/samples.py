"""What a sample is, for whoever looks for it: its file, its text, the range of its values, and a
picture of it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from ..parallel.nested import tensors_of
from ..system.terminal_text import plain

__all__ = ["describe", "picture"]

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
            parts.append(f"{list(value.shape)} from {numbers.min():.4g} to {numbers.max():.4g}")
    return ", ".join(part for part in parts if part)


def _place(dataset: Any, index: int) -> str:
    """Return the file that a sample lies in, where the data set says so; "" elsewhere."""
    while isinstance(dataset, Subset):
        index, dataset = int(dataset.indices[index]), dataset.dataset
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


def picture(folder: str, index: int, data: Any) -> str:
    """Write the image of a sample to a PNG file, and return its path; "" without an image, or
    without Pillow.

    Args:
        folder: for the file; it is made if there is an image.
        index: the number of the sample.
        data: a batch of the sample alone.
    """
    tensor = next((t[0] for t in tensors_of(data) if t.dim() in (3, 4) and t.shape[0] == 1), None)
    if tensor is None or (tensor.dim() == 3 and tensor.shape[0] not in (1, 3, 4)):
        return ""
    if min(tensor.shape[-2:]) < _LEAST_SIDE:
        return ""
    try:
        from PIL import Image
    except ImportError:
        return ""
    values = torch.nan_to_num(tensor.detach().cpu().double(), posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    grey = ((values - low) / ((high - low) or 1.0) * 255).round().to(torch.uint8)
    pixels = grey.permute(1, 2, 0).squeeze(-1) if grey.dim() == 3 else grey
    path = Path(folder, f"sample-{index}.png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(path)
    except OSError:  # the run directory cannot be written
        return ""
    return str(path)
