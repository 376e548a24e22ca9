"""A whole training run from its options: data, model, optimizer, loop, and the files of the run folder."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..communicator import init
from ..errors import ConfigError, InterruptedRunError
from ..replicas import as_devices
from ..shards import steps_per_epoch
from .callbacks import Callback, Checkpoints, CSVLog, Curve, Progress, TensorBoard
from .job_files import RunFolder
from .options import TrainOptions
from .parts import build_model, load_data
from .prepare import prepare_model
from .schedules import Schedule, make_schedule, scaled_lr
from .trainer import Trainer

__all__ = ["run"]


def run(options: TrainOptions) -> dict[str, Any]:
    """Train as `options` say; called by every worker of the job.

    Args:
        options: checked; `out` is the run folder, made when everything else has been found to be in order, and
            `resume` a checkpoint or the folder of a run to go on from, or None.

    Returns:
        What `result.json` holds.

    Raises:
        LockstepError: one of its kinds, for anything that is wrong with options, data, model or files.
    """
    init(_device(options))
    train, test = load_data(options)
    folder = RunFolder(options)
    trainer = make_trainer(options, train, [folder, *make_callbacks(options)])
    with folder.removed_for_nothing(trainer), ExitStack() as stack:
        loader = stack.enter_context(closing(trainer.loader(train)))
        held_out = None if test is None else stack.enter_context(closing(trainer.loader(test, shuffle=False)))
        try:
            trainer.fit(loader, options.epochs, validate=held_out, resume=options.resume)
        except InterruptedRunError:
            if trainer.done:  # the signal came too late to end it early
                folder.write_results(trainer)
            raise
    return folder.write_results(trainer)


def _device(options: TrainOptions) -> str:
    """The kind of the worker's device; with a list of devices that of the first.

    Raises:
        ConfigError: when `device` and `devices` contradict each other.
    """
    listed = options.device_list()
    if listed is None:
        return options.device
    kind = as_devices(listed)[0].type
    if options.device not in ("auto", kind):
        raise ConfigError("devices", f"{options.device} in the first place, as in device", options.devices)
    return kind


def make_trainer(options: TrainOptions, train: Any, callbacks: list[Callback]) -> Trainer:
    """The trainer that the options ask for, with its model and optimizer.

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
        fixed_shapes=options.shards is not None,
    )
    return Trainer(
        model,
        make_optimizer(model, options),
        nn.CrossEntropyLoss(),
        options.global_batch,
        seed=options.seed,
        out=options.out,
        keep=options.keep,
        async_save=options.async_save,
        callbacks=callbacks,
        strategy=options.strategy,
        devices=options.device_list(),
        in_flight=options.in_flight,
        num_workers=options.loader_workers,
        allow_different=options.allow_different,
        shards=options.shards,
        threads=options.threads,
        replica_check=options.replica_check,
        precision=options.precision,
        accumulate=options.accumulate,
        clip_norm=options.clip_norm,
        schedule=_schedule(options, len(train)),
    )


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


def _schedule(options: TrainOptions, samples: int) -> Schedule:
    steps = steps_per_epoch(samples, options.global_batch)
    # With a base batch the warm-up begins at the learning rate that was chosen for it (Goyal et al. 2017, §2.2).
    start = min(1.0, options.base_batch / options.global_batch) if options.base_batch else 0.0
    warmup = round(options.warmup_epochs * steps)
    return make_schedule(options.schedule, options.epochs * steps, warmup, start)


def make_callbacks(options: TrainOptions) -> list[Callback]:
    """What the options ask for beside the training."""
    chosen: list[Callback] = [] if options.quiet else [Progress()]
    chosen += [CSVLog(), Curve(), Checkpoints(options.checkpoint_every)]
    if "tensorboard" in options.logs():
        chosen.append(TensorBoard())
    return chosen
