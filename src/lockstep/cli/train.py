"""``lockstep train``: from options to a trained model in a run folder."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from .. import environment
from ..errors import ConfigError
from ..registry import import_path_here
from ..training.options import GROUPS, TrainOptions, from_mapping, parse_text

__all__ = ["add_to", "as_flag"]

_EXAMPLES = """
examples:
  lockstep train                                         handwritten digits, as many workers as suit the machine
  lockstep train --data fashion-mnist --workers 2        the same answer as with one worker, sooner
  lockstep train --model resnet18 --data cifar10 --precision bf16 --channels-last
  lockstep train --model mynet:Net --data mydata:load    your own: Net() is a module, load() gives (train, test)
  lockstep train --global-batch 1024 --base-batch 256 --warmup-epochs 2
                                                         a larger batch, with the learning rate scaled to it
  lockstep train --resume latest                         go on where a stopped run left off

exit codes: 0 done, 2 bad input, 130 or 143 stopped by Ctrl-C or SIGTERM (after saving), 1 anything else
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="train a model, on as many workers as you like",
        description="Train a model. What one step is does not depend on the number of workers; how fast it is does.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for option in fields(TrainOptions):
        _add_option(groups[option.metadata["group"]], option)
    run = groups[GROUPS[3]]
    run.add_argument("--resume", metavar="PATH|latest", help="go on from a checkpoint, a run folder, or the latest run")
    files = groups[GROUPS[4]]
    files.add_argument("--config", metavar="FILE", help="YAML or TOML with the same options; flags win")
    files.add_argument("--debug", action="store_true", default=False, help="show the traceback of an error")
    parser.set_defaults(run=run_command, known=[flag for action in parser._actions for flag in action.option_strings])


def _add_option(group: Any, option: Any) -> None:
    flag, text = as_flag(option.name), option.metadata["help"]
    if isinstance(option.default, bool):
        group.add_argument(flag, action="store_true", help=text)
        return
    choices = option.metadata["choices"]
    if option.default is not None:
        text = f"{text} (default: {option.default})".strip()
    group.add_argument(flag, metavar=option.metadata["metavar"] or "|".join(choices), help=text)


def as_flag(argument: str) -> str:
    """An option as it is typed: global_batch → --global-batch; other text stays as it is."""
    known = {option.name for option in fields(TrainOptions)} | {"resume", "config"}
    return "--" + argument.replace("_", "-") if argument in known else argument


def run_command(arguments: argparse.Namespace) -> int:
    """Do what the parsed `arguments` ask for."""
    import_path_here()
    resume, folder = _find_run(getattr(arguments, "resume", None), getattr(arguments, "out", None))
    options = resolve(arguments, folder)
    options.check()
    workers = choose_workers(options)
    out = str(folder or _new_folder(options))
    here = workers == 1 or environment.is_launched()
    result = (_run_here if here else _run_launched)(options, out, resume)
    if environment.find_world().is_first:
        _show(options, out, result)
    return 0


def resolve(arguments: argparse.Namespace, run_folder: Path | None = None) -> TrainOptions:
    """Defaults, under the options of the run that is resumed, under the config file, under the flags.

    Raises:
        ConfigError: for what cannot be used.
    """
    values: dict[str, Any] = {}
    if run_folder is not None and (run_folder / "config.yaml").exists():
        values |= _read_file(run_folder / "config.yaml")
    if getattr(arguments, "config", None) is not None:
        values |= _read_file(Path(arguments.config))
    for option in fields(TrainOptions):
        if hasattr(arguments, option.name):
            given = getattr(arguments, option.name)
            values[option.name] = parse_text(option, given) if isinstance(given, str) else given
    return TrainOptions(**values)


def _read_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", "a YAML or TOML file that can be read", f"{path} ({error})") from None
    try:
        content = _toml(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("config", f"{path} to be YAML, or TOML with the ending .toml", reason) from None
    if not isinstance(content, dict):
        raise ConfigError("config", f"{path} to hold options by name", type(content).__name__)
    return from_mapping(content, str(path))


def _toml(text: str) -> dict[str, Any]:
    # Part of Python since 3.11; before, its twin is installed.
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    content: dict[str, Any] = toml.loads(text)
    return content


def _find_run(resume: str | None, out: str | None) -> tuple[str | None, Path | None]:
    """(the checkpoint to go on from, the run folder that it belongs to), each None where it is not given."""
    if resume is None:
        return None, None if out is None else _unused(Path(out))
    if resume == "latest":
        folder = Path(out) if out is not None else _latest_run()
        return _newest_checkpoint(folder), folder
    path = Path(resume)
    if (path / "checkpoints").is_dir():
        return _newest_checkpoint(path), path
    if not path.is_dir():
        raise ConfigError("resume", "a checkpoint, a run folder, or latest", f"{resume} (there is no such folder)")
    belongs_to = path.parent.parent if path.parent.name == "checkpoints" else None
    return str(path), Path(out) if out is not None else belongs_to


def _unused(out: Path) -> Path:
    if any((out / name).exists() for name in ("config.yaml", "result.json", "checkpoints")):
        hint = "Go on with --resume latest, or choose another folder."
        raise ConfigError("out", "a folder without an earlier run", str(out), hint)
    return out


def _latest_run() -> Path:
    runs = [path.parent.parent for path in Path("runs").glob("*/checkpoints/step-*")]
    if not runs:
        raise ConfigError(
            "resume", "an earlier run with a checkpoint in runs/", "a folder without one", "Name it with --out."
        )
    return max(set(runs), key=lambda run: max(path.stat().st_mtime for path in (run / "checkpoints").iterdir()))


def _newest_checkpoint(folder: Path) -> str:
    from ..checkpoint import CheckpointStore

    newest = CheckpointStore(folder / "checkpoints").latest() if (folder / "checkpoints").is_dir() else None
    if newest is None:
        raise ConfigError(
            "resume", f"a checkpoint in {folder / 'checkpoints'}", "no such thing", "Start without --resume."
        )
    return str(newest)


def _new_folder(options: TrainOptions) -> Path:
    """A folder in runs/ that does not exist: by time, model and data."""
    names = [text.replace(":", "-").replace("/", "-") for text in (options.model, options.data)]
    base = f"{datetime.now():%Y%m%d-%H%M%S}-{'-'.join(names)}"
    candidates = [base, *(f"{base}-{number}" for number in range(2, 100))]
    return next(Path("runs") / name for name in candidates if not (Path("runs") / name).exists())


def choose_workers(options: TrainOptions) -> int:
    """The number of workers: as given, or as many as suit the machine and the global batch.

    Raises:
        ConfigError: when a launcher has started another number.
    """
    launched = environment.find_world().world_size if environment.is_launched() else None
    if options.workers != "auto":
        if launched is not None and int(options.workers) != launched:
            raise ConfigError("workers", f"auto or {launched}, as the launcher started", options.workers)
        return int(options.workers)
    if launched is not None:
        return launched
    import torch

    if options.device in ("auto", "cuda") and torch.cuda.is_available():
        available = torch.cuda.device_count()
    elif options.device == "mps" or (options.device == "auto" and torch.backends.mps.is_available()):
        available = 1
    else:
        # Fewer than some 32 samples keep a core busy for less time than it takes to exchange the gradients.
        available = min(environment.usable_cores(), max(1, options.global_batch // 32))
    return max(1, min(available, options.global_batch))


def _run_here(options: TrainOptions, out: str, resume: str | None) -> dict[str, Any]:
    from ..training.job import run

    return run(options, out, resume)


def _run_launched(options: TrainOptions, out: str, resume: str | None) -> dict[str, Any]:
    from ..launchers import launch

    result: dict[str, Any] = launch(_run_here, options, out, resume, workers=choose_workers(options))
    return result


def _show(options: TrainOptions, out: str, result: dict[str, Any]) -> None:
    """The summary: what came out, and where the files are."""
    if options.quiet:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    if result["test_accuracy"] is not None:
        table.add_row("test accuracy", f"[bold]{result['test_accuracy']:.2%}[/] after {result['epochs']} epochs")
    noun = "worker" if result["workers"] == 1 else "workers"
    table.add_row("speed", f"{result['samples_per_second']:,.0f} samples/s with {result['workers']} {noun}")
    table.add_row("model", str(Path(out) / "model.safetensors"))
    table.add_row("curve", str(Path(out) / "curve.png"))
    table.add_row("all files", out)
    console = Console(highlight=False)
    console.print()
    console.print(table, soft_wrap=True)
