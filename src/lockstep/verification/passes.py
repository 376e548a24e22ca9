"""Records forward passes of a script's models: the samples they are given, and what they draw and
count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DistributedSampler

from ..system.patching import Replaced
from .held import DROPOUTS

_MOST_SAMPLES = 1 << 16  # of a step
_MOST_BYTES = 1 << 26  # of a pass


class PassRecorder:
    """Notes what models in training mode are given, until it is undone.

    Attributes:
        samples, passes, targets, draws: as in `StepRecord`, since `begin_step`.
        low_precision, has_dropout, has_batch_statistics, has_draws, divides_batches,
            repeated_order: as in `RunRecord`.
    """

    def __init__(self) -> None:
        self.low_precision = False
        self.has_dropout = False
        self.has_batch_statistics = False
        self.has_draws = False
        self.divides_batches = False
        self.repeated_order = False
        self._in_pass = False
        self._epochs: dict[int, set[int]] = {}
        self._samplers: list[object] = []  # keeps their ids unique
        self.begin_step()
        self._replaced = [
            Replaced(torch.amp.autocast, "__enter__", self._note_autocast),
            Replaced(nn.Module, "__call__", self._note_pass),
            Replaced(_BatchNorm, "forward", self._note_batch_norm),
            Replaced(F, "cross_entropy", self._note_targets),
            Replaced(F, "nll_loss", self._note_targets),
            Replaced(BatchSampler, "__iter__", self._note_batches),
            Replaced(DistributedSampler, "__iter__", self._note_order),
            *(Replaced(F, name, self._note_dropout) for name in DROPOUTS),
            Replaced(F, "scaled_dot_product_attention", self._note_attention),
        ]

    def undo(self) -> None:
        """Stop recording."""
        for replaced in reversed(self._replaced):
            replaced.undo()
        self._replaced = []

    def begin_step(self) -> None:
        """Forget the passes of the step before."""
        self.samples: list[str] = []
        self.passes = 0
        self.targets = 0
        self.draws = ""

    def _note_pass(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._in_pass or not (module.training and torch.is_grad_enabled()):
                return original(module, *args, **kwargs)
            if not any(parameter.requires_grad for parameter in module.parameters()):  # a loss
                return original(module, *args, **kwargs)
            self._in_pass = True
            before = _generator_digest()
            self.draws = self.draws or before
            self.passes += 1
            if len(self.samples) < _MOST_SAMPLES:
                self.samples += _sample_digests(tree_leaves((args, kwargs)))
            try:
                return original(module, *args, **kwargs)
            finally:
                self._in_pass = False
                self.has_draws = self.has_draws or _generator_digest() != before

        return call

    def _note_autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(context: Any) -> Any:
            self.low_precision = self.low_precision or bool(context._enabled)
            return original(context)

        return enter

    def _note_dropout(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def drop(
            input: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **named: Any
        ) -> Any:
            self.has_dropout = self.has_dropout or (training and p > 0)
            return original(input, p, training, *rest, **named)

        return drop

    def _note_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def attend(
            query: Any,
            key: Any,
            value: Any,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            *rest: Any,
            **named: Any,
        ) -> Any:
            self.has_dropout = self.has_dropout or dropout_p > 0
            return original(query, key, value, attn_mask, dropout_p, *rest, **named)

        return attend

    def _note_batch_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def normalise(layer: Any, input: Tensor) -> Any:
            self.has_batch_statistics = self.has_batch_statistics or layer.training
            return original(layer, input)

        return normalise

    def _note_targets(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def measure(input: Tensor, target: Tensor, *args: Any, **named: Any) -> Any:
            # cross_entropy does not call nll_loss in Python, so nothing is counted twice
            is_mean = named.get("reduction", args[4] if len(args) > 4 else "mean") == "mean"
            if is_mean and not target.is_floating_point() and torch.is_grad_enabled():
                ignored = named.get("ignore_index", args[2] if len(args) > 2 else -100)
                self.targets += int((target != ignored).sum())
            return original(input, target, *args, **named)

        return measure

    def _note_batches(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(sampler: Any) -> Any:
            self.divides_batches = True
            return original(sampler)

        return iterate

    def _note_order(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(sampler: Any) -> Any:
            if sampler.shuffle:
                if id(sampler) not in self._epochs:
                    self._samplers.append(sampler)
                epochs = self._epochs.setdefault(id(sampler), set())
                self.repeated_order = self.repeated_order or sampler.epoch in epochs
                epochs.add(sampler.epoch)
            return original(sampler)

        return iterate


def _generator_digest() -> str:
    return hashlib.sha256(torch.get_rng_state().numpy().data).hexdigest()[:16]


def _sample_digests(leaves: list[Any]) -> list[str]:
    """Return a digest of each sample of a batch: of its row in each tensor that is data.

    A row is hashed without what repeats its first and its last value, so that the padding of texts,
    which depends on the other texts of a worker's part, does not count.
    """
    tensors = [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and not leaf.requires_grad
    ]
    tensors = [leaf for leaf in tensors if leaf.layout is torch.strided and type(leaf) is Tensor]
    if not tensors or tensors[0].numel() * tensors[0].element_size() > _MOST_BYTES:
        return []
    size = len(tensors[0])
    arrays = [_array(tensor) for tensor in tensors if len(tensor) == size]
    digests: list[str] = []
    for row in range(size):
        digest = hashlib.sha256()
        for array in arrays:
            values = array[row]
            if len(values) > 1:
                changes = np.flatnonzero((values[1:] != values[:-1]).any(axis=1))
                values = values[changes[0] : changes[-1] + 2] if len(changes) else values[:1]
            digest.update(values.tobytes() + b"|")
        digests.append(digest.hexdigest()[:16])
    return digests


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a batch as bytes: samples, positions, bytes of a position."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    positions = dense.shape[1] if dense.dim() > 1 else 1
    flat = dense.reshape(-1).view(torch.uint8).numpy()
    return (
        flat.reshape(len(dense), positions, -1)
        if flat.size
        else np.zeros((len(dense), 1, 1), np.uint8)
    )
