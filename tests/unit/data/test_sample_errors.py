"""An exception of a data set is one line that names the sample and the line of the program."""

from __future__ import annotations

import json
from typing import Any

import pytest

import lockstep
from lockstep.errors import ConfigError, DataError


class Damaged:
    """Twenty samples, of which number 7 raises an exception."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[float, int]:
        if index == 7:
            raise self._error
        return float(index), index


def read(dataset: Any, **options: Any) -> None:
    with lockstep.Loader(dataset, 4, shuffle=False, **options) as loader:
        for _ in loader:
            pass


@pytest.mark.parametrize("virtual_workers", [None, 2])
@pytest.mark.parametrize(("processes", "where"), [(0, ""), (2, r" \(in loader process [01]\)")])
def test_it_names_the_sample_and_the_line(
    processes: int, where: str, virtual_workers: int | None
) -> None:
    message = (
        r"^sample 7 of Damaged: ValueError: a bad image, at test_sample_errors.py:\d+ in __getitem__"
        + where
        + "$"
    )
    with pytest.raises(DataError, match=message) as info:
        read(
            Damaged(ValueError("a bad\n image")),
            num_workers=processes,
            virtual_workers=virtual_workers,
        )
    assert info.value.__cause__ is None


class Lines:
    """Samples that are decoded by the standard library, whose frames are not the program's."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return json.loads("{bad")


def first_line(samples: Any) -> Any:
    return json.loads("{bad")


@pytest.mark.parametrize(("processes", "where"), [(0, ""), (1, r" \(in loader process 0\)")])
def test_the_line_is_the_programs_own(processes: int, where: str) -> None:
    named = r"JSONDecodeError: Expecting property name [^,]*, at test_sample_errors\.py:\d+ in "
    with pytest.raises(DataError, match=rf"^sample 0 of Lines: {named}__getitem__{where}$"):
        read(Lines(), num_workers=processes)
    with pytest.raises(
        DataError, match=rf"^a batch of samples 0, 1, 2, 3 of list: {named}first_line{where}$"
    ):
        read([1.0] * 4, num_workers=processes, collate_fn=first_line)


def test_an_error_of_lockstep_leaves_a_loader_process_in_one_line() -> None:
    with pytest.raises(
        DataError, match=r"^root: expected a folder, got 'x' \(in loader process [01]\)$"
    ):
        read(Damaged(ConfigError("root", "a folder", "x")), num_workers=2)


def test_with_debugging_the_exception_is_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_DEBUG", "1")
    with pytest.raises(DataError) as info:
        read(Damaged(KeyError("x")))
    assert isinstance(info.value.__cause__, KeyError)


def test_an_error_of_lockstep_is_left_as_it_is() -> None:
    with pytest.raises(ConfigError, match="root: expected a folder"):
        read(Damaged(ConfigError("root", "a folder", "x")))
