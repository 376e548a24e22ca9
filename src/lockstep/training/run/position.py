"""Where a training run is in its data, and what the numbers of epochs and steps to train for must
be from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import arguments
from ...data.loader import Loader
from ...errors import ConfigError

# The other keys of a saved position say in which data it is one.
_POSITION_KEYS = ("epoch", "step", "ended", "batches", "batch_order", "stream", "numerics")


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
        # Whoever has loaded this position has said how the numerics differ; the loader need not say
        # it again.
        loader.load_state_dict(
            start if self._saved is None else {**self._saved, "numerics": now["numerics"]}
        )

    def in_data_of(self, loader: Loader) -> Position:
        """Return this position if it is one in the data of `loader`, or else the next epoch's
        beginning there.
        """
        if self._saved is None:
            return self
        there = loader.state_dict()
        if all(
            self._saved.get(key) == value
            for key, value in there.items()
            if key not in _POSITION_KEYS
        ):
            return self
        return Position(
            {**there, "epoch": self.epoch + int(self.step > 0), "step": 0, "ended": False}
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position and the settings it depends on; None for the beginning."""
        return None if self._saved is None else dict(self._saved)


def check_epochs(epochs: Any, position: Position, again: bool) -> None:
    """Check the total number of epochs for a run at `position`.

    Args:
        epochs: the requested total number of epochs.
        position: the position of the run.
        again: whether `epochs` must exceed the completed epochs, as in a second call of `fit`; a
            resumed run may be complete.

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
        ConfigError: if it is neither None nor a whole number of at least 1, or there is no
            validation data.
    """
    if validate_every is None:
        return
    arguments.whole(
        "validate_every", validate_every, least=1, expected="a whole number of steps of at least 1"
    )
    if not has_data:
        raise ConfigError(
            "validate_every", "validate= with it, the data to evaluate on", found="none"
        )
