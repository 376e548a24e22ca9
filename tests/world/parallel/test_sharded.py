"""strategy="sharded": the answer of one worker, while every worker holds a part of the model
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import ConfigError, MismatchError
from lockstep.parallel import sharded
from lockstep.parallel.sharded import Sharded
from lockstep.training.step.train_step import TrainStep
from support.pool import Pool, RanksFailedError

# torch's caches keep device meshes, and Gloo's files are open for as long as somebody holds its
# group
pytestmark = pytest.mark.leaks("a device mesh outlives its job, and its group with it")

Answer = tuple[list[float], dict[str, float], dict[str, Any], str]


def dataset(n: int = 45, ignored: int = 7) -> TensorDataset:
    source = torch.Generator().manual_seed(5)
    labels = torch.randint(4, (n,), generator=source)
    inputs = torch.randn(n, 6, generator=source).double() + labels[:, None]
    labels[::ignored] = -100
    return TensorDataset(inputs, labels)


class Viewing(nn.Linear):
    """Its output is a view of another tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :6]


class Net(nn.Module):
    """Sizes that no number of workers divides, batch norm, a head that is never used, and a moving
    buffer.
    """

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Viewing(6, 7) for _ in range(5))
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.out, self.unused = nn.Linear(6, 4), nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        for block in self.blocks:
            new = block(x)
            new += x  # in place
            x = new.tanh()
        return self.out(self.norm(x))


def trainer(
    strategy: Any = "sharded", make: Callable[[], nn.Module] = Net, **options: Any
) -> lockstep.Trainer:
    lockstep.init("cpu")
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), options.pop("lr", 0.01), weight_decay=0.1)
    return lockstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        options.pop("global_batch_size", 9),
        strategy=strategy,
        callbacks=[],
        **options,
    )


def small_units(smallest: int = 30) -> Sharded:
    """So that also a model this small has several units."""
    comm = lockstep.init("cpu")
    return Sharded(comm, sharded.wrap_policy(Net(), smallest)) if comm.size > 1 else Sharded(comm)


def fitted(several: bool, train: TensorDataset | None = None, **options: Any) -> Answer:
    made = trainer(small_units() if several else "sharded", **options)
    history = made.fit(train or dataset(), 2, validate=dataset(11))
    # before anything is gathered: after an evaluation, too, a worker holds its parts alone
    here = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel()
        for p in made.model.parameters()
    )
    state = made.state_dict()
    losses = [row["train_loss"] for row in history] + [row["val_loss"] for row in history]
    if made.comm.size > 1:
        whole = sum(value.numel() for value in state["model"].values())
        assert here < 0.7 * whole
        for entries in made.optimizer.state.values():
            assert isinstance(entries["exp_avg"], DTensor)
    return (
        losses,
        made.evaluate(dataset(5)),
        state,
        made.step.strategy.fingerprint(made.model, made.optimizer),
    )


def expect(got: Answer, wanted: Answer, tolerance: float = 1e-9) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=tolerance)
    assert got[1] == pytest.approx(wanted[1], rel=tolerance)
    for part in ("model", "optimizer"):
        assert list(got[2][part]) == list(wanted[2][part])
        torch.testing.assert_close(got[2][part], wanted[2][part], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("workers", "backend", "options"),
    [
        (2, "shm", {"several": False}),
        (2, "gloo", {"several": True, "max_grad_norm": 0.5}),
        (
            3,
            "shm",
            {"several": True, "gradient_accumulation_steps": 2, "make": lambda: Net(norm=False)},
        ),
    ],
)
def test_the_answer_of_one_worker(
    pool: Pool, workers: int, backend: str, options: dict[str, Any]
) -> None:
    # batch norm of parts is that of whole batches only in DDP too; that is the reference then
    alone = pool.run(fitted, **{**options, "make": lambda: Net(norm=False)}, workers=1)[0]
    got = pool.run(
        fitted, **{**options, "make": lambda: Net(norm=False)}, workers=workers, backend=backend
    )
    for one in got:
        expect(one, alone)
        assert one[3] == got[0][3]


def distributed_and_sharded(**options: Any) -> None:
    first, second = trainer("distributed", **options), trainer(small_units(), **options)
    for made in (first, second):
        made.fit(dataset(), 2)
    ours, theirs = second.state_dict(), first.state_dict()
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours["optimizer"], theirs["optimizer"], rtol=1e-9, atol=1e-9)


def test_buffers_are_those_of_distributed(pool: Pool) -> None:
    pool.run(distributed_and_sharded, workers=2, gradient_accumulation_steps=2)


def test_a_worker_without_samples(pool: Pool) -> None:
    """The last batch has one sample, and so has the last of the evaluation."""
    options: dict[str, Any] = {
        "make": lambda: Net(norm=False),
        "train": dataset(19, ignored=19),
        "several": True,
    }
    alone = pool.run(fitted, **options, workers=1)[0]
    for one in pool.run(fitted, **options, workers=3):
        expect(one, alone)


class Heads(nn.Module):
    """Two heads, and the sign of its first input says which of them a sample needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(self.first if row[0] > 1 else self.second)(row) for row in x])


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="came with torch 2.13"
)
def test_a_parameter_that_only_some_workers_use(pool: Pool) -> None:
    options: dict[str, Any] = {
        "make": Heads,
        "several": False,
        "global_batch_size": 3,
        "train": dataset(ignored=46),
    }
    alone = pool.run(fitted, **options, workers=1)[0]
    for one in pool.run(fitted, **options, workers=3):
        expect(one, alone)


# --- precision
# ------------------------------------------------------------------------------------------------


def half(strategy: str, precision: str) -> tuple[list[float], set[torch.dtype]]:
    """Losses, and the types in which units were gathered."""
    seen: set[torch.dtype] = set()

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add(self.weight.dtype)
            return super().forward(x)

    class Single(Net):
        def __init__(self) -> None:
            super().__init__()
            self.out = Watched(6, 4)
            self.float()

    data = dataset()
    made = trainer(
        small_units() if strategy == "sharded" else strategy, Single, precision=precision
    )
    history = made.fit(TensorDataset(data.tensors[0].float(), data.tensors[1]), 3)
    assert all(p.dtype == torch.float32 for p in made.model.parameters())
    return [row["train_loss"] for row in history], seen


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision(pool: Pool, precision: str) -> None:
    wanted, _ = pool.run(half, "distributed", precision, workers=2)[0]
    for losses, seen in pool.run(half, "sharded", precision, workers=2):
        assert losses == pytest.approx(wanted, rel=0.02)
        assert seen == {torch.bfloat16 if precision == "bf16" else torch.float16}


def overflow() -> bool:
    """Only rank 1's part of the gradient overflows; no worker may take the step."""
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.zero_()
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), 1.0),
        lambda output, target: (output * target).sum(1).mean(),
        strategy=Sharded(comm),
        precision="fp16",
    )
    target = torch.tensor([0.1, 0.1, 0.1, 60000.0]).repeat(2, 1)
    loader = lockstep.Loader(TensorDataset(torch.ones(2, 4), target), 2, comm=comm, shuffle=False)
    for batch in loader.epoch(0):
        step(batch)
    weight = step.strategy.model_state(model)["weight"]
    return bool((weight == 0).all())


def test_an_overflow_on_one_worker_is_one_on_all(pool: Pool) -> None:
    assert pool.run(overflow, workers=2) == [True, True]


# --- checkpoints
# ----------------------------------------------------------------------------------------------


def saved(folder: Path, strategy: str) -> None:
    made = trainer(strategy, run_dir=folder, make=lambda: Net(norm=False))
    made.fit(dataset(), 1)
    made.save()


def gone_on(folder: Path, strategy: str) -> Answer:
    made = trainer(strategy, run_dir=folder, make=lambda: Net(norm=False))
    with torch.no_grad():
        for p in made.model.parameters():
            p.zero_()
    made.fit(dataset(), 2, resume="latest")
    return [row["train_loss"] for row in made.history], {}, made.state_dict(), ""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("sharded", 2), ("sharded", 3)),
        (("sharded", 3), ("distributed", 1)),
        (("distributed", 2), ("sharded", 2)),
    ],
)
def test_a_checkpoint_resumes_with_other_strategies_and_workers(
    pool: Pool, tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    def whole(folder: Path) -> Answer:
        made = trainer("distributed", make=lambda: Net(norm=False))
        made.fit(dataset(), 2)
        return [row["train_loss"] for row in made.history], {}, made.state_dict(), ""

    pool.run(saved, tmp_path, first[0], workers=first[1])
    wanted = pool.run(whole, tmp_path, workers=1)[0]
    for got in pool.run(gone_on, tmp_path, second[0], workers=second[1]):
        expect(got, wanted)


# --- the optimizer that the user has made
# ---------------------------------------------------------------------


def used_before() -> None:
    """Two groups, and moments of a step that was made before the model was cut."""
    comm = lockstep.init("cpu")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Net(norm=False)
        groups = [
            {"params": list(model.blocks.parameters()), "lr": 0.02},
            {"params": list(model.out.parameters())},
        ]
        optimizer = torch.optim.Adagrad(groups, 0.01)
        model(dataset().tensors[0]).square().mean().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (_, reference) = make(), make()
    strategy = Sharded(comm)
    TrainStep(model, optimizer, nn.CrossEntropyLoss(), strategy=strategy)
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    assert all(isinstance(entries["sum"], DTensor) for entries in optimizer.state.values())
    torch.testing.assert_close(
        strategy.optimizer_state(model, optimizer)["state"], reference.state_dict()["state"]
    )


def frozen_in_between() -> None:
    comm = lockstep.init("cpu")
    results = []
    for strategy in ("distributed", small_units()):
        made = trainer(strategy, make=lambda: Net(norm=False))
        for round_, trained in enumerate((True, False, True)):
            for p in made.model.blocks.parameters():
                p.requires_grad_(trained)
            made.fit(dataset(), round_ + 1)
        results.append(made.state_dict()["model"])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    assert comm.size == 2


def test_optimizers_and_frozen_layers(pool: Pool) -> None:
    pool.run(used_before, workers=2)
    pool.run(frozen_in_between, workers=2)


# --- what cannot be used
# --------------------------------------------------------------------------------------


class Keeping(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.fast = list(self.param_groups[0]["params"])


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Mixed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 4, dtype=torch.float32)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 2, sparse=True)


def refused(match: str, make: Callable[[], nn.Module] = Net, **options: Any) -> None:
    with pytest.raises(ConfigError, match=match.replace("'", "'?")):
        trainer(options.pop("strategy", "sharded"), make, **options)


def bad() -> None:
    comm = lockstep.init("cpu")
    refused("virtual_workers: expected none with strategy='sharded', got 4", virtual_workers=4)
    refused("model: expected parameters with a dimension to shard, got scale, a scalar", Scaled)
    refused(
        "model: expected trained parameters of one dtype, .* got 'blocks.0.weight of "
        "torch.float64, out",
        Mixed,
    )
    refused("model: expected embeddings with sparse=False, .* got sparse=True of words", Sparse)
    for names, match in [
        (
            ["none"],
            "unit_names: expected names of the model's modules, such as blocks, .* got 'none'",
        ),
        (["blocks"], "unit_names: expected modules with a forward pass, got blocks, a ModuleList"),
    ]:
        refused(match, strategy=Sharded(comm, names))
    tied = Net()
    tied.out.weight = tied.unused.weight
    refused(
        "unit_names: expected modules that share no parameter with others, got 'out'",
        lambda: tied,
        strategy=Sharded(comm, ["out"]),
    )
    model = Net()
    with pytest.raises(
        ConfigError,
        match=r"optimizer: .*param_groups alone, .* got '?Keeping, which has some in .*fast",
    ):
        TrainStep(
            model, Keeping(model.parameters(), 0.1), nn.CrossEntropyLoss(), strategy=Sharded(comm)
        )
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    made = trainer()
    again = torch.optim.SGD(made.model.parameters(), 0.1)
    with pytest.raises(ConfigError, match="model: expected one whose parameters are not sharded"):
        TrainStep(made.model, again, nn.CrossEntropyLoss(), strategy=Sharded(comm))


def test_what_cannot_be_used(pool: Pool) -> None:
    pool.run(bad, workers=2)
    with pytest.raises(RanksFailedError, match="Build the same model on every rank"):
        pool.run(
            lambda: trainer(make=lambda: nn.Linear(6, 4 + lockstep.init().rank).double()), workers=2
        )


def rank_0_values() -> torch.Tensor:
    def make() -> nn.Module:
        model = Net()
        with torch.no_grad():
            model.out.weight += lockstep.init().rank
        return model

    state: torch.Tensor = trainer(make=make).state_dict()["model"]["out.weight"]
    return state


def values_that_did_not_come() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "broadcast_tensors", lambda tensors, comm: None)
        with pytest.raises(MismatchError, match=r"out.weight on rank 1 holds other values"):
            rank_0_values()


def test_rank_0_values_are_used(pool: Pool) -> None:
    first, second = pool.run(rank_0_values, workers=2)
    assert torch.equal(first, second)
    pool.run(values_that_did_not_come, workers=2)
