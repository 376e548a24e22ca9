"""Losses and metrics by one rule: what is no mean over samples is refused, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.data.nested import map_tensors
from lockstep.errors import ConfigError
from lockstep.training.losses import LossFn, LossModule, LossSum
from lockstep.training.sample_sums import NotAMean, SampleSum, as_sum

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(3)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


SCORES, POINTS, OTHERS = draw(9, 4), draw(9, 5), draw(9, 5)
LABELS = torch.tensor([0, 1, 2, 3, 0, 1, 1, 1, 2])
IGNORED = LABELS.where(torch.arange(9) < 7, -100)
TEXTS, TOKENS = draw(9, 6, 4), torch.randint(0, 4, (9, 6), generator=GENERATOR)
PADDED = TOKENS.where(torch.arange(6)[None] < torch.arange(9)[:, None] % 6 + 1, -100)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 4.0])


def check(fn: LossFn, output: Any, target: Any, size: int = 9) -> NotAMean | None:
    """What the check of a loss finds; the loss has been called with the part."""
    loss = SampleSum("loss_fn", fn)
    loss(output, target, size)
    return loss.check()


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output @ target.T, torch.arange(len(output)))


def tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def dice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    chances = output.sigmoid()
    return 1 - 2 * (chances * target).sum() / (chances.sum() + target.sum())


def hardest(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="none").topk(3).values.mean()


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, output: Any, target: Any) -> Any:
        return self.inner(output, target)


@pytest.mark.parametrize(
    ("fn", "output", "target"),
    [
        (lambda output, target: F.mse_loss(output, target, reduction="sum"), POINTS, OTHERS),
        (Around(nn.MSELoss(reduction="sum")), POINTS, OTHERS),
        (lambda output, target: F.mse_loss(output, target, reduction="sum") / 256, POINTS, OTHERS),
        (lambda output, target: F.cross_entropy(output, target, WEIGHTS), SCORES, LABELS),
        (Around(nn.CrossEntropyLoss(WEIGHTS)), SCORES, LABELS),
        (Around(nn.CrossEntropyLoss()), SCORES, IGNORED),
        (tokens, TEXTS, PADDED),
        (tokens, TEXTS.bfloat16(), PADDED),
        # at the beginning of a training the losses of all tokens are nearly the same, and so is any mean of them
        (tokens, 1e-6 * TEXTS, PADDED),
        (lambda output, target: F.cross_entropy(output, target), TEXTS.flatten(0, 1), PADDED.flatten()),
        (
            lambda output, target: output["logits"].flatten(0, 1).logsumexp(1)[target.flatten() >= 0].mean(),
            {"logits": TEXTS},
            PADDED,
        ),
        (contrastive, POINTS, OTHERS),
        (
            lambda output, target: F.cross_entropy(output @ target.T, torch.arange(9)[: len(output)], reduction="none"),
            POINTS,
            OTHERS,
        ),
        (dice, POINTS, (OTHERS > 0).float()),
        (hardest, SCORES, LABELS),
        (lambda output, target: F.mse_loss(output, target), POINTS[:, :1], OTHERS[:, 0]),  # all against all
        (lambda output, target: (output - output.mean(0)).square().mean(), POINTS, OTHERS),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_is_no_mean_over_samples_is_refused(fn: LossFn, output: Any, target: Any) -> None:
    found = check(fn, output, target)
    assert found is not None
    assert found.samples == 9
    with pytest.raises(
        ConfigError, match=r"loss_fn: expected a mean over samples, .* for 9 samples of rank 0 .*\(sum, count\)"
    ):
        raise found.error()


@dataclass
class Out:
    """What a model may return."""

    logits: torch.Tensor
    hidden: torch.Tensor
    note: str = "text"


def kl(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    found, mean, logvar = output
    return F.mse_loss(found, target) - 0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()


@pytest.mark.parametrize(
    ("fn", "output", "target"),
    [
        (F.mse_loss, POINTS, OTHERS),
        (nn.HuberLoss(), POINTS.bfloat16(), OTHERS.bfloat16()),
        (nn.BCEWithLogitsLoss(pos_weight=torch.arange(5.0)), POINTS, (OTHERS > 0).float()),
        (nn.KLDivLoss(reduction="batchmean"), SCORES.log_softmax(1), SCORES.flip(0).softmax(1)),
        (nn.MultiMarginLoss(weight=WEIGHTS), SCORES, LABELS),
        (lambda output, target: F.cross_entropy(output, target, label_smoothing=0.1), SCORES, LABELS),
        (lambda output, target: F.cross_entropy(output, target, reduction="none"), SCORES, LABELS),
        (tokens, TEXTS, TOKENS),
        (lambda output, target: F.cross_entropy(output, target), TEXTS.flatten(0, 1), TOKENS.flatten()),
        (kl, (POINTS, OTHERS, POINTS.flip(0)), OTHERS),
        (
            lambda output, target: F.cross_entropy(output.logits, target) + output.hidden.square().mean(),
            Out(SCORES, POINTS),
            LABELS,
        ),
        # the sum of many numbers that nearly cancel each other
        (lambda output, target: (output * target).mean(), draw(9, 5000), draw(9, 5000)),
        (lambda output, target: F.cosine_embedding_loss(output[0], output[1], target), (POINTS, OTHERS), LABELS.sign()),
        (lambda output, target: F.mse_loss(output, target) + WEIGHTS.square().sum(), POINTS, OTHERS),
        # what is not cut by samples may be there, and be a constant of the model
        (lambda output, target: F.mse_loss(output[0], target), (POINTS, torch.ones(3, 9)), OTHERS),
        (lambda output, target: output.sum() * 0, POINTS, OTHERS),
    ],
)
def test_what_is_one_is_not(fn: LossFn, output: Any, target: Any) -> None:
    assert check(fn, output, target) is None
    assert check(fn, map_tensors(lambda t: t[:2], output), map_tensors(lambda t: t[:2], target), 2) is None


def test_sums_with_their_counts_need_no_second_call() -> None:
    calls = []

    def counted(output: torch.Tensor, target: torch.Tensor) -> Any:
        calls.append(len(output))
        return F.mse_loss(output, target, reduction="sum"), output.numel()

    assert check(counted, POINTS, OTHERS) is None
    assert calls == [9]


def test_a_loss_that_draws_numbers_or_counts_its_calls_is_let_alone() -> None:
    count = iter(range(100))
    for fn in (
        lambda output, target: F.mse_loss(F.dropout(output), target, reduction="sum"),
        lambda output, target: F.mse_loss(output, target, reduction="sum") * random.random(),
        lambda output, target: F.mse_loss(output, target, reduction="sum") * next(count),
    ):
        loss = SampleSum("loss_fn", fn)
        loss(POINTS, OTHERS, 9)
        drawn = torch.get_rng_state(), random.getstate()
        assert loss.check() is None
        # and leaves no trace
        assert torch.equal(torch.get_rng_state(), drawn[0])
        assert random.getstate() == drawn[1]


class Moving(nn.Module):
    """A loss that keeps something from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(5))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.center = self.center * 0.5 + output.mean(0).detach()
        return (output - self.center - target).square().mean()


def test_the_state_of_a_loss_stays() -> None:
    fn = Moving()
    assert check(fn, POINTS, OTHERS) is None
    torch.testing.assert_close(fn.center, POINTS.mean(0))


@pytest.mark.parametrize(
    ("fn", "output", "target", "size"),
    [
        # the samples are not in the first dimension, or there is one only
        (
            lambda output, target: F.ctc_loss(output, target, (7,) * 9, (6,) * 9),
            draw(7, 9, 5).log_softmax(2),
            TOKENS + 1,
            9,
        ),
        (lambda output, target: F.mse_loss(output, target, reduction="sum"), POINTS[:1], OTHERS[:1], 1),
        # it can be called with a whole batch only, or changes its arguments
        (lambda output, target: F.mse_loss(output.view(9, 5), target), POINTS, OTHERS, 9),
        (lambda output, target: F.mse_loss(output.mul_(1.1), target), POINTS.clone(), OTHERS, 9),
    ],
)
def test_where_a_loss_cannot_be_checked_nothing_is_reported(fn: LossFn, output: Any, target: Any, size: int) -> None:
    assert check(fn, output, target, size) is None


def test_a_closed_function_keeps_nothing_and_is_called_once() -> None:
    calls = []
    loss = SampleSum("loss_fn", lambda output, target: calls.append(0) or F.mse_loss(output, target))
    loss(POINTS, OTHERS, 9)
    assert loss.check() is None
    calls.clear()
    loss(POINTS, OTHERS, 9)
    assert (len(calls), loss._call, loss.check()) == (1, None, None)


@pytest.mark.parametrize(
    "fn",
    [
        partial(F.mse_loss, reduction="sum"),
        partial(partial(F.l1_loss, reduction="sum"), weight=None),
        nn.L1Loss(reduction="sum"),
    ],
)
def test_a_loss_with_reduction_sum_is_refused_before_anything_is_computed(fn: LossFn) -> None:
    with pytest.raises(ConfigError, match=r"loss_fn: .* got .*reduction='sum'"):
        LossSum(fn, CPU)


class Own(nn.Module):
    """A model that computes its loss itself, as those of libraries of transformers do."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 8), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(8, 5), nn.Dropout(0.5))
        self.ignored = 0 if padded else -100
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        scores = self.head(self.embed(texts))
        loss = F.cross_entropy(scores.flatten(0, 1), texts.flatten(), ignore_index=self.ignored)
        return {"loss": loss, "scores": scores}


@pytest.mark.parametrize("scalar_alone", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_loss_that_the_model_has_computed_itself(padded: bool, scalar_alone: bool) -> None:
    torch.manual_seed(0)
    texts = torch.randint(1, 5, (9, 6)).where(torch.arange(6)[None] < torch.arange(9)[:, None] % 6 + 1, 0)
    model = Own(padded).train()

    def forward(model: nn.Module, data: torch.Tensor) -> tuple[Any, Any]:
        output = model(data)
        return (output["loss"] if scalar_alone else output), None

    loss = LossModule(model, LossSum(lambda output, _: output if scalar_alone else output["loss"], CPU), forward)
    total, _ = loss(texts, 9)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    drawn = torch.get_rng_state()
    found = loss.check(torch.no_grad)
    assert (found is not None) is padded
    # and the model is as it was
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.training and model.head.training
    assert all(p.grad is None for p in model.parameters())
    total.backward()


# --- metrics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, True, torch.tensor(3), torch.tensor(True)])
def test_a_whole_number_is_no_mean(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"metrics: .* got a whole number .* no mean. Return \(sum, count\)"):
        as_sum(value, 6, "metrics")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, (3.0, 6)),
        (torch.tensor(0.5), (3.0, 6)),
        (torch.tensor([True, False, True, True, False, False]), (3, 6)),
        (torch.ones(6, 1), (6.0, 6)),
        ((3, 4), (3, 4)),
        ([torch.ones(1), 4.0], (1.0, 4.0)),
    ],
)
def test_the_forms_of_a_metric(value: Any, expected: tuple[float, float]) -> None:
    total, count = as_sum(value, 6, "metrics")
    assert (float(total), float(count)) == expected
    assert not isinstance(total, torch.Tensor) or total.dim() == 0


@pytest.mark.parametrize("value", [(torch.ones(6), 6), (1, 2, 3), torch.ones(5), None])
def test_other_forms_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="metrics: expected a scalar mean, 6 values"):
        as_sum(value, 6, "metrics")


def by_sample(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1) == target


METRICS: list[tuple[Callable[..., Any], bool]] = [
    (by_sample, True),
    (lambda output, target: by_sample(output, target).float().mean(), True),
    (lambda output, target: by_sample(output, target).double().mean().item(), True),
    (lambda output, target: float(by_sample(output, target).numpy().mean()), True),
    (lambda output, target: by_sample(output, target).float().sum(), False),
    (lambda output, target: by_sample(output, target)[target != 1].float().mean(), False),
    (lambda output, target: (output.softmax(1).numpy() ** 2).sum(), False),
]


@pytest.mark.parametrize(("metric", "fine"), METRICS)
def test_metrics_get_the_same_check(metric: Any, fine: bool) -> None:
    found = SampleSum("metrics", metric, "share")
    found(SCORES, LABELS.where(torch.arange(9) != 2, SCORES.argmax(1)), 9)
    wrong = found.check(gradients=False)
    assert (wrong is None) is fine
    if wrong is not None:
        assert str(wrong.error()).startswith(
            "metrics: expected a mean over samples, one value for each sample, or (sum"
        )
        assert "share, which gives" in str(wrong.error())


# --- half formats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (8192,)])
def test_a_sum_of_half_numbers_neither_overflows_nor_rounds_to_them(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.full(shape, 20.125, dtype=dtype, requires_grad=True)  # a mean, or one value for each sample
    total, count = as_sum(value, 8192)
    assert (float(total.detach()), count) == (20.125 * 8192, 8192)  # 164,864: above what float16 can hold
    total.backward()
    assert value.grad is not None
    assert value.grad.dtype == dtype


def test_rounding_of_a_loss_in_half_numbers_is_no_other_mean() -> None:
    def rounded(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target).bfloat16()

    assert check(rounded, POINTS, OTHERS) is None
