"""A worker finds its place from variables, and says which one is wrong."""

from __future__ import annotations

import pytest

from lockstep.environment import find_world, usable_cores
from lockstep.errors import ConfigError
from lockstep.topology import World

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}


def test_alone_without_variables() -> None:
    assert find_world({}) == World()


def test_torchruns_variables() -> None:
    assert find_world(TORCHRUN) == World(5, 8, 1, 4, 1, 2, "torchrun")


def test_our_launcher_is_distinguished_from_others() -> None:
    assert find_world({**TORCHRUN, "LOCKSTEP_LAUNCHED": "1"}).source == "lockstep"


def test_rank_and_size_are_enough() -> None:
    assert find_world({"RANK": "1", "WORLD_SIZE": "2"}) == World(1, 2, 1, 2, 0, 1, "torchrun")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE"),
        ({"RANK": "first"}, "'first'"),
        ({"RANK": "8"}, "RANK: expected 0 to 7, as WORLD_SIZE gives 8, got 8"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK: expected 0 to 3, as LOCAL_WORLD_SIZE gives 4, got -1"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: expected at least 1, got 0"),
        (
            {"LOCAL_WORLD_SIZE": "9"},
            "LOCAL_WORLD_SIZE: expected at most WORLD_SIZE, which is 8, got 9",
        ),
        ({"GROUP_RANK": "2"}, "GROUP_RANK: expected 0 to 1, as GROUP_WORLD_SIZE gives 2, got 2"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, str | None], named: str) -> None:
    variables = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match="environment") as caught:
        find_world(variables)
    assert named in str(caught.value)


def test_there_is_a_core() -> None:
    assert usable_cores() >= 1
