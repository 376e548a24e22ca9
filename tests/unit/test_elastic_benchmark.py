"""What `benchmarks/elastic.py` makes of the events of a job."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.delitem(sys.modules, "elastic", raising=False)  # the example of the same name
    return importlib.import_module("elastic")


def events(elastic: Any, *lines: tuple[float, int, str, int, dict[str, Any]]) -> list[Any]:
    names = ("time", "pid", "kind", "generation")
    return [
        elastic.Event.of(json.dumps(dict(zip(names, line, strict=False)) | line[4]))
        for line in lines
    ]


LOSS: list[tuple[float, int, str, int, dict[str, Any]]] = [
    (9.0, 1, "step", 1, {"step": 7}),
    (9.0, 2, "step", 1, {"step": 7}),
    (10.1, 1, "seen", 2, {}),
    (10.2, 2, "step", 1, {"step": 8}),  # in flight when the third worker was killed
    (10.3, 2, "seen", 2, {}),
    *((10.4, pid, kind, 2, {}) for pid in (1, 2) for kind in ("left", "formed")),
    (10.5, 1, "begun", 2, {}),
    (10.6, 2, "begun", 2, {}),
    (10.8, 1, "step", 2, {"step": 8}),
    (11.0, 4, "share", 3, {"has": False}),
    (11.0, 1, "share", 3, {"has": True}),
    (11.4, 4, "shared", 3, {}),
    (11.5, 4, "step", 3, {"step": 9}),
]


def test_a_pause_lasts_until_a_step_of_the_group_without_the_lost_worker(elastic: Any) -> None:
    found = elastic.pause_of(events(elastic, *LOSS), 10.0, {1, 2})
    assert found == pytest.approx(
        {"seen": 0.3, "left": 0.4, "formed": 0.4, "begun": 0.6, "step": 0.8}
    )
    assert elastic.pause_of(events(elastic, *LOSS[:-5]), 10.0, {1, 2}) == {}


def test_a_replacement_is_at_work_after_its_first_step(elastic: Any) -> None:
    assert elastic.joined_after(events(elastic, *LOSS), 10.0, {1, 2, 3}) == pytest.approx(1.5)
    assert elastic.joined_after(events(elastic, *LOSS[:-1]), 10.0, {1, 2, 3}) is None
    assert elastic.handover_of(events(elastic, *LOSS), 10.0) == pytest.approx(0.4)


def test_steps_that_are_done_again_are_counted(elastic: Any) -> None:
    assert elastic.recovery_of(events(elastic, *LOSS), 10.0, {1, 2, 3}) == pytest.approx(
        {"pause": 0.8, "redone": 1}
    )
    assert elastic.recovery_of(events(elastic, *LOSS[:4]), 10.0, {1, 2, 3}) == {}
