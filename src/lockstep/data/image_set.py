"""`ImageSet`: labelled images in memory as bytes, of which a whole batch is made at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .. import devices
from ..errors import DataError

__all__ = ["ImageSet"]

# Indices that are copied to a device at once, at most; a program's own may be parts of those of a
# whole data set.
_MOST_COPIED = 1 << 20


class ImageSet(Dataset[tuple[Tensor, Tensor]]):
    """An in-memory data set of images of one size, each with the number of its class.

    Images are stored as uint8; items are float32, ``(x / 255 - mean) / std`` per channel.

    Args:
        images: uint8, shape (n, c, h, w), 0 to 255.
        labels: int64, shape (n,), each from 0 to ``len(classes) - 1``.
        classes: the class names, in the order of the labels.
        name: the name of the data set; errors begin with it.
        mean: c channel means on the scale 0 to 1.
        std: c channel standard deviations on the scale 0 to 1.

    Raises:
        DataError: the dtype or shape is another, the data set is empty, images and labels differ in
            number, a label has no class, or mean and std cannot standardise the channels.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        classes: Sequence[str],
        name: str,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self.classes = tuple(classes)
        self.name = name
        self.mean = tuple(mean)
        self.std = tuple(std)
        _check_images(name, images)
        _check_labels(name, labels, len(images), len(self.classes))
        _check_scale(name, self.mean, self.std, images.shape[1])
        self.images = images.contiguous()
        self.labels = labels.contiguous()
        # One multiplication and one addition per pixel: x / 255 / std - mean / std.
        scale = [1 / (255 * s) for s in self.std]
        shift = [-m / s for m, s in zip(self.mean, self.std, strict=True)]
        self._scale = torch.tensor(scale, dtype=torch.float32, device=images.device).view(-1, 1, 1)
        self._copied_from: Tensor | None = None  # what `_index_on_device` has copied
        self._copied_version = 0
        self._copy = self.labels[:0]
        self._shift = torch.tensor(shift, dtype=torch.float32, device=images.device).view(-1, 1, 1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return self.images.device

    def to(self, device: str | torch.device) -> ImageSet:
        """Return the same images in the memory of `device`, where batches are then made: for sets
        that fit there.

        Args:
            device: the device, or its name.
        """
        images = self.images.to(device)
        labels = self.labels.to(device)
        return ImageSet(images, labels, self.classes, self.name, self.mean, self.std)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return image `index`, float32 of shape (c, h, w), and its label, a 0-dim int64 tensor."""
        return self._standardise(self.images[index]), self.labels[index]

    def collated_batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return the images at `indices`, in that order: float32 (m, c, h, w), and their labels:
        int64 (m,).

        The result is bitwise equal to stacking the single items, in a fraction of the time.

        Args:
            indices: whole numbers from 0, of shape (m,).

        Raises:
            IndexError: an index is below 0 or beyond the last image.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        if self.images.device != index.device:
            index = self._index_on_device(index)
        return self._standardise(self.images.index_select(0, index)), self.labels.index_select(
            0, index
        )

    collated_batch.takes_tensors = True  # type: ignore[attr-defined]  # a loader then need not make lists

    def _index_on_device(self, index: Tensor) -> Tensor:
        """Return an index on the device of the images, which is not waited for.

        A loader's indices of some batches are parts of one tensor. It is copied as a whole, once,
        which takes the host less time than a copy for each batch.
        """
        whole = index._base
        if whole is None or whole.dtype != index.dtype or whole.numel() > _MOST_COPIED:
            return self._copied_to_device(index)
        if not (whole.is_contiguous() and index.is_contiguous()):
            return self._copied_to_device(index)
        if whole is not self._copied_from or whole._version != self._copied_version:
            self._copy = self._copied_to_device(whole).view(-1)
            self._copied_from = whole
            self._copied_version = whole._version
        start = index.storage_offset() - whole.storage_offset()
        return self._copy[start : start + index.numel()].view(index.shape)

    def _copied_to_device(self, index: Tensor) -> Tensor:
        # from page-locked memory, so that a GPU is not waited for
        pins = devices.pins_memory(self.images.device) and index.is_cpu
        return (index.pin_memory() if pins else index).to(self.images.device, non_blocking=True)

    def _standardise(self, pixels: Tensor) -> Tensor:
        # Two kernels, not a fused one: a multiply-add rounds once in some kernels and twice in
        # others, and the result must not depend on the batch size. It also measured faster than
        # addcmul.
        return pixels.to(torch.float32).mul_(self._scale).add_(self._shift)

    def __repr__(self) -> str:
        size = "x".join(str(n) for n in self.shape)
        return f"ImageSet({self.name!r}, {len(self)} images of {size}, {len(self.classes)} classes)"


def _check_images(name: str, images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.dim() != 4 or images.numel() == 0:
        raise DataError(
            f"{name}: expected images as torch.uint8 of shape (n, channels, height, width), at "
            f"least one, got {images.dtype} of shape {tuple(images.shape)}"
        )


def _check_labels(name: str, labels: Tensor, images: int, classes: int) -> None:
    if labels.dtype != torch.int64 or labels.dim() != 1:
        raise DataError(
            f"{name}: expected labels as torch.int64 of shape (n,), got {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    if len(labels) != images:
        raise DataError(
            f"{name}: expected one label for each of the {images} images, got {len(labels)} labels"
        )
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"{name}: expected labels from 0 to {classes - 1} for {classes} classes, got {low} to "
            f"{high}"
        )


def _check_scale(name: str, mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    usable = all(math.isfinite(m) for m in mean) and all(math.isfinite(s) and s > 0 for s in std)
    if len(mean) != channels or len(std) != channels or not usable:
        raise DataError(
            f"{name}: expected a finite mean and a std above 0 for each of {channels} channels, "
            f"got mean {tuple(mean)} and std {tuple(std)}"
        )
