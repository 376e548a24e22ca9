"""The table of environment variables names all that the code and the documents name."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import environment
from lockstep.environment.launchers import LAUNCHERS
from lockstep.environment.variable_table import OF_OTHERS, OF_WORKERS, SETTINGS
from lockstep.errors import ConfigError

ROOT = Path(__file__).parents[3]
OWN = {variable.name for variable in (*SETTINGS, *OF_WORKERS)}
OTHERS = {name for rows in (*OF_OTHERS, *LAUNCHERS) for name in rows.names}
PREFIX = re.compile(r"[A-Z]+_")

# constants that begin like a variable of others and are none
NO_VARIABLES = {"LOCAL_RANK", "LOCAL_SIZE"}  # what follows HOROVOD_ in `cli.horovodrun`


def texts_of(path: Path) -> Iterator[str]:
    """The string constants of a module, docstrings and parts of f-strings among them, but without
    `__all__`.
    """
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def own_names(text: str) -> set[str]:
    """The variables of Lockstep in a text; without beginnings of names, such as LOCKSTEP_STALL_…"""
    return set(re.findall(r"\bLOCKSTEP_[A-Z_]*[A-Z]\b", text))


@pytest.mark.parametrize("folder", ["src", "docs", "examples", "packaging"])
def test_every_variable_of_lockstep_is_in_the_table(folder: str) -> None:
    texts = [text for path in ROOT.glob(f"{folder}/**/*.py") for text in texts_of(path)]
    texts += [path.read_text() for path in ROOT.glob(f"{folder}/**/*.md")]
    assert texts
    assert {name for text in texts for name in own_names(text)} - OWN - OTHERS == set()


def test_every_variable_of_others_is_in_the_table() -> None:
    prefixes = {match[0] for name in OTHERS if (match := PREFIX.match(name))}
    named = {
        text
        for path in ROOT.glob("src/**/*.py")
        for text in texts_of(path)
        if re.fullmatch(r"[A-Z]+(_[A-Z0-9]+)+", text) and text.startswith(tuple(prefixes))
    }
    assert {"MASTER_ADDR", "SLURM_JOB_ID"} <= named
    assert named - OTHERS - OWN - NO_VARIABLES == set()


def test_the_page_is_that_of_the_table() -> None:
    path = ROOT / "packaging/variables_page.py"
    spec = importlib.util.spec_from_file_location("variables_page", path)
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.PAGE.read_text() == maker.render(), "run `make public-names`"


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("LOCKSTEP_STALL_TIMEOUT", "soon", environment.stall_timeout),
        ("LOCKSTEP_STALL_WARNING", "0", environment.stall_warning),
        ("LOCKSTEP_DEBUG_RANK", "first", environment.debug_rank),
        ("LOCKSTEP_DEBUG_RANK", "-1", environment.debug_rank),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, read: object
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"^{name}: expected .*, got '?{text}"):
        read()  # type: ignore[operator]
