"""An optimizer whose state is divided among the workers computes what one does that is not, bit by
bit.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigError, MismatchError
from lockstep.parallel.optimizer_shards import DIVISION, LostStateError, OptimizerShards
from lockstep.proof.on_spike import StateCopy
from lockstep.training.step.precision import Precision
from support.classifier import make_classifier, make_samples
from support.optimizers import DIVISIBLE
from support.outcome import RanksFailedError
from support.pool import Pool

BATCH = 24
STEPS = 4


def matrices() -> nn.Module:
    """All parameters are matrices, of several sizes; one is sent from where it is."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 1024, bias=False),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(1024, 300, bias=False),
        nn.Tanh(),
        nn.Linear(300, 5, bias=False),
    )


def trained(
    make: Callable[[], nn.Module],
    optimizer: str,
    shard_optimizer: bool,
    virtual_workers: int | None = 8,
    **options: Any,
) -> list[Any]:
    """The fingerprint, and what a step returns, after some steps."""
    model = make()
    step = lockstep.TrainStep(
        model,
        DIVISIBLE[optimizer](model.parameters()),
        nn.CrossEntropyLoss(),
        virtual_workers=virtual_workers,
        shard_optimizer=shard_optimizer,
        **{"max_grad_norm": 0.5, **options},
    )
    loader = lockstep.Loader(make_samples(STEPS * BATCH), BATCH, virtual_workers=virtual_workers)
    results = [step.run(batch) for batch in loader.epoch(0)]
    norms = [None if result.grad_norm is None else float(result.grad_norm) for result in results]
    return [step.fingerprint(), norms, [float(result.loss) for result in results]]


@pytest.mark.parametrize("optimizer", DIVISIBLE)
def test_equal_bits_at_any_number_of_workers(pool: Pool, optimizer: str) -> None:
    expected = pool.run(trained, matrices, optimizer, False, workers=1)
    assert pool.run(trained, matrices, optimizer, True, workers=1) == expected
    for workers in (2, 3, 4):
        found = pool.run(trained, matrices, optimizer, True, workers=workers, backend="shm")
        assert found == expected * workers


@pytest.mark.parametrize(
    ("virtual_workers", "options"),
    [
        (6, {}),
        (7, {}),
        (8, {"max_grad_norm": None}),
        (8, {"precision": "bf16"}),
        (8, {"precision": "fp16"}),
    ],
)
def test_equal_bits_of_a_usual_model(
    pool: Pool, virtual_workers: int, options: dict[str, Any]
) -> None:
    """With batch norm, small tensors and a frozen one."""
    arguments = make_classifier, "adamw"
    expected = pool.run(trained, *arguments, False, virtual_workers, **options, workers=1)
    for workers, backend in ((2, "gloo"), (3, "gloo"), (3, "shm"), (4, "gloo")):
        found = pool.run(
            trained, *arguments, True, virtual_workers, **options, workers=workers, backend=backend
        )
        assert found == expected * workers


@pytest.mark.parametrize("optimizer", ["sgd", "fused", "adafactor", "lamb"])
@pytest.mark.parametrize(
    "make", [matrices, make_classifier]
)  # by DistributedDataParallel, in one message
def test_equal_bits_without_virtual_workers(
    pool: Pool, make: Callable[[], nn.Module], optimizer: str
) -> None:
    """At the same number of workers."""
    for workers, backend in ((1, "shm"), (2, "gloo"), (3, "shm")):
        arguments = {"workers": workers, "backend": backend}
        expected = pool.run(trained, make, optimizer, False, None, **arguments)
        assert pool.run(trained, make, optimizer, True, None, **arguments) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": None},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"gradient_accumulation_steps": 2},
        {"sync_batchnorm": True},
    ],
)
def test_equal_bits_without_virtual_workers_of_a_usual_model(
    pool: Pool, options: dict[str, Any]
) -> None:
    expected = pool.run(trained, make_classifier, "adamw", False, None, **options, workers=3)
    assert pool.run(trained, make_classifier, "adamw", True, None, **options, workers=3) == expected


def test_workers_without_a_sample(pool: Pool) -> None:
    expected = pool.run(trained, matrices, "adamw", False, 30, workers=1)
    for workers in (3, 4):
        assert pool.run(trained, matrices, "adamw", True, 30, workers=workers) == expected * workers


def of_two_dtypes() -> nn.Module:
    torch.manual_seed(0)

    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double()

    return nn.Sequential(nn.Linear(16, 7), Cast(), nn.Linear(7, 5).double())


def test_norms_of_several_dtypes(pool: Pool) -> None:
    expected = pool.run(trained, of_two_dtypes, "adamw", False, workers=1)
    assert pool.run(trained, of_two_dtypes, "adamw", True, workers=3) == expected * 3


def test_a_step_that_overflows_is_skipped_on_all_workers(pool: Pool) -> None:
    """Only the owner of a tensor sees that its gradient is infinite."""

    def scales(shard_optimizer: bool) -> list[Any]:
        model = make_classifier()
        step = lockstep.TrainStep(
            model,
            DIVISIBLE["adamw"](model.parameters()),
            nn.CrossEntropyLoss(),
            precision="fp16",
            virtual_workers=4,
            shard_optimizer=shard_optimizer,
        )
        step.precision._scaler._init_scale = 2.0**20  # type: ignore[union-attr]
        loader = lockstep.Loader(make_samples(STEPS * BATCH), BATCH, virtual_workers=4)
        found = []
        for number, batch in enumerate(loader.epoch(0)):
            model[6].weight.register_hook(
                lambda gradient, number=number: gradient * (torch.inf if number == 1 else 1)
            )
            step.run(batch)
            found.append(step.precision.state_dict()["scale"])
        return [found, step.fingerprint()]

    expected = pool.run(scales, False, workers=1)
    assert len(set(expected[0][0])) > 1
    for workers in (2, 3):
        assert pool.run(scales, True, workers=workers) == expected * workers


def test_a_step_whose_exchange_of_overflows_was_interrupted_runs_again() -> None:
    """In an elastic job, after the loss of a worker; this one has no gradients, or some."""

    class Lost:
        def allreduce(self, *_: Any) -> Any:
            raise RuntimeError("a worker was lost")

    class Found:
        def allreduce(self, most: torch.Tensor, *_: Any) -> torch.Tensor:
            return most

    for has_gradient in (False, True):
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 1.0)
        precision = Precision("fp16", torch.device("cpu"))
        comms: list[Any] = [Lost(), Found()]
        for comm in comms:
            precision.backward(weight.sum(), 1.0)
            if not has_gradient:
                weight.grad = None
            try:
                precision.unscale(optimizer, comm)
            except RuntimeError:
                precision.abandon_step()
                weight.grad = None
        precision.step(optimizer)
        assert weight.item() == (0.0 if has_gradient else 1.0)


def test_a_worker_has_the_state_of_its_own_tensors_only(pool: Pool) -> None:
    def held() -> tuple[int, int, int]:
        model = matrices()
        optimizer = DIVISIBLE["adagrad"](model.parameters())  # which makes its state at once
        step = lockstep.TrainStep(
            model, optimizer, nn.CrossEntropyLoss(), virtual_workers=4, shard_optimizer=True
        )
        loader = lockstep.Loader(make_samples(BATCH), BATCH, virtual_workers=4)
        step.run(next(iter(loader.epoch(0))))
        state = optimizer.state_dict()["state"]
        assert all(p.grad is None for p in model.parameters())
        full = step.full_optimizer_state()["state"]
        assert [each["sum"].shape for each in full.values()] == [
            p.shape for p in model.parameters()
        ]
        with pytest.raises(ConfigError, match="one whose whole state this worker has"):
            lockstep.fingerprint(model, optimizer)
        return len(state), len(full), sum(each["sum"].nbytes for each in state.values())

    found = pool.run(held, workers=3)
    assert sum(own for own, _, _ in found) == 3
    assert all(own < whole for own, whole, _ in found)


def trained_in(
    folder: Path,
    shard_optimizer: bool,
    epochs: int,
    resume: str | None,
    async_save: bool = False,
    virtual_workers: int | None = 8,
) -> tuple[str, list[Any]]:
    model = make_classifier()
    trainer = lockstep.Trainer(
        model,
        DIVISIBLE["adamw"](model.parameters()),
        nn.CrossEntropyLoss(),
        BATCH,
        run_dir=folder,
        callbacks=[],
        virtual_workers=virtual_workers,
        max_grad_norm=0.5,
        shard_optimizer=shard_optimizer,
        fingerprint_every=2 if virtual_workers else 0,
        async_save=async_save,
    )
    trainer.fit(make_samples(STEPS * BATCH), epochs, resume=resume)
    trainer.save()
    rows = [[row[name] for name in row if name != "seconds"] for row in trainer.history]
    return trainer.step.fingerprint(), [row[:2] for row in rows]


def ledger_of(folder: Path) -> list[Any]:
    """What the ledger says of each step, and the fingerprints in it."""
    ledger = lockstep.ledger(folder)
    steps = [ledger.steps[name].tolist() for name in ("step", "loss", "gradient_norm")]
    return [steps, ledger.fingerprints.tolist()]


def saved_in(folder: Path) -> list[Any]:
    """The last checkpoint: its tensors byte by byte, and the description of the optimizer."""
    (path,) = folder.rglob(f"step-{2 * STEPS:010d}")
    state = json.loads((path / "state.json").read_text())
    tensors = [(path / name).read_bytes() for name in ("model.safetensors", "state.safetensors")]
    return [tensors, state["optimizer"]]


@pytest.mark.parametrize(
    ("first", "second"),
    [((3, True), (2, True)), ((2, True), (1, False)), ((1, False), (4, True))],
)
def test_checkpoints_at_other_numbers_of_workers(
    pool: Pool, tmp_path: Path, first: tuple[int, bool], second: tuple[int, bool]
) -> None:
    whole = pool.run(trained_in, tmp_path / "whole", False, 2, None, workers=1)[0]
    workers, shards = first
    pool.run(trained_in, tmp_path / "parts", shards, 1, None, shards, workers=workers)
    workers, shards = second
    found = pool.run(trained_in, tmp_path / "parts", shards, 2, "latest", workers=workers)
    assert found == [whole] * workers
    assert saved_in(tmp_path / "parts") == saved_in(tmp_path / "whole")
    assert ledger_of(tmp_path / "parts") == ledger_of(tmp_path / "whole")


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_checkpoints_without_virtual_workers(
    pool: Pool, tmp_path: Path, first: bool, second: bool
) -> None:
    whole = pool.run(trained_in, tmp_path / "whole", False, 2, None, False, None, workers=2)
    pool.run(trained_in, tmp_path / "parts", first, 1, None, first, None, workers=2)
    found = pool.run(trained_in, tmp_path / "parts", second, 2, "latest", False, None, workers=2)
    assert found == whole
    assert saved_in(tmp_path / "parts") == saved_in(tmp_path / "whole")


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {}


def refused(text: str) -> Callable[[Any], Any]:
    def note(make: Callable[[Any], Any]) -> Any:
        REFUSED[make.__name__] = make, text
        return make

    return note


@refused("whose update of one tensor depends on the gradients of others. Trainer(max_grad_norm=")
def limits_the_whole_gradient(parameters: Any) -> Any:
    class GlobalClip(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            every = [p for group in self.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(every, 1.0)
            return super().step(closure)

    return GlobalClip(parameters, lr=0.1)


@refused("whose hyperparameters depend on all gradients of a group")
def learns_its_rate(parameters: Any) -> Any:
    class Learnt(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                squares = [
                    float(p.grad.square().sum()) for p in group["params"] if p.grad is not None
                ]
                group["lr"] = 0.1 / (1.0 + sum(squares))
            return super().step(closure)

    return Learnt(parameters, lr=0.1)


@refused("which changes tensors that have no gradient")
def decays_all(parameters: Any) -> Any:
    class Decay(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)
            return super().step(closure)

    return Decay(parameters, lr=0.1)


@refused("which fails on small tensors: AttributeError: ")
def needs_all_gradients(parameters: Any) -> Any:
    class Eager(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.square()
            return super().step(closure)

    return Eager(parameters, lr=0.1)


@refused("with a step hook, which would see the gradients of some tensors only")
def has_a_hook(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_couple_tensors(name: str) -> None:
    make, text = REFUSED[name]
    model = make_classifier()
    before = lockstep.fingerprint(model)
    optimizer = make(model.parameters())
    with pytest.raises(ConfigError) as raised:
        lockstep.TrainStep(
            model, optimizer, nn.CrossEntropyLoss(), virtual_workers=4, shard_optimizer=True
        )
    said = str(raised.value)
    assert said.startswith(
        "shard_optimizer: expected an optimizer that updates each tensor from its own gradient and "
        f"state alone, got {type(optimizer).__name__}"
    )
    assert text in said
    assert "Set optimizer.same_bits = True" in said
    assert lockstep.fingerprint(model) == before
    optimizer.same_bits = True
    lockstep.TrainStep(
        model, optimizer, nn.CrossEntropyLoss(), virtual_workers=4, shard_optimizer=True
    )


def test_what_couples_tensors_later_is_refused_at_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.steps = getattr(self, "steps", 0) + 1
            every = [p for group in self.param_groups for p in group["params"]]
            if self.steps > 4:
                torch.nn.utils.clip_grad_norm_(every, 1.0)
            return super().step(closure)

    def run() -> str:
        model = make_classifier()
        trainer = lockstep.Trainer(
            model,
            Late(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            BATCH,
            run_dir=tmp_path / "run",
            callbacks=[],
            virtual_workers=8,
            shard_optimizer=True,
        )
        with pytest.raises(ConfigError) as raised:
            trainer.fit(make_samples(STEPS * BATCH), 1)
            trainer.save()
        return str(raised.value)

    for said in pool.run(run, workers=2):
        assert "got Late, whose update of one tensor depends on the gradients of others" in said


@pytest.mark.parametrize("strategy", ["sharded", "replicas"])
def test_only_with_data_parallelism(strategy: str) -> None:
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError,
        match=r"shard_optimizer: expected true only with strategy='distributed', with or without "
        rf"virtual_workers, got true, with the strategy {strategy}\. strategy='sharded' divides",
    ):
        lockstep.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), BATCH, strategy=strategy, shard_optimizer=True
        )


def test_only_with_dense_gradients() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError,
        match="shard_optimizer: expected a model whose gradients are dense, got one with an "
        r"embedding of sparse=True\. Make it with sparse=False",
    ):
        lockstep.TrainStep(model, optimizer, nn.CrossEntropyLoss(), shard_optimizer=True)


def stepped(shard_optimizer: bool, *of_model: Any, epoch: int = 0) -> tuple[Any, Any, Any]:
    """A model, its optimizer and its step, after two steps."""
    model = of_model[0] if of_model else make_classifier()
    optimizer = of_model[1] if of_model else DIVISIBLE["adamw"](model.parameters())
    step = lockstep.TrainStep(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        virtual_workers=4,
        shard_optimizer=shard_optimizer,
    )
    loader = lockstep.Loader(make_samples(2 * BATCH), BATCH, virtual_workers=4)
    for batch in loader.epoch(epoch):
        step.run(batch)
    return model, optimizer, step


def test_a_part_of_the_state_is_trained_by_nobody_else(pool: Pool) -> None:
    """The parameters whose state is missing would begin anew, on each worker others."""

    def copied(model: Any, optimizer: Any) -> Any:
        return copy.deepcopy((model, optimizer))

    def pickled(*of_model: Any) -> Any:
        file = io.BytesIO()
        torch.save(of_model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def loaded(_: Any, optimizer: Any) -> Any:
        """With the part of rank 0 everywhere, as rank 0 alone has saved it."""
        model = make_classifier()
        new = DIVISIBLE["adamw"](model.parameters())
        new.load_state_dict(lockstep.init().broadcast_object(optimizer.state_dict()))
        return model, new

    def run() -> list[str]:
        model, optimizer, _ = stepped(True)
        said = []
        ways: list[Any] = [lambda *of_model: of_model, copied, pickled, loaded]
        for way in ways:
            changed = way(model, optimizer)
            with pytest.raises(ConfigError) as raised:
                stepped(False, *changed)
            said.append(str(raised.value))
            with pytest.raises(ConfigError) as raised:
                lockstep.prepare(*changed)
            said.append(str(raised.value))
        with pytest.raises(ConfigError) as raised:
            stepped(True, *loaded(model, optimizer))
        return [*said, str(raised.value)]

    for rank, messages in enumerate(pool.run(run, workers=2)):
        for number, said in enumerate(messages):
            owner = rank if number < 6 else 0
            assert "optimizer: expected the whole state of all parameters, " in said
            assert f"got the part of a state that rank {owner} of 2 workers had" in said
            assert "load into it the whole state: what TrainStep.full_optimizer_state()" in said


def test_training_goes_on_with_the_same_parts_or_with_the_whole_state(pool: Pool) -> None:
    def run(first: bool, second: bool) -> str:
        model, optimizer, step = stepped(first)
        if first and not second:
            state = step.full_optimizer_state()
            optimizer = DIVISIBLE["adamw"](model.parameters())
            optimizer.load_state_dict(state)
        return str(stepped(second, model, optimizer, epoch=1)[2].fingerprint())

    expected = pool.run(run, False, False, workers=1)
    for first, second in ((True, True), (True, False), (False, True)):
        assert pool.run(run, first, second, workers=3) == expected * 3


@pytest.mark.parametrize("is_missing", [True, False])
def test_workers_that_begin_with_other_states_are_refused(pool: Pool, is_missing: bool) -> None:
    """Nobody would notice: values are those of the owners, and the same on all workers."""

    def run() -> str:
        model = make_classifier()
        optimizer = DIVISIBLE["adamw"](model.parameters())
        rank = lockstep.init().rank
        if rank == 0 or not is_missing:
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + rank)
            optimizer.step()
        with pytest.raises(MismatchError) as raised:
            stepped(True, model, optimizer)
        return str(raised.value)

    for said in pool.run(run, workers=3):
        assert said.startswith(
            "the workers' optimizers differ: the state that rank 1 has before the first step is "
            "not that of rank 0."
        )


def test_states_that_rounding_has_made_others_are_not_refused(pool: Pool) -> None:
    """Without virtual workers, as on other processors."""

    def run() -> list[str]:
        model = make_classifier()
        optimizer = DIVISIBLE["adamw"](model.parameters())
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + 1e-7 * lockstep.init().rank)
        optimizer.step()
        optimizer.zero_grad()
        step = lockstep.TrainStep(model, optimizer, nn.CrossEntropyLoss(), shard_optimizer=True)
        loader = lockstep.Loader(make_samples(BATCH), BATCH)
        step.run(next(iter(loader.epoch(0))))
        return [lockstep.fingerprint(model)]

    first, second = pool.run(run, workers=2)
    assert first == second


def test_the_mark_of_a_part_is_no_hyperparameter(pool: Pool, tmp_path: Path) -> None:
    for shard_optimizer in (True, False):
        folder = tmp_path / str(shard_optimizer)
        pool.run(trained_in, folder, shard_optimizer, 1, None, workers=2)
    one, other = (lockstep.ledger(tmp_path / name).starts[0] for name in ("True", "False"))
    assert one.hyperparameters == other.hyperparameters


def test_parameters_that_the_optimizer_is_given_later(pool: Pool) -> None:
    def run(shard_optimizer: bool) -> list[str]:
        model = make_classifier()
        *early, last = model.parameters()
        optimizer = DIVISIBLE["adamw"](early)
        found = []
        _, _, step = stepped(shard_optimizer, model, optimizer)
        optimizer.add_param_group({"params": [last]})
        for epoch in (1, 2):
            saved = optimizer.state_dict()
            for _ in range(2):
                optimizer.load_state_dict(saved)
            found.append(step.fingerprint())
            for batch in lockstep.Loader(make_samples(2 * BATCH), BATCH, virtual_workers=4).epoch(
                epoch
            ):
                step.run(batch)
        _, _, other = stepped(shard_optimizer, model, optimizer, epoch=3)
        return [*found, other.fingerprint()]

    expected = pool.run(run, False, workers=1)
    for workers in (2, 3):
        assert pool.run(run, True, workers=workers) == expected * workers


def test_several_steps_of_an_optimizer_add_one_hook_each() -> None:
    model = make_classifier()
    optimizer = DIVISIBLE["adamw"](model.parameters())
    for _ in range(3):
        lockstep.TrainStep(model, optimizer, nn.CrossEntropyLoss())
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def single() -> nn.Module:
    """One parameter: of several workers, all but one own nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 5, bias=False))


@pytest.mark.parametrize("virtual_workers", [8, None])
@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_workers_that_own_nothing(pool: Pool, virtual_workers: int | None, optimizer: str) -> None:
    workers = 1 if virtual_workers else 3
    expected = pool.run(trained, single, optimizer, False, virtual_workers, workers=workers)
    found = pool.run(trained, single, optimizer, True, virtual_workers, workers=3)
    assert found == (expected * 3 if virtual_workers else expected)


def test_parameters_that_are_frozen_or_trained_later(pool: Pool) -> None:
    def run(shard_optimizer: bool) -> str:
        model, _, step = stepped(shard_optimizer)
        model[0].weight.requires_grad_(False)
        model[6].bias.requires_grad_(True)
        loader = lockstep.Loader(make_samples(2 * BATCH), BATCH, virtual_workers=4)
        for batch in loader.epoch(1):
            step.run(batch)
        return str(step.fingerprint())

    expected = pool.run(run, False, workers=1)
    for workers in (2, 3):
        assert pool.run(run, True, workers=workers) == expected * workers


def test_a_part_of_the_state_is_loaded_by_nobody_else(pool: Pool) -> None:
    def run() -> None:
        model = make_classifier()
        optimizer = DIVISIBLE["adamw"](model.parameters())
        step = lockstep.TrainStep(
            model, optimizer, nn.CrossEntropyLoss(), virtual_workers=4, shard_optimizer=True
        )
        step.run(
            next(iter(lockstep.Loader(make_samples(BATCH), BATCH, virtual_workers=4).epoch(0)))
        )
        before = step.fingerprint()
        parts = step.comm.allgather_object(optimizer.state_dict())
        optimizer.load_state_dict(parts[step.comm.rank])
        optimizer.load_state_dict(step.full_optimizer_state())
        assert step.fingerprint() == before
        with pytest.raises(ConfigError, match=r"got the part that rank \d of 2 workers had"):
            optimizer.load_state_dict(parts[1 - step.comm.rank])

    pool.run(run, workers=2)


@pytest.mark.parametrize(
    ("backend", "virtual_workers"), [("shm", 8), ("gloo", 8), ("shm", None), ("gloo", None)]
)
def test_second_owners_make_the_same_updates_and_workers_hand_over_their_parts(
    pool: Pool, backend: str, virtual_workers: int | None
) -> None:
    """As in an elastic job."""
    arguments = matrices, "adamw", False, virtual_workers
    expected = pool.run(trained, *arguments, workers=3, backend=backend)[0][0]

    def run() -> list[Any]:
        model = matrices()
        optimizer = DIVISIBLE["adamw"](model.parameters())
        step = lockstep.TrainStep(
            model,
            optimizer,
            nn.CrossEntropyLoss(),
            virtual_workers=virtual_workers,
            max_grad_norm=0.5,
            shard_optimizer=True,
        )
        strategy: Any = step.strategy
        shards = OptimizerShards(list(model.parameters()), step.comm, has_second_owners=True)
        strategy.shards = vars(optimizer)[DIVISION] = shards
        strategy.regroup(model)
        step._module = strategy.wrap(step._loss)
        for batch in lockstep.Loader(
            make_samples(STEPS * BATCH), BATCH, virtual_workers=virtual_workers
        ).epoch(0):
            step.run(batch)
        held = {
            number: lockstep.fingerprint(model) + str(optimizer.state[p]["exp_avg_sq"].sum().item())
            for number, p in enumerate(model.parameters())
            if p in optimizer.state
        }
        by_rank = step.comm.allgather_object(held)
        copies = [
            [theirs[number] for theirs in by_rank if number in theirs]
            for number in range(len(shards.parameters))
        ]
        before = step.fingerprint()
        shards.regroup(optimizer, leaving=step.comm.rank == 0)
        left = step.comm.allgather_object(len(optimizer.state_dict()["state"]))
        return [[len(same), len(set(same))] for same in copies] + [left, before, step.fingerprint()]

    found = pool.run(run, workers=3, backend=backend)
    assert found == [[[2, 1], [2, 1], [2, 1], [0, 3, 3], expected, expected]] * 3


def test_state_that_all_its_owners_have_taken_along_is_missed_by_all(pool: Pool) -> None:
    def run() -> None:
        model = matrices()
        shards = OptimizerShards(list(model.parameters()), lockstep.init(), has_second_owners=True)
        if lockstep.init().rank < 2:
            shards._held.clear()
        with pytest.raises(LostStateError, match="the optimizer's state of 1 parameter were lost"):
            shards.find_owners()

    pool.run(run, workers=3)


@pytest.mark.parametrize("option", ["cross_check", "callbacks"])
def test_what_reads_whole_gradients_is_refused(pool: Pool, option: str) -> None:
    def run() -> None:
        model = make_classifier()
        value: Any = 10 if option == "cross_check" else [lockstep.callbacks.GradientNoise()]
        lockstep.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            BATCH,
            virtual_workers=8,
            shard_optimizer=True,
            **{"callbacks": [], option: value},
        ).fit(make_samples(BATCH), 1)

    with pytest.raises(
        RanksFailedError, match=f"ConfigError: {option}: expected .*shard_optimizer"
    ):
        pool.run(run, workers=2)


def test_a_step_that_is_taken_back(pool: Pool) -> None:
    """The copy in memory is of a worker's own part of the state."""

    def run(shard_optimizer: bool) -> list[Any]:
        model = make_classifier()
        trainer = lockstep.Trainer(
            model,
            DIVISIBLE["adamw"](model.parameters()),
            nn.CrossEntropyLoss(),
            BATCH,
            virtual_workers=8,
            shard_optimizer=shard_optimizer,
            callbacks=[],
        )
        copies = []
        loader = lockstep.Loader(make_samples(STEPS * BATCH), BATCH, virtual_workers=8)
        for number, batch in enumerate(loader.epoch(0)):
            trainer.step.run(batch)
            if number == 1:
                copies.append(StateCopy(trainer.step))
        then = trainer.step.fingerprint()
        copies[0].restore()
        return [then, trainer.step.fingerprint()]

    expected = pool.run(run, False, workers=1)
    assert expected[0][0] != expected[0][1]
    assert pool.run(run, True, workers=3) == expected * 3
