"""Losses of a loop with `prepare` that parts of a batch do not add up to, and like ones that they
do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError

SAMPLES = 16
WEIGHT = torch.tensor([1.0, 3.0, 0.5, 2.0])


def train(
    body: Callable[[nn.Module, torch.Tensor, torch.Tensor], Any],
    count: Any = None,
    model: nn.Module | None = None,
    **options: Any,
) -> int:
    """Train with the losses of `body` for four batches; returns the number of steps."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (4 * SAMPLES,), generator=generator)
    labels[5::7] = -100
    data = TensorDataset(torch.randn(4 * SAMPLES, 3, generator=generator), labels)
    model = model or nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, DataLoader(data, batch_size=SAMPLES), **options
    )
    steps = 0
    for x, y in loader:
        optimizer.zero_grad()
        body(model, x, y).backward()
        optimizer.step(count=None if count is None else count(y))
        steps += optimizer.stepped
    return steps


def weighted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y.clamp(0), WEIGHT)


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y.clamp(0))


@pytest.mark.parametrize(
    ("body", "count", "said"),
    [
        (
            weighted,
            lambda y: WEIGHT[y.clamp(0)].sum(),
            r"weights of its labels' classes.*step\(count=weight\[targets",
        ),
        (
            lambda *each: F.cross_entropy(each[0](each[1]), each[2]),
            lambda y: (y >= 0).sum(),
            "labels that are not ign",
        ),
    ],
    ids=["class weights", "ignored labels"],
)
def test_a_mean_over_something_else_needs_its_count(body: Any, count: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train(body)
    assert train(body, count) == 4
    assert train(body, virtual_workers=4) == 4  # whose parts are the same on any number of workers


def test_a_mean_over_samples_needs_none() -> None:
    assert train(plain) == 4


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_outputs_and_targets_that_are_broadcast_are_refused(loss: Any) -> None:
    column = rf"\[{SAMPLES}, 1\]"
    with pytest.raises(ConfigError, match=rf"{column} and \[{SAMPLES}\], which torch broadcasts"):
        train(lambda model, x, y: 0.5 * loss(model(x)[:, :1], y.float()))
    with pytest.raises(ConfigError, match=rf"\[{SAMPLES}\] and {column}, which torch broadcasts"):
        train(lambda model, x, y: loss(model(x)[:, 0], y.float()[:, None]))
    assert train(lambda model, x, y: loss(model(x)[:, :1], y.float()[:, None])) == 4
    assert train(lambda model, x, _: loss(model(x), torch.ones(4))) == 4
    assert train(lambda model, x, y: loss(model(x)[:, :1], y.float()), virtual_workers=4) == 4


def logistic(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    p = output.sigmoid()
    return -(targets * p.log() + (1 - targets) * (1 - p).log()).mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, targets: ((output - targets) ** 2).mean(),
        lambda output, targets: (output - 0.1 * targets + 1).abs().mean() / 2,
        lambda output, targets: torch.maximum(output - targets, (targets - output) / 3).mean(),
        logistic,
    ],
)
def test_targets_that_are_broadcast_in_a_loss_of_ones_own_are_refused(loss: Any) -> None:
    with pytest.raises(ConfigError, match=rf"\[{SAMPLES}, 1\] and \[{SAMPLES}\], which torch"):
        train(lambda model, x, y: loss(model(x)[:, :1], y))
    with pytest.raises(ConfigError, match=rf"\[{SAMPLES}\] and \[{SAMPLES}, 1\], which torch"):
        train(lambda model, x, y: loss(model(x)[:, 0], y[:, None]))
    assert train(lambda model, x, y: loss(model(x)[:, 0], y)) == 4
    bins = torch.linspace(-1, 1, SAMPLES)  # as many as there are samples
    assert train(lambda model, x, _: loss(model(x)[:, :1], bins)) == 4
    assert train(lambda model, x, y: loss(model(x)[:, :1], y), virtual_workers=4) == 4


def test_weights_of_samples_with_as_many_outputs_are_no_broadcast_targets() -> None:
    model = nn.Linear(3, SAMPLES)
    assert train(lambda model, x, y: (model(x).pow(2) * y.abs()[:, None]).mean(), model=model) == 4


def hardest(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A triplet loss with the hardest samples of the batch."""
    output = model(x)
    distances = torch.cdist(output, output)
    same = y[:, None] == y
    return (
        (distances.where(same, 0).amax(1) - distances.where(~same, 1e6).amin(1) + 1).relu().mean()
    )


def to_prototypes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distances to as many points as there are samples, which are parameters."""
    return torch.cdist(model(x), model.weight.repeat(6, 2)[:SAMPLES, :4]).mean()  # type: ignore[operator]


def prompted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Scores by the outputs for as many constant prompts as there are samples."""
    prompts = torch.linspace(-1, 1, SAMPLES * 3).reshape(SAMPLES, 3)
    return F.cross_entropy(model(x) @ model(prompts).T, y.clamp(0))


def test_distances_among_samples_are_seen() -> None:
    with pytest.raises(ConfigError, match="samples of a part of the batch depend on each other"):
        train(hardest)


@pytest.mark.parametrize("body", [to_prototypes, prompted])
def test_comparisons_with_what_is_no_sample_are_not(body: Any) -> None:
    assert train(body) == 4


# --- means of a part that are no part of a mean
# ---------------------------------------------------------------------


def labelled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x)[y >= 0], y[y >= 0])


def of_zeros(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean of its own for each kind of sample, as a contrastive loss of pairs has."""
    size = model(x).square().sum(1)
    return size[y == 0].mean() + (1 - size).relu().masked_select(y != 0).mean() / 2


@pytest.mark.parametrize("body", [labelled, of_zeros, lambda *each: 0.5 * labelled(*each)])
def test_a_mean_over_selected_samples_needs_its_count(body: Any) -> None:
    with pytest.raises(ConfigError, match="rows that a mask or indices have chosen, in a part of"):
        train(body)
    assert train(body, lambda y: (y >= 0).sum()) == 4
    assert train(body, virtual_workers=4) == 4


@pytest.mark.parametrize(
    "body",
    [
        lambda model, x, y: model(x)[torch.arange(SAMPLES), y.clamp(0)].mean(),
        lambda model, x, y: model(x)[torch.arange(SAMPLES).flip(0)].square().mean(),
        lambda model, x, y: model(x)[:, torch.tensor([0, 2, 3])].mean(),
        lambda model, x, y: (model(x).square().sum(1) * (y >= 0)).mean(),
        lambda model, x, y: F.cross_entropy(model(x), y.clamp(0)) + model.weight[:3].mean(),
        lambda model, x, y: (
            F.cross_entropy(model(x), y.clamp(0)) + model.weight[torch.tensor([0, 2, 3])].mean()
        ),
        lambda model, x, y: sum(row[row < 9].mean() for row in model(x)) / len(x),
    ],
)
def test_a_selection_of_as_many_for_each_sample_needs_none(body: Any) -> None:
    assert train(body) == 4


@pytest.mark.parametrize(
    "body",
    [
        lambda *each: (plain(*each) - 0.3).abs() + 0.3,
        lambda model, x, y: plain(model, x, y) + model(x).mean(0).clamp(min=0.1).sum(),
        lambda model, x, y: torch.maximum(plain(model, x, y), model(x).square().mean()),
        lambda model, x, y: (model(x) - model(x).mean(0)).abs().mean(),
        lambda model, x, y: F.relu(model(x)[:, 0].sum() / len(x)) * 2,
    ],
    ids=["flooding", "free bits", "largest of losses", "deviation", "sum"],
)
def test_a_function_of_a_mean_is_refused(body: Any) -> None:
    with pytest.raises(ConfigError, match="a function of a mean or a sum over the samples of a"):
        train(body)
    assert train(body, virtual_workers=4) == 4


def penalised(model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Any) -> torch.Tensor:
    """A loss with a penalty on the gradient of each sample's loss that is beyond a limit."""
    x = x.clone().requires_grad_()
    total = loss(model(x), y.clamp(0), reduction="sum")
    (gradients,) = torch.autograd.grad(total, x, create_graph=True)
    return total / len(x) + (gradients.norm(dim=1) - 0.1).relu().mean()


@pytest.mark.parametrize(
    "body",
    [
        lambda model, x, y: model(x).mean(1).abs().mean(),
        lambda model, x, y: (1 - model(x)).relu().sum(1).clamp(max=9.0).mean(),
        lambda model, x, y: plain(model, x, y) + (model.weight.mean() - 1).abs(),
        lambda model, x, y: plain(model, x, y) * (plain(model, x, y).detach() - 1).abs(),
        lambda *each: penalised(*each, loss=F.cross_entropy),
        lambda *each: penalised(
            *each,
            loss=lambda output, _, **options: F.mse_loss(output, output.detach() + 1, **options),
        ),
        lambda model, x, y: (
            sum((row.expand(SAMPLES, 4).mean() - 1).abs() for row in model(x)) / len(x)
        ),
    ],
)
def test_a_mean_of_functions_is_not(body: Any) -> None:
    assert train(body) == 4


# --- numbers that the model adds to the loss
# ------------------------------------------------------------------------


class WithNumber(nn.Module):
    """Returns scores and a single number of the batch.

    Args:
        number: (probabilities of the experts) → the number.
    """

    def __init__(self, number: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.gate, self.number = nn.Linear(3, 4), nn.Linear(3, 4), number

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.gate(x).softmax(1)
        return self.scores(x) * chosen, self.number(chosen)


def balance(chosen: torch.Tensor) -> torch.Tensor:
    """The term that balances experts of Switch Transformers."""
    shares = F.one_hot(chosen.argmax(1), 4).float().mean(0)
    return 4 * (shares * chosen.mean(0)).sum()


def train_with_number(
    number: Callable[[torch.Tensor], torch.Tensor],
    weigh: Callable[[torch.Tensor, int], torch.Tensor] = lambda value, _: 0.01 * value,
    count: Any = None,
    derived: bool = False,
    **options: Any,
) -> int:
    """Train with a number that the model returns; `derived` gives it inputs that are computed from
    the data.
    """
    model = WithNumber(number)

    def body(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores, value = model(x + 0 if derived else x)
        return F.cross_entropy(scores, y.clamp(0)) + weigh(value, len(x))

    return train(body, count, model=model, **options)


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize(
    "number", [balance, lambda chosen: chosen.std(0).sum(), lambda chosen: chosen.mean(0).norm()]
)
def test_a_number_of_the_model_that_is_no_mean_is_refused(number: Any, derived: bool) -> None:
    with pytest.raises(
        ConfigError, match="each number that a model adds to it, got a number of the model that is"
    ):
        train_with_number(number, derived=derived)


@pytest.mark.parametrize(
    "options",
    [
        {"number": lambda chosen: chosen.square().mean()},
        {
            "number": lambda chosen: chosen.square().sum(),
            "weigh": lambda value, samples: value / samples,
        },
        {"number": balance, "weigh": lambda value, _: value.detach() * 0.01},
        {"number": balance, "weigh": lambda value, _: value * 0.0},
        {"number": balance, "virtual_workers": 4},
        {"number": lambda chosen: (chosen * torch.rand_like(chosen)).mean()},
        {
            "number": lambda chosen: (chosen[:, 0] * chosen[:, 1]).sum() / chosen[:, 1].sum(),
            "count": lambda y: 3,
        },
    ],
)
def test_a_number_of_the_model_that_parts_add_up_to_is_not(options: Any) -> None:
    assert train_with_number(**options) == 4


class InTraining(WithNumber):
    """Balances experts in training only, and drops out."""

    def __init__(self) -> None:
        super().__init__(balance)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, value = super().forward(x)
        return self.drop(scores), value if self.training else torch.zeros(())


class Running(WithNumber):
    """Has the statistics of the batch in training, and running ones in evaluation, as batch norm
    has.
    """

    def __init__(self) -> None:
        super().__init__(lambda chosen: chosen.square().mean())
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # type: ignore[operator]
        return super().forward(x - (x.mean(0) if self.training else self.mean))


class Masked(WithNumber):
    """Draws a mask in training, which by chance is another one for a few samples only."""

    def __init__(self) -> None:
        super().__init__(lambda chosen: chosen.square().mean())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, value = super().forward(x)
        mask = F.dropout(torch.ones(()), 0.5, self.training).clamp(1, 1)
        return scores, value * (mask + (self.training and len(x) < 8))


def body_of(model: nn.Module) -> Any:
    def body(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores, value = model(x)
        return F.cross_entropy(scores, y.clamp(0)) + 0.01 * value

    return body


def test_a_number_that_is_computed_in_training_only_is_refused() -> None:
    model = InTraining()
    with pytest.raises(ConfigError, match="each number that a model adds to it"):
        train(body_of(model), model=model)
    for other in (Running(), Masked()):
        assert train(body_of(other), model=other) == 4


def test_a_number_over_time_is_not_compared_where_the_samples_are_in_the_second_dimension() -> None:
    class Sequences(nn.Module):
        """A recurrent network over (time, sample, feature), and how fast its states change."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.RNN(3, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            states = self.layer(x)[0]
            return states[-1], (states[1:] - states[:-1]).square().mean()

    model = Sequences()

    def body(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores, change = model(x.expand(2 * SAMPLES, *x.shape))
        return F.cross_entropy(scores, y.clamp(0)) + change

    assert train(body, model=model) == 4


# --- sums of constants
# ----------------------------------------------------------------------------------------------


def boundary(rows: int, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """A loss of samples and a sum over points of a boundary, which are the same in each batch."""
    points, values = torch.linspace(-1, 1, rows * 3).reshape(rows, 3), torch.zeros(rows, 4)

    def body(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (
            F.cross_entropy(model(x), y.clamp(0)) + 0 + loss(model(points.requires_grad_()), values)
        )

    return body


@pytest.mark.parametrize("rows", [5, SAMPLES])
@pytest.mark.parametrize(
    "loss", [nn.MSELoss(reduction="sum"), lambda output, target: (output - target).square().sum()]
)
def test_a_sum_of_constants_is_the_same_on_each_worker(rows: int, loss: Any) -> None:
    assert train(boundary(rows, loss)) == 4
    assert train(boundary(rows, loss), virtual_workers=2) == 4


@pytest.mark.parametrize(
    "change", [lambda x: x, lambda x: x * 2, lambda x: (x + 1).requires_grad_()]
)
def test_a_sum_of_data_is_refused_besides(change: Any) -> None:
    def body(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (
            boundary(5, nn.MSELoss(reduction="sum"))(model, x, y) + model(change(x)).square().sum()
        )

    with pytest.raises(ConfigError, match=r"got a sum: sum\(\) over a tensor of shape \[16, 4\]"):
        train(body)


# --- what changes the weights
# ---------------------------------------------------------------------------------------


def by_hand(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, move: Callable[[Any, torch.Tensor], Any]
) -> Any:
    """The loss at weights that are moved up the gradient, as in sharpness-aware minimisation."""
    plain(model, x, y).backward()
    moves = [0.1 * p.grad / p.grad.norm() for p in model.parameters() if p.grad is not None]
    for p, step in zip(model.parameters(), moves, strict=True):
        move(p, step)
    model.zero_grad()
    return plain(model, x, y)


def in_place(p: Any, step: torch.Tensor) -> None:
    with torch.no_grad():
        p.add_(step)


@pytest.mark.parametrize("move", [in_place, lambda p, step: p.data.add_(step)])
def test_weights_moved_between_two_passes_are_noticed(move: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"parameters: expected the same values in all backward passes before a step",
    ):
        train(lambda *each: by_hand(*each, move=move))
    assert train(lambda *each: by_hand(*each, move=lambda p, step: None)) == 4


def test_weights_may_be_changed_before_the_passes_and_after_them() -> None:
    def body(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.weight.clamp_(-1, 1)  # type: ignore[operator]
        plain(model, x, y).backward()
        return plain(model, x, y)

    assert train(body) == 4


class Inside(torch.optim.SGD):
    """Steps with another optimizer inside."""

    def __init__(self, parameters: Any, lr: float) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr)
        self.inner = torch.optim.SGD(parameters, lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_an_optimizer_that_was_not_given_is_noticed_where_it_steps() -> None:
    data = TensorDataset(torch.randn(32, 3), torch.randint(4, (32,)))
    model = nn.Linear(3, 4)
    inside = Inside(model.parameters(), 0.1)
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1)
    model, optimizer, loader = lockstep.prepare(model, inside, DataLoader(data, 8))
    for x, y in loader:
        plain(model, x, y).backward()
        other.step()  # of another model
        optimizer.step()  # with the gradients of the global batch, which the inner one has
        optimizer.zero_grad()
    with pytest.raises(
        ConfigError, match=r"optimizer: expected a step of optimizers that were given .* one of SGD"
    ):
        for x, y in loader:
            plain(model, x, y).backward()
            inside.inner.step()


def test_a_parameter_of_the_loss_belongs_into_a_module() -> None:
    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(()))

    model, temperature = nn.Linear(3, 4), Temperature()
    with pytest.raises(ConfigError, match="temperature of a loss, belongs into a module"):
        lockstep.prepare(
            model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(()))], 0.1)
        )
    optimizer = torch.optim.SGD([*model.parameters(), temperature.value], 0.1)
    data = TensorDataset(torch.randn(32, 3), torch.randint(4, (32,)))
    objects = lockstep.prepare(model, temperature, optimizer, DataLoader(data, 8))
    for x, y in objects[3]:
        objects[2].zero_grad()
        F.cross_entropy(model(x) / temperature.value, y).backward()
        objects[2].step()
    assert temperature.value != 1
