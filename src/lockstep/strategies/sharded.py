"""Data parallelism in which every worker holds a part of each parameter, of its gradient and of the optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..communicator import Communicator
from ..data.nested import map_tensors
from ..errors import ConfigError
from ..fingerprints import fingerprint_of
from .base import Strategy
from .buffers import MovingBuffers
from .consistency import broadcast_all, check_same_layout, check_same_tensors
from .distributed import Distributed
from .statistics import RunningStatistics
from .units import check_model, check_units, normalising, units
from .whole import as_parts, filled_model, filled_optimizer, optimizer_parts, replace_parameters, whole

__all__ = ["Sharded"]

_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Sharded(Distributed):
    """Trains one model on all workers with PyTorch's `fully_shard`.

    Every parameter is cut along its first dimension, a part for each worker, and so are its gradient and the
    optimizer's state (Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", SC
    2020). A *unit*, such as a block of a transformer, is gathered whole for its forward pass, dropped, and gathered
    again for its backward pass, whose gradients are averaged and cut at once. Every worker has to run the same units in
    the same order. Alone, nothing is cut and nothing is sent.

    With precision "bf16" or "fp16" units are gathered in that format, and gradients averaged in float32; layers with
    running statistics stay in float32.

    Args:
        comm: the workers.
        unit_names: the modules that are units, by their names in the model; chosen by size when None, see
            `lockstep.strategies.units`.
    """

    def __init__(self, comm: Communicator, unit_names: Sequence[str] | None = None) -> None:
        super().__init__(comm)
        self.in_step = self.in_parts = comm.size > 1
        self._unit_names, self._precision = unit_names, "fp32"
        self._made_mesh: DeviceMesh | None = None
        self._old: dict[str, nn.Parameter] = {}  # those that the optimizer has until `adopt`

    def in_shards(self, shards: int, threads: int | None) -> Strategy:
        """There is none: the sums of a reduce-scatter depend on the number of workers.

        Raises:
            ConfigError: always.
        """
        hint = "Its sums over workers are in no fixed order. strategy='distributed' gives the same bits with shards."
        raise ConfigError("shards", "none with strategy='sharded'", shards, hint)

    def check(self, optimizer: Optimizer, precision: str) -> None:
        """See that nothing but its groups tells `optimizer` which parameters are its own.

        Raises:
            ConfigError: when it has them elsewhere too, where they could not be exchanged for their parts.
        """
        self._precision = precision
        if self.comm.size > 1 and (place := _held_elsewhere(optimizer)):
            raise ConfigError(
                "optimizer",
                "one that has its parameters in param_groups alone, with strategy='sharded'",
                found=f"{type(optimizer).__name__}, which has some in its attribute {place} too",
                hint="Each is exchanged for this worker's part of it. "
                "Use an optimizer of torch.optim, or 'distributed'.",
            )

    def prepare(self, model: nn.Module) -> None:
        """Cut `model` over the workers, with rank 0's values; unit by unit, so that a device never has all of it.

        Raises:
            ConfigError: for a model that cannot be cut, or that is cut already.
            MismatchError: when the workers' models differ in their parameters or buffers.
        """
        if self.comm.size == 1:
            super().prepare(model)
            return
        _refuse_sharded(model)
        check_model(model)
        check_same_layout(model, self.comm)
        self._old = dict(model.named_parameters(remove_duplicate=False))
        chosen = units(model) if self._unit_names is None else check_units(model, self._unit_names)
        norms = [] if self._precision == "fp32" else normalising(model)
        for module in [*norms, *(model.get_submodule(name) for name in chosen), model]:
            self._cut(module, MixedPrecisionPolicy() if module in norms else self._policy())
        reduce_unused = getattr(model, "set_reduce_scatter_unused_params", None)  # since torch 2.13
        if reduce_unused is not None:
            reduce_unused(True)
        self._model, self._buffers = model, MovingBuffers(model, self.comm)
        self._statistics = RunningStatistics(model, self.comm.world.is_first)

    def _policy(self) -> MixedPrecisionPolicy:
        """The format in which a unit is gathered. Autocast alone would keep whole copies in it, cut nowhere."""
        dtype = _FORMATS.get(self._precision)
        if dtype is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def _cut(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Make `module` a unit, without what is one already."""
        comm = self.comm
        named = [*module.named_parameters(), *module.named_buffers()]
        left = [(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor)]
        for _, tensor in left:
            tensor.data = tensor.data.to(comm.device)
        broadcast_all([tensor for _, tensor in left], comm)
        check_same_tensors(left, comm)
        # Before the hook of `fully_shard`, which gathers for the backward pass: a change in place to a view drops it.
        module.register_forward_hook(_without_views)
        # Also the model's own: between passes every worker holds its parts, nothing else.
        fully_shard(module, mesh=self._mesh(), mp_policy=policy, reshard_after_forward=True)

    def _mesh(self) -> DeviceMesh:
        if self._made_mesh is None:
            assert self.comm.group is not None
            self._made_mesh = DeviceMesh.from_group(self.comm.group, self.comm.device.type)
        return self._made_mesh

    def adopt(self, optimizer: Optimizer) -> None:
        """Let the optimizer train this worker's parts of its parameters, and cut the state that it has of them."""
        if self._model is not None and self._old:
            new = dict(self._model.named_parameters(remove_duplicate=False))
            replace_parameters(optimizer, {id(p): new[name] for name, p in self._old.items()})
            self._old = {}

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module` itself: the model in it gathers, averages and cuts by itself."""
        return module

    def model_state(self, model: nn.Module, wanted: bool = True) -> dict[str, Any]:
        """The model's state dict, of whole tensors on the CPU; with None in their places where it is not `wanted`."""
        return {name: whole(value, wanted) for name, value in model.state_dict().items()}

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer, wanted: bool = True) -> dict[str, Any]:
        """The optimizer's state dict, of whole tensors on the CPU; with None in their places as in `model_state`."""
        found: dict[str, Any] = whole(optimizer.state_dict(), wanted)
        return found

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take up this worker's part of a whole state dict."""
        like, filled = model.state_dict(), filled_model(model, state, self.comm)
        model.load_state_dict({name: as_parts(value, like.get(name)) for name, value in filled.items()})

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take up this worker's part of a whole state dict."""
        optimizer.load_state_dict(optimizer_parts(optimizer, filled_optimizer(optimizer, state, self.comm)))

    def fingerprint(self, model: nn.Module, optimizer: Optimizer) -> str:
        """That of the whole tensors."""
        entries = {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict()}
        return fingerprint_of(whole(entries), self.optimizer_state(model, optimizer))


def _without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    return map_tensors(lambda tensor: tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor, output)


def _refuse_sharded(model: nn.Module) -> None:
    """A model is cut once: its parameters of then are gone, and one that has come since would be cut otherwise."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        hint = "Train it with one Trainer, all layers in it; or make it anew and load the weights that were saved."
        raise ConfigError(
            "model", "one whose parameters are whole", found="one that is spread over workers already", hint=hint
        )


def _held_elsewhere(optimizer: Optimizer) -> str | None:
    """The attribute, other than its groups and its state, in which an optimizer has parameters, if any."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        inside = value if isinstance(value, (list, tuple, set)) else [value]
        if name not in ("param_groups", "state") and any(id(item) in own for item in inside):
            return name
    return None
