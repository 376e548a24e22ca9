"""Records of the first steps of a script: what each optimizer was about to do, and from which
samples.
"""

from __future__ import annotations

import msgspec


class TensorRecord(msgspec.Struct, frozen=True):
    """A tensor, in short.

    Attributes:
        digest: of all its bits.
        numel: number of its elements.
        norm: its 2-norm.
        sample: the values of some of its elements, always the same ones.
    """

    digest: str
    numel: int
    norm: float
    sample: tuple[float, ...]


class StepRecord(msgspec.Struct, frozen=True):
    """An optimizer and its tensors when its ``step()`` is called; clipping and reduction are done
    by then.

    Attributes:
        optimizer: the number of the optimizer, in the order of their first steps.
        step: the number of this optimizer's step, from 0.
        hyperparameters: those of each parameter group, as texts by name.
        parameters: by name, before the update.
        gradients: by the parameter's name.
        buffers: of all models, and their parameters that are not this optimizer's, by name.
        samples: digests of the samples that models in training mode have been given on this rank
            since the step before, in their order; empty if their inputs are no tensors.
        passes: number of forward passes of models in training mode on this rank since the step
            before.
        targets: number of targets that mean losses of torch have counted on this rank since the
            step before;
            0 if there were none that can ignore some.
        draws: the digest of the state of torch's generator before the first of these forward
            passes.
        has_part: whether this rank has the gradients of some parameters only, and others have the
            rest, as with ``shard_optimizer=True``.
    """

    optimizer: int
    step: int
    hyperparameters: tuple[dict[str, str], ...]
    parameters: dict[str, TensorRecord]
    gradients: dict[str, TensorRecord]
    buffers: dict[str, TensorRecord]
    samples: tuple[str, ...] = ()
    passes: int = 0
    targets: int = 0
    draws: str = ""
    has_part: bool = False


class RunRecord(msgspec.Struct, frozen=True):
    """The steps of one rank.

    Attributes:
        rank: the rank.
        workers: number of workers of the run.
        steps: of all optimizers, in order.
        layers: the classes of the models' layers.
        low_precision: whether some pass ran with autocast, or some gradient has a format of 16
            bits.
        has_dropout: whether dropout has set values to zero.
        has_batch_statistics: whether batch norm has used the statistics of this rank's part of a
            batch.
        has_draws: whether a forward pass has drawn numbers from torch's generator of the CPU.
        divides_batches: whether a batch sampler of torch divides the data set into batches.
        repeated_order: whether a `DistributedSampler` has shuffled two epochs alike.
    """

    rank: int
    workers: int
    steps: tuple[StepRecord, ...]
    layers: tuple[str, ...] = ()
    low_precision: bool = False
    has_dropout: bool = False
    has_batch_statistics: bool = False
    has_draws: bool = False
    divides_batches: bool = False
    repeated_order: bool = False
