"""The reducer for a loop of one's own: the same sums at any number of workers, with whatever
parameters there are.
"""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import ConfigError, MismatchError
from lockstep.parallel import reducer as reducers
from support.hosts import pretending
from support.pool import Pool

SAMPLES = 21


def bits(tensors: list[torch.Tensor | None]) -> list[Any]:
    return [
        None if t is None else (t.dtype, t.stride(), t.contiguous().view(torch.uint8).tolist())
        for t in tensors
    ]


def several_dtypes() -> nn.ParameterList:
    generator = torch.Generator().manual_seed(1)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))

    turned = nn.Parameter(torch.randn(5, 4, generator=generator).t())
    return nn.ParameterList(
        [
            made(4, 37),
            made(3),
            made(4, 5, dtype=torch.float64),
            turned,
            made(4, 3, dtype=torch.bfloat16),
            made(2),
        ]
    )


def loss_of(parameters: nn.ParameterList, x: torch.Tensor, shard: int) -> torch.Tensor:
    """Of which not every shard reaches every parameter, and none reaches the last."""
    first, second, wide, turned, half, _ = parameters
    loss = (x @ first).tanh().sum() + (x.double() @ wide).sin().sum() - (x @ turned).relu().sum()
    loss = loss + (x.bfloat16() @ half).float().sum()
    return loss + (second.sum() * x.sum() if shard % 3 == 1 else 0.0)


def sums(virtual_workers: int, steps: int = 3, freeze: int | None = None) -> list[Any]:
    """The gradients and the sums of each of some steps; in step `freeze` one parameter is left
    out.
    """
    parameters = several_dtypes()
    reducer = lockstep.invariance.OrderedReducer(
        parameters, virtual_workers=virtual_workers, comm=lockstep.init("cpu")
    )
    found = []
    for step in range(steps):
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(step))
        parameters[0].requires_grad_(step != freeze)
        for shard in reducer:
            part = x[reducer.part(SAMPLES, shard)]
            if not len(part):
                reducer.add(torch.zeros(2))
                continue
            loss = loss_of(parameters, part, shard)
            reducer.add(torch.stack([loss.detach().float(), torch.tensor(float(len(part)))]))
            loss.backward()
        found.append(bits([*(p.grad for p in parameters), reducer.sums]))
        assert reducer.sums is not None
        assert float(reducer.sums[1]) == SAMPLES
    return found


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_any_number_of_workers(pool: Pool, workers: int, backend: str) -> None:
    def all_of_them() -> list[Any]:
        before, reducers.BUCKET = reducers.BUCKET, 64  # several buckets, also of this little
        try:
            return [
                sums(virtual_workers, freeze=freeze)
                for virtual_workers, freeze in ((4, None), (6, None), (7, 1), (8, None), (30, 0))
            ]
        finally:
            reducers.BUCKET = before

    expected = pool.run(all_of_them, workers=1)
    assert pool.run(all_of_them, workers=workers, backend=backend) == expected * workers


def one_step_of_each() -> list[Any]:
    return [sums(virtual_workers, steps=1) for virtual_workers in range(3, 25)]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Any:
    return pool.run(one_step_of_each, workers=1)[0]


@pytest.mark.parametrize("hosts", ["abb", "abc", "aab"])
def test_three_workers_on_several_hosts(pool: Pool, alone: Any, hosts: str) -> None:
    """Inside a host sums are taken in rank order, between hosts they are not."""

    def body() -> list[Any]:
        with pretending(hosts):
            dist.init_process_group("shm")
        return one_step_of_each()

    for found in pool.run(body, workers=3, init=False):
        assert [
            virtual_workers
            for virtual_workers, own in enumerate(found, 3)
            if own != alone[virtual_workers - 3]
        ] == []


def test_the_sum_is_the_gradient_of_the_whole() -> None:
    model = nn.Linear(4, 3)
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    reducer = lockstep.invariance.OrderedReducer(
        model.parameters(), virtual_workers=5, comm=lockstep.init("cpu")
    )
    for shard in reducer:
        model(x[reducer.part(SAMPLES, shard)]).square().sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for ours, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad)


def test_a_parameter_without_gradient_has_one_of_zeros(pool: Pool) -> None:
    def unused() -> tuple[float, bool]:
        used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        reducer = lockstep.invariance.OrderedReducer([used, idle], virtual_workers=4)
        for _ in reducer:
            used.sum().backward()
        assert idle.grad is not None
        return float(used.grad[0]), bool((idle.grad == 0).all()) and bool(idle.grad.signbit().all())  # type: ignore[index]

    for workers in (1, 2, 3):
        assert pool.run(unused, workers=workers) == [(4.0, True)] * workers


def first_parameters(
    reducer: lockstep.invariance.OrderedReducer, ps: list[nn.Parameter]
) -> list[int]:
    buckets = reducer._reducer._buckets
    return [
        next(number for number, p in enumerate(ps) if p is bucket.parameters[0])
        for bucket in buckets
    ]


def test_buckets_follow_the_order_of_rank_0s_backward_pass(pool: Pool) -> None:
    def orders() -> list[list[int]]:
        ps = [nn.Parameter(torch.ones(16)) for _ in range(4)]
        before, reducers.BUCKET = reducers.BUCKET, 64
        try:
            reducer = lockstep.invariance.OrderedReducer(ps, virtual_workers=2)
            found = []
            for _ in range(2):
                found.append(
                    [
                        next(n for n, p in enumerate(ps) if p is b.parameters[0])
                        for b in reducer._reducer._buckets
                    ]
                )
                for _ in reducer:
                    x = torch.ones(16)
                    for number in (2, 0, 3, 1) if reducer.comm.rank == 0 else (0, 1, 2, 3):
                        x = x * ps[number]
                    x.sum().backward()
            found.append(first_parameters(reducer, ps))
            assert all(torch.equal(p.grad, torch.full((16,), 2.0)) for p in ps)  # type: ignore[arg-type]
            return found
        finally:
            reducers.BUCKET = before

    first, second = pool.run(orders, workers=2)
    assert first == second
    assert first[1] == first[2] == [1, 3, 0, 2]


def several_backwards(parameter: nn.Parameter) -> None:
    parameter.square().sum().backward()
    parameter.sum().backward()


def reentrant(parameter: nn.Parameter) -> None:
    from torch.utils.checkpoint import checkpoint

    def square(x: torch.Tensor) -> torch.Tensor:
        return x * parameter

    x = torch.ones(2, requires_grad=True)
    both = checkpoint(square, x, use_reentrant=True) + checkpoint(square, x, use_reentrant=True)
    both.sum().backward()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("passes", [several_backwards, reentrant])
def test_several_backward_passes_in_a_shard_are_refused(
    pool: Pool, workers: int, passes: Callable[[nn.Parameter], None]
) -> None:
    def refused() -> None:
        parameter = nn.Parameter(torch.ones(2))
        reducer = lockstep.invariance.OrderedReducer([parameter], virtual_workers=2)
        with pytest.raises(
            ConfigError, match="backward: expected one backward pass for each shard"
        ):
            for _ in reducer:
                passes(parameter)

    pool.run(refused, workers=workers)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    reducer = lockstep.invariance.OrderedReducer(
        table.parameters(), virtual_workers=2, comm=lockstep.init("cpu")
    )
    with pytest.raises(ConfigError, match=r"sparse gradient\. Make embeddings with sparse=False"):
        for _ in reducer:
            table(torch.tensor([1])).sum().backward()


def test_other_hooks_on_gradients_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    reducer = lockstep.invariance.OrderedReducer(
        [parameter], virtual_workers=2, comm=lockstep.init("cpu")
    )
    hook = parameter.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1))  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match="one, which would see the gradients of one shard or of two"
    ):
        next(iter(reducer))
    hook.remove()
    for _ in reducer:
        parameter.sum().backward()


def test_a_loop_that_was_left_leaves_nothing_behind(pool: Pool) -> None:
    def left() -> list[float]:
        parameter = nn.Parameter(torch.ones(1))
        reducer = lockstep.invariance.OrderedReducer([parameter], virtual_workers=2)
        kept = iter(reducer)
        next(kept)
        (3 * parameter).sum().backward()
        for _ in reducer:
            parameter.sum().backward()
        with pytest.raises(ConfigError, match="one loop over it at a time"):
            next(kept)
        parameter.sum().backward()  # no hook is left that would send something
        gradient = parameter.grad.tolist()  # type: ignore[union-attr]
        assert not parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        for _ in reducer:
            break
        assert not parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        return gradient  # type: ignore[no-any-return]

    assert pool.run(left, workers=2) == [[3.0]] * 2


def test_numbers_come_before_the_backward_pass(pool: Pool) -> None:
    def late() -> None:
        parameter = nn.Parameter(torch.ones(1))
        reducer = lockstep.invariance.OrderedReducer([parameter], virtual_workers=2)
        with pytest.raises(ConfigError, match="numbers before the backward pass"):
            for _ in reducer:
                parameter.sum().backward()
                reducer.add(torch.ones(1))

    pool.run(late, workers=2)


@pytest.mark.parametrize("virtual_workers", [0, False, 1.5, "8"])
def test_a_number_of_shards(virtual_workers: Any) -> None:
    with pytest.raises(ConfigError, match="virtual_workers: expected a whole number of at least 1"):
        lockstep.invariance.OrderedReducer(
            [], virtual_workers=virtual_workers, comm=lockstep.init("cpu")
        )


@pytest.mark.parametrize(
    "wrong", [nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1).named_parameters()]
)
def test_what_has_no_gradients(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"parameters: expected parameters, as from model\.parameters\(\)"
    ):
        lockstep.invariance.OrderedReducer(wrong, comm=lockstep.init("cpu"))


def test_the_usual_number_of_shards() -> None:
    assert lockstep.invariance.OrderedReducer([], comm=lockstep.init("cpu")).virtual_workers == 8


def test_memory_that_is_kept_for_the_next_step_does_not_grow(pool: Pool) -> None:
    def kept() -> int:
        parameter = nn.Parameter(torch.ones(2))
        reducer = lockstep.invariance.OrderedReducer([parameter], virtual_workers=32)
        for _ in range(4):
            for _ in reducer:
                parameter.sum().backward()
        return max(len(bucket._unused) for bucket in reducer._reducer._buckets)

    for workers in (1, 3):
        assert all(1 <= sets <= 6 for sets in pool.run(kept, workers=workers))  # log2(32) + 1


# --- the recipe of the documentation
# ------------------------------------------------------------------------

RECIPE = Path(__file__).parents[3] / "docs/invariance.md"


def recipe(epochs: int = 3, seeds: bool = True) -> tuple[list[int], float]:
    """(the first label of every batch, the sum of the weights) of the loop in the docs, beside a
    shuffling loader.
    """
    (code,) = (
        text
        for text in re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
        if "OrderedReducer(" in text
    )
    if not seeds:
        code = code.replace("lockstep.invariance.seed_shard(seed, step, shard)", "pass")
    comm = lockstep.init("cpu")
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(48, 5), torch.arange(48))
    model = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.Linear(16, 48))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    shuffled = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)
    seen: list[int] = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(epochs):
            for inputs, labels in shuffled:
                seen.append(int(labels[0]))
                yield inputs, labels

    given = {
        "lockstep": lockstep,
        "F": nn.functional,
        "model": model,
        "optimizer": optimizer,
        "seed": 1,
    }
    exec(code, {**given, "global_batches": batches()})
    torch.rand(comm.rank + 1)  # leaves no trace in the next run
    return seen, float(sum(p.detach().double().sum() for p in model.parameters()))


def test_the_recipe_of_the_documents_beside_a_loader_that_shuffles(pool: Pool) -> None:
    expected = pool.run(recipe, workers=1)
    assert len(set(expected[0][0])) > 3  # other orders in other epochs
    for workers in (2, 3):
        assert pool.run(recipe, workers=workers) == expected * workers


def test_without_seeds_the_workers_come_to_other_batches_which_is_an_error(pool: Pool) -> None:
    def refused() -> None:
        with pytest.raises(
            MismatchError,
            match=r"those of rank 0 \(20 samples\) and rank 1 \(20\) differ, at step 3 ",
        ):
            recipe(seeds=False)

    pool.run(refused, workers=3)


def test_without_seeds_the_next_step_draws_other_numbers() -> None:
    parameter = nn.Parameter(torch.ones(8))
    reducer = lockstep.invariance.OrderedReducer(
        [parameter], virtual_workers=1, comm=lockstep.init("cpu")
    )
    masks = []
    for _ in range(2):
        for _ in reducer:
            nn.functional.dropout(parameter).sum().backward()
        masks.append(parameter.grad)
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("left_early", [False, True])
def test_generators_are_given_back(left_early: bool) -> None:
    parameter = nn.Parameter(torch.ones(8))
    reducer = lockstep.invariance.OrderedReducer(
        [parameter], virtual_workers=2, comm=lockstep.init("cpu")
    )
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    for shard in reducer:
        lockstep.invariance.seed_shard(0, 0, shard)
        parameter.sum().backward()
        if left_early:
            break
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


def test_batches_in_another_order_of_another_number_or_not_given_at_all(pool: Pool) -> None:
    def run(kind: str) -> str:
        parameter = nn.Parameter(torch.ones(1))
        reducer = lockstep.invariance.OrderedReducer([parameter], virtual_workers=2)
        x, rank = torch.arange(12.0).view(6, 2), reducer.comm.rank
        batches: dict[str, Any] = {
            "order": x.flip(0) if rank else x,
            "number": 5 + rank,
            "same": {"x": x},
            "none": None,
        }
        try:
            for shard in reducer:
                if kind != "none" or rank:
                    reducer.part(x if kind == "none" else batches[kind], shard)
                parameter.sum().backward()
        except MismatchError as error:
            return str(error)
        return ""

    for kind, said in (
        ("order", "rank 0 (6 samples) and rank 1 (6)"),
        ("number", "rank 0 (5 samples) and rank 1 (6)"),
    ):
        assert all(said in text for text in pool.run(run, kind, workers=2))
    for kind in ("same", "none"):
        assert pool.run(run, kind, workers=2) == ["", ""]


@pytest.mark.parametrize("batch", [(torch.ones(3), torch.ones(4)), "text", torch.ones(())])
def test_a_batch_whose_samples_cannot_be_counted(batch: Any) -> None:
    reducer = lockstep.invariance.OrderedReducer([], virtual_workers=2, comm=lockstep.init("cpu"))
    with pytest.raises(
        ConfigError, match="batch: expected a global batch whose tensors have all their samples"
    ):
        reducer.part(batch, 0)


@pytest.mark.parametrize("virtual_workers", [2, 3, 4])
def test_gradients_that_autograd_leaves_in_one_memory(pool: Pool, virtual_workers: int) -> None:
    """Of parameters that are added through views, one sum must not be added to another."""

    def gradients() -> list[Any]:
        wide, tall = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6, 4))
        reducer = lockstep.invariance.OrderedReducer([wide, tall], virtual_workers)
        before, reducers.ALONE = reducers.ALONE, 64  # sent from where they are
        try:
            for shard in reducer:
                x = torch.arange(24.0) * (shard + 1)
                ((wide.view(-1) + tall.view(-1)) * x).sum().backward()
        finally:
            reducers.ALONE = before
        return [p.grad.view(-1).tolist() for p in (wide, tall)]  # type: ignore[union-attr]

    whole = (torch.arange(24.0) * sum(range(1, virtual_workers + 1))).tolist()
    for workers in range(1, min(virtual_workers, 3) + 1):
        assert pool.run(gradients, workers=workers) == [[whole, whole]] * workers


def bytes_of_tensors() -> int:
    """The memory of all tensors of this process that Python knows."""
    memories = {}
    for kept in gc.get_objects():
        if type(kept) in (torch.Tensor, nn.Parameter):
            memory = kept.untyped_storage()
            memories[memory.data_ptr()] = memory.nbytes()
    return sum(memories.values())


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_one_of_several_workers_needs_no_more_memory_than_one_alone(
    pool: Pool, backend: str
) -> None:
    def peak() -> float:
        """Of the memory of the parameters: what there is at most, beside them, in steps."""
        layers = [nn.Linear(2048, 2048, bias=False) for _ in range(3)]  # of 16 MiB each
        model = nn.Sequential(*layers)
        reducer = lockstep.invariance.OrderedReducer(model.parameters(), virtual_workers=8)
        gc.collect()
        gc.disable()  # nothing may hang on it
        before = bytes_of_tensors()
        most = 0
        try:
            for _ in range(3):
                for _ in reducer:
                    model(torch.ones(1, 2048)).sum().backward()
                    most = max(most, bytes_of_tensors() - before)
                most = max(most, bytes_of_tensors() - before)
        finally:
            gc.enable()
        return most / sum(p.nbytes for p in model.parameters())

    (alone,) = pool.run(peak, workers=1)
    for workers in (2, 3, 4):
        assert max(pool.run(peak, workers=workers, backend=backend)) <= alone
