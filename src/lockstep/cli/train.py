"""``lockstep train``: from options to a trained model in a run folder."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from .. import environment
from ..errors import ConfigError, LockstepError
from ..registry import import_path_here
from ..training.options import GROUPS, TrainOptions
from .gather import as_flag, resolve
from .parser import Help

__all__ = ["add_option", "add_to", "choose_workers", "run_command"]

_DESCRIPTION = """\
Train a model on one worker or many. Their number is a matter of speed: a step
is --global-batch samples, however many workers share them. Without options, a
small network learns handwritten digits.
"""

_EXAMPLES = """
your own model and data:
  --model mynet:Net      Net() in mynet.py returns an nn.Module; where it has
                         parameters classes or shape, it gets them
  --data mydata:load     load() in mydata.py returns (train, test), or train
                         alone; an item of either is a pair (input, label)

examples:
  lockstep train --epochs 15 --global-batch 64
  lockstep train --data fashion-mnist --workers 2
  lockstep train --model resnet18 --data cifar10 --precision bf16 --epochs 30
  lockstep train --model mynet:Net --data mydata:load --optimizer adamw
      several devices in one process:
  lockstep train --strategy replicas --devices cpu,cpu
      the same bits at any number of workers:
  lockstep train --shards 8 --workers 2
      a larger batch, its learning rate scaled to it:
  lockstep train --global-batch 1024 --base-batch 256 --warmup-epochs 2
      go on where the last run was stopped; or from any run, in a new folder:
  lockstep train --resume latest
  lockstep train --resume runs/first --out runs/second --epochs 30 --lr 0.01
      options from a file, e.g. the config.yaml that each run leaves behind:
  lockstep train --config runs/first/config.yaml --seed 1

exit codes:
  0  done
  1  failed, e.g. the loss is no longer finite
  2  bad input
  130, 143  stopped by Ctrl-C or SIGTERM, after saving
"""


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="train a model, on as many workers as you like",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for option in fields(TrainOptions):
        add_option(groups[option.metadata["group"]], option)
    files = groups[GROUPS[4]]
    text = "YAML or TOML file with options, e.g. a line `epochs: 20`; flags win over it"
    files.add_argument("--config", metavar="FILE", help=text)
    files.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run_command, known=[flag for action in parser._actions for flag in action.option_strings])


def add_option(group: Any, option: Any) -> None:
    """Add a field of `TrainOptions` to a parser, or a group of its options."""
    flag, text = as_flag(option.name), option.metadata["help"]
    if isinstance(option.default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        return
    choices = option.metadata["choices"]
    if option.default is not None:
        text = f"{text} (default: {option.default})"
    bare = option.metadata["bare"]
    optional: dict[str, Any] = {} if bare is None else {"nargs": "?", "const": bare}
    group.add_argument(flag, **optional, metavar=option.metadata["metavar"] or "|".join(choices), help=text)


def run_command(arguments: argparse.Namespace) -> int:
    """Do what the parsed `arguments` ask for."""
    import_path_here()
    options = resolve(arguments)
    workers = choose_workers(options)
    here = workers == 1 or environment.is_launched()
    result = _run_here(options) if here else _run_launched(options, workers)
    if environment.find_world().is_first and not options.quiet:
        _show(Path(str(options.out)), result)
    return 0


def choose_workers(options: TrainOptions) -> int:
    """The number of workers: as given, or as many as suit the machine and the global batch.

    Raises:
        ConfigError: when a launcher has started another number.
    """
    if options.workers == "auto" and options.strategy == "replicas" and not environment.is_launched():
        return 1
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
    return max(1, min(available, options.global_batch, options.shards or available))


def _run_here(options: TrainOptions) -> dict[str, Any]:
    from ..training.job import run

    return run(options)


def _run_launched(options: TrainOptions, workers: int) -> dict[str, Any]:
    from ..launchers import launch

    try:
        result: dict[str, Any] = launch(_run_here, options, workers=workers)
    except LockstepError as error:
        out = Path(str(options.out))
        if error.report_json and out.is_dir():
            from ..watch import files, report

            error.report_path = files.write(out, report.from_json(error.report_json))
        raise
    return result


def _show(out: Path, result: dict[str, Any]) -> None:
    """The summary: what came out, and where the files are."""
    from rich.console import Console

    rows = []
    if result["test_accuracy"] is not None:
        epochs = "1 epoch" if result["epochs"] == 1 else f"{result['epochs']} epochs"
        rows.append(("test accuracy", f"{result['test_accuracy']:.2%} after {epochs}"))
    noun = "worker" if result["workers"] == 1 else "workers"
    if len(result["devices"]) > result["workers"]:
        noun += f" on {len(result['devices'])} devices"
    rows.append(("speed", f"{result['samples_per_second']:,.0f} samples/s with {result['workers']} {noun}"))
    rows += [("model", str(out / "model.safetensors")), ("curve", str(out / "curve.png")), ("all files", str(out))]
    console = Console(highlight=False, markup=False, emoji=False)  # paths are shown as they are
    console.print()
    for name, text in rows:
        console.print(f"{name:<13}  {text}", soft_wrap=True, style="bold" if name == "test accuracy" else None)
