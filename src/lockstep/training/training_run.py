"""A complete training run from its options: model, data, optimizer, loop, and the files of its run
directory.
"""

from __future__ import annotations

import inspect
import json
import shutil
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from .. import arguments, devices
from ..activity import Activity
from ..checkpoint.folder import save_weights
from ..communicator import init
from ..data import DATA, TextBlocks, text
from ..errors import OUTPUT_FAILED, ConfigError, DivergedError, InterruptedRunError, LockstepError
from ..models import MODELS, build, next_token_loss
from ..parallel.replicas.scatter import as_devices
from ..parallel.shards import steps_per_epoch
from ..system import atomic_files
from .callbacks import (
    Callback,
    Checkpoints,
    CSVLog,
    Progress,
    TensorBoard,
    TextSamples,
    TokenColumns,
    TrainingContext,
)
from .callbacks.curve import curve_by_default
from .losses.torch_losses import check_fit
from .modes import evaluating
from .optimizers import LAMB, LARS
from .options import CONFIGS, TrainOptions, parse_param_groups
from .prepare_model import prepare_model
from .schedules import Schedule, make_schedule, scaled_lr
from .trainer import Trainer


@contextmanager
def _running(argument: str, expected: str, name: str) -> Iterator[None]:
    """Turn an exception of the user's code into an error with `argument`, what was `expected`, and
    the code's name.
    """
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        got = f"{type(error).__name__} from {name}" + (f": {reason}" if reason else "")
        raise ConfigError(argument, expected, found=got, hint="--debug shows where.") from error


def load_data(options: TrainOptions) -> tuple[Any, Any]:
    """Load the (train, test) data sets; test is None if the user's factory returns one data set.

    Raises:
        ConfigError: for an unknown name, or a factory that fails or returns something else.
        DataError: for missing or invalid files.
    """
    if options.text_file is not None:
        return text(
            options.text_file,
            int(options.context or 0),
            options.tokenizer,
            data_dir=options.data_dir,
        )
    with _running("data", "a module that can be imported", options.data):
        factory = DATA.load(options.data)
    result = _call(factory, options)
    parts = result if isinstance(result, tuple) else (result, None)
    if len(parts) != 2:
        raise ConfigError("data", _FORM, found=f"a tuple of {len(parts)} from {options.data}")
    for part in (parts[0], *(part for part in parts[1:] if part is not None)):
        _check_set(part, options.data)
    return parts[0], parts[1]


_HINT = "A factory returns (train, test), a tuple, or train alone."
_FORM = "a factory that returns (train, test), or train alone, each with len() and indexing"


def _call(factory: Any, options: TrainOptions) -> Any:
    if not callable(factory):
        raise ConfigError(
            "data", _FORM, found=f"{options.data}, which is of type {type(factory).__name__}"
        )
    with _running("data", "a factory that can be called without arguments", options.data):
        accepts = "data_dir" in inspect.signature(factory).parameters
        if options.data_dir is not None and not accepts:
            raise ConfigError(
                "data_dir", f"nothing, as {options.data} reads no files", options.data_dir
            )
        return factory(data_dir=options.data_dir) if accepts else factory()


def _check_set(dataset: Any, name: str) -> None:
    has_methods = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, (str, bytes, dict)) or not has_methods:
        raise ConfigError("data", _FORM, found=f"one of type {type(dataset).__name__} from {name}")
    with _running("data", "data sets with len() and indexing", name):
        if len(dataset) == 0:
            raise ConfigError(
                "data", "at least one sample in each data set", found=f"{name}, with an empty one"
            )
        sample = dataset[0]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            got = f"one of type {type(sample).__name__} in a {type(dataset).__name__}"
            raise ConfigError("data", "items that are pairs (input, label)", found=got, hint=_HINT)
        inputs, labels = _samples(dataset, 1)
        if not isinstance(inputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
            got = f"a batch of {type(inputs).__name__} and {type(labels).__name__}"
            raise ConfigError(
                "data", "inputs and labels that are tensors, arrays or numbers", found=got
            )


def _samples(dataset: Any, count: int) -> Any:
    """Return the first samples as one batch: (inputs, labels)."""
    from torch.utils.data import default_collate

    count = min(count, len(dataset))
    if hasattr(dataset, "collated_batch"):
        return dataset.collated_batch(list(range(count)))
    return default_collate([dataset[index] for index in range(count)])


def _shape(dataset: Any) -> tuple[int, ...]:
    return tuple(dataset.shape if hasattr(dataset, "shape") else _samples(dataset, 1)[0].shape[1:])


def _classes(dataset: Any) -> int | None:
    """Return the number of classes of the labels, if it is known without reading every sample."""
    classes = getattr(dataset, "classes", None)
    if classes is not None:
        return classes if isinstance(classes, int) else len(classes)
    tensors = getattr(dataset, "tensors", None)  # of a TensorDataset
    labels = tensors[-1] if tensors else getattr(dataset, "targets", None)
    if labels is None or torch.as_tensor(labels).is_floating_point():
        return None
    return int(torch.as_tensor(labels).max()) + 1


def build_model(options: TrainOptions, dataset: Any) -> nn.Module:
    """Build the model that the options name, on the CPU, and try it with two samples of `dataset`.

    Raises:
        ConfigError: for an unknown name, a factory or model that fails, or an output that does not
            fit the labels.
    """
    with _running("data", "a data set with known classes and shape", options.data):
        vocabulary = _vocabulary(dataset)
        classes = vocabulary or _classes(dataset)
        shape = _shape(dataset)
    _check_kind(options, vocabulary)
    if classes is None and options.model in MODELS.targets:
        raise ConfigError(
            "data",
            "a data set with an attribute classes (their number, or their names)",
            options.data,
            "The model's number of outputs is taken from it.",
        )
    with _running("model", "a factory that returns a torch.nn.Module", options.model):
        model = build(options.model, classes, shape, vocabulary, **options.model_options())
    if vocabulary is None:
        _try_model(model, _samples(dataset, 2), classes, options.model)
    else:
        _try_language_model(model, _samples(dataset, 2), vocabulary, options.model)
    return model


def _vocabulary(dataset: Any) -> int | None:
    """Return the number of different tokens of a data set of text, which says it; None for other
    data.
    """
    vocabulary = getattr(dataset, "vocabulary", None)
    return vocabulary if isinstance(vocabulary, int) else None


def _check_kind(options: TrainOptions, vocabulary: int | None) -> None:
    """Check that a model known by name is one for text exactly if the data are."""
    if vocabulary is None and options.model == "gpt":
        expected = "text:FILE for the model gpt, or data of your own with an attribute vocabulary"
        raise ConfigError("data", expected, options.data)
    if vocabulary is not None and options.model in MODELS.targets and options.model != "gpt":
        raise ConfigError("model", "gpt, or a model of your own, for text", options.model)


@torch.no_grad()
def _try_language_model(model: nn.Module, samples: Any, vocabulary: int, name: str) -> None:
    tokens, targets = samples
    expected = f"a model (n, t) → (n, t, {vocabulary}), for tokens of shape {list(tokens.shape)}"
    with evaluating(model), _running("model", expected, name):
        logits = model(tokens)
    shape = list(logits.shape) if isinstance(logits, torch.Tensor) else None
    if shape != [*tokens.shape, vocabulary]:
        got = type(logits).__name__ if shape is None else f"an output of shape {shape}"
        raise ConfigError("model", expected, found=got)
    with _running("data", "targets that are tokens, one for each input", name):
        next_token_loss(logits, targets)


@torch.no_grad()
def _try_model(model: nn.Module, samples: Any, classes: int | None, name: str) -> None:
    inputs, labels = samples
    with (
        evaluating(model),
        _running("model", f"a model for inputs of shape {list(inputs.shape)}", name),
    ):
        output = model(inputs)
    if classes is not None and isinstance(output, torch.Tensor) and output.shape[1:2] < (classes,):
        got = f"an output of shape {list(output.shape)}"
        raise ConfigError(
            "model", f"an output for each of the {classes} classes of the data", found=got
        )
    loss_fn = nn.CrossEntropyLoss()
    check_fit(loss_fn, output, labels)
    with _running(
        "model", f"an output that cross-entropy takes with labels of {labels.dtype}", name
    ):
        loss_fn(output, labels)


class RunDirectory(Callback):
    """Writes the resolved options at the start of a run, and the results at its end, on rank 0.

    Args:
        options: the options, with `run_dir`.
    """

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._run_dir = Path(str(options.run_dir))
        self._epochs_before: int | None = None  # epochs done when this process started

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Write `config.json`, after a checkpoint to resume from has been accepted."""
        self._epochs_before = len(trainer.history)
        resolved = {"workers": str(trainer.comm.size), "device": trainer.comm.device.type}
        text = json.dumps({**self._options.as_dict(), **resolved}, indent=2)
        try:
            atomic_files.write_text(self._run_dir / _CONFIG, text + "\n")
        except OSError as error:
            raise ConfigError(
                "run_dir",
                "a folder that can be written",
                found=f"{self._run_dir} ({error.strerror})",
            ) from None

    @contextmanager
    def removed_on_failure(self, trainer: Trainer) -> Iterator[None]:
        """Remove the directories that were created for a run if it fails without other files than
        its configuration; one that has diverged stays with its ledger, for `lockstep blame`.
        """
        try:
            yield
        except DivergedError as error:
            hint = f"`lockstep blame {self._run_dir}` looks for the samples behind it."
            raise DivergedError(f"{error} {hint}") from None
        except BaseException:
            if trainer.comm.rank == 0 and not self._has_results():
                if self._run_dir in trainer.directory.created:
                    shutil.rmtree(self._run_dir, ignore_errors=True)
                for parent in reversed(trainer.directory.created):
                    with suppress(OSError):  # another run may use it by now
                        parent.rmdir()
            raise

    def _has_results(self) -> bool:
        """Return whether the run directory has any file except the configuration."""
        try:
            return any(
                path.relative_to(self._run_dir).as_posix() not in _OF_ANY_RUN and not path.is_dir()
                for path in self._run_dir.rglob("*")
            )
        except OSError:
            return True

    def write_results(self, trainer: Trainer) -> dict[str, Any]:
        """Write the trained weights and `result.json`, and return the contents of the latter;
        called by every worker.

        Raises:
            LockstepError: on every worker, if they cannot be written.
        """
        result = _results(trainer, self._epochs_before or 0)
        weights = trainer.step.strategy.model_state(trainer.model, trainer.comm.rank == 0)
        run_dir = self._run_dir

        def write() -> None:
            try:
                save_weights(weights, run_dir / "model.safetensors")
                atomic_files.write_json(run_dir / "result.json", result)
            except OSError as error:
                failed = LockstepError(
                    f"{run_dir}: the results could not be written: {error.strerror or error}"
                )
                failed.exit_code = OUTPUT_FAILED
                raise failed from None

        trainer.comm.on_rank0(write)
        return result


_CONFIG = CONFIGS[0]
# What a run has before it has achieved anything: its configuration, and a ledger.
_OF_ANY_RUN = (_CONFIG, "ledger.bin", "ledger.jsonl")


_SPEEDS = ("samples_per_second", "tokens_per_second")


def _results(trainer: Trainer, epochs_before: int) -> dict[str, Any]:
    strategy = trainer.step.strategy
    names_by_rank = trainer.comm.allgather_object(
        [devices.name_of(device) for device in strategy.devices]
    )
    strategy.sync_buffers()
    history = trainer.history
    last = history[-1]
    # The speed of this process only: epochs before a resume may have had other workers.
    recent = history[epochs_before:] or history
    return {
        "val_accuracy": last.get("val_accuracy"),
        "val_loss": last.get("val_loss"),
        **({"val_perplexity": last.get("val_perplexity")} if "tokens_per_second" in last else {}),
        "train_loss": last["train_loss"],
        "epochs": trainer.position.epoch,
        "seconds_per_epoch": statistics.median(row["seconds"] for row in recent),
        **{
            name: statistics.median(row[name] for row in recent) for name in _SPEEDS if name in last
        },
        "workers": trainer.comm.size,
        "devices": [name for names in names_by_rank for name in names],
        "global_batch_size": trainer.global_batch_size,
        "torch": str(torch.__version__),
        "fingerprint": strategy.fingerprint(trainer.model, trainer.optimizer),
    }


def run(options: TrainOptions) -> dict[str, Any]:
    """Run a training with `options`; called by every worker of the job.

    Args:
        options: checked options; `run_dir` is the run directory, created after all other checks,
            and `resume` a checkpoint or a run directory to resume from, or None.

    Returns:
        The contents of `result.json`.

    Raises:
        LockstepError: a subclass, for any problem with options, data, model or files.
    """
    comm = init(_device(options))
    shown = comm.rank == 0 and not options.quiet
    with Activity("lockstep train: loading the data", shown):
        train, test = load_data(options)
    directory = RunDirectory(options)
    callbacks = [directory, *_language_callbacks(options, train, test), *make_callbacks(options)]
    with Activity("lockstep train: building the model", shown):
        trainer = make_trainer(options, train, callbacks)
    trainer.directory.numbers = False  # the command has chosen the directory
    with directory.removed_on_failure(trainer), ExitStack() as stack:
        loader = stack.enter_context(closing(trainer.loader(train)))
        held_out = (
            None
            if test is None
            else stack.enter_context(closing(trainer.loader(test, shuffle=False)))
        )
        try:
            trainer.fit(loader, options.epochs, validate=held_out, resume=options.resume)
        except InterruptedRunError:
            if trainer.done:  # the signal arrived after the last step
                directory.write_results(trainer)
            raise
    return directory.write_results(trainer)


def _device(options: TrainOptions) -> str:
    """Return the type of the worker's device; with a list of devices that of the first.

    Raises:
        ConfigError: if `device` and `devices` contradict each other.
    """
    listed = options.device_list()
    if listed is None:
        return options.device
    kind = as_devices(listed)[0].type
    if options.device not in ("auto", kind):
        raise ConfigError(
            "devices", f"{options.device} as the first device, as in device", options.devices
        )
    return kind


def make_trainer(options: TrainOptions, train: Any, callbacks: list[Callback]) -> Trainer:
    """Create the trainer for the options, with its model and optimizer.

    Raises:
        ConfigError: for a model that cannot be built or trained on `train`.
    """
    torch.manual_seed(options.seed)
    model = prepare_model(
        build_model(options, train),
        init(),
        sync_batchnorm=options.sync_batchnorm,
        channels_last=options.channels_last,
        compile_model=options.compile,
        compile_mode=options.compile_mode,
        fixed_shapes=options.virtual_workers is not None,
    )
    return Trainer(
        model,
        make_optimizer(model, options),
        nn.CrossEntropyLoss() if _vocabulary(train) is None else next_token_loss,
        options.global_batch_size,
        seed=options.seed,
        run_dir=options.run_dir,
        keep_checkpoints=options.keep_checkpoints,
        async_save=options.async_save,
        callbacks=callbacks,
        strategy=options.strategy,
        devices=options.device_list(),
        max_steps_in_flight=options.max_steps_in_flight,
        num_workers=options.loader_workers,
        allow_different_hardware=options.allow_different_hardware,
        virtual_workers=options.virtual_workers,
        shard_optimizer=options.shard_optimizer,
        threads=options.threads,
        replica_check=options.replica_check,
        on_spike=options.on_spike,
        cross_check=options.cross_check,
        precision=options.precision,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        max_grad_norm=options.max_grad_norm,
        schedule=_schedule(options, len(train)),
    )


def make_optimizer(model: nn.Module, options: TrainOptions) -> Optimizer:
    """Create the optimizer that the options name, with the learning rate scaled to the global batch
    size.
    """
    lr = scaled_lr(options.lr, options.global_batch_size, options.base_batch_size)
    groups = _param_groups(model, options)
    if not groups:
        raise ConfigError("model", "a model with parameters to train", options.model)
    if options.optimizer in ("sgd", "lars"):
        by_momentum = SGD if options.optimizer == "sgd" else LARS
        return by_momentum(groups, lr, momentum=options.momentum, weight_decay=options.weight_decay)
    kind: Any = {"adam": Adam, "adamw": AdamW, "lamb": LAMB}[options.optimizer]
    optimizer: Optimizer = kind(
        groups, lr, betas=(options.beta1, options.beta2), weight_decay=options.weight_decay
    )
    return optimizer


def _param_groups(model: nn.Module, options: TrainOptions) -> list[dict[str, Any]]:
    """Return the parameter groups that `param_groups` describes; a parameter belongs to the first
    pattern it matches.

    Raises:
        ConfigError: for a hyperparameter that the optimizer does not have, or patterns that match
            no parameter.
    """
    known = (
        "lr",
        "weight_decay",
        *(("momentum",) if options.optimizer in ("sgd", "lars") else ("eps",)),
    )
    rest = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = []
    for patterns, values in parse_param_groups(options.param_groups or ""):
        for name in values:
            arguments.choice("param_groups", name, known)
        matching = [
            name for name in rest if any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        if not matching:
            hint = f"The model has {', '.join(rest)}."
            raise ConfigError(
                "param_groups", "patterns of names of parameters", ",".join(patterns), hint
            )
        if "lr" in values:
            values["lr"] = scaled_lr(
                values["lr"], options.global_batch_size, options.base_batch_size
            )
        groups.append({"params": [rest.pop(name) for name in matching], **values})
    return [{"params": list(rest.values())}, *groups] if rest else groups


def _schedule(options: TrainOptions, samples: int) -> Schedule:
    steps = steps_per_epoch(samples, options.global_batch_size)
    # With a base batch size the warm-up starts at the unscaled learning rate (Goyal et al. 2017,
    # §2.2).
    start = (
        min(1.0, options.base_batch_size / options.global_batch_size)
        if options.base_batch_size
        else 0.0
    )
    warmup = round(options.warmup_epochs * steps)
    return make_schedule(options.schedule, options.epochs * steps, warmup, start)


def make_callbacks(options: TrainOptions) -> list[Callback]:
    """Create the callbacks for the options."""
    chosen: list[Callback] = [] if options.quiet else [Progress(options.context)]
    chosen += [CSVLog(), curve_by_default(), Checkpoints(options.checkpoint_every)]
    if "tensorboard" in options.logs():
        arguments.require_package("tensorboard", "log", "tensorboard")
        chosen.append(TensorBoard())
    return chosen


# texts to continue after each epoch, and the tokens that are given of each
_SAMPLES = 3
_PROMPT = 16


def _language_callbacks(options: TrainOptions, train: Any, test: Any) -> list[Callback]:
    """Create the callbacks for data that are tokens; they come before those that show and write
    rows.
    """
    if _vocabulary(train) is None:
        return []
    chosen: list[Callback] = [TokenColumns(_shape(train)[0])]
    if isinstance(train, TextBlocks):
        chosen.append(_samples_of_text(options, test or train))
    return chosen


def _samples_of_text(options: TrainOptions, blocks: TextBlocks) -> TextSamples:
    """Return a callback that continues the beginnings of some blocks."""
    count = min(_SAMPLES, len(blocks))
    length = min(_PROMPT, blocks.context)
    prompts = [
        blocks[number * len(blocks) // count][0][:length].tolist() for number in range(count)
    ]
    return TextSamples(
        prompts, blocks.decode, blocks.context, seed=options.seed, show=not options.quiet
    )
