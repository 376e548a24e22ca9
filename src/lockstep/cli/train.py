"""``lockstep train``: trains a model and writes a run directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import environment, other_options
from ..activity import Activity
from ..errors import ConfigError, LockstepError
from ..launcher.options import METRICS, JobOptions
from ..launcher.worker_options import MetricsOptions, WatchdogOptions, WorkerOptions
from ..option_table import options_of
from ..registry import import_path_here
from ..training.options import FILES, TrainOptions
from .parser import Help
from .resolved_options import resolve

_DESCRIPTION = """\
Train a model on one worker or many. The number of workers only affects speed: a
step is --global-batch-size samples, however many workers share them. Without
options, a small network learns handwritten digits.
"""

_EXAMPLES = """
your own model and data:
  --model mynet:Net      Net() in mynet.py returns an nn.Module; it gets classes
                         and shape if it has such parameters
  --data mydata:load     load() in mydata.py returns (train, test), or only
                         train; each item is a pair (input, label); for the
                         built-in models train has an attribute classes, their
                         number or names (in a TensorDataset they are counted);
                         data with an attribute vocabulary are text: both parts
                         of an item are tokens, and the model returns logits
                         (n, t, vocabulary)

examples:
  lockstep train --epochs 30 --optimizer adamw
  lockstep train --data fashion-mnist --workers 2
  lockstep train --model resnet18 --data cifar10 --precision bf16 --epochs 30
      a language model on a text file, whose last tenth is held out:
  lockstep train --model gpt --data text:book.txt
  lockstep train --model gpt --data text:book.txt --tokenizer tokenizer.json
  lockstep train --model mynet:Net --data mydata:load --optimizer adamw
      several devices in one process:
  lockstep train --strategy replicas --devices cpu,cpu
      the same bits at any number of workers:
  lockstep train --virtual-workers 8 --workers 2
      a larger batch with its learning rate scaled:
  lockstep train --global-batch-size 512 --base-batch-size 64 --warmup-epochs 2
      resume the last run; or any run, in a new directory:
  lockstep train --resume latest
  lockstep train --resume runs/first --run-dir runs/second --epochs 30 --lr 0.01
      options from a file, e.g. the config.json of a run:
  lockstep train --config runs/first/config.json --seed 1

exit codes:
  0  done
  1  failed, e.g. the loss is no longer finite
  2  bad input
  74  a file could not be written, e.g. on a full disk
  130, 143  stopped by Ctrl-C or SIGTERM, after saving
"""


_METRICS_OPTIONS = [entry for entry in options_of(JobOptions) if entry.group == METRICS]


def add_to(commands: Any, name: str) -> None:
    """Add this command to the subparsers `commands`."""
    parser = commands.add_parser(
        name,
        help="train a model on one or many workers",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_options(options_of(TrainOptions))
    parser.add_options(_METRICS_OPTIONS)
    text = "YAML, TOML or JSON file with options, e.g. a line `epochs: 20`; flags take precedence"
    parser.group(FILES).add_argument("--config", metavar="FILE", help=text)
    parser.group(FILES).add_argument(
        "--debug", action="store_true", help="print the traceback of an error"
    )
    parser.set_command(run_command, other_options.TRAIN_FLAGS)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the command with the `parsed` arguments, and return the exit code."""
    import_path_here()
    options = resolve(parsed)
    metrics = _metrics(parsed)
    workers = choose_workers(options)
    # the metrics of a single worker come from a launcher as well
    if environment.is_launched() or (workers == 1 and metrics is None):
        result = _run_in_process(options)
    else:
        result = _run_launched(options, workers, metrics)
    if environment.find_world().is_first and not options.quiet:
        _print_summary(Path(str(options.run_dir)), result)
    return 0


def _metrics(parsed: argparse.Namespace) -> MetricsOptions | None:
    """Return where the metrics of the run go; None if nowhere.

    Raises:
        ConfigError: a launcher has started this process.
        MissingPackageError: what serves or writes them is not installed.
    """
    names = [entry.name for entry in _METRICS_OPTIONS if hasattr(parsed, entry.name)]
    if names and environment.is_launched():
        hint = "Give it to the launcher: `lockstep run --metrics-port 9400 -m lockstep train`."
        raise ConfigError(names[0], "none in a worker", getattr(parsed, names[0]), hint)
    return JobOptions.parse(
        {"program": (), **{name: getattr(parsed, name) for name in names}}
    ).metrics()


def choose_workers(options: TrainOptions) -> int:
    """Return the number of workers: as given, or by the devices, cores and global batch.

    Raises:
        ConfigError: a launcher has started another number.
    """
    if (
        options.workers == "auto"
        and options.strategy == "replicas"
        and not environment.is_launched()
    ):
        return 1
    launched = environment.find_world().world_size if environment.is_launched() else None
    if options.workers != "auto":
        if launched is not None and int(options.workers) != launched:
            raise ConfigError(
                "workers", f"auto or {launched}, as the launcher started", options.workers
            )
        return int(options.workers)
    if launched is not None:
        return launched
    from .. import devices

    kind = devices.accelerator() if options.device == "auto" else options.device
    if kind == "mps":
        available = 1
    elif kind is not None and devices.is_known(kind) and (there := devices.count(kind)):
        available = there
    else:
        # With fewer than about 32 samples, a core computes for less time than the gradient exchange
        # takes.
        available = min(environment.usable_cores(), max(1, options.global_batch_size // 32))
    return max(1, min(available, options.global_batch_size, options.virtual_workers or available))


def _run_in_process(options: TrainOptions) -> dict[str, Any]:
    with Activity("lockstep train: loading PyTorch", shown=not options.quiet):
        from ..training.training_run import run

    return run(options)


def _run_launched(
    options: TrainOptions, workers: int, metrics: MetricsOptions | None
) -> dict[str, Any]:
    with Activity("lockstep train: loading PyTorch", shown=not options.quiet):
        from ..launcher import run_on_workers

    threads = max(1, environment.usable_cores() // workers)
    watch = WatchdogOptions(metrics=metrics)
    try:
        result: dict[str, Any] = run_on_workers(
            WorkerOptions(workers, threads, watch=watch), _run_in_process, options
        )
    except LockstepError as error:
        run_dir = Path(str(options.run_dir))
        if error.report_json and run_dir.is_dir():
            from ..watchdog.report import from_json
            from ..watchdog.report_text import write

            error.report_path = write(run_dir, from_json(error.report_json))
        raise
    return result


def _print_summary(run_dir: Path, result: dict[str, Any]) -> None:
    """Print the results, and the paths of the files."""
    from rich.console import Console

    rows = []
    epochs = "1 epoch" if result["epochs"] == 1 else f"{result['epochs']} epochs"
    if result["val_accuracy"] is not None:
        rows.append(("accuracy", f"{result['val_accuracy']:.2%} of the test set, after {epochs}"))
    if result.get("val_perplexity") is not None:
        rows.append(
            ("perplexity", f"{result['val_perplexity']:.4g} on the text held out, after {epochs}")
        )
    noun = "worker" if result["workers"] == 1 else "workers"
    if len(result["devices"]) > result["workers"]:
        noun += f" on {len(result['devices'])} devices"
    unit = "tokens" if "tokens_per_second" in result else "samples"
    speed = result[f"{unit}_per_second"]
    rows.append(("speed", f"{speed:,.0f} {unit}/s with {result['workers']} {noun}"))
    files = {
        "model": "model.safetensors",
        "samples": "samples.txt",
        "curve": "curve.png",
        "all files": "",
    }
    rows += [
        (name, str(run_dir / file)) for name, file in files.items() if (run_dir / file).exists()
    ]
    console = Console(highlight=False, markup=False, emoji=False)  # paths are printed unchanged
    console.print()
    for name, text in rows:
        console.print(
            f"{name:<13}  {text}",
            soft_wrap=True,
            style="bold" if name in ("accuracy", "perplexity") else None,
        )
