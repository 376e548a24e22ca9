"""The programs of the recipes give the same numbers on one worker and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from support.documented_code import ROOT, is_program, read_blocks
from support.pool import Pool

PAGES = sorted((ROOT / "docs/recipes").glob("*.md"))


def programs_of(page: Path) -> list[str]:
    blocks = read_blocks(page.name, page.read_text())
    return [
        block.text
        for block in blocks
        if block.language == "python" and is_program(block.text) and not block.not_run
    ]


PROGRAMS = {
    f"{page.stem} {number}": text
    for page in PAGES
    for number, text in enumerate(programs_of(page), 1)
}
# Rounding differs between numbers of workers, and training amplifies it.
NEAR = 1e-4

# In a recipe: what stands there, and a mistake in its place, of which the page shows the error.
MISTAKES = (
    ("contrastive", "lockstep.whole_batch(first), lockstep.whole_batch(second)", "first, second"),
    ("f1-auc", "lockstep.whole_set(f1)", "f1"),
    (
        "segmentation",
        ".sigmoid().flatten(1), mask.flatten(1)",
        ".sigmoid().view(1, -1), mask.view(1, -1)",
    ),
)


def results(program: str) -> dict[str, float]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "<recipe>", "exec"), names)
    found: dict[str, float] = names["results"]
    return found


def refusal(program: str) -> str:
    """What Lockstep says to a program on one worker."""
    with pytest.raises(ConfigError) as raised:
        results(program)
    return str(raised.value)


def test_each_recipe_has_a_trainer_and_a_loop_of_ones_own() -> None:
    recipes = {page.stem for page in PAGES} - {"index"}
    assert recipes >= {"contrastive", "ema", "evaluation", "f1-auc", "segmentation"}
    for recipe in recipes:
        assert "lockstep.Trainer(" in PROGRAMS[f"{recipe} 1"]
        assert "lockstep.prepare(" in PROGRAMS[f"{recipe} 2"]
        assert f"({recipe}.md)" in (ROOT / "docs/recipes/index.md").read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_results_are_those_of_one_worker(
    pool: Pool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (alone,) = pool.run(results, PROGRAMS[name], workers=1)
    together = pool.run(results, PROGRAMS[name], workers=2)
    assert alone and together == [pytest.approx(alone, rel=NEAR)] * 2


def test_a_loop_resumes_on_another_number_of_workers(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = PROGRAMS["checkpoints 2"]
    found = []
    for folder, interrupted in (("whole", program), ("resumed", program.replace("EPOCHS)", "1)"))):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        pool.run(results, interrupted, workers=1)
        found.append(pool.run(results, program, workers=2)[0])
    whole, resumed = found
    assert interrupted != program and resumed == pytest.approx(whole, rel=NEAR)


def test_what_the_recipes_warn_of_is_refused(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for recipe, right, wrong in MISTAKES:
        page = ROOT / f"docs/recipes/{recipe}.md"
        program = next(text for text in programs_of(page) if right in text)
        (said,) = pool.run(refusal, program.replace(right, wrong), workers=1)
        (shown,) = [
            block.text
            for block in read_blocks(page.name, page.read_text())
            if block.language == "text" and "expected" in block.text
        ]
        parts = [part.strip() for part in " ".join(shown.split()).split("…")]
        assert all(part in said for part in parts), said
