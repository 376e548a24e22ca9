"""Fully sharded data parallelism (FSDP2): each worker holds a shard of parameters, gradients and
optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ..communicator import Communicator
from ..errors import ConfigError
from .distributed import Distributed
from .fingerprints import fingerprint_of
from .full_state import (
    full_tensors,
    load_model,
    load_optimizer,
    read_optimizer_state,
    replace_parameters,
    shard_optimizer_state,
)
from .module_sync import broadcast_tensors, check_same_layout, check_same_tensors
from .nested import map_tensors
from .strategy import Strategy

__all__ = ["Sharded", "batch_norm_layers", "check_wrap_modules", "wrap_policy"]


# Elements. The memory that a smaller unit saves (256 KiB in float32) is not worth separate
# collectives.
MIN_UNIT_SIZE = 1 << 16
# The children of a module with more than 1 / PART of the model's elements are searched for smaller
# units.
PART = 4

# Their forward passes call their children; other layers of torch may use their children's
# parameters directly, as nn.MultiheadAttention does.
_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


def wrap_policy(model: nn.Module, min_size: int = MIN_UNIT_SIZE) -> list[str]:
    """Return the names of the modules to be FSDP units, inner before outer; the rest of the model
    is the root unit.

    A unit is the largest module with at most a quarter of the model's elements, at least `min_size`
    elements, and no parameter that a module outside of it shares. The parameters of a larger module
    that are in none of its units form a unit themselves if they are large enough.

    Args:
        model: the model; only its structure is used.
        min_size: number of elements.
    """
    return list(_WrapSearch(model, min_size).units(model, ""))


class _WrapSearch:
    """A search for the units of `model`, see `wrap_policy`."""

    def __init__(self, model: nn.Module, min_size: int) -> None:
        self._min_size = min_size
        self._limit = sum(p.numel() for p in model.parameters()) // PART
        self._owners: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(p), []).append(name)
        self._assigned: set[int] = set()

    def units(self, module: nn.Module, name: str) -> Iterator[str]:
        """Yield the names of the units within `module`, whose own name is `name`."""
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            # a layer of torch.nn does not call its children, unless it is a container
            calls_children = isinstance(child, _CONTAINERS) or not type(
                child
            ).__module__.startswith("torch.nn.")
            if self._unassigned_size(child) > self._limit and calls_children:
                yield from self.units(child, full)
            large = self._unassigned_size(child) >= self._min_size
            if large and _has_forward(child) and self.shares_nothing(child, full):
                self._assigned.update(id(p) for p in child.parameters())
                yield full

    def _unassigned_size(self, module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if id(p) not in self._assigned)

    def shares_nothing(self, module: nn.Module, name: str) -> bool:
        """Return whether no parameter of `module` is also one of a module outside of it."""
        prefix = f"{name}."
        return all(
            owner.startswith(prefix) for p in module.parameters() for owner in self._owners[id(p)]
        )


def _has_forward(module: nn.Module) -> bool:
    """Return whether the module has a forward pass that is surely called; a program may loop over a
    Sequential.
    """
    return type(module).forward is not nn.Module.forward and type(module) is not nn.Sequential


def batch_norm_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers with parameters and running statistics; the parameters need the statistics'
    dtype.
    """
    layers = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    return [layer for layer in layers if list(layer.parameters(recurse=False))]


def check_wrap_modules(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Check the user's choice of units, and return their `names` in the order of wrapping: inner
    before outer.

    Raises:
        ConfigError: for an unknown name, or a module that shares a parameter with a module outside
            of it.
    """
    search = _WrapSearch(model, 0)
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            examples = ", ".join([known for known in modules if known][:3])
            expected = f"names of the model's modules, such as {examples or 'none, as it has none'}"
            raise ConfigError("unit_names", expected, name)
        if not _has_forward(modules[name]) and not isinstance(modules[name], nn.Sequential):
            raise ConfigError(
                "unit_names",
                "modules with a forward pass",
                found=f"{name}, a {type(modules[name]).__name__}",
            )
        if not search.shares_nothing(modules[name], name):
            raise ConfigError("unit_names", "modules that share no parameter with others", name)
    return sorted(dict.fromkeys(names), key=lambda name: -name.count("."))


def check_model(model: nn.Module) -> None:
    """Check that a model's parameters can be sharded.

    Raises:
        ConfigError: naming the first that cannot be.
    """
    sparse = [
        n
        for n, m in model.named_modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
    ]
    if sparse:
        raise ConfigError(
            "model",
            "embeddings with sparse=False, with strategy='sharded'",
            found=f"sparse=True of {sparse[0]}",
        )
    dtypes: dict[torch.dtype, str] = {}
    for name, p in model.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            hint = (
                "It would see a shard of the gradient, if anything. "
                "optimizer.register_step_pre_hook() sees them all."
            )
            raise ConfigError(
                "model",
                "parameters without hooks, with strategy='sharded'",
                found=f"one of {name}",
                hint=hint,
            )
        if p.dim() == 0:
            hint = "Give it one dimension, of size 1."
            raise ConfigError(
                "model",
                "parameters with a dimension to shard",
                found=f"{name}, a scalar",
                hint=hint,
            )
        if p.requires_grad:
            dtypes.setdefault(p.dtype, name)
    if len(dtypes) > 1:
        names = ", ".join(f"{name} of {dtype}" for dtype, name in dtypes.items())
        raise ConfigError(
            "model", "trained parameters of one dtype, with strategy='sharded'", found=names
        )


_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Sharded(Distributed):
    """Trains one model on all workers with PyTorch's `fully_shard`.

    Every parameter is sharded along its first dimension over the workers, and so are its gradient
    and the optimizer's state (Rajbhandari et al., "ZeRO: Memory optimizations toward training
    trillion parameter models", SC 2020). A *unit*, such as a block of a transformer, is
    all-gathered for its forward pass, freed, and all-gathered again for its backward pass, whose
    gradients are reduce-scattered. Every worker must run the same units in the same order. With a
    single worker nothing is sharded and nothing is sent.

    With precision "bf16" or "fp16" units are gathered in that format, and gradients are averaged in
    float32; layers with running statistics stay in float32.

    Args:
        comm: communicator over the workers.
        unit_names: the names of the modules that are units; chosen by `wrap_policy` when None.
    """

    backward_name = "backward pass"  # it gathers parameters as well
    can_regroup = False
    can_shard_optimizer = False

    def __init__(self, comm: Communicator, unit_names: Sequence[str] | None = None) -> None:
        super().__init__(comm)
        self.collective_forward = self.sharded_state = comm.size > 1
        self._unit_names = unit_names
        self._precision = "fp32"
        self._device_mesh: DeviceMesh | None = None
        self._model: nn.Module | None = None
        self._full_parameters: dict[
            str, nn.Parameter
        ] = {}  # the optimizer has these until `update_optimizer`

    def with_virtual_workers(self, virtual_workers: int, threads: int | None) -> Strategy:
        """Raise an error: the sums of a reduce-scatter depend on the number of workers.

        Raises:
            ConfigError: always.
        """
        hint = (
            "Its sums over workers have no fixed order. strategy='distributed' gives the same bits."
        )
        raise ConfigError("virtual_workers", "none with strategy='sharded'", virtual_workers, hint)

    def check(self, optimizer: Optimizer, precision: str) -> None:
        """Check that `optimizer` keeps its parameters in its groups only.

        Raises:
            ConfigError: if another attribute holds parameters, which could not be replaced by their
                shards.
        """
        self._precision = precision
        if self.comm.size > 1 and (attribute := _attribute_with_parameters(optimizer)):
            raise ConfigError(
                "optimizer",
                "one that has its parameters in param_groups alone, with strategy='sharded'",
                found=f"{type(optimizer).__name__}, which has some in its attribute {attribute} "
                "too",
                hint="Each parameter is replaced by this worker's shard of it. "
                "Use an optimizer of torch.optim, or 'distributed'.",
            )

    def prepare(self, model: nn.Module) -> None:
        """Shard `model` over the workers, with rank 0's values; unit by unit, so that a device
        never holds all of it.

        Raises:
            ConfigError: for a model that cannot be sharded, or that is sharded already.
            MismatchError: if the workers' models differ in their parameters or buffers.
        """
        if self.comm.size == 1:
            super().prepare(model)
            return
        _refuse_sharded(model)
        check_model(model)
        check_same_layout(model, self.comm)
        self._full_parameters = dict(model.named_parameters(remove_duplicate=False))
        names = (
            wrap_policy(model)
            if self._unit_names is None
            else check_wrap_modules(model, self._unit_names)
        )
        norms = [] if self._precision == "fp32" else batch_norm_layers(model)
        for module in [*norms, *(model.get_submodule(name) for name in names), model]:
            self._shard(module, MixedPrecisionPolicy() if module in norms else self._policy())
        reduce_unused = getattr(model, "set_reduce_scatter_unused_params", None)  # since torch 2.13
        if reduce_unused is not None:
            reduce_unused(True)
        self._model = model
        self._make_buffers(model)

    def _policy(self) -> MixedPrecisionPolicy:
        """Return the policy that gathers a unit in the training precision; autocast alone would
        keep full copies.
        """
        dtype = _FORMATS.get(self._precision)
        if dtype is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    def _shard(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Make `module`, without the units in it, a unit."""
        comm = self.comm
        named = [*module.named_parameters(), *module.named_buffers()]
        unsharded = [(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor)]
        for _, tensor in unsharded:
            tensor.data = tensor.data.to(comm.device)
        broadcast_tensors([tensor for _, tensor in unsharded], comm)
        check_same_tensors(unsharded, comm)
        # Before the hook of `fully_shard` that gathers for the backward pass: an in-place change of
        # a view removes it.
        module.register_forward_hook(_clone_views)
        # Reshard the root unit too, so that every worker holds its shards only between passes.
        fully_shard(module, mesh=self._mesh(), mp_policy=policy, reshard_after_forward=True)

    def _mesh(self) -> DeviceMesh:
        if self._device_mesh is None:
            assert self.comm.group is not None
            self._device_mesh = DeviceMesh.from_group(self.comm.group, self.comm.device.type)
        return self._device_mesh

    def update_optimizer(self, optimizer: Optimizer) -> None:
        """Replace the optimizer's parameters by this worker's shards of them, and shard its
        state.
        """
        if self._model is not None and self._full_parameters:
            new = dict(self._model.named_parameters(remove_duplicate=False))
            replace_parameters(
                optimizer, {id(p): new[name] for name, p in self._full_parameters.items()}
            )
            self._full_parameters = {}

    def cast_parameters(self, model: nn.Module, precision: str) -> list[int] | None:
        """Return the numbers of the parameters that units gather in a half-precision format."""
        if self.comm.size == 1:
            return None
        exact = {
            id(p) for layer in batch_norm_layers(model) for p in layer.parameters(recurse=False)
        }
        half = precision in _FORMATS
        return [
            number for number, p in enumerate(model.parameters()) if half and id(p) not in exact
        ]

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return `module` unchanged: the hooks of `fully_shard` gather parameters and reduce
        gradients.
        """
        return module

    def model_state(self, model: nn.Module, wanted: bool = True) -> dict[str, Any]:
        """Return the model's state dict with full tensors on the CPU, or None for each if not
        `wanted`.
        """
        return {name: full_tensors(value, wanted) for name, value in model.state_dict().items()}

    def optimizer_state(
        self, model: nn.Module, optimizer: Optimizer, wanted: bool = True
    ) -> dict[str, Any]:
        """Return the optimizer's state dict with full tensors on the CPU, or None for each if not
        `wanted`.
        """
        state: dict[str, Any] = full_tensors(optimizer.state_dict(), wanted)
        return state

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load this worker's shard of a full state dict."""
        load_model(model, state, self.comm)

    def load_optimizer_state(
        self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]
    ) -> None:
        """Load this worker's shard of a full state dict."""
        load_optimizer(
            optimizer,
            shard_optimizer_state(optimizer, read_optimizer_state(optimizer, state, self.comm)),
        )

    def fingerprint(self, model: nn.Module, optimizer: Optimizer) -> str:
        """Return the fingerprint of the full tensors, see `lockstep.fingerprint`."""
        entries = {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict()}
        return fingerprint_of(full_tensors(entries), self.optimizer_state(model, optimizer))


def _clone_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Clone the outputs of a forward pass that are views; a forward hook."""
    return map_tensors(
        lambda tensor: tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor,
        output,
    )


def _refuse_sharded(model: nn.Module) -> None:
    """Check that a model is not sharded yet: its full parameters are gone, and new layers would be
    sharded differently.

    Raises:
        ConfigError: if it is.
    """
    if any(isinstance(p, DTensor) for p in model.parameters()):
        hint = (
            "Train it with one Trainer and all its layers; or build it again and load the saved "
            "weights."
        )
        raise ConfigError(
            "model",
            "one whose parameters are not sharded",
            found="one that is sharded already",
            hint=hint,
        )


def _attribute_with_parameters(optimizer: Optimizer) -> str | None:
    """Return the attribute, other than the groups and the state, in which an optimizer holds
    parameters, if any.
    """
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        items = value if isinstance(value, (list, tuple, set)) else [value]
        if name not in ("param_groups", "state") and any(id(item) in parameters for item in items):
            return name
    return None
