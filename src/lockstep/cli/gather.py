"""Puts a run's options together from flags, a file, and the run that goes on."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from .. import environment
from ..training.options import TrainOptions, parse_text
from .config_file import read_config
from .run_folders import choose_folder, find_checkpoint

__all__ = ["as_flag", "as_typed", "resolve"]


def resolve(arguments: argparse.Namespace) -> TrainOptions:
    """Defaults, under the options of the run that goes on, under the config file, under the flags.

    `out` becomes the folder to write to, and `resume` the checkpoint, or the run, to go on from. `arguments.sources`
    says of each option from a file which one that is.

    Raises:
        ConfigError: for what cannot be used.
    """
    flags = _flags(arguments)
    files = [(path, read_config(path)) for path in _config(arguments)]
    arguments.sources = _sources(files, flags)
    asked, run = _merged(files, flags), None
    if asked.get("resume") is not None:
        checkpoint, run = find_checkpoint(asked["resume"], asked.get("out"))
        files = [*_recorded(run), *files]
        arguments.sources = _sources(files, flags)
        asked = {**_merged(files, flags), "resume": str(checkpoint)}
    options = TrainOptions(**asked)
    options.check()
    options.out = str(choose_folder(options.out, run, f"{options.model}-{options.data}"))
    return options


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {option.name: option for option in fields(TrainOptions) if hasattr(arguments, option.name)}
    values = {name: getattr(arguments, name) for name in given}
    return {name: parse_text(given[name], v) if isinstance(v, str) else v for name, v in values.items()}


def _config(arguments: argparse.Namespace) -> list[Path]:
    return [Path(arguments.config).expanduser()] if hasattr(arguments, "config") else []


def _recorded(run: Path | None) -> list[tuple[Path, dict[str, Any]]]:
    """The options that an earlier run has written down."""
    if run is None or not (run / "config.yaml").exists():
        return []
    values = read_config(run / "config.yaml")
    if environment.is_launched():
        values.pop("workers", None)  # it is the launcher that says how many there are now
    return [(run / "config.yaml", values)]


def _merged(files: list[tuple[Path, dict[str, Any]]], flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for values in (*(values for _, values in files), flags) for name, value in values.items()}


def _sources(files: list[tuple[Path, dict[str, Any]]], flags: dict[str, Any]) -> dict[str, str]:
    return {name: f"{path}: {name}" for path, values in files for name in values if name not in flags}


def as_flag(argument: str) -> str:
    """An option as it is typed: global_batch → --global-batch; other text stays as it is."""
    known = {option.name for option in fields(TrainOptions)} | {"config"}
    return "--" + argument.replace("_", "-") if argument in known else argument


def as_typed(argument: str, arguments: argparse.Namespace) -> str:
    """An option as its user has given it: as a flag, or as a key of a file."""
    sources: dict[str, str] = getattr(arguments, "sources", {})
    return sources.get(argument, as_flag(argument))
