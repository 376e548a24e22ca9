"""When gradients are recorded, and whether layers are in training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

__all__ = ["is_recording", "is_training", "pause", "predict_mode", "record", "train_mode"]


class _State(threading.local):
    recording = training = False


_STATE = _State()


@contextmanager
def _set(recording: bool, training: bool) -> Iterator[None]:
    before = _STATE.recording, _STATE.training
    _STATE.recording, _STATE.training = recording, training
    try:
        with torch.set_grad_enabled(recording):
            yield
    finally:
        _STATE.recording, _STATE.training = before


def record(train_mode: bool = True) -> AbstractContextManager[None]:
    """Around the computation that `backward` shall go through; layers are in training, unless `train_mode` is False."""
    return _set(True, train_mode)


def pause(train_mode: bool = False) -> AbstractContextManager[None]:
    """Around what shall not be recorded, within `record`."""
    return _set(False, train_mode)


def train_mode() -> AbstractContextManager[None]:
    """Layers are in training, whether or not gradients are recorded."""
    return _set(_STATE.recording, True)


def predict_mode() -> AbstractContextManager[None]:
    """Layers are not in training."""
    return _set(_STATE.recording, False)


def is_recording() -> bool:
    """Whether gradients are recorded."""
    return _STATE.recording


def is_training() -> bool:
    """Whether layers are in training."""
    return _STATE.training
