"""Losses and metrics by one rule: what is no mean over samples is refused, and nothing else is."""

from __future__ import annotations

import random
from bisect import bisect
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import ConfigError
from lockstep.parallel.nested import map_tensors
from lockstep.training.check_schedule import is_due
from lockstep.training.losses import model_check
from lockstep.training.losses.loss import Loss, LossFn, LossModule
from lockstep.training.losses.mean_check import MeanCheck, NotAMean
from lockstep.training.losses.sum_and_count import as_sum

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
    loss = MeanCheck("loss_fn", fn)
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
        # at the beginning of a training the losses of all tokens are nearly the same, and so is any
        # mean of them
        (tokens, 1e-6 * TEXTS, PADDED),
        (
            lambda output, target: F.cross_entropy(output, target),
            TEXTS.flatten(0, 1),
            PADDED.flatten(),
        ),
        (
            lambda output, target: output["logits"]
            .flatten(0, 1)
            .logsumexp(1)[target.flatten() >= 0]
            .mean(),
            {"logits": TEXTS},
            PADDED,
        ),
        (contrastive, POINTS, OTHERS),
        (
            lambda output, target: F.cross_entropy(
                output @ target.T, torch.arange(9)[: len(output)], reduction="none"
            ),
            POINTS,
            OTHERS,
        ),
        (dice, POINTS, (OTHERS > 0).float()),
        (hardest, SCORES, LABELS),
        (
            lambda output, target: F.mse_loss(output, target),
            POINTS[:, :1],
            OTHERS[:, 0],
        ),  # all against all
        (lambda output, target: (output - output.mean(0)).square().mean(), POINTS, OTHERS),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_is_no_mean_over_samples_is_refused(fn: LossFn, output: Any, target: Any) -> None:
    found = check(fn, output, target)
    assert found is not None
    assert found.samples == 9
    with pytest.raises(
        ConfigError,
        match=r"loss_fn: expected a mean over samples, .* for 9 samples of rank 0 .*\(sum, count\)",
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
    return (
        F.mse_loss(found, target) - 0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
    )


@pytest.mark.parametrize(
    ("fn", "output", "target"),
    [
        (F.mse_loss, POINTS, OTHERS),
        (nn.HuberLoss(), POINTS.bfloat16(), OTHERS.bfloat16()),
        (nn.BCEWithLogitsLoss(pos_weight=torch.arange(5.0)), POINTS, (OTHERS > 0).float()),
        (nn.KLDivLoss(reduction="batchmean"), SCORES.log_softmax(1), SCORES.flip(0).softmax(1)),
        (nn.MultiMarginLoss(weight=WEIGHTS), SCORES, LABELS),
        (
            lambda output, target: F.cross_entropy(output, target, label_smoothing=0.1),
            SCORES,
            LABELS,
        ),
        (lambda output, target: F.cross_entropy(output, target, reduction="none"), SCORES, LABELS),
        (tokens, TEXTS, TOKENS),
        (
            lambda output, target: F.cross_entropy(output, target),
            TEXTS.flatten(0, 1),
            TOKENS.flatten(),
        ),
        (kl, (POINTS, OTHERS, POINTS.flip(0)), OTHERS),
        (
            lambda output, target: F.cross_entropy(output.logits, target)
            + output.hidden.square().mean(),
            Out(SCORES, POINTS),
            LABELS,
        ),
        # the sum of many numbers that nearly cancel each other
        (lambda output, target: (output * target).mean(), draw(9, 5000), draw(9, 5000)),
        (
            lambda output, target: F.cosine_embedding_loss(output[0], output[1], target),
            (POINTS, OTHERS),
            LABELS.sign(),
        ),
        (
            lambda output, target: F.mse_loss(output, target) + WEIGHTS.square().sum(),
            POINTS,
            OTHERS,
        ),
        # what is not cut by samples may be there, and be a constant of the model
        (lambda output, target: F.mse_loss(output[0], target), (POINTS, torch.ones(3, 9)), OTHERS),
        (lambda output, target: output.sum() * 0, POINTS, OTHERS),
    ],
)
def test_what_is_one_is_not(fn: LossFn, output: Any, target: Any) -> None:
    assert check(fn, output, target) is None
    assert (
        check(fn, map_tensors(lambda t: t[:2], output), map_tensors(lambda t: t[:2], target), 2)
        is None
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda output, target: (F.mse_loss(output, target, reduction="sum"), output.numel()),
        lambda output, target: (
            F.cross_entropy(output, LABELS[: len(output)]) * len(output),
            len(output),
        ),
        # in-batch negatives, as of a loss that gathers the outputs of all workers: the sum over
        # these samples is right
        lambda output, target: (contrastive(output, target) * len(output), len(output)),
    ],
)
def test_sums_with_counts_that_add_up_are_accepted(fn: LossFn) -> None:
    assert check(fn, POINTS, OTHERS) is None
    assert check(fn, POINTS[:2], OTHERS[:2], 2) is None


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (
            lambda output, target: (F.mse_loss(output, target), output.detach().square().mean()),
            "the count",
        ),
        (lambda output, target: (F.mse_loss(output, target, reduction="sum"), 1), "the count 1 "),
        # a mean, and how many are right: the count adds up, the mean does not
        (lambda output, target: (F.mse_loss(output, target), len(output)), "the sum"),
    ],
)
def test_a_loss_and_a_part_of_it_are_no_sum_and_count(fn: LossFn, says: str) -> None:
    found = check(fn, POINTS, OTHERS)
    assert found is not None
    with pytest.raises(
        ConfigError, match=r"add up over the parts .* for their two halves together"
    ) as caught:
        raise found.error()
    assert says in str(caught.value)


def test_a_count_that_requires_a_gradient_is_none() -> None:
    output = POINTS.clone().requires_grad_()
    with pytest.raises(ConfigError, match=r"loss_fn: .* a second value that requires a gradient"):
        MeanCheck(
            "loss_fn", lambda output, target: (F.mse_loss(output, target), output.square().mean())
        )(output, OTHERS, 9)


def test_the_comparison_is_repeated() -> None:
    due = [step for step in range(5000) if is_due(step)]
    fixed = [0, *(2**n for n in range(11)), 2048, 3072, 4096]
    assert set(fixed) < set(due)
    drawn = sorted(set(due) - set(fixed))
    assert [bisect(fixed, step) for step in drawn] == list(
        range(bisect(fixed, 8), len(fixed) + 1)
    )  # one between two
    loss = MeanCheck(
        "loss_fn",
        lambda output, target: F.cross_entropy(output, target, weight=output.detach()[0].exp()),
    )
    found = {}
    for step in range(6):
        loss.expect(step)
        loss(
            SCORES if step >= 3 else torch.zeros(9, 4), LABELS, 9
        )  # the classes' weights differ from step 3 on
        found[step] = loss.check() is not None
    assert found == {0: False, 1: False, 2: False, 3: False, 4: True, 5: False}


def check_late(batches: list[tuple[Any, Any]], fn: LossFn, size: int = 9) -> list[int]:
    """The steps, of these batches, at which something is found; the first ones are compared in any
    case.
    """
    loss, found = MeanCheck("loss_fn", fn), []
    for step, (output, target) in enumerate(batches):
        loss.expect(step)
        loss(output, target, size)
        if loss.check() is not None:
            found.append(step)
    return found


def masked(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
    return (output - target["values"]).square().mean(1)[target["mask"] > 0].mean()


UNMASKED, MASKED = torch.ones(9), (torch.arange(9) < 4).float()


@pytest.mark.parametrize(
    ("fn", "output", "usual", "unusual"),
    [
        (lambda output, target: F.cross_entropy(output, target), SCORES, LABELS, IGNORED),
        (
            lambda output, target: F.cross_entropy(output, target, ignore_index=255),
            SCORES,
            LABELS,
            IGNORED.where(IGNORED >= 0, 255),
        ),
        (tokens, TEXTS, TOKENS, PADDED),
        # a class that comes late, with another weight, and neither the first nor the last one
        (
            lambda output, target: F.cross_entropy(output, target, WEIGHTS),
            SCORES,
            torch.full((9,), 3),
            LABELS,
        ),
        (masked, POINTS, {"values": OTHERS, "mask": UNMASKED}, {"values": OTHERS, "mask": MASKED}),
        (
            masked,
            POINTS,
            {"values": OTHERS, "mask": UNMASKED > 0},
            {"values": OTHERS, "mask": MASKED > 0},
        ),
        (
            lambda output, target: (output - target)[~target.isnan()].square().mean(),
            POINTS,
            OTHERS,
            OTHERS.where(torch.arange(45).view(9, 5) % 7 > 0, torch.nan),
        ),
    ],
)
def test_samples_with_values_unlike_those_before_are_compared_at_any_step(
    fn: LossFn, output: Any, usual: Any, unusual: Any
) -> None:
    batches = [(output, usual)] * 5 + [(output, unusual), (output, usual), (output, usual)]
    assert not is_due(5)
    assert check_late(batches, fn) == [5]


def test_the_samples_that_are_unlike_are_among_those_compared() -> None:
    scores, labels = draw(300, 4), torch.arange(300) % 4
    late = labels.where(torch.arange(300) != 290, -100)
    mean = lambda output, target: F.cross_entropy(output, target)  # noqa: E731
    assert check_late([(scores, labels)] * 3 + [(scores, late)], mean, 300) == [3]


def test_new_values_in_each_batch_are_not_compared_each_time() -> None:
    calls: deque[int] = deque()

    def fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(len(output))
        return (output - target[:, None]).square().mean(1)

    loss = MeanCheck("loss_fn", fn)
    for step in range(640):
        loss.expect(step)
        loss(POINTS, torch.arange(step, step + 9), 9)
        assert loss.check() is None
    compared = (len(calls) - 640) // 3
    assert 20 < compared <= sum(map(is_due, range(640))) + 8 + 10


def test_a_step_that_is_not_due_costs_the_sum_and_a_look_at_its_value() -> None:
    """Labels of a few samples are looked up without an operation; nothing is kept, copied or called
    again.
    """
    loss = MeanCheck("loss_fn", lambda output, target: F.cross_entropy(output, target))
    for step in range(6):
        loss.expect(step)
        loss(SCORES, LABELS, 9)
        assert loss.check() is None
    assert not is_due(step)
    names: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Operations():
        F.cross_entropy(SCORES, LABELS)
    own, names = names, []
    loss.expect(7)
    with Operations():
        loss(SCORES, LABELS, 9)
    assert names == [*own, "_local_scalar_dense", "mul"]
    assert loss._kept is None


def test_a_part_in_which_nothing_counts_is_found() -> None:
    nothing = torch.full((9,), -100)
    found = check(lambda output, target: F.cross_entropy(output, target), SCORES, nothing)
    assert found is not None
    assert "gives nan for 9 samples of rank 0, whose outputs are finite" in str(found.error())
    half = LABELS.where(torch.arange(9) > 4, -100)
    found = check(lambda output, target: F.cross_entropy(output, target), SCORES, half)
    assert found is not None
    # a loss that is no number for other reasons is not one that counts nothing
    assert check(lambda output, target: output.log().mean(1), SCORES, LABELS) is None
    assert check(lambda output, target: output.square().mean(1), SCORES * torch.nan, LABELS) is None


def test_the_mean_over_nothing_times_nothing_is_nothing() -> None:
    def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = (target >= 0).sum()
        return F.cross_entropy(output, target) * count, count

    assert check(counted, SCORES, LABELS.where(torch.arange(9) > 4, -100)) is None


def test_few_samples_are_compared_and_other_ones_each_time() -> None:
    seen: deque[tuple[float, int]] = (
        deque()
    )  # not a list, as what comparisons append to one is removed

    def fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((float(output[0, 0].detach()), len(output)))
        return F.mse_loss(output, target)

    output = torch.arange(300.0).unsqueeze(1)
    loss = MeanCheck("loss_fn", fn)
    for step in (0, 1, 2, 4, 8, 16):
        loss.expect(step)
        loss(output, output, 300)
        assert loss._kept is not None and loss._kept.output.untyped_storage().nbytes() <= 64 * 4
        seen.clear()
        assert loss.check() is None
        assert [size for _, size in seen] == [64, 32, 32]
        assert seen[0][0] == {0: 0, 1: 64, 2: 128, 4: 192, 8: 236, 16: 0}[step]


def test_values_of_classes_are_no_values_of_samples_where_there_are_as_many_of_both() -> None:
    found = check(
        lambda output, target: F.mse_loss(output, target, reduction="none").mean(0),
        POINTS[:5],
        OTHERS[:5],
        5,
    )
    assert found is not None
    assert "another number of values for fewer of them" in str(found.error())


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_all_pairs_of_samples_are_never_taken_for_the_samples() -> None:
    """For some binary targets, the two halves in their order have the same mean, and all pairs give
    what pairs give.
    """
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        output = torch.randn(16, 1, generator=generator)
        target = (torch.randn(16, generator=generator) > 0).float()
        for loss_fn in (nn.MSELoss(), F.l1_loss, partial(F.huber_loss, delta=0.5)):
            with pytest.raises(
                ConfigError, match=r"output of shape \[16, 1\] and a target of shape \[16\]"
            ):
                Loss(loss_fn, CPU)(output, target, 16)
        for behind in (
            lambda output, target: F.mse_loss(output, target),
            lambda o, t: (o - t).square().mean(),
        ):
            found = check(behind, output, target, 16)
            assert found is not None
            assert "[16, 1] and a target of shape [16] are broadcast to [16, 16]" in str(
                found.error()
            )
        assert check(lambda o, t: F.mse_loss(o.squeeze(1), t), output, target, 16) is None


def test_element_wise_losses_are_known_by_their_shapes() -> None:
    calls = []

    class Watched(nn.Module):
        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            calls.append(len(output))
            return F.mse_loss(output, target)

    for fn, times in ((nn.MSELoss(), 0), (Watched(), 3)):
        loss = Loss(fn, CPU)
        loss(POINTS, OTHERS, 9)
        calls.clear()
        assert loss.check(nullcontext) is None
        assert len(calls) == times
    with pytest.warns(
        UserWarning, match="target size"
    ):  # of torch; each sample has its own target here
        assert float(Loss(nn.MSELoss(), CPU)(POINTS, OTHERS[:, :1], 9)[0]) > 0
    with pytest.raises(ConfigError, match="as many elements of the output for each sample"):
        Loss(nn.MSELoss(), CPU)(POINTS, OTHERS, 7)  # such as nodes of graphs of different sizes


def test_a_loss_that_draws_numbers_or_counts_its_calls_is_let_alone() -> None:
    count = iter(range(100))
    for fn in (
        lambda output, target: F.mse_loss(F.dropout(output), target, reduction="sum"),
        lambda output, target: F.mse_loss(output, target, reduction="sum") * random.random(),
        lambda output, target: F.mse_loss(output, target, reduction="sum") * next(count),
    ):
        loss = MeanCheck("loss_fn", fn)
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
        (
            lambda output, target: F.mse_loss(output, target, reduction="sum"),
            POINTS[:1],
            OTHERS[:1],
            1,
        ),
        # it can be called with a whole batch only, or changes its arguments
        (lambda output, target: F.mse_loss(output.view(9, 5), target), POINTS, OTHERS, 9),
        (lambda output, target: F.mse_loss(output.mul_(1.1), target), POINTS.clone(), OTHERS, 9),
    ],
)
def test_where_a_loss_cannot_be_checked_nothing_is_reported(
    fn: LossFn, output: Any, target: Any, size: int
) -> None:
    assert check(fn, output, target, size) is None


def test_a_closed_function_keeps_nothing_and_is_called_once() -> None:
    calls = []
    loss = MeanCheck(
        "loss_fn", lambda output, target: calls.append(0) or F.mse_loss(output, target)
    )
    loss(POINTS, OTHERS, 9)
    assert loss.check() is None
    calls.clear()
    loss(POINTS, OTHERS, 9)
    assert (len(calls), loss._kept, loss.check()) == (1, None, None)


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
        Loss(fn, CPU)


class Own(nn.Module):
    """A model that computes its loss itself, as those of libraries of transformers do."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(5, 8),
            nn.Sequential(nn.BatchNorm1d(6), nn.Linear(8, 5), nn.Dropout(0.5)),
        )
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
    texts = torch.randint(1, 5, (9, 6)).where(
        torch.arange(6)[None] < torch.arange(9)[:, None] % 6 + 1, 0
    )
    model = Own(padded).train()

    def forward(model: nn.Module, data: torch.Tensor) -> tuple[Any, Any]:
        output = model(data)
        return (output["loss"] if scalar_alone else output), None

    loss = LossModule(
        model, Loss(lambda output, _: output if scalar_alone else output["loss"], CPU, forward)
    )
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


class Experts(nn.Module):
    """A model whose loss has a term that balances experts over the whole batch."""

    def __init__(self, coefficient: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.coefficient, self.dtype = coefficient, dtype
        self.embed, self.gate, self.drop = nn.Embedding(20, 16), nn.Linear(16, 4), nn.Dropout(0.5)
        self.experts, self.out = (
            nn.ModuleList(nn.Linear(16, 16) for _ in range(4)),
            nn.Linear(16, 20),
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        hidden = self.embed(input_ids)
        chances = self.gate(hidden).softmax(-1)
        chosen = F.one_hot(chances.argmax(-1), 4)
        used = torch.stack([expert(hidden) for expert in self.experts], -1)
        hidden = self.drop(hidden + (used * (chosen * chances).unsqueeze(-2)).sum(-1))
        shares = chosen.float().mean((0, 1))
        balance = 4 * (shares * chances.mean((0, 1))).sum()
        scores = self.out(hidden)
        if (
            self.dtype is not None
        ):  # as models do that compute their loss in float32 whatever they compute in
            scores = scores.to(self.dtype)
        return {
            "loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten())
            + self.coefficient * balance
        }


@pytest.mark.parametrize("coefficient", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("copied", [True, False])
def test_a_small_term_of_the_whole_batch_is_seen_in_a_model_s_own_loss(
    coefficient: float, dtype: torch.dtype | None, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not copied:
        monkeypatch.setattr(model_check, "_MAX_COPIED", 0)
    torch.manual_seed(0)
    model, generator = Experts(coefficient, dtype), torch.Generator().manual_seed(1)
    texts = torch.randint(20, (32, 9), generator=generator)
    batch = {"input_ids": texts[:, :-1], "labels": texts[:, 1:]}
    loss = LossModule(model, Loss(None, CPU))
    for step in (0, 1, 2, 4):
        assert loss.loss.expect(step)
        loss(batch, 32)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        drawn = torch.get_rng_state()
        found = loss.check(nullcontext)
        if (
            coefficient == 0 or step == 0 or not copied
        ):  # later, gradients are not computed with a copy
            assert (found is not None) is (coefficient > 0), (step, found)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), drawn)
        assert all(layer.training for layer in model.modules()) and all(
            p.grad is None for p in model.parameters()
        )
        if found is not None:
            assert "the model's own loss" in str(
                found.error()
            ) and "Compute it for each sample" in str(found.error())
    assert not loss.loss.expect(3)


# --- metrics
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, True, torch.tensor(3), torch.tensor(True)])
def test_a_whole_number_is_no_mean(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"metrics: .* got a whole number .* no mean. Return \(sum, count\)"
    ):
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
    found = MeanCheck("metrics", metric, "share")
    found(SCORES, LABELS.where(torch.arange(9) != 2, SCORES.argmax(1)), 9)
    wrong = found.check(gradients=False)
    assert (wrong is None) is fine
    if wrong is not None:
        assert str(wrong.error()).startswith(
            "metrics: expected a mean over samples, one value for each sample, or (sum"
        )
        assert "share, which gives" in str(wrong.error())


# --- half formats
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (8192,)])
def test_a_sum_of_half_numbers_neither_overflows_nor_rounds_to_them(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    value = torch.full(
        shape, 20.125, dtype=dtype, requires_grad=True
    )  # a mean, or one value for each sample
    total, count = as_sum(value, 8192)
    assert (float(total.detach()), count) == (
        20.125 * 8192,
        8192,
    )  # 164,864: above what float16 can hold
    total.backward()
    assert value.grad is not None
    assert value.grad.dtype == dtype


def test_rounding_of_a_loss_in_half_numbers_is_no_other_mean() -> None:
    def rounded(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target).bfloat16()

    assert check(rounded, POINTS, OTHERS) is None


def test_a_recall_is_no_mean_though_halves_have_as_many_of_its_class() -> None:
    def recall(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = (output.argmax(1) == 1) & (target == 1)
        return found.sum() / (target == 1).sum().clamp(min=1)

    target = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    output = torch.nn.functional.one_hot(torch.tensor([0, 1, 1, 0, 0, 1, 1, 0]), 2).float()
    metric = MeanCheck("metrics", recall)
    metric(output, target, 8)
    assert metric.check() is not None


KEPT: list[torch.Tensor] = []


class Keeping:
    """A metric that keeps its outputs."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.outputs.append(output)
        return output.square().mean()


def test_what_a_function_keeps_outside_of_it_is_seen_and_has_no_calls_of_comparisons() -> None:
    around: list[torch.Tensor] = []
    samples, table, scale = 0, torch.zeros(4), 2.0

    def keeps(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal samples
        samples += len(output)
        table.add_(output.sum(0))
        around.append(output)
        KEPT.append(output)
        return scale * output.square().mean()

    owner = Keeping()
    for fn, names in (
        (keeps, {"samples", "table", "around", "KEPT"}),
        (owner, {"outputs"}),
        (by_sample, set()),
    ):
        metric = MeanCheck("metrics", fn, "metric")
        for step in range(3):
            metric.expect(step)
            metric(SCORES, LABELS, 9)
            assert metric.check() is None
        assert set(metric.changes_outside) == names
    assert samples == 27
    assert torch.equal(table, 3 * SCORES.sum(0))
    assert [len(each) for each in (around, KEPT, owner.outputs)] == [3, 3, 3]
