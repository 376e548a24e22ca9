"""Functions and classes pickled by value."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from lockstep.pickling import pickled


def make() -> Callable[[], Any]:
    def outer() -> Any:
        def inner() -> None:
            raise ValueError("the cause")

        return inner()

    return outer


def trace_of(data: bytes) -> str:
    try:
        pickle.loads(data)()
    except ValueError as error:
        return "".join(traceback.format_exception(error))
    return ""


def test_a_pickled_function_keeps_its_file() -> None:
    trace = trace_of(pickled(make()))
    assert f'File "{__file__}"' in trace
    assert 'raise ValueError("the cause")' in trace
    assert "<dynamic-code>" not in trace


def test_a_function_without_a_file_is_pickled_as_it_is() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def f():\n    return 7\n", "<cell 3>", "exec"), names)
    copy = pickle.loads(pickled(names["f"]))
    assert (copy(), copy.__code__.co_filename) == (7, "<cell 3>")
    assert cloudpickle.loads(pickled(lambda: 8))() == 8
