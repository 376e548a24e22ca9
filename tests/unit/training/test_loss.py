"""Any form of loss becomes a sum over samples; what cannot be summed is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.data.loader import Batch
from lockstep.errors import ConfigError
from lockstep.training.losses.loss import Forward, Loss, LossFn, LossModule
from lockstep.training.losses.sum_and_count import as_sum
from lockstep.training.losses.torch_losses import check_fit, classification_loss
from lockstep.training.step.train_step import TrainStep

CPU = torch.device("cpu")

OUTPUT = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])
PICTURES = torch.randn(6, 4, 2, 3, generator=torch.Generator().manual_seed(1))
MAPS = torch.arange(36).view(6, 2, 3) % 4
WEIGHTS = torch.tensor([1.0, 2.0, 0.0, 4.0])


def module(model: nn.Module, loss_fn: LossFn, forward: Forward | None = None) -> LossModule:
    return LossModule(model, Loss(loss_fn, CPU, forward))


def without(labels: torch.Tensor, *ignored: int, value: int = -100) -> torch.Tensor:
    """`labels` with those of some samples to be ignored, and one more in the last sample."""
    changed = labels.clone()
    changed[list(ignored)] = value
    changed.view(-1)[-1] = value
    return changed


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


@pytest.mark.parametrize(
    ("loss_fn", "output", "target"),
    [
        (nn.CrossEntropyLoss(), OUTPUT, LABELS),
        (nn.CrossEntropyLoss(), OUTPUT, without(LABELS, 0, 1, 2)),
        (nn.CrossEntropyLoss(ignore_index=2), OUTPUT, without(LABELS, 0, value=2)),
        (nn.CrossEntropyLoss(WEIGHTS), OUTPUT, LABELS),
        (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), OUTPUT, without(LABELS, 1)),
        (nn.CrossEntropyLoss(label_smoothing=0.2), OUTPUT, without(LABELS, 1)),
        (nn.CrossEntropyLoss(), OUTPUT, OUTPUT.softmax(1)),
        (nn.CrossEntropyLoss(WEIGHTS), PICTURES, PICTURES.softmax(1)),
        (nn.CrossEntropyLoss(), PICTURES, without(MAPS, 0, 1, 2)),
        (nn.CrossEntropyLoss(WEIGHTS), PICTURES, without(MAPS, 0)),
        (nn.NLLLoss(), OUTPUT.log_softmax(1), without(LABELS, 0)),
        (nn.NLLLoss(WEIGHTS), OUTPUT.log_softmax(1), without(LABELS, 0)),
        (nn.functional.cross_entropy, OUTPUT, without(LABELS, 0)),
        (nn.functional.nll_loss, OUTPUT.log_softmax(1), without(LABELS, 0)),
        (partial(nn.functional.cross_entropy, ignore_index=2), OUTPUT, without(LABELS, 0, value=2)),
        (
            partial(nn.functional.cross_entropy, weight=WEIGHTS, label_smoothing=0.1),
            OUTPUT,
            without(LABELS, 0),
        ),
        (partial(nn.functional.cross_entropy, reduction="none"), OUTPUT, LABELS),
        (
            partial(nn.functional.nll_loss, ignore_index=2),
            OUTPUT.log_softmax(1),
            without(LABELS, 0, value=2),
        ),
        (nn.MSELoss(), OUTPUT, OUTPUT.flip(0)),
        (nn.L1Loss(reduction="none"), OUTPUT[:, 0], OUTPUT[:, 1]),
        (nn.BCEWithLogitsLoss(WEIGHTS, pos_weight=WEIGHTS + 1), OUTPUT, OUTPUT.sigmoid()),
        (nn.BCELoss(WEIGHTS), OUTPUT.sigmoid(), OUTPUT.sigmoid()),
        (nn.MultiMarginLoss(weight=WEIGHTS), OUTPUT, LABELS),
    ],
)
def test_parts_add_up_to_torchs_mean_over_all(
    loss_fn: LossFn, output: torch.Tensor, target: torch.Tensor
) -> None:
    whole, parts = output.clone().requires_grad_(), output.clone().requires_grad_()
    expected = loss_fn(whole, target).mean()
    loss = Loss(loss_fn, CPU)
    found = [loss(parts[a:b], target[a:b], b - a) for a, b in ((0, 1), (1, 5), (5, 6))]
    got = sum(part for part, _ in found) / sum(torch.as_tensor(count) for _, count in found)
    torch.testing.assert_close(got, expected)
    expected.backward()
    got.backward()
    torch.testing.assert_close(parts.grad, whole.grad)


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)]
)
def test_where_all_labels_are_ignored_there_is_nothing(loss_fn: nn.Module) -> None:
    output, target = OUTPUT.clone().requires_grad_(), torch.full((6,), -100)
    # the fault that is guarded against
    assert loss_fn(output, target).isnan()
    loss, count = Loss(loss_fn, CPU)(output, target, 6)
    loss.backward()
    assert (float(loss.detach()), int(count)) == (0, 0)
    assert output.grad is not None and not output.grad.any()


class Own(nn.CrossEntropyLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input, target) * 2


def test_class_weights_of_an_unknown_computation_are_refused() -> None:
    halves = [Own(WEIGHTS)(OUTPUT[a:b], LABELS[a:b]) for a, b in ((0, 3), (3, 6))]
    # the fault that is guarded against: the mean of the halves is not the mean
    assert not torch.isclose(sum(halves) / 2, Own(WEIGHTS)(OUTPUT, LABELS))
    with pytest.raises(ConfigError, match="class weights"):
        Loss(Own(WEIGHTS), CPU)
    total, count = Loss(Own(), CPU)(OUTPUT, LABELS, 6)
    torch.testing.assert_close(total / count, Own()(OUTPUT, LABELS))


def test_a_bare_sum_is_refused() -> None:
    with pytest.raises(ConfigError, match="reduction='sum'"):
        Loss(nn.CrossEntropyLoss(reduction="sum"), CPU)


def test_a_loss_goes_where_the_outputs_are() -> None:
    loss_fn = nn.CrossEntropyLoss(WEIGHTS.clone())
    Loss(loss_fn, torch.device("meta"))
    assert loss_fn.weight is not None and loss_fn.weight.device.type == "meta"


def test_the_error_of_a_batch_norm_of_one_value_advises_and_other_errors_stay() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))
    with pytest.raises(ConfigError, match=r"global_batch_size: .* a part of 1 .*drop_last"):
        module(model, nn.CrossEntropyLoss())((torch.zeros(1, 3), LABELS[:1]), 1)
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        module(model, nn.CrossEntropyLoss())((torch.zeros(1, 3, 1, 1), LABELS[:1]), 1)


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
        module(model, nn.CrossEntropyLoss())(data, 6)
    total, count = module(model, nn.CrossEntropyLoss(), lambda m, d: (m(d["x"]), d["y"]))(data, 6)
    assert torch.isfinite(total)
    assert count == 6


def test_no_samples_add_nothing_even_to_infinite_weights() -> None:
    model = nn.Linear(3, 4)
    model.weight.data.fill_(float("inf"))
    reached = []
    for p in model.parameters():
        p.register_hook(reached.append)
    total, count = module(model, nn.CrossEntropyLoss())((torch.zeros(0, 3), LABELS[:0]), 0)
    total.backward()
    assert (float(total.detach()), count) == (0, 0)
    # every parameter was come by, which other workers wait for, and none got a gradient
    assert len(reached) == 2
    assert all(p.grad is None for p in model.parameters())


class Learnt(nn.Module):
    """A loss with a parameter and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.CrossEntropyLoss(WEIGHTS)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.inner(output, target) * self.scale
        return value


def test_a_loss_with_parameters_adds_no_names() -> None:
    made = module(nn.Linear(3, 4), Learnt())
    assert set(made.state_dict()) == {"model.weight", "model.bias"}
    assert len(list(made.parameters())) == 2


@pytest.mark.parametrize("fn", [nn.functional.cross_entropy, nn.functional.nll_loss])
def test_a_bare_sum_is_refused_of_a_function_with_keywords_too(fn: LossFn) -> None:
    with pytest.raises(
        ConfigError, match=r"got partial\((nll_loss|cross_entropy), reduction='sum'\)"
    ):
        Loss(partial(fn, reduction="sum"), CPU)


def test_a_function_with_its_target_bound_is_the_users_own() -> None:
    assert classification_loss(partial(nn.functional.cross_entropy, target=LABELS)) is None
    assert classification_loss(partial(nn.functional.cross_entropy, OUTPUT)) is None


def test_a_loss_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss_fn: expected a function"):
        Loss("cross_entropy", CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "target", "said"),
    [
        (
            (OUTPUT, OUTPUT),
            LABELS,
            "model: expected a tensor of class scores as its output, got tuple. .*forward=",
        ),
        (
            OUTPUT,
            LABELS.tolist(),
            "data: expected a tensor of class labels as the target, got list",
        ),
        (
            OUTPUT,
            LABELS.int(),
            r"data: expected class labels of dtype torch.int64, got torch.int32. .*labels.long",
        ),
    ],
)
def test_what_is_no_tensor_of_labels_or_scores_is_named(
    output: object, target: object, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Loss(nn.CrossEntropyLoss(), CPU)(output, target, 6)


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(WEIGHTS), nn.functional.cross_entropy]
)
def test_a_label_of_a_later_batch_that_is_too_large_is_named(loss_fn: LossFn) -> None:
    loss = Loss(loss_fn, CPU)
    loss(OUTPUT, LABELS, 6)
    with pytest.raises(ConfigError, match=r"outputs as the labels need \(8\)"):
        loss(OUTPUT, LABELS + 4, 6)


def test_other_errors_of_a_loss_are_left_as_they_are() -> None:
    loss = Loss(nn.CrossEntropyLoss(WEIGHTS[:3]), CPU)
    with pytest.raises(RuntimeError, match="weight tensor"):
        loss(OUTPUT, LABELS, 6)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_shapes_that_are_broadcast_are_named() -> None:
    """A mean over n x n pairs is no mean over samples, and never meant."""
    model = nn.Linear(3, 1)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss())
    samples = torch.randn(8, 3), torch.randn(8)
    with pytest.raises(
        ConfigError,
        match=r"of shape \[8, 1\] and a target of shape \[8\] are broadcast to \[8, 8\]",
    ):
        step(Batch(samples, torch.arange(8), 8, 8, 0, 0))


# --- the count from torch's kernel
# ------------------------------------------------------------------------------------


def operations_of(loss: Loss, output: torch.Tensor, target: torch.Tensor) -> list[str]:
    """The operations of a loss of six samples."""

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Operations():
        loss(output, target, 6)
    return names


@pytest.mark.parametrize(
    ("loss_fn", "output", "target"),
    [
        (nn.CrossEntropyLoss(), OUTPUT, without(LABELS, 0, 1)),
        (nn.CrossEntropyLoss(ignore_index=2), OUTPUT, without(LABELS, 0, value=2)),
        (nn.functional.cross_entropy, OUTPUT, LABELS),
        (nn.NLLLoss(), OUTPUT.log_softmax(1), without(LABELS, 3)),
        (nn.NLLLoss(), OUTPUT.log_softmax(1), torch.full((6,), -100)),
    ],
)
def test_the_count_of_torch_s_kernel_is_the_count_and_the_sum_has_the_same_bits(
    loss_fn: LossFn, output: torch.Tensor, target: torch.Tensor
) -> None:
    ours, theirs = output.clone().requires_grad_(), output.clone().requires_grad_()
    loss = Loss(loss_fn, CPU)
    total, count = loss(ours, target, 6)
    summing = classification_loss(loss_fn)
    summing.reduction = "sum"
    expected = summing(theirs, target)
    total.backward()
    expected.backward()
    assert torch.equal(total, expected) and torch.equal(ours.grad, theirs.grad)
    assert int(count) == int((target != summing.ignore_index).sum())
    assert not [
        name for name in operations_of(loss, ours, target) if "ne." in name or "aten.sum" in name
    ]


class Doubled(nn.CrossEntropyLoss):
    """A subclass with torch's own forward pass, which need not be the one that is called."""


@pytest.mark.parametrize(
    ("loss_fn", "output", "target"),
    [
        (nn.CrossEntropyLoss(WEIGHTS), OUTPUT, LABELS),
        (nn.CrossEntropyLoss(label_smoothing=0.1), OUTPUT, LABELS),
        (Doubled(), OUTPUT, LABELS),
        (nn.CrossEntropyLoss(), OUTPUT.bfloat16(), LABELS),
        (nn.CrossEntropyLoss(), OUTPUT.double(), LABELS),
        (nn.CrossEntropyLoss(), PICTURES, MAPS),
        (nn.CrossEntropyLoss(), OUTPUT, LABELS.to(torch.uint8)),
    ],
)
def test_other_losses_are_counted_by_their_labels(
    loss_fn: LossFn, output: torch.Tensor, target: torch.Tensor
) -> None:
    assert any("aten.ne." in name for name in operations_of(Loss(loss_fn, CPU), output, target))


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_of_a_loss_are_called(of_all: bool) -> None:
    loss_fn = nn.CrossEntropyLoss()
    loss = Loss(loss_fn, CPU)
    loss(OUTPUT, LABELS, 6)
    register = (
        nn.modules.module.register_module_forward_hook if of_all else loss_fn.register_forward_hook
    )
    hook = register(lambda module, inputs, output: output * 3)
    try:
        torch.testing.assert_close(loss(OUTPUT, LABELS, 6)[0], 18 * loss_fn(OUTPUT, LABELS) / 3)
    finally:
        hook.remove()
