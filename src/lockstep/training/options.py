"""The options of a training run: the table from which flags and help of `train` and `verify` and
files of options come.

To add an option, add an entry to `TrainOptions`; `option_table.Option` explains its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from .. import arguments, option_table
from ..data import DATA
from ..errors import ConfigError, counted, unknown_name
from ..models import MODELS
from ..option_table import Parse, choice, integer, number, option
from ..parallel import STRATEGIES
from ..parallel.shards import check_virtual_workers
from ..registry import Registry
from .formats import COMPILE_MODES, IN_FLIGHT, PRECISIONS, REPLICA_CHECK
from .schedules import SCHEDULES

__all__ = ["CONFIGS", "FILES", "LOGS", "TrainOptions", "check_names", "parse_param_groups"]

LOGS = ("csv", "tensorboard")
# The file in which a run of `lockstep train` records its options, and its name in versions before
# 0.2.
CONFIGS = ("config.json", "config.yaml")
# the defaults of lockstep.models.gpt
_GPT = {"layers": 4, "heads": 4, "width": 128, "dropout": 0.0}
_PER_CALL = ("run_dir", "resume", "allow_different_hardware", "quiet")


def _one_of(known: Registry) -> Parse:
    return lambda name, value: known.check(option_table.text(name, value))


def _names(known: Registry) -> str:
    return ", ".join(known.names()) + ", or package.module:factory of your own, see below"


def _worker_count(name: str, value: object) -> str:
    if value != "auto":
        arguments.parse_whole(name, value, least=1, expected="a whole number of at least 1 or auto")
    return str(value)


def _param_groups(name: str, value: object) -> str:
    text = option_table.text(name, value)
    parse_param_groups(text)
    return text


def _interval(name: str, value: object) -> str:
    from .callbacks.checkpoints import parse_interval

    text = option_table.text(name, value)
    parse_interval(text)
    return text


def _logs(name: str, value: object) -> str:
    text = option_table.text(name, value)
    for log in option_table.names(name, text):
        arguments.choice(name, log, LOGS)
    return text


_PROBABILITY = number("a probability from 0 to below 1", least=0, below=1)


# the groups of the help
SUBJECT = "what to train"
WORKERS = "workers"
STEP = "the step"
RUN = "the run"
FILES = "files and display"


@dataclass
class TrainOptions:
    """All options of ``lockstep train``, with their defaults. Names are those of the flags with
    ``_`` for ``-``.
    """

    # What to train.
    model: str = option(
        "lenet", group=SUBJECT, metavar="NAME", parse=_one_of(MODELS), help=_names(MODELS)
    )
    data: str = option(
        "digits",
        group=SUBJECT,
        metavar="NAME",
        parse=_one_of(DATA),
        help=_names(DATA) + "; text is text:FILE, for gpt",
    )
    data_dir: str | None = option(
        None,
        group=SUBJECT,
        metavar="DIR",
        help="folder of the data's files; missing ones are downloaded into it",
    )
    context: int | None = option(
        None,
        group=SUBJECT,
        metavar="N",
        parse=integer(1),
        help="for text: tokens in a sample (default: 256)",
    )
    tokenizer: str | None = option(
        None,
        group=SUBJECT,
        metavar="FILE",
        help="for text: a tokenizer.json of the package tokenizers (default: each byte is a token)",
    )
    layers: int | None = option(
        None,
        group=SUBJECT,
        metavar="N",
        parse=integer(1),
        help="for gpt: blocks of attention and MLP (default: 4)",
    )
    heads: int | None = option(
        None,
        group=SUBJECT,
        metavar="N",
        parse=integer(1),
        help="for gpt: attention heads in a block (default: 4)",
    )
    width: int | None = option(
        None,
        group=SUBJECT,
        metavar="N",
        parse=integer(1),
        help="for gpt: numbers for a token between blocks, a multiple of 2 x heads (default: 128)",
    )
    dropout: float | None = option(
        None,
        group=SUBJECT,
        metavar="X",
        parse=_PROBABILITY,
        help="for gpt and convnet: probability with which numbers are zeroed in training",
    )

    # Workers.
    workers: str = option(
        "auto",
        group=WORKERS,
        metavar="N|auto",
        parse=_worker_count,
        help="processes that share each step; auto: one for each GPU or, without one, for each CPU "
        "core that gets at least 32 samples of a step",
    )
    device: str = option(
        "auto",
        group=WORKERS,
        metavar="TYPE",
        help="auto: an accelerator if there is one; or its type, such as cuda, mps or xpu; or cpu",
    )
    strategy: str = option(
        "distributed",
        group=WORKERS,
        metavar="|".join(STRATEGIES.names()),
        parse=choice(STRATEGIES.names()),
        help="distributed: a copy of the model on each worker; replicas: on each of several "
        "devices in a worker; sharded: one model, sharded over the workers",
    )
    devices: str = option(
        "auto",
        group=WORKERS,
        metavar="LIST|auto",
        help="with replicas: the devices of each worker, such as cpu,cpu or 0,1; auto: every GPU "
        "or, without one, the CPU once for each core that gets at least 32 samples of a step",
    )
    sync_batchnorm: bool = option(
        False,
        group=WORKERS,
        opposites=("--no-sync-batchnorm",),
        help="batch norm with the statistics of the global batch, not of each worker's part",
    )
    shard_optimizer: bool = option(
        False,
        group=WORKERS,
        opposites=("--no-shard-optimizer",),
        help="divide the optimizer's state among the workers, and with virtual workers their "
        "gradients: less memory, the same bits as without",
    )
    virtual_workers: int | None = option(
        None,
        group=WORKERS,
        metavar="V",
        parse=integer(1),
        help="give the same bits at any number of workers: compute what V workers compute, each "
        "with a separate pass over its part of every step, on any number of workers up to V "
        "(e.g. 8)",
    )
    threads: int | None = option(
        None,
        group=WORKERS,
        metavar="N",
        parse=integer(1),
        help="with virtual workers: threads within an operation on the CPU (1)",
    )
    allow_different_hardware: bool = option(
        False,
        group=WORKERS,
        opposites=("--no-allow-different-hardware",),
        help="with virtual workers: resume from a checkpoint on another host or torch, with other "
        "bits",
    )

    # The step.
    global_batch_size: int = option(
        None,
        group=STEP,
        metavar="N",
        parse=integer(1),
        help="samples in one step, over all workers (default: 256; 64 for digits, 32 for text)",
    )
    lr: float = option(
        None,
        group=STEP,
        metavar="X",
        parse=number(above=0, finite=True),
        help="learning rate (default: 0.05 for sgd, 5 for lars, 0.01 for lamb, 0.001 for adam and "
        "adamw)",
    )
    optimizer: str = option(
        None,
        group=STEP,
        metavar="sgd|adam|adamw|lars|lamb",
        parse=choice(("sgd", "adam", "adamw", "lars", "lamb")),
        help="optimizer; lars and lamb are for large batches (default: sgd; adamw for text)",
    )
    momentum: float = option(
        0.9,
        group=STEP,
        metavar="X",
        parse=number(least=0, finite=True),
        help="momentum of sgd and lars",
    )
    beta1: float = option(
        0.9,
        group=STEP,
        metavar="X",
        parse=number(least=0, below=1),
        help="first beta of adam, adamw and lamb",
    )
    beta2: float = option(
        0.999,
        group=STEP,
        metavar="X",
        parse=number(least=0, below=1),
        help="second beta of adam, adamw and lamb",
    )
    weight_decay: float = option(
        0.0,
        group=STEP,
        metavar="X",
        parse=number(least=0, finite=True),
        help="weight decay (L2 penalty)",
    )
    param_groups: str | None = option(
        None,
        group=STEP,
        metavar="LIST",
        parse=_param_groups,
        help="other values for some parameters, by patterns of their names, such as "
        "'*.bias:weight_decay=0;fc*:lr=0.01'",
    )
    max_grad_norm: float | None = option(
        None,
        group=STEP,
        metavar="X",
        parse=number(above=0, finite=True),
        help="maximum 2-norm of all gradients together (gradient clipping)",
    )
    gradient_accumulation_steps: int = option(
        1,
        group=STEP,
        metavar="N",
        parse=integer(1),
        help="gradient accumulation steps in a worker's part of a step; more need less memory",
    )
    precision: str = option(
        "fp32",
        group=STEP,
        metavar="|".join(PRECISIONS),
        parse=choice(PRECISIONS),
        help="number format; fp16 scales gradients",
    )
    compile: bool = option(
        False, group=STEP, opposites=("--no-compile",), help="run the model through torch.compile"
    )
    compile_mode: str = option(
        "default",
        group=STEP,
        metavar="|".join(COMPILE_MODES),
        parse=choice(COMPILE_MODES),
        help="with --compile: the mode of torch.compile; reduce-overhead records CUDA graphs, for "
        "models with small steps",
    )
    channels_last: bool = option(
        False,
        group=STEP,
        opposites=("--no-channels-last",),
        help="channels-last memory format, for convolutions on GPUs",
    )
    max_steps_in_flight: int = option(
        IN_FLIGHT,
        group=STEP,
        metavar="N",
        parse=integer(1),
        help="on a GPU: steps that may be queued before the host waits for the oldest",
    )
    replica_check: int = option(
        REPLICA_CHECK,
        group=STEP,
        metavar="N",
        parse=integer(0),
        help="steps between two comparisons of sampled weights among workers; all weights are "
        "compared at checkpoints and ends of epochs, hyperparameters at every step; 0: "
        "nothing is compared",
    )
    on_spike: str | None = option(
        None,
        group=STEP,
        metavar="stop|skip|rollback",
        parse=choice(("stop", "skip", "rollback")),
        help="what to do about a step that stands out by its loss, or the norm of its gradient or "
        "buffers: end the run, leave the update out, or go back to a copy of the state of at most "
        "20 steps before (default: nothing)",
    )
    cross_check: int | None = option(
        None,
        group=STEP,
        metavar="N",
        parse=integer(1),
        help="with virtual workers: steps between two in which each worker repeats a pass of "
        "another one, to find devices that compute wrong numbers; weights are then compared at "
        "every step (default: nothing is repeated)",
    )

    # The run.
    epochs: int = option(
        None,
        group=RUN,
        metavar="N",
        parse=integer(1),
        help="passes over the training data, counted from the start of the run (default: 10; 15 "
        "for digits)",
    )
    schedule: str = option(
        "cosine",
        group=RUN,
        metavar="|".join(SCHEDULES),
        parse=choice(SCHEDULES),
        help="learning-rate schedule",
    )
    warmup_epochs: float = option(
        0.0,
        group=RUN,
        metavar="X",
        parse=number(least=0, finite=True),
        help="epochs of linear learning-rate warm-up",
    )
    base_batch_size: int | None = option(
        None,
        group=RUN,
        metavar="N",
        parse=integer(1),
        help="the global batch that --lr was chosen for; --lr is scaled from it to "
        "--global-batch-size",
    )
    seed: int = option(
        0,
        group=RUN,
        metavar="N",
        parse=integer(0, 2**63 - 1),  # torch takes 64 bits
        help="random seed of initial weights, sample order and dropout",
    )
    checkpoint_every: str = option(
        "1epoch",
        group=RUN,
        metavar="INTERVAL",
        parse=_interval,
        help="how often to save, such as 2epochs or 500steps; 0: only when interrupted",
    )
    keep_checkpoints: int = option(
        3,
        group=RUN,
        metavar="N",
        parse=integer(1),
        help="number of newest checkpoints to keep",
    )
    async_save: bool = option(
        False,
        group=RUN,
        opposites=("--no-async-save",),
        help="write checkpoints in the background, from a copy of the state in memory",
    )
    resume: str | None = option(
        None,
        group=RUN,
        metavar="PATH|latest",
        help="resume from a run directory, a checkpoint, or the latest run in runs/, with the "
        "options of that run",
    )

    # Files and display.
    run_dir: str | None = option(
        None,
        group=FILES,
        metavar="DIR",
        help="run directory (default: a new one in runs/, or that of --resume)",
    )
    log: str = option(
        "csv",
        group=FILES,
        metavar="LIST",
        parse=_logs,
        help="comma-separated logs: csv (metrics.csv, always written), tensorboard",
    )
    loader_workers: int = option(
        0,
        group=FILES,
        metavar="N",
        parse=integer(0),
        help="data loader processes for each worker",
    )
    quiet: bool = option(False, group=FILES, opposites=("--no-quiet",), help="print errors only")

    @staticmethod
    def parse(parsed_values: Mapping[str, Any]) -> TrainOptions:
        """Return the options that are `parsed_values` by name: texts of flags, or values of a file.

        Raises:
            ConfigError: an option, which the error names, is invalid or contradicts another.
        """
        chosen = TrainOptions(**option_table.values_of(TrainOptions, parsed_values))
        chosen.check()
        return chosen

    def __post_init__(self) -> None:
        small = self.data == "digits"  # 1,437 samples
        if self.global_batch_size is None:
            if small:
                self.global_batch_size = 64
            else:
                self.global_batch_size = 256 if self.text_file is None else 32
        if self.text_file is not None and self.context is None:
            self.context = 256
        if self.model == "gpt":  # config.json then says all that a program needs to build it again
            for name, value in _GPT.items():
                if getattr(self, name) is None:
                    setattr(self, name, value)
        if self.optimizer is None:
            self.optimizer = "sgd" if self.text_file is None else "adamw"
        if self.epochs is None:
            self.epochs = 15 if small else 10
        if self.lr is None:
            self.lr = {"sgd": 0.05, "lars": 5.0, "lamb": 0.01}.get(self.optimizer, 0.001)

    def check(self) -> None:
        """Check that no option contradicts another one, as far as it is possible without data,
        model and device.

        Raises:
            ConfigError: naming the first that does, what was expected and what was given.
        """
        if self.text_file is None:
            for name in ("context", "tokenizer"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        name, f"nothing, as the data {self.data} is no text", getattr(self, name)
                    )
        elif not self.text_file:
            raise ConfigError("data", "text:FILE, the path of a text file", self.data)
        if self.gradient_accumulation_steps > self.global_batch_size:
            expected = f"at most the {counted(self.global_batch_size, 'sample')} of a step"
            raise ConfigError(
                "gradient_accumulation_steps", expected, self.gradient_accumulation_steps
            )
        if self.warmup_epochs >= self.epochs:
            expected = f"less than the {counted(self.epochs, 'epoch')} of the run"
            raise ConfigError("warmup_epochs", expected, self.warmup_epochs)
        if self.compile_mode != "default" and not self.compile:
            raise ConfigError(
                "compile_mode",
                "default without compile",
                self.compile_mode,
                "Pass --compile as well.",
            )
        if self.strategy == "replicas":
            self._check_replicas()
        elif self.devices != "auto":
            hint = (
                "Pass --strategy replicas; or --devices auto, to resume a run of that strategy "
                "under another one."
            )
            raise ConfigError("devices", "auto without the strategy replicas", self.devices, hint)
        if self.virtual_workers is not None:
            self._check_virtual_workers(self.virtual_workers)
        elif self.threads is not None:
            raise ConfigError("threads", "none without virtual workers", self.threads)
        if self.shard_optimizer and self.strategy != "distributed":
            hint = "The strategy sharded divides the optimizer's state by itself, with other bits."
            raise ConfigError("shard_optimizer", "the strategy distributed with it", True, hint)
        if self.cross_check is not None and self.virtual_workers is None:
            hint = "Pass --virtual-workers 8, for example: only then are bits equal on all workers."
            raise ConfigError("cross_check", "virtual_workers with it", self.cross_check, hint)
        if self.on_spike is not None and self.strategy != "distributed":
            raise ConfigError("on_spike", "the strategy distributed with it", self.on_spike)

    def _check_replicas(self) -> None:
        if self.virtual_workers is not None:
            hint = "Virtual workers need processes: leave the strategy out."
            raise ConfigError(
                "virtual_workers", "none with the strategy replicas", self.virtual_workers, hint
            )
        if self.sync_batchnorm:
            hint = (
                "Each replica uses the statistics of its own part; several --workers can "
                "synchronise them."
            )
            raise ConfigError("sync_batchnorm", "false with the strategy replicas", True, hint)
        if self.compile:
            hint = "Compiled programs do not support threads with separate random numbers."
            raise ConfigError("compile", "false with the strategy replicas", True, hint)

    def _check_virtual_workers(self, virtual_workers: int) -> None:
        if self.workers != "auto":
            check_virtual_workers(virtual_workers, int(self.workers))
        if self.gradient_accumulation_steps > 1:
            steps = self.gradient_accumulation_steps
            hint = "Each shard has its own pass."
            raise ConfigError("gradient_accumulation_steps", "1 with virtual workers", steps, hint)
        if self.sync_batchnorm and self.compile:
            hint = "Leave out one of the three."
            raise ConfigError(
                "compile", "false with virtual workers and sync_batchnorm", True, hint
            )

    @property
    def text_file(self) -> str | None:
        """The text file in `data`; None for other data, and "" if its path is missing."""
        name, _, file = self.data.partition(":")
        return file if name == "text" else None

    @property
    def title(self) -> str:
        """A short name of what is trained, such as "lenet-digits"; of text, the file's name."""
        data = self.data if not self.text_file else PurePath(self.text_file).stem
        return f"{self.model}-{data}"

    def model_options(self) -> dict[str, Any]:
        """Return the options that are arguments of the model, as far as they are given."""
        names = ("layers", "heads", "width", "dropout")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def logs(self) -> list[str]:
        """Return the names in `log`."""
        return [name.strip() for name in self.log.split(",") if name.strip()]

    def device_list(self) -> list[str | int] | None:
        """Return the devices in `devices`, numbers as int; None for "auto"."""
        if self.devices == "auto":
            return None
        parts = [part.strip() for part in self.devices.split(",")]
        return [int(part) if part.isdecimal() else part for part in parts]

    def as_dict(self) -> dict[str, Any]:
        """Return the options by name, for a file that `parse` reads again, without those that
        belong to one call.
        """
        return {name: value for name, value in asdict(self).items() if name not in _PER_CALL}


def parse_param_groups(text: str) -> list[tuple[list[str], dict[str, float]]]:
    """Parse `param_groups`: "*.bias,bn*:weight_decay=0;fc*:lr=0.01" → [(patterns, {hyperparameter:
    value}), …].

    Raises:
        ConfigError: for another form.
    """
    groups = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        patterns, colon, values = part.rpartition(":")
        pairs = [value.partition("=") for value in values.split(",")]
        try:
            numbers = {name.strip(): float(number) for name, _, number in pairs}
        except ValueError:
            numbers = {}
        if not colon or not numbers:
            expected = "groups such as '*.bias:weight_decay=0;fc*:lr=0.01,momentum=0.8'"
            raise ConfigError("param_groups", expected, part)
        groups.append(([pattern.strip() for pattern in patterns.split(",")], numbers))
    return groups


def check_names(content: Mapping[Any, Any], source: str) -> None:
    """Check the keys of a file of options, in which ``-`` and ``_`` are equivalent.

    Args:
        content: key → value.
        source: the file, for errors.

    Raises:
        ConfigError: for a key that is no option, or one of an option that the file has twice.
    """
    known = [entry.name for entry in option_table.options_of(TrainOptions)]
    seen = set()
    for key in content:
        name = str(key).replace("-", "_")
        if name not in known:
            raise unknown_name(
                source,
                key,
                known,
                expected="options of a run, as listed by `lockstep train --help`",
            )
        if name in seen:
            raise ConfigError(f"{source}: {key}", "each option once", found="it twice")
        seen.add(name)
