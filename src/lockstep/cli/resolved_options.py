"""Resolves a training run's options from flags, a file and the resumed run, and finds its
checkpoint and directory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from .. import arguments, environment
from ..errors import ConfigError
from ..option_table import options_of, values_of
from ..training.options import CONFIGS, TrainOptions, check_names


def read_config(path: Path) -> dict[str, Any]:
    """Read the options in a file: TOML or JSON if its name ends in ``.toml`` or ``.json``, else
    YAML.

    Raises:
        ConfigError: the file cannot be read or is invalid, or PyYAML is not installed; the message
            names the file and the option.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            "config", "a YAML, TOML or JSON file that can be read", found=f"{path} ({reason})"
        ) from None
    parse: dict[str, Callable[[str], Any]] = {".toml": _toml, ".json": json.loads}
    if path.suffix not in parse:
        arguments.require_package("PyYAML", str(path), "yaml", module="yaml")
    try:
        content = parse.get(path.suffix, _yaml)(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        expected = f"{path} to be YAML, or TOML or JSON with the ending .toml or .json"
        raise ConfigError("config", expected, found=reason) from None
    if not isinstance(content, dict):
        got = "an empty file" if content is None else type(content).__name__
        raise ConfigError(
            "config", f"{path} to hold options by name, such as `epochs: 20`", found=got
        )
    check_names(content, str(path))
    return content


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _toml(text: str) -> Any:
    # tomllib is part of Python since 3.11; with 3.10, tomli is installed.
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return toml.loads(text)


RUNS = Path("runs")
REPORTS = Path("reports")  # of failed programs that have no run directory


def find_checkpoint(resume: str, run_dir: str | None) -> tuple[Path, Path | None]:
    """Return the checkpoint to resume from, and the directory of its run if there is one.

    If `resume` is a run, the first is the run's directory: training then resumes from the newest
    undamaged checkpoint in it, which it finds by reading them.

    Args:
        resume: a run directory, a checkpoint, or "latest" for the latest run in ``runs/``.
        run_dir: the run directory to write to, if given.

    Raises:
        ConfigError: it does not exist, or the run has continued from there and `run_dir` is None or
            that run.
    """
    try:
        path = _latest_run() if resume == "latest" else Path(resume).expanduser()
        if not path.is_dir():
            raise ConfigError(
                "resume",
                "a checkpoint, a run directory, or latest",
                found=f"{resume} (there is no such folder)",
            )
        if (path / "checkpoints").is_dir() or _config_of(path) is not None:
            _check_any(path)
            return path, path
        run = path.parent.parent if path.parent.name == "checkpoints" else None
        if run is not None and (run_dir is None or _same(run, Path(run_dir).expanduser())):
            from ..training.run.run_directory import check_newest

            check_newest(path, "To resume from an earlier one, add --run-dir DIR: a new folder.")
        return path, run
    except OSError as error:
        raise ConfigError(
            "resume", "a folder that can be read", found=f"{resume} ({error.strerror})"
        ) from None


def _config_of(run: Path) -> Path | None:
    """Return the file in which a run has recorded its options; None if there is none."""
    return next((run / name for name in CONFIGS if (run / name).exists()), None)


def _latest_run() -> Path:
    runs = [path.parent.parent for path in RUNS.glob("*/checkpoints/step-*")]
    if not runs:
        raise ConfigError(
            "resume",
            "an earlier run with a checkpoint in runs/",
            found="a folder without one",
            hint="Name it: --resume DIR.",
        )
    return max(
        set(runs),
        key=lambda run: max(path.stat().st_mtime for path in (run / "checkpoints").iterdir()),
    )


def _check_any(run: Path) -> None:
    from ..checkpoint.folder import CheckpointStore

    if CheckpointStore(run / "checkpoints").latest() is None:
        hint = "Start it again without --resume, and with another --run-dir."
        raise ConfigError(
            "resume",
            f"a checkpoint in {run / 'checkpoints'}",
            found="an empty folder or none",
            hint=hint,
        )


def choose_folder(run_dir: str | None, run: Path | None, name: str) -> Path:
    """Return the run directory to write to: `run_dir`, or that of the resumed `run`, or a new one
    in ``runs/``.

    Args:
        run_dir: the value of --run-dir, if given.
        run: the directory of the resumed run, if any.
        name: part of the name of a new directory.

    Raises:
        ConfigError: `run_dir` contains another run, or cannot be read.
    """
    if run_dir is None:
        return run or new_folder(RUNS, name)
    folder = Path(run_dir).expanduser()
    if run is None or not _same(run, folder):
        from ..training.run.run_directory import check_unused

        check_unused(
            folder, f"Resume it with --resume {shlex.quote(run_dir)}, or choose another folder."
        )
    return folder


def _same(left: Path, right: Path) -> bool:
    return left.resolve() == right.resolve()


def new_folder(parent: Path, name: str) -> Path:
    """Return a new path in `parent` from time, name, and a random suffix for runs started in the
    same second.
    """
    safe_name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)[
        :100
    ]
    return parent / f"{datetime.now():%Y%m%d-%H%M%S}-{safe_name}-{secrets.token_hex(2)}"


def resolve(parsed: argparse.Namespace) -> TrainOptions:
    """Return the options by precedence: flags, then the config file, then those of the resumed run,
    then defaults.

    `run_dir` becomes the run directory to write to, and `resume` the checkpoint, or the run, to
    resume from. `parsed.sources` names the file of each option that comes from one.

    Raises:
        ConfigError: an option is invalid.
    """
    flags = {
        entry.name: getattr(parsed, entry.name)
        for entry in options_of(TrainOptions)
        if hasattr(parsed, entry.name)
    }
    path = Path(parsed.config).expanduser() if hasattr(parsed, "config") else None
    values: dict[str, Any] = (
        {} if path is None else _named(read_config(path), str(path), parsed, flags)
    )
    values |= flags
    run = None
    if values.get("resume") is not None:
        asked = values_of(
            TrainOptions, {name: values[name] for name in ("resume", "run_dir") if name in values}
        )
        checkpoint, run = find_checkpoint(asked["resume"], asked.get("run_dir"))
        values = {**_recorded(run, parsed, values), **values, "resume": str(checkpoint)}
    chosen = TrainOptions.parse(values)
    chosen.run_dir = str(choose_folder(chosen.run_dir, run, chosen.title))
    return chosen


def _named(
    content: dict[str, Any], source: str, parsed: argparse.Namespace, above: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options in a file by name, and note in `parsed.sources` the key of each that none
    `above` replaces.
    """
    named = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        named[name] = value
        if name not in above:
            parsed.sources = {**parsed.sources, name: f"{source}: {key}"}
    return named


def _recorded(
    run: Path | None, parsed: argparse.Namespace, above: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options that the resumed run has recorded."""
    path = None if run is None else _config_of(run)
    if path is None:
        return {}
    recorded = _named(read_config(path), str(path), parsed, above)
    if environment.is_launched():
        recorded.pop("workers", None)  # the launcher determines their number
    return recorded


def as_typed(argument: str, parsed: argparse.Namespace) -> str:
    """Return the name of an option as the user gave it: as a flag, or as a key of a file."""
    sources: dict[str, str] = getattr(parsed, "sources", {})
    return sources.get(argument, argument)
