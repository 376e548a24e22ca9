"""The options of a training run: their names, meanings and limits, for flags and files alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any

from ..data import DATA
from ..errors import ConfigError, unknown_name
from ..models import MODELS
from ..strategies import STRATEGIES
from .schedules import SCHEDULES

__all__ = ["GROUPS", "LOGS", "TrainOptions", "from_mapping", "parse_text"]

GROUPS = ("what to train", "workers", "the step", "the run", "files and display")
LOGS = ("csv", "tensorboard")
PRECISIONS = ("fp32", "bf16", "fp16")


def _option(default: Any, group: str, text: str, metavar: str = "", choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"group": group, "help": text, "metavar": metavar, "choices": choices})


@dataclass
class TrainOptions:
    """Every option of ``lockstep train``, with its default. Names are the flags' with ``_`` for ``-``.

    Raises:
        ConfigError: from `check`, naming the option, what was expected and what came.
    """

    model: str = _option("lenet", GROUPS[0], "one of " + ", ".join(MODELS.names()), "NAME|package.module:factory")
    data: str = _option("digits", GROUPS[0], "one of " + ", ".join(DATA.names()), "NAME|package.module:factory")
    data_dir: str | None = _option(None, GROUPS[0], "folder with the data's files; missing ones go there", "DIR")

    workers: str = _option("auto", GROUPS[1], "auto: one for each GPU or, on CPU, core that has 32 samples", "N|auto")
    device: str = _option("auto", GROUPS[1], "auto: a GPU if there is one", choices=("auto", "cpu", "cuda", "mps"))
    strategy: str = _option("distributed", GROUPS[1], "", choices=tuple(STRATEGIES.names()))
    sync_batchnorm: bool = _option(False, GROUPS[1], "batch norm over the global batch, not each worker's part")

    global_batch: int = _option(256, GROUPS[2], "samples in one update, over all workers", "N")
    lr: float = _option(0.05, GROUPS[2], "learning rate", "X")
    optimizer: str = _option("sgd", GROUPS[2], "", choices=("sgd", "adam", "adamw"))
    momentum: float = _option(0.9, GROUPS[2], "of sgd", "X")
    weight_decay: float = _option(0.0, GROUPS[2], "", "X")
    clip_norm: float | None = _option(None, GROUPS[2], "upper bound of the norm of the whole gradient", "X")
    accumulate: int = _option(1, GROUPS[2], "passes that make up a worker's part, to save memory", "N")
    precision: str = _option("fp32", GROUPS[2], "fp16 comes with gradient scaling", choices=PRECISIONS)
    compile: bool = _option(False, GROUPS[2], "run the model through torch.compile")
    channels_last: bool = _option(False, GROUPS[2], "channels innermost in memory, for convolutions")

    epochs: int = _option(10, GROUPS[3], "passes over the training data", "N")
    schedule: str = _option("cosine", GROUPS[3], "of the learning rate", choices=SCHEDULES)
    warmup_epochs: float = _option(0.0, GROUPS[3], "epochs over which the learning rate grows to its value", "X")
    base_batch: int | None = _option(None, GROUPS[3], "--lr is for this global batch; scaled linearly to ours", "N")
    seed: int = _option(0, GROUPS[3], "of weights, order and dropout", "N")
    checkpoint_every: str = _option("1epoch", GROUPS[3], "e.g. 2epochs or 500steps; 0: only when stopped", "INTERVAL")

    out: str | None = _option(None, GROUPS[4], "run folder (default: a new one in runs/)", "DIR")
    log: str = _option("csv", GROUPS[4], "what to write beside: csv, tensorboard, or both with a comma", "LIST")
    loader_workers: int = _option(0, GROUPS[4], "processes that load data ahead, for each worker", "N")
    quiet: bool = _option(False, GROUPS[4], "say nothing but errors")

    def check(self) -> None:
        """See that every value can be used, as far as that can be said without data, model and device."""
        MODELS.check(self.model)
        DATA.check(self.data)
        if self.workers != "auto":
            _whole("workers", self.workers, 1)
        for name, least in (("global_batch", 1), ("accumulate", 1), ("epochs", 1), ("seed", 0), ("loader_workers", 0)):
            _whole(name, getattr(self, name), least)
        if self.base_batch is not None:
            _whole("base_batch", self.base_batch, 1)
        for name, above in (("lr", True), ("momentum", False), ("weight_decay", False), ("warmup_epochs", False)):
            _number(name, getattr(self, name), above)
        if self.clip_norm is not None:
            _number("clip_norm", self.clip_norm, above=True)
        if self.warmup_epochs >= self.epochs:
            raise ConfigError("warmup_epochs", f"less than the {self.epochs} epochs of the run", self.warmup_epochs)
        for option in fields(self):
            choices = option.metadata["choices"]
            if choices and getattr(self, option.name) not in choices:
                raise unknown_name(option.name, getattr(self, option.name), choices)
        for name in self.logs():
            if name not in LOGS:
                raise unknown_name("log", name, LOGS)
        self._check_interval()

    def _check_interval(self) -> None:
        from .callbacks.checkpoints import parse_interval

        parse_interval(self.checkpoint_every)

    def logs(self) -> list[str]:
        """The parts of `log`."""
        return [name.strip() for name in self.log.split(",") if name.strip()]

    def as_dict(self) -> dict[str, Any]:
        """All options by name, for a file that `from_mapping` reads."""
        return asdict(self)


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        auto = " or auto" if name == "workers" else ""
        raise ConfigError(name, f"a whole number of at least {least}{auto}", value)
    return number


def _number(name: str, value: Any, above: bool) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < float("inf") or (above and value == 0):
        raise ConfigError(name, "a finite number above 0" if above else "a finite number of at least 0", value)


def from_mapping(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The options that a file holds, each with its right type.

    Args:
        values: option → value; ``-`` and ``_`` in names mean the same.
        source: the file, for errors.

    Raises:
        ConfigError: for a name that is no option, or a value of the wrong kind.
    """
    known = {option.name: option for option in fields(TrainOptions)}
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            error = unknown_name(f"{source}: option", key, known)
            raise error
        result[name] = _typed(known[name], value, source)
    return result


def _typed(option: Field[Any], value: Any, source: str) -> Any:
    kinds = str(option.type)
    if value is None and "None" in kinds:
        return None
    if kinds.startswith("bool"):
        good = isinstance(value, bool)
    elif kinds.startswith("int"):
        good = isinstance(value, int) and not isinstance(value, bool)
    elif kinds.startswith("float"):
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        value = float(value) if good else value
    else:
        good = isinstance(value, (str, int)) and not isinstance(value, bool)
        value = str(value) if good else value
    if not good:
        raise ConfigError(f"{source}: {option.name}", f"a value of type {kinds.split(' ')[0]}", value)
    return value


def parse_text(option: Field[Any], text: str) -> Any:
    """A flag's text as a value of its option's type.

    Raises:
        ConfigError: when it is none.
    """
    kinds = str(option.type)
    try:
        if kinds.startswith("int"):
            return int(text)
        if kinds.startswith("float"):
            return float(text)
    except ValueError:
        raise ConfigError(option.name, "a whole number" if kinds.startswith("int") else "a number", text) from None
    return text
