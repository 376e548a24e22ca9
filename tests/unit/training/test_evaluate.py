"""What accuracy counts, and what an evaluation refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.communicator import Communicator
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError, DataError
from lockstep.topology import World
from lockstep.training.evaluate import Evaluation, _concatenate, accuracy, default_metrics, evaluate

CPU = torch.device("cpu")


def loader(*tensors: torch.Tensor, global_batch_size: int = 4) -> Loader:
    return Loader(TensorDataset(*tensors), global_batch_size, comm=Communicator.at(World(), CPU))


def test_accuracy_of_labels() -> None:
    output = torch.eye(4)
    assert [int(n) for n in accuracy(output, torch.tensor([0, 1, 3, 3]))] == [3, 4]
    assert [int(n) for n in accuracy(output, torch.tensor([0, -100, 3, 3]))] == [2, 3]
    assert [int(n) for n in accuracy(output, torch.tensor([0, 1, 2, 3]), ignore_index=0)] == [3, 3]


def test_accuracy_of_labels_at_every_position() -> None:
    output = torch.zeros(2, 3, 4, 5)
    output[:, 1] = 1
    target = torch.ones(2, 4, 5, dtype=torch.long)
    target[0] = 2
    target[1, 0] = -100
    assert [int(n) for n in accuracy(output, target)] == [15, 35]


def test_accuracy_of_probabilities_goes_by_the_largest() -> None:
    target = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    assert [int(n) for n in accuracy(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), target)] == [1, 2]


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.long)),
        (torch.zeros(4, 3, 2), torch.zeros(4, dtype=torch.long)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.long)),
        (torch.zeros(4, 3), torch.zeros(4)),
    ],
)
def test_accuracy_of_other_shapes_is_refused(output: torch.Tensor, target: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"output \[4.*target \[4"):
        accuracy(output, target)


class Picture(nn.Module):
    """Finds class 1 everywhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([0 * x, 0 * x + 1], dim=1)


def test_an_evaluation_of_labels_at_every_position() -> None:
    x = torch.zeros(10, 3, 5)
    labels = torch.ones(10, 3, 5, dtype=torch.long)
    labels[:2] = 0
    labels[2:6] = 7
    measured = evaluate(Picture(), loader(x, labels), nn.CrossEntropyLoss(ignore_index=7))
    expected = nn.CrossEntropyLoss(ignore_index=7)(Picture()(x), labels)
    assert measured == pytest.approx({"loss": float(expected), "accuracy": 4 / 6})


def test_metrics_are_means_over_samples_or_what_they_count() -> None:
    x = torch.arange(10.0)[:, None]
    metrics: dict[str, Any] = {
        "mean": lambda output, target: output.mean(),
        "by sample": lambda output, target: output,
        "by count": lambda output, target: (output.sum(), (target > 3).sum()),
    }
    measured = evaluate(nn.Identity(), loader(x, x), nn.MSELoss(), metrics)
    assert measured == pytest.approx({"loss": 0.0, "mean": 4.5, "by sample": 4.5, "by count": 7.5})


def test_a_metric_may_not_take_the_name_of_the_loss() -> None:
    x = torch.zeros(4, 1)
    with pytest.raises(ConfigError, match=r"metrics: .* got 'loss'"):
        evaluate(
            nn.Identity(), loader(x, x), nn.MSELoss(), {"loss": lambda output, target: output.sum()}
        )


def test_nothing_to_count_is_an_error_with_its_name() -> None:
    x = torch.zeros(4, 1)
    with pytest.raises(DataError, match="something that loss counts, got none"):
        evaluate(nn.Linear(1, 2), loader(x, torch.full((4,), -100)), nn.CrossEntropyLoss())
    nothing: dict[str, Any] = {"pixels": lambda output, target: (output.sum(), 0)}
    with pytest.raises(DataError, match="something that pixels counts, got none"):
        evaluate(nn.Identity(), loader(x, x), nn.MSELoss(), nothing)


def test_accuracy_is_the_default_of_classification() -> None:
    for loss_fn in (nn.CrossEntropyLoss(), nn.NLLLoss(), nn.functional.cross_entropy):
        assert list(default_metrics(loss_fn)) == ["accuracy"]
    assert default_metrics(nn.MSELoss()) == {}


def test_a_sum_as_a_metric_is_refused_by_its_name() -> None:
    x = torch.arange(10.0)[:, None]
    with pytest.raises(
        ConfigError,
        match=r"metrics: .* total, which gives 16 for 4 samples of rank 0 and 8 as the mean",
    ):
        evaluate(
            nn.Identity(),
            loader(x, x),
            nn.MSELoss(),
            {"total": lambda output, target: output.sum()},
        )


@pytest.mark.parametrize("metrics", [{"x": 1}, [1]])
def test_metrics_that_cannot_be_called_are_refused(metrics: Any) -> None:
    data = loader(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"metrics: expected a (function|mapping)"):
        evaluate(nn.Linear(3, 2), data, nn.CrossEntropyLoss(), metrics)


def test_a_metric_is_compared_again_in_each_evaluation_and_refused_once_it_shows() -> None:
    def f1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = output.argmax(1)
        both = ((found == 1) & (target == 1)).sum()
        return 2.0 * both / ((found == 1).sum() + (target == 1).sum()).clamp(min=1)

    model = nn.Linear(2, 2)
    inputs = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    data = loader(inputs, (inputs[:, 0] > 0.3).long(), global_batch_size=16)
    measures = Evaluation(model, nn.CrossEntropyLoss(), {"f1": f1}, CPU)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(
            torch.tensor([1.0, 0.0])
        )  # all samples are of class 0: the F1 of any part is 0
    assert measures.run(data, None, None, 2)["f1"] == 0.0
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0, 0.5], [1.0, -0.5]]))
    with pytest.raises(ConfigError, match=r"f1, which gives .* lockstep.whole_set\(f1\)"):
        measures.run(data, None, None, 2)


def plain(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = (target >= 0).sum()
    return plain(output, target) * count, count


def test_labels_that_a_loss_ignores_in_few_batches_only_are_found() -> None:
    model = nn.Linear(2, 2)
    inputs = torch.randn(26, 2, generator=torch.Generator().manual_seed(0))
    labels = (inputs[:, 0] > 0.3).long()
    ends, between = labels.clone(), labels.clone()
    ends[-2:] = -100
    between[12:14] = -100  # in batch 3, which is compared for that reason alone
    for each in (ends, between):
        with pytest.raises(ConfigError, match=r"loss_fn: .*, which gives"):
            evaluate(model, loader(inputs, each), plain, {})
    fine = evaluate(
        model, loader(inputs, between, global_batch_size=2), counted, {}
    )  # one batch counts nothing
    assert fine["loss"] == pytest.approx(float(plain(model(inputs), between).detach()))


def test_the_last_batch_is_compared() -> None:
    inputs = torch.randn(26, 2, generator=torch.Generator().manual_seed(0))

    def late(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() if 24 in target else output.mean()  # a sum in the last batch only

    with pytest.raises(ConfigError, match=r"late, which gives"):
        evaluate(
            nn.Linear(2, 1),
            loader(inputs, torch.arange(26.0)[:, None]),
            nn.MSELoss(),
            {"late": late},
        )


class Dropping(nn.Module):
    """A loss that changes a buffer and drops something in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return nn.functional.dropout(output, 0.5, self.training).square().mean(1)


def test_a_loss_is_in_evaluation_mode_while_evaluating() -> None:
    inputs, model, loss = torch.ones(8, 2), nn.Identity(), Dropping()
    for fn in (loss, loss.forward, lambda output, target: loss(output, target)):
        assert evaluate(model, loader(inputs, inputs), fn, {})["loss"] == 1.0
        assert loss.training and float(loss.calls) == 0.0


def test_outputs_of_other_lengths_are_padded_to_the_longest() -> None:
    parts = [
        (torch.ones(2, 3, 4), torch.ones(2, 4).long()),
        (torch.ones(1, 3, 6), torch.ones(1, 6).long()),
    ]
    output, target = _concatenate(parts)
    assert output.shape == (3, 3, 6) and target.shape == (3, 6)
    assert output[:2, :, 4:].isnan().all() and not output[:2, :, :4].isnan().any()
    assert target.tolist() == [[1, 1, 1, 1, -100, -100]] * 2 + [[1] * 6]
    with pytest.raises(
        ConfigError, match=r"same number of dimensions .* got \[2, 3\] and \[2, 3, 1\]"
    ):
        _concatenate([torch.ones(2, 3), torch.ones(2, 3, 1)])
