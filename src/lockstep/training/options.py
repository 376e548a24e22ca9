"""The options of a training run: their names, meanings and limits, for flags and files alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any

from ..data import DATA
from ..errors import ConfigError, unknown_name
from ..models import MODELS
from ..registry import Registry
from ..shard_count import DEFAULT_SHARDS, shard_count
from ..strategies import STRATEGIES
from .formats import IN_FLIGHT, PRECISIONS, REPLICA_CHECK
from .schedules import SCHEDULES

__all__ = ["GROUPS", "LOGS", "TrainOptions", "from_mapping", "parse_text"]

GROUPS = ("what to train", "workers", "the step", "the run", "files and display")
LOGS = ("csv", "tensorboard")
_OF_ONE_CALL = ("out", "resume", "allow_different")
_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


def _option(
    default: Any, group: str, text: str, metavar: str = "", choices: tuple[str, ...] = (), bare: str | None = None
) -> Any:
    """`bare` is what the flag alone means, without a value."""
    told = {"group": group, "help": text, "metavar": metavar, "choices": choices, "bare": bare}
    return field(default=default, metadata=told)


def _names(known: Registry) -> str:
    return ", ".join(known.names()) + ", or package.module:factory of your own, see below"


@dataclass
class TrainOptions:
    """Every option of ``lockstep train``, with its default. Names are the flags' with ``_`` for ``-``.

    Raises:
        ConfigError: from `check`, naming the option, what was expected and what came.
    """

    model: str = _option("lenet", GROUPS[0], _names(MODELS), "NAME")
    data: str = _option("digits", GROUPS[0], _names(DATA), "NAME")
    data_dir: str | None = _option(
        None, GROUPS[0], "folder of the data's files; missing ones are downloaded into it", "DIR"
    )

    workers: str = _option(
        "auto",
        GROUPS[1],
        "processes that share each step; auto: one for each GPU or, without one, for each CPU core that gets at least "
        "32 samples of a step",
        "N|auto",
    )
    device: str = _option("auto", GROUPS[1], "auto: a GPU if there is one", choices=("auto", "cpu", "cuda", "mps"))
    strategy: str = _option(
        "distributed",
        GROUPS[1],
        "distributed: a copy of the model on each worker; replicas: on each of several devices in a worker; sharded: "
        "one model, cut over the workers",
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

    shards: int | None = _option(
        None,
        GROUPS[1],
        "give the same bits at any number of workers: cut each step into so many shards, each with a pass of its own "
        f"(without a number: {DEFAULT_SHARDS})",
        "V",
        bare=str(DEFAULT_SHARDS),
    )
    threads: int | None = _option(None, GROUPS[1], "with shards: threads within an operation on the CPU (1)", "N")
    allow_different: bool = _option(
        False, GROUPS[1], "with shards: go on from a checkpoint on another machine or torch, with other bits"
    )

    global_batch: int = _option(256, GROUPS[2], "samples in one step, over all workers", "N")
    lr: float = _option(None, GROUPS[2], "learning rate (default: 0.05 for sgd, 0.001 for adam and adamw)", "X")
    optimizer: str = _option(
        "sgd", GROUPS[2], "rule by which gradients change weights", choices=("sgd", "adam", "adamw")
    )
    momentum: float = _option(0.9, GROUPS[2], "momentum of sgd", "X")
    weight_decay: float = _option(0.0, GROUPS[2], "how strongly weights are drawn to zero", "X")
    clip_norm: float | None = _option(None, GROUPS[2], "upper bound of the norm of the whole gradient", "X")
    accumulate: int = _option(
        1, GROUPS[2], "passes in which a worker goes through its part of a step; more need less memory", "N"
    )
    precision: str = _option("fp32", GROUPS[2], "number format; fp16 scales gradients", choices=PRECISIONS)
    compile: bool = _option(False, GROUPS[2], "run the model through torch.compile")
    channels_last: bool = _option(False, GROUPS[2], "memory layout that suits convolutions on GPUs")
    in_flight: int = _option(
        IN_FLIGHT, GROUPS[2], "on a GPU: steps that may be queued before the program waits for the oldest", "N"
    )
    replica_check: int = _option(
        REPLICA_CHECK,
        GROUPS[2],
        "steps between two looks at whether some weights are the same on all workers; all are compared at checkpoints "
        "and ends of epochs, hyperparameters at every step; 0: nothing is compared",
        "N",
    )

    epochs: int = _option(10, GROUPS[3], "passes over the training data, counted from the beginning of the run", "N")
    schedule: str = _option("cosine", GROUPS[3], "course of the learning rate", choices=SCHEDULES)
    warmup_epochs: float = _option(0.0, GROUPS[3], "epochs in which the learning rate grows to its value", "X")
    base_batch: int | None = _option(
        None, GROUPS[3], "the global batch that --lr was chosen for; --lr is scaled from it to --global-batch", "N"
    )
    seed: int = _option(0, GROUPS[3], "random seed of first weights, order of samples and dropout", "N")
    checkpoint_every: str = _option(
        "1epoch", GROUPS[3], "how often to save, such as 2epochs or 500steps; 0: only when stopped", "INTERVAL"
    )
    keep: int = _option(3, GROUPS[3], "how many of the newest checkpoints stay", "N")
    async_save: bool = _option(
        False, GROUPS[3], "write checkpoints beside the training, from a copy of the state in memory"
    )
    resume: str | None = _option(
        None,
        GROUPS[3],
        "go on from a run's folder, a checkpoint, or the latest run in runs/, with the options of that run",
        "PATH|latest",
    )

    out: str | None = _option(None, GROUPS[4], "run folder (default: a new one in runs/, or that of --resume)", "DIR")
    log: str = _option(
        "csv", GROUPS[4], "records, with commas between: csv (metrics.csv, always written), tensorboard", "LIST"
    )
    loader_workers: int = _option(0, GROUPS[4], "processes for each worker that load data ahead", "N")
    quiet: bool = _option(False, GROUPS[4], "say nothing but errors")

    def __post_init__(self) -> None:
        if self.lr is None:
            self.lr = 0.05 if self.optimizer == "sgd" else 0.001

    def check(self) -> None:
        """See that every value can be used, as far as that can be said without data, model and device."""
        MODELS.check(self.model)
        DATA.check(self.data)
        if self.workers != "auto":
            _whole("workers", self.workers, 1)
        for name in ("global_batch", "accumulate", "epochs", "keep", "in_flight"):
            _whole(name, getattr(self, name), 1)
        for name in ("loader_workers", "replica_check"):
            _whole(name, getattr(self, name), 0)
        _whole("seed", self.seed, 0, 2**63 - 1)  # torch takes 64 bits
        for name in ("base_batch", "shards", "threads"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        for name, above in (("lr", True), ("momentum", False), ("weight_decay", False), ("warmup_epochs", False)):
            _number(name, getattr(self, name), above)
        if self.clip_norm is not None:
            _number("clip_norm", self.clip_norm, above=True)
        if self.accumulate > self.global_batch:
            raise ConfigError("accumulate", f"at most the {self.global_batch} samples of a step", self.accumulate)
        if self.warmup_epochs >= self.epochs:
            raise ConfigError("warmup_epochs", f"less than the {self.epochs} epochs of the run", self.warmup_epochs)
        check_together(self)
        self._check_names()
        self._check_interval()

    def _check_names(self) -> None:
        for option in fields(self):
            choices = option.metadata["choices"]
            if choices and getattr(self, option.name) not in choices:
                raise unknown_name(option.name, getattr(self, option.name), choices)
        for name in self.logs():
            if name not in LOGS:
                raise unknown_name("log", name, LOGS)

    def _check_interval(self) -> None:
        from .callbacks.checkpoints import parse_interval

        parse_interval(self.checkpoint_every)

    def logs(self) -> list[str]:
        """The parts of `log`."""
        return [name.strip() for name in self.log.split(",") if name.strip()]

    def device_list(self) -> list[str | int] | None:
        """The parts of `devices`, numbers as such; None for "auto"."""
        if self.devices == "auto":
            return None
        parts = [part.strip() for part in self.devices.split(",")]
        return [int(part) if part.isdecimal() else part for part in parts]

    def as_dict(self) -> dict[str, Any]:
        """All options by name, for a file that `from_mapping` reads, but those that another call shall give itself."""
        return {name: value for name, value in asdict(self).items() if name not in _OF_ONE_CALL}


def check_together(options: TrainOptions) -> None:
    """See that no option contradicts `strategy` or `shards`."""
    if options.strategy == "replicas":
        _check_with_replicas(options)
    elif options.devices != "auto":
        hint = "Pass --strategy replicas; or, to go on with a run of that strategy under another, --devices auto."
        raise ConfigError("devices", "auto without the strategy replicas", options.devices, hint)
    if options.shards is None:
        if options.threads is not None:
            raise ConfigError("threads", "none without shards", options.threads)
        return
    if options.workers != "auto":
        shard_count(options.shards, int(options.workers))
    if options.accumulate > 1:
        raise ConfigError("accumulate", "1 with shards", options.accumulate, "Each shard is a pass of its own.")
    if options.sync_batchnorm and options.compile:
        raise ConfigError("compile", "false with shards and sync_batchnorm", True, "Leave out one of the three.")


def _check_with_replicas(options: TrainOptions) -> None:
    if options.shards is not None:
        hint = "Shards are shared among processes: leave the strategy out."
        raise ConfigError("shards", "none with the strategy replicas", options.shards, hint)
    if options.sync_batchnorm:
        hint = "Statistics are those of each replica's part, averaged; --workers has synchronised ones."
        raise ConfigError("sync_batchnorm", "false with the strategy replicas", True, hint)
    if options.compile:
        hint = "Compiled programs do not run in several threads with random numbers of their own."
        raise ConfigError("compile", "false with the strategy replicas", True, hint)


def _whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(name, f"a whole number {limits}{' or auto' if name == 'workers' else ''}", value)


def _number(name: str, value: Any, above: bool) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < float("inf") or (above and value == 0):
        raise ConfigError(name, "a finite number above 0" if above else "a finite number of at least 0", value)


def from_mapping(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The options that a file holds, each with its right type.

    Args:
        values: option → value; ``-`` and ``_`` in names mean the same, and a text means what it would as a flag's.
        source: the file, for errors.

    Raises:
        ConfigError: for a name that is no option or comes twice, or a value of the wrong kind.
    """
    known = {option.name: option for option in fields(TrainOptions)}
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise unknown_name(source, key, known, expected="options of a run, as `lockstep train --help` has them")
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
    # YAML 1.1 takes 1e-3 for a text, and `workers: 2` is a number.
    if isinstance(value, (str, int)) or (isinstance(value, float) and kind != "str"):
        return parse_text(option, str(value), argument, came=value)
    raise ConfigError(argument, _EXPECTED[kind], value, "Put it in quotes." if kind == "str" else "")


def parse_text(option: Field[Any], text: str, argument: str = "", came: object = None) -> Any:
    """A flag's text as a value of its option's type.

    Args:
        option: a field of `TrainOptions`.
        text: as it was typed.
        argument: what errors name; the option itself when "".
        came: what errors show; the text itself when None.

    Raises:
        ConfigError: when it is none.
    """
    got = text if came is None else came
    kind = str(option.type).partition(" | ")[0]
    try:
        value = {"int": int, "float": float, "str": str}[kind](text)
    except ValueError:
        raise ConfigError(argument or option.name, _EXPECTED[kind], got) from None
    if not text.strip() or "\0" in text:
        raise ConfigError(argument or option.name, _EXPECTED[kind], got)
    return value
