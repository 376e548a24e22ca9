"""`adasum_`: gradients of several workers combined by how far they point in the same direction,
tensor by tensor.
"""

# Annotations are not postponed: DistributedDataParallel inspects those of a hook.
import itertools
import math
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import devices
from ..errors import ConfigError
from . import Communicator

__all__ = ["adasum_", "adasum_hook", "combine"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)

# Below this squared norm a quotient by it is meaningless: its own square is no longer a normal
# number.
_SMALLEST = math.sqrt(sys.float_info.min)

# Elements that are converted to float64 at a time: 2 MiB of them, which stay in the cache.
_BLOCK = 1 << 18


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A(a, b) = (1 - a·b / 2‖a‖²) a + (1 - a·b / 2‖b‖²) b, in the dtype of `a`.

    The sum where they are orthogonal, the mean where they are equal. The product and the norms are
    taken in float64; a coefficient is 1 where its squared norm is below the square root of the
    smallest double. From Maleki et al., "Scaling Distributed Training with Adaptive Summation",
    MLSys 2021.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype not in _DTYPES:
        expected = f"the shape and dtype of the first ({tuple(a.shape)}, {a.dtype}), which is real"
        raise ConfigError("b", expected, found=f"{tuple(b.shape)}, {b.dtype}")
    mixed = a.detach().reshape(-1).to(_wide(a.dtype), copy=True)
    other = b.detach().reshape(-1)
    _mix(mixed, other, _coefficients(_products(mixed, other)))
    return mixed.view(a.shape).to(a.dtype)


def adasum_(
    tensors: Sequence[torch.Tensor], comm: Communicator | dist.ProcessGroup | None = None
) -> None:
    """Combine each of `tensors` over all workers by `combine`, in place; every worker gets the same
    bits.

    Pairs are combined in the binary tree over rank numbers: (0, 1), (2, 3) and so on, then pairs of
    pairs. The last one of an odd number is passed up unchanged, so that any number of workers will
    do: 7 give ``((0, 1), (2, 3)), ((4, 5), 6)``. Each tensor is combined separately, but all are
    sent together: each worker gets its part of all workers' values, combines it, and sends the
    result to all, as much data as in an all-reduce. Each level of the tree takes one more small
    sum, of the products. Half types are combined in float32 and rounded once.

    Args:
        tensors: of one dtype (float16, bfloat16, float32, float64) on one device; of the same
            shapes on all workers.
        comm: the workers, as a communicator or as a process group; all of the job when None.

    Raises:
        ConfigError: for tensors of several dtypes or devices, or whole numbers.
    """
    if not tensors:
        return
    _check(tensors)
    workers = comm if isinstance(comm, Communicator) else Communicator(comm)
    if workers.size == 1:
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    least, remainder = divmod(flat.numel(), workers.size)
    lengths = [least + (rank < remainder) for rank in range(workers.size)]
    parts = list(torch.split(flat, lengths))
    leaves = [torch.empty_like(parts[workers.rank]) for _ in parts]
    workers.alltoall(parts, out=leaves)
    wide = _wide(flat.dtype)
    edges = list(itertools.accumulate((tensor.numel() for tensor in tensors), initial=0))
    start = sum(part.numel() for part in parts[: workers.rank])
    mine = _up_the_tree(
        [leaf.to(wide) for leaf in leaves],
        _cuts(edges, start, leaves[0].numel()),
        len(tensors),
        workers,
    )
    workers.allgather(mine.to(flat.dtype), out=parts)
    for tensor, values in zip(
        tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.detach().copy_(values.view(tensor.shape))


def adasum_hook(
    state: Communicator | dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Do `adasum_` as DistributedDataParallel's communication hook: ``ddp.register_comm_hook(None,
    adasum_hook)``.

    The gradient of each parameter is combined separately, whatever bucket DDP puts it in. A bucket
    is combined when it is complete, in the thread of the backward pass.
    """
    buffer = bucket.buffer()
    adasum_(bucket.gradients(), state)
    waited_for = [buffer.device] if devices.has_streams(buffer.device) else []
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=waited_for)
    done.set_result(buffer)
    return done


def _check(tensors: Sequence[torch.Tensor]) -> None:
    for number, tensor in enumerate(tensors):
        where = f"tensors[{number}]"
        if tensor.dtype not in _DTYPES:
            raise ConfigError(
                where, "a tensor of float16, bfloat16, float32 or float64", tensor.dtype
            )
        if (tensor.dtype, tensor.device) != (tensors[0].dtype, tensors[0].device):
            expected = f"{tensors[0].dtype} on {tensors[0].device}, as the first"
            raise ConfigError(where, expected, found=f"{tensor.dtype} on {tensor.device}")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _cuts(edges: Sequence[int], start: int, length: int) -> list[tuple[int, int, int]]:
    """Return (tensor, begin, end) of the pieces of tensors in the part of a flat tensor that begins
    at `start`.
    """
    pieces = []
    for number, (first, last) in enumerate(itertools.pairwise(edges)):
        begin = max(first - start, 0)
        end = min(last - start, length)
        if begin < end:
            pieces.append((number, begin, end))
    return pieces


def _up_the_tree(
    values: list[torch.Tensor],
    cuts: Sequence[tuple[int, int, int]],
    tensors: int,
    comm: Communicator,
) -> torch.Tensor:
    """Return the combination of `values`, this worker's part of what each rank has; all workers
    call it.
    """
    while len(values) > 1:
        pairs = list(zip(values[::2], values[1::2], strict=False))
        table = torch.zeros(len(pairs), tensors, 3, dtype=torch.float64, device=values[0].device)
        for pair, (a, b) in enumerate(pairs):
            for number, begin, end in cuts:
                table[pair, number] = _products(a[begin:end], b[begin:end])
        factors = _coefficients(comm.allreduce(table))
        for pair, (a, b) in enumerate(pairs):
            for number, begin, end in cuts:
                _mix(a[begin:end], b[begin:end], factors[pair, number])
        values = values[::2]
    return values[0]


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return (a·b, a·a, b·b) in float64."""
    total = torch.zeros(3, dtype=torch.float64, device=a.device)
    for x, y in zip(torch.split(a, _BLOCK), torch.split(b, _BLOCK), strict=True):
        x = x.double()
        y = y.double()
        total += torch.stack([x.dot(y), x.dot(x), y.dot(y)])
    return total


def _mix(a: torch.Tensor, b: torch.Tensor, factors: torch.Tensor) -> None:
    """Replace `a` by ``factors[0] * a + factors[1] * b``."""
    left, right = factors.unbind()
    # in float64: where one is much smaller than the other, its factor is beyond the range of
    # float32
    for x, y in zip(torch.split(a, _BLOCK), torch.split(b, _BLOCK), strict=True):
        x.copy_(x.double() * left + y.double() * right)


def _coefficients(products: torch.Tensor) -> torch.Tensor:
    """Return the factors of a and of b, (…, 2), from (…, 3) products."""
    dot = products[..., :1]
    norms = products[..., 1:]
    ones = torch.ones_like(norms)
    there = norms >= _SMALLEST
    return torch.where(there, 1 - dot / (2 * torch.where(there, norms, ones)), ones)
