"""The loss that a model computes itself becomes a sum over what it counts, which is found out with
the first batch.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.errors import ConfigError
from lockstep.training.losses.loss import Loss, LossModule
from lockstep.training.losses.own_loss import IGNORED, Counting, OwnLoss, loss_in
from lockstep.training.step.train_step import TrainStep

CPU = torch.device("cpu")
WORDS, LENGTH = 11, 7


class Language(nn.Module):
    """Predicts each token, or the next one, as models of Hugging Face do."""

    def __init__(self, shifts: bool, equal_outputs: bool = False) -> None:
        super().__init__()
        self.shifts = shifts
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        if equal_outputs:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.words(input_ids))
        if labels is None:
            return {"logits": logits}
        given, wanted = (logits[:, :-1], labels[:, 1:]) if self.shifts else (logits, labels)
        return {
            "loss": F.cross_entropy(given.transpose(1, 2), wanted, ignore_index=IGNORED),
            "logits": logits,
        }


class Classifier(nn.Module):
    def __init__(self, regression: bool = False) -> None:
        super().__init__()
        self.out, self.regression = nn.Linear(3, 1 if regression else 4), regression

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.out(x)
        return {
            "loss": F.mse_loss(output[:, 0], labels)
            if self.regression
            else F.cross_entropy(output, labels)
        }


class Pair(Language):
    """Takes and returns tuples."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        found = super().forward(inputs, targets)
        return found["logits"], found["loss"]


class Entangled(Language):
    """Adds a loss of the whole batch, as for the balance of experts."""

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        found = super().forward(input_ids, labels)
        return {**found, "loss": found["loss"] + found["logits"].mean((0, 1)).square().sum()}


def sentences(n: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    """Sentences with padding, of which each has another number of labels; the last one has none."""
    ids = torch.randint(1, WORDS, (n, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for sample in range(n):
        labels[sample, LENGTH - sample :] = IGNORED
    labels[-1] = IGNORED
    return {"input_ids": ids, "labels": labels}


def numbers(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "x": torch.rand(len(labels), 3, generator=torch.Generator().manual_seed(0)),
        "labels": labels,
    }


CLASSES = numbers(torch.tensor([0, 1, IGNORED, 3, 0, 1]))
VALUES = numbers(torch.linspace(0, 1, 6))
SENTENCES = sentences()
KNOWN = [
    (lambda: Language(shifts=True), SENTENCES, Counting.NEXT_LABELS),
    (lambda: Language(shifts=False), SENTENCES, Counting.LABELS),
    (lambda: Language(shifts=True, equal_outputs=True), SENTENCES, Counting.NEXT_LABELS),
    (lambda: Language(shifts=False, equal_outputs=True), SENTENCES, Counting.LABELS),
    (lambda: Pair(shifts=True), tuple(SENTENCES.values()), Counting.NEXT_LABELS),
    (lambda: Classifier(), CLASSES, Counting.LABELS),
    (lambda: Classifier(regression=True), VALUES, Counting.SAMPLES),
]


def cut(data: Any, start: int, stop: int) -> Any:
    if isinstance(data, dict):
        return {name: tensor[start:stop] for name, tensor in data.items()}
    return tuple(tensor[start:stop] for tensor in data)


def module_of(model: nn.Module) -> LossModule:
    return LossModule(model, Loss(None, CPU))


@pytest.mark.parametrize(("make", "data", "counting"), KNOWN)
@pytest.mark.parametrize("first", [1, 6])
def test_what_a_loss_counts_is_found_with_the_first_batch(
    make: Any, data: Any, counting: Counting, first: int
) -> None:
    torch.manual_seed(0)
    own = OwnLoss()
    own.forward(make(), cut(data, 0, first))
    assert own.problem is None
    assert own.counting is counting


@pytest.mark.parametrize(("make", "data", "counting"), KNOWN)
@pytest.mark.parametrize("cuts", [(0, 6), (0, 3, 6), (0, 1, 5, 6), (0, 1, 2, 3, 4, 5, 6)])
def test_parts_of_a_batch_add_up_to_the_model_s_own_loss(
    make: Any, data: Any, counting: Counting, cuts: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = make()
    whole = loss_in(model(**data) if isinstance(data, dict) else model(*data))
    expected = torch.autograd.grad(whole, list(model.parameters()))
    module = module_of(model)
    parts = [
        module(cut(data, start, stop), stop - start) for start, stop in itertools.pairwise(cuts)
    ]
    total, count = sum(part[0] for part in parts), sum(part[1] for part in parts)
    torch.testing.assert_close(total / count, whole)
    torch.testing.assert_close(
        torch.autograd.grad(total / count, list(model.parameters())), expected
    )


def test_finding_it_changes_neither_the_model_nor_the_generators() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())

    class Wrapped(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(model(x), labels)

    wrapped = Wrapped()
    wrapped.layers = model
    state, modes = torch.get_rng_state(), [layer.training for layer in wrapped.modules()]
    own = OwnLoss()
    own._find_counting(wrapped, CLASSES)
    assert own.counting is Counting.LABELS
    assert torch.equal(torch.get_rng_state(), state)
    assert [layer.training for layer in wrapped.modules()] == modes
    assert int(model[0].num_batches_tracked) == 0 and all(
        p.grad is None for p in wrapped.parameters()
    )


def test_a_loss_of_the_whole_batch_is_refused_and_named() -> None:
    torch.manual_seed(0)
    step = TrainStep(model := Entangled(shifts=True), torch.optim.SGD(model.parameters(), 0.1))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(
        ConfigError, match=r"Entangled on rank 0, whose loss for 3 samples is .* Give forward="
    ):
        step(batch_of(SENTENCES))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def batch_of(data: Any) -> Any:
    from lockstep.data.loader import Batch

    return Batch(data, torch.arange(6), 6, 6, 0, 0)


def test_a_model_that_returns_no_loss_is_named() -> None:
    with pytest.raises(ConfigError, match=r"returns its loss.*got dict with logits.*'labels'"):
        OwnLoss().forward(Language(shifts=True), {"input_ids": SENTENCES["input_ids"]})


@pytest.mark.parametrize(
    "output", [torch.zeros(3), (torch.zeros(()), torch.zeros(())), {"loss": 3.0}, None]
)
def test_what_is_no_loss_is_refused(output: Any) -> None:
    with pytest.raises(ConfigError, match="a model that returns its loss"):
        loss_in(output)


def test_what_a_loss_counts_is_kept_for_workers_that_join_and_for_a_resumed_run() -> None:
    torch.manual_seed(0)
    model = Language(shifts=True)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1))
    assert "loss_counts" not in step.state_dict()
    step(batch_of(SENTENCES))
    other = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1))
    other.load_state_dict(step.state_dict())
    assert other.state_dict()["loss_counts"] == Counting.NEXT_LABELS.name
