"""Why two runs have parted, as far as can be told from where they did (pure)."""

from __future__ import annotations

from .comparing import Parting
from .recording import Record

__all__ = ["likely_cause"]

_RANDOM = ("Dropout", "DropPath", "StochasticDepth", "RReLU", "GumbelSoftmax")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def likely_cause(one: Record, other: Record, parting: Parting, has_shards: bool, again: Parting | None) -> str:
    """A sentence or two on the likely cause, and what to do.

    Args:
        one: the record that others are compared with.
        other: the one that differs.
        parting: where.
        has_shards: whether the training was cut into shards.
        again: where a second run with as many workers as `one` had parted from it; None where it did not.
    """
    if again is not None:
        return _not_repeatable(one, again)
    if not has_shards:
        return (
            "without shards a worker computes its whole part in one pass. The size of that part depends on the number "
            "of workers, kernels choose their order of summation by it, and gradients are added in another order. "
            "--shards is what keeps them."
        )
    different = [name for name, value in one.conditions.items() if other.conditions.get(name) != value]
    if different:
        name = different[0]
        return f"{name}: {one.conditions[name]} against {other.conditions.get(name)}. Set it to the same for all runs."
    if parting.tensors and parting.tensors[0].rpartition(".")[2] in _STATISTICS and not parting.loss_differs:
        return (
            f"a layer's running statistics ({parting.tensors[0]}): the model changes them in another place than the "
            "forward pass of a shard, or outside of it."
        )
    if parting.loss_differs:
        return _forward(one)
    return (
        "the losses are the same and the gradients are not: an operation of the backward pass without a fixed order on "
        "this device, or a hook that looks at more than its own shard."
    )


def _not_repeatable(one: Record, again: Parting) -> str:
    where = again.tensors[0] if again.tensors else "the loss"
    return (
        f"not the number of workers: two runs with {one.workers} have parted too, at step {again.step}, in {where}. "
        "Something draws random numbers that Lockstep does not seed (a generator of its own, the time, os.urandom), "
        "or an operation has no fixed order."
    )


def _forward(one: Record) -> str:
    random = [layer for layer in one.layers if layer.startswith(_RANDOM)]
    layers = f" The model has {', '.join(random)}." if random else ""
    return (
        "the loss differs before anything else does, so the forward pass or its data do: random numbers that do not "
        "come from torch's generators, an augmentation that is not keyed by (seed, epoch, sample), or a model that "
        f"keeps something from one batch to the next.{layers}"
    )
