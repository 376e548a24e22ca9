"""What `make gpu-check` does around its parts: limits, failures, reports and the page. The parts
need a GPU.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks" / "gpu")
    monkeypatch.delitem(sys.modules, "check", raising=False)
    return importlib.import_module("check")


@pytest.fixture
def setting(check: Any, tmp_path: Path) -> Any:
    return check.Setting("cpu", True, tmp_path, time.monotonic() + 60)


def test_a_part_that_hangs_is_ended_with_all_that_it_has_started(
    check: Any, setting: Any, tmp_path: Path
) -> None:
    late = tmp_path / "late"
    script = f"""
import os, time
if os.fork() == 0:
    time.sleep(2)
    open({str(late)!r}, "w")
print("begun", flush=True)
time.sleep(60)
"""
    began = time.monotonic()
    setting.until = began + 1
    ended = check.run_process([sys.executable, "-c", script], 1.0, setting)
    assert ended.code is None
    assert ended.state.startswith("ended at its limit of") and "begun" in ended.output
    time.sleep(max(0.0, 3 - (time.monotonic() - began)))
    assert not late.exists()


def test_failed_tests_are_named(check: Any, tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.test_ranks" name="test_a"/>'
        '<testcase classname="tests.gpu.test_ranks" name="test_b[x]">'
        '<failure message="AssertionError: 1&#10;more"/></testcase>'
        '<testcase classname="tests.gpu.test_ranks" name="test_c"><skipped message="no"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert check.read_tests(report) == {
        "tests": {"passed": 1, "failed": 1, "skipped": 1},
        "failed": {"test_ranks::test_b[x]": ["AssertionError: 1"]},
    }
    assert check.read_tests(tmp_path / "nowhere.xml") == {}


def test_a_failure_stands_on_the_page_and_the_rest_goes_on(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(part: Any, setting: Any) -> dict[str, Any]:
        raise OSError("no space")

    def measures(part: Any, setting: Any) -> dict[str, Any]:
        return {"state": "passed", "found": {"LeNet": {"best of ours over best by hand": 1.5}}}

    monkeypatch.setattr(
        check, "PARTS", [check.Part("tests", 5, fails), check.Part("epochs", 5, measures)]
    )
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu", "--output", str(tmp_path)])
    assert check.main() == 1
    kept = json.loads((tmp_path / "gpu.json").read_text())["the CPU"]
    assert kept["parts"]["tests"]["state"] == "failed: OSError: no space"
    assert kept["host"]["device"] == "the CPU"
    page = (tmp_path / "gpu.md").read_text()
    assert "| tests | failed: OSError: no space | 0 |" in page
    assert "| LeNet: at most 1.02 of the best loop by hand | 1.5 | NOT MET |" in page
    assert "| GPT: as many tokens per second as nanoGPT's loop | not measured | |" in page
    assert "best of ours over best by hand: 1.5" in capsys.readouterr().out


def test_what_is_missing_is_named_before_anything_runs(
    check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu"])
    monkeypatch.setitem(check.NEEDED, "no_such_module", "no-such-package")
    assert check.main() == 2
    assert capsys.readouterr().out == (
        "error: missing: no-such-package. Install them: python -m pip install no-such-package\n"
    )


def test_what_the_tests_need_is_among_what_is_looked_for(check: Any) -> None:
    """Else they fail where it is missing, and the time on the host is lost."""
    tests = check.ROOT / "tests"
    left = [tests / "conftest.py", *sorted((tests / "gpu").glob("*.py"))]
    seen = set()
    imported: dict[str, Path] = {}
    while left:
        path = left.pop()
        seen.add(path)
        for statement in ast.parse(path.read_text()).body:
            for module in modules_of(statement):
                own = tests.joinpath(*module.split(".")).with_suffix(".py")
                if own.exists() and own not in seen:
                    left.append(own)
                imported[module.partition(".")[0]] = path
    others = imported.keys() - sys.stdlib_module_names - {"support", "lockstep"}
    assert {"pytest", "torch"} <= others <= check.NEEDED.keys()


def modules_of(statement: ast.stmt) -> list[str]:
    """The modules that a statement imports, and those that its names may be."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        package = ".".join(["support"] * statement.level + [statement.module or ""]).strip(".")
        return [package, *(f"{package}.{alias.name}" for alias in statement.names)]
    return []


def test_a_measurement_runs_on_the_cpu_with_small_sizes(check: Any, setting: Any) -> None:
    part = next(part for part in check.PARTS if part.name == "language_model")
    found = check.measurement(part, setting)
    assert found["state"] == "passed", found
    sides = {"Lockstep", "Lockstep, nanoGPT's model", "nanoGPT"}
    assert set(found["found"]["tokens per second"]) == sides


def test_the_page_has_a_place_in_the_documentation(check: Any) -> None:
    text = (check.ROOT / "docs" / "gpus.md").read_text()
    assert text.count("<!-- gpu:begin -->") == text.count("<!-- gpu:end -->") == 1


def test_the_parts_fit_into_nine_minutes(check: Any) -> None:
    assert check.WHOLE < 540
    assert {aim.names[0] for aim in check.AIMS} <= {part.name for part in check.PARTS}
