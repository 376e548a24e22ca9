"""Messages say argument, expectation and value, and survive the way from worker to worker."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest

from lockstep import errors
from lockstep.errors import (
    ConfigError,
    InterruptedRunError,
    LockstepError,
    WorkerError,
    unknown_name,
)
from support.sources import syntax_trees


def test_the_message_has_all_parts() -> None:
    error = ConfigError("global_batch_size", "a whole number of at least 1", -4, "Use more.")
    assert (
        str(error) == "global_batch_size: expected a whole number of at least 1, got -4. Use more."
    )
    assert error.render("--global-batch-size").startswith("--global-batch-size: expected")


@pytest.mark.parametrize(
    ("came", "shown"),
    [
        ({"got": "both"}, "'both'"),
        ({"got": "4,5"}, "'4,5'"),
        ({"got": None}, "None"),
        ({"found": "both"}, "both"),
        ({"found": "a folder without one"}, "a folder without one"),
    ],
)
def test_values_are_quoted_and_words_are_not(came: dict[str, Any], shown: str) -> None:
    assert str(ConfigError("workers", "one", **came)) == f"workers: expected one, got {shown}"


def test_a_description_of_what_was_found_is_not_quoted() -> None:
    # a text in the place of a value would be quoted
    for path, tree in syntax_trees(Path(errors.__file__).parent).items():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "ConfigError":
                got = call.args[2:3] + [word.value for word in call.keywords if word.arg == "got"]
                assert not any(map(_is_prose, got)), f"{path}:{call.lineno}: give words by found="


def _is_prose(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and isinstance(value.value, str)
    )


def test_near_names_are_offered() -> None:
    assert "Did you mean lenet?" in str(unknown_name("model", "lenett", ["lenet", "resnet18"]))
    assert "Did you mean" not in str(unknown_name("model", "xyz", ["lenet", "resnet18"]))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a", "b", 3, "c"),
        ConfigError("a", "b", found="both", hint="c"),
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
