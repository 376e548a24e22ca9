"""Any form of loss becomes a sum over samples; what cannot be summed is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.training.losses import LossModule, as_sum, check_fit

OUTPUT = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_means_and_single_losses_give_the_same_sum(reduction: str) -> None:
    total, count = as_sum(nn.CrossEntropyLoss(reduction=reduction)(OUTPUT, LABELS), 6)
    torch.testing.assert_close(total, nn.functional.cross_entropy(OUTPUT, LABELS, reduction="sum"))
    assert count == 6


def test_a_pair_is_taken_as_it_is() -> None:
    assert as_sum((torch.tensor(3.0), 5), 2) == (torch.tensor(3.0), 5)


@pytest.mark.parametrize("value", [torch.zeros(6, 4), torch.zeros(5), "loss", None])
def test_other_forms_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="loss_fn"):
        as_sum(value, 6)


def test_class_weights_cannot_be_averaged_by_parts() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    halves = [nn.CrossEntropyLoss(weights)(OUTPUT[a:b], LABELS[a:b]) for a, b in ((0, 3), (3, 6))]
    # the fault that is guarded against: the mean of the halves is not the mean
    assert not torch.isclose(sum(halves) / 2, nn.CrossEntropyLoss(weights)(OUTPUT, LABELS))
    with pytest.raises(ConfigError, match="class weights"):
        LossModule(nn.Linear(1, 4), nn.CrossEntropyLoss(weights))
    with pytest.raises(ConfigError, match="reduction='sum'"):
        LossModule(nn.Linear(1, 4), nn.CrossEntropyLoss(reduction="sum"))


@pytest.mark.parametrize(
    ("output", "labels", "said"),
    [
        (OUTPUT, LABELS + 1, "labels need \\(5\\), got 4 outputs"),
        (OUTPUT, LABELS - 1, "labels from -1"),
        (OUTPUT, LABELS[:5], "labels \\[5\\]"),
        (OUTPUT[:, 0], LABELS, "output \\[6\\]"),
    ],
)
def test_labels_must_fit_the_output(output: torch.Tensor, labels: torch.Tensor, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_fit(nn.CrossEntropyLoss(), output, labels)


def test_ignored_labels_do_not_count() -> None:
    check_fit(nn.CrossEntropyLoss(ignore_index=-7), OUTPUT, torch.tensor([0, 1, -7, 3, 0, 1]))


def test_data_that_is_no_pair_needs_a_forward() -> None:
    model = nn.Linear(3, 4)
    data = {"x": torch.zeros(6, 3), "y": LABELS}
    with pytest.raises(ConfigError, match="forward"):
        LossModule(model, nn.CrossEntropyLoss())(data, 6)
    total, count = LossModule(model, nn.CrossEntropyLoss(), lambda m, d: (m(d["x"]), d["y"]))(data, 6)
    assert torch.isfinite(total)
    assert count == 6


def test_no_samples_give_zero_gradients_even_of_infinite_weights() -> None:
    model = nn.Linear(3, 4)
    model.weight.data.fill_(float("inf"))
    total, count = LossModule(model, nn.CrossEntropyLoss())((torch.zeros(0, 3), LABELS[:0]), 0)
    total.backward()
    assert (float(total.detach()), count) == (0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_loss_with_parameters_adds_no_names() -> None:
    names = set(LossModule(nn.Linear(3, 4), nn.CrossEntropyLoss()).state_dict())
    assert names == {"model.weight", "model.bias"}
