"""Which samples of a step caused its loss, its gradient, its running statistics, or a value that is
not finite.

The share of a set of samples in a gradient is ⟨its gradient, whole gradient⟩ / |whole gradient|².
Shares of disjoint sets add up to that of their union, and those of all samples to 1; so a half
costs one backward pass, and the other half is the rest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..communicator import Communicator
from ..data.loader import Batch
from ..errors import DataError
from ..parallel.nested import map_tensors, tensors_of
from ..training.step.shards_alone import ShardAlone, shards_of, why_not_alone
from ..training.trainer import Trainer
from .probes import gathered
from .samples import describe, picture

_ENOUGH = 0.8  # of the gradient, held by samples that are named
# a set with a share of no more than so many times the average of so many samples is left alone
_SEVERAL = 3.0
_MOST_NAMED = 8


class Culprit(msgspec.Struct):
    """A sample that caused what stands out in a step.

    Attributes:
        index: its number in the data set; of an iterable one, in the epoch.
        share: of the whole gradient; NaN where something is not finite, or of running statistics.
        loss: the sum of its loss; NaN where that is not known.
        what: what it is: a path or file, a text, shapes and ranges of values, the label.
        origin: where a value is first not finite; "" where all are.
        picture: the file to which the image was written; "" without one.
        why_no_picture: why the image was not written, a clause; "" without an image.
    """

    index: int
    share: float = math.nan
    loss: float = math.nan
    what: str = ""
    origin: str = ""
    picture: str = ""
    why_no_picture: str = ""


class Culprits(msgspec.Struct):
    """What was found in a step.

    Attributes:
        kind: "gradient", "not finite" or "running statistics".
        samples: the culprits, the worst first.
        largest: the largest share of a sample that was looked at; 0 where shares mean nothing.
        forward, backward: the passes over a shard or a part of it that it took.
    """

    kind: str
    samples: list[Culprit]
    largest: float = 0.0
    forward: int = 0
    backward: int = 0


def find_culprits(
    trainer: Trainer, dataset: Any, batch: Batch, options: dict[str, Any]
) -> Culprits:
    """Return which samples caused what stands out in a step; called by all workers before its
    passes.

    Args:
        trainer: the trainer.
        dataset: the data set.
        batch: this worker's part of the global batch.
        options: `column`, of the ledger, what stands out, and `folder`, for pictures.

    Raises:
        DataError: the passes of this training cannot be run alone.
    """
    why = why_not_alone(trainer.step)
    if why:
        raise DataError(f"samples cannot be told apart: {why}")
    search = _Search(trainer.comm, shards_of(trainer.step, batch), batch.global_size)
    culprits = search.run(options["column"])
    for culprit in culprits.samples:  # the worker that has the sample describes it
        data = search.data_of(culprit.index)
        if data is not None:
            culprit.what = describe(dataset, culprit.index, data)
            culprit.picture, culprit.why_no_picture = picture(
                options["folder"], culprit.index, data
            )
    by_rank = trainer.comm.allgather_object(culprits.samples)
    culprits.samples = [
        next((culprit for culprit in same_sample if culprit.what), same_sample[0])
        for same_sample in zip(*by_rank, strict=True)
    ]
    return culprits


class _Search:
    """The search in this worker's shards; all workers call the same.

    Args:
        comm: of the workers.
        shards: this worker's.
        size: samples in the global batch.
    """

    def __init__(self, comm: Communicator, shards: Sequence[ShardAlone], size: int) -> None:
        self._comm = comm
        self._shards = shards
        self._size = size
        self._forward = 0
        self._backward = 0

    def data_of(self, index: int) -> Any:
        """Return a sample as the step has it, a batch of one; None if another worker has it."""
        for shard in self._shards:
            if index in shard.indices:
                return _rows_of(shard.data, [list(shard.indices).index(index)])
        return None

    def run(self, column: str) -> Culprits:
        """Return the culprits, by what stands out."""
        results = [(shard, *shard.gradients()) for shard in self._shards]
        self._forward += len(results)
        self._backward += len(results)
        bad = [shard for shard, loss, _, gradients in results if not _is_finite(loss, gradients)]
        kind = "gradient"
        largest = 0.0
        if sum(self._comm.allgather_object(len(bad))):
            kind = "not finite"
            samples = gathered(
                self._comm, [culprit for shard in bad for culprit in self._not_finite(shard)]
            )
        elif column == "buffers_norm":
            kind = "running statistics"
            samples = self._raising_statistics()
        else:
            samples, largest = self._by_shares(
                [(shard, gradients) for shard, _, _, gradients in results]
            )
        counts = self._comm.allgather_object((self._forward, self._backward))
        forward, backward = (sum(parts) for parts in zip(*counts, strict=True))
        return Culprits(kind, samples[:_MOST_NAMED], largest, forward, backward)

    def _by_shares(
        self, results: Sequence[tuple[ShardAlone, list[torch.Tensor]]]
    ) -> tuple[list[Culprit], float]:
        """Return the samples that hold enough of the gradient, if few do, and the largest share of
        one.
        """
        parameters = self._shards[0].parameters.values() if self._shards else []
        total = [torch.zeros_like(p) for p in parameters]
        for _, gradients in results:
            torch._foreach_add_(total, gradients)
        total = [self._comm.allreduce(gradient) for gradient in total]
        square = sum(float(gradient.double().square().sum()) for gradient in total)
        if not square:
            return [], 0.0
        shares = [(_inner(gradients, total) / square, shard) for shard, gradients in results]
        culprits = gathered(self._comm, self._halved(shares, total, square))
        culprits.sort(key=lambda culprit: -abs(culprit.share))
        held = 0.0
        named: list[Culprit] = []
        for culprit in culprits:  # over all workers; each has looked at its own shards
            if held < _ENOUGH:
                named.append(culprit)
                held += culprit.share
        few = len(named) <= max(4, self._size // 16)
        largest = culprits[0].share if culprits else 0.0
        return (named if few and held >= _ENOUGH / 2 else []), largest

    def _halved(
        self, shares: Sequence[tuple[float, ShardAlone]], total: list[torch.Tensor], square: float
    ) -> list[Culprit]:
        """Split the set with the largest share until single samples hold enough, or nothing is
        concentrated.
        """
        heap = [
            (-abs(share), number, share, shard, list(range(len(shard.indices))))
            for number, (share, shard) in enumerate(shares)
        ]
        heapq.heapify(heap)
        number = len(heap)
        # Of each shard that is halved: one forward pass, whose graph is kept.
        losses: dict[int, torch.Tensor] = {}
        culprits: list[Culprit] = []
        held = 0.0
        while heap and held < _ENOUGH:
            _, _, share, shard, rows = heapq.heappop(heap)
            if shard.number not in losses:
                losses[shard.number] = shard.losses()
                self._forward += 1
            if len(rows) == 1:
                loss = float(losses[shard.number][rows[0]].detach())
                culprits.append(Culprit(shard.indices[rows[0]], share, loss))
                held += share
                continue
            is_part = len(rows) < len(shard.indices)
            if is_part and abs(share) < _SEVERAL * len(rows) / self._size:
                continue
            half = rows[: len(rows) // 2]
            rest = rows[len(rows) // 2 :]
            gradients = torch.autograd.grad(
                losses[shard.number][half].sum() / self._size,
                list(shard.parameters.values()),
                retain_graph=True,
                allow_unused=True,
            )
            self._backward += 1
            of_half = _inner(gradients, total) / square
            for part, of_part in ((half, of_half), (rest, share - of_half)):
                heapq.heappush(heap, (-abs(of_part), number, of_part, shard, part))
                number += 1
        return culprits

    def _raising_statistics(self) -> list[Culprit]:
        """Return the sample that raises the norm of the buffers most: halved by forward passes over
        the halves.
        """
        best: list[tuple[float, int]] = []
        for shard in self._shards:
            rows = list(range(len(shard.indices)))
            norm = 0.0
            while len(rows) > 1:
                halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
                norms = [shard.buffers_norm(_padded(half)) for half in halves]
                self._forward += 2
                worse = int(norms[1] > norms[0])
                rows = halves[worse]
                norm = norms[worse]
            best.append((norm, shard.indices[rows[0]]))
        _, index = max(gathered(self._comm, best))
        return [Culprit(index)]

    def _not_finite(self, shard: ShardAlone) -> list[Culprit]:
        """Return the samples of a shard without which everything in it is finite, and where each
        goes wrong.
        """
        losses = shard.losses()
        self._forward += 1
        rows = torch.nonzero(~torch.isfinite(losses)).reshape(-1).tolist()
        if not 0 < len(rows) < len(losses):
            # Batch norm has spread it to all of them, or it is in the backward pass only.
            rows = []
            stack = [list(range(len(shard.indices)))]
            while stack:
                tried = stack.pop()
                if self._is_finite_alone(shard, tried):
                    continue
                if len(tried) == 1:
                    rows += tried
                else:
                    stack += [tried[len(tried) // 2 :], tried[: len(tried) // 2]]
        return [
            Culprit(shard.indices[row], origin=_origin(shard, row)) for row in rows[:_MOST_NAMED]
        ]

    def _is_finite_alone(self, shard: ShardAlone, rows: list[int]) -> bool:
        loss = shard.losses(_padded(rows)).sum()
        self._forward += 1
        if not bool(torch.isfinite(loss)):
            return False
        gradients = torch.autograd.grad(loss, list(shard.parameters.values()), allow_unused=True)
        self._backward += 1
        return _is_finite(0.0, [gradient for gradient in gradients if gradient is not None])


def _padded(rows: list[int]) -> list[int]:
    """Return rows of at least two samples, because batch norm refuses one; one is doubled, which
    changes no mean.
    """
    return rows * 2 if len(rows) == 1 else rows


def _rows_of(data: Any, rows: list[int]) -> Any:
    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, data)


def _inner(gradients: Sequence[torch.Tensor | None], total: Sequence[torch.Tensor]) -> float:
    pairs = zip(gradients, total, strict=True)
    return sum(
        float((gradient.double() * whole).sum())
        for gradient, whole in pairs
        if gradient is not None
    )


def _is_finite(loss: float, gradients: Sequence[torch.Tensor]) -> bool:
    return math.isfinite(loss) and all(
        bool(torch.isfinite(gradient).all()) for gradient in gradients
    )


class _FirstOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation that makes values that are not finite of finite ones, and in which
    module.
    """

    # They make no values: memory that is not written yet, and other views.
    _NO_VALUES = ("empty", "new_empty", "detach", "view", "alias", "as_strided", "expand")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules: list[str] = []
        self.is_backward = False
        self.origin = ""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op.__name__.partition(".")[0]
        if self.origin or name.startswith(self._NO_VALUES):
            return result
        outputs = [tensor for tensor in tensors_of(result) if _is_bad(tensor)]
        inputs = tensors_of([list(args), dict(kwargs or {})])
        if outputs and not any(_is_bad(tensor) for tensor in inputs):
            what = "NaN" if bool(torch.isnan(outputs[0]).any()) else "infinity"
            where = self.modules[-1] if self.modules else "the loss"
            of_pass = "the backward pass of " if self.is_backward else ""
            self.origin = f"{what} first in {of_pass}{where}, operation {name}"
        return result


def _is_bad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())


def _origin(shard: ShardAlone, row: int) -> str:
    """Return in which module and operation of the passes over a sample alone a value is first not
    finite.
    """
    for tensor in tensors_of(_rows_of(shard.data, [row])):
        if _is_bad(tensor):
            count = int((~torch.isfinite(tensor)).sum())
            return f"in the sample itself: {count} of {tensor.numel()} values are not finite"
    watch = _FirstOperation()
    model = shard.step.model
    handles = []
    for name, module in model.named_modules():
        label = f"{name or 'the model'} ({type(module).__name__})"

        def enter(*_: Any, label: str = label) -> None:
            watch.modules.append(label)

        def leave(*_: Any) -> None:
            watch.modules.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
        if not list(module.children()):
            handles.append(module.register_full_backward_pre_hook(enter))
            handles.append(module.register_full_backward_hook(leave))
    try:
        # A compiled model has no modules to look into.
        with (
            torch.compiler.set_stance("force_eager"),
            torch.autograd.set_multithreading_enabled(False),
            watch,
        ):
            loss = shard.losses([row, row]).sum()
            watch.is_backward = True
            torch.autograd.grad(loss, list(shard.parameters.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return (
        f"{watch.origin}; the sample itself is finite"
        if watch.origin
        else "with this sample alone all is finite"
    )
