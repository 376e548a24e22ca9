"""What the page about the tutorials points to is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "seeds.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| Section"))
]


def named_tests(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_section_has_an_example_and_a_test() -> None:
    assert len(ROWS) > 40
    for section, example, test in ROWS:
        assert re.search(r"\[\w+\]\(|lockstep|every example", example), section
        assert re.fullmatch(r"`tests/[\w/]+\.py(::\w+)?`", test), section


def test_every_test_is_there() -> None:
    for section, _, test in ROWS:
        file, _, name = test.strip("`").partition("::")
        assert (ROOT / file).is_file(), (section, file)
        assert not name or name in named_tests(ROOT / file), (section, name)


def test_every_example_is_there_and_every_one_is_named() -> None:
    named = {
        name for _, example, _ in ROWS for name in re.findall(r"\.\./examples/(\w+)\.py", example)
    }
    there = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert named <= there
    of_no_tutorial = {"gan", "gpt", "quickstart", "notebook", "tracking"}
    of_no_tutorial |= {"finetune_transformers", "images_folder", "lora", "stream_parquet"}
    assert there - named <= of_no_tutorial
