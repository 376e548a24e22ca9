"""What a training keeps so that it can go on after something has failed, whatever framework it is written for."""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HostUpdateResult", "ObjectState", "State", "run_fn"]


class HostUpdateResult:
    """What has become of the machines; values can be added with ``|``."""

    no_update, removed, added = 0, 1, 2
    mixed = removed | added


class State:
    """Something that is saved, restored, and made the same on all ranks.

    Args:
        bcast_object: gives every rank what rank 0 passes to it.
        get_rank: gives this rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have `callbacks` called whenever the job has been made anew, before the state is sent to all ranks."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when the job has been made anew."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that machines have come or gone; what rank 0 is told counts.

        Args:
            timestamp: in seconds; later ones count.
            update_res: of `HostUpdateResult`.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, then `check_host_updates`; all ranks call it."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Find out whether machines have come or gone; all ranks call it.

        Raises:
            HostsUpdatedInterrupt: on all ranks, when they have.
        """
        last, update = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, what = self._host_messages.get()
            if timestamp > last:
                last, update = timestamp, update | what
        before, self._last_updated_timestamp, update = self._bcast_object((self._last_updated_timestamp, last, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep what there is now in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks what rank 0 has; all ranks call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called when the job has been made anew, before the callbacks; for subclasses."""


class ObjectState(State):
    """Values of any kind, which are attributes of the state.

    Args:
        bcast_object: gives every rank what rank 0 passes to it.
        get_rank: gives this rank.
        kwargs: the values by name.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = kwargs
        self._set(kwargs)
        self._copy()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """Keep a copy of every value."""
        self._copy()

    def restore(self) -> None:
        """Put copies of the saved values in place."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Give all ranks what rank 0 has, and save it."""
        if self._saved_state:
            self._set(self._bcast_object({name: getattr(self, name) for name in self._saved_state}))
            self._copy()

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _copy(self) -> None:
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """`func`, called again when the job has been made anew.

    Before each call ``state.sync()`` is called, unless machines have only been removed. What `func` raises decides:
    after HorovodInternalError the state is restored and the job made anew; after HostsUpdatedInterrupt the job is made
    anew; all else ends it.

    Args:
        func: takes a `State` first.
        reset: makes the job anew.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        synced, failed_at = False, -1
        while True:
            try:
                if not synced:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                # a failure that comes again from the same saved state would come for ever
                if state._commits == failed_at:
                    raise
                failed_at, synced = state._commits, False
                state.restore()
                _make_anew(reset, error)
            except HostsUpdatedInterrupt as update:
                synced = update.skip_sync
                reset()
            state.on_reset()

    return wrapper


def _make_anew(reset: Callable[[], None], after: HorovodInternalError) -> None:
    """Make the job anew; `after` is raised once more where that fails, as it does when a worker is lost."""
    try:
        reset()
    except Exception as error:
        text = f"{after}. The job cannot go on without all of its workers, as lost ones are not replaced: {error}"
        raise HorovodInternalError(text) from after
