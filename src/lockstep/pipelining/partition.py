"""Partition of a model into pipeline stages, of an `nn.Sequential` by layers and of other models by
tracing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .. import arguments
from ..communicator import Communicator, init
from ..communicator.groups import backends_of
from ..errors import ConfigError
from ..parallel.module_sync import sync_module
from .pipe import SCHEDULES, Pipeline


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Return the starts of `parts` contiguous, nonempty parts whose largest total weight is
    minimal.

    Among equal solutions the earlier parts have fewer layers.

    Args:
        weights: the weights of the layers, in order.
        parts: number of parts, at most the number of layers.
    """
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    @cache
    def best(start: int, remaining: int) -> tuple[int, tuple[int, ...]]:
        if remaining == 1:
            return sums[-1] - sums[start], (start,)
        solutions = []
        for stop in range(start + 1, len(weights) - remaining + 2):
            heaviest, rest = best(stop, remaining - 1)
            solutions.append((max(heaviest, sums[stop] - sums[start]), (start, *rest)))
        return min(solutions, key=lambda solution: solution[0])

    return list(best(0, parts)[1])


def stage_starts(
    layers: Mapping[str, nn.Module | None], stages: int, split: Sequence[str] | None
) -> list[int]:
    """Return the first layer of each stage: given by `split`, or such that the numbers of
    parameters are balanced.

    Raises:
        ConfigError: for more stages than layers, or an invalid `split`.
    """
    names = list(layers)
    if stages > len(names):
        raise ConfigError(
            "stages", f"at most one for each of the model's {len(names)} layers", stages
        )
    if split is None:
        return balanced([_elements(layer) for layer in layers.values()], stages)
    if unknown := [name for name in split if name not in names]:
        raise ConfigError("split", f"names of the model's layers ({', '.join(names)})", unknown[0])
    starts = [0, *(names.index(name) for name in split)]
    if any(start >= following for start, following in pairwise(starts)):
        raise ConfigError(
            "split", "layers in the order of the model, none twice, and not its first", list(split)
        )
    return starts


def _elements(layer: nn.Module | None) -> int:
    return 0 if layer is None else sum(p.numel() for p in layer.parameters())


def split_sequential(model: nn.Sequential, starts: Sequence[int]) -> list[nn.Sequential]:
    """Return the stages of `model`; layers keep their names."""
    items = list(model._modules.items())
    stages = []
    for start, stop in zip(starts, [*starts[1:], len(items)], strict=True):
        stage = nn.Sequential()
        stage._modules.update(items[start:stop])
        stage.training = model.training
        stages.append(stage)
    return stages


def check_nothing_shared(stages: Iterable[nn.Module]) -> None:
    """Check that no two stages use the same parameter or buffer.

    Raises:
        ConfigError: naming the first that is shared.
    """
    owner: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            first, its_name = owner.setdefault(id(tensor), (number, name))
            if first != number:
                got = f"{its_name} of stage {first}, which stage {number} has as {name}"
                raise ConfigError(
                    "model", "stages without a parameter or buffer in common", found=got
                )


class _TwoModes(nn.Module):
    """The traces of a stage in training and in evaluation mode, with the same parameters: a trace
    has one mode.
    """

    def __init__(self, training: nn.Module, evaluating: nn.Module) -> None:
        super().__init__()
        # in lists, to add no prefix to names
        self._in_training = [training]
        self._in_evaluation = [evaluating]
        self._modules.update(training._modules)
        self._parameters.update(training._parameters)
        self._buffers.update(training._buffers)

    def forward(self, *values: Any) -> Any:
        return (self._in_training if self.training else self._in_evaluation)[0](*values)

    def train(self, mode: bool = True) -> _TwoModes:
        self.training = mode  # the traces themselves ignore it
        return self


def split_traced(model: nn.Module, split: Sequence[str], example: torch.Tensor) -> list[nn.Module]:
    """Trace `model`, and return its stages; a new stage begins with each of the modules named in
    `split`.

    Args:
        model: a model that `torch.export` can trace, on its device; its parameters keep their
            names.
        split: names of modules, in the order of execution.
        example: a micro-batch, on the same device. The stages accept micro-batches of this shape
            only.

    Raises:
        ConfigError: for unknown names, a model that cannot be traced, or a stage that uses more
            than the output of the previous one.
    """
    known = [name for name, _ in model.named_modules() if name]
    if unknown := [name for name in split if name not in known]:
        raise ConfigError("split", f"names of the model's modules ({', '.join(known)})", unknown[0])
    mode = model.training
    try:
        both = [_trace(model.train(), split, example), _trace(model.eval(), split, example)]
    finally:
        model.train(mode)
    return [_TwoModes(*pair).train(mode) for pair in zip(*both, strict=True)]


def _trace(model: nn.Module, split: Sequence[str], example: torch.Tensor) -> list[nn.Module]:
    from torch.distributed.pipelining import SplitPoint
    from torch.distributed.pipelining import pipeline as trace_pipeline

    try:
        with (
            warnings.catch_warnings(),
            _restore_forward([model.get_submodule(name) for name in split]),
        ):
            warnings.simplefilter("ignore")
            pipe = trace_pipeline(
                model, (example,), split_spec=dict.fromkeys(split, SplitPoint.BEGINNING)
            )
    except Exception as error:
        cause = error.__cause__ or error
        got = f"{type(cause).__name__}: " + " ".join(str(cause).split("\n\n")[0].split())
        hint = "Make it an nn.Sequential, which is not traced."
        raise ConfigError(
            "model", "one that torch.export can trace", found=got, hint=hint
        ) from error
    stages = dict(pipe.split_gm.named_children())
    expected = [f"submod_pp_{n}" for n in range(len(split) + 1)]
    if sorted(stages) != sorted(expected):
        raise ConfigError("split", "modules that run after the model's first one", list(split))
    _refuse_skips(pipe)
    return [stages[name] for name in expected]


@contextmanager
def _restore_forward(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore `forward` of `modules` after a `with` block: torch replaces it to mark split points,
    and leaves it so.
    """
    replaced = [vars(module).get("forward") for module in modules]
    try:
        yield
    finally:
        for module, forward in zip(modules, replaced, strict=True):
            vars(module).pop("forward", None)
            vars(module).pop("_orig_forward", None)
            if forward is not None:
                vars(module)["forward"] = forward


def _refuse_skips(pipe: Any) -> None:
    """Check that each stage uses the output of the previous stage only, and the first stage the
    input only.

    Raises:
        ConfigError: naming the first stage that uses other values.
    """
    previous: Any = None
    for node in pipe.split_gm.graph.nodes:
        if node.op == "placeholder":
            previous = node
        elif node.op == "call_module":
            sources = {_source(argument) for argument in node.all_input_nodes}
            if sources - {previous}:
                hint = "Choose split points outside of residual connections."
                raise ConfigError(
                    "split",
                    f"stages that use the previous one alone ({node.target})",
                    found="others too",
                    hint=hint,
                )
            previous = node


def _source(node: Any) -> Any:
    """Return the stage that computes a value, which may be one of its several outputs."""
    return node.args[0] if node.op == "call_function" else node


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
    """Split `model` into stages, one for each worker, and return this worker's stage.

    The stages process a batch in *micro-batches*, so that all workers compute at the same time
    (Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism",
    NeurIPS 2019). Rank 0's values of the model are used by all workers. The model itself must not
    be used afterwards: layers of other stages lose their values.

    Experimental: may change in any release.

    Args:
        model: an `nn.Sequential`, or another model with `split` and `example`.
        stages: number of stages, which must equal the number of workers; None means that number.
        microbatches: number of micro-batches in a batch; when None, the largest divisor of the
            batch size that is at most four times the number of stages.
        schedule: "gpipe", all forward passes and then all backward passes; or "1f1b", which runs
            each backward pass as early as possible and keeps fewer activations (Narayanan et al.,
            "PipeDream", SOSP 2019).
        split: the names of the first layers of the second and later stages. When None, layers are
            assigned so that the numbers of parameters are balanced.
        example: a micro-batch, for a model other than an `nn.Sequential`: the model is traced on it
            with `torch.export`, and all micro-batches must have its shape.
        comm: communicator over the workers; that of `init()` when None.

    Raises:
        ConfigError: for invalid or inconsistent arguments.
        MismatchError: if the workers' models differ.
    """
    comm = comm or init()
    count = _check(model, stages, microbatches, schedule, split, example, comm)
    layers = _layers(model)
    starts = [] if layers is None else stage_starts(layers._modules, count, split)
    if layers is None or (comm.group is not None and "cpu" not in backends_of(comm.group)):
        # without a backend for the CPU, tensors there cannot be sent
        model.to(comm.device)
    sync_module(model, comm)
    names = list(model.state_dict())
    parts: Sequence[nn.Module] = [model]
    if layers is not None:
        parts = split_sequential(layers, starts)
    elif example is not None and count > 1:
        parts = split_traced(model, split or [], example.to(comm.device))
    check_nothing_shared(parts)
    traced = {name for part in parts for name in part.state_dict()}
    unused = [name for name in names if name not in traced]
    if unused:  # a trace leaves them out
        raise ConfigError("model", "parameters that all take part in a pass", unused[0])
    stage = parts[comm.rank].to(comm.device)
    for other in parts:
        if other is not stage:
            other.to("meta")
    return Pipeline(
        stage, comm, names, schedule, microbatches, None if example is None else len(example)
    )


def _layers(model: nn.Module) -> nn.Sequential | None:
    """Return `model` if it is an `nn.Sequential` with the standard forward pass, otherwise None."""
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return model
    return None


def _check(
    model: Any,
    stages: Any,
    microbatches: Any,
    schedule: Any,
    split: Any,
    example: Any,
    comm: Communicator,
) -> int:
    """Check the types and the consistency of the arguments of `pipeline`; returns the number of
    stages.
    """
    arguments.instance("model", model, nn.Module, "a torch.nn.Module")
    count = comm.size if stages is None else arguments.whole("stages", stages, least=1)
    if microbatches is not None:
        arguments.whole("microbatches", microbatches, least=1)
    arguments.choice("schedule", schedule, SCHEDULES)
    if count != comm.size:
        hint = f"Start {count} workers: lockstep run -np {count} …"
        raise ConfigError("stages", f"one for each of the {comm.size} workers", count, hint)
    if isinstance(split, str) or (split is not None and len(split) != count - 1):
        got = split if isinstance(split, str) else f"{len(split)}: {', '.join(map(str, split))}"
        raise ConfigError(
            "split", f"{count - 1} names, with which stages 1 to {count - 1} begin", found=got
        )
    if _layers(model) is None:
        if not isinstance(example, torch.Tensor) or (split is None and count > 1):
            hint = "An nn.Sequential needs neither."
            raise ConfigError(
                "model",
                "an nn.Sequential, or another with split= and example=",
                found=_missing(example),
                hint=hint,
            )
    elif example is not None:
        raise ConfigError(
            "example",
            "none with an nn.Sequential, which is not traced",
            found=type(example).__name__,
        )
    return count


def _missing(example: Any) -> str:
    return (
        "none of split"
        if isinstance(example, torch.Tensor)
        else f"{type(example).__name__} as example"
    )
