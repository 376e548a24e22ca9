"""What is no data set is refused in one line that says what to give instead, and which argument it
was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError, DataError

INPUTS, TARGETS = torch.randn(32, 4), torch.zeros(32, dtype=torch.int64)
DATA = TensorDataset(INPUTS, TARGETS)
EMPTY = TensorDataset(INPUTS[:0], TARGETS[:0])


class Nothing(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def trainer() -> lockstep.Trainer:
    model = nn.Linear(4, 2)
    return lockstep.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), 8, callbacks=[]
    )


CASES: list[tuple[Any, str]] = [
    ("data/train", r"got 'data/train'\. Files of samples are read by lockstep\.data\.Stream"),
    (
        (INPUTS, TARGETS),
        r"got a tuple of 2 arrays\. torch\.utils\.data\.TensorDataset\(inputs, targets\) makes",
    ),
    ([INPUTS, TARGETS], r"got a list of 2 arrays\. "),
    ((INPUTS.numpy(), TARGETS.numpy()), r"got a tuple of 2 arrays\. "),
    (
        (DATA, DATA),
        r"got a tuple of 2 data sets\. fit\(train, validate=test\) takes them one by one",
    ),
    ([DataLoader(DATA)], r""),
    (
        {"x": INPUTS, "y": TARGETS},
        r"got a dict with the keys \['x', 'y'\]\. Indices are whole numbers from 0",
    ),
    (TensorDataset, r"got the class TensorDataset\. Make an instance: TensorDataset\(\.\.\.\)"),
    (None, r"got NoneType"),
    (EMPTY, r"at least one sample for each of 1 workers, got 0\. This TensorDataset is empty"),
    (DataLoader(EMPTY), r"This TensorDataset is empty"),
]


@pytest.mark.parametrize(("given", "said"), [case for case in CASES if case[1]])
def test_training_data(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train: expected [^\n]*{said}[^\n]*$"):
        trainer().fit(given, epochs=1)


@pytest.mark.parametrize(
    ("given", "said"), [case for case in CASES if case[1] and case[0] is not None]
)
def test_validation_data(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^validate: expected [^\n]*{said}[^\n]*$"):
        trainer().fit(DATA, epochs=1, validate=given)


@pytest.mark.parametrize("call", [lockstep.evaluate, lockstep.predict])
@pytest.mark.parametrize(
    ("given", "said"),
    [(DATA, "a data set"), ("test", "one of type str"), (INPUTS, "one of type Tensor")],
)
def test_evaluation_of_what_is_no_loader(call: Callable[..., Any], given: Any, said: str) -> None:
    arguments = (nn.CrossEntropyLoss(),) if call is lockstep.evaluate else ()
    hint = r"lockstep\.Loader\(dataset, global_batch_size=256, shuffle=False\) makes one"
    with pytest.raises(
        ConfigError,
        match=rf"^loader: expected a lockstep\.Loader, or a DataLoader, got {said}\. {hint}",
    ):
        call(nn.Linear(4, 2), given, *arguments)


def test_a_prepared_loader_is_evaluated() -> None:
    model, loader = lockstep.prepare(nn.Linear(4, 2), DataLoader(DATA, 8))
    plain = lockstep.evaluate(model, DataLoader(DATA, 8), nn.CrossEntropyLoss())
    assert lockstep.evaluate(model, loader, nn.CrossEntropyLoss()) == plain


def test_iterable_data_sets_without_samples_are_named() -> None:
    with pytest.raises(DataError, match=r"^Nothing: no samples in the training data$"):
        trainer().fit(Nothing(), epochs=1)
    with pytest.raises(DataError, match=r"^Nothing: no samples in the data of validate=$"):
        trainer().fit(DATA, epochs=1, validate=DataLoader(Nothing(), 8))


@pytest.mark.parametrize(
    "given", [[INPUTS[0], INPUTS[1]], [torch.ones(3), torch.ones(4)], list(np.eye(3)), INPUTS]
)
def test_lists_of_samples_are_data_sets(given: Any) -> None:
    loader = lockstep.Loader(given, 1, collate_fn=list)
    assert sum(batch.size for batch in loader) == len(given)
