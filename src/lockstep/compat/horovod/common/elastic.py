"""Elastic state: what a training saves and restores in order to continue after a failure, for any
framework.
"""

from __future__ import annotations

import copy
import functools
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from ..engine.regrouping import ElasticTraining, current_training
from .exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HostUpdateResult", "ObjectState", "State", "run_fn"]


class HostUpdateResult:
    """How the hosts of a job have changed; the values are flags."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


_STOP = 4  # beside the values of `HostUpdateResult`: the whole job ends


class State:
    """A state that can be saved, restored, and broadcast from rank 0.

    Args:
        bcast_object: broadcasts an object from rank 0 and returns it.
        get_rank: returns the rank of this process.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions to call after every reset of the job, before the state is
        broadcast.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset the state and call the reset callbacks, after a reset of the job."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record that hosts have joined or left; only what rank 0 records has an effect.

        Args:
            timestamp: in seconds; an update that is older than the last one is ignored.
            update_res: a value of `HostUpdateResult`.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, then call `check_host_updates`; all ranks call it."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether hosts have joined or left; all ranks call it.

        Raises:
            HostsUpdatedInterrupt: on all ranks, if they have.
        """
        training = current_training()
        if training is not None:
            self._note_wishes(training)
        last = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > last:
                last = timestamp
                update = update | result
        previous, last, update = self._bcast_object((self._last_updated_timestamp, last, update))
        self._last_updated_timestamp = last
        if training is not None and update & _STOP:
            training.interrupt()
        if last > previous:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def _note_wishes(self, training: ElasticTraining) -> None:
        """Record what this rank knows of the membership of an elastic job."""
        training.commits = self._commits
        # later than the last one, whatever the clock says
        now = max(time.time(), self._last_updated_timestamp + 1e-3)
        if training.wants_to_regroup():
            self.on_hosts_updated(now, HostUpdateResult.mixed)
        if training.stop_signal:
            self.on_hosts_updated(now + 1e-3, _STOP)

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast the state of rank 0; all ranks call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Reset the state, after a reset of the job and before the callbacks; for subclasses."""


class ObjectState(State):
    """A state of arbitrary values, which are its attributes.

    Args:
        bcast_object: broadcasts an object from rank 0 and returns it.
        get_rank: returns the rank of this process.
        kwargs: the values, by name.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._saved_state = kwargs
        self._set(kwargs)
        self._save_copies()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """Save a copy of every value."""
        self._save_copies()

    def restore(self) -> None:
        """Restore copies of the saved values."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Broadcast the values of rank 0, and save them."""
        if self._saved_state:
            self._set(self._bcast_object({name: getattr(self, name) for name in self._saved_state}))
            self._save_copies()

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _save_copies(self) -> None:
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})


def run_fn(
    func: Callable[..., Any],
    reset: Callable[[], None],
    elastic: Callable[[], ElasticTraining | None] = lambda: None,
) -> Callable[..., Any]:
    """Return a function that calls `func`, and calls it again after a failure.

    ``state.sync()`` precedes each call, unless hosts have only been removed. If `func` raises
    HorovodInternalError, the state is restored and the job is reset; if it raises
    HostsUpdatedInterrupt, the job is reset. Other exceptions are raised.

    Args:
        func: a training function, whose first argument is a `State`.
        reset: resets the job.
        elastic: returns a training of an elastic job, which takes the place of `reset`; None in any
            other job.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        training = elastic()
        with training or nullcontext():
            return _run_until_complete(lambda: func(state, *args, **kwargs), state, reset, training)

    return wrapper


def _run_until_complete(
    func: Callable[[], Any],
    state: State,
    reset: Callable[[], None],
    training: ElasticTraining | None,
) -> Any:
    synced = False
    was_reset = False
    failed_at = -1
    while True:
        try:
            if was_reset:
                state.on_reset()
            if not synced:
                state.sync()
            if training is not None:
                state._commits = training.note_sync()
                # what rank 0 had saved is what all go on from
                failed_at = -1 if failed_at < 0 else state._commits
            result = func()
            if training is not None:
                training.complete()
            return result
        except HorovodInternalError as error:
            # a failure that repeats from the same saved state would repeat for ever
            if state._commits == failed_at:
                raise
            failed_at = state._commits
            synced = False
            state.restore()
            if training is None:
                _reset_after(error, reset)
            elif training.regroup(str(error)):
                failed_at = -1
        except HostsUpdatedInterrupt as update:
            if training is None:
                synced = update.skip_sync
                reset()
            else:
                synced = False  # ranks may have joined all the same
                training.regroup(at_boundary=True)
        was_reset = True


def _reset_after(failure: HorovodInternalError, reset: Callable[[], None]) -> None:
    """Reset the job after `failure`, and raise that again if the reset fails, as it does when a
    worker is lost.
    """
    try:
        reset()
    except Exception as error:
        is_same = str(error) in str(failure)
        cause = "" if is_same else f" (the reset failed: {error})"
        text = (
            f"{str(failure).rstrip('.')}. The job cannot continue without all of its "
            f"workers{cause}. Lost ones are replaced in an elastic job: `lockstep horovodrun -np 4 "
            "--min-np 2 --max-np 4 ...`, or `lockstep run --as-horovod --elastic 2:4 -np 4 ...`."
        )
        if is_same:  # one traceback: of the operation in the user's function
            raise HorovodInternalError(text).with_traceback(failure.__traceback__) from None
        raise HorovodInternalError(text) from failure
