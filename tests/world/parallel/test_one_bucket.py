"""The gradients of a small model and the numbers of a step travel in one message, and nothing is
rounded on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data.loader import Loader
from lockstep.errors import MismatchError
from lockstep.parallel import one_bucket
from lockstep.parallel.distributed import Distributed
from lockstep.parallel.one_bucket import OneBucket
from lockstep.training.step.train_step import TrainStep
from support.gradient_ways import WAYS, check_way, way
from support.outcome import RanksFailedError
from support.pool import Pool

Weights = list[list[float]]

# --- the message
# --------------------------------------------------------------------------------------------------

NUMBERS = (1.0, 2.0**53 - 1, 1 / 3, -1e-310, 1e300, math.inf, -0.0, 65535.0, 123456789.123456789)


def average(dtype: torch.dtype) -> tuple[list[float], list[list[float]]]:
    comm = lockstep.init("cpu")
    parameters = [
        nn.Parameter(torch.zeros(3, dtype=dtype)),
        nn.Parameter(torch.zeros(2, 2, dtype=dtype)),
    ]
    parameters[0].grad = torch.full((3,), 1.5 * (comm.rank + 1), dtype=dtype)
    if comm.rank == 1:  # the only one that uses it
        parameters[1].grad = torch.full((2, 2), 8.0, dtype=dtype)
    bucket = OneBucket(parameters, comm)
    sums = bucket.average(torch.tensor(NUMBERS, dtype=torch.float64) * (comm.rank + 1))
    gradients = [p.grad.flatten().tolist() for p in parameters if p.grad is not None]
    bucket.average(
        torch.zeros(2, dtype=torch.float64)
    )  # a step may have fewer numbers than the one before
    return sums.tolist(), gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("workers", [2, 4])
def test_gradients_are_averaged_and_numbers_are_summed_exactly(
    pool: Pool, dtype: torch.dtype, workers: int
) -> None:
    expected = [sum(number * (rank + 1) for rank in range(workers)) for number in NUMBERS]
    mean = 1.5 * sum(range(1, workers + 1)) / workers
    for sums, gradients in pool.run(average, dtype, workers=workers):
        assert sums == expected
        assert gradients == [[mean] * 3, [8.0 / workers] * 4]


def which_fit() -> dict[str, bool]:
    comm = lockstep.init("cpu")
    limit = one_bucket.MOST_BYTES // 4

    def fits(*tensors: torch.Tensor, numbers: int = 8) -> bool:
        return OneBucket.fits([nn.Parameter(tensor) for tensor in tensors], comm, numbers)

    class Tagged(torch.Tensor):
        pass

    return {
        "small": fits(torch.zeros(3), torch.zeros(2, 2)),
        "float64": fits(torch.zeros(3).double()),
        "full": fits(torch.zeros(limit)),
        "too large": fits(torch.zeros(limit), torch.zeros(1)),
        "too large in float64": fits(torch.zeros(limit).double()),
        "half precision": fits(torch.zeros(3).bfloat16()),
        "mixed dtypes": fits(torch.zeros(3), torch.zeros(3).double()),
        "another device": fits(torch.zeros(3, device="meta")),
        "a class of tensors": fits(torch.zeros(3).as_subclass(Tagged)),
        "many numbers": fits(torch.zeros(3), numbers=5000),
    }


def test_what_fits(pool: Pool) -> None:
    for found in pool.run(which_fit, workers=2):
        assert [name for name, fits in found.items() if fits] == ["small", "float64", "full"]


# --- training
# --------------------------------------------------------------------------------------------------


def data(n: int = 37) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(n, 1, 6, 6, generator=generator), torch.randint(0, 4, (n,), generator=generator)
    )


class Mixed(nn.Module):
    """Convolutions in another memory format, batch norm, and a head that some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head, self.rare = nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.norm(self.first(x)).relu()).flatten(1)
        output: torch.Tensor = self.head(hidden)
        return output + self.rare(hidden) if x[0, 0, 0, 0] > 0 else output


def mixed() -> nn.Module:
    return Mixed()


def train(
    by: str, make: Callable[[], nn.Module] = mixed, before: Any = None, **options: Any
) -> Weights:
    """Return the losses, and the values of parameters and buffers, after three epochs."""
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = make()
    with way(by):
        step = TrainStep(
            model,
            torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
            nn.CrossEntropyLoss(),
            **options,
        )
        losses = []
        for epoch in range(3):
            for batch in Loader(data(), 8, comm=comm).epoch(epoch):
                if before is not None:
                    before(step)
                losses.append(float(step(batch)))
    check_way(step.strategy, by)
    return [losses, *(value.flatten().tolist() for value in model.state_dict().values())]


def freeze_norm(step: TrainStep) -> None:
    """Put batch norm into evaluation mode and back: a step then has other numbers beside the
    gradients.
    """
    step.model.get_submodule("norm").train(step.steps_done % 3 != 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.3},
        {"precision": "fp16"},
        {"before": freeze_norm},
    ],
    ids=["plain", "accumulated", "clipped", "fp16", "other numbers"],
)
def test_both_ways_have_the_same_bits(pool: Pool, options: dict[str, Any]) -> None:
    # Gloo adds the gradients of three workers in an order that depends on their place in the
    # message
    for backend, workers in (("shm", 2), ("shm", 3), ("gloo", 2)):
        message, ddp = (
            pool.run(train, by, **options, workers=workers, backend=backend) for by in WAYS
        )
        assert message == ddp
        assert message == [message[0]] * workers


class Sparse(nn.Module):
    """Rows that are looked up by a function: that their gradient is sparse is known after a
    backward pass only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Parameter(torch.randn(20, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.flatten(1).abs().mul(5).long() % 20
        output: torch.Tensor = self.head(
            nn.functional.embedding(words, self.rows, sparse=True).mean(1)
        )
        return output


def test_a_gradient_that_turns_out_to_be_sparse(pool: Pool) -> None:
    alone, *_ = pool.run(train, "message", Sparse, workers=1)
    for found in pool.run(train, "message", Sparse, workers=2):
        for one, other in zip(alone, found, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def add_up(by: str) -> list[float]:
    """Return the gradient of a parameter that the optimizer does not have, which adds up over
    steps.
    """
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Linear(4, 4))
    with way(by):
        step = TrainStep(model, torch.optim.SGD(model[1].parameters(), 0.05), nn.CrossEntropyLoss())
    for batch in Loader(data(32), 8, comm=comm).epoch(0):
        step(batch)
    gradient = model[2].weight.grad
    assert isinstance(gradient, torch.Tensor)
    return gradient.flatten().tolist()


def test_gradients_outside_of_the_optimizer_add_up_as_on_one_worker(pool: Pool) -> None:
    alone, *_ = pool.run(add_up, "message", workers=1)
    for by in WAYS:
        for found in pool.run(add_up, by, workers=2):
            assert found == pytest.approx(alone, rel=1e-4, abs=1e-7)


def freeze_another_layer_on_each_rank(by: str) -> None:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 36))
    with way(by):
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.05), nn.CrossEntropyLoss())
        for batch in Loader(data(), 8, comm=comm).epoch(0):
            model[1 + comm.rank].requires_grad_(False)
            step(batch)


@pytest.mark.parametrize("by", WAYS)
def test_workers_that_train_other_parameters_of_the_same_size_are_told(pool: Pool, by: str) -> None:
    with pytest.raises(RanksFailedError, match=MismatchError.__name__) as caught:
        pool.run(freeze_another_layer_on_each_rank, by, workers=2)
    assert "1.weight float32[36, 36] (not trained) on rank 0" in str(caught.value)


class Growing(nn.Module):
    """A model whose large layer may be frozen: it is then small, and later large again."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.head = nn.Linear(36, 8000), nn.Linear(8000, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.large(x.flatten(1)).relu())
        return output


def freeze_and_unfreeze() -> tuple[list[float], list[bool]]:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = Growing()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.05), nn.CrossEntropyLoss())
    losses, wrapped = [], []
    kept = [step._module]  # as a program, or the frames of an error, may do
    for number, batch in enumerate(Loader(data(64), 8, comm=comm).epoch(0)):
        model.large.requires_grad_(number not in range(3, 6))
        losses.append(float(step(batch)))
        assert isinstance(step.strategy, Distributed)
        wrapped.append(step.strategy._ddp is not None)
        kept.append(step._module)
    return losses, wrapped


def test_a_model_may_become_small_and_large_again(pool: Pool) -> None:
    alone, _ = pool.run(freeze_and_unfreeze, workers=1)[0]
    for losses, wrapped in pool.run(freeze_and_unfreeze, workers=2):
        assert losses == pytest.approx(alone, rel=1e-5)
        assert wrapped == [True] * 3 + [False] * 3 + [True] * 2
