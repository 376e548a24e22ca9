"""A callback of rank 0 alone that changes what the other ranks have as well is refused; one that
only looks is not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

import lockstep
from lockstep.errors import ConfigError, MismatchError
from lockstep.training.callbacks import Callback
from support.pool import Pool

INPUTS = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS[:, :1] * 2 + 1


class Noisy(Dataset[Any]):
    """Samples with noise, of a level that a curriculum may raise."""

    factor = 1.0  # of the class

    def __init__(self) -> None:
        self.noise, self._level, self.limit = 0.0, 0.0, None
        self.options = {"mixup": 0.0}
        self.transforms: list[Callable[[Any], Any]] = [nn.Dropout(0.0)]
        self.read, self._cache, self._length = 0, None, None
        self.scales = torch.ones(3)
        self.weights = [0.5, 0.5]
        self.seen: list[int] = []

    @property
    def level(self) -> float:
        return self._level

    @level.setter
    def level(self, value: float) -> None:
        self._level = value

    def __len__(self) -> int:
        self._length = len(INPUTS)  # type: ignore[assignment]
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return INPUTS[index] + self.noise * self.factor * torch.randn(6), TARGETS[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 1)
        self.register_buffer("offset", torch.zeros(1))
        self.body.requires_grad_(False)
        self.offset: torch.Tensor
        self.scale, self.calls, self.options = 1.0, 0, SimpleNamespace(alpha=0.1)

    def forward(self, inputs: torch.Tensor) -> Any:
        self.calls += 1
        return self.head(self.drop(torch.relu(self.body(inputs)))) * self.scale + self.offset


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta, self.mask, self.criterion = 0.1, torch.zeros(2), nn.MSELoss()
        self.register_buffer("gamma", torch.tensor(0.1))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (
            self.criterion(output, target)
            + self.beta * output.abs().mean()
            + self.gamma * output.pow(2).mean()
        )  # type: ignore[no-any-return]


class Acts(Callback):
    """Does something in one of its hooks, from the third step or the second epoch on."""

    def __init__(self, action: Callable[..., object], hook: str) -> None:
        setattr(self, hook, self.act)
        self.action, self.hook = action, hook

    def act(self, trainer: Any, *arguments: Any) -> None:
        # not everything is looked at after step 3
        if trainer.epoch or trainer.step.steps_done == 3 or self.hook == "on_train_start":
            self.action(trainer, *arguments)


def fitted(
    action: Callable[..., object], hook: str = "on_train_epoch_start", **options: Any
) -> list[float]:
    """The losses of a training with such a callback."""
    lockstep.init("cpu")
    torch.manual_seed(0)
    model: Any = Net()
    if options.pop("compiles", False):
        model = torch.compile(model, backend="eager")
    trainer = lockstep.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        options.pop("loss_fn", None) or Loss(),
        16,
        callbacks=[Acts(action, hook)],
        **options,
    )
    rows = trainer.fit(Noisy(), 3, validate=Subset(Noisy(), range(32)), validate_every=2)
    return [row["val_loss"] for row in rows]


def data_of(trainer: Any) -> Noisy:
    return trainer._loop.feed.loader.dataset  # type: ignore[no-any-return]


def add(values: Any, amount: float = 0.5) -> None:
    with torch.no_grad():
        values.add_(amount)


STEP_HOOKS = ("on_train_step_start", "on_train_step_end", "on_loss")
CHANGES: dict[str, tuple[Callable[..., object], str]] = {
    "a weight of the loss": (
        lambda trainer, *_: setattr(trainer.loss_fn, "beta", 0.2),
        r"loss_fn\.beta: 0\.1 -> 0\.2",
    ),
    "a buffer of the loss": (
        lambda trainer, *_: add(trainer.loss_fn.gamma),
        r"loss_fn\.0\.gamma: another value",
    ),
    "a tensor of the loss": (
        lambda trainer, *_: add(trainer.loss_fn.mask),
        r"loss_fn\.mask: another value",
    ),
    "a module of the loss": (
        lambda trainer, *_: setattr(trainer.loss_fn, "criterion", nn.L1Loss()),
        r"loss_fn\.criterion: MSELoss -> L1Loss",
    ),
    "noise": (
        lambda trainer, *_: setattr(data_of(trainer), "noise", 0.5),
        r"train\.noise: 0\.0 -> 0\.5",
    ),
    "a property": (
        lambda trainer, *_: setattr(data_of(trainer), "level", 0.5),
        r"train\._level: 0\.0 -> 0\.5",
    ),
    "an attribute of the class": (
        lambda trainer, *_: setattr(data_of(trainer), "factor", 2.0),
        r"train\.factor: 1\.0 -> 2\.0",
    ),
    "a limit": (
        lambda trainer, *_: setattr(data_of(trainer), "limit", 16),
        r"train\.limit: None -> 16",
    ),
    "an option": (
        lambda trainer, *_: data_of(trainer).options.update(mixup=0.3),
        r"train\.options\['mixup'\]: 0\.0 -> 0\.3",
    ),
    "an element": (
        lambda trainer, *_: data_of(trainer).weights.__setitem__(0, 0.1),
        r"train\.weights\[0\]: 0\.5",
    ),
    "a transform": (
        lambda trainer, *_: data_of(trainer).transforms.__setitem__(0, nn.Identity()),
        r"train\.transforms\[0\]: Dropout -> Identity",
    ),
    "an attribute of a transform": (
        lambda trainer, *_: setattr(data_of(trainer).transforms[0], "p", 0.5),
        r"train\.transforms\[0\]\.p: 0\.0 -> 0\.5",
    ),
    "a tensor of the data": (
        lambda trainer, *_: add(data_of(trainer).scales),
        r"train\.scales: another value",
    ),
    "frozen layers": (
        lambda trainer, *_: trainer.model.body.requires_grad_(True),
        r"model\.body\.weight\.requires_grad: False -> True",
    ),
    "dropout": (
        lambda trainer, *_: setattr(trainer.model.drop, "p", 0.5),
        r"model\.drop\.p: 0\.0 -> 0\.5",
    ),
    "a factor of the model": (
        lambda trainer, *_: setattr(trainer.model, "scale", 2.0),
        r"model\.scale: 1\.0 -> 2\.0",
    ),
    "an option of the model": (
        lambda trainer, *_: setattr(trainer.model.options, "alpha", 0.2),
        r"model\.options\.alpha: 0\.1 -> 0\.2",
    ),
    "a mode": (
        lambda trainer, *_: trainer.model.drop.eval(),
        r"model\.drop\.training: True -> False",
    ),
    "all modes": (lambda trainer, *_: trainer.model.eval(), r"model\.training: True -> False"),
    "the learning rate": (
        lambda trainer, *_: trainer.optimizer.param_groups[0].update(lr=0.01),
        r"optimizer\.param_groups\[0\]\['lr'\]: 0\.05 -> 0\.01",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_step_end"])
def test_a_change_is_refused_on_one_worker_too(what: str, hook: str) -> None:
    action, said = CHANGES[what]
    with pytest.raises(
        ConfigError,
        match=rf"^callbacks\.Acts: expected {hook} to change nothing .*got {said}.*every_rank = True",
    ):
        fitted(action, hook)


def test_a_change_of_the_batch_is_refused() -> None:
    def scale(trainer: Any, batch: Any) -> None:
        batch.data[0].mul_(1.2)

    with pytest.raises(
        ConfigError,
        match=r"on_train_step_start to change nothing .*batch\.data\[0\]: another value",
    ):
        fitted(scale, "on_train_step_start")


@pytest.mark.parametrize("put", ["load_state_dict", "data", "copy_"])
@pytest.mark.parametrize("hook", ["on_validation_start", "on_row", "on_train_epoch_end"])
def test_other_weights_are_refused(put: str, hook: str) -> None:
    def swap(trainer: Any, *_: Any) -> None:
        other = {name: value * 0.8 for name, value in trainer.model.state_dict().items()}
        if put == "load_state_dict":
            trainer.model.load_state_dict(other)
        for name, p in trainer.model.named_parameters():
            if put == "data":
                p.data = other[name]
            if put == "copy_":
                p.data.copy_(other[name])

    with pytest.raises(
        ConfigError, match=rf"{hook} to change nothing .*got model\.body\.weight: another value"
    ):
        fitted(swap, hook)


def test_what_a_loss_function_reads_is_looked_at() -> None:
    options = SimpleNamespace(beta=0.1)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        penalty: torch.Tensor = options.beta * output.abs().mean()
        return nn.functional.mse_loss(output, target) + penalty

    with pytest.raises(ConfigError, match=r"got loss_fn\.options\.beta: 0\.1 -> 0\.2"):
        fitted(lambda trainer, *_: setattr(options, "beta", 0.2), loss_fn=loss)


def test_arguments_of_a_partial_loss_are_looked_at() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor, beta: float) -> torch.Tensor:
        return nn.functional.mse_loss(output, target) + beta * output.abs().mean()

    made = partial(loss, beta=0.1)
    with pytest.raises(ConfigError, match=r"got loss_fn\['beta'\]: 0\.1 -> 0\.2"):
        fitted(lambda trainer, *_: made.keywords.update(beta=0.2), loss_fn=made)


# --- what is no change
# ----------------------------------------------------------------------------------------------


def shows_samples(trainer: Any, *_: Any) -> None:
    """Reads samples, which are counted, and uses the model, which counts its calls."""
    mode = trainer.model.training
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(data_of(trainer)[0][0][None] if trainer._loop._trains else INPUTS[:1])
    trainer.model.train(mode)


def swaps_and_restores(trainer: Any, *_: Any) -> None:
    kept = copy.deepcopy(trainer.model.state_dict())
    trainer.model.load_state_dict({name: value * 0.8 for name, value in kept.items()})
    trainer.model.load_state_dict(kept)


def notes(trainer: Any, *_: Any) -> None:
    trainer.model.best = getattr(trainer.model, "best", 0.0) + 1.0
    trainer.model.last_image = torch.zeros(2)
    trainer.optimizer.param_groups[0]["note"] = trainer.step.steps_done


def fills_caches(trainer: Any, *_: Any) -> None:
    if trainer._loop._trains:
        data_of(trainer)._cache = {}  # type: ignore[assignment]
        data_of(trainer).seen.append(1)
        len(data_of(trainer))


@pytest.mark.parametrize("action", [shows_samples, swaps_and_restores, notes, fills_caches])
@pytest.mark.parametrize(
    "hook", ["on_train_epoch_start", "on_train_epoch_end", *STEP_HOOKS, "on_row"]
)
def test_what_changes_nothing_that_training_uses_is_not_refused(
    action: Callable[..., object], hook: str
) -> None:
    assert fitted(action, hook) == fitted(lambda *_: None, hook)


def test_what_a_compiler_notes_is_not_refused() -> None:
    def uses(trainer: Any) -> None:
        shows_samples(trainer)
        trainer.model.calls = 0  # no counter is known as such before the first step

    assert fitted(uses, "on_train_start", compiles=True)


def test_a_model_left_in_evaluation_mode_where_the_next_epoch_ends_that_is_not_refused() -> None:
    def leave(trainer: Any, *_: Any) -> None:
        trainer.model.eval()

    assert fitted(leave, "on_train_epoch_end") == fitted(lambda *_: None, "on_train_epoch_end")


def test_what_is_done_with_the_model_after_training_is_not_refused() -> None:
    assert fitted(lambda trainer, *_: trainer.model.double(), "on_train_end")


def test_the_check_can_be_switched_off() -> None:
    action, _ = CHANGES["a weight of the loss"]
    assert fitted(action, replica_check=0)


# --- on several workers, what no callback of rank 0 alone has done
# --------------------------------------------------


class OnlyOnRank0(Callback):
    every_rank = True

    def on_validation_start(self, trainer: Any) -> None:
        if trainer.comm.rank == 0:
            for p in trainer.model.parameters():
                p.data.copy_(p.data * 0.8)


def evaluated(what: str) -> None:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = Net()
    callbacks: list[Callback] = [OnlyOnRank0()] if what == "a callback" else []
    trainer = lockstep.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.05), Loss(), 16, callbacks=callbacks
    )
    trainer.fit(Noisy(), 1, validate=Noisy() if what == "a callback" else None)
    other = copy.deepcopy(model)
    add(other.head.weight if what == "another model" else model.head.weight, float(comm.rank))
    if what == "a prediction":
        trainer.predict(Noisy())
    trainer.evaluate(Noisy(), other if what == "another model" else None)


@pytest.mark.parametrize("what", ["a callback", "the program", "another model", "a prediction"])
def test_an_evaluation_of_other_weights_on_some_workers_is_refused(pool: Pool, what: str) -> None:
    def run() -> None:
        with pytest.raises(
            MismatchError, match=r"\.weight on rank 1 holds other values than on rank 0"
        ):
            evaluated(what)

    pool.run(run, workers=2)
