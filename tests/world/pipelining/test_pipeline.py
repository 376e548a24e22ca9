"""A model cut by layers over workers trains as on one, and its state is that of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.parallel.optimizer_parts import set_part
from lockstep.pipelining import Pipeline
from lockstep.tried_versions import release_of
from support.pool import Pool, RanksFailedError

FEATURES, CLASSES, BATCH = 6, 5, 24

Answer = tuple[list[float], dict[str, Any], dict[str, Any], torch.Tensor]

FEW_MICROBATCHES = pytest.mark.skipif(
    release_of(torch.__version__) < (2, 11),
    reason="torch 2.10 has no schedule for fewer micro-batches than stages",
)


def layers(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    wide = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), *wide, *extra, nn.Linear(16, CLASSES)
    ).double()


class Residual(nn.Module):
    """No sequence: blocks in a list, with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(self.drop(x))


def samples(step: int, ignored: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (BATCH,), generator=source)
    labels[:ignored] = -100
    return torch.randn(BATCH, FEATURES, generator=source).double(), labels


def steps(
    pipe: Pipeline, optimizer: Any, which: range, ignored: int = 0, clip: float | None = None
) -> list[float]:
    losses = []
    for number in which:
        losses.append(float(pipe.step(*samples(number, ignored), nn.CrossEntropyLoss())))
        if clip is not None:
            pipe.clip_grad_norm_(clip)
        optimizer.step()
    return losses


def reference(ignored: int = 0, clip: float | None = None) -> Answer:
    """By hand, with torch alone."""
    model, losses = layers(), []
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for number in range(4):
        inputs, labels = samples(number, ignored)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict(), optimizer.state_dict(), model(samples(9)[0][:7]).detach()


def piped(ignored: int = 0, clip: float | None = None, **options: Any) -> Answer:
    pipe = lockstep.pipeline(layers(), **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), 0.01)
    losses = steps(pipe, optimizer, range(4), ignored, clip)
    size = 7 if options.get("microbatches") is None else 12
    return (
        losses,
        pipe.state_dict(),
        pipe.optimizer_state_dict(optimizer),
        pipe(samples(9)[0][:size])[:7],
    )


def expect(got: Answer, wanted: Answer) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=1e-12)
    assert list(got[1]) == list(wanted[1])
    assert got[2]["param_groups"] == wanted[2]["param_groups"]
    for mine, other in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12, check_device=False)


@pytest.mark.parametrize(
    ("workers", "backend", "options"),
    [
        (1, "shm", {}),
        (2, "shm", {"schedule": "gpipe"}),
        (2, "gloo", {"ignored": 7}),
        (3, "shm", {"ignored": 7, "clip": 0.1}),
        (3, "gloo", {"schedule": "gpipe", "microbatches": 6}),
        pytest.param(3, "shm", {"microbatches": 2}, marks=FEW_MICROBATCHES),  # fewer than stages
        (2, "shm", {"split": ["1"], "microbatches": 12}),
    ],
)
def test_losses_and_state_are_those_of_one_device(
    pool: Pool, workers: int, backend: str, options: dict[str, Any]
) -> None:
    wanted = reference(options.get("ignored", 0), options.get("clip"))
    for got in pool.run(piped, workers=workers, backend=backend, **options):
        expect(got, wanted)


def few_where_torch_refuses() -> str:
    from torch.distributed import pipelining

    def refuse(*arguments: Any, **options: Any) -> None:
        raise ValueError(
            "Number of microbatches (1) must be greater than or equal to the number of stages (2)."
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelining, "ScheduleGPipe", refuse)
        with pytest.raises(ConfigError) as caught:
            piped(microbatches=1)
    return str(caught.value)


def test_fewer_micro_batches_than_stages_are_refused_where_torch_refuses_them(pool: Pool) -> None:
    for text in pool.run(few_where_torch_refuses, workers=2):
        assert text.startswith("microbatches: expected at least 2, one for each stage, with torch ")
        assert "got 1 (Number of microbatches (1) must be" in text


def resumed(state: Any, optimizer_state: Any) -> Answer:
    pipe = lockstep.pipeline(nn.Sequential(*layers()))
    optimizer = torch.optim.AdamW(pipe.parameters(), 0.5)
    pipe.load_state_dict(state)
    pipe.load_optimizer_state_dict(optimizer, optimizer_state)
    losses = steps(pipe, optimizer, range(2, 4))
    return losses, pipe.state_dict(), pipe.optimizer_state_dict(optimizer), pipe(samples(9)[0][:7])


def half(stages: int) -> tuple[Any, Any]:
    pipe = lockstep.pipeline(layers(), stages)
    optimizer = torch.optim.AdamW(pipe.parameters(), 0.01)
    steps(pipe, optimizer, range(2))
    return pipe.state_dict(), pipe.optimizer_state_dict(optimizer)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_state_resumes_with_other_stages(pool: Pool, before: int, after: int) -> None:
    state = pool.run(half, before, workers=before)[0]
    losses, *rest = reference()
    for got in pool.run(resumed, *state, workers=after):
        expect(got, (losses[2:], *rest))


def odd_sizes() -> None:
    """Micro-batches of another shape than those before."""
    pipe, model = lockstep.pipeline(layers()), layers()
    for size in (24, 10, 7, 24):
        inputs, labels = (tensor[:size] for tensor in samples(size))
        loss = pipe.step(inputs, labels, nn.CrossEntropyLoss())
        torch.testing.assert_close(loss, nn.functional.cross_entropy(model(inputs), labels))


def own_layers_alone() -> list[str]:
    model = layers()
    pipe = lockstep.pipeline(model)
    there = [name for name, p in model.named_parameters() if not p.is_meta]
    assert there == [name for name, _ in pipe.named_parameters()]
    return there


def batch_norm() -> dict[str, Any]:
    """Statistics are moved once for each micro-batch, and not by finding out what passes between
    stages.
    """
    torch.manual_seed(3)  # of dropout alone
    pipe = lockstep.pipeline(layers(nn.BatchNorm1d(16)), microbatches=4)
    pipe.step(*samples(0), nn.CrossEntropyLoss())
    return pipe.state_dict()


def rank_0_values() -> torch.Tensor:
    model = layers()
    with torch.no_grad():
        model[0].weight += lockstep.init().rank
    return lockstep.pipeline(model).state_dict()["0.weight"]


def test_what_a_worker_has(pool: Pool) -> None:
    pool.run(odd_sizes, workers=2)
    first, second = pool.run(own_layers_alone, workers=2)
    assert first + second == [name for name, _ in layers().named_parameters()]
    for state in pool.run(batch_norm, workers=2):
        assert state["6.num_batches_tracked"] == 4
        torch.testing.assert_close(state, pool.run(batch_norm, workers=1)[0])
    for weight in pool.run(rank_0_values, workers=2):
        assert torch.equal(weight, layers()[0].weight)


# --- a model that is no sequence
# -----------------------------------------------------------------------------


def followed(stages: int) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
    example = samples(0)[0][:6]
    split = ["blocks.0", "last"][: stages - 1]
    pipe = lockstep.pipeline(Residual(), stages, split=split, example=example)
    pipe.module.train()
    pipe.step(*samples(1), nn.CrossEntropyLoss())
    optimizer = torch.optim.AdamW(pipe.parameters(), 0.01)
    optimizer.step()
    moments = pipe.optimizer_state_dict(optimizer)["state"]
    assert [moments[number]["exp_avg"].shape for number in moments] == [
        p.shape for p in Residual().parameters()
    ]
    state, inputs = pipe.state_dict(), samples(2)[0]
    output = pipe.eval()(inputs)
    model = Residual().eval()
    model.load_state_dict(state)
    torch.testing.assert_close(output, model(inputs).detach())
    with pytest.raises(
        ConfigError, match=r"batch: expected some micro-batches of 6, as the example, got 7 samples"
    ):
        pipe(inputs[:7])
    return output, state, pipe.train()(inputs)


@pytest.mark.leaks("a trace of torch leaves the thread of a progress bar")
def test_a_model_with_split_points(pool: Pool) -> None:
    for stages in (2, 3):
        for output, state, training in pool.run(followed, stages, workers=stages):
            assert list(state) == list(Residual().state_dict())
            assert state["norm.num_batches_tracked"] == 4
            assert not torch.equal(training, output)  # dropout


# --- what cannot be used
# -------------------------------------------------------------------------------------


def refused(match: str, model: Any = None, *args: Any, **options: Any) -> None:
    with pytest.raises(ConfigError, match=match.replace("got ", "got '?")):
        lockstep.pipeline(layers() if model is None else model, *args, **options)


def shared() -> nn.Sequential:
    model = layers()
    model[4].weight = model[2].weight
    return model


class Skipping(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks[1](self.blocks[0](self.first(x)))) + x[:, :CLASSES]


class Unused(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Branching(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) if x.sum() > 0 else self.last(x[:, :1].expand(-1, 16))


def bad_arguments() -> None:
    example = torch.zeros(2, FEATURES, dtype=torch.float64)
    following: dict[str, Any] = {"split": ["last"], "example": example}
    refused("stages: expected one for each of the 2 workers, got 3", None, 3)
    refused("stages: expected a whole number", None, 0)
    refused(
        "stages: expected at most one for each of the model's 1 layers, got 2",
        nn.Sequential(nn.Linear(2, 2)),
    )
    refused("model: expected a torch.nn.Module, got int", 3)
    refused("schedule: .*Did you mean gpipe", schedule="gpip")
    refused("microbatches: expected a whole number", microbatches=0)
    refused("split: expected 1 names, .* got 2: 1, 2", split=["1", "2"])
    refused("split: expected 1 names, .* got 1", split="1")
    refused("split: expected names of the model's layers .0, 1, .* got 9", split=["9"])
    refused("split: expected layers in the order of the model", split=["0"])
    refused("example: expected none with an nn.Sequential", example=example)
    refused(
        "model: expected stages without a parameter or buffer in common, got 2.weight of stage 0",
        shared(),
        split=["3"],
    )
    refused(
        "model: expected an nn.Sequential, or .* got NoneType as example",
        Residual(),
        split=["last"],
    )
    refused(
        "model: expected an nn.Sequential, or .* got none of split", Residual(), example=example
    )
    refused(
        "split: expected names of the model's modules", Residual(), split=["none"], example=example
    )
    refused(
        "split: expected modules that run after the model's first",
        Residual(),
        split=["first"],
        example=example,
    )
    refused(
        "split: expected stages that use the previous one alone",
        Skipping(),
        split=["blocks.0"],
        example=example,
    )
    refused(
        "model: expected parameters that all take part in a pass, got unused.weight",
        Unused(),
        **following,
    )
    refused("model: expected one that torch.export can trace", Branching(), **following)


def bad_batches() -> None:
    pipe, loss = lockstep.pipeline(layers(), microbatches=5), nn.CrossEntropyLoss()
    inputs, labels = samples(0)
    for match, batch, target in [
        ("batch: expected samples in 5 equal micro-batches, got 24", inputs, labels),
        ("batch: expected at least one sample, got 0", inputs[:0], labels[:0]),
        ("target: expected as many as samples in the batch, 24, got 20", inputs, labels[:20]),
        ("batch: expected a tensor of shape .samples, .*, got list", [1], labels),
        (
            "target: expected a tensor of shape .samples, .*, got a tensor without dimensions",
            inputs,
            labels[0],
        ),
    ]:
        with pytest.raises(ConfigError, match=match.replace("got ", "got '?")):
            pipe.step(batch, target, loss)
    with pytest.raises(ConfigError, match="batch: expected samples in 5"):
        pipe(inputs)
    with pytest.raises(DataError, match="counts"):
        pipe.step(inputs[:20], torch.full((20,), -100), loss)


def bad_states() -> None:
    pipe = lockstep.pipeline(layers())
    whole = layers().state_dict()
    with pytest.raises(CheckpointError, match=r"without 0.weight"):
        pipe.load_state_dict({name: value for name, value in whole.items() if name != "0.weight"})
    with pytest.raises(CheckpointError, match=r"with more, which the model does not have"):
        pipe.load_state_dict({**whole, "more": torch.zeros(1)})
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(CheckpointError, match=r"one group of 8 parameters, got 1 with \[2\]"):
        pipe.load_optimizer_state_dict(optimizer, other.state_dict())
    with pytest.raises(
        ConfigError,
        match=r"optimizer: expected parameters of this stage alone, .* got 2 that are not",
    ):
        pipe.optimizer_state_dict(other)
    groups = torch.optim.SGD([{"params": [p]} for p in pipe.parameters()], 0.1)
    with pytest.raises(
        ConfigError,
        match="optimizer: expected one group of parameters, in a pipeline, got 4 groups",
    ):
        pipe.optimizer_state_dict(groups)
    set_part(optimizer, {"worker": "rank 0 of 2 workers", "parameters": [0]})
    with pytest.raises(ConfigError, match="got the part of a state that rank 0 of 2 workers had"):
        pipe.optimizer_state_dict(optimizer)
    with pytest.raises(ConfigError, match="got the part of a state that rank 0 of 2 workers had"):
        pipe.load_optimizer_state_dict(optimizer, optimizer.state_dict())


@pytest.mark.leaks("a trace of torch leaves the thread of a progress bar")
def test_what_cannot_be_used(pool: Pool) -> None:
    pool.run(bad_arguments, workers=2)
    pool.run(bad_batches, workers=2)
    pool.run(bad_states, workers=2)


def test_workers_with_other_models(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="the workers' models differ"):
        pool.run(
            lambda: lockstep.pipeline(
                nn.Sequential(nn.Linear(2, 2 + lockstep.init().rank), nn.Tanh())
            ),
            workers=2,
        )


def test_a_loss_that_is_no_mean_over_samples_is_refused_on_every_worker(pool: Pool) -> None:
    def refused() -> None:
        pipe = lockstep.pipeline(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4)), microbatches=2)
        with pytest.raises(
            ConfigError, match=f"which gives .* for 4 samples of rank {lockstep.init().size - 1} "
        ):
            pipe.step(
                torch.randn(8, 2),
                torch.randn(8, 4),
                lambda output, target: (output - target).square().sum(),
            )

    pool.run(refused, workers=2)
