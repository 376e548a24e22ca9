"""A whole training run from its options: data, model, optimizer, loop, and the files of the run folder."""

from __future__ import annotations

import inspect
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from .. import atomic
from ..checkpoint import save_weights
from ..communicator import init
from ..data import DATA
from ..data.loader import Loader
from ..errors import ConfigError, LockstepError
from ..fingerprints import fingerprint
from ..models import MODELS, build
from ..shards import steps_per_epoch
from .callbacks import Callback, Checkpoints, CSVLog, Curve, Progress, TensorBoard
from .evaluate import evaluating
from .losses import check_fit
from .options import TrainOptions
from .prepare import prepare_model
from .schedules import make_schedule, scaled_lr
from .trainer import Trainer

__all__ = ["load_data", "run"]


def run(options: TrainOptions, out: str, resume: str | None = None) -> dict[str, Any]:
    """Train as `options` say; called by every worker of the job.

    Args:
        options: checked.
        out: the run folder; made when everything else has been found to be in order.
        resume: a checkpoint to go on from.

    Returns:
        What `result.json` holds.

    Raises:
        LockstepError: one of its kinds, for anything that is wrong with options, data, model or files.
    """
    comm = init(options.device)
    train, test = load_data(options)
    torch.manual_seed(options.seed)
    model = _build_model(options, train)
    loss_fn = nn.CrossEntropyLoss()
    model = prepare_model(
        model,
        comm,
        sync_batchnorm=options.sync_batchnorm,
        channels_last=options.channels_last,
        compile_model=options.compile,
    )
    trainer = Trainer(
        model,
        make_optimizer(model, options),
        loss_fn,
        options.global_batch,
        seed=options.seed,
        out=out,
        callbacks=make_callbacks(options),
        strategy=options.strategy,
        num_workers=options.loader_workers,
        precision=options.precision,
        accumulate=options.accumulate,
        clip_norm=options.clip_norm,
        schedule=_schedule(options, len(train)),
    )
    loader = trainer.loader(train)
    if test is not None:
        test = trainer.loader(test, shuffle=False)
    try:
        with _no_folder_for_nothing(trainer, Path(out)):
            trainer.fit(loader, options.epochs, validate=test, resume=resume)
    finally:
        loader.close()
        if isinstance(test, Loader):
            test.close()
    return _finish(trainer, Path(out))


def load_data(options: TrainOptions) -> tuple[Any, Any]:
    """(train, test) data sets; test is None where a factory of the user's returns one data set.

    Raises:
        ConfigError: for an unknown name, or a factory that returns something else.
        DataError: for files that are missing or wrong.
    """
    factory = DATA.load(options.data)
    accepts = "data_dir" in inspect.signature(factory).parameters
    if options.data_dir is not None and not accepts:
        raise ConfigError("data_dir", f"nothing, as {options.data} reads no files", options.data_dir)
    made = factory(data_dir=options.data_dir) if accepts else factory()
    parts = made if isinstance(made, tuple) else (made, None)
    if len(parts) != 2 or isinstance(parts[0], str) or not hasattr(parts[0], "__getitem__"):
        raise ConfigError("data", "a factory that returns (train, test) or one map-style data set", options.data)
    return parts[0], parts[1]


def _shape(dataset: Any) -> tuple[int, ...]:
    if hasattr(dataset, "shape"):
        return tuple(dataset.shape)
    inputs = _samples(dataset, 1)[0]
    return tuple(inputs.shape[1:])


def _classes(dataset: Any) -> int | None:
    """How many classes the labels have, if that can be told without reading every sample."""
    classes = getattr(dataset, "classes", None)
    if classes is not None:
        return classes if isinstance(classes, int) else len(classes)
    tensors = getattr(dataset, "tensors", None)  # of a TensorDataset
    labels = tensors[-1] if tensors else getattr(dataset, "targets", None)
    if labels is None or torch.as_tensor(labels).is_floating_point():
        return None
    return int(torch.as_tensor(labels).max()) + 1


def _samples(dataset: Any, count: int) -> Any:
    from torch.utils.data import default_collate

    count = min(count, len(dataset))
    if hasattr(dataset, "batch"):
        return dataset.batch(list(range(count)))
    return default_collate([dataset[index] for index in range(count)])


def _build_model(options: TrainOptions, dataset: Any) -> nn.Module:
    classes = _classes(dataset)
    if classes is None and options.model in MODELS.targets:
        raise ConfigError(
            "data",
            "a data set with an attribute classes (their number, or their names)",
            options.data,
            "The model's number of outputs is taken from it.",
        )
    model = build(options.model, classes, _shape(dataset))
    _try_model(model, dataset, classes)
    return model


@torch.no_grad()
def _try_model(model: nn.Module, dataset: Any, classes: int | None) -> None:
    """Run two samples through the model, so that what does not fit is said before anything is started."""
    inputs, labels = _samples(dataset, 2)
    with evaluating(model):
        try:
            output = model(inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                "model", f"a model for inputs of shape {list(inputs.shape)}", f"{type(error).__name__}: {reason}"
            ) from error
    if classes is not None and isinstance(output, torch.Tensor) and output.shape[1:2] < (classes,):
        got = f"an output of shape {list(output.shape)}"
        raise ConfigError("model", f"an output for each of the {classes} classes of the data", got)
    check_fit(nn.CrossEntropyLoss(), output, labels)


def make_optimizer(model: nn.Module, options: TrainOptions) -> Optimizer:
    """The optimizer that the options name, with the learning rate scaled to the global batch."""
    lr = scaled_lr(options.lr, options.global_batch, options.base_batch)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("model", "a model with parameters to train", options.model)
    if options.optimizer == "sgd":
        return SGD(parameters, lr, momentum=options.momentum, weight_decay=options.weight_decay)
    kind = Adam if options.optimizer == "adam" else AdamW
    return kind(parameters, lr, weight_decay=options.weight_decay)


def _schedule(options: TrainOptions, samples: int) -> Any:
    steps = steps_per_epoch(samples, options.global_batch)
    # With a base batch the warm-up begins at the learning rate that was chosen for it (Goyal et al. 2017, §2.2).
    start = min(1.0, options.base_batch / options.global_batch) if options.base_batch else 0.0
    warmup = round(options.warmup_epochs * steps)
    return make_schedule(options.schedule, options.epochs * steps, warmup, start)


def make_callbacks(options: TrainOptions) -> list[Callback]:
    """What the options ask for beside the training."""
    chosen: list[Callback] = [] if options.quiet else [Progress()]
    chosen += [_OptionsFile(options), CSVLog(), Curve(), Checkpoints(options.checkpoint_every)]
    if "tensorboard" in options.logs():
        chosen.append(TensorBoard())
    return chosen


class _OptionsFile(Callback):
    """Writes every option as it was resolved; not before a checkpoint that is gone on from has been accepted."""

    def __init__(self, options: TrainOptions) -> None:
        self._options = options

    def on_start(self, trainer: Trainer) -> None:
        import yaml

        comm, out = trainer.comm, trainer.out
        assert out is not None
        resolved = {"workers": str(comm.size), "device": comm.device.type, "out": str(out)}
        text = yaml.safe_dump({**self._options.as_dict(), **resolved}, sort_keys=False)
        try:
            atomic.write_text(out / "config.yaml", text)
        except OSError as error:
            raise ConfigError("out", "a folder that can be written", f"{out} ({error.strerror})") from None


@contextmanager
def _no_folder_for_nothing(trainer: Trainer, out: Path) -> Iterator[None]:
    """Remove the folders that were made for a run which fails before its first step."""
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        yield
    except LockstepError:
        if trainer.comm.rank == 0 and trainer.step.steps_done == 0:
            if out in made:
                shutil.rmtree(out, ignore_errors=True)
            for parent in made:
                with suppress(OSError):  # another run may have come to live in it
                    parent.rmdir()
        raise


def _finish(trainer: Trainer, out: Path) -> dict[str, Any]:
    names = trainer.comm.allgather_object(_device_name(trainer.comm.device))
    trainer.step.strategy.sync_buffers()
    history = trainer.history
    last = history[-1]
    result = {
        "test_accuracy": last.get("test_accuracy"),
        "test_loss": last.get("test_loss"),
        "train_loss": last["train_loss"],
        "epochs": len(history),
        "seconds_per_epoch": statistics.median(row["seconds"] for row in history),
        "samples_per_second": statistics.median(row["samples_per_second"] for row in history),
        "workers": trainer.comm.size,
        "devices": names,
        "global_batch": trainer.global_batch,
        "torch": str(torch.__version__),
        "fingerprint": fingerprint(trainer.model, trainer.optimizer),
    }

    def write() -> None:
        try:
            save_weights(trainer.model.state_dict(), out / "model.safetensors")
            atomic.write_json(out / "result.json", result)
        except OSError as error:
            raise LockstepError(f"{out}: the results could not be written: {error.strerror or error}") from None

    trainer.comm.on_rank0(write)
    return result


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
