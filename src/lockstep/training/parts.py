"""The model and the data of a run, loaded by name and tried before anything is started."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..data import DATA
from ..errors import ConfigError, LockstepError
from ..models import MODELS, build
from .losses import check_fit
from .modes import evaluating
from .options import TrainOptions

__all__ = ["build_model", "load_data"]


@contextmanager
def _running(argument: str, expected: str, name: str) -> Iterator[None]:
    """Turn what code of the user's raises into an error that names `argument`, what was `expected`, and the code."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        got = f"{type(error).__name__} from {name}" + (f": {reason}" if reason else "")
        raise ConfigError(argument, expected, found=got, hint="--debug shows where.") from error


def load_data(options: TrainOptions) -> tuple[Any, Any]:
    """(train, test) data sets; test is None where a factory of the user's returns one data set.

    Raises:
        ConfigError: for an unknown name, or a factory that fails, or returns something else.
        DataError: for files that are missing or wrong.
    """
    with _running("data", "a module that can be imported", options.data):
        factory = DATA.load(options.data)
    made = _call(factory, options)
    parts = made if isinstance(made, tuple) else (made, None)
    if len(parts) != 2:
        raise ConfigError("data", _FORM, found=f"a tuple of {len(parts)} from {options.data}")
    for part in (parts[0], *(part for part in parts[1:] if part is not None)):
        _check_set(part, options.data)
    return parts[0], parts[1]


_HINT = "A factory returns (train, test), a tuple, or train alone."
_FORM = "a factory that returns (train, test), or train alone, each with len() and indexing"


def _call(factory: Any, options: TrainOptions) -> Any:
    if not callable(factory):
        raise ConfigError("data", _FORM, found=f"{options.data}, which is of type {type(factory).__name__}")
    with _running("data", "a factory that can be called without arguments", options.data):
        accepts = "data_dir" in inspect.signature(factory).parameters
        if options.data_dir is not None and not accepts:
            raise ConfigError("data_dir", f"nothing, as {options.data} reads no files", options.data_dir)
        return factory(data_dir=options.data_dir) if accepts else factory()


def _check_set(dataset: Any, name: str) -> None:
    if isinstance(dataset, (str, bytes, dict)) or not all(hasattr(dataset, it) for it in ("__len__", "__getitem__")):
        raise ConfigError("data", _FORM, found=f"one of type {type(dataset).__name__} from {name}")
    with _running("data", "data sets with len() and indexing", name):
        if len(dataset) == 0:
            raise ConfigError("data", "at least one sample in each data set", found=f"{name}, with an empty one")
        sample = dataset[0]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            got = f"one of type {type(sample).__name__} in a {type(dataset).__name__}"
            raise ConfigError("data", "items that are pairs (input, label)", found=got, hint=_HINT)
        inputs, labels = _samples(dataset, 1)
        if not isinstance(inputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
            got = f"a batch of {type(inputs).__name__} and {type(labels).__name__}"
            raise ConfigError("data", "inputs and labels that are tensors, arrays or numbers", found=got)


def _samples(dataset: Any, count: int) -> Any:
    """The first samples as one batch: (inputs, labels)."""
    from torch.utils.data import default_collate

    count = min(count, len(dataset))
    if hasattr(dataset, "collated_batch"):
        return dataset.collated_batch(list(range(count)))
    return default_collate([dataset[index] for index in range(count)])


def _shape(dataset: Any) -> tuple[int, ...]:
    return tuple(dataset.shape if hasattr(dataset, "shape") else _samples(dataset, 1)[0].shape[1:])


def _classes(dataset: Any) -> int | None:
    """How many classes the labels have, if that can be told without reading every sample."""
    classes = getattr(dataset, "classes", None)
    if classes is not None:
        return classes if isinstance(classes, int) else len(classes)
    tensors = getattr(dataset, "tensors", None)  # of a TensorDataset
    labels = tensors[-1] if tensors else getattr(dataset, "targets", None)
    if labels is None or torch.as_tensor(labels).is_floating_point():
        return None
    return int(torch.as_tensor(labels).max()) + 1


def build_model(options: TrainOptions, dataset: Any) -> nn.Module:
    """The model that the options name, on the CPU, after a trial with two samples of `dataset`.

    Raises:
        ConfigError: for an unknown name, a factory or model that fails, or an output that does not fit the labels.
    """
    with _running("data", "classes and shape that can be told", options.data):
        classes, shape = _classes(dataset), _shape(dataset)
    if classes is None and options.model in MODELS.targets:
        raise ConfigError(
            "data",
            "a data set with an attribute classes (their number, or their names)",
            options.data,
            "The model's number of outputs is taken from it.",
        )
    with _running("model", "a factory that returns a torch.nn.Module", options.model):
        model = build(options.model, classes, shape)
    _try_model(model, _samples(dataset, 2), classes, options.model)
    return model


@torch.no_grad()
def _try_model(model: nn.Module, samples: Any, classes: int | None, name: str) -> None:
    inputs, labels = samples
    with evaluating(model), _running("model", f"a model for inputs of shape {list(inputs.shape)}", name):
        output = model(inputs)
    if classes is not None and isinstance(output, torch.Tensor) and output.shape[1:2] < (classes,):
        got = f"an output of shape {list(output.shape)}"
        raise ConfigError("model", f"an output for each of the {classes} classes of the data", found=got)
    loss_fn = nn.CrossEntropyLoss()
    check_fit(loss_fn, output, labels)
    with _running("model", f"an output that cross-entropy takes with labels of {labels.dtype}", name):
        loss_fn(output, labels)
