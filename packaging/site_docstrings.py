"""An extension of griffe, which reads the docstrings for the pages of the site: what stands there
for a reader of the source only is written out for one who has the site alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

PAGES = Path(__file__).resolve().parent.parent / "docs/api"
_SHOWN = re.compile(r"^::: (lockstep[\w.]*)(?:\n    options:\n      members: \[([^\]]*)\])?", re.M)
_CODE = re.compile(r"(?<!`)`(lockstep(?:\.\w+)+|[A-Za-z_]\w+)`(?!`)")


# griffe is installed with the extra "docs" only; without it mypy does not know this class
class ForReaders(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Options that are passed on are listed one by one; names that have a place on the site become
    links; what only words an error is left out.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change what was read of the package."""
        if pkg.name != "lockstep":
            return
        _list_options(pkg["training.trainer.Trainer"], pkg["training.step.train_step.TrainStep"])
        _leave_out_hooks(pkg["training.callbacks"])
        names = shown_names()
        for found in _objects(pkg):
            if isinstance(found, griffe.Function):
                _list_arguments_of_start(found)
                _leave_out_unknown(found)
                _show_values(found)
            if found.docstring is not None:
                found.docstring.value = _linked(found.docstring.value, names)


def shown_names() -> set[str]:
    """The names that the pages of the API show."""
    names = set()
    for page in PAGES.glob("*.md"):
        for name, members in _SHOWN.findall(page.read_text()):
            names |= {
                name,
                *(f"{name}.{member.strip()}" for member in members.split(",") if member),
            }
    return names


def _objects(parent: Any) -> Iterator[Any]:
    for member in list(parent.members.values()):
        if member.is_alias:
            continue
        yield member
        if member.is_module or member.is_class:
            yield from _objects(member)


def _leave_out_hooks(callbacks: griffe.Module) -> None:
    """Leave out the hooks of callbacks, which the training calls; `Callback` describes them."""
    hooks = set(callbacks["base.Callback"].members)
    for found in _objects(callbacks):
        if found.is_class and "Callback" in map(str, found.bases):
            for name in hooks & set(found.members) - {"__init__"}:
                del found.members[name]


def _list_options(trainer: Any, step: Any) -> None:
    """Show what a `Trainer` passes on to its `TrainStep` among its own arguments."""
    constructor = trainer.members["__init__"]
    passed_on = constructor.parameters["step"]
    options = list(trainer.package["training.step.step_arguments.StepOptions"].members)
    del constructor.parameters[passed_on.name]
    for name in options:
        constructor.parameters.add(step.members["__init__"].parameters[name])
    described = _arguments(step.docstring.value)
    text = trainer.docstring.value
    listed = "".join(described[name] for name in options)
    trainer.docstring.value = text.replace(_arguments(text)["step"], listed)


def _arguments(docstring: str) -> dict[str, str]:
    """Name → what stands in a docstring for an argument, the lines as they are."""
    section = "".join(re.findall(r"^Args:\n((?: {4}.*\n)+)", f"{docstring}\n", re.M))
    entries = re.finditer(r"^ {4}(\w+): .*\n(?: {8}.*\n)*", section, re.M)
    return {entry[1]: entry[0] for entry in entries}


def _list_arguments_of_start(function: Any) -> None:
    """Give a method that starts another one, such as `ibroadcast`, the arguments of that one."""
    text = "" if function.docstring is None else function.docstring.value
    started = re.match(r"Start `(\w+)`", text)
    if started and started[1] in function.parent.members and "Args:" not in text:
        described = _arguments(function.parent.members[started[1]].docstring.value)
        if described:
            function.docstring.value = f"{text}\n\nArgs:\n{''.join(described.values())}"


def _leave_out_unknown(function: griffe.Function) -> None:
    """Leave out ``**unknown: Never``, which only words the error for an unknown argument."""
    for parameter in list(function.parameters):
        if str(parameter.annotation) == "Never":
            del function.parameters[parameter.name]


def _show_values(function: griffe.Function) -> None:
    """Show the value of a default that is a constant of a module."""
    for parameter in function.parameters:
        default = str(parameter.default)
        if default.isupper() and default in function.module.members:
            constant = function.module[default]  # perhaps imported from another module
            parameter.default = str(constant.value)


def _linked(text: str, names: set[str]) -> str:
    """`text`, in which the names that the site shows lead to their places; code stays as it is."""

    def link(match: re.Match[str]) -> str:
        for path in (match[1], f"lockstep.{match[1]}"):
            if path in names:
                return f"[`{match[1]}`][{path}]"
        return match[0]

    lines = text.split("\n")
    return "\n".join(
        line if line.lstrip().startswith((">>>", "...")) else _CODE.sub(link, line)
        for line in lines
    )
