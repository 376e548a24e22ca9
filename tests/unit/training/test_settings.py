"""The variables that a function reads, which checks of callbacks, losses and metrics look at."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from lockstep.training.settings import variables_of

GLOBAL = [1]


def enclosing() -> FunctionType:
    inner = 2

    def reads() -> Any:
        return GLOBAL, inner, later

    yielded = reads
    if inner < 0:
        later = 3  # never: the function refers to a variable without a value
    return yielded  # type: ignore[return-value]


def test_the_variables_of_a_function_are_read_and_assigned() -> None:
    function = enclosing()
    variables = {variable.name: variable for variable in variables_of(function)}
    assert {name: variable.read() for name, variable in variables.items()} == {
        "GLOBAL": [1],
        "inner": 2,
    }
    variables["inner"].assign(5)
    assert variables["inner"].read() == 5
    assert {variable.name: variable.read() for variable in variables_of(function)}["inner"] == 5
