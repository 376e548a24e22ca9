"""What `make release-check` would find later: files that a wheel would lack, links that lead
nowhere on an index.
"""

from __future__ import annotations

import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

import lockstep

tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def build_script() -> ModuleType:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("build_script", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_of_the_package_that_is_no_program_is_named_for_the_wheel() -> None:
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, each in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in each
    ]
    left_out = {".py", ".pyc", ".c", ".h", ".so"}
    files = [
        path
        for path in (ROOT / "src/lockstep").rglob("*")
        if path.is_file() and path.suffix not in left_out
    ]
    names = [path.relative_to(ROOT / "src").as_posix() for path in files]
    assert len(names) >= 3
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", lockstep.__version__)


def test_links_of_the_readme_lead_to_files_at_the_tag_of_the_version(
    build_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = PROJECT["project"]["urls"]["Repository"]
    monkeypatch.chdir(ROOT)
    shown = build_script.readme_for_index(repository, "1.2.3")
    targets = re.findall(
        r"\]\(([^)#]*)", re.sub(r"^```.*?^```", "", shown, flags=re.DOTALL | re.MULTILINE)
    )
    ours = [target for target in targets if target.startswith(repository)]
    assert len(ours) >= 10 and any("/raw/v1.2.3/docs/figures/" in target for target in ours)
    assert [target for target in targets if not target.startswith("https://")] == []
    paths = [
        re.sub(rf"{re.escape(repository)}/(blob|raw)/v1\.2\.3/", "", target) for target in ours
    ]
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_code_in_the_readme_is_shown_as_it_is(
    build_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "```python\nitems[0](argument)\n```\n"
    (tmp_path / "README.md").write_text(f"![a](b.png) [c](d.md#e) [f](#g) [h](https://i)\n{code}")
    monkeypatch.chdir(tmp_path)
    assert build_script.readme_for_index("https://r", "1") == (
        f"![a](https://r/raw/v1/b.png) [c](https://r/blob/v1/d.md#e) [f](#g) [h](https://i)\n{code}"
    )
