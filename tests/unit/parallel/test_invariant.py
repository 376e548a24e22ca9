"""What keeps the promise of equal bits: conditions held fixed, layers refused, shards dealt out and
seeded.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError
from lockstep.parallel.buffers import Buffers
from lockstep.parallel.determinism import DeterminismSettings, differences
from lockstep.parallel.randomness import seed_shard, seed_torch
from lockstep.parallel.sync_batchnorm import SyncBatchNorm
from lockstep.parallel.unsupported_layers import UNSUPPORTED, check_joint_passes, check_supported
from lockstep.topology import World
from lockstep.training.options import TrainOptions
from lockstep.training.step.step_arguments import resolve_strategy
from lockstep.training.step.virtual_worker_passes import _aligned

CPU = torch.device("cpu")


def place(rank: int, size: int) -> lockstep.Communicator:
    return lockstep.Communicator.at(
        World(rank=rank, world_size=size, local_rank=rank, local_world_size=size), CPU
    )


# --- conditions
# ----------------------------------------------------------------------------------------------


def test_switches_are_set_and_put_back() -> None:
    before = torch.get_num_threads()
    with DeterminismSettings(CPU, threads=before + 1).applied():
        assert torch.get_num_threads() == before + 1
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        with DeterminismSettings(CPU, threads=before + 1).applied():
            pass
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_switches_are_put_back_after_an_error() -> None:
    torch.backends.cudnn.benchmark = True
    try:
        with pytest.raises(RuntimeError, match="no"), DeterminismSettings(CPU).applied():
            assert not torch.backends.cudnn.benchmark
            raise RuntimeError("no")
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = False


def test_the_workspace_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with DeterminismSettings(torch.device("cuda")).applied():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with DeterminismSettings(torch.device("cuda")).applied():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    with DeterminismSettings(CPU).applied():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_each_shape_is_compiled_for_itself() -> None:
    import torch._dynamo.config as compiler

    names = ("automatic_dynamic_shapes", "recompile_limit", "fail_on_recompile_limit_hit")
    before = [getattr(compiler, name) for name in names]
    with DeterminismSettings(CPU).applied():
        assert [getattr(compiler, name) for name in names] == [False, 256, True]
    assert [getattr(compiler, name) for name in names] == before != [False, 256, True]


def test_conditions_name_what_bits_depend_on() -> None:
    found = DeterminismSettings(CPU, threads=3).describe()
    assert found["threads"] == 3
    assert found["torch"] == torch.__version__
    assert found["instruction set"] == torch.backends.cpu.get_cpu_capability()
    assert DeterminismSettings(CPU).threads == 1
    assert DeterminismSettings(torch.device("cuda")).threads is None
    assert differences({"a": 1, "b": 2}, {"b": 3, "c": 4}) == [
        ("a", 1, None),
        ("b", 2, 3),
        ("c", None, 4),
    ]


@pytest.mark.parametrize("threads", [0, True, 1.5])
def test_a_number_of_threads(threads: Any) -> None:
    with pytest.raises(ConfigError, match="threads: expected a whole number of at least 1"):
        DeterminismSettings(CPU, threads)


# --- layers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "device", "reason"),
    [
        (SyncBatchNorm(3), "cuda", "need a thread each"),
        (nn.SyncBatchNorm(3), "cpu", "compute at the same time"),
        (nn.Embedding(3, 2, sparse=True), "cpu", "gradients are sparse"),
        (nn.EmbeddingBag(3, 2, max_norm=1.0), "cpu", "changes its weights"),
        (nn.LSTM(3, 2, num_layers=2, dropout=0.1), "cuda", "a random state of its own"),
        (nn.DataParallel(nn.Linear(1, 1)), "cpu", "sums gradients itself"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_are_refused(layer: nn.Module, device: str, reason: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1), layer)
    with pytest.raises(ConfigError, match=rf"{type(layer).__name__} at 1: .*{reason}"):
        check_supported(model, torch.device(device))
    layer.same_bits = True  # type: ignore[assignment]
    check_supported(model, torch.device(device))


def test_layers_that_are_not() -> None:
    layers = [
        nn.BatchNorm2d(3),
        nn.Embedding(3, 2),
        nn.LSTM(3, 2, num_layers=2, dropout=0.1),
        nn.Dropout(),
    ]
    check_supported(nn.Sequential(*layers), CPU)
    assert len({kind.name for kind in UNSUPPORTED}) == len(UNSUPPORTED)


def test_what_cannot_be_together_with_synchronised_batch_norm() -> None:
    check_joint_passes(nn.Sequential(SyncBatchNorm(3), nn.InstanceNorm1d(3)))
    with pytest.raises(ConfigError, match=r"no other running statistics.* got InstanceNorm1d at 1"):
        check_joint_passes(
            nn.Sequential(SyncBatchNorm(3), nn.InstanceNorm1d(3, track_running_stats=True))
        )
    compiled = nn.Sequential(SyncBatchNorm(3))
    compiled.compile(backend="eager")
    for model in (compiled, torch.compile(nn.Sequential(SyncBatchNorm(3)), backend="eager")):
        with pytest.raises(
            ConfigError, match="one that is not compiled, with sync_batchnorm and virtual workers"
        ):
            check_joint_passes(model)  # type: ignore[arg-type]


# --- buffers
# -------------------------------------------------------------------------------------------------


def test_running_statistics_are_the_mean_over_shards_by_samples() -> None:
    layer = nn.BatchNorm1d(1)
    buffers = Buffers(layer)
    buffers.begin()
    sums = []
    for shard, part in enumerate(
        (torch.tensor([[1.0], [3.0]]), torch.tensor([[4.0], [6.0], [8.0]]))
    ):
        buffers.restore()
        layer(part)
        sums.append(buffers.of_shard(len(part), first=shard == 0, last=shard == 1))
    buffers.set(sums[0] + sums[1], 5)
    assert float(layer.running_mean) == pytest.approx(0.1 * (2 * 2 + 3 * 6) / 5)  # type: ignore[arg-type]
    assert float(layer.running_var) == pytest.approx(0.9 + 0.1 * (2 * 2 + 3 * 4) / 5)  # type: ignore[arg-type]
    assert int(layer.num_batches_tracked) == 1  # type: ignore[arg-type]


def test_nothing_is_done_for_a_frozen_norm() -> None:
    buffers = Buffers(nn.BatchNorm1d(3).double().eval())
    buffers.begin()
    assert buffers.of_shard(2, first=True, last=True).numel() == 0


def test_a_norm_that_a_forward_pass_puts_into_training_mode() -> None:
    layer = nn.BatchNorm1d(3).eval()
    buffers = Buffers(layer)
    buffers.begin()
    layer.train()(torch.rand(4, 3))
    layer.eval()
    with pytest.raises(ConfigError, match="one that a forward pass has put into training mode"):
        buffers.of_shard(4, first=True, last=True)


def test_buffers_outside_of_norms_become_those_of_shard_0() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("in_place", torch.zeros(2))
            self.register_buffer("replaced", torch.zeros(2))
            self.register_buffer("constant", torch.ones(2))

        def forward(self, x: torch.Tensor) -> None:
            self.in_place += x
            self.replaced = self.replaced + x

    model = Counting()
    buffers = Buffers(model)
    constant = model.constant._version  # type: ignore[union-attr,operator]
    for step in range(2):
        buffers.begin()
        assert not buffers.others_changed()
        for shard in range(3):
            buffers.restore()
            model(torch.full((2,), shard + 1.0))
            buffers.of_shard(1, first=shard == 0, last=shard == 2)
        assert buffers.others_changed()
        buffers.set(torch.empty(0), 3)
        assert model.in_place.tolist() == model.replaced.tolist() == [step + 1.0] * 2
    buffers.restore()  # the last step is undone
    assert model.in_place.tolist() == model.replaced.tolist() == [1.0] * 2
    assert model.constant._version == constant  # type: ignore[union-attr,operator]


# --- shards
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_each_shard_is_assigned_once_and_collated_by_itself(workers: int) -> None:
    dataset, calls = TensorDataset(torch.arange(13)), []

    def collate(samples: list[Any]) -> torch.Tensor:
        calls.append(len(samples))
        return torch.stack([value for (value,) in samples])

    virtual_workers: list[list[int] | None] = []
    for rank in range(workers):
        loader = Loader(
            dataset,
            8,
            virtual_workers=5,
            shuffle=False,
            comm=place(rank, workers),
            collate_fn=collate,
        )
        for batch in loader.epoch(0):
            virtual_workers += (
                [None if data is None else data.tolist() for data in batch.data]
                if batch.step == 1
                else []
            )
            assert batch.size == sum(0 if data is None else len(data) for data in batch.data)
            assert batch.indices.tolist() == [
                n for data in batch.data if data is not None for n in data.tolist()
            ]
            assert (batch.global_size, batch.virtual_workers) == (
                (8, 5) if batch.step == 0 else (5, 5)
            )
    assert virtual_workers == [[8], [9], [10], [11], [12]]
    assert sorted(calls) == [1] * 7 + [2] * 3


def test_a_last_batch_with_fewer_samples_than_shards() -> None:
    loader = Loader(
        TensorDataset(torch.arange(10)), 8, virtual_workers=4, shuffle=False, comm=place(0, 1)
    )
    last = list(loader.epoch(0))[-1]
    assert [None if data is None else data[0].tolist() for data in last.data] == [
        [8],
        [9],
        None,
        None,
    ]


def test_draws_depend_on_seed_step_and_shard_alone() -> None:
    numpy = pytest.importorskip("numpy")

    def draws(*key: int) -> tuple[float, float, float]:
        seed_shard(*key)
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    torch.rand(3)
    first = draws(0, 1, 2)
    torch.rand(5)
    assert draws(0, 1, 2) == first
    every = [draws(*key) for key in ((0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3))]
    assert len({number for numbers in every for number in numbers}) == 12


def test_what_lies_askew_in_memory_is_copied() -> None:
    whole = torch.arange(64.0)
    assert _aligned(whole) is whole
    assert _aligned(whole[16:]).data_ptr() == whole[16:].data_ptr()
    askew = _aligned(whole[1:])
    assert askew.data_ptr() % 64 == 0
    assert torch.equal(askew, whole[1:])


# --- arguments
# -----------------------------------------------------------------------------------------------


def test_arguments_that_contradict_shards() -> None:
    with pytest.raises(
        ConfigError, match="gradient_accumulation_steps: expected 1 with virtual workers, got 2"
    ):
        resolve_strategy(None, 4, None, 2)
    with pytest.raises(ConfigError, match="threads: expected none without virtual workers, got 2"):
        resolve_strategy(None, None, 2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"virtual_workers": 2, "workers": "3"},
            "virtual_workers: expected at least one for each of 3 workers, got 2",
        ),
        (
            {"virtual_workers": 2, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps: expected 1 with virtual workers",
        ),
        (
            {"virtual_workers": 2, "sync_batchnorm": True, "compile": True},
            "compile: expected false with virtual workers and sync_batchnorm",
        ),
        ({"threads": 2}, "threads: expected none without virtual workers"),
    ],
)
def test_options_that_contradict_shards(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainOptions(**options).check()


def test_the_document_has_the_same_table_of_layers() -> None:
    page = (Path(__file__).parents[3] / "docs" / "invariance.md").read_text()
    section = page.partition("## Unsupported layers")[2].partition("\n## ")[0]
    rows = [
        line
        for line in section.splitlines()
        if line.startswith("| ") and not line.startswith("| Layer")
    ]
    assert rows == [f"| {kind.name} | {kind.reason} | {kind.instead} |" for kind in UNSUPPORTED]


def test_the_generator_of_the_given_gpu_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the current one."""
    seeded: list[tuple[int, int]] = []
    generators = [
        SimpleNamespace(manual_seed=lambda key, index=index: seeded.append((index, key)))
        for index in (0, 1)
    ]
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda key: seeded.append((-1, key)))
    seed_torch(5, torch.device("cuda", 1))
    seed_torch(6, torch.device("cuda"))
    assert seeded == [(1, 5), (-1, 6)]


@pytest.mark.parametrize("wrong", [{"seed": 1.5}, {"step": -1}, {"shard": "0"}])
def test_a_key_that_is_no_whole_number(wrong: dict[str, Any]) -> None:
    key: dict[str, Any] = {"seed": 0, "step": 0, "shard": 0, **wrong}
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected a whole number"):
        seed_shard(**key)


def test_the_class_weights_of_a_loss_are_watched_and_none_are_not() -> None:
    assert not Buffers(nn.CrossEntropyLoss())
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(3))
    buffers = Buffers(loss_fn)
    buffers.begin()
    assert not buffers.others_changed()
    assert loss_fn.weight is not None
    loss_fn.weight.mul_(2)
    assert buffers.others_changed()
