"""Pages of the site that are made of files outside docs/: examples, a notebook, benchmarks,
CONTRIBUTING.md and CHANGELOG.md.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

# What stands outside docs/ → the page that it becomes.
_TEXTS = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
_NOTEBOOK = "examples/notebook.ipynb"
_SHOWN = re.compile(r"^::: lockstep\.(\w+)$", re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    programs = [*_programs("examples"), *_programs("benchmarks")]
    pages = {_page_of(path): _as_page(path) for path in programs}
    pages |= {page: (ROOT / text).read_text() for text, page in _TEXTS.items()}
    pages["notebook.md"] = "\n\n".join(_cells_of(_NOTEBOOK))
    pages["examples.md"] = _list_of(_programs("examples"))
    for page, text in pages.items():
        files.append(
            File.generated(config, page, content=_with_links(text, _source_of(page), page))
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside docs/ lead to the pages that these have become; list the public
    names.
    """
    own = page.file.src_uri
    if own.startswith("api/"):
        page.meta["search"] = {"boost": 0.5}  # guides come before the reference
    if own == "api/index.md":
        markdown += "".join(_rows_of_names())
    return markdown if page.file.generated_by else _with_links(markdown, f"docs/{own}", own)


def _programs(folder: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*.py"))


def _page_of(program: str) -> str:
    return f"programs/{Path(program).stem}.md"


def _source_of(page: str) -> str:
    return next((text for text, made in _TEXTS.items() if made == page), page)


def _as_page(program: str) -> str:
    text = (ROOT / program).read_text()
    first = (ast.get_docstring(ast.parse(text)) or program).splitlines()[0]
    return f"---\nsearch:\n  exclude: true\n---\n# `{program}`\n\n{first}\n\n```python\n{text}```\n"


def _cells_of(notebook: str) -> Iterator[str]:
    """The cells of a notebook, each with what it has shown."""
    title, *cells = json.loads((ROOT / notebook).read_text())["cells"]
    yield "".join(title["source"])
    yield f"This is the notebook `{notebook}` with its results; open it in Jupyter to run it."
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                yield f"```text\n{''.join(output['text'])}```"
            else:
                yield f"<div>{''.join(output['data']['text/html'])}</div>"


def _rows_of_names() -> Iterator[str]:
    """A row of the table for each public name: what its docstring begins with, and its page."""
    pages = {
        name: page.name
        for page in (ROOT / "docs/api").glob("*.md")
        for name in _SHOWN.findall(page.read_text())
    }
    package = griffe.load("lockstep", search_paths=[ROOT / "src"])
    for name in public_names():
        shown = package[name].docstring
        first = shown.value.split("\n\n")[0].replace("\n", " ") if shown else ""
        home = pages[name]
        yield f"| [`{name}`]({home}#lockstep.{name}) | {first} | [{Path(home).stem}]({home}) |\n"


def public_names() -> list[str]:
    """What `lockstep.__all__` lists."""
    tree = ast.parse((ROOT / "src/lockstep/__init__.py").read_text())
    found = [
        each.value
        for each in tree.body
        if isinstance(each, ast.Assign) and ast.unparse(each).startswith("__all__ =")
    ]
    return list(ast.literal_eval(found[0]))


def _list_of(programs: list[str]) -> str:
    lines = ["# Examples", "", "Each is one program; `python examples/NAME.py` runs it.", ""]
    for program in programs:
        doc = ast.get_docstring(ast.parse((ROOT / program).read_text())) or ""
        lines.append(f"- [`{Path(program).name}`]({_page_of(program)}): {doc.splitlines()[0]}")
    return "\n".join(lines) + "\n"


def _with_links(text: str, source: str, page: str) -> str:
    """`text` of the file `source` as the page `page`: its links are relative to the one, and become
    so to the other.
    """

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        at = _place_of(target)
        if at is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(at, posixpath.dirname(page) or '.')}{match[3]}"

    return text if source == page else _LINK.sub(moved, text)


def _place_of(target: str) -> str | None:
    if target in _TEXTS:
        return _TEXTS[target]
    if target == "README.md":
        return "index.md"
    if target == _NOTEBOOK:
        return "notebook.md"
    if re.fullmatch(r"(examples|benchmarks)/\w+\.py", target):
        return _page_of(target)
    return target.removeprefix("docs/") if target.startswith("docs/") else None
