"""An accelerator that is none: torch takes it for a device of its own, named "toy", and its memory
is the host's.

It shows on any machine what is otherwise seen on an accelerator alone: tensors of two devices in
one operation, code that means "the model's device" and says "cuda", code that waits for the device,
and backward passes in a thread of the device. Its values are computed by torch's kernels for the
CPU, so they equal the CPU's.

Made with torch's hook for backends that are written in Python (`torch.utils.backend_registration`),
and a fallback for all operations. The tensors are plain ones of torch: their storage lies at the
address of host memory, and its object holds that memory. One device a process; it has streams and
events, in which everything runs at once, and no generator of its own: it draws from that of the
CPU. A process that has called `register` has the device for the rest of its life.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["BACKEND", "MEMORY", "NAME", "ONE_EACH", "WAITS", "play", "register"]

NAME, BACKEND = "toy", "toycomm"
MEMORY = 1 << 34  # bytes that it says it has
ONE_EACH = {"CUDA_VISIBLE_DEVICES": "0"}  # for workers of which each sees a device of its own

WAITS: Counter[str] = Counter()
"""How often the host has waited for the device, by cause and place."""

_TORCH = str(Path(torch.__file__).parent)
_aten = torch.ops.aten
_AUTOCAST_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # type: ignore[attr-defined]

# Operations whose result depends on values: on a device the host waits for them.
_READS = {
    _aten._local_scalar_dense.default,
    _aten.bincount.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim.default,
    _aten._unique2.default,
}
_COPIES = {_aten.copy_.default, _aten._copy_from.default, _aten._to_copy.default}
_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}


# --- What is played
# --------------------------------------------------------------------------------------------------

_played: Callable[[str], None] | None = None


def play(fault: Callable[[str], None] | None) -> None:
    """Call `fault` with the name of each operation before it runs; it may raise. None: no more.

    Names are such as "addmm", and "copy to the device" or "copy to the host" for copies.
    """
    global _played
    _played = fault


# --- Time
# --------------------------------------------------------------------------------------------------


class _Queue:
    """What the host has queued, as far as it can be seen from outside.

    Attributes:
        operations: how many there were.
        arriving: copies to the host that nobody has waited for: (number of the operation, where to,
            values).
    """

    def __init__(self) -> None:
        self.operations = 0
        self.arriving: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def copy_later(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `values` into `target`, a tensor of the host, when the host waits; until then there
        is rubbish in it.
        """
        kept = values.clone()
        target.fill_(float("nan") if target.is_floating_point() else 77)
        self.arriving.append((self.operations, target, kept))

    def arrive(self, until: int) -> None:
        """Complete the copies that were queued up to an operation."""
        for number, target, values in self.arriving:
            if number <= until:
                target.copy_(values)
        self.arriving = [each for each in self.arriving if each[0] > until]


_queue = _Queue()


def _wait(cause: str) -> None:
    """Count that the host waits until the device has done all that was queued."""
    WAITS[f"{cause}, {_place()}"] += 1
    _queue.arrive(_queue.operations)


def _place() -> str:
    """Return the file and line that made the host wait."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or _TORCH in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class _Event:
    """An event of the device. A wait for it counts, unless the device has got other work since it
    was recorded.
    """

    def __init__(self, device: Any = None, *args: Any, **kwargs: Any) -> None:
        self.recorded = -1

    def record(self, stream: Any = None) -> None:
        self.recorded = _queue.operations

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.recorded == _queue.operations:
            WAITS[f"event of the latest work, {_place()}"] += 1
        _queue.arrive(self.recorded)

    def wait(self, stream: Any = None) -> None: ...


class _Stream:
    """A stream of the device; also the context manager in which it is the current one."""

    current: _Stream

    def __init__(self, device: Any = None, *args: Any, **kwargs: Any) -> None:
        self._before: list[_Stream] = []

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def __enter__(self) -> _Stream:
        self._before.append(_Stream.current)
        _Stream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        _Stream.current = self._before.pop()

    def record_event(self, event: Any = None) -> _Event:
        recorded = _Event() if event is None else event
        recorded.record(self)
        return recorded

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _wait("synchronize")


_Stream.current = _Stream()


class _DeviceModule:
    """What `torch.toy` is."""

    Event, Stream = _Event, _Stream

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None: ...

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(uuid=os.environ.get("TOY_UUID", f"TOY-{os.getpid()}"))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return MEMORY // 4, MEMORY

    def memory_reserved(self, device: Any = None) -> int:
        return MEMORY // 2

    def device(self, device: Any) -> Any:
        return nullcontext()

    def stream(self, stream: Any) -> Any:
        return stream

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream.current

    def synchronize(self, device: Any = None) -> None:
        _wait("synchronize")

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


# --- Tensors
# --------------------------------------------------------------------------------------------------


def _is_toy(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host that shares the memory of one of the device."""
    memory = tensor.untyped_storage().host_memory  # type: ignore[attr-defined]
    return torch.empty(0, dtype=tensor.dtype).set_(
        memory, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


# The storages of the device by the address of their memory, so that a view of a tensor shares its
# storage.
_storages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _storage_of(host: torch.Tensor) -> Any:
    memory = host.untyped_storage()
    address = memory.data_ptr()
    found = _storages.get(address) if address else None
    if found is not None and found.nbytes() == memory.nbytes():
        return found
    device = torch.device(NAME, 0)
    made = torch._C._construct_storage_from_data_pointer(address, device, memory.nbytes())  # type: ignore[attr-defined]
    made.host_memory = memory
    if address:
        _storages[address] = made
    return made


def _toy(host: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the device that has the memory, the shape and the strides of one of the
    host.
    """
    made: torch.Tensor = torch._C._acc.create_empty_tensor((0,), host.dtype)  # type: ignore[attr-defined]
    _become(made, host)
    return made


def _become(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Give a tensor of the device the memory, the shape and the strides of one of the host."""
    _aten.set_.source_Storage_storage_offset.redispatch(
        _CPU_KERNEL, tensor, _storage_of(host), host.storage_offset(), host.shape, host.stride()
    )


# --- Operations
# --------------------------------------------------------------------------------------------------


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the host's memory; the fallback for all operations of the device."""
    if _played is not None and op not in _COPIES:
        _played(op._schema.name.removeprefix("aten::"))
    _queue.operations += 1
    if op in _COPIES:
        return _copy(op, args, kwargs)
    tensors = [
        each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
    ]
    others = [
        tensor
        for tensor in tensors
        if tensor.dim() and not _is_toy(tensor) and tensor.device.type != "meta"
    ]
    if others and len(others) < len(tensors) and op not in _INDEXED:
        raise RuntimeError(
            f"{op}: expected all tensors to be on the same device, got one on the CPU and one on "
            "toy:0"
        )
    by_mask = op in _INDEXED and any(
        each is not None and each.dtype is torch.bool for each in args[1]
    )
    if by_mask or op in _READS:
        _wait(op._schema.name.removeprefix("aten::"))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
    hosts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_host(value: Any) -> Any:
        if not _is_toy(value):
            return value
        hosts.append((value, _host(value)))
        return hosts[-1][1]

    host_args, host_kwargs = pytree.tree_map(on_host, (args, kwargs))
    result = _host_operation(op, host_args)(*host_args, **host_kwargs)
    if op._schema.is_mutable:
        for tensor, host in hosts:
            if tensor.shape != host.shape or tensor.stride() != host.stride():
                _become(tensor, host)
        return _changed(op, args, kwargs, result)
    return pytree.tree_map_only(torch.Tensor, _toy, result)


def _host_operation(op: Any, args: Any) -> Any:
    """Return what is called for an operation on the host's memory."""
    # torch gives the fallback a number where the operation has a tensor that was made of one
    taken = zip(args, op._schema.arguments, strict=False)
    if any(
        isinstance(value, (int, float)) and argument.type.kind() == "TensorType"
        for value, argument in taken
    ):
        return op.overloadpacket
    return _HOST_OPERATIONS.get(op, op)


def _convolution_backward(gradient: Any, values: Any, weight: Any, *options: Any) -> Any:
    return _aten.convolution_backward(gradient, values, weight, [weight.shape[0]], *options)


_HOST_OPERATIONS: dict[Any, Any] = {
    _aten.convolution_overrideable.default: _aten.convolution.default,
    _aten.convolution_backward_overrideable.default: _convolution_backward,
}


def _changed(op: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return the arguments that an operation has changed, in the places in which it returns
    them.
    """
    given = {
        argument.name: args[number] if number < len(args) else kwargs.get(argument.name)
        for number, argument in enumerate(op._schema.arguments)
    }
    aliases = {argument.name: argument.alias_info for argument in op._schema.arguments}
    written = [
        given[name] for name, alias in aliases.items() if alias is not None and alias.is_write
    ]
    returned = op._schema.returns
    if not returned:
        return None
    if len(returned) == 1:
        return (
            written[0]
            if returned[0].alias_info is not None
            else pytree.tree_map_only(torch.Tensor, _toy, result)
        )
    rest = iter(written)
    return tuple(
        next(rest)
        if each.alias_info is not None
        else pytree.tree_map_only(torch.Tensor, _toy, value)
        for each, value in zip(returned, result, strict=True)
    )


def _copy(op: Any, args: Any, kwargs: Any) -> Any:
    """Copy between the device and the host, or within the device."""
    if op is _aten._to_copy.default:
        source, wanted = args[0], kwargs.get("device") or args[0].device
        later = bool(kwargs.get("non_blocking"))
        if torch.device(wanted).type == NAME:
            if not _is_toy(source):
                _to_device(later)
            kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
            return _toy(op(_host(source) if _is_toy(source) else source, **kwargs))
        values = _host(source)
        copied = op(values, **{**kwargs, "pin_memory": False, "non_blocking": False})
        copied = copied.clone() if copied.data_ptr() == values.data_ptr() else copied
        _to_host(copied, copied.clone(), later)
        return copied
    target, source, later = (*args, False)[:3] if len(args) < 3 else args[:3]
    if op is _aten._copy_from.default:
        target, source = source, target
    later = bool(later or kwargs.get("non_blocking"))
    if not _is_toy(target):
        _to_host(target, _host(source), later)
        return target
    if not _is_toy(source):
        _to_device(later)
    _host(target).copy_(_host(source) if _is_toy(source) else source)
    return target


def _to_device(later: bool) -> None:
    if _played is not None:
        _played("copy to the device")
    if not later:  # of memory that may be paged out: torch waits until it has been read
        _wait("copy to the device")


def _to_host(target: torch.Tensor, values: torch.Tensor, later: bool) -> None:
    if _played is not None:
        _played("copy to the host")
    if later:
        _queue.copy_later(target, values.to(target.dtype).expand_as(target))
    else:
        _wait("copy to the host")
        target.copy_(values)


# --- Communication
# --------------------------------------------------------------------------------------------------


class _ToyGroup(dist.ProcessGroup):
    """Collectives of the device's tensors, as NCCL's are of CUDA's: Gloo over the host's memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND


_COLLECTIVES = (
    *(
        "_allgather_base",
        "_reduce_scatter_base",
        "allgather",
        "allgather_into_tensor_coalesced",
        "allreduce",
    ),
    *(
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "reduce",
    ),
    *("reduce_scatter", "scatter", "send"),
)
# since torch 2.13, beside the older ones
_NEW_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}


def _over_gloo(name: str) -> Callable[..., Any]:
    def call(group: _ToyGroup, *args: Any, **kwargs: Any) -> Any:
        _queue.operations += 1
        given, named = pytree.tree_map(
            lambda each: _host(each) if _is_toy(each) else each, (args, kwargs)
        )
        work = getattr(group._gloo, name)(*given, **named)
        return _ToyWork(work, args[0] if args and isinstance(args[0], list) else [])

    return call


class _ToyWork(dist.Work):
    """A started collective, whose result are the tensors of the device."""

    def __init__(self, inner: Any, result: list[Any]) -> None:
        super().__init__()
        self._inner, self._result = inner, result

    def wait(self, timeout: Any = None) -> bool:
        self._inner.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def get_future(self) -> Any:
        return self._inner.get_future().then(lambda _: self._result)


# --- Operations that torch does not leave to the fallback
# -------------------------------------------------------------

_OWN = (
    _aten._to_copy.default,
    _aten.convolution_overrideable.default,
    _aten.convolution_backward_overrideable.default,
)

# What autocast does on the CPU, for the operations of the tests: None stands for the dtype of
# autocast.
_AUTOCAST = {
    **dict.fromkeys(("addmm", "baddbmm", "bmm", "linear", "matmul", "mm"), None),
    **dict.fromkeys(("cross_entropy_loss", "mse_loss", "nll_loss"), torch.float32),
}


def _cast(op: Any, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    """Run an operation under autocast, with its floating tensors in a dtype."""
    wanted = torch.get_autocast_dtype(NAME) if dtype is None else dtype

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(wanted) if tensor.is_floating_point() and _is_toy(tensor) else tensor

    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEY):
        given, named = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
        return op(*given, **named)


# --- Registration
# --------------------------------------------------------------------------------------------------

_library: list[
    Any
] = []  # torch takes an operation back when the object with which it was registered is gone


def register() -> None:
    """Give this process the device, if it does not have it yet."""
    if _library:
        return
    for name in _COLLECTIVES:
        setattr(_ToyGroup, name, _over_gloo(name))
    for name, older in _NEW_NAMES.items():
        setattr(_ToyGroup, name, _over_gloo(older))
    _setup_privateuseone_for_python_backend(NAME, _DeviceModule())
    operations = torch.library.Library("_", "IMPL")
    operations.fallback(_run, "PrivateUse1")
    operations.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    of_aten = torch.library.Library("aten", "IMPL")
    for operation in _OWN:
        of_aten.impl(operation, partial(_run, operation), "PrivateUse1")
    for name, dtype in _AUTOCAST.items():
        of_aten.impl(
            name, partial(_cast, getattr(_aten, name).default, dtype), "AutocastPrivateUse1"
        )
    _library.extend((operations, of_aten))
    dist.Backend.register_backend(BACKEND, _ToyGroup, devices=[NAME])  # type: ignore[attr-defined]
    _complete_torch()


def _complete_torch() -> None:
    """Give the device what torch's hook for backends in Python has no place for."""
    make_tensor: Any = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        is_toy = device is not None and torch.device(device).type == NAME
        made: torch.Tensor = make_tensor(data, device=None if is_toy else device, **kwargs)
        return made.to(device) if is_toy else made

    def new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        kwargs = {"dtype": self.dtype, "device": self.device, **kwargs}
        return torch.tensor(data, **kwargs)

    clone_storage = torch.UntypedStorage.clone

    def clone(self: Any) -> Any:  # of a deep copy
        if self.device.type != NAME:
            return clone_storage(self)
        return _storage_of(torch.empty(0, dtype=torch.uint8).set_(self.host_memory.clone()))

    torch.UntypedStorage.clone = clone  # type: ignore[method-assign, assignment]
    torch.tensor = tensor
    torch.Tensor.new_tensor = new_tensor  # type: ignore[method-assign, assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment, misc]
    torch.Tensor.pin_memory = lambda self, device=None: self.clone()  # type: ignore[method-assign, assignment, misc]
    accelerator: Any = torch.accelerator
    accelerator.current_stream = lambda device=None: _Stream.current
    accelerator.synchronize = lambda device=None: _wait("synchronize")
