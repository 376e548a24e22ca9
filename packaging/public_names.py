"""Writes docs/api/names.md: the public names with their signatures, and the commands with their
options.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_origin

import lockstep
from lockstep.cli.main import _parser
from lockstep.training.step.step_arguments import StepOptions

PAGE = Path(__file__).resolve().parent.parent / "docs/api/names.md"

# Modules all of whose names in `__all__` are public, and names of others that the documentation
# shows.
MODULES = (
    "lockstep",
    "lockstep.callbacks",
    "lockstep.testing",
    "lockstep.data",
    "lockstep.models",
    "lockstep.elastic",
    "lockstep.invariance",
    "lockstep.replicas",
    "lockstep.ray",
    "lockstep.emulation",
    "lockstep.compat.horovod",
    "lockstep.compat.horovod.torch",
    "lockstep.compat.horovod.torch.elastic",
    *(
        "lockstep.compat.gluon",
        *(f"lockstep.compat.gluon.{name}" for name in ("autograd", "init", "loss", "nd", "nn")),
    ),
    "lockstep.compat.gluon.utils",
)
NAMES = {
    "lockstep.communicator": ("Op", "Request", "wait_all"),
    "lockstep.communicator.adasum": ("adasum_", "adasum_hook"),
    "lockstep.compilation": ("compile_or_fallback",),
    "lockstep.flight_recorder": ("open_job",),
    "lockstep.pipelining": ("Pipeline",),
    "lockstep.network": ("PRESETS", "parse_link"),
    "lockstep.parallel.sharded": ("Sharded",),
    "lockstep.timeline": ("write_trace",),
    "lockstep.training.elastic_steps": ("Steps",),
    "lockstep.training.prepared.prepare": ("PreparedLoader",),
    "lockstep.transports": ("ShmOptions",),
}

_HEAD = """# All names and signatures

What is on this page is public. It changes only with a line in the [changelog](../../CHANGELOG.md); a name or an
argument is removed, or gets another meaning, only in a release whose second number is higher (0.2 → 0.3). What is
marked **[experimental]** may change in any release: its docstring, or its line in `--help`, says so too. So may what
there is for several GPUs, on which [nothing has run yet](../gpus.md). Names that are not here are internal, also those without an
underscore. The names in `compat` follow the libraries that they stand for.

This page is made by `make public-names`, and a test compares it with the code.
"""

_MARK = "  [experimental]"


def render() -> str:
    """Return the page."""
    sections = [
        _section(module, tuple(importlib.import_module(module).__all__)) for module in MODULES
    ]
    sections += [_section(module, names) for module, names in NAMES.items()]
    commands = "\n".join(_command(name, parser) for name, parser in _commands().items())
    return "\n".join([_HEAD, *sections, f"## Commands\n\n```text\n{commands}\n```\n"])


def _section(module: str, names: tuple[str, ...]) -> str:
    found = importlib.import_module(module)
    mark = _MARK if _is_experimental(found) else ""
    lines = "\n".join(line + mark for name in names for line in _lines(name, getattr(found, name)))
    return f"## {module}\n\n```text\n{lines}\n```\n"


def _lines(name: str, value: Any) -> Iterator[str]:
    """The lines of a name: of a class also its public methods and properties, except those of a
    base on this page.
    """
    mark = _MARK if _is_experimental(value) else ""
    if inspect.ismodule(value):
        yield f"{name}: module{mark}"
    elif get_origin(value) is not None:
        yield f"{name} = {value}{mark}"
    elif inspect.isclass(value):
        yield f"class {name}{_signature_of_class(value)}{mark}"
        bases = [
            each
            for each in value.__mro__
            if _is_ours(each) and (each is value or not _is_public(each))
        ]
        for member in sorted({each for base in bases for each in vars(base)}):
            if not member.startswith("_"):
                yield from _member(name, member, inspect.getattr_static(value, member), mark)
    elif inspect.isroutine(value):
        yield f"{name}{_signature(value)}{mark}"
    else:
        yield f"{name}: {type(value).__name__}{mark}"


def _member(owner: str, name: str, found: Any, mark: str) -> Iterator[str]:
    if isinstance(found, property):
        returns = inspect.signature(found.fget).return_annotation if found.fget else "Any"
        yield f"  {owner}.{name}: {returns}{mark}"
        return
    function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    if inspect.isfunction(function):
        yield f"  {owner}.{name}{_signature(function)}{mark}"


def _is_ours(base: type) -> bool:
    return base.__module__.split(".")[0] == "lockstep"


def _is_public(base: type) -> bool:
    return base.__name__ in lockstep.__all__


def _is_experimental(value: Any) -> bool:
    return "\nExperimental: " in (inspect.getdoc(value) or "")


def _signature_of_class(value: type) -> str:
    """The arguments of a class; "" where another library defines them."""
    own = any(
        _is_ours(base) and ("__init__" in vars(base) or "__new__" in vars(base))
        for base in value.__mro__
    )
    return _signature(value).removesuffix(" -> None") if own else ""


class _AsText:
    """A value in a signature: functions and classes have their names, and other objects no
    address.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    shown = [
        each.replace(annotation=_annotation(each.annotation), default=_default(each.default))
        for each in _with_options(signature.parameters.values())
        if each.annotation != "Never"  # it collects names that are unknown, for the error
    ]
    return str(
        signature.replace(
            parameters=shown, return_annotation=_annotation(signature.return_annotation)
        )
    )


def _with_options(parameters: Iterable[inspect.Parameter]) -> Iterator[inspect.Parameter]:
    """Parameters, with what a `Trainer` passes on to its `TrainStep` one by one."""
    for each in parameters:
        if each.annotation == "Unpack[StepOptions]":
            options = inspect.signature(lockstep.TrainStep).parameters
            yield from (options[name] for name in StepOptions.__annotations__)
        else:
            yield each


def _annotation(found: Any) -> Any:
    # Those that are not postponed are shown in as many ways as there are versions of Python and
    # torch.
    return _AsText(found) if isinstance(found, str) else inspect.Signature.empty


def _default(found: Any) -> Any:
    if found is inspect.Parameter.empty:
        return found
    return _AsText(
        getattr(
            found, "__qualname__", type(found).__name__ if " at 0x" in repr(found) else repr(found)
        )
    )


def _commands() -> dict[str, argparse.ArgumentParser]:
    (commands,) = [
        each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction)
    ]
    return dict(commands.choices)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    lines = [f"lockstep {name}{_MARK if 'Experimental: ' in (parser.description or '') else ''}"]
    for action in parser._actions:
        mark = _MARK if "experimental" in (action.help or "") else ""
        value = f" {action.metavar}" if isinstance(action.metavar, str) else ""
        lines.append(f"  {', '.join(action.option_strings) or action.dest}{value}{mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render())
