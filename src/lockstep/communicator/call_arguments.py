"""Arguments of a communicator's operations: tensors as flat memory, their shapes as integers, and
the checks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import ConfigError

MAX_DIMS = 16
SPEC_LENGTH = MAX_DIMS + 3  # integers that encode a tensor's dtype, device and shape

# the supported dtypes; the position encodes the dtype
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` contiguous and without autograd; it shares its memory where it is contiguous
    already.
    """
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous()


def dense_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous buffer for `tensor`: the tensor itself where it is contiguous, otherwise
    a new one.
    """
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def copy_back(plain: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy the result of `dense` or `dense_buffer` into `tensor`, unless it shares its memory;
    return `tensor`.
    """
    if plain.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(plain)
    return tensor


def flatten(plain: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in one dimension, sharing its memory."""
    if plain.dim() == 1 and plain.stride(0) == 1:
        return plain
    # a dimension of length 1 may have any stride, which `view` would keep
    return plain.as_strided((plain.numel(),), (1,))


def wire_view(plain: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return a contiguous tensor as it is passed to the backend of `group`: in one dimension,
    sharing its memory.

    Its bytes, which every backend transfers; where the backend transfers any dtype, its elements,
    so that the backend can see that all ranks have one dtype.
    """
    if plain.is_cpu and getattr(group, "carries_any_dtype", False):
        return flatten(plain.detach())
    return flatten(plain).view(torch.uint8)


def fill_from_wire(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Copy `data`, from `wire_view` on another rank, into `tensor`."""
    if tensor.numel():  # the memory of an empty tensor may be misaligned for its dtype
        tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))


class TensorSpec(NamedTuple):
    """What other ranks must know of a tensor to allocate one like it."""

    dtype: torch.dtype
    on_cpu: bool
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of `tensor`."""
        return cls(tensor.dtype, tensor.is_cpu, tuple(tensor.shape))

    @classmethod
    def decode(cls, row: Sequence[int]) -> TensorSpec:
        """Return the spec that `encode` has encoded."""
        return cls(DTYPES[row[0]], bool(row[1]), tuple(row[3 : 3 + row[2]]))

    def encode(self) -> list[int]:
        """Return the spec as `SPEC_LENGTH` integers."""
        row = [DTYPES.index(self.dtype), int(self.on_cpu), len(self.shape), *self.shape]
        return row + [0] * (SPEC_LENGTH - len(row))

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a new tensor of this spec, on the CPU or on `device`."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else device)

    def __str__(self) -> str:
        return f"{self.dtype} on {'the CPU' if self.on_cpu else 'a device'}"


class Arguments:
    """Checks of the arguments of one rank's calls; all raise ConfigError, which names the argument
    and the rank.

    Args:
        rank: this rank of the communicator.
        size: its number of ranks.
        device: where this rank computes.
        backends: type of device → name of the backend for its tensors; empty without a process
            group.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, backends: dict[str, str]
    ) -> None:
        self.rank = rank
        self.size = size
        self.backends = backends
        # for shapes and pickled objects: the CPU, but for backends such as NCCL alone
        self.control_device = torch.device("cpu") if not backends or "cpu" in backends else device

    def error(self, argument: str, expected: str, got: object, hint: str = "") -> ConfigError:
        """Return the error for `argument`, with this rank's number."""
        return ConfigError(
            argument, expected, found=f"{got} on rank {self.rank} of {self.size}", hint=hint
        )

    def backend_of(self, tensor: torch.Tensor) -> str:
        """Return the name of the backend for `tensor`."""
        return self.backends.get(tensor.device.type, "")

    def check_tensor(self, argument: str, tensor: Any) -> torch.Tensor:
        """Return `tensor`, if the process group can transfer it."""
        if not isinstance(tensor, torch.Tensor):
            hint = "The methods whose names end in _object take any value that can be pickled."
            raise self.error(argument, "a tensor", type(tensor).__name__, hint)
        if self.backends and tensor.device.type not in self.backends:
            kinds = " or ".join(self.backends)
            raise self.error(
                argument, f"a tensor on a device that the group carries ({kinds})", tensor.device
            )
        if tensor.layout is not torch.strided:
            raise self.error(argument, "a dense tensor", tensor.layout)
        if tensor.dtype not in DTYPES:
            raise self.error(argument, "a dtype of plain numbers", tensor.dtype)
        if tensor.dim() > MAX_DIMS:
            raise self.error(argument, f"at most {MAX_DIMS} dimensions", tensor.dim())
        return tensor

    def check_rank(self, argument: str, rank: Any) -> int:
        """Return `rank` as an int, if it is a rank of the communicator."""
        checked = self.check_integer(argument, rank)
        if not 0 <= checked < self.size:
            raise self.error(argument, f"a rank of this communicator, 0 to {self.size - 1}", rank)
        return checked

    def check_integer(self, argument: str, number: Any) -> int:
        """Return `number` as an int."""
        try:
            return operator.index(number)
        except TypeError:
            raise self.error(argument, "a whole number", repr(number)) from None

    def check_list(
        self, argument: str, tensors: Any, like: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return `tensors` as a list of one for each rank, all of one dtype and on one device (of
        `like`, if given).
        """
        if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
            raise self.error(argument, f"a list of {self.size} tensors", type(tensors).__name__)
        if len(tensors) != self.size:
            raise self.error(argument, f"{self.size} tensors, one for each rank", len(tensors))
        for number, tensor in enumerate(tensors):
            self.check_tensor(f"{argument}[{number}]", tensor)
            self.check_like(f"{argument}[{number}]", tensor, tensors[0] if like is None else like)
        return list(tensors)

    def check_like(self, argument: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
        """Require the dtype and device of `like`."""
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            expected = f"{like.dtype} on {like.device}, as the others"
            raise self.error(argument, expected, f"{tensor.dtype} on {tensor.device}")

    def check_out(self, out: Any, like: torch.Tensor) -> torch.Tensor:
        """Return `out`, if it is a tensor of the dtype, device and shape of `like`."""
        result = self.check_tensor("out", out)
        self.check_like("out", result, like)
        self.check_shape("out", result, like.shape)
        return result

    def check_shape(self, argument: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
        """Require this shape."""
        if tuple(tensor.shape) != tuple(shape):
            raise self.error(argument, f"the shape {tuple(shape)}", tuple(tensor.shape))

    def check_values(self, values: Sequence[Any] | None) -> list[Any]:
        """Return `values` as a list of one for each rank."""
        if not isinstance(values, Sequence) or len(values) != self.size:
            got = len(values) if isinstance(values, Sequence) else type(values).__name__
            raise self.error("values", f"a list of {self.size} values, one for each rank", got)
        return list(values)

    def split(self, argument: str, data: Any, counts: Sequence[int] | None) -> list[torch.Tensor]:
        """Return one part for each rank: a list of them as it is, or a tensor split along its first
        dimension.
        """
        if not isinstance(data, torch.Tensor):
            if counts is not None:
                raise self.error("counts", f"none beside a list of {argument}", list(counts))
            return self.check_list(argument, data)
        self.check_tensor(argument, data)
        if data.dim() == 0:
            raise self.error(
                argument, "a first dimension to split along", "a tensor without dimensions"
            )
        if counts is None:
            return list(torch.tensor_split(data, self.size))
        rows = [self.check_integer("counts", count) for count in counts]
        if len(rows) != self.size or min(rows) < 0 or sum(rows) != len(data):
            raise self.error(
                "counts", f"{self.size} numbers of rows that add up to {len(data)}", rows
            )
        return list(torch.split(data, rows))
