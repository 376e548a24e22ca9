"""What the launchers, the watchdog and their commands can show to a user, in golden files that a
change must accept.

`texts` finds the texts in the source, whatever file they stand in, and `compare` holds them against
a golden file. To accept a change, run the test that fails with UPDATE_GOLDEN=1 in its environment,
and read the change of the file.

A text is one of these, without the docstrings, annotations and messages of `assert`:

- prose: a constant or an f-string of two or more words, wherever it stands;
- any text, also of one word, in the arguments of an error that is raised, of a call that writes to
  the user (`_SAYS`), and in arguments whose name says that a user reads them (`_READ`).

No text is what only the program reads (`_INTERNAL`): names of threads, patterns, keys, the other
side of a comparison. Each value in an f-string is shown as {}. Texts of several lines count as one
text a line.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import lockstep

__all__ = ["GOLDEN", "PACKAGE", "TEXTS", "compare", "read_by_users", "texts"]

PACKAGE = Path(lockstep.__file__).parent
GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TEXTS = GOLDEN / "texts.txt"

_SOURCES = (
    *("launcher", "elastic", "job", "watchdog", "flight_recorder", "ray"),
    *("system/heartbeat.py", "system/strangers.py"),
    *(
        f"cli/{name}.py"
        for name in ("run", "train", "horovodrun", "join", "resize", "top", "submit")
    ),
)
"""Packages and files whose texts are pinned; those that do not exist, or not yet, have none."""

_SAYS = (
    "print",
    "say",
    "tell",
    "log",
    "write_message",
    "warn",
    "warning",
    "error",
    "HostRefused",
    "Finding",
    "Difference",
)
"""Functions, also with a `_` before their name, and classes whose arguments a user reads."""

_READ = (
    "expected",
    "found",
    "hint",
    "help",
    "description",
    "title",
    "epilog",
    "usage",
    "note",
    "reason",
)
"""Names of arguments that a user reads."""

_INTERNAL = (
    *("compile", "fullmatch", "match", "search", "sub", "finditer", "findall"),  # patterns
    *("startswith", "endswith", "removeprefix", "removesuffix", "split", "partition", "rpartition"),
    *(
        "Thread",
        "ThreadPoolExecutor",
        "getLogger",
        "digest",
        "send",
        "set",
        "load",
        "namedtuple",
        "TypeVar",
    ),
)
"""Functions and classes whose texts only the program reads."""

_WORD = re.compile(r"[A-Za-z]{2,}|\{\}")


# --- Texts in the source
# ----------------------------------------------------------------------------------------------


def read_by_users(files: Iterable[Path] = ()) -> set[str]:
    """Return all texts of `files`, by default of those whose texts are pinned."""
    found = set[str]()
    for path in files or _files():
        found |= texts(path.read_text())
    return found


def _files() -> Iterator[Path]:
    for name in _SOURCES:
        path = PACKAGE / name
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path] * path.exists()


def texts(source: str) -> set[str]:
    """Return all texts of a module that a user can read."""
    finder = _Finder()
    finder.visit(ast.parse(source))
    return {line for text in finder.found for line in _lines(text)}


def _lines(text: str) -> Iterator[str]:
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).split("\n"):
        shown = " ".join(line.split())
        if re.search("[A-Za-z]", shown.replace("{}", "")):
            yield "".join(each if each.isprintable() else repr(each)[1:-1] for each in shown)


class _Finder(ast.NodeVisitor):
    """Collects the texts of a module in `found`."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._is_shown = False  # whether any text is for a user at this place, also one of one word

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """An argument's annotation may be a text."""

    def visit_Compare(self, node: ast.Compare) -> None:
        for side in (node.left, *node.comparators):
            if _text(side) is None:
                self._visit_as(side, shown=False)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        if _text(node.slice) is None:
            self._visit_as(node.slice, shown=False)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        self._visit_as(node.func, shown=False)
        if name in _INTERNAL:
            for value in (*node.args, *(word.value for word in node.keywords)):
                if _text(value) is None:
                    self._visit_as(value, shown=False)
            return
        is_error = name.endswith(("Error", "SystemExit"))
        says = is_error or name.lstrip("_") in _SAYS
        for value in node.args:
            self._visit_as(value, shown=says)
        for word in node.keywords:
            self._visit_as(word.value, shown=word.arg in _READ or is_error)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._take(_text(node) or "")
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self._visit_as(
                    part.value, shown=self._is_shown and isinstance(part.value, ast.IfExp)
                )

    def visit_Constant(self, node: ast.Constant) -> None:
        self._take(_text(node) or "")

    def _visit_as(self, node: ast.AST, shown: bool) -> None:
        before = self._is_shown
        self._is_shown = shown
        self.visit(node)
        self._is_shown = before

    def _take(self, text: str) -> None:
        words = text.split()
        is_prose = len(words) > 1 and sum(_WORD.search(word) is not None for word in words) > 1
        if is_prose or self._is_shown:
            self.found.append(text)


def _text(node: ast.AST) -> str | None:
    """Return the text of a constant or an f-string, with {} for each value; None for anything
    else.
    """
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(part) or "{}" if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Constant) and isinstance(node.value, bytes):
        return node.value.decode(errors="replace")
    return None


def _name(function: ast.expr) -> str:
    """Return the last name of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


# --- Golden files
# --------------------------------------------------------------------------------------------------


def compare(path: Path, lines: Sequence[str]) -> None:
    """Fail the test if the golden file `path` has other lines; with UPDATE_GOLDEN=1 it is written
    instead.
    """
    before = path.read_text().splitlines() if path.exists() else []
    if before == list(lines):
        return
    name = path.relative_to(GOLDEN.parents[2])
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
        pytest.skip(f"{name} is written anew")
    changed = list(difflib.unified_diff(before, lines, n=0, lineterm=""))[2:]
    shown = "\n".join(line for line in changed if not line.startswith("@@"))
    pytest.fail(
        f"Users read something else than {name} says (-: before, +: now):\n{shown}\nIf that is "
        "meant, and better: run this test with UPDATE_GOLDEN=1, and commit the file with the "
        "change.",
        pytrace=False,
    )
