"""How far a run is: epochs that are done, and steps of the one that it is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.loader import Loader
from ..errors import ConfigError

__all__ = ["Position", "check_epochs"]


class Position:
    """A place in the training data that outlives the loader which deals it out.

    Args:
        saved: what `state_dict` returned; None is the beginning.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._saved = None if saved is None else dict(saved)

    @property
    def epoch(self) -> int:
        """Epochs that are done, their evaluation included."""
        return 0 if self._saved is None else int(self._saved["epoch"])

    @property
    def step(self) -> int:
        """Steps made of the epoch that is not done; all of them while its evaluation is still to be made."""
        return 0 if self._saved is None else int(self._saved["step"])

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step that was made, from 0; 0 before the first."""
        return self.epoch if self.step else max(0, self.epoch - 1)

    def note(self, loader: Loader) -> None:
        """A step with the last batch that `loader` has handed out is done."""
        self._saved = loader.state_dict()

    def end_epoch(self) -> None:
        """The epoch has been evaluated."""
        assert self._saved is not None
        self._saved |= {"epoch": self.epoch + 1, "step": 0}

    def take_to(self, loader: Loader) -> None:
        """Let `loader` begin here.

        Raises:
            CheckpointError: when this is a place in other data, or in another order of them.
        """
        start = {**loader.state_dict(), "epoch": 0, "step": 0}
        loader.load_state_dict(start if self._saved is None else self._saved)

    def state_dict(self) -> dict[str, Any] | None:
        """The place, and what it depends on; None for the beginning."""
        return None if self._saved is None else dict(self._saved)


def check_epochs(epochs: Any, position: Position, again: bool) -> None:
    """See that a run which is at `position` can be asked for so many epochs in all.

    Args:
        epochs: the number asked for.
        position: where the run is.
        again: whether a run asked for no more than it has done is a mistake, and not one that was found to be done.

    Raises:
        ConfigError: when it cannot.
    """
    least = max(1, position.epoch + int(position.step > 0 or again))
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < least:
        done = f", as {position.epoch} are done already" if position.epoch else ""
        hint = "Epochs are counted from the beginning of the run." if position.epoch else ""
        raise ConfigError("epochs", f"a whole number of at least {least}{done}", epochs, hint)
