"""The options of a training run, with names, help texts and checks, for command-line flags and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import PurePath
from typing import Any

from .. import arguments
from ..data import DATA
from ..errors import ConfigError, counted, unknown_name
from ..models import MODELS
from ..parallel import STRATEGIES
from ..parallel.shards import check_virtual_workers
from ..registry import Registry
from .formats import COMPILE_MODES, IN_FLIGHT, PRECISIONS, REPLICA_CHECK
from .schedules import SCHEDULES

__all__ = ["CONFIGS", "GROUPS", "LOGS", "TrainOptions", "from_mapping", "parse_param_groups", "parse_text"]

GROUPS = ("what to train", "workers", "the step", "the run", "files and display")
LOGS = ("csv", "tensorboard")
# The file in which a run of `lockstep train` records its options, and its name in versions before 0.2.
CONFIGS = ("config.json", "config.yaml")
_GPT = {"layers": 4, "heads": 4, "width": 128, "dropout": 0.0}  # the defaults of lockstep.models.gpt
_PER_CALL = ("run_dir", "resume", "allow_different_hardware", "quiet")
_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


def _option(default: Any, group: str, text: str, metavar: str = "", choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"group": group, "help": text, "metavar": metavar, "choices": choices})


def _names(known: Registry) -> str:
    return ", ".join(known.names()) + ", or package.module:factory of your own, see below"


@dataclass
class TrainOptions:
    """All options of ``lockstep train``, with their defaults. Names are those of the flags with ``_`` for ``-``."""

    model: str = _option("lenet", GROUPS[0], _names(MODELS), "NAME")
    data: str = _option("digits", GROUPS[0], _names(DATA) + "; text is text:FILE, for gpt", "NAME")
    data_dir: str | None = _option(
        None, GROUPS[0], "folder of the data's files; missing ones are downloaded into it", "DIR"
    )
    context: int | None = _option(None, GROUPS[0], "for text: tokens in a sample (default: 256)", "N")
    tokenizer: str | None = _option(
        None, GROUPS[0], "for text: a tokenizer.json of the package tokenizers (default: each byte is a token)", "FILE"
    )
    layers: int | None = _option(None, GROUPS[0], "for gpt: blocks of attention and MLP (default: 4)", "N")
    heads: int | None = _option(None, GROUPS[0], "for gpt: attention heads in a block (default: 4)", "N")
    width: int | None = _option(
        None, GROUPS[0], "for gpt: numbers for a token between blocks, a multiple of 2 x heads (default: 128)", "N"
    )
    dropout: float | None = _option(
        None, GROUPS[0], "for gpt and convnet: probability with which numbers are zeroed in training", "X"
    )

    workers: str = _option(
        "auto",
        GROUPS[1],
        "processes that share each step; auto: one for each GPU or, without one, for each CPU core that gets at least "
        "32 samples of a step",
        "N|auto",
    )
    device: str = _option(
        "auto", GROUPS[1], "auto: an accelerator if there is one; or its type, such as cuda, mps or xpu; or cpu", "TYPE"
    )
    strategy: str = _option(
        "distributed",
        GROUPS[1],
        "distributed: a copy of the model on each worker; replicas: on each of several devices in a worker; sharded: "
        "one model, sharded over the workers",
        choices=tuple(STRATEGIES.names()),
    )
    devices: str = _option(
        "auto",
        GROUPS[1],
        "with replicas: the devices of each worker, such as cpu,cpu or 0,1; auto: every GPU or, without one, the CPU "
        "once for each core that gets at least 32 samples of a step",
        "LIST|auto",
    )
    sync_batchnorm: bool = _option(
        False, GROUPS[1], "batch norm with the statistics of the global batch, not of each worker's part"
    )

    virtual_workers: int | None = _option(
        None,
        GROUPS[1],
        "give the same bits at any number of workers: compute what V workers compute, each with a separate pass over "
        "its part of every step, on any number of workers up to V (e.g. 8)",
        "V",
    )
    threads: int | None = _option(
        None, GROUPS[1], "with virtual workers: threads within an operation on the CPU (1)", "N"
    )
    allow_different_hardware: bool = _option(
        False, GROUPS[1], "with virtual workers: resume from a checkpoint on another host or torch, with other bits"
    )

    global_batch_size: int = _option(
        None, GROUPS[2], "samples in one step, over all workers (default: 256; 64 for digits, 32 for text)", "N"
    )
    lr: float = _option(
        None,
        GROUPS[2],
        "learning rate (default: 0.05 for sgd, 5 for lars, 0.01 for lamb, 0.001 for adam and adamw)",
        "X",
    )
    optimizer: str = _option(
        None,
        GROUPS[2],
        "optimizer; lars and lamb are for large batches (default: sgd; adamw for text)",
        choices=("sgd", "adam", "adamw", "lars", "lamb"),
    )
    momentum: float = _option(0.9, GROUPS[2], "momentum of sgd and lars", "X")
    beta1: float = _option(0.9, GROUPS[2], "first beta of adam, adamw and lamb", "X")
    beta2: float = _option(0.999, GROUPS[2], "second beta of adam, adamw and lamb", "X")
    weight_decay: float = _option(0.0, GROUPS[2], "weight decay (L2 penalty)", "X")
    param_groups: str | None = _option(
        None,
        GROUPS[2],
        "other values for some parameters, by patterns of their names, such as '*.bias:weight_decay=0;fc*:lr=0.01'",
        "LIST",
    )
    max_grad_norm: float | None = _option(
        None, GROUPS[2], "maximum 2-norm of all gradients together (gradient clipping)", "X"
    )
    gradient_accumulation_steps: int = _option(
        1, GROUPS[2], "gradient accumulation steps in a worker's part of a step; more need less memory", "N"
    )
    precision: str = _option("fp32", GROUPS[2], "number format; fp16 scales gradients", choices=PRECISIONS)
    compile: bool = _option(False, GROUPS[2], "run the model through torch.compile")
    compile_mode: str = _option(
        "default",
        GROUPS[2],
        "with --compile: the mode of torch.compile; reduce-overhead records CUDA graphs, for models with small steps",
        choices=COMPILE_MODES,
    )
    channels_last: bool = _option(False, GROUPS[2], "channels-last memory format, for convolutions on GPUs")
    max_steps_in_flight: int = _option(
        IN_FLIGHT, GROUPS[2], "on a GPU: steps that may be queued before the host waits for the oldest", "N"
    )
    replica_check: int = _option(
        REPLICA_CHECK,
        GROUPS[2],
        "steps between two comparisons of sampled weights among workers; all weights are compared at checkpoints and "
        "ends of epochs, hyperparameters at every step; 0: nothing is compared",
        "N",
    )

    epochs: int = _option(
        None,
        GROUPS[3],
        "passes over the training data, counted from the start of the run (default: 10; 15 for digits)",
        "N",
    )
    schedule: str = _option("cosine", GROUPS[3], "learning-rate schedule", choices=SCHEDULES)
    warmup_epochs: float = _option(0.0, GROUPS[3], "epochs of linear learning-rate warm-up", "X")
    base_batch_size: int | None = _option(
        None, GROUPS[3], "the global batch that --lr was chosen for; --lr is scaled from it to --global-batch-size", "N"
    )
    seed: int = _option(0, GROUPS[3], "random seed of initial weights, sample order and dropout", "N")
    checkpoint_every: str = _option(
        "1epoch", GROUPS[3], "how often to save, such as 2epochs or 500steps; 0: only when interrupted", "INTERVAL"
    )
    keep_checkpoints: int = _option(3, GROUPS[3], "number of newest checkpoints to keep", "N")
    async_save: bool = _option(
        False, GROUPS[3], "write checkpoints in the background, from a copy of the state in memory"
    )
    resume: str | None = _option(
        None,
        GROUPS[3],
        "resume from a run directory, a checkpoint, or the latest run in runs/, with the options of that run",
        "PATH|latest",
    )

    run_dir: str | None = _option(
        None, GROUPS[4], "run directory (default: a new one in runs/, or that of --resume)", "DIR"
    )
    log: str = _option("csv", GROUPS[4], "comma-separated logs: csv (metrics.csv, always written), tensorboard", "LIST")
    loader_workers: int = _option(0, GROUPS[4], "data loader processes for each worker", "N")
    quiet: bool = _option(False, GROUPS[4], "print errors only")

    def __post_init__(self) -> None:
        small = self.data == "digits"  # 1,437 samples
        if self.global_batch_size is None:
            self.global_batch_size = 64 if small else 32 if self.text_file is not None else 256
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
        """Check every value, as far as it is possible without data, model and device.

        Raises:
            ConfigError: naming the option, what was expected and what was given.
        """
        MODELS.check(self.model)
        DATA.check(self.data)
        if self.workers != "auto":
            arguments.parse_whole("workers", self.workers, least=1, expected="a whole number of at least 1 or auto")
        for name in (
            "global_batch_size",
            "gradient_accumulation_steps",
            "epochs",
            "keep_checkpoints",
            "max_steps_in_flight",
        ):
            arguments.whole(name, getattr(self, name), least=1)
        for name in ("loader_workers", "replica_check"):
            arguments.whole(name, getattr(self, name), least=0)
        arguments.whole("seed", self.seed, least=0, most=2**63 - 1)  # torch takes 64 bits
        for name in ("base_batch_size", "virtual_workers", "threads", "context", "layers", "heads", "width"):
            if getattr(self, name) is not None:
                arguments.whole(name, getattr(self, name), least=1)
        arguments.number("lr", self.lr, above=0, finite=True)
        for name in ("momentum", "weight_decay", "warmup_epochs"):
            arguments.number(name, getattr(self, name), least=0, finite=True)
        arguments.number("beta1", self.beta1, least=0, below=1)
        arguments.number("beta2", self.beta2, least=0, below=1)
        if self.dropout is not None:
            arguments.number("dropout", self.dropout, least=0, below=1, expected="a probability from 0 to below 1")
        if self.text_file is None:
            for name in ("context", "tokenizer"):
                if getattr(self, name) is not None:
                    raise ConfigError(name, f"nothing, as the data {self.data} is no text", getattr(self, name))
        elif not self.text_file:
            raise ConfigError("data", "text:FILE, the path of a text file", self.data)
        parse_param_groups(self.param_groups or "")
        if self.max_grad_norm is not None:
            arguments.number("max_grad_norm", self.max_grad_norm, above=0, finite=True)
        if self.gradient_accumulation_steps > self.global_batch_size:
            raise ConfigError(
                "gradient_accumulation_steps",
                f"at most the {counted(self.global_batch_size, 'sample')} of a step",
                self.gradient_accumulation_steps,
            )
        if self.warmup_epochs >= self.epochs:
            raise ConfigError(
                "warmup_epochs", f"less than the {counted(self.epochs, 'epoch')} of the run", self.warmup_epochs
            )
        check_together(self)
        for option in fields(self):
            choices = option.metadata["choices"]
            if choices:
                arguments.choice(option.name, getattr(self, option.name), choices)
        for name in self.logs():
            arguments.choice("log", name, LOGS)
        from .callbacks.checkpoints import parse_interval

        parse_interval(self.checkpoint_every)

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
        """Return the options by name, for a file that `from_mapping` reads, without those that belong to one call."""
        return {name: value for name, value in asdict(self).items() if name not in _PER_CALL}


def parse_param_groups(text: str) -> list[tuple[list[str], dict[str, float]]]:
    """Parse `param_groups`: "*.bias,bn*:weight_decay=0;fc*:lr=0.01" → [(patterns, {hyperparameter: value}), …].

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


def check_together(options: TrainOptions) -> None:
    """Check that no option contradicts another one, such as `strategy` or `virtual_workers`.

    Raises:
        ConfigError: naming the first that does.
    """
    if options.compile_mode != "default" and not options.compile:
        raise ConfigError("compile_mode", "default without compile", options.compile_mode, "Pass --compile as well.")
    if options.strategy == "replicas":
        _check_with_replicas(options)
    elif options.devices != "auto":
        hint = "Pass --strategy replicas; or --devices auto, to resume a run of that strategy under another one."
        raise ConfigError("devices", "auto without the strategy replicas", options.devices, hint)
    if options.virtual_workers is None:
        if options.threads is not None:
            raise ConfigError("threads", "none without virtual workers", options.threads)
        return
    if options.workers != "auto":
        check_virtual_workers(options.virtual_workers, int(options.workers))
    if options.gradient_accumulation_steps > 1:
        raise ConfigError(
            "gradient_accumulation_steps",
            "1 with virtual workers",
            options.gradient_accumulation_steps,
            "Each shard has its own pass.",
        )
    if options.sync_batchnorm and options.compile:
        raise ConfigError(
            "compile", "false with virtual workers and sync_batchnorm", True, "Leave out one of the three."
        )


def _check_with_replicas(options: TrainOptions) -> None:
    if options.virtual_workers is not None:
        hint = "Virtual workers need processes: leave the strategy out."
        raise ConfigError("virtual_workers", "none with the strategy replicas", options.virtual_workers, hint)
    if options.sync_batchnorm:
        hint = "Each replica uses the statistics of its own part; several --workers can synchronise them."
        raise ConfigError("sync_batchnorm", "false with the strategy replicas", True, hint)
    if options.compile:
        hint = "Compiled programs do not support threads with separate random numbers."
        raise ConfigError("compile", "false with the strategy replicas", True, hint)


def from_mapping(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Convert the options of a file to their types.

    Args:
        values: option → value; ``-`` and ``_`` in names are equivalent, and a string is parsed as a flag's value.
        source: the file, for errors.

    Raises:
        ConfigError: for an unknown or duplicate name, or a value of a wrong type.
    """
    known = {option.name: option for option in fields(TrainOptions)}
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise unknown_name(source, key, known, expected="options of a run, as listed by `lockstep train --help`")
        if name in result:
            raise ConfigError(f"{source}: {key}", "each option once", found="it twice")
        result[name] = _typed(known[name], value, f"{source}: {key}")
    return result


def _typed(option: Field[Any], value: Any, argument: str) -> Any:
    kind, _, optional = str(option.type).partition(" | ")
    if value is None and optional:
        return None
    if isinstance(value, bool) or value is None or kind == "bool":
        if kind != "bool" or not isinstance(value, bool):
            raise ConfigError(argument, _EXPECTED[kind], value)
        return value
    # YAML 1.1 reads 1e-3 as a string, and `workers: 2` as a number.
    if isinstance(value, (str, int)) or (isinstance(value, float) and kind != "str"):
        return parse_text(option, str(value), argument, original=value)
    raise ConfigError(argument, _EXPECTED[kind], value, "Put it in quotes." if kind == "str" else "")


def parse_text(option: Field[Any], text: str, argument: str = "", original: object = None) -> Any:
    """Parse a flag's text as a value of its option's type.

    Args:
        option: a field of `TrainOptions`.
        text: the text.
        argument: the name in errors; that of the option when "".
        original: the value in errors; the text when None.

    Raises:
        ConfigError: if it is not a value of that type.
    """
    got = text if original is None else original
    kind = str(option.type).partition(" | ")[0]
    try:
        value = {"int": int, "float": float, "str": str}[kind](text)
    except ValueError:
        raise ConfigError(argument or option.name, _EXPECTED[kind], got) from None
    if not text.strip() or "\0" in text:
        raise ConfigError(argument or option.name, _EXPECTED[kind], got)
    return value
