"""Makes a pipeline of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..communicator import Communicator, init
from ..communicator.place import carriers_of
from ..errors import ConfigError, unknown_name
from ..strategies.consistency import make_same
from .cutting import begins, refuse_shared, sequence
from .pipe import Pipeline
from .schedules import SCHEDULES
from .tracing import traced

__all__ = ["pipeline"]


def pipeline(
    model: nn.Module,
    stages: int | None = None,
    *,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    split: Sequence[str] | None = None,
    example: torch.Tensor | None = None,
    comm: Communicator | None = None,
) -> Pipeline:
    """Cut `model` into stages, one for each worker, and keep this worker's alone.

    A batch goes through the stages in parts, its *micro-batches*, so that all workers have something to do (Huang et
    al., "GPipe: Efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019). Rank 0's values
    of the model are used by all. The model itself is used up: the layers of other stages lose their values.

    Args:
        model: an `nn.Sequential`, or any other with `split` and `example`.
        stages: as many as there are workers; None is that.
        microbatches: into how many a batch is cut; when None the largest number up to four times the stages that
            divides it.
        schedule: "gpipe", all forward passes and then all backward passes; or "1f1b", in which a backward pass follows
            as soon as it can, so that less has to be kept (Narayanan et al., "PipeDream", SOSP 2019).
        split: the layers, by their names, with which the second and later stages begin. When None, layers are dealt out
            so that the numbers of parameters are alike.
        example: for a model that is no `nn.Sequential`: a micro-batch. One pass of it is followed with `torch.export`,
            and all micro-batches are of its shape then.
        comm: the workers; those of `init()` when None.

    Raises:
        ConfigError: for values that cannot be used, or that do not fit each other.
        MismatchError: when the workers' models differ.
    """
    comm = comm or init()
    count = _check(model, stages, microbatches, schedule, split, example, comm)
    layers = _layers(model)
    starts = [] if layers is None else begins(layers._modules, count, split)
    if layers is None or not _carries_cpu(comm):
        model.to(comm.device)
    make_same(model, comm)
    names = list(model.state_dict())
    parts: Sequence[nn.Module] = [model]
    if layers is not None:
        parts = sequence(layers, starts)
    elif example is not None and count > 1:
        parts = traced(model, split or [], example.to(comm.device))
    refuse_shared(parts)
    _refuse_left(names, parts)
    own = parts[comm.rank].to(comm.device)
    for other in parts:
        if other is not own:
            other.to("meta")
    return Pipeline(own, comm, names, schedule, microbatches, None if example is None else len(example))


def _layers(model: nn.Module) -> nn.Sequential | None:
    """`model` where it is a sequence of layers and nothing more."""
    plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    return model if plain and isinstance(model, nn.Sequential) else None


def _check(
    model: Any, stages: Any, microbatches: Any, schedule: Any, split: Any, example: Any, comm: Communicator
) -> int:
    """See that the arguments of `pipeline` are of their kinds and fit each other; returns the number of stages."""
    if not isinstance(model, nn.Module):
        raise ConfigError("model", "a torch.nn.Module", found=type(model).__name__)
    count = comm.size if stages is None else _number("stages", stages)
    if microbatches is not None:
        _number("microbatches", microbatches)
    if schedule not in SCHEDULES:
        raise unknown_name("schedule", schedule, SCHEDULES)
    if count != comm.size:
        hint = f"Start {count} workers: lockstep run -np {count} …"
        raise ConfigError("stages", f"one for each of the {comm.size} workers", count, hint)
    if isinstance(split, str) or (split is not None and len(split) != count - 1):
        got = split if isinstance(split, str) else f"{len(split)}: {', '.join(map(str, split))}"
        raise ConfigError("split", f"{count - 1} names, with which stages 1 to {count - 1} begin", found=got)
    if _layers(model) is None:
        if not isinstance(example, torch.Tensor) or (split is None and count > 1):
            hint = "An nn.Sequential needs neither."
            raise ConfigError(
                "model", "an nn.Sequential, or another with split= and example=", found=_missing(example), hint=hint
            )
    elif example is not None:
        raise ConfigError("example", "none with an nn.Sequential, which is not traced", found=type(example).__name__)
    return count


def _refuse_left(names: Sequence[str], parts: Sequence[nn.Module]) -> None:
    """A trace leaves out what a pass does not come by, and the state would not be whole."""
    found = {name for part in parts for name in part.state_dict()}
    if left := [name for name in names if name not in found]:
        raise ConfigError("model", "parameters that all take part in a pass", left[0])


def _missing(example: Any) -> str:
    return "none of split" if isinstance(example, torch.Tensor) else f"{type(example).__name__} as example"


def _number(argument: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(argument, "a whole number of at least 1", value)
    return int(value)


def _carries_cpu(comm: Communicator) -> bool:
    return comm.group is None or "cpu" in carriers_of(comm.group)
