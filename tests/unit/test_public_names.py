"""The public names, their signatures and the options of commands are those of docs/api/names.md."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/api/names.md"
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py")]
IMPORT = re.compile(r"^\s*from (lockstep[\w.]*) import ([\w, ]+)", re.MULTILINE)
INTERNAL = {("lockstep.compat.horovod.as_horovod", "FOLDER")}  # a path for PYTHONPATH, in a command


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "public_names", ROOT / "packaging/public_names.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_names_are_those_of_the_page(maker: ModuleType) -> None:
    now, then = maker.render().splitlines(), PAGE.read_text().splitlines()
    changed = [
        *(f"- {line}" for line in then if line not in now),
        *(f"+ {line}" for line in now if line not in then),
    ]
    assert now == then, (
        "public names, signatures or options have changed. If that is meant, run `make "
        "public-names`, and write a line for each change into CHANGELOG.md:\n" + "\n".join(changed)
    )


def test_what_the_documents_import_is_public(maker: ModuleType) -> None:
    shown = {
        (module, name.strip().split(" as ")[0])
        for page in DOCUMENTS
        for module, names in IMPORT.findall(page.read_text())
        for name in names.split(",")
    }
    public = {
        (module, name)
        for module in maker.MODULES
        for name in importlib.import_module(module).__all__
    }
    public |= {(module, name) for module, names in maker.NAMES.items() for name in names}
    modules = {
        tuple(module.rsplit(".", 1)) for module in (*maker.MODULES, *maker.NAMES) if "." in module
    }
    assert len(shown) > 10
    assert sorted(shown - public - modules - INTERNAL) == []


def test_experimental_is_what_its_docstring_says(maker: ModuleType) -> None:
    marked = [line for line in PAGE.read_text().splitlines() if line.endswith("[experimental]")]
    assert any(line.startswith("pipeline(") for line in marked)
    assert "lockstep plan  [experimental]" in marked
    assert not any(line.startswith(("prepare(", "class Trainer(")) for line in marked)


class Sample:
    """A class.

    Experimental: may change in any release.
    """

    def method(self, size: int, fn: object = len) -> str:
        """A method."""
        return str((self, size, fn))


def test_a_changed_signature_changes_the_page(maker: ModuleType) -> None:
    Sample.__module__ = "lockstep.sample"  # only what Lockstep itself defines is shown
    assert list(maker._lines("Sample", Sample)) == [
        "class Sample  [experimental]",
        "  Sample.method(self, size: int, fn: object = len) -> str  [experimental]",
    ]
