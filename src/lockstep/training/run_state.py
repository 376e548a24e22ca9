"""The state of a training run: position in the data, epoch totals, hyperparameters, and what a checkpoint holds."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import arguments, clock
from ..checkpoint.folder import read_tensors
from ..checkpoint.names import match_names
from ..checkpoint.serialization import StoredTensor
from ..data.loader import Loader
from ..errors import CheckpointError, ConfigError
from ..parallel.determinism import differences
from ..parallel.fingerprints import checksum_of
from ..parallel.strategy import accumulation_dtype
from .precision import Number
from .step import TrainStep

__all__ = [
    "COLUMNS",
    "EpochTotals",
    "ParamGroup",
    "Position",
    "Row",
    "RunState",
    "check_epochs",
    "check_max_steps",
    "check_same_parameters",
    "check_validate_every",
    "load_optimizer",
    "merge_param_groups",
    "named_param_groups",
]


Row = dict[str, float]
"""The results of one epoch, or of the part of one before a validation: epoch (from 1), step, train_loss, lr, seconds,
samples_per_second, and val_… by metric."""

COLUMNS = ("epoch", "step", "train_loss", "lr", "seconds", "samples_per_second")
"""The columns of every row."""

_log = logging.getLogger(__name__)


# --- Position in the training data ------------------------------------------------------------------------------------


_POSITION_KEYS = (
    "epoch",
    "step",
    "ended",
    "batches",
    "batch_order",
    "stream",
    "numerics",
)  # other keys say in which data it is a position


class Position:
    """A position in the training data, independent of the loader.

    Args:
        saved: a state dict as of `state_dict`; None for the beginning.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._saved = None if saved is None else dict(saved)

    @property
    def epoch(self) -> int:
        """Number of completed epochs, including their evaluations."""
        return 0 if self._saved is None else int(self._saved["epoch"])

    @property
    def step(self) -> int:
        """Number of steps done in the current epoch; all of them until its evaluation is done."""
        return 0 if self._saved is None else int(self._saved["step"])

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step, from 0; 0 before the first step."""
        return self.epoch if self.step else max(0, self.epoch - 1)

    def advance(self, loader: Loader) -> None:
        """Advance to the position after the last batch of `loader`."""
        self._saved = loader.state_dict()

    @property
    def ended(self) -> bool:
        """Whether all steps of the current epoch are done, but not yet its evaluation."""
        return self._saved is not None and bool(self._saved.get("ended"))

    def end_steps(self) -> None:
        """Note that the current epoch has no more steps."""
        if self._saved is not None:
            self._saved["ended"] = True

    def end_epoch(self) -> None:
        """Advance to the next epoch, after the evaluation of the current one."""
        assert self._saved is not None
        self._saved |= {"epoch": self.epoch + 1, "step": 0, "ended": False}
        self._saved.pop("stream", None)

    def seek(self, loader: Loader) -> None:
        """Move `loader` to this position.

        Raises:
            CheckpointError: if this is a position in other data, or in another order of samples.
        """
        now = loader.state_dict()
        start = {**now, "epoch": 0, "step": 0, "ended": False}
        # Whoever has loaded this position has said how the numerics differ; the loader need not say it again.
        loader.load_state_dict(start if self._saved is None else {**self._saved, "numerics": now["numerics"]})

    def in_data_of(self, loader: Loader) -> Position:
        """Return this position if it is one in the data of `loader`, or else the next epoch's beginning there."""
        if self._saved is None:
            return self
        there = loader.state_dict()
        if all(self._saved.get(key) == value for key, value in there.items() if key not in _POSITION_KEYS):
            return self
        return Position({**there, "epoch": self.epoch + int(self.step > 0), "step": 0, "ended": False})

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position and the settings it depends on; None for the beginning."""
        return None if self._saved is None else dict(self._saved)


def check_epochs(epochs: Any, position: Position, again: bool) -> None:
    """Check the total number of epochs for a run at `position`.

    Args:
        epochs: the requested total number of epochs.
        position: the position of the run.
        again: whether `epochs` must exceed the completed epochs, as in a second call of `fit`; a resumed run may be
            complete.

    Raises:
        ConfigError: if `epochs` is not a whole number, or too small.
    """
    least = max(1, position.epoch + int(position.step > 0 or again))
    expected = hint = ""
    if position.epoch:
        expected = f"a whole number of at least {least}, as {position.epoch} are done already"
        hint = (
            f"They are counted from the beginning of the run: epochs={least + 1} trains "
            f"{least + 1 - position.epoch} more. A new Trainer, and a new model, begin anew."
        )
    arguments.whole("epochs", epochs, least=least, expected=expected, hint=hint)


def check_max_steps(max_steps: Any, steps_done: int, again: bool) -> None:
    """Check the total number of steps for a run that has done `steps_done`.

    Raises:
        ConfigError: if `max_steps` is not None and not a whole number, or too small.
    """
    if max_steps is None:
        return
    least = max(1, steps_done + again)
    expected = hint = ""
    if steps_done:
        expected = f"a whole number of at least {least}, as {steps_done} are done already"
        hint = "Steps are counted from the beginning of the run."
    arguments.whole("max_steps", max_steps, least=least, expected=expected, hint=hint)


def check_validate_every(validate_every: Any, has_data: bool) -> None:
    """Check the number of steps between validations.

    Raises:
        ConfigError: if it is neither None nor a whole number of at least 1, or there is no validation data.
    """
    if validate_every is None:
        return
    arguments.whole("validate_every", validate_every, least=1, expected="a whole number of steps of at least 1")
    if not has_data:
        raise ConfigError("validate_every", "validate= with it, the data to evaluate on", found="none")


# --- Epoch totals -----------------------------------------------------------------------------------------------------


class EpochTotals:
    """Loss and speed of the steps of one epoch. A loss on a device stays there until it is read.

    Args:
        device: the device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._loss_sum: Number = 0.0
        self._count: Number = 0.0
        if device.type != "cpu":
            dtype = accumulation_dtype(device)
            self._loss_sum = torch.zeros((), device=device, dtype=dtype)
            self._count = torch.zeros((), device=device, dtype=dtype)
        self._samples = 0
        self._started = clock.monotonic()

    def add(self, loss: Number, count: Number, samples: int) -> None:
        """Add a step.

        Args:
            loss: the mean loss.
            count: the denominator of the mean: samples, or what the loss counts, such as tokens.
            samples: samples in the global batch.
        """
        if not isinstance(self._loss_sum, torch.Tensor):
            self._loss_sum += float(loss) * float(count)
            self._count += float(count)
        elif isinstance(count, torch.Tensor):
            self._loss_sum.addcmul_(loss, count)  # type: ignore[arg-type]
            self._count += count
        else:
            self._loss_sum.add_(loss, alpha=count)
            self._count += count
        self._samples += samples

    @property
    def loss(self) -> float:
        """The mean loss so far, weighted by counts; 0 before the first step. Waits for the device."""
        return float(self._loss_sum) / (float(self._count) or 1.0)

    @property
    def seconds(self) -> float:
        """Time since the epoch began or was resumed; on an emulated network, that of the emulated hosts."""
        return clock.monotonic() - self._started

    @property
    def samples_per_second(self) -> float:
        """The mean speed over `seconds`."""
        return self._samples / max(self.seconds, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, to resume in another process."""
        return {"loss_sum": float(self._loss_sum), "count": float(self._count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved sums; the time is not part of them."""
        loss_sum, count = float(state["loss_sum"]), float(state["count"])
        if isinstance(self._loss_sum, torch.Tensor) and isinstance(self._count, torch.Tensor):
            self._loss_sum.fill_(loss_sum)
            self._count.fill_(count)
        else:
            self._loss_sum, self._count = loss_sum, count


# --- Hyperparameters of the optimizer ---------------------------------------------------------------------------------

ParamGroup = dict[str, Any]
"""One parameter group: `parameters`, the names of its parameters, and its hyperparameters by name. `lr` is the
learning rate without the factor of a schedule."""

_NOT_HYPER = ("params", "param_names", "lr", "initial_lr")


def named_param_groups(model: nn.Module, optimizer: Optimizer) -> list[ParamGroup]:
    """Return the parameter groups of `optimizer` with names of parameters; `lr` is `initial_lr` if it is set."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        hyper = {name: _plain_value(value) for name, value in group.items() if name not in _NOT_HYPER}
        parameters = [names.get(id(parameter), "") for parameter in group["params"]]
        groups.append({"parameters": parameters, "lr": _plain_value(group.get("initial_lr", group["lr"])), **hyper})
    return groups


def check_same_parameters(saved: Sequence[ParamGroup], ours: Sequence[ParamGroup]) -> None:
    """Check that the groups have the same parameters in the same order; an optimizer's state is keyed by position.

    Raises:
        CheckpointError: naming the first difference.
    """
    if len(saved) != len(ours):
        expected = f"expected {len(ours)} parameter groups as here"
        raise CheckpointError(f"a checkpoint of another optimizer: {expected}, got {len(saved)}")
    for number, (saved_group, our_group) in enumerate(zip(saved, ours, strict=True)):
        for name, expected_name in zip_longest(saved_group["parameters"], our_group["parameters"]):
            if name != expected_name:
                raise CheckpointError(
                    "a checkpoint of another optimizer. The first difference in its parameters is in group "
                    f"{number}: here {expected_name or 'no more'}, in the checkpoint {name or 'no more'}."
                )


def load_optimizer(
    load: Callable[[dict[str, Any]], None],
    saved: Mapping[str, Any],
    then: Sequence[ParamGroup],
    now: Sequence[ParamGroup],
) -> list[str]:
    """Load a saved optimizer state, with hyperparameters merged by `merge_param_groups`.

    Args:
        load: the function that loads a state dict; the optimizer has the same parameters, see `check_same_parameters`.
        saved: the saved optimizer's state dict.
        then: the groups with which the saved optimizer was constructed.
        now: the groups with which this optimizer was constructed.

    Returns:
        A description of each changed hyperparameter.
    """
    groups, changes = merge_param_groups(saved["param_groups"], then, now)
    load({**saved, "param_groups": groups})
    return changes


def merge_param_groups(
    state: Sequence[ParamGroup], then: Sequence[ParamGroup], now: Sequence[ParamGroup]
) -> tuple[list[ParamGroup], list[str]]:
    """Merge the hyperparameters of a saved and a new optimizer.

    A hyperparameter with which the new optimizer was constructed differently has its new value. The others have their
    saved values, which a schedule or the user may have changed.

    Args:
        state: the param_groups of the saved optimizer's state dict.
        then: the groups with which the saved optimizer was constructed.
        now: the groups with which the new optimizer was constructed.

    Returns:
        param_groups for the new optimizer's state dict, and a description of each change.
    """
    merged, changes = [], []
    for group, before, after in zip(state, then, now, strict=True):
        hyper = {name: value for name, value in after.items() if name != "parameters"}
        differing = {name: value for name, value in hyper.items() if name not in before or before[name] != value}
        changes += [f"{name} {before[name]} → {value}" for name, value in differing.items() if name in before]
        if "lr" in differing:
            differing["initial_lr"] = differing["lr"]
        merged.append({**group, **copy.deepcopy(differing)})
    return merged, list(dict.fromkeys(changes))


def _plain_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return copy.deepcopy(value)


# --- Checks of a saved state ------------------------------------------------------------------------------------------

_PARTS = ("model", "optimizer", "hyperparameters", "step", "loader", "totals", "history")


def check_fits(state: Mapping[str, Any], model: nn.Module, hyperparameters: Sequence[ParamGroup]) -> None:
    """Check that `state`, as returned by `Trainer.state_dict`, is of this model and optimizer.

    Args:
        state: the saved state.
        model: this run's model.
        hyperparameters: this run's parameter groups, see `named_param_groups`.

    Raises:
        CheckpointError: naming what is missing, or the first difference.
    """
    missing = [part for part in _PARTS if part not in state]
    if missing:
        raise CheckpointError(f"expected a checkpoint of a training run, got one without {', '.join(missing)}")
    frozen = state.get("frozen") or {"names": (), "checksum": ""}
    _check_same_model(state["model"], model, frozen["names"])
    check_same_parameters(state["hyperparameters"], hyperparameters)
    check_frozen(model, frozen, "the checkpoint has")


def check_frozen(model: nn.Module, frozen: Mapping[str, Any], who: str) -> None:
    """Check that the parameters that a state leaves out are those that the model has.

    Args:
        model: the model.
        frozen: their names and checksum, see `RunState.left_out`.
        who: has the state: "the checkpoint has".

    Raises:
        CheckpointError: otherwise.
    """
    if frozen["checksum"] not in ("", ours := _checksum(model, frozen["names"])):
        raise CheckpointError(
            f"{who} trained parameters only, and this model's other ones are not those that it was trained "
            f"with: expected the checksum {frozen['checksum']}, got {ours}. Load the same pretrained weights first."
        )


def _checksum(model: nn.Module, names: Collection[str]) -> str:
    """Return a checksum of parameters; "" where some are sharded over the workers."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = [parameters[name] for name in names if name in parameters]
    if any(isinstance(parameter, DTensor) for parameter in found):
        return ""
    by_device = [[p for p in found if p.device == device] for device in dict.fromkeys(p.device for p in found)]
    return "-".join(f"{int(checksum_of(each)):x}" for each in by_device)


def check_determinism(
    saved: Mapping[str, Any], now: Mapping[str, Any], allow_different_hardware: bool, logs: bool
) -> None:
    """Check that a run with virtual workers resumes under the same determinism settings.

    Args:
        saved: the determinism settings of the saved run.
        now: the determinism settings of this run.
        allow_different_hardware: whether to log differences instead of raising an error.
        logs: whether this worker logs.

    Raises:
        CheckpointError: naming all differences.
    """
    changes = ", ".join(f"{name} {then!r} → {current!r}" for name, then, current in differences(saved, now))
    if not changes:
        return
    if not allow_different_hardware:
        raise CheckpointError(
            "expected the determinism settings of the checkpoint, because other settings give other bits; got "
            f"{changes}. allow_different_hardware=True (--allow-different-hardware) resumes all the same."
        )
    if logs:
        _log.warning("the run continues under other determinism settings, and with other bits: %s", changes)


def _check_same_model(saved: Any, model: nn.Module, left_out: Collection[str]) -> None:
    ours = {name: _shape(value) for name, value in model.state_dict().items()}
    theirs = {str(name): _shape(value) for name, value in saved.items()}
    for name in [*(name for name in ours if name in theirs or name not in left_out), *theirs]:
        our_shape, saved_shape = ours.get(name, "missing"), theirs.get(name, "missing")
        if our_shape != saved_shape:
            difference = f"{name}: here {our_shape}, in the checkpoint {saved_shape}"
            raise CheckpointError(f"a checkpoint of another model. The first difference is {difference}.")


def with_names_of(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state with the names of `model`, which may be compiled or wrapped where the saved one was not.

    Names that differ in more than the prefixes of torch.compile, DataParallel and DistributedDataParallel stay as they
    are.
    """
    if not isinstance(state.get("model"), Mapping):
        return state
    frozen = state.get("frozen") or {"names": ()}
    renamed = match_names([*state["model"], *frozen["names"]], model.state_dict())
    if not renamed:
        return state
    changed = {
        "model": {renamed.get(name, name): value for name, value in state["model"].items()},
        "hyperparameters": [
            {**group, "parameters": [renamed.get(name, name) for name in group["parameters"]]}
            for group in state.get("hyperparameters", ())
        ],
    }
    if state.get("frozen"):
        changed["frozen"] = {**frozen, "names": [renamed.get(name, name) for name in frozen["names"]]}
    return {**state, **changed}


def other_dtypes(saved: Mapping[str, Any], model: nn.Module) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Return (dtype in the checkpoint, dtype here) of the entries of a model in which they differ.

    Raises:
        CheckpointError: for an entry whose values cannot be converted.
    """
    found = {}
    for name, value in model.state_dict().items():
        ours, theirs = _dtype(value), _dtype(saved.get(name))
        if ours is None or theirs is None or ours == theirs:
            continue
        if not torch.can_cast(theirs, ours):
            difference = f"{name}: here {ours}, in the checkpoint {theirs}"
            raise CheckpointError(f"a checkpoint of another model. The first difference is {difference}.")
        found[name] = theirs, ours
    return found


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, (torch.Tensor, StoredTensor)) else None


def _convert_state(optimizer: Optimizer, parameter: torch.Tensor, saved_dtype: torch.dtype) -> None:
    """Convert a parameter's optimizer state that had the parameter's dtype, when that was another."""
    for name, value in optimizer.state.get(parameter, {}).items():
        if name != "step" and isinstance(value, torch.Tensor) and value.dtype == saved_dtype:
            optimizer.state[parameter][name] = value.to(parameter.dtype)


def _shape(value: Any) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, (torch.Tensor, StoredTensor)) else "no tensor"


# --- State of a training run ------------------------------------------------------------------------------------------


class RunState:
    """The model, the optimizer and the progress of a run: everything in a checkpoint except callbacks' state.

    Args:
        step: the training step, with its model, optimizer, strategy and communicator.
        global_batch_size: samples in one step, over all workers.
        allow_different_hardware: whether to resume under determinism settings that give other bits.
        saves_frozen: whether parameters that are not trained are in the state.

    Attributes:
        step: the training step.
        hyperparameters: the parameter groups with which the optimizer was constructed.
        position: the position in the training data.
        totals: loss and speed of the epoch in progress.
        history: one row for each epoch.
        epoch: the epoch in progress, from 0.
    """

    def __init__(
        self,
        step: TrainStep,
        global_batch_size: int,
        allow_different_hardware: bool = False,
        saves_frozen: bool = True,
    ) -> None:
        self.step, self.global_batch_size, self.saves_frozen = step, global_batch_size, saves_frozen
        self._frozen: dict[str, Any] = {}
        self._allow_different = allow_different_hardware
        self.hyperparameters = named_param_groups(step.model, step.optimizer)
        self.position, self.totals = Position(), EpochTotals(step.comm.device)
        self.history: list[Row] = []
        self.epoch = 0

    def determinism_settings(self) -> dict[str, Any]:
        """Return the settings that the bits of the run depend on; empty without virtual workers."""
        strategy = self.step.strategy
        settings = strategy.determinism_settings()
        if not settings:
            return {}
        return {
            "virtual_workers": strategy.virtual_workers,
            "global_batch_size": self.global_batch_size,
            "precision": self.step.precision.name,
            **settings,
        }

    def state_dict(self, full: bool = True) -> dict[str, Any]:
        """Return the state to resume from in another process, with any number of workers, except callbacks' state.

        Args:
            full: whether to gather sharded tensors, for which every worker must call this.
        """
        strategy, model, optimizer = self.step.strategy, self.step.model, self.step.optimizer
        added = named_param_groups(model, optimizer)[len(self.hyperparameters) :]
        saved = strategy.model_state(model) if full else model.state_dict()
        frozen = {} if self.saves_frozen else self.left_out()
        return {
            "model": {name: value for name, value in saved.items() if name not in frozen.get("names", ())},
            **({"frozen": frozen} if frozen else {}),
            "optimizer": strategy.optimizer_state(model, optimizer) if full else optimizer.state_dict(),
            "hyperparameters": [*self.hyperparameters, *added],
            "step": self.step.state_dict(),
            "loader": self.position.state_dict(),
            "totals": self.totals.state_dict(),
            "history": self.history,
            "determinism_settings": self.determinism_settings(),
        }

    def left_out(self) -> dict[str, Any]:
        """Return the names of the parameters that are not trained, and their checksum, which is computed once."""
        parameters = self.step.model.named_parameters(remove_duplicate=False)
        names = [name for name, parameter in parameters if not parameter.requires_grad]
        if names != self._frozen.get("names"):
            self._frozen = {"names": names, "checksum": _checksum(self.step.model, names)}
        return self._frozen

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Args:
            state: the state; with stored tensors of model and optimizer, all workers call this together.

        Raises:
            CheckpointError: before anything is changed, if it is of another model or optimizer; later, if a stored
                tensor cannot be read.
        """
        strategy, model, optimizer = self.step.strategy, self.step.model, self.step.optimizer
        state = with_names_of(model, state)
        check_fits(state, model, self.hyperparameters)
        converted = other_dtypes(state["model"], model)
        strategy.load_model_state(model, {**model.state_dict(), **state["model"]})
        load = partial(strategy.load_optimizer_state, model, optimizer)
        changes = load_optimizer(load, state["optimizer"], state["hyperparameters"], self.hyperparameters)
        if changes and self.step.comm.rank == 0:
            _log.warning("the run continues with other hyperparameters than before: %s", ", ".join(changes))
        self._convert(converted)
        rest = read_tensors({part: state[part] for part in ("step", "history", "loader", "totals")})
        self.step.load_state_dict(rest["step"])
        self.history, self.position = list(rest["history"]), Position(rest["loader"])
        self.totals.load_state_dict(rest["totals"])

    def _convert(self, dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]]) -> None:
        """Convert the optimizer's state of parameters that have another dtype than in the loaded state, and say so."""
        if not dtypes:
            return
        for name, parameter in self.step.model.named_parameters(remove_duplicate=False):
            if name in dtypes:
                _convert_state(self.step.optimizer, parameter, dtypes[name][0])
        if self.step.comm.rank == 0:
            shown = [f"{name} from {then} to {now}" for name, (then, now) in dtypes.items()]
            more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
            _log.warning(
                "the model has other dtypes than in the checkpoint, so that its values and their optimizer state were "
                "converted, and the run goes on with other results: %s%s",
                ", ".join(shown[:3]),
                more,
            )

    def check_resumable(self, state: Mapping[str, Any]) -> None:
        """Check that this run can resume from a saved state, without changing anything.

        Raises:
            CheckpointError: for another model or optimizer, or other determinism settings.
        """
        state = with_names_of(self.step.model, state)
        check_fits(state, self.step.model, self.hyperparameters)
        other_dtypes(state["model"], self.step.model)
        saved, logs = state.get("determinism_settings", {}), self.step.comm.rank == 0
        check_determinism(saved, self.determinism_settings(), self._allow_different, logs)
