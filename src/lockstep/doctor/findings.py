"""The results of checks: facts, and problems to fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a section.

    Attributes:
        name: what it is about.
        text: what was found.
        good: whether that is as it should be; None if neither.
    """

    name: str
    text: str
    good: bool | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to fix.

    Attributes:
        what: what is wrong.
        fix: what to do about it, a full sentence.
    """

    what: str
    fix: str


@dataclass(slots=True)
class Section:
    """Facts that belong together."""

    title: str
    facts: list[Fact] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(
        self, name: str, text: str, problem: Problem | None = None, good: bool | None = None
    ) -> None:
        """Add a fact; one with a problem is marked as bad."""
        self.facts.append(Fact(name, text, False if problem is not None else good))
        if problem is not None:
            self.problems.append(problem)


def as_json(sections: list[Section]) -> dict[str, Any]:
    """Return the results as JSON values: sections by title, facts by name, and all problems."""
    facts: dict[str, Any] = {
        section.title: {fact.name: {"text": fact.text, "good": fact.good} for fact in section.facts}
        for section in sections
    }
    problems = [
        {"what": problem.what, "fix": problem.fix}
        for section in sections
        for problem in section.problems
    ]
    return {"sections": facts, "problems": problems}
