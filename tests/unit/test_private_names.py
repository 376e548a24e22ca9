"""Every private name of torch and of Python that Lockstep uses, each with a test: any release may
change them.

A use of a name that is not listed here fails `test_every_use_is_listed`.
"""

from __future__ import annotations

import ast
import atexit
import inspect
import re
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from importlib import import_module
from multiprocessing import context, forkserver, popen_forkserver, process
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import batchnorm, dropout
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp
from torch.optim import SGD
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import LRScheduler, SequentialLR, StepLR
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.data._utils import collate, worker
from torch.utils.data.dataloader import _BaseDataLoaderIter

from support.sources import syntax_trees

ROOT = Path(__file__).parents[2] / "src" / "lockstep"
PRIVATE = re.compile(r"_[A-Za-z]\w*")

# Names that are not private: documented ones, those of other packages than torch, which are looked
# for and not relied on, and those that Lockstep itself gives to attributes of objects, classes and
# files in other modules.
OTHERS = {
    *(
        "_asdict",
        "_fields",
        "_replace",
        "_exit",
        "_getframe",
        "_current_frames",
        "_codecs",
        "_reconstruct",
        "_factor",
    ),
    *("_private", "_global_node", "_internal_kv_get", "_distributed", "_ex_iterable", "_instances"),
    *(
        "_agree_to_stop",
        "_begin",
        "_close_all",
        "_connected",
        "_end",
        "_reset",
        "_finish",
        "_device_backends",
        "_fwd",
        "_per_second",
        "_placement",
    ),
}
OWN = "_lockstep_"


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _has(owner: Any, name: str) -> Callable[[], bool]:
    return lambda: hasattr(owner, name)


def _calls(function: Any, *leading: str) -> Callable[[], bool]:
    """Return a test that a function's first parameters have these names."""
    return lambda: _parameters(function)[: len(leading)] == list(leading)


# --- Tensors, layers and graphs
# ---------------------------------------------------------------------------------------


def _base_is_what_parts_are_of() -> bool:
    whole = torch.arange(6).view(2, 3)
    rows = whole.unbind()
    return (
        whole._base is not None
        and all(row._base is rows[0]._base for row in rows)
        and torch.ones(1)._base is None
    )


def _owners_of_memory_are_counted() -> bool:
    tensor = torch.zeros(2)
    storage = tensor.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)
    views = [tensor.view(2, 1), tensor[:1]]
    return bool(torch._C._storage_Use_Count(storage._cdata) == before + len(views))


def _loader_processes_are_known_and_batches_collated_by_type() -> bool:
    table = {**collate.default_collate_fn_map, torch.Tensor: lambda batch, collate_fn_map: batch[0]}
    one, two = torch.ones(1), torch.ones(2)
    return (
        worker.WorkerInfo(id=1, num_workers=2, seed=3, dataset=[4]).num_workers == 2
        and collate.collate([[one], [two]], collate_fn_map=table)[0] is one
        and collate.collate_tensor_fn([one, one], collate_fn_map=table).shape == (2, 1)
    )


def _version_counts_changes() -> bool:
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    return before == 0 and tensor._version == 1


def _of_sparse(name: str) -> Callable[[], bool]:
    def test() -> bool:
        tensor = torch.eye(3).to_sparse().coalesce()
        return {"_nnz": 3, "_indices": (2, 3), "_values": (3,)}[name] == (
            tensor._nnz() if name == "_nnz" else tuple(getattr(tensor, name)().shape)
        )

    return test


def _foreach(name: str, *arguments: Any, expected: float) -> Callable[[], bool]:
    def test() -> bool:
        tensors = [torch.full((2,), 4.0), torch.full((2,), 4.0)]
        given = [
            [torch.full((2,), a) for _ in tensors] if isinstance(a, float) else a for a in arguments
        ]
        result = getattr(torch, name)(tensors, *given) or tensors
        return all(bool(each.eq(expected).all()) for each in result)

    return test


def _compiled_call_replaces_a_call() -> bool:
    layer = nn.Linear(1, 1)
    unset = layer._compiled_call_impl is None
    layer._compiled_call_impl = lambda *_: "compiled"
    return (
        unset
        and layer(torch.ones(1)) == "compiled"
        and isinstance(layer._call_impl(torch.ones(1)), torch.Tensor)
    )


def _parts_of_a_module() -> bool:
    layer = nn.Sequential(nn.BatchNorm1d(2))
    layer.register_buffer("kept_out", torch.ones(1), persistent=False)
    return (
        layer._non_persistent_buffers_set == {"kept_out"}
        and list(layer._modules) == ["0"]
        and set(layer[0]._parameters) == {"weight", "bias"}
        and len(layer[0]._buffers) == 3
    )


def _hooks_of_a_module(name: str, register: str) -> Callable[[], bool]:
    def test() -> bool:
        layer = nn.Linear(1, 1)
        unset = not getattr(layer, name)
        getattr(layer, register)(lambda *_: None)
        return unset and len(getattr(layer, name)) == 1

    return test


def _hook_of_all_modules_is_seen() -> bool:
    module = nn.modules.module
    unset = not module._has_any_global_hook()
    hook = module.register_module_forward_hook(lambda *_: None)
    is_seen = bool(module._has_any_global_hook())
    hook.remove()
    return unset and is_seen


def _hooks_of_a_parameter(name: str, register: str) -> Callable[[], bool]:
    def test() -> bool:
        parameter = nn.Parameter(torch.ones(1))
        unset = not getattr(parameter, name)
        getattr(parameter, register)(lambda *_: None)
        return unset and len(getattr(parameter, name)) == 1

    return test


def _node_saves(name: str) -> Callable[[], bool]:
    """Return a test of what a node of the graph shows; the losses are those that modules of
    `prepare` read.
    """

    def test() -> bool:
        x = torch.ones(3, 2, requires_grad=True)
        labels = torch.tensor([0, 1, 1])
        nll = F.nll_loss(x, labels, weight=torch.ones(2)).grad_fn
        nodes: dict[str, tuple[Any, Callable[[Any], bool]]] = {
            "_saved_reduction": (nll, lambda value: value == 1),
            "_saved_target": (nll, lambda value: value.equal(labels)),
            "_saved_weight": (nll, lambda value: value.numel() == 2),
            "_saved_total_weight": (nll, lambda value: float(value) == 3),
            "_saved_self": (
                F.mse_loss(x, x.detach(), reduction="sum").grad_fn,
                lambda value: value.shape == (3, 2),
            ),
            "_saved_other": ((x * 2 * x.detach()).grad_fn, lambda value: value.shape == (3, 2)),
            "_saved_mat1": (
                nn.Linear(2, 1)(x.detach()).grad_fn,
                lambda value: value.shape == (3, 2),
            ),
            "_saved_input": (
                nn.Conv1d(3, 1, 1)(x.detach()[None]).grad_fn,
                lambda value: value.shape == (1, 3, 2),
            ),
            "_saved_indices": (
                nn.Embedding(2, 1)(labels).grad_fn,
                lambda value: value.equal(labels),
            ),
            "_saved_self_sym_sizes": (x.sum().grad_fn, lambda value: tuple(value) == (3, 2)),
            "_saved_dim": (x.sum(dim=1).grad_fn, lambda value: tuple(value) == (1,)),
            "_saved_result": (x.softmax(1).grad_fn, lambda value: value.shape == (3, 2)),
            "_saved_x1": (torch.cdist(x, x).grad_fn, lambda value: value.shape == (3, 2)),
            "_saved_x2": (torch.cdist(x, x).grad_fn, lambda value: value.shape == (3, 2)),
            "_input_metadata": (
                (x.half()[:, :1] - torch.ones(2).half()).grad_fn,
                lambda value: (value[0].dtype is torch.float16 and tuple(value[0].shape) == (3, 2)),
            ),
        }
        node, is_right = nodes[name]
        return is_right(getattr(node, name))

    return test


def _graph_is_kept() -> bool:
    kept = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            kept.append(torch._C._autograd._get_current_graph_task_keep_graph())
            return gradient

    out = Note.apply(torch.ones(1, requires_grad=True))
    out.backward(retain_graph=True)
    out.backward()
    return kept == [True, False]


def _backward_goes_through(module: Any) -> Callable[[], bool]:
    """Return a test that `backward` looks the engine up in `module`, so that it can be replaced
    there.
    """
    return lambda: "_engine_run_backward(" in inspect.getsource(
        torch.autograd.backward
    ) and hasattr(module, "_engine_run_backward")


def _graph_shows_a_linear_layer() -> bool:
    layer = torch.nn.Linear(3, 2)
    inputs = torch.ones(5, 3)
    node: Any = layer(inputs).grad_fn
    *_, transposition = (following for following, _ in node.next_functions)
    return (
        node.name() == "AddmmBackward0"
        and node._saved_alpha == 1
        and node._saved_mat1.equal(inputs)
        and node._saved_mat1_sym_sizes == (5, 3)
        and node._raw_saved_mat1.unpack_hook is None
        and transposition.name() == "TBackward0"
        and transposition.next_functions[0][0].variable is layer.weight
    )


def _compiled_model_has_the_original() -> bool:
    model = nn.Linear(1, 1)
    compiled = torch.compile(model, backend="eager")
    return isinstance(compiled, torch._dynamo.OptimizedModule) and compiled._orig_mod is model


def _compiled_function_has_the_original() -> bool:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    return torch.compile(function, backend="eager")._torchdynamo_orig_callable is function


def _pytree_maps() -> bool:
    from torch.utils._pytree import tree_map

    return bool(tree_map(lambda x: x + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]})


def _autocast_is_enabled() -> bool:
    return (
        torch.autocast("cpu", torch.bfloat16)._enabled
        and not torch.autocast("cpu", enabled=False)._enabled
    )


def _tracker_counts() -> bool:
    from torch.distributed._tools.mem_tracker import MemTracker

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracker = MemTracker()
        with tracker:
            kept = torch.zeros(1000)
    return any(
        int(each["Total"]) >= kept.nbytes for each in tracker.get_tracker_snapshot("peak").values()
    )


# --- Optimizers and schedulers
# ----------------------------------------------------------------------------------------


def _scheduler_of(sgd: SGD) -> StepLR:
    return StepLR(sgd, 1)


def _scaler_takes_the_overflows_that_it_is_given() -> bool:
    """A step is left out if any device's overflows, by the optimizer's id, are more than 0; without
    its entry a step begins anew.
    """
    weight = nn.Parameter(torch.ones(1))
    sgd = SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(sgd)
    overflows = scaler._per_optimizer_states[id(sgd)]["found_inf_per_device"]
    had_none = [float(found) for found in overflows.values()] == [0.0]
    overflows.clear()
    overflows[torch.device("cpu")] = torch.ones(())
    scaler.step(sgd)
    is_left_out = float(weight.detach()) == 1.0
    scaler._per_optimizer_states.clear()
    scaler.unscale_(sgd)  # an error, unless what was known of the step is forgotten
    return had_none and is_left_out


def _groups_are_those_of_the_norm() -> bool:
    """Tensors are grouped by device and dtype, with their numbers, as torch's norm of several is
    computed.
    """
    tensors: Any = [[torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(1)]]
    groups = _foreach_utils._group_tensors_by_device_and_dtype(tensors, with_indices=True)
    numbers = sorted(sorted(numbers) for _, numbers in groups.values())
    source = inspect.getsource(import_module("torch.nn.utils.clip_grad"))
    return numbers == [[0, 2], [1]] and "_group_tensors_by_device_and_dtype(" in source


def _step_that_a_scheduler_leaves() -> bool:
    """A step that says that it is wrapped is not wrapped again, and `_opt_called` says that it has
    been called.
    """
    sgd: Any = SGD([nn.Parameter(torch.ones(1))], lr=1.0)

    def step() -> None:
        pass

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    sgd.step = step
    scheduler = _scheduler_of(sgd)
    sgd._opt_called = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()  # else it warns that no step has been taken
    return sgd.step is step


def _hooks_of_a_step(name: str) -> Callable[[], bool]:
    """Return a test that the hooks of steps are in a dict of this name, of an optimizer or of all
    of them.
    """

    def test() -> bool:
        sgd = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        when = "pre" if "_pre_" in name else "post"
        if name.startswith("_global"):
            owner: Any = optimizer_module
            register: Any = getattr(optimizer_module, f"register_optimizer_step_{when}_hook")
        else:
            owner, register = sgd, getattr(sgd, f"register_step_{when}_hook")
        before = len(getattr(owner, name))
        handle = register(lambda *_: None)
        added = len(getattr(owner, name)) - before
        handle.remove()
        return added == 1

    return test


def _profiler_is_noticed() -> bool:
    before = torch.autograd._profiler_enabled()
    with torch.autograd.profiler.profile():
        return torch.autograd._profiler_enabled() and not before


def _scheduler_has(name: str) -> Callable[[], bool]:
    def test() -> bool:
        sgd = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler: LRScheduler = _scheduler_of(sgd)
        if name == "_schedulers":
            sequence = SequentialLR(sgd, [scheduler, _scheduler_of(sgd)], [1])
            return sequence._schedulers[0] is scheduler and name in sequence.state_dict()
        return scheduler._last_lr == [1.0] and name in scheduler.state_dict()

    return test


# --- Process groups
# --------------------------------------------------------------------------------------------------


def _tables_of_groups() -> bool:
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
    return (
        all(isinstance(getattr(c10d._world, name), dict) for name in names)
        and c10d._world.group_count == 0
    )


def _gloo_options() -> bool:
    """What `ProcessGroupGloo` takes in place of a time limit, with which its connections are made
    when needed.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads = timedelta(seconds=3), 2
    device = dist.ProcessGroupGloo.create_default_device(lazy_init=True)  # type: ignore[attr-defined]
    options._devices = [device]
    return options._timeout == timedelta(seconds=3) and len(options._devices) == 1


def _group_has_backends() -> bool:
    """A group of c10d's own class, with one backend for the CPU."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    made: Any = dist.ProcessGroup(dist.HashStore(), 0, 1)
    no_devices = made._device_types == []
    made._set_default_backend(kind)
    names = ("_register_backend", "_get_backend", "_set_group_name", "_set_group_desc")
    return no_devices and all(hasattr(made, name) for name in names)


def _backends_are_plugins() -> bool:
    import lockstep.transports  # noqa: F401 - registers its own

    return bool(
        dist.Backend._plugins["SHM"].extended_api and dist.Backend._plugins["SHM"].creator_fn
    )


def _dispatch_modes_see_operations() -> bool:
    class Mode(TorchDispatchMode):
        seen: ClassVar[list[Any]] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1
    return torch.ops.aten.add.Tensor in Mode.seen


# --- The list
# --------------------------------------------------------------------------------------------------

LISTED: dict[str, Callable[[], Any]] = {
    # torch: tensors, layers and graphs
    "_C": _has(torch, "_C"),
    "_autograd": _has(torch._C, "_autograd"),
    "_python_dispatch": _dispatch_modes_see_operations,
    "_backward_hooks": _hooks_of_a_parameter("_backward_hooks", "register_hook"),
    "_post_accumulate_grad_hooks": _hooks_of_a_parameter(
        "_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"
    ),
    "_forward_hooks": _hooks_of_a_module("_forward_hooks", "register_forward_hook"),
    "_forward_pre_hooks": _hooks_of_a_module("_forward_pre_hooks", "register_forward_pre_hook"),
    "_backward_pre_hooks": _hooks_of_a_module(
        "_backward_pre_hooks", "register_full_backward_pre_hook"
    ),
    "_has_any_global_hook": _hook_of_all_modules_is_seen,
    "_BatchNorm": lambda: issubclass(nn.BatchNorm1d, batchnorm._BatchNorm),
    "_NormBase": lambda: issubclass(nn.BatchNorm1d, batchnorm._NormBase)
    and issubclass(nn.InstanceNorm1d, batchnorm._NormBase),
    "_DropoutNd": lambda: issubclass(nn.Dropout, dropout._DropoutNd),
    "_buffers": _parts_of_a_module,
    "_modules": _parts_of_a_module,
    "_parameters": _parts_of_a_module,
    "_non_persistent_buffers_set": _parts_of_a_module,
    "_call_impl": _compiled_call_replaces_a_call,
    "_compiled_call_impl": _compiled_call_replaces_a_call,
    "_dynamo": _compiled_model_has_the_original,
    "_orig_mod": _compiled_model_has_the_original,
    "_torchdynamo_orig_callable": _compiled_function_has_the_original,
    "_orig_forward": lambda: "_orig_forward"
    in inspect.getsource(import_module("torch.distributed.pipelining._IR")),
    "_enabled": _autocast_is_enabled,
    **dict.fromkeys(
        ("_saved_alpha", "_saved_mat1", "_saved_mat1_sym_sizes", "_raw_saved_mat1"),
        _graph_shows_a_linear_layer,
    ),
    "_engine_run_backward": _backward_goes_through(torch.autograd),
    "_get_current_graph_task_keep_graph": _graph_is_kept,
    "_is_view": lambda: torch.ones(2)[:1]._is_view() and not torch.ones(2)._is_view(),
    "_pytree": _pytree_maps,
    "_tools": _tracker_counts,
    "_base": _base_is_what_parts_are_of,
    "_version": _version_counts_changes,
    **{name: _of_sparse(name) for name in ("_nnz", "_indices", "_values")},
    "_cdata": _owners_of_memory_are_counted,
    "_storage_Use_Count": _owners_of_memory_are_counted,
    "_foreach_utils": _groups_are_those_of_the_norm,
    "_group_tensors_by_device_and_dtype": _groups_are_those_of_the_norm,
    "_per_optimizer_states": _scaler_takes_the_overflows_that_it_is_given,
    "_foreach_add": _foreach("_foreach_add", 2.0, expected=6),
    "_foreach_add_": _foreach("_foreach_add_", 2.0, expected=6),
    "_foreach_addcmul_": _foreach("_foreach_addcmul_", 2.0, 3.0, expected=10),
    "_foreach_copy_": _foreach("_foreach_copy_", 2.0, expected=2),
    "_foreach_div": _foreach("_foreach_div", 2.0, expected=2),
    "_foreach_mul": _foreach("_foreach_mul", 2.0, expected=8),
    "_foreach_mul_": _foreach("_foreach_mul_", 2.0, expected=8),
    "_foreach_norm": lambda: [
        float(each) for each in torch._foreach_norm([torch.tensor([3.0, 4.0])])
    ]
    == [5],
    "_foreach_sqrt": _foreach("_foreach_sqrt", expected=2),
    "_foreach_sub": _foreach("_foreach_sub", 3.0, expected=1),
    "_foreach_sub_": _foreach("_foreach_sub_", 3.0, expected=1),
    "_foreach_zero_": _foreach("_foreach_zero_", expected=0),
    **{
        name: _node_saves(name)
        for name in (
            *(
                "_saved_dim",
                "_saved_indices",
                "_saved_input",
                "_saved_mat1",
                "_saved_other",
                "_saved_reduction",
            ),
            *(
                "_saved_result",
                "_saved_self",
                "_saved_self_sym_sizes",
                "_saved_target",
                "_saved_total_weight",
            ),
            *("_saved_weight", "_saved_x1", "_saved_x2", "_input_metadata"),
        )
    },
    "_sample_dirichlet": _has(torch, "_sample_dirichlet"),
    "_standard_gamma": _has(torch, "_standard_gamma"),
    "_get_default_mps_generator": _has(torch.mps, "_get_default_mps_generator"),
    "_get_privateuse1_backend_name": lambda: torch._C._get_privateuse1_backend_name()
    == "privateuseone",
    "_is_in_bad_fork": lambda: torch.cuda._is_in_bad_fork() is False,
    # torch: optimizers, schedulers, loaders
    **{
        name: _hooks_of_a_step(name)
        for name in (
            *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
            *("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
        )
    },
    "_profiler_enabled": _profiler_is_noticed,
    "_opt_called": _step_that_a_scheduler_leaves,
    "_wrapped_by_lr_sched": _step_that_a_scheduler_leaves,
    "_last_lr": _scheduler_has("_last_lr"),
    "_schedulers": _scheduler_has("_schedulers"),
    "_BaseDataLoaderIter": lambda: callable(_BaseDataLoaderIter.__next__),
    "_iterator": lambda: DataLoader([1])._iterator is None,
    "_shutdown_workers": lambda: "self._workers"
    in inspect.getsource(_iter_of_processes()._shutdown_workers),
    "_workers": lambda: "self._workers"
    in inspect.getsource(_iter_of_processes()._shutdown_workers),
    "_index_queues": lambda: "self._index_queues"
    in inspect.getsource(_iter_of_processes()._shutdown_workers),
    "_utils": _loader_processes_are_known_and_batches_collated_by_type,
    "_worker_info": lambda: worker._worker_info is None,
    # torch: process groups
    "_world": _tables_of_groups,
    "_distributed_c10d": lambda: {"AllgatherOptions", "PrefixStore", "Store"}
    <= set(dir(torch._C._distributed_c10d)),
    "_get_default_group": _has(c10d, "_get_default_group"),
    "_get_default_store": _has(c10d, "_get_default_store"),
    "_update_default_pg": _calls(c10d._update_default_pg, "pg"),
    "_new_process_group_helper": _calls(
        c10d._new_process_group_helper,
        "group_size",
        "group_rank",
        "global_ranks_in_group",
        "backend",
        "store",
        "group_name",
    ),
    "_register_process_group": lambda: callable(c10d._register_process_group),
    "_unregister_process_group": lambda: callable(c10d._unregister_process_group),
    "_check_p2p_op_list": _calls(c10d._check_p2p_op_list, "p2p_op_list"),
    "_coalescing_manager": _calls(c10d._coalescing_manager, "group", "device", "async_ops"),
    "_plugins": _backends_are_plugins,
    "_register_backend": _group_has_backends,
    "_set_default_backend": _group_has_backends,
    "_device_types": _group_has_backends,
    "_get_backend": _group_has_backends,
    "_Options": _gloo_options,
    "_devices": _gloo_options,
    "_threads": _gloo_options,
    "_timeout": _gloo_options,
    "_source_rank": _has(dist.Work, "_source_rank"),
    "_start_coalescing": _has(dist.ProcessGroup, "_start_coalescing"),
    "_end_coalescing": _has(dist.ProcessGroup, "_end_coalescing"),
    # one of both names is enough: torch renames them
    "_allgather_base": lambda: {"_allgather_base", "all_gather_single"}
    & set(dir(dist.ProcessGroup)),
    "_reduce_scatter_base": lambda: {"_reduce_scatter_base", "reduce_scatter_single"}
    & set(dir(dist.ProcessGroup)),
    "_verify_param_shape_across_processes": lambda: "_verify_param_shape_across_processes("
    in inspect.getsource(DistributedDataParallel)
    and callable(ddp._verify_param_shape_across_processes),
    "_remove_autograd_hooks": _calls(DistributedDataParallel._remove_autograd_hooks, "self"),
    # Python
    "_Popen": lambda: callable(context.ForkServerProcess._Popen),
    "_launch": _calls(popen_forkserver.Popen._launch, "self", "process_obj"),
    "_popen": lambda: process.BaseProcess.__init__ and context.ForkServerProcess()._popen is None,
    "_forkserver": _has(forkserver, "_forkserver"),
    "_forkserver_pid": _has(forkserver._forkserver, "_forkserver_pid"),  # type: ignore[attr-defined]
    "_extra_reducers": lambda: torch.Tensor in ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    "_run_exitfuncs": _has(atexit, "_run_exitfuncs"),
    "_threading_atexits": lambda: isinstance(threading._threading_atexits, list),  # type: ignore[attr-defined]
    "_shutdown": _has(threading, "_shutdown"),
}


def _iter_of_processes() -> Any:
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    return _MultiProcessingDataLoaderIter


# --- The tests
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LISTED)
def test_it_is_there_as_it_is_used(name: str) -> None:
    try:
        found = LISTED[name]()
    except (AttributeError, ImportError, TypeError, KeyError) as error:
        found, why = False, f": {error}"
    else:
        why = ""
    assert found, (
        f"torch {torch.__version__} has no {name} as Lockstep uses it in {_uses().get(name)}{why}"
    )


def test_every_use_is_listed() -> None:
    unlisted = {name: where for name, where in _uses().items() if name not in LISTED}
    assert not unlisted, (
        "private names of other packages are used: use public ones, or add each to LISTED with a "
        f"test of what Lockstep takes for granted about it: {unlisted}"
    )


def test_every_listed_name_is_used() -> None:
    sources = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
    assert sorted(LISTED.keys() - set(re.findall(r"\w+", sources))) == []


@pytest.mark.parametrize(
    "source",
    [
        "from torch.nn import _new",
        "from torch._new import tree",
        "tensor._new",
        "self.tensor._new()",
        'getattr(tensor, "_new")',
        'Replaced(torch, "_new", by)',
        "class A:\n    def f(self):\n        super()._new()\n    def _new(self):\n        pass",
    ],
)
def test_a_use_is_found(source: str) -> None:
    assert {name for name, _ in _foreign(ast.parse(source))} == {"_new"}


@pytest.mark.parametrize(
    "source", ["self._new", "_new = 1\nx._new", "tensor.__class__", "tensor.new_", '"_new thing"']
)
def test_an_own_name_is_none(source: str) -> None:
    assert not set(_foreign(ast.parse(source)))


@cache
def _uses() -> dict[str, list[str]]:
    """Return the places, such as "gloo.py:45", in which Lockstep uses each private name that is not
    its own.
    """
    found = defaultdict(list)
    for path, tree in syntax_trees(ROOT).items():
        for name, line in _foreign(tree):
            if name not in OTHERS and not name.startswith(OWN):
                found[name].append(f"{path.relative_to(ROOT)}:{line}")
    return dict(found)


def _foreign(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the private names that a module uses and does not define itself, with their lines."""
    own = set(_defined(tree))
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and not _is_self(node.value):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        else:
            continue
        overrides = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"
        yield from (
            (n, line) for n in names if PRIVATE.fullmatch(n) and (overrides or n not in own)
        )


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _is_self(node.value)
        ):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield from (alias.asname or alias.name for alias in node.names)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
