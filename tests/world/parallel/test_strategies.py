"""What a strategy must see to so that several workers give the answer of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError, DataError, MismatchError
from lockstep.parallel import buffers, module_sync
from lockstep.parallel.distributed import Distributed
from lockstep.parallel.sync_batchnorm import SyncBatchNorm
from lockstep.training.evaluate import evaluate
from lockstep.training.step.step_result import StepResult
from lockstep.training.step.train_step import TrainStep
from support.gradient_ways import WAYS, check_way, way
from support.pool import Pool

Answer = tuple[list[float], dict[str, torch.Tensor]]


def samples(n: int, classes: int = 4, ignored: tuple[int, ...] = ()) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, classes, (n,), generator=generator)
    inputs = torch.randn(n, 6, generator=generator) + labels[:, None]
    labels[list(ignored)] = -100
    return TensorDataset(inputs, labels)


def train(
    make: Callable[[], nn.Module],
    dataset: TensorDataset,
    *,
    global_batch_size: int = 8,
    loss_fn: Any = None,
    sync_batchnorm: bool = False,
    before: Callable[[TrainStep], None] | None = None,
    shuffle: bool = True,
    by: str = "message",
    **options: Any,
) -> Answer:
    """Losses and final values of two epochs, in float64 with an optimizer that never stands
    still.
    """
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = lockstep.prepare_model(make().double(), comm, sync_batchnorm=sync_batchnorm)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    wide = TensorDataset(dataset.tensors[0].double(), dataset.tensors[1])
    loader = Loader(wide, global_batch_size, comm=comm, shuffle=shuffle)
    losses = []
    with way(by):
        step = TrainStep(
            model,
            optimizer,
            loss_fn or nn.CrossEntropyLoss(),
            strategy=Distributed(comm),
            **options,
        )
        for epoch in range(2):
            for batch in loader.epoch(epoch):
                if before is not None:
                    before(step)
                losses.append(float(step(batch)))
    check_way(step.strategy, by)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_same(
    pool: Pool, *args: Any, sizes: tuple[int, ...] = (2, 3), tolerance: float = 1e-9, **options: Any
) -> Answer:
    alone: Answer = pool.run(train, *args, workers=1, **options)[0]
    for size, by in itertools.product(sizes, WAYS):
        for losses, values in pool.run(train, *args, workers=size, by=by, **options):
            assert losses == pytest.approx(alone[0], rel=tolerance, abs=tolerance)
            for name, value in values.items():
                torch.testing.assert_close(
                    value, alone[1][name], rtol=tolerance, atol=tolerance, msg=name
                )
    return alone


# --- parameters that take no part
# ----------------------------------------------------------------------------


class Heads(nn.Module):
    """Two heads, of which a pass uses one: never the second, or by the sign of its first input."""

    def __init__(self, by_input: bool) -> None:
        super().__init__()
        self.by_input = by_input
        self.body, self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).relu()
        if self.by_input:
            return torch.stack(
                [
                    (self.first if a > 0.5 else self.second)(h)
                    for a, h in zip(x[:, 0], hidden, strict=True)
                ]
            )
        return self.first(hidden)


def test_a_parameter_that_is_never_used(pool: Pool) -> None:
    _, values = check_same(pool, lambda: Heads(False), samples(21))
    torch.manual_seed(0)
    unused = Heads(False).double().second.weight
    # six steps of weight decay alone
    torch.testing.assert_close(values["second.weight"], unused * (1 - 0.01 * 0.1) ** 6)


def test_a_parameter_that_only_some_workers_use(pool: Pool) -> None:
    # the last global batch has one sample, so that some workers have none
    check_same(pool, lambda: Heads(True), samples(17), sizes=(2, 4))
    check_same(pool, lambda: Heads(True), samples(17), gradient_accumulation_steps=3)


def test_an_unused_parameter_may_be_infinite(pool: Pool) -> None:
    def make() -> nn.Module:
        model = Heads(False)
        model.second.weight.data.fill_(float("inf"))
        return model

    for by in WAYS:
        for losses, values in pool.run(train, make, samples(21), workers=2, by=by):
            assert torch.tensor(losses).isfinite().all()
            assert values["body.weight"].isfinite().all()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.body, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(
            lambda h: self.body(h).relu(), self.first(x), use_reentrant=self.reentrant
        )
        return self.last(hidden)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(pool: Pool, reentrant: bool) -> None:
    check_same(pool, lambda: Checkpointed(reentrant), samples(17))


def freeze_or_not(step: TrainStep) -> None:
    step.model.get_parameter("second.weight").requires_grad_(step.steps_done in (2, 3))


def test_parameters_may_be_frozen_and_unfrozen(pool: Pool) -> None:
    class Both(Heads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.body(x).relu()
            return self.first(hidden) + self.second(hidden)

    check_same(pool, lambda: Both(False), samples(21), before=freeze_or_not)


def detached() -> str:
    class Detached(Heads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).detach()

    with pytest.raises(ConfigError) as caught:
        train(lambda: Detached(False), samples(8))
    return str(caught.value)


def test_a_loss_without_a_gradient_is_an_error_on_any_number_of_workers(pool: Pool) -> None:
    for size in (1, 2):
        assert all(
            "got one without a gradient" in said for said in pool.run(detached, workers=size)
        )


# --- losses that do not count every label
# --------------------------------------------------------------------

IGNORED = (0, 1, 2, 3, 8, 13, 20)


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(torch.tensor([1.0, 2, 0, 4]).double()),
        nn.functional.cross_entropy,
    ],
    ids=["plain", "weighted", "function"],
)
def test_ignored_labels_count_nowhere(pool: Pool, loss_fn: Any) -> None:
    # unshuffled, the first worker's part of the first batch has ignored labels alone
    options: dict[str, Any] = {"loss_fn": loss_fn, "shuffle": False}
    losses, _ = check_same(pool, lambda: nn.Linear(6, 4), samples(21, ignored=IGNORED), **options)
    check_same(
        pool,
        lambda: nn.Linear(6, 4),
        samples(21, ignored=IGNORED),
        gradient_accumulation_steps=3,
        **options,
    )
    torch.manual_seed(0)
    inputs, labels = (tensor[:8] for tensor in samples(21, ignored=IGNORED).tensors)
    assert losses[0] == pytest.approx(
        float(loss_fn(nn.Linear(6, 4).double()(inputs.double()), labels).detach())
    )


def measure_ignored() -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    return evaluate(
        model, Loader(samples(21, ignored=IGNORED), 8, shuffle=False), nn.CrossEntropyLoss()
    )


def test_evaluation_counts_them_nowhere_either(pool: Pool) -> None:
    torch.manual_seed(0)
    model, (inputs, labels) = nn.Linear(6, 4), samples(21, ignored=IGNORED).tensors
    right = (model(inputs).argmax(1) == labels).sum() / (21 - len(IGNORED))
    expected = {
        "loss": float(nn.functional.cross_entropy(model(inputs), labels).detach()),
        "accuracy": float(right),
    }
    for size in (1, 2, 3):
        assert pool.run(measure_ignored, workers=size) == [pytest.approx(expected)] * size


def only_ignored() -> tuple[str, list[bool]]:
    comm = lockstep.init("cpu")
    model = nn.Linear(6, 4)
    before = [p.detach().clone() for p in model.parameters()]
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss())
    dataset = samples(8, ignored=tuple(range(8)))
    with pytest.raises(DataError) as caught:
        step(next(Loader(dataset, 8, comm=comm).epoch(0)))
    with pytest.raises(DataError, match="something that loss counts"):
        evaluate(model, Loader(dataset, 8, comm=comm), nn.CrossEntropyLoss())
    return str(caught.value), [
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    ]


def test_a_global_batch_without_any_label_is_an_error_before_the_update(pool: Pool) -> None:
    for size in (1, 2):
        for said, unchanged in pool.run(only_ignored, workers=size):
            assert "step 0: expected a global batch with something that the loss counts" in said
            assert all(unchanged)


def count_of_a_step() -> tuple[float, float]:
    model = nn.Linear(6, 4)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss())
    batches = Loader(samples(21, ignored=IGNORED), 8, shuffle=False).epoch(0)
    results: list[StepResult] = [step.run(batch) for batch in batches]
    return float(results[0].count), float(results[2].count)


def test_a_step_reports_what_its_loss_is_the_mean_over(pool: Pool) -> None:
    assert pool.run(count_of_a_step, workers=2) == [(4.0, 4.0)] * 2


# --- values on all workers
# -----------------------------------------------------------------------------------


def awkward(fill: int) -> dict[str, torch.Tensor]:
    """Tensors of all dtypes and strides, filled with `fill`."""
    dtypes = [
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.bool,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    ]
    dtypes += [torch.float8_e4m3fn, torch.uint8]
    made = {str(dtype): torch.full((3,), fill, dtype=torch.float32).to(dtype) for dtype in dtypes}
    grid = torch.arange(12.0).view(3, 4) * fill
    made |= {"transposed": grid.t(), "strided": grid[:, ::2], "a number": torch.tensor(float(fill))}
    made |= {
        "expanded": torch.tensor([float(fill)]).expand(5),
        "expanded row": grid[:1].clone().expand(3, 4),
    }
    return made | {"empty": torch.empty(0, 3)}


def broadcast_awkward(bucket: int) -> bool:
    comm = lockstep.init("cpu")
    module_sync._BUCKET = bucket
    try:
        values = awkward(1 + comm.rank)
        before = {name: (tensor.stride(), tensor.data_ptr()) for name, tensor in values.items()}
        module_sync.broadcast_tensors(values.values(), comm)
    finally:
        module_sync._BUCKET = 16 << 20
    assert {name: (tensor.stride(), tensor.data_ptr()) for name, tensor in values.items()} == before
    return all(
        torch.equal(tensor.float(), values[name].float()) for name, tensor in awkward(1).items()
    )


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("bucket", [1, 30, 1 << 20])
def test_values_of_any_dtype_and_strides_are_sent(pool: Pool, bucket: int) -> None:
    assert pool.run(broadcast_awkward, bucket, workers=2) == [True, True]


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        for number, (_, tensor) in enumerate(awkward(1 + lockstep.init().rank).items()):
            self.register_buffer(f"b{number}", tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.b12[0] * 0  # type: ignore[index, operator]


def train_awkward() -> tuple[list[float], torch.Tensor]:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = Awkward()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss())
    losses = [float(step(batch)) for batch in Loader(samples(16), 8, comm=comm).epoch(0)]
    step.strategy.sync_buffers()
    return losses, model.get_buffer("b12")


def test_a_model_may_have_such_buffers(pool: Pool) -> None:
    (alone, _), *_ = pool.run(train_awkward, workers=1)
    for losses, expanded in pool.run(train_awkward, workers=2):
        assert losses == pytest.approx(alone, rel=1e-5)
        assert torch.equal(expanded, torch.ones(5))


def prepare_after_a_bad_broadcast() -> str:
    comm = lockstep.init("cpu")
    model = nn.Linear(3, 3)
    good = module_sync.broadcast_tensors

    def damaged(tensors: Any, comm: Any) -> None:
        good(tensors, comm)
        if comm.rank == 1:
            model.bias.data[2] += 1e-6

    module_sync.broadcast_tensors = damaged
    try:
        with pytest.raises(MismatchError) as caught:
            Distributed(comm).prepare(model)
    finally:
        module_sync.broadcast_tensors = good
    return str(caught.value)


def test_values_are_compared_after_they_were_sent(pool: Pool) -> None:
    assert all(
        "bias on rank 1" in said for said in pool.run(prepare_after_a_bad_broadcast, workers=2)
    )


# --- batch norm of few samples
# -------------------------------------------------------------------------------


class Viewed(nn.Module):
    """Flattens as many models do, which torch refuses for 0 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3)
        self.again, self.head = nn.BatchNorm1d(4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x[:, None])).relu()
        x = self.again(self.last(x)).relu()
        return self.head(x.view(x.size(0), -1))


def test_a_worker_without_samples_takes_part_in_synchronised_batch_norm(pool: Pool) -> None:
    check_same(pool, Viewed, samples(17), sizes=(2, 4), sync_batchnorm=True)
    check_same(pool, Viewed, samples(17), sizes=(2,), sync_batchnorm=True, global_batch_size=3)


def single_value(sync_batchnorm: bool) -> str:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    n = 9 if sync_batchnorm else lockstep.init("cpu").size
    with pytest.raises(ConfigError) as caught:
        train(make, samples(n), global_batch_size=min(n, 8), sync_batchnorm=sync_batchnorm)
    return str(caught.value)


def test_the_error_of_a_batch_norm_with_a_single_value_advises(pool: Pool) -> None:
    for sync_batchnorm in (False, True):
        # in parts of one sample; synchronised, with one sample in all, of which the second worker
        # has none
        for size in (1, 2):
            for said in pool.run(single_value, sync_batchnorm, workers=size):
                assert said.startswith(
                    "global_batch_size: expected at least two values for each channel"
                )
                assert "drop_last" in said


def foreign_layer() -> list[int]:
    """torch's own layer computes on GPUs only; this one counts how often it is asked, in its
    place.
    """

    class Counting(nn.SyncBatchNorm):
        asked: list[int]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.asked.append(len(x))
            comm.allreduce(torch.ones(1))
            return x

    class Unwrapped(Distributed):  # DistributedDataParallel refuses the layer on the CPU
        def wrap(self, module: nn.Module) -> nn.Module:
            return module

    comm = lockstep.init("cpu")
    layer = Counting(6)
    layer.asked = []
    model = nn.Sequential(layer, nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(model, optimizer, nn.CrossEntropyLoss(), strategy=Unwrapped(comm))
    for batch in Loader(samples(5), 4, comm=comm).epoch(0):
        step(batch)
    return layer.asked


def test_torchs_own_synchronised_batch_norm_is_called_by_every_worker(pool: Pool) -> None:
    assert pool.run(foreign_layer, workers=2) == [[2, 1], [2, 0]]


def copies() -> bool:
    import copy

    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = lockstep.prepare_model(Viewed(), comm, sync_batchnorm=True)
    twin = copy.deepcopy(model)
    assert isinstance(twin.norm, SyncBatchNorm)
    assert twin.norm.exchange is model.norm.exchange
    assert twin.norm.weight is not model.norm.weight  # type: ignore[union-attr]
    x = torch.randn(4, 6)
    return torch.equal(model(x), twin(x))


def test_a_model_with_synchronised_batch_norm_can_be_copied(pool: Pool) -> None:
    assert pool.run(copies, workers=2) == [True, True]


class Moving(nn.Module):
    """A mean of its own that moves with the inputs, in place or by a new tensor, from some step
    on.
    """

    def __init__(self, in_place: bool, begins: int = 0) -> None:
        super().__init__()
        self.linear, self.in_place, self.begins, self.passes = nn.Linear(6, 4), in_place, begins, 0
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("least", torch.full((6,), float("inf")))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x - self.mean + 0 * self.table)  # type: ignore[has-type]
        if self.passes >= self.begins:
            mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # type: ignore[has-type]
            if self.in_place:
                self.mean.copy_(mean)  # type: ignore[has-type]
            else:
                self.mean = mean
            self.least = torch.minimum(self.least, x.detach().amin(0))  # type: ignore[has-type]
            self.seen += 2**60 + 1
        self.passes += 1
        return output


def train_moving(in_place: bool, begins: int, between: str) -> tuple[list[float], list[bool], int]:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = Moving(in_place, begins)
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        nn.CrossEntropyLoss(),
        gradient_accumulation_steps=2,
    )
    losses, same, sent, in_step = [], [], [], False
    broadcast = buffers.broadcast_tensors

    def recorded(tensors: Any, comm: lockstep.Communicator) -> None:
        if in_step:
            sent.append(len(tensors))
        broadcast(tensors, comm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "broadcast_tensors", recorded)
        for batch in Loader(samples(34), 8, comm=comm).epoch(0):
            in_step = True
            losses.append(float(step(batch)))
            in_step = False
            same.append(
                len(set(map(str, comm.allgather_object([b.tolist() for b in model.buffers()]))))
                == 1
            )
            if between == "sync":
                step.strategy.sync_buffers()
            elif between == "load":
                model.load_state_dict(model.state_dict())
    return losses, same, max(sent, default=0)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("begins", [0, 2])
def test_buffers_that_move_are_those_of_rank_0_after_every_step(
    pool: Pool, in_place: bool, begins: int
) -> None:
    runs = [
        pool.run(train_moving, in_place, begins, between, workers=3)
        for between in ("nothing", "sync", "load")
    ]
    for answers in runs:
        for losses, same, sent in answers:
            assert all(same)
            assert losses == runs[0][0][0]
            assert sent == 3  # not the table


def constants_only() -> int:
    comm = lockstep.init("cpu")
    model = Moving(True, begins=100)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss())
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(comm), "broadcast", lambda *_: sent.append(1))
        for batch in Loader(samples(16), 8, comm=comm).epoch(0):
            step(batch)
    return len(sent)


def test_constant_buffers_are_not_sent(pool: Pool) -> None:
    assert pool.run(constants_only, workers=2) == [0, 0]


class Looked(nn.Module):
    """Two sparse embeddings, of which the second is looked up only for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.rest = nn.EmbeddingBag(20, 8, sparse=True), nn.Embedding(20, 8, sparse=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.detach().abs().mul(7).long() % 20
        inside: torch.Tensor = self.bag(words)
        rare = words[:, :1] > 13
        if rare.any():
            inside = inside + self.rest(words).mean(1) * rare
        output: torch.Tensor = self.last(inside)
        return output


def train_sparse(gradient_accumulation_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = Looked().double()
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        nn.CrossEntropyLoss(),
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    losses = [
        float(step(batch)) for batch in Loader(samples(37), 9, comm=comm, shuffle=False).epoch(0)
    ]
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 2])
def test_sparse_gradients_of_what_only_some_workers_look_up(
    pool: Pool, gradient_accumulation_steps: int
) -> None:
    ((losses, values),) = pool.run(train_sparse, gradient_accumulation_steps, workers=1)
    for others, theirs in pool.run(train_sparse, gradient_accumulation_steps, workers=2):
        assert others == pytest.approx(losses, rel=1e-6)
        for name, value in theirs.items():
            torch.testing.assert_close(value, values[name])


def sparse_kinds() -> list[str]:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 4))
    words = TensorDataset(torch.arange(185).view(37, 5) % 20, torch.arange(37) % 4)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss())
    losses = [f"{float(step(batch)):.5f}" for batch in Loader(words, 9, comm=comm).epoch(0)]
    assert model[0].weight.grad is not None and model[0].weight.grad.is_sparse
    return losses


def test_sparse_gradients_with_a_part_without_samples(pool: Pool) -> None:
    (alone,) = pool.run(sparse_kinds, workers=1)
    for workers in (2, 3):
        assert pool.run(sparse_kinds, workers=workers) == [alone] * workers


def unfreeze(add_layer: bool) -> tuple[list[float], list[list[float]]]:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    step = TrainStep(
        model,
        optimizer,
        nn.CrossEntropyLoss(ignore_index=2),
        strategy=Distributed(comm),
        max_grad_norm=0.05,
    )
    losses = []
    for number, batch in enumerate(Loader(wide(36), 8, comm=comm).epoch(0)):
        if number == 2 and add_layer:
            torch.manual_seed(comm.rank)  # rank 0's values are used by all
            model.append(nn.Linear(4, 4).double())
            optimizer.add_param_group({"params": list(model[2].parameters())})
        elif number == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        losses.append(float(step(batch)))
    return losses, [p.flatten().tolist() for p in model.parameters()]


def wide(n: int) -> TensorDataset:
    inputs, labels = samples(n).tensors
    return TensorDataset(inputs.double(), labels)


@pytest.mark.parametrize("add_layer", [False, True])
def test_parameters_may_be_given_to_the_optimizer_later(pool: Pool, add_layer: bool) -> None:
    ((losses, values),) = pool.run(unfreeze, add_layer, workers=1)
    for others, theirs in pool.run(unfreeze, add_layer, workers=2):
        assert others == pytest.approx(losses, rel=1e-9)
        for mine, got in zip(values, theirs, strict=True):
            assert got == pytest.approx(mine, rel=1e-9, abs=1e-12)


class Summed(nn.Module):
    """A step's forward pass: the sum of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, data: torch.Tensor, size: int) -> tuple[torch.Tensor, int]:
        return self.last(self.first(data)).sum(), size


def regroup_after_an_interrupted_backward() -> None:
    model = Summed()
    strategy = Distributed(lockstep.init("cpu"))
    strategy.prepare(model)
    with way("ddp"):
        wrapped = strategy.wrap(model)
    loss, _ = wrapped(torch.ones(1, 3), 1)

    def interrupt(grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = model.first.bias.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    handle.remove()
    strategy.regroup(model)
    model.zero_grad()
    with way("ddp"):
        loss, _ = strategy.wrap(model)(torch.ones(1, 3), 1)
    loss.backward()
    assert wrapped is not None  # as the frames of an error may refer to it
    assert model.last.bias.grad is not None and model.last.bias.grad.tolist() == [1.0, 1.0]


def test_what_was_wrapped_before_a_loss_takes_no_part_in_later_steps(pool: Pool) -> None:
    pool.run(regroup_after_an_interrupted_backward)
