"""What is saved as a checkpoint or as weights comes back, and the newest are kept."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from lockstep.checkpoint.folder import CheckpointStore, load_weights, read, save_weights, verify
from lockstep.errors import CheckpointError, ConfigError
from lockstep.system import atomic_files
from support.checkpoints import FILES, holds, names, save, snapshot, state


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


# What is saved comes back


def test_a_checkpoint_comes_back_as_it_was_saved(store: CheckpointStore) -> None:
    path = save(store, 123)
    assert path == store.folder / "step-0000000123"
    assert names(path) == FILES
    assert holds(path, 123)
    verify(path)
    assert names(store.folder) == ["step-0000000123"]


def test_the_test_can_tell_two_states_apart(store: CheckpointStore) -> None:
    path = store.save(state(2), step=3, epoch=1, info={"loss": float("nan"), "pair": (1, 3)})
    assert not holds(path, 3)


def test_the_model_can_be_loaded_without_lockstep(store: CheckpointStore) -> None:
    model = nn.Linear(2, 3)
    path = store.save({"model": model.state_dict()}, step=0, epoch=0, info={})
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    nn.Linear(2, 3).load_state_dict(tensors)
    assert torch.equal(tensors["weight"], model.weight)


@pytest.mark.parametrize(
    "model",
    [
        {},
        None,
        {"deep": {"weight": torch.ones(2)}},
        {"weight": torch.ones(2), "number": 1},
        {"weight": torch.ones(2, dtype=torch.complex128)},
        {"__metadata__": torch.ones(2)},
        {"a\ud800": torch.ones(2)},
        {"$tensor": torch.ones(2)},
        {0: torch.ones(2)},
    ],
    ids=lambda model: repr(model)[:30].encode("ascii", "backslashreplace").decode(),
)
def test_a_model_of_another_form_is_kept_with_the_rest(store: CheckpointStore, model: Any) -> None:
    path = store.save({"model": model}, step=0, epoch=0, info={})
    assert names(path) == ["manifest.json", "state.json", "state.safetensors"]
    assert repr(read(path).state) == repr({"model": model})


def test_a_state_without_tensors_comes_back(store: CheckpointStore) -> None:
    path = store.save({}, step=0, epoch=0, info={})
    assert read(path).state == {}


def test_the_same_state_gives_the_same_bytes(store: CheckpointStore, tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other")
    assert snapshot(save(store, 1)) == snapshot(save(other, 1))


@pytest.mark.parametrize("copy", [True, False])
def test_what_is_prepared_is_written_later_and_does_not_follow_if_it_is_copied(
    store: CheckpointStore, copy: bool
) -> None:
    model = {"w": torch.ones(3)}
    write = store.prepare({"model": model, "rest": model["w"]}, step=7, epoch=2, info={}, copy=copy)
    assert not store.folder.exists()
    model["w"].fill_(5)
    found = read(write())
    assert (found.step, found.epoch) == (7, 2)
    assert torch.equal(found.state["model"]["w"], torch.full((3,), 1.0 if copy else 5.0))
    assert torch.equal(found.state["rest"], found.state["model"]["w"])


# The folder of checkpoints


def test_the_newest_are_kept(store: CheckpointStore) -> None:
    for step in (8, 9, 10, 11, 1000):
        save(store, step)
    assert [path.name for path in store.paths()] == [
        "step-0000000010",
        "step-0000000011",
        "step-0000001000",
    ]
    assert store.latest() == store.folder / "step-0000001000"
    assert names(store.folder) == [path.name for path in store.paths()]


def test_steps_are_ordered_as_numbers(store: CheckpointStore) -> None:
    for step in (10**10, 10**10 - 1, 2 * 10**10):
        save(store, step)
    assert [int(path.name.removeprefix("step-")) for path in store.paths()] == [
        10**10 - 1,
        10**10,
        2 * 10**10,
    ]


def test_a_step_that_is_saved_again_is_replaced(store: CheckpointStore) -> None:
    save(store, 1)
    path = save(store, 1, size=8)
    assert holds(path, 1, size=8)
    assert names(store.folder) == [path.name]


def test_what_was_just_saved_is_kept_though_newer_ones_are_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (300, 400, 100, 110):
        path = save(store, step)
        assert holds(path, step)
    assert names(tmp_path) == ["step-0000000110", "step-0000000300", "step-0000000400"]


def test_other_things_in_the_folder_are_left_alone(store: CheckpointStore) -> None:
    others = ["step-1", "step-00000000012", "best", ".tmp-mine", "step-0000000001.bak"]
    for name in others:
        (store.folder / name).mkdir(parents=True)
    (store.folder / "step-0000000000").write_text("a file")
    for step in range(1, 5):
        save(store, step)
    assert [path.name for path in store.paths()] == [f"step-000000000{step}" for step in (2, 3, 4)]
    assert set(others) | {"step-0000000000"} < set(names(store.folder))


def test_a_store_without_checkpoints_has_none(store: CheckpointStore, tmp_path: Path) -> None:
    assert (store.paths(), store.latest(), store.newest_good()) == ([], None, None)
    assert not store.folder.exists()
    (tmp_path / "file").write_text("")
    assert CheckpointStore(tmp_path / "file").paths() == []


def test_the_newest_good_one_is_found_behind_damaged_ones(store: CheckpointStore) -> None:
    first, second, third = (save(store, step) for step in (1, 2, 3))
    (third / "state.json").unlink()
    (second / "manifest.json").write_bytes(b"")
    assert store.latest() == third
    assert store.newest_good() == first
    assert store.newest_good(before=second) == first
    assert store.newest_good(before=store.folder / "step-0000000001") is None
    with pytest.raises(ConfigError, match="before: expected a folder named step-"):
        store.newest_good(before=store.folder / "best")


def test_an_old_one_that_cannot_be_removed_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    monkeypatch.setattr(atomic_files, "remove", remove)
    with pytest.warns(
        UserWarning, match=r"step-0000000001: cannot remove this old checkpoint: Permission denied"
    ):
        path = save(store, 2)
    assert holds(path, 2)


# Arguments that cannot be used


@pytest.mark.parametrize("keep", [0, -1])
def test_at_least_one_is_kept(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ConfigError, match="keep: expected a whole number of at least 1, got"):
        CheckpointStore(tmp_path, keep=keep)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": -1}, "step: expected a whole number of at least 0, got -1"),
        ({"step": 1.0}, "step: expected a whole number of at least 0, got 1.0"),
        ({"epoch": True}, "epoch: expected a whole number of at least 0, got True"),
        (
            {"info": {"when": ...}},
            r"info\.when: expected .* got an object of type builtins\.ellipsis",
        ),
        ({"info": {"w": torch.ones(1)}}, "info: expected plain values only"),
        (
            {"state": {"model": {"w": {1, 2}}}},
            r"model\.w: expected .* got an object of type builtins\.set",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(
    store: CheckpointStore, change: dict[str, Any], words: str
) -> None:
    arguments: dict[str, Any] = {"state": {}, "step": 1, "epoch": 0, "info": {}, **change}
    with pytest.raises(ConfigError, match=words):
        store.save(**arguments)
    assert not store.folder.exists()


# Weights alone


def test_weights_are_saved_under_plain_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(torch.bfloat16)
    path = tmp_path / "model.safetensors"
    save_weights(nn.DataParallel(torch.compile(model, backend="eager")).state_dict(), path)
    for tensors in (safetensors.torch.load_file(path), load_weights(path)):
        assert repr(dict(sorted(tensors.items()))) == repr(dict(sorted(model.state_dict().items())))
    assert names(tmp_path) == ["model.safetensors"]


def test_weights_that_share_memory_are_saved(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    save_weights(
        {"a": base, "b": base, "c": base.T, "d": torch.ones(2, dtype=torch.complex64)},
        tmp_path / "w",
    )
    found = load_weights(tmp_path / "w")
    assert torch.equal(found["b"], base)
    assert torch.equal(found["c"], base.T)
    assert torch.equal(found["d"], torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    "value", [1.0, torch.ones(2, dtype=torch.complex128), torch.ones(2, device="meta")], ids=str
)
def test_weights_that_cannot_be_stored_leave_the_old_file(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(ConfigError):
        save_weights({"a": value}, path)
    assert snapshot(tmp_path) == {"model.safetensors": b"old"}


@pytest.mark.parametrize("part", ["nowhere/model.safetensors", "folder"])
def test_weights_that_cannot_be_written_are_named(tmp_path: Path, part: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError) as caught:
        save_weights({"a": torch.ones(1)}, tmp_path / part)
    assert str(caught.value).startswith(f"{tmp_path / part}: cannot be saved: ")
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize(
    "data",
    [None, b"", b"text", pickle.dumps([1]), safetensors.torch.save({"a": torch.ones(9)})[:-1]],
    ids=str,
)
def test_weights_that_cannot_be_read_are_named(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "model.safetensors"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load_weights(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert ("No such file" if data is None else "expected a safetensors file") in str(caught.value)
