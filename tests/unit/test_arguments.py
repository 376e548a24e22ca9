"""What arguments must be: the valid values are returned as they are, and the error names what was
expected.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import arguments
from lockstep.errors import ConfigError


@pytest.mark.parametrize("value", [True, 0, 6, 2.0, "2", None, np.bool_(True)])
def test_a_whole_number_outside_of_its_limits_or_of_another_type_is_refused(value: object) -> None:
    assert arguments.whole("steps", 5, least=1, most=5) == 5
    assert type(arguments.whole("steps", np.int64(5), least=1, most=5)) is int
    with pytest.raises(ConfigError, match=r"^steps: expected a whole number from 1 to 5, got "):
        arguments.whole("steps", value, least=1, most=5)


@pytest.mark.parametrize(
    ("limits", "valid", "invalid", "expected"),
    [
        ({}, -math.inf, math.nan, "a number"),
        ({"finite": True}, -1, math.inf, "a finite number"),
        ({"least": 0}, 0, -0.1, "a number of at least 0"),
        ({"above": 0}, math.inf, 0, "a number above 0"),
        ({"above": 0, "finite": True}, 1, math.inf, "a finite number above 0"),
        ({"least": 0, "below": 1}, 0, 1, "a number from 0 to below 1"),
        ({"least": 0.1, "most": 3600}, 3600, 3601, "a number from 0.1 to 3600"),
        ({"above": 0, "most": 1}, 1, 0, "a number above 0 and of at most 1"),
        ({"most": 3}, -math.inf, 4, "a number of at most 3"),
        ({"below": 3}, 2, 3, "a number below 3"),
        ({"least": 0, "expected": "a delay"}, 1, -1, "a delay"),
    ],
)
def test_the_limits_of_a_number_make_the_words_of_its_error(
    limits: dict[str, Any], valid: float, invalid: float, expected: str
) -> None:
    assert arguments.number("x", valid, **limits) is valid
    for value in (invalid, True, "1", None):
        with pytest.raises(ConfigError) as error:
            arguments.number("x", value, **limits)
        assert str(error.value) == f"x: expected {expected}, got {value!r}"


@pytest.mark.parametrize("text", ["0", "", "2.5", "many", "1_0", True, 1.0])
def test_a_text_that_is_no_such_whole_number_is_shown_as_it_is(text: object) -> None:
    assert arguments.parse_whole("--steps", " 12", least=1) == 12
    with pytest.raises(ConfigError) as error:
        arguments.parse_whole("--steps", text, least=1)
    assert str(error.value) == f"--steps: expected a whole number of at least 1, got {text!r}"


@pytest.mark.parametrize("text", ["nan", "inf", "", "0", "1 s"])
def test_a_text_that_is_no_such_number_is_shown_as_it_is(text: str) -> None:
    assert arguments.parse_number("--seconds", "1e-3", above=0, finite=True) == 0.001
    with pytest.raises(ConfigError) as error:
        arguments.parse_number("--seconds", text, above=0, finite=True)
    assert str(error.value) == f"--seconds: expected a finite number above 0, got {text!r}"


def test_a_flag_may_be_a_number_or_numpys_own_and_no_text() -> None:
    for value in (True, False, 0, 1, np.bool_(True)):
        assert arguments.flag("shuffle", value) is value
    assert arguments.flag("shuffle", None, none="False") is None
    with pytest.raises(ConfigError, match=r"^shuffle: expected True or False, got 'False'$"):
        arguments.flag("shuffle", "False")
    with pytest.raises(
        ConfigError, match=r"^shuffle: expected True or False, or None for False, got 2$"
    ):
        arguments.flag("shuffle", 2, none="False")


def test_one_of_a_few_texts_and_what_is_near() -> None:
    assert arguments.choice("mode", "offline", ("online", "offline")) == "offline"
    with pytest.raises(ConfigError, match=r"^mode: expected a, b or c, got 'd'$"):
        arguments.choice("mode", "d", "abc")
    with pytest.raises(ConfigError, match=r"^mode: expected a, got None$"):
        arguments.choice("mode", None, ["a"])
    with pytest.raises(
        ConfigError, match=r"^mode: expected online or offline, got 'ofline'\. Did you mean offl"
    ):
        arguments.choice("mode", "ofline", ("online", "offline"))
    with pytest.raises(ConfigError, match=r"^mode: expected online or offline, got array"):
        arguments.choice("mode", np.array(["online"]), ("online", "offline"))


def test_texts_are_a_list_even_of_an_iterator() -> None:
    assert arguments.texts("names", iter(["a", "b"]), "names") == ["a", "b"]
    for value in ("ab", b"ab", 1, ["a", 1]):
        with pytest.raises(ConfigError, match=r"^names: expected names, got "):
            arguments.texts("names", value, "names")
    with pytest.raises(ConfigError, match=r"^name: expected a name, got ''$"):
        arguments.text("name", "", "a name")


def test_a_path_and_a_file_to_write(tmp_path: Path) -> None:
    assert arguments.path("folder", str(tmp_path), "a folder") == tmp_path
    for value in ("", "a\0b", b"a", 1, None):
        with pytest.raises(ConfigError, match=r"^folder: expected a folder, got "):
            arguments.path("folder", value, "a folder")
    assert arguments.output_file("-o", str(tmp_path / "new")) == tmp_path / "new"
    for given in (tmp_path, tmp_path / "none" / "new"):
        with pytest.raises(ConfigError, match=r"^-o: expected a file in an existing folder, got '"):
            arguments.output_file("-o", given)


def test_an_instance_and_its_class() -> None:
    assert arguments.instance("model", 1, (int, str), "a value") == 1
    with pytest.raises(ConfigError, match=r"^model: expected a value, got list$"):
        arguments.instance("model", [], (int, str), "a value")
    with pytest.raises(
        ConfigError,
        match=r"^model: expected a value, got the class int\. Create an instance: int\(...\)",
    ):
        arguments.instance("model", int, (int, str), "a value")


def _decorated() -> Callable[..., Any]:
    def outer(*values: Any) -> None:
        """Take any number of arguments."""

    return functools.wraps(lambda one: one)(outer)


def test_a_function_and_what_it_takes() -> None:
    for function in (len, print, dict, lambda a, b=1: a, _decorated()):
        assert arguments.function("fn", function, "a function", takes=1) is function
    with pytest.raises(ConfigError, match=r"^fn: expected a function, got <lambda>\(a\)$"):
        arguments.function("fn", lambda a: a, "a function", takes=2)
    with pytest.raises(ConfigError, match=r"^fn: expected a function, got 3\. Give one\.$"):
        arguments.function("fn", 3, "a function", hint="Give one.")
    with pytest.raises(
        ConfigError, match=r"got the class dict\. Create an instance: dict\(...\)\.$"
    ):
        arguments.function("fn", dict, "a function", of_class=False)
