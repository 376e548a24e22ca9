"""What the documents show is what there is."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

import lockstep
from support.sources import syntax_trees

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_example_is_the_program_that_can_be_run(page: str) -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    program = (ROOT / "examples/quickstart.py").read_text()
    assert shown is not None
    assert program.endswith(shown[1])
    assert len(shown[1].splitlines()) <= 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [
        link for link in links if not link.startswith("http") and not (page.parent / link).exists()
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("english", "chinese"), [("README.md", "README.zh.md"), ("docs/index.md", "docs/zh/index.md")]
)
def test_both_languages_show_the_same_commands_and_figures(english: str, chinese: str) -> None:
    first, second = ((ROOT / name).read_text() for name in (english, chinese))
    assert _code(first) == _code(second)
    assert _figures(first) == _figures(second)
    assert len(_links(first) - _links(second)) <= 1  # to the other language


def _code(text: str) -> list[str]:
    return re.findall(r"^ *```\w*\n.*?```$", text, re.DOTALL | re.MULTILINE)


def _figures(text: str) -> list[list[str]]:
    """The numbers in each row of the tables."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [re.findall(r"\d+(?:\.\d+)?", " ".join(row.split("|")[2:])) for row in rows]


def _links(text: str) -> set[str]:
    return {re.sub(r"^(\.\./)+", "", link) for link in re.findall(r"\]\(([^)#]+)", text)}


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    shown = set(re.findall(r"^::: lockstep\.(\w+)$", pages, re.MULTILINE))
    assert sorted(set(lockstep.__all__) - shown) == []


def test_the_readme_is_short_and_says_first_what_it_is_about() -> None:
    text = (ROOT / "README.md").read_text()
    beside_words = r"^```.*?```$|^\|[^\n]*$|<!--.*?-->|!\[.*?\]\(.*?\)|\]\(.*?\)"
    words = re.sub(beside_words, "", text, flags=re.DOTALL | re.MULTILINE).split()
    assert 300 <= len(words) <= 500
    first = " ".join(text.splitlines()[:10])
    assert (
        "trains a PyTorch model on any number of workers" in first
        and "It is for people who" in first
    )


def test_the_figures_of_the_readmes_are_those_of_the_benchmarks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    readme = importlib.import_module("readme")
    english, chinese = (
        (ROOT / language.file).read_text() for language in (readme.ENGLISH, readme.CHINESE)
    )
    assert readme.table(readme.ENGLISH) in english and readme.table(readme.CHINESE) in chinese
    measured = [
        row["over_one_pass"]["8"]["median"]
        for row in readme.read("invariance")["rows"]
        if row["over_one_pass"]
    ]
    most = round(100 * (max(measured) - 1))
    assert f"took up to {most} % longer" in english and f"最多增加 {most} %" in chinese
    resumed = readme.read("trainers")["resumed"]
    left_out = {resumed[side][1]["left out"] for side in ("accelerate", "lightning")}
    assert (
        left_out == {80}
        and "left out 80 of 360 samples" in english
        and "360 个样本中的 80 个" in chinese
    )
    pauses = [
        f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
        for seconds in readme.recoveries().values()
    ]
    assert all(each in english and each.removesuffix("s") in chinese for each in pauses)


def test_the_readmes_name_the_gpus_that_were_seen() -> None:
    for device in json.loads((ROOT / "benchmarks/results/gpu.json").read_text()):
        assert device in (ROOT / "docs/gpus.md").read_text()
        name = device.split()[1]  # such as H100, without its maker and its memory
        assert all(name in (ROOT / readme).read_text() for readme in ("README.md", "README.zh.md"))


def test_the_architecture_names_files_that_are_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| [A-Z].*\? \|(.*)\|$", page, re.MULTILINE)
    files = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(rows) >= 25
    assert [name for name in files if not (ROOT / "src/lockstep" / name).exists()] == []


SYMPTOMS_OF_OTHERS = (
    "lockstep: command not found",
    "stack expects each tensor to be equal size",
    "runs/a-2",
    "No module named 'horovod'",
)


def test_symptoms_are_messages_of_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    tables = re.findall(r"^\| Symptom .*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    shown = [
        code
        for table in tables
        for row in table.splitlines()
        for code in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]
    ours = [code for code in shown if code not in SYMPTOMS_OF_OTHERS]
    assert len(ours) >= 25
    texts = _texts_of_the_code()
    assert [part for code in ours for part in _fixed_parts(code) if part not in texts] == []


def _fixed_parts(message: str) -> list[str]:
    """What a message always has: without its values, and without what all of a kind have."""
    parts = re.split(r"…|\d+$|: expected |\bFileNotFoundError\b", message)
    return [part.strip(" :") for part in parts if len(part.strip(" :")) > 2]


def _texts_of_the_code() -> str:
    trees = syntax_trees(ROOT / "src/lockstep").values()
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(node.value for node in nodes if isinstance(node.value, str))


def test_the_changed_lines_shown_are_those_of_the_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    ports = importlib.import_module("changed_lines")
    page = (ROOT / "docs/coming-from/accelerate.md").read_text()
    shown = re.findall(r"^\| (.*?) \| (\d+) \| (\d+) \| [\d.]+ \| [\d.]+ \|$", page, re.MULTILINE)
    assert shown == [(port.name, *map(str, ports.changes(port.file))) for port in ports.ALL]
    prepare = next(lines for name, lines, _ in shown if "prepare" in name)
    assert (
        f"[{prepare} changed lines](coming-from/accelerate.md"
        in (ROOT / "docs/tasks.md").read_text()
    )
