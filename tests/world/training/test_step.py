"""Training gives the same losses and parameters on any number of workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError, DivergedError, MismatchError
from lockstep.parallel.distributed import Distributed
from lockstep.training.step.train_step import TrainStep
from support.gradient_ways import WAYS, check_way, way
from support.pool import Pool

Losses = list[float]
Values = dict[str, torch.Tensor]


def images(n: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 4, (n,), generator=generator)
    pictures = torch.randn(n, 1, 8, 8, generator=generator) + labels[:, None, None, None]
    return TensorDataset(pictures.to(dtype), labels)


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def normed() -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2)
    )
    head = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4))
    return nn.Sequential(body, head)


def wide_end() -> nn.Module:
    """Its last layers fill the first bucket of gradients, which is reduced before the backward pass
    has ended.
    """
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(216, 1000),
        nn.Linear(1000, 4),
    )


def train(
    make: Callable[[], nn.Module] = small,
    n: int = 67,
    global_batch_size: int = 16,
    epochs: int = 2,
    dtype: torch.dtype = torch.float32,
    sync_batchnorm: bool = False,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    loss_fn: Any = None,
    by: str = "message",
    **options: Any,
) -> tuple[Losses, Values]:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = lockstep.prepare_model(make().to(dtype), comm, sync_batchnorm=sync_batchnorm)
    made = (
        optimizer(model.parameters())
        if optimizer
        else torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    )
    with way(by):
        step = TrainStep(
            model, made, loss_fn or nn.CrossEntropyLoss(), strategy=Distributed(comm), **options
        )
    check_way(step.strategy, by)
    loader = Loader(images(n, dtype), global_batch_size, comm=comm)
    losses = [float(step(batch)) for epoch in range(epochs) for batch in loader.epoch(epoch)]
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_same(
    pool: Pool,
    sizes: tuple[int, ...] = (2, 3),
    tolerance: float = 2e-5,
    ways: tuple[str, ...] = WAYS,
    **options: Any,
) -> None:
    alone_losses, alone = pool.run(train, workers=1, **options)[0]
    for size, by in itertools.product(sizes, ways):
        for losses, values in pool.run(train, workers=size, by=by, **options):
            assert losses == pytest.approx(alone_losses, rel=tolerance, abs=tolerance)
            for name, value in values.items():
                torch.testing.assert_close(
                    value, alone[name], rtol=tolerance, atol=tolerance, msg=name
                )


def test_uneven_parts_and_a_short_last_batch(pool: Pool) -> None:
    # 67 = 4·16 + 3: parts of 6, 5, 5, and in the last step of 1 each; of 2 and 1 with two workers
    check_same(pool)


def test_a_last_batch_with_fewer_samples_than_workers(pool: Pool) -> None:
    check_same(pool, sizes=(2, 4), n=65)


def test_means_of_parts_would_not_do(pool: Pool) -> None:
    """The fault that the weights guard against: averaging the means of uneven parts."""

    def unweighted() -> float:
        comm = lockstep.init("cpu")
        torch.manual_seed(0)
        model = small()
        part = next(iter(Loader(images(5), 5, comm=comm).epoch(0)))
        loss = nn.functional.cross_entropy(model(part.data[0]), part.data[1])
        return float(comm.allreduce(loss.detach()[None])) / comm.size

    right = pool.run(train, workers=1, n=5, global_batch_size=5, epochs=1)[0][0][0]
    assert pool.run(train, workers=2, n=5, global_batch_size=5, epochs=1)[0][0][0] == pytest.approx(
        right, rel=1e-5
    )
    assert pool.run(unweighted, workers=2)[0] != pytest.approx(right, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3},
        {"max_grad_norm": 0.05},
        {"schedule": lambda step: 0.9**step},
        {"optimizer": lambda p: torch.optim.AdamW(p, 1e-3), "tolerance": 2e-4},
        {"loss_fn": nn.CrossEntropyLoss(reduction="none")},
    ],
    ids=["gradient_accumulation_steps", "clip", "schedule", "adamw", "single losses"],
)
def test_options_change_nothing_about_it(pool: Pool, options: dict[str, Any]) -> None:
    check_same(pool, n=65, **options)


def by_hand(loss_fn: Any, clip: float | None) -> Losses:
    """The same training in plain PyTorch, with the mean of the whole batch."""
    torch.manual_seed(0)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    dataset, losses = images(67), []
    loader = Loader(dataset, 16, comm=lockstep.init("cpu"))
    for epoch in range(2):
        for indices in loader.order(epoch).split(16):
            optimizer.zero_grad()
            value = loss_fn(model(dataset.tensors[0][indices]), dataset.tensors[1][indices])
            loss = value[0] / value[1] if isinstance(value, tuple) else value.mean()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", ["mean", "single losses", "tokens"])
def test_it_is_the_training_that_one_would_write_by_hand(
    pool: Pool, kind: str, clip: float | None
) -> None:
    kinds = {"mean": nn.CrossEntropyLoss(), "single losses": nn.CrossEntropyLoss(reduction="none")}
    loss_fn = kinds.get(kind, count_tokens)
    expected = by_hand(loss_fn, clip)
    for size in (1, 2):
        got = pool.run(
            train,
            workers=size,
            loss_fn=loss_fn,
            max_grad_norm=clip,
            gradient_accumulation_steps=size,
        )[0][0]
        assert got == pytest.approx(expected, rel=2e-5)


def test_accumulation_is_only_a_matter_of_memory(pool: Pool) -> None:
    (whole, _), *_ = pool.run(train, workers=2)
    (cut, _), *_ = pool.run(train, workers=2, gradient_accumulation_steps=4)
    assert cut == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_totals_are_summed_after_the_backward_pass_where_memory_is_shared(
    pool: Pool, backend: str
) -> None:
    """In shared memory an operation in the background takes turns with the backward pass for the
    interpreter.
    """

    def run(by: str) -> list[str]:
        comm, called = lockstep.init("cpu"), []
        model = small()
        with way(by):
            step = TrainStep(
                model, torch.optim.SGD(model.parameters(), 0.05), nn.CrossEntropyLoss()
            )
        next(model.parameters()).register_hook(lambda _: called.append("backward"))
        for name in ("allreduce", "iallreduce"):
            original = getattr(comm, name)

            def noted(vector: torch.Tensor, name: str = name, original: Any = original) -> Any:
                called.append(name)
                return original(vector)

            setattr(step.comm, name, noted)
        step(next(iter(Loader(images(16), 16, comm=comm).epoch(0))))
        return called[:2]

    late, early = ["backward", "allreduce"], ["iallreduce", "backward"]
    assert (
        pool.run(run, "ddp", workers=2, backend=backend)
        == [late if backend == "shm" else early] * 2
    )
    assert pool.run(run, "message", workers=2, backend=backend) == [late] * 2


def test_it_is_the_same_over_shared_memory(pool: Pool) -> None:
    over_gloo, over_shm = (
        pool.run(train, workers=2, n=65, backend=backend)[0] for backend in ("gloo", "shm")
    )
    assert over_shm[0] == over_gloo[0]
    assert all(value.equal(over_gloo[1][name]) for name, value in over_shm[1].items())


def count_tokens(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = target > 0  # like padding: every part has another share of it
    return nn.functional.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum()


def test_a_loss_may_count_other_things_than_samples(pool: Pool) -> None:
    check_same(pool, n=65, loss_fn=count_tokens)
    check_same(pool, n=65, loss_fn=count_tokens, gradient_accumulation_steps=2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_as_full_precision(pool: Pool, precision: str) -> None:
    full, _ = pool.run(train, workers=1, epochs=3)[0]
    for size, by in ((1, "message"), (2, "message"), (2, "ddp")):
        ranks = pool.run(train, workers=size, epochs=3, precision=precision, by=by)
        assert all(losses == ranks[0][0] for losses, _ in ranks)
        assert ranks[0][0] == pytest.approx(full, rel=0.05, abs=0.05)
        assert ranks[0][0] != full
    # clipping looks at gradients of their own size, not at those that fp16 has scaled up
    clipped, clipped_full = (
        pool.run(train, workers=2, epochs=3, max_grad_norm=0.5, precision=name)[0][0]
        for name in (precision, "fp32")
    )
    assert clipped == pytest.approx(clipped_full, rel=0.05, abs=0.05)
    assert clipped_full[-1] < 0.85 * clipped_full[0]


def test_synchronised_batch_norm_is_that_of_one_worker(pool: Pool) -> None:
    # in float64, because batch norm of a few samples magnifies rounding
    options: dict[str, Any] = {"make": normed, "n": 65, "dtype": torch.float64, "tolerance": 1e-9}
    check_same(pool, sizes=(2, 4), sync_batchnorm=True, **options)
    with pytest.raises(AssertionError):
        check_same(pool, sizes=(2,), **options)
    # with several buckets, whose sums lie between those of the layers
    check_same(
        pool, sizes=(2, 4), sync_batchnorm=True, ways=("ddp",), **{**options, "make": wide_end}
    )


def test_running_statistics_are_the_same_on_all_workers(pool: Pool) -> None:
    values = [values for _, values in pool.run(train, workers=3, make=normed, n=65)]
    for other in values[1:]:
        assert all(torch.equal(other[name], values[0][name]) for name in other)
    alone = pool.run(train, workers=1, make=normed, n=65)[0][1]
    assert not torch.equal(alone["0.1.running_mean"], torch.zeros(6))
    # the mean is linear in the samples, so that of the parts is that of the whole while the weights
    # are the same
    first = [
        pool.run(train, workers=size, make=normed, n=16, epochs=1)[0][1]["0.1.running_mean"]
        for size in (1, 3)
    ]
    torch.testing.assert_close(first[0], first[1])
    assert all(value["0.1.num_batches_tracked"] == 10 for value in values)


def dropped(seed: int) -> tuple[list[float], list[float]]:
    comm = lockstep.init("cpu")
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 4))
    torch.manual_seed(0)
    nn.init.normal_(model[2].weight)
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), 0.0), nn.CrossEntropyLoss(), seed=seed
    )
    same = TensorDataset(torch.ones(8, 1, 8, 8), torch.zeros(8, dtype=torch.long))
    batch = next(iter(Loader(same, 8, comm=comm).epoch(0)))
    masks = []
    model[1].register_forward_hook(lambda *args: masks.append(float(args[-1].sum())))
    losses = [float(step(batch)) for _ in range(2)]
    return losses, masks


def test_dropout_differs_by_rank_and_step_and_repeats(pool: Pool) -> None:
    (losses, masks), (others, other_masks) = pool.run(dropped, 3, workers=2)
    assert losses == others
    assert len({*masks, *other_masks}) == 4
    assert pool.run(dropped, 3, workers=2)[0] == (losses, masks)
    assert pool.run(dropped, 4, workers=2)[0] != (losses, masks)


def build_on_ranks(kind: str) -> str:
    comm = lockstep.init("cpu")
    width = 5 if kind == "shape" and comm.rank == 1 else 4
    layers: list[nn.Module] = [nn.Linear(3, width), nn.Linear(width, 3)]
    if kind == "number" and comm.rank == 1:
        layers.append(nn.Linear(3, 3))
    if kind == "order" and comm.rank == 1:
        layers.reverse()
    model = nn.Sequential(*layers)
    if kind == "dtype" and comm.rank == 1:
        model[1].double()
    if kind == "frozen" and comm.rank == 1:
        model[0].weight.requires_grad_(False)
    try:
        Distributed(comm).prepare(model)
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "shape",
            "Entry 0 is 0.weight float32[4, 3] on rank 0 and 0.weight float32[5, 3] on rank 1",
        ),
        ("number", "Entry 4 is missing on rank 0 and 2.weight float32[3, 3] on rank 1"),
        (
            "order",
            "Entry 0 is 0.weight float32[4, 3] on rank 0 and 0.weight float32[3, 4] on rank 1",
        ),
        (
            "dtype",
            "Entry 2 is 1.weight float32[3, 4] on rank 0 and 1.weight float64[3, 4] on rank 1",
        ),
        ("frozen", "on rank 0 and 0.weight float32[4, 3] (not trained) on rank 1"),
        ("same", ""),
    ],
)
def test_different_models_are_named_on_every_rank(pool: Pool, kind: str, said: str) -> None:
    messages = pool.run(build_on_ranks, kind, workers=2)
    assert messages[0] == messages[1]
    assert said in messages[0]
    assert bool(said) == bool(messages[0])


def start_from(how: str) -> tuple[torch.Tensor, torch.Tensor]:
    comm = lockstep.init("cpu")
    torch.manual_seed(comm.rank)
    layer = nn.BatchNorm1d(3)
    layer.running_mean.normal_()  # type: ignore[union-attr]
    model = nn.Sequential(nn.Linear(3, 3), layer)
    if how == "prepared":
        Distributed(comm).prepare(model)
    return model[0].weight.detach(), layer.running_mean  # type: ignore[return-value]


def test_all_start_with_the_values_of_rank_0(pool: Pool) -> None:
    own, prepared = (pool.run(start_from, how, workers=3) for how in ("own", "prepared"))
    for tensor in (0, 1):
        assert not torch.equal(own[0][tensor], own[1][tensor])
        assert all(torch.equal(values[tensor], own[0][tensor]) for values in prepared)


def values_that_differ() -> str:
    from lockstep.parallel import module_sync

    comm = lockstep.init("cpu")
    model = nn.Linear(3, 3)
    module_sync.broadcast_tensors(model.parameters(), comm)
    module_sync.check_same_values(model, comm)
    if comm.rank == 1:
        model.bias.data[2] += 1e-6
    with pytest.raises(MismatchError) as caught:
        module_sync.check_same_values(model, comm)
    return str(caught.value)


def test_different_values_are_named_on_every_rank(pool: Pool) -> None:
    assert all(
        "bias on rank 1 holds other values" in message
        for message in pool.run(values_that_differ, workers=2)
    )


def explode() -> tuple[str, list[bool]]:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = small()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 1e30), nn.CrossEntropyLoss())
    with pytest.raises(DivergedError) as caught:
        for batch in Loader(images(64), 16, comm=comm).epoch(0):
            before = [p.detach().clone() for p in model.parameters()]
            step(batch)
    return str(caught.value), [
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    ]


def test_a_loss_that_is_not_finite_stops_all_before_the_update(pool: Pool) -> None:
    for message, unchanged in pool.run(explode, workers=2):
        assert "at step 1 with learning rate 1e+30" in message
        assert all(unchanged)


def test_an_optimizer_of_another_model_is_refused() -> None:
    lockstep.init("cpu")
    with pytest.raises(ConfigError, match="6 of 6 that are not among them"):
        TrainStep(small(), torch.optim.SGD(small().parameters(), 0.1), nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"precision": "fp8"}, "precision"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    lockstep.init("cpu")
    model = small()
    with pytest.raises(ConfigError, match=said):
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), **options)
