"""The group of callbacks of a run, which calls their hooks and collects their states."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from ... import arguments, flight_recorder
from ...checkpoint.serialization import pack, unpack
from ...communicator import Communicator
from ...elastic.client import WorkerLeft
from ...errors import CheckpointError, ConfigError, unknown_name
from ..rank0_changes import Rank0Changes
from ..recovery import Recovery
from .base import Callback, TrainingContext
from .checkpoints import Checkpoints
from .columns import RowColumns
from .csv_log import CSVLog
from .curve import Curve
from .progress import Progress

_log = logging.getLogger(__name__)
_OWN = f"{__name__.partition('.')[0]}."

_FILES: dict[type[Callback], str] = {CSVLog: "no metrics.csv", Curve: "no curve.png"}


class CallbackGroup:
    """The callbacks that run on this rank.

    Args:
        callbacks: the callbacks in the order of calls, except `Checkpoints`, which is called last,
            because the others may change the state that it saves.
        rank: the rank; ranks other than 0 run only callbacks with `every_rank`.
        recovery: of the training; None for a job of fixed size. In any other one the callbacks of
            rank 0 go on on another worker when it goes, with their states, and with the hooks that
            it may not have called.

    Attributes:
        shows_progress: whether one of them shows the progress of the run on this rank.
        states_of_rank0: in an elastic job, the states of those that run on rank 0 only, as the last
            call of `fit` has left them; None before it.

    Raises:
        ConfigError: for an object that is not a callback, for example a callback class; for one of
            rank 0 that could not go on on another worker.
    """

    def __init__(
        self, callbacks: Iterable[Callback], rank: int, recovery: Recovery | None = None
    ) -> None:
        members = list(callbacks)
        for callback in members:
            arguments.instance("callbacks", callback, Callback, "instances of Callback")
            _check_hooks(type(callback))
        ordered = sorted(members, key=lambda callback: isinstance(callback, Checkpoints))
        self._members = [callback for callback in ordered if callback.every_rank or rank == 0]
        self._by_name = _by_name(ordered)
        self._logs = rank == 0
        self._by_hook: dict[str, list[Callback]] = {}
        # for the watchdog
        self._descriptions: dict[tuple[type[Callback], str], tuple[str, bool]] = {}
        self._recovery = recovery or Recovery()
        self._all = ordered
        self._rank = rank
        # hooks of rank 0 since the last operation
        self._skipped: list[tuple[Callback, str, tuple[Any, ...]]] = []
        self._has_ended = False
        self._last_states = b""
        self.states_of_rank0: bytes | None = None
        if not self._recovery.has_fixed_workers:
            for name, member in self._by_name.items():
                _check_movable(name, member)
        self._changes: Rank0Changes | None = None
        self._started: list[Callback] = []  # whose `on_train_start` was called
        self.shows_progress = any(isinstance(member, Progress) for member in self._members)

    def check(
        self, metrics: Iterable[str] | None, several: Iterable[str], has_run_dir: bool
    ) -> list[str]:
        """Check, with the same result on every rank, that the run has what the callbacks need.

        Args:
            metrics: the names of results of a validation; None for a run without validation.
            several: the names of those metrics which may give several results, each in a column
                NAME_KEY.
            has_run_dir: whether there is a run directory.

        Returns:
            the columns that the rows will have; metrics that may give `several` results may have
            others instead.

        Raises:
            ConfigError: for a column that a callback reads and that no row will have, or if it
                needs a run directory.
        """
        columns = RowColumns(metrics, several, self._by_name.values())
        for name, member in self._by_name.items():
            if member.needs_run_dir and not has_run_dir:
                raise ConfigError(
                    f"callbacks.{name}", "Trainer(run_dir=...), where it writes", found="none"
                )
            for column in member.needs_columns:
                columns.check(name, column)
        return columns.names

    def warn_of_missing(self) -> None:
        """Log a warning if the callbacks of a run with a run directory replace the default ones,
        and none saves.
        """
        members = list(self._by_name.values())
        if (
            not self._logs
            or not members
            or any(isinstance(callback, Checkpoints) for callback in members)
        ):
            return
        files = [
            file
            for kind, file in _FILES.items()
            if not any(isinstance(callback, kind) for callback in members)
        ]
        _log.warning(
            "run_dir is set, but callbacks= replaces the default callbacks: the run has %s. To "
            "add to them: callbacks=[*lockstep.callbacks.defaults(True), ...]; if this is meant, "
            "Checkpoints('0') in callbacks= silences this",
            ", ".join(["no checkpoints at intervals", *files]),
        )

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the nonempty states, by name.

        Raises:
            ConfigError: for a state that cannot be stored, naming the callback and the entry of its
                state.
        """
        states = {
            name: member.state_dict()
            for name, member in self._by_name.items()
            if member in self._members
        }
        for name, state in states.items():
            if not isinstance(state, dict):
                raise ConfigError(
                    f"callbacks.{name}",
                    "a dict from state_dict()",
                    found=f"a {type(state).__name__}",
                )
        nonempty = {name: state for name, state in states.items() if state}
        pack({"callbacks": nonempty})  # raises an error for a state that cannot be stored
        return nonempty

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the state of each callback; missing and unused states are logged.

        Raises:
            CheckpointError: if a callback cannot load its state.
        """
        for name, member in self._by_name.items():
            if name in saved and member in self._members:
                _load(name, member, copy.deepcopy(saved[name]))
            elif name not in saved and self._logs and member.state_dict():
                _log.warning(
                    "the checkpoint has no state of the callback %s, which starts anew", name
                )
        for name in saved:
            if name not in self._by_name and self._logs:
                _log.warning(
                    "the checkpoint has state of a callback %s, which this run does not have", name
                )

    def call(self, hook: str, trainer: TrainingContext, *arguments: Any) -> None:
        """Call the hook named `hook` of each callback that overrides it."""
        for member in self._overriding(hook):
            if self._rank == 0 or member.every_rank:  # it may take over rank 0 meanwhile
                self._run(member, hook, trainer, *arguments)
            else:
                self._skipped.append((member, hook, arguments))

    def watch(self, changes: Rank0Changes | None) -> None:
        """Let what callbacks of rank 0 alone change be refused from here on; with None, no longer.

        Lockstep's own callbacks of that kind change nothing, and are not looked at.
        """
        self._changes = changes
        if changes is not None and any(
            not (member.every_rank or _is_own(type(member))) for member in self._members
        ):
            changes.begin()

    def _run(self, member: Callback, hook: str, trainer: TrainingContext, *arguments: Any) -> None:
        """Call a hook of a callback."""
        method = getattr(member, hook)
        with self._declared(member, hook):
            if member.every_rank:
                self._recovery.once(method, trainer, *arguments)
                return
            if self._changes is None or _is_own(method):
                method(trainer, *arguments)
                return
            with self._changes.refused(member, hook, trainer, arguments):
                method(trainer, *arguments)

    def _declared(self, member: Callback, hook: str) -> flight_recorder.activity:
        """Return a context that tells the watchdog which callback runs, and that others wait for it
        on rank 0 only.
        """
        kind = type(member)
        known = self._descriptions.get((kind, hook))
        if known is None:
            known = self._descriptions[kind, hook] = (
                f"the callback {kind.__name__}.{hook}",
                _is_own(kind),
            )
        text, is_own = known
        return flight_recorder.activity(text, is_own, is_solo=not member.every_rank)

    def _overriding(self, hook: str) -> list[Callback]:
        """Return the callbacks that override `hook`; most hooks of most callbacks do nothing at
        every step.
        """
        if hook not in self._by_hook:
            members = self._members if self._recovery.has_fixed_workers else self._all
            self._by_hook[hook] = [member for member in members if _overrides(member, hook)]
        return self._by_hook[hook]

    @contextmanager
    def running(self, trainer: TrainingContext) -> Iterator[None]:
        """Call `on_train_start` of each callback at the beginning of a `with` block, and
        `on_train_end` at its end.
        """
        error: BaseException | None = None
        self._started.clear()
        self._has_ended = False
        try:
            with self._recovery.beginning():
                for member in self._members:
                    self._start(member, trainer)
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end_all(trainer, error)
            self._has_ended = True
            if not self._recovery.has_fixed_workers:
                self._skipped += [
                    (callback, "on_train_end", (error,))
                    for callback in self._all
                    if callback not in self._members
                ]

    def _end_all(self, trainer: TrainingContext, error: BaseException | None) -> None:
        """Call `on_train_end` of all that have started, the last one first, whatever one of them
        raises.
        """
        if self._started:
            member = self._started.pop()
            try:
                self._end(member, trainer, error)
            finally:
                self._end_all(trainer, error)

    def _start(self, member: Callback, trainer: TrainingContext) -> None:
        """Call `on_train_start`; `running` then calls `on_train_end`."""
        self._run(member, "on_train_start", trainer)
        self._started.append(member)

    def _end(self, member: Callback, trainer: TrainingContext, error: BaseException | None) -> None:
        # the run goes on elsewhere
        if isinstance(error, WorkerLeft) or not _overrides(member, "on_train_end"):
            return
        # whose saves are operations
        if error is None and member.every_rank and not isinstance(member, Checkpoints):
            self._recovery.run(self._run, member, "on_train_end", trainer, error, meets=False)
            return
        # An exception of `on_train_end` must not hide the one that ended the run.
        with nullcontext() if error is None else suppress(Exception):
            self._run(member, "on_train_end", trainer, error)

    def note_commit(self) -> None:
        """Note that an operation was done: rank 0 has called all hooks before it."""
        self._skipped.clear()

    def changed_states(self) -> bytes | None:
        """Return the states of the callbacks that run on rank 0 only, if they have changed since
        the last call.
        """
        data = self._packed_states()
        if data is None or data == self._last_states:
            return None
        self._last_states = data
        return data

    def _packed_states(self) -> bytes | None:
        """Return the states of the callbacks that run on rank 0 only, None if they have none."""
        states = {
            name: state
            for name, member in self._by_name.items()
            if not member.every_rank and (state := member.state_dict())
        }
        return pickle.dumps(pack(states)) if states else None

    def keep_states(self, comm: Communicator) -> None:
        """Give all workers the states of the callbacks that run on rank 0 only, at the end of a
        call of `fit`: before the next one another worker may have become rank 0.
        """
        states = self._packed_states() if comm.rank == 0 else None
        self.states_of_rank0 = comm.broadcast_object(states)

    def forget_states(self) -> None:
        """Let `changed_states` return the states again."""
        self._last_states = b""

    def shared_states(self) -> dict[str, Any]:
        """Return the states of the callbacks that run on every rank."""
        return {
            name: member.state_dict() for name, member in self._by_name.items() if member.every_rank
        }

    def load_shared_states(self, states: Mapping[str, Any]) -> None:
        """Load what `shared_states` returned on another worker."""
        for name, state in states.items():
            if state:
                self._by_name[name].load_state_dict(state)

    def take_rank_between(self, rank: int) -> None:
        """Adapt to this worker's new rank between two calls of `fit`, where no hook is due.

        Args:
            rank: the new rank.
        """
        self._becomes_first(rank, self.states_of_rank0)
        self._skipped = []

    def _becomes_first(self, rank: int, states: bytes | None) -> bool:
        """Note the new rank; returns whether this worker runs the callbacks of rank 0 from here on,
        with these states.
        """
        before = self._rank
        self._rank = rank
        if rank != 0 or before == 0:
            return False
        self._logs = True
        self._members = self._all
        if states is not None:
            loaded = unpack(*pickle.loads(states))
            for name, member in self._by_name.items():
                if name in loaded and not member.every_rank:
                    member.load_state_dict(loaded[name])
        return True

    def _of_rank0(self) -> list[Callback]:
        return [member for member in self._all if not member.every_rank]

    def take_rank(
        self,
        rank: int,
        trainer: TrainingContext,
        states: bytes | None,
        all_seen: bool,
        epoch_has_begun: bool,
    ) -> None:
        """Adapt to this worker's new rank; the first one runs the callbacks of rank 0 from here on.

        Args:
            rank: the new rank.
            trainer: the run.
            states: the states of rank 0's callbacks, as its predecessor sent them last.
            all_seen: whether the predecessor has called all hooks before and after the last
                operation.
            epoch_has_begun: whether their `on_train_epoch_start` was called in the epoch in
                progress.
        """
        if not self._becomes_first(rank, states):
            return
        missed = [] if all_seen else self._skipped
        self._skipped = []
        if self._has_ended and not missed:
            return
        for member in self._of_rank0():
            self._start(member, trainer)
            if epoch_has_begun and (member, "on_train_epoch_start", ()) not in missed:
                self._run(member, "on_train_epoch_start", trainer)
        for member, hook, hook_arguments in missed:
            self._run(member, hook, trainer, *hook_arguments)


def _overrides(member: Callback, hook: str) -> bool:
    return getattr(getattr(member, hook), "__func__", None) is not getattr(Callback, hook)


def _check_movable(name: str, member: Callback) -> None:
    kind = type(member)
    if member.every_rank or _is_own(kind) or kind.state_dict is not Callback.state_dict:
        return
    hint = (
        "Give it state_dict() and load_state_dict(), which may return {} and do nothing if it "
        "keeps nothing, or set every_rank = True."
    )
    expected = (
        "a callback with state_dict(): in an elastic job rank 0's callbacks go on on another "
        "worker when it goes"
    )
    raise ConfigError(f"callbacks.{name}", expected, found="one without", hint=hint)


def _is_own(defined: Any) -> bool:
    """Return whether a class or a method is Lockstep's own."""
    return str(getattr(defined, "__module__", "")).startswith(_OWN)


def _by_name(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return the callbacks by the names of their classes, with a number for the second and later of
    a class.
    """
    by_name: dict[str, Callback] = {}
    counts = Counter[str]()
    for callback in callbacks:
        kind = type(callback).__name__
        counts[kind] += 1
        by_name[kind if counts[kind] == 1 else f"{kind}-{counts[kind]}"] = callback
    return by_name


def _load(name: str, callback: Callback, state: Any) -> None:
    try:
        callback.load_state_dict(state)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the callback {name} cannot load its state from the checkpoint: {problem}"
        ) from error


_HOOKS = frozenset(name for name in dir(Callback) if name.startswith("on_"))


def _check_hooks(kind: type[Callback]) -> None:
    """Check that the methods whose names begin with ``on_`` are hooks: any other would never be
    called.
    """
    for name in dir(kind):
        if name.startswith("on_") and name not in _HOOKS and callable(getattr(kind, name)):
            raise unknown_name(
                f"callbacks.{kind.__name__}", name, _HOOKS, "a name that does not begin with on_"
            )


def check_callbacks(callbacks: Any) -> None:
    """Check that the argument `callbacks` of a trainer is a list, or None; its elements are checked
    by `CallbackGroup`.

    Raises:
        ConfigError: if it is not.
    """
    if callbacks is None:
        return
    if isinstance(callbacks, Callback):
        name = type(callbacks).__name__
        hint = (
            f"Put it into a list: callbacks=[{name}(...)]. A list replaces the default callbacks; "
            f"add to them with callbacks=[*lockstep.callbacks.defaults(True), {name}(...)]."
        )
        raise ConfigError("callbacks", "a list of callbacks", found=f"a single {name}", hint=hint)
    if isinstance(callbacks, (str, bytes, type)) or not isinstance(callbacks, Iterable):
        hint = "None is for the default callbacks, and an empty list for none of them."
        raise ConfigError("callbacks", "a list of callbacks", callbacks, hint)
