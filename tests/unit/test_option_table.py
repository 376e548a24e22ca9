"""What an entry of a table of options makes of itself: flags, help, a value, and words for other
launchers.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import pytest

from lockstep.cli.horovodrun import HorovodOptions
from lockstep.cli.parser import Parser
from lockstep.errors import ConfigError
from lockstep.launcher.elastic_jobs.elastic_node import JobSpec
from lockstep.launcher.options import WORKERS, JobOptions
from lockstep.launcher.remote_hosts.remote_command import host_command, remote_environment
from lockstep.option_table import integer, names, option, options_of, switch, text, values_of
from lockstep.submit import SubmitOptions
from lockstep.training.options import TrainOptions


@dataclass(frozen=True)
class WithExample(JobOptions):
    """The options of `lockstep run` and one more, which workers read in their environment."""

    example: int | None = option(
        None, "--example", "-e", group=WORKERS, metavar="N", parse=integer(0, 9), to_hosts=True,
        variable="LOCKSTEP_EXAMPLE", help="what this test is about",
    )  # fmt: skip


def parser_of(*entries: Any) -> Parser:
    parser = Parser(prog="lockstep run", argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_options(entries)
    parser.set_command(lambda parsed: 0)
    return parser


def parsed_with_example(*words: str) -> WithExample:
    given = vars(parser_of(*options_of(WithExample)).parse_args(words))
    return WithExample.parse({**given, "program": ("train.py",)})


def test_one_entry_reaches_the_workers_of_all_hosts() -> None:
    job = parsed_with_example("-H", "10.9.9.1:2,10.9.9.2:2", "--elastic", "2:4", "-e", "3")
    assert job.example == 3
    assert "--example 3 " in host_command(job, job.hosts[1], 1, 2)[-1]
    assert remote_environment(job, {})["LOCKSTEP_EXAMPLE"] == "3"
    spec = JobSpec.of(job)
    assert WithExample.parse({**spec.options, "program": spec.program}).variables() == {
        "LOCKSTEP_EXAMPLE": "3"
    }
    assert parsed_with_example().variables() == {}


def test_help_has_the_phrase_and_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = parser_of(*options_of(WithExample)).format_help()
    assert "--example N, -e N" in shown and "what this test is about\n" in shown
    assert (
        "at most N times (default: 0)" in shown
        and "others are killed after 1 s (default: 120)" in shown
    )
    assert "--as-host" not in shown


@pytest.mark.parametrize("table", [JobOptions, HorovodOptions, SubmitOptions, TrainOptions])
def test_a_default_is_told_once(table: type) -> None:
    """The help adds the default of the table; only what the table cannot say stands in the
    phrase.
    """
    twice = [
        entry.name
        for entry in options_of(table)
        if entry.default is not None and "(default:" in entry.help
    ]
    assert twice == []


def test_an_error_names_the_flag_that_was_typed() -> None:
    parser = parser_of(*options_of(WithExample))
    for words, name, flag in (
        (["-e", "3"], "example", "-e"),
        (["--num-proc", "2"], "workers", "--num-proc"),
        ([], "workers", "-np"),
        (["-x", "A", "--env", "B"], "env", "--env"),
    ):
        assert parser.parse_args(words).sources[name] == flag
    with pytest.raises(ConfigError, match="example: expected a whole number from 0 to 9, got '10'"):
        parsed_with_example("--example", "10")


# --- Entries
# --------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """One option of each form."""

    number_of_things: int = option(3, metavar="N", parse=integer(1), help="things")
    fast: bool = option(False, "--fast", "-f", opposites=("--slow",), help="be fast")
    parts: tuple[str, ...] = option(
        (), "--part", metavar="NAME", parse=names, write=",".join, repeats=True
    )
    place: str | None = option(None, metavar="PLACE", help="where")


BY_NAME = {entry.name: entry for entry in options_of(Table)}


def test_words_of_a_command_line() -> None:
    assert BY_NAME["number_of_things"].words(3) == []
    assert BY_NAME["number_of_things"].words(4) == ["--number-of-things", "4"]
    assert BY_NAME["number_of_things"].words("4") == ["--number-of-things", "4"]
    assert BY_NAME["fast"].words(True) == ["--fast"]
    assert BY_NAME["fast"].words(False) == []
    assert BY_NAME["parts"].words(("a", "b")) == ["--part", "a,b"]


def test_what_is_typed_becomes_values() -> None:
    typed = ["--part", "a,b", "--part=c", "--slow", "--fast", "--place", "here"]
    given = vars(parser_of(*options_of(Table)).parse_args(typed))
    assert values_of(Table, given) == {"parts": ("a,b", "c"), "fast": True, "place": "here"}
    assert vars(parser_of(*options_of(Table)).parse_args(["-f", "--slow"]))["fast"] is False


def test_null_is_an_option_that_is_not_given() -> None:
    assert values_of(Table, {"place": None}) == {"place": None}
    with pytest.raises(
        ConfigError, match="number_of_things: expected a whole number of at least 1, got None"
    ):
        values_of(Table, {"number_of_things": None})


def test_texts_and_switches() -> None:
    assert text("place", "here") == "here"
    assert text("place", 3) == "3"
    for wrong in ("", " ", "a\0b", True, None, 1.5, ["a"]):
        with pytest.raises(ConfigError, match=r"^place: expected a text"):
            text("place", wrong)
    assert switch("fast", False) is False
    for wrong in ("true", 1, None):
        with pytest.raises(ConfigError, match=r"^fast: expected true or false"):
            switch("fast", wrong)
