"""Messages say argument, expectation and value, and survive the way from worker to worker."""

from __future__ import annotations

import pickle

import pytest

from lockstep import errors
from lockstep.errors import ConfigError, InterruptedRunError, LockstepError, WorkerError, unknown_name


def test_the_message_has_all_parts() -> None:
    error = ConfigError("global_batch", "a whole number of at least 1", -4, "Use more.")
    assert str(error) == "global_batch: expected a whole number of at least 1, got -4. Use more."
    assert error.render("--global-batch").startswith("--global-batch: expected")


def test_near_names_are_offered() -> None:
    assert "Did you mean lenet?" in str(unknown_name("model", "lenett", ["lenet", "resnet18"]))
    assert "Did you mean" not in str(unknown_name("model", "xyz", ["lenet", "resnet18"]))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a", "b", 3, "c"),
        InterruptedRunError("stopped", 15, "somewhere"),
        WorkerError(2, "ValueError", "no", "trace", 1),
        errors.CheckpointError("damaged"),
    ],
)
def test_errors_can_be_sent_to_other_ranks(error: LockstepError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.exit_code == error.exit_code
    assert vars(copy) == vars(error)


def test_every_error_is_public_and_of_the_family() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert not isinstance(kind, type) or issubclass(kind, LockstepError)
