"""``lockstep doctor``: what it prints, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep import doctor
from lockstep.cli import main
from lockstep.doctor import Problem, Section
from lockstep.hosts import Host

LONG = "a text of more than a line, " * 4 + "with a-long-word/that/is/left/whole"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be examined; the command then finds what is in `FOUND`."""
    arguments: list[Any] = []

    def examine(*given: Any) -> Iterator[Section]:
        arguments.extend(given)
        yield from FOUND

    monkeypatch.setattr(doctor, "examine", examine)
    monkeypatch.setenv("COLUMNS", "60")
    return arguments


FOUND: list[Section] = []


@pytest.fixture(autouse=True)
def found() -> Iterator[list[Section]]:
    FOUND[:] = [Section("host")]
    FOUND[0].add("cores", "2")
    FOUND[0].add("memory", LONG, good=True)
    yield FOUND
    FOUND.clear()


def test_nothing_to_fix(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["host", "  cores         2"]
    assert lines[-1] == "Nothing to fix."
    assert max(map(len, lines)) <= 60
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)
    assert " ".join(" ".join(lines[2:-2]).split()) == f"✓ memory {LONG}"


def test_what_to_fix(
    asked: list[Any], found: list[Section], capsys: pytest.CaptureFixture[str]
) -> None:
    found[0].add("files", "256", Problem("few files", "Have more."))
    found.append(Section("hosts", problems=[Problem(LONG, LONG)]))
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "✗ files         256\n" in told
    assert "\nWhat to fix\n 1. few files\n  → Have more.\n 2. a text of more" in told


def test_a_section_without_facts_has_no_title(
    asked: list[Any], found: list[Section], capsys: pytest.CaptureFixture[str]
) -> None:
    found.append(Section("cluster"))
    assert main(["doctor"]) == 0
    assert "cluster" not in capsys.readouterr().out


def test_json(asked: list[Any], found: list[Section], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sections"]["host"]["cores"] == {
        "text": "2",
        "good": None,
    }
    found[0].add("files", "256", Problem("few files", "Have more."))
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == [
        {"what": "few files", "fix": "Have more."}
    ]


def test_options_arrive(asked: list[Any], tmp_path: Any) -> None:
    key, hosts = tmp_path / "key", tmp_path / "hosts"
    key.write_text("")
    hosts.write_text("b slots=2\n")
    assert (
        main(
            [
                "doctor",
                "-H",
                "a:4",
                "--ssh-port",
                "2222",
                "--identity",
                str(key),
                "--time-limit",
                "5",
            ]
        )
        == 0
    )
    assert main(["doctor", "--hostfile", str(hosts)]) == 0
    first, limit, second, usual_limit = asked
    assert (first.hosts, first.ssh_port, first.identity, limit) == (
        (Host("a", 4),),
        2222,
        str(key),
        5,
    )
    assert (second.hosts, second.ssh_port, second.identity, usual_limit) == (
        (Host("b", 2),),
        None,
        None,
        60,
    )


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            ["-H", "a:0"],
            "lockstep doctor: error: -H: expected a number of slots, at least 1, got '0'\n",
        ),
        (["-H", "a", "--hostfile", "f"], "--hostfile: expected either -H or --hostfile, got both"),
        (
            ["--hostfile", "missing"],
            "hostfile: expected a text file that can be read, got missing: No such file",
        ),
        (
            ["--ssh-port", "70000"],
            "--ssh-port: expected a whole number from 1 to 65535, got '70000'",
        ),
        (["--time-limit", "0"], "--time-limit: expected a whole number from 1 to 3600, got '0'"),
        (["--identity", "missing"], "--identity: expected an existing key file, got 'missing'"),
        (["--hots", "a"], "--hots"),
    ],
)
def test_bad_input(
    asked: list[Any], typed: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *typed]) == 2
    assert told in capsys.readouterr().err
    assert asked == []


def test_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    """The real thing: two ranks sum over every backend that is here."""
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert list(report["sections"]) == [
        "host",
        "devices",
        "versions",
        "network",
        "job",
        "cluster",
        "backends",
    ]
    assert "4 MiB in" in report["sections"]["backends"]["shm"]["text"]
    assert "4 MiB in" in report["sections"]["backends"]["gloo"]["text"]
    assert not [problem for problem in report["problems"] if "cannot sum" in problem["what"]]
