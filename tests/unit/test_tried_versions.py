"""A torch that Lockstep has not been tried with is named in one line; pyproject.toml asks for the
oldest that has.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lockstep.tried_versions import NEWEST_TORCH, OLDEST_TORCH, about_untried_torch, release_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "version", ["2.10.0", "2.10.1+cu128", "2.13.0+cpu", "2.15.0", "2.15.2a0+git1234567"]
)
def test_nothing_is_said_on_one_that_was_tried(version: str) -> None:
    assert about_untried_torch(version) is None


@pytest.mark.parametrize(
    ("version", "release"), [("2.16.0", "2.16"), ("3.0.0+cpu", "3.0"), ("2.9.1", "2.9")]
)
def test_any_other_is_named_with_those_that_were_tried(version: str, release: str) -> None:
    text = about_untried_torch(version)
    assert text is not None
    assert re.fullmatch(
        rf"torch {release} has not been tried with Lockstep \d+\.\d+ \(2\.10 to 2\.15 have\): "
        r"if something fails, install torch 2\.15, or a newer Lockstep",
        text,
    )


def test_the_oldest_is_the_one_that_pyproject_asks_for() -> None:
    assert f'"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"' in (ROOT / "pyproject.toml").read_text()


def _tried() -> set[tuple[str, str]]:
    """Return the pairs of Python and torch in the documentation."""
    text = (ROOT / "docs" / "first-ten-minutes.md").read_text()
    return set(re.findall(r"^\| (3\.\d+) \| (\d+\.\d+\.\d+) \|", text, re.MULTILINE))


def test_the_documents_name_the_oldest_and_the_newest() -> None:
    tried = [release_of(torch) for _, torch in _tried()]
    assert min(tried) == OLDEST_TORCH
    assert max(tried) == NEWEST_TORCH


def test_the_public_checks_run_these_pairs_and_the_targets_of_our_own() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    pairs = jobs["test"]["strategy"]["matrix"]["include"]
    assert {(pair["python"], pair["torch"]) for pair in pairs} == _tried()
    targets = re.findall(r"^check make (\w+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert sorted(jobs["check"]["strategy"]["matrix"]["target"]) == sorted(targets)
