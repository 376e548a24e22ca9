"""A sharded run's checkpoint is written and read in parts, whole or not at all, by any number of
workers.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint import distributed_checkpoint, manifest
from lockstep.checkpoint import folder as checkpoint_folder
from lockstep.errors import CheckpointError
from lockstep.parallel.sharded import Sharded
from lockstep.training.callbacks import Callback
from lockstep.training.run import checkpoint_manager
from support.checkpoints import names, snapshot
from support.pool import Pool, RanksFailedError

# torch's caches keep device meshes, and Gloo's files are open for as long as somebody holds its
# group
pytestmark = pytest.mark.leaks("a device mesh outlives its job, and its group with it")


class Net(nn.Module):
    """Rows that no number of workers divides, fewer rows than workers, a buffer, and values in two
    formats.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.few, self.last = nn.Linear(6, 7), nn.Linear(7, 2), nn.Linear(2, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        out: torch.Tensor = self.last(self.few(self.first(x).tanh()))
        return out


def data() -> TensorDataset:
    source = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(24, 6, generator=source), torch.randint(4, (24,), generator=source)
    )


def trainer(
    folder: Path | None, strategy: str = "sharded", optimizer: Any = None, **options: Any
) -> lockstep.Trainer:
    comm = lockstep.init("cpu")
    torch.manual_seed(0)
    model = Net()
    made = (optimizer or torch.optim.AdamW)(model.parameters(), 0.01)
    several = strategy == "sharded" and comm.size > 1
    chosen: Any = Sharded(comm, ["first", "few"]) if several else strategy
    options.setdefault("callbacks", [])
    return lockstep.Trainer(
        model, made, nn.CrossEntropyLoss(), 6, run_dir=folder, strategy=chosen, **options
    )


def plain(state: dict[str, Any]) -> str:
    """All of a state, down to its bits."""
    torch.set_printoptions(profile="full", precision=17)
    try:
        parts = {part: state[part] for part in ("optimizer", "step", "loader", "history")}
        return repr({"model": dict(state["model"]), **parts})
    finally:
        torch.set_printoptions(profile="default")


def saved(folder: Path, epochs: int = 1, **options: Any) -> str:
    made = trainer(folder, **options)
    made.fit(data(), epochs)
    made.save()
    made.checkpoint_manager.wait()
    return plain(made.state_dict())


def resumed(folder: Path, strategy: str = "sharded", used: bool = False, **options: Any) -> str:
    made = trainer(None, strategy, **options)
    if used:  # it has tensors of its own in all places by then
        made.fit(data(), 1)
    made.resume(folder)
    return plain(made.state_dict())


class Odd(torch.optim.AdamW):
    """Its state has tensors of other shapes and formats than its parameters, and plain values."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for number, state in enumerate(self.state.values()):
            state["seen"], state["number"] = torch.arange(3, dtype=torch.float32) + number, number


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, Odd])
def test_the_state_comes_back_bit_for_bit_at_any_number_of_workers(
    pool: Pool, tmp_path: Path, optimizer: Any
) -> None:
    wanted, *_ = pool.run(saved, tmp_path, optimizer=optimizer, workers=3)
    for workers, strategy, used in (
        (4, "sharded", False),
        (2, "sharded", True),
        (2, "distributed", False),
    ):
        found = pool.run(resumed, tmp_path, strategy, used, optimizer=optimizer, workers=workers)
        assert set(found) == {wanted}, (workers, strategy)
    assert resumed(tmp_path, "distributed", used=True, optimizer=optimizer) == wanted


def test_a_full_checkpoint_is_loaded_in_parts(pool: Pool, tmp_path: Path) -> None:
    wanted = saved(tmp_path, strategy="distributed")
    assert set(pool.run(resumed, tmp_path, "sharded", workers=3)) == {wanted}


def test_every_worker_writes_its_own_part_and_nothing_is_a_pickle(
    pool: Pool, tmp_path: Path
) -> None:
    wanted, *_ = pool.run(saved, tmp_path, workers=2, backend="shm")
    assert set(pool.run(resumed, tmp_path, workers=3, backend="shm")) == {wanted}
    (path,) = (tmp_path / "checkpoints").iterdir()
    parts = ["part-00000.safetensors", "part-00001.safetensors"]
    assert names(path) == ["manifest.json", *parts, "parts.json", "state.json"]
    sizes = [(path / part).stat().st_size for part in parts]
    assert max(sizes) < 0.7 * sum(sizes)
    checkpoint_folder.verify(path)
    layout = json.loads((path / "parts.json").read_text())
    whole = checkpoint_folder.read(path).state["model"]
    assert {tuple(told["shape"]) for told in layout.values()} >= {
        tuple(value.shape) for value in whole.values()
    }
    assert torch.equal(whole["calls"], torch.tensor(4))


# --- damage
# --------------------------------------------------------------------------------------------------


def refused(folder: Path, which: str) -> str:
    made = trainer(folder)
    before = plain(made.state_dict())
    with pytest.raises(CheckpointError) as caught:
        made.resume(which)
    assert plain(made.state_dict()) == before
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["part-00001.safetensors", "parts.json", "state.json", "manifest.json"]
)
def test_damage_in_any_file_is_found_on_every_worker(pool: Pool, tmp_path: Path, name: str) -> None:
    pool.run(saved, tmp_path, workers=2)
    (path,) = (tmp_path / "checkpoints").iterdir()
    content = bytearray((path / name).read_bytes())
    content[-2] ^= 1
    (path / name).write_bytes(content)
    first, second = pool.run(refused, tmp_path, str(path), workers=2)
    assert first == second
    assert first.startswith(f"{path}: {name}: ")


def hashed(folder: Path) -> list[str]:
    """The files that one worker has read to compare their checksums."""
    seen: list[str] = []
    original = manifest._sha256_of

    def noting(path: Path) -> str:
        seen.append(path.name)
        return original(path)

    manifest._sha256_of = noting
    try:
        trainer(folder).resume("latest")
    finally:
        manifest._sha256_of = original
    return seen


@pytest.mark.parametrize("strategy", ["sharded", "distributed"])
def test_each_file_is_verified_once_on_a_host(pool: Pool, tmp_path: Path, strategy: str) -> None:
    pool.run(saved, tmp_path, strategy=strategy, workers=2)
    (path,) = (tmp_path / "checkpoints").iterdir()
    first, second = pool.run(hashed, tmp_path, workers=2)
    assert sorted(first + second) == [name for name in names(path) if name != "manifest.json"]


# --- saving that fails
# -----------------------------------------------------------------------------------------


def save_with(folder: Path, disturb: Callable[[], None], background: bool) -> str:
    made = trainer(folder, async_save=background)
    made.fit(data(), 2, resume="latest")
    if made.comm.rank == 1:
        disturb()
    try:
        with pytest.raises(CheckpointError) as caught:
            made.save()
            made.checkpoint_manager.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert made.checkpoint_manager.last_path == folder / "checkpoints/step-0000000004"
    return str(caught.value)


def no_large_file() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))


@pytest.mark.parametrize("background", [False, True])
def test_a_worker_that_cannot_write_its_part_fails_the_save_on_all(
    pool: Pool, tmp_path: Path, background: bool
) -> None:
    pool.run(saved, tmp_path, workers=2)
    before = snapshot(tmp_path / "checkpoints")
    first, second = pool.run(save_with, tmp_path, no_large_file, background, workers=2)
    assert first == second
    assert "step-0000000008: cannot be saved: File too large (rank 1); it needs" in first
    assert "Existing files are untouched." in first
    assert snapshot(tmp_path / "checkpoints") == before


def blind(folder: Path) -> str:
    made = trainer(folder)
    if made.comm.rank == 1:
        Path.is_dir = lambda path: False  # type: ignore[assignment, method-assign]  # as on a host without the folder
    with pytest.raises(CheckpointError) as caught:
        made.save()
    return str(caught.value)


def test_a_folder_that_not_all_workers_see_is_named(pool: Pool, tmp_path: Path) -> None:
    is_dir = Path.is_dir

    def looked(folder: Path) -> str:
        try:
            return blind(folder)
        finally:
            Path.is_dir = is_dir  # type: ignore[method-assign]

    first, second = pool.run(looked, tmp_path, workers=2)
    assert first == second
    assert "rank 1 does not see the folder that rank 0 created there" in first
    assert list((tmp_path / "checkpoints").iterdir()) == []


def killed(folder: Path) -> None:
    made = trainer(folder)
    made.fit(data(), 2, resume="latest")
    if made.comm.rank == 1:

        def die(path: Path, tensors: Any) -> Any:
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

        distributed_checkpoint._write_part = die
    made.save()


def test_a_worker_that_is_killed_while_it_writes_leaves_the_older_checkpoint(
    pool: Pool, tmp_path: Path
) -> None:
    wanted, *_ = pool.run(saved, tmp_path, workers=2)
    with pytest.raises(RanksFailedError, match=r"rank 1 \(first\): died: killed by signal 9"):
        pool.run(killed, tmp_path, workers=2)
    assert [
        path.name for path in checkpoint_folder.CheckpointStore(tmp_path / "checkpoints").paths()
    ] == ["step-0000000004"]
    assert resumed(tmp_path, "distributed") == wanted


# --- in the background
# -----------------------------------------------------------------------------------------


class Slow:
    """Lets files be written only when training has gone on."""

    def __init__(self) -> None:
        self.went_on = threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        assert self.went_on.wait(30), "the training waits for the files"
        return self.original(*arguments, **options)

    original: Any = None


class Saves(Callback):
    """Saves after the second step, and then lets the files be written after the third."""

    every_rank = True

    def __init__(self, slow: Slow) -> None:
        self.slow, self.state = slow, ""

    def on_train_step_end(self, trainer: lockstep.Trainer, result: Any) -> None:
        if trainer.step.steps_done == 2:
            self.state = plain(trainer.state_dict())
            trainer.save()
        elif trainer.step.steps_done == 3:
            assert trainer.checkpoint_manager.last is None
            self.slow.went_on.set()


def saved_beside(run_dir: Path, strategy: str) -> str:
    slow = Slow()
    places = [(checkpoint_folder, "write_tensors"), (distributed_checkpoint, "write_tensors")]
    Slow.original = staticmethod(checkpoint_folder.write_tensors)
    for module, name in places:
        setattr(module, name, slow)
    callback = Saves(slow)
    try:
        made = trainer(run_dir, strategy, async_save=True, callbacks=[callback])
        made.fit(data(), 1)
    finally:
        for module, name in places:
            setattr(module, name, Slow.original)
    assert made.checkpoint_manager.last is not None
    assert made.checkpoint_manager.last[0] == 2
    return callback.state


class Fails(Callback):
    """Saves after the second step, and fails after the third."""

    every_rank = True

    def on_train_step_end(self, trainer: lockstep.Trainer, result: Any) -> None:
        if trainer.step.steps_done == 2:
            trainer.save()
        elif trainer.step.steps_done == 3:
            raise ZeroDivisionError


def fails_beside(folder: Path) -> list[str]:
    def lost(path: Path, tensors: Any) -> Any:
        raise SystemError  # its thread ends without a word to the others

    said: list[str] = []
    made = trainer(folder, async_save=True, callbacks=[Fails()])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(distributed_checkpoint, "_GRACE", 0.3)
        patch.setattr(
            checkpoint_manager._log, "error", lambda line, *told: said.append(line % told)
        )
        if made.comm.rank == 1:
            patch.setattr(distributed_checkpoint, "_write_part", lost)
        made.fit(data(), 1)
    return said


def test_a_run_that_fails_does_not_wait_for_parts_that_never_come(
    pool: Pool, tmp_path: Path
) -> None:
    (first,), _ = pool.run(fails_beside, tmp_path, workers=2)
    assert first.startswith("the checkpoint of step 2 was not saved: ")
    assert first.endswith("the run ended before all workers had written their parts (rank 0)")
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("ledger.")] == []


@pytest.mark.parametrize("strategy", ["sharded", "distributed"])
def test_in_the_background_the_state_is_that_of_the_moment_of_saving(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    wanted, *_ = pool.run(saved_beside, tmp_path, strategy, workers=2)
    assert set(pool.run(resumed, tmp_path, strategy, workers=2)) == {wanted}
    assert names(tmp_path / "checkpoints") == ["step-0000000002"]
