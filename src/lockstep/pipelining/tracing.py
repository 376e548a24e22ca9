"""Cuts a model that is no sequence of layers, by following one pass of an example through it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError

__all__ = ["traced"]


class _TwoModes(nn.Module):
    """A stage as it is in training and, of the same parameters, as it is in evaluation: a trace is of one of them."""

    def __init__(self, training: nn.Module, evaluating: nn.Module) -> None:
        super().__init__()
        self._in_training, self._in_evaluation = [training], [evaluating]  # in lists, so that names stay the model's
        self._modules.update(training._modules)
        self._parameters.update(training._parameters)
        self._buffers.update(training._buffers)

    def forward(self, *values: Any) -> Any:
        return (self._in_training if self.training else self._in_evaluation)[0](*values)

    def train(self, mode: bool = True) -> _TwoModes:
        self.training = mode  # the traces have no modes
        return self


def traced(model: nn.Module, split: Sequence[str], example: torch.Tensor) -> list[nn.Module]:
    """The stages of `model`; a new one begins with each of the modules named in `split`.

    Args:
        model: what `torch.export` can follow, on its device; its parameters keep their names.
        split: names of modules, in the order in which a pass comes by them.
        example: a micro-batch, on the same device. The stages take micro-batches of its shape alone.

    Raises:
        ConfigError: for names that it has not, a model that cannot be followed, or a stage that needs more than what
            the one before it gives.
    """
    known = [name for name, _ in model.named_modules() if name]
    if unknown := [name for name in split if name not in known]:
        raise ConfigError("split", f"names of the model's modules ({', '.join(known)})", unknown[0])
    mode = model.training
    try:
        both = [_follow(model.train(), split, example), _follow(model.eval(), split, example)]
    finally:
        model.train(mode)
    return [_TwoModes(*pair).train(mode) for pair in zip(*both, strict=True)]


def _follow(model: nn.Module, split: Sequence[str], example: torch.Tensor) -> list[nn.Module]:
    from torch.distributed.pipelining import SplitPoint
    from torch.distributed.pipelining import pipeline as follow

    try:
        with warnings.catch_warnings(), _as_they_were([model.get_submodule(name) for name in split]):
            warnings.simplefilter("ignore")
            pipe = follow(model, (example,), split_spec=dict.fromkeys(split, SplitPoint.BEGINNING))
    except Exception as error:
        cause = error.__cause__ or error
        got = f"{type(cause).__name__}: " + " ".join(str(cause).split("\n\n")[0].split())
        hint = "Make it an nn.Sequential, whose layers are taken as they are."
        raise ConfigError("model", "one that torch.export can follow", found=got, hint=hint) from error
    found, wanted = dict(pipe.split_gm.named_children()), [f"submod_pp_{number}" for number in range(len(split) + 1)]
    if sorted(found) != sorted(wanted):
        raise ConfigError("split", "modules that a pass comes by after the model's first", list(split))
    _refuse_skips(pipe)
    return [found[name] for name in wanted]


@contextmanager
def _as_they_were(modules: Sequence[nn.Module]) -> Iterator[None]:
    """To mark where a stage begins, torch puts another forward pass in the place of a module's, and leaves it there."""
    before = [vars(module).get("forward") for module in modules]
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            vars(module).pop("forward", None)
            vars(module).pop("_orig_forward", None)
            if own is not None:
                vars(module)["forward"] = own


def _refuse_skips(pipe: Any) -> None:
    """Each stage may use what the one before gives, the first the input, and nobody else anything."""
    before: Any = None
    for node in pipe.split_gm.graph.nodes:
        if node.op == "placeholder":
            before = node
        elif node.op == "call_module":
            sources = {_source(argument) for argument in node.all_input_nodes}
            if sources - {before}:
                hint = "Choose split points between which a single path leads, outside of residual connections."
                raise ConfigError(
                    "split", f"stages that use the one before alone ({node.target})", found="others too", hint=hint
                )
            before = node


def _source(node: Any) -> Any:
    """The stage that a value comes from, which may be one of several that it gives."""
    return node.args[0] if node.op == "call_function" else node
