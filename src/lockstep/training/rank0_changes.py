"""Callbacks of rank 0 alone that change what the other ranks have as well: looked for around each
of their hooks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..data.loader import Batch
from ..errors import ConfigError
from ..parallel.fingerprints import checksum
from ..parallel.nested import tensors_of
from ..parallel.optimizer_parts import NOT_HYPERPARAMETERS
from .callbacks.base import Callback, TrainingContext
from .check_schedule import is_due
from .settings import NONE, Holder, Identity, described, holders_of, setting_of

_AT_EACH_STEP = ("on_train_step_start", "on_train_step_end", "on_loss")

_SHOWN = 3  # changes in a message


class Rank0Changes:
    """Refuses changes, by callbacks that run on rank 0 alone, of what training and evaluations
    depend on.

    The other ranks do not have such a change, so the results would depend on the number of workers.
    It is refused on one worker as well: a program is then right on any number, or on none.

    What there is before a hook is compared with what there is after it: hyperparameters, modes,
    ``requires_grad`` and the settings of model, loss and data at all hooks; the values of
    parameters and buffers, which take longer, at hooks that are not called at each step, and at
    these at some steps, see `lockstep.training.check_schedule.is_due`.

    Three things that change are allowed: what the callback notes, which is an attribute that was
    not there before; what also changes while no callback runs, such as a counter of samples read;
    and a private attribute that was None, such as a cache or a file that is opened when it is first
    needed.

    Args:
        model: the model.
        optimizer: the optimizer.
        loss_modules: the modules of the loss.
        roots: the loss, the data and others that have settings, by their names in messages.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_modules: nn.Module,
        roots: Mapping[str, Any],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss_modules
        self._roots = roots
        self._looked_at = _LookedAt([])
        self._modes: Holder | None = None
        self._known: dict[tuple[str, Any], Any] = {}  # the settings when all were last looked at
        self._moving: set[tuple[str, Any]] = set()  # those that also change without a callback
        self._added: set[tuple[str, Any]] = set()  # those that a callback has added

    def begin(self) -> None:
        """Note what there is before the first hook, to know later what changes without one."""
        self._find()
        self._note([holder.read() for holder in self._looked_at.holders])

    @contextmanager
    def refused(
        self, callback: Callback, hook: str, trainer: TrainingContext, arguments: Sequence[Any]
    ) -> Iterator[None]:
        """Refuse what the hook of a callback changes within a `with` block.

        Args:
            callback: a callback that runs on rank 0 alone.
            hook: the name of the hook.
            trainer: the run.
            arguments: the other arguments of the hook.

        Raises:
            ConfigError: naming the callback, the hook, what it has changed, and what to do.
        """
        # What a program does with its model after the training, such as exporting it, changes no
        # result of the run.
        if hook == "on_train_end":
            yield
            return
        is_whole = hook not in _AT_EACH_STEP or is_due(trainer.step.steps_done)
        if is_whole:
            self._find()
        more: list[Holder] = []
        if is_whole:
            more.append(Holder("model", self._checksums, nn.Module, is_set_in_training=True))
        if hook == "on_train_step_start":
            more.append(_of_batch(arguments[0]))
        looked_at = self._looked_at
        before = looked_at.read(more)
        if is_whole:
            self._note(looked_at.in_order(before))
        yield
        if looked_at.may_differ(before, more):
            after = looked_at.read(more)
            holders = looked_at.holders + more
            changes: list[str] = []
            for holder, old, new in zip(
                holders, looked_at.in_order(before), looked_at.in_order(after), strict=True
            ):
                if holder is self._modes and self._modes_are_restored(hook, trainer):
                    continue
                # something, such as losses
                is_kept_in = isinstance(old, list) and len(old) != len(new)
                if not is_kept_in and _may_differ(old, new):
                    changes += self._changes(holder, holder.settings(old), holder.settings(new))
            if changes:
                raise _refusal(type(callback).__name__, hook, changes)
        if is_whole:
            self._note(looked_at.in_order(looked_at.read(more)))

    def _find(self) -> None:
        """Find everything that has settings, which may be other objects than before."""
        groups = self._optimizer.param_groups
        of_loss = {**dict(self._loss.named_parameters()), **dict(self._loss.named_buffers())}
        self._modes = _flags("training", dict(self._model.named_modules()))
        holders = [
            self._modes,
            _flags("requires_grad", dict(self._model.named_parameters())),
            Holder(
                "loss_fn",
                lambda: {name: setting_of(tensor) for name, tensor in of_loss.items()},
                nn.Module,
            ),
            *holders_of("model", self._model, (Callback,)),
        ]
        for path, root in self._roots.items():
            holders += holders_of(path, root, (Callback, type(self._model)))
        for number, group in enumerate(groups):
            path = f"optimizer.param_groups[{number}]"
            holders.append(
                Holder(path, group.copy, ignored=NOT_HYPERPARAMETERS, is_set_in_training=True)
            )
        self._looked_at = _LookedAt(holders)

    def _checksums(self) -> dict[str, Identity]:
        """Return a checksum of each parameter, and of each buffer that belongs to the state, among
        plain tensors.
        """
        tensors: dict[str, torch.Tensor | None] = dict(self._model.named_parameters())
        for path, layer in self._model.named_modules():
            kept = [
                name for name in layer._buffers if name not in layer._non_persistent_buffers_set
            ]
            tensors |= {f"{path}.{name}".lstrip("."): layer._buffers[name] for name in kept}
        plain = {
            name: tensor
            for name, tensor in tensors.items()
            if tensor is not None and _is_plain(tensor)
        }
        if not plain:
            return {}
        sums = [checksum(tensor) for tensor in plain.values()]
        numbers = torch.stack([sum_of_device.to(sums[0].device) for sum_of_device in sums]).tolist()
        return {
            name: Identity("values", number) for name, number in zip(plain, numbers, strict=True)
        }

    def _modes_are_restored(self, hook: str, trainer: TrainingContext) -> bool:
        """Return whether the model is in evaluation mode where the next step, if any, ends that on
        all ranks.
        """
        if self._model.training:
            return False
        is_over = trainer.total_steps is not None and trainer.step.steps_done >= trainer.total_steps
        return hook == "on_train_start" or trainer.epoch_ended or is_over

    def _note(self, entries: Sequence[Any]) -> None:
        """Note all settings; those that are others than when they were last noted also change
        without a callback.
        """
        holders = self._looked_at.holders
        known = {
            (holder.path, key): value
            # which may be followed by others
            for holder, of_holder in zip(holders, entries, strict=False)
            for key, value in holder.settings(of_holder).items()
        }
        if self._known:
            self._moving |= {
                place for place, value in known.items() if self._known.get(place, NONE) != value
            }
        self._known = known

    def _changes(
        self, holder: Holder, old: Mapping[Any, Any], new: Mapping[Any, Any]
    ) -> Iterator[str]:
        """Yield the changes of settings that are refused, as a message shows them."""
        for key, now in new.items():
            place = holder.path, key
            was = old[key] if key in old else setting_of(getattr(holder.kind, str(key), NONE))
            if key not in old and was is NONE:
                self._added.add(place)
            if was is NONE or now is NONE or was == now or place in self._added:
                continue
            is_made_late = was is None and str(key).startswith("_")
            moves = place in self._moving or (key in old and self._known.get(place, NONE) != was)
            if not is_made_late and (holder.is_set_in_training or not moves):
                yield f"{holder.name_of(key)}: {described(was, now)}"


class _LookedAt:
    """All that has settings, for comparisons around each hook: most are dicts, which are copied and
    compared as one.

    Args:
        holders: what has settings, in the order of messages.

    Attributes:
        holders: see the argument.
    """

    def __init__(self, holders: list[Holder]) -> None:
        self.holders = holders
        entries = [holder.entries for holder in holders]
        self._dicts = [entry for entry in entries if entry is not None]
        self._is_dict = [entry is not None for entry in entries]
        self._others = [holder for holder in holders if holder.entries is None]

    def read(self, more: Sequence[Holder]) -> tuple[list[Any], list[Any]]:
        """Return the entries of all holders that are dicts, and those of the others and of `more`;
        see `in_order`.
        """
        return list(map(dict.copy, self._dicts)), [
            holder.read() for holder in (*self._others, *more)
        ]

    def may_differ(self, before: tuple[list[Any], list[Any]], more: Sequence[Holder]) -> bool:
        """Return whether entries may be others than `read` has returned before."""
        of_dicts, of_others = before
        if _may_differ(of_dicts, self._dicts):
            return True
        return _may_differ(of_others, [holder.read() for holder in (*self._others, *more)])

    def in_order(self, entries: tuple[list[Any], list[Any]]) -> list[Any]:
        """Return what `read` has returned in the order of the holders."""
        of_dicts, of_others = map(iter, entries)
        return [next(of_dicts if is_dict else of_others) for is_dict in self._is_dict] + list(
            of_others
        )


def _of_batch(batch: Batch) -> Holder:
    """Return what holds the tensors of a batch, which training makes anew for each step."""
    return Holder(
        "batch.data", lambda: list(map(setting_of, tensors_of(batch.data))), is_set_in_training=True
    )


def _flags(name: str, objects: Mapping[str, Any]) -> Holder:
    """Return what holds an attribute, True or False, of each of the model's layers or
    parameters.
    """
    read = operator.attrgetter(name)
    values = list(objects.values())
    names = tuple(f"{path}.{name}".lstrip(".") for path in objects)
    return Holder(
        "model", lambda: list(map(read, values)), nn.Module, is_set_in_training=True, names=names
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    kinds = (torch.Tensor, nn.Parameter)
    return (
        type(tensor) in kinds
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
    )


def _may_differ(old: Any, new: Any) -> bool:
    try:
        return bool(old != new)
    # tensors and arrays have no single answer, and objects of a program may raise anything
    except Exception:
        return True


def _refusal(callback: str, hook: str, changes: Sequence[str]) -> ConfigError:
    more = [f"{len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
    return ConfigError(
        f"callbacks.{callback}",
        f"{hook} to change nothing that training or evaluation use, as this callback runs on rank "
        "0 alone and the other ranks would go on without the change",
        found="; ".join([*changes[:_SHOWN], *more]),
        hint="Set every_rank = True in the class, and make the same change on every rank; what it "
        "prints or writes then belongs under `if trainer.comm.rank == 0:`. What it only notes "
        "for itself belongs on the callback: self.name = value. replica_check=0 switches this "
        "check off.",
    )
