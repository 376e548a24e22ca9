"""Whether a saved state fits a run: its model, its optimizer, its frozen parameters and its
determinism settings.

Which checkpoint is tried, and whether its files are whole, is found out by `checkpoint_manager`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...checkpoint.names import match_names
from ...checkpoint.serialization import StoredTensor
from ...errors import CheckpointError
from ...parallel.determinism import differences
from ...parallel.fingerprints import checksum_of
from .hyperparameters import ParamGroup, check_same_parameters

_log = logging.getLogger(__name__)

_PARTS = ("model", "optimizer", "hyperparameters", "step", "loader", "totals", "history")


def check_fits(
    state: Mapping[str, Any], model: nn.Module, hyperparameters: Sequence[ParamGroup]
) -> None:
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
        raise CheckpointError(
            f"expected a checkpoint of a training run, got one without {', '.join(missing)}"
        )
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
    if frozen["checksum"] not in ("", ours := checksum_of_parameters(model, frozen["names"])):
        raise CheckpointError(
            f"{who} trained parameters only, and this model's other ones are not those that it "
            f"was trained with: expected the checksum {frozen['checksum']}, got {ours}. Load the "
            "same pretrained weights first."
        )


def checksum_of_parameters(model: nn.Module, names: Collection[str]) -> str:
    """Return a checksum of parameters; "" where some are sharded over the workers."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    present = [parameters[name] for name in names if name in parameters]
    if any(isinstance(parameter, DTensor) for parameter in present):
        return ""
    by_device = [
        [p for p in present if p.device == device]
        for device in dict.fromkeys(p.device for p in present)
    ]
    return "-".join(f"{int(checksum_of(tensors)):x}" for tensors in by_device)


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
    changes = ", ".join(
        f"{name} {then!r} → {current!r}" for name, then, current in differences(saved, now)
    )
    if not changes:
        return
    if not allow_different_hardware:
        raise CheckpointError(
            "expected the determinism settings of the checkpoint, because other settings give "
            f"other bits; got {changes}. allow_different_hardware=True "
            "(--allow-different-hardware) resumes all the same."
        )
    if logs:
        _log.warning(
            "the run continues under other determinism settings, and with other bits: %s", changes
        )


def _check_same_model(saved: Any, model: nn.Module, left_out: Collection[str]) -> None:
    ours = {name: _shape(value) for name, value in model.state_dict().items()}
    theirs = {str(name): _shape(value) for name, value in saved.items()}
    for name in [*(name for name in ours if name in theirs or name not in left_out), *theirs]:
        our_shape = ours.get(name, "missing")
        saved_shape = theirs.get(name, "missing")
        if our_shape != saved_shape:
            difference = f"{name}: here {our_shape}, in the checkpoint {saved_shape}"
            raise CheckpointError(
                f"a checkpoint of another model. The first difference is {difference}."
            )


def with_names_of(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state with the names of `model`, which may be compiled or wrapped where the
    saved one was not.

    Names that differ in more than the prefixes of torch.compile, DataParallel and
    DistributedDataParallel stay as they are.
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
        changed["frozen"] = {
            **frozen,
            "names": [renamed.get(name, name) for name in frozen["names"]],
        }
    return {**state, **changed}


def other_dtypes(
    saved: Mapping[str, Any], model: nn.Module
) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Return (dtype in the checkpoint, dtype here) of the entries of a model in which they differ.

    Raises:
        CheckpointError: for an entry whose values cannot be converted.
    """
    dtypes = {}
    for name, value in model.state_dict().items():
        ours = _dtype(value)
        theirs = _dtype(saved.get(name))
        if ours is None or theirs is None or ours == theirs:
            continue
        if not torch.can_cast(theirs, ours):
            difference = f"{name}: here {ours}, in the checkpoint {theirs}"
            raise CheckpointError(
                f"a checkpoint of another model. The first difference is {difference}."
            )
        dtypes[name] = theirs, ours
    return dtypes


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, (torch.Tensor, StoredTensor)) else None


def _shape(value: Any) -> str:
    return (
        f"of shape {list(value.shape)}"
        if isinstance(value, (torch.Tensor, StoredTensor))
        else "no tensor"
    )
