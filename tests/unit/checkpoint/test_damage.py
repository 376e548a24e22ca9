"""No checkpoint that is not as it was written is ever read, and none does harm."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.folder import CheckpointStore, load_weights, read, verify
from lockstep.errors import CheckpointError
from support.checkpoints import FILES, changed, forge, holds, in_parts, plant, save, snapshot


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


# Damage


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests may change, if they change it back."""
    return save(CheckpointStore(tmp_path_factory.mktemp("good")), 1)


def assert_refused(path: Path, *words: str) -> None:
    for attempt in (read, verify):
        with pytest.raises(CheckpointError) as caught:
            attempt(path)
        assert str(caught.value).startswith(f"{path}: ")
        for word in words:
            assert word in str(caught.value)


def test_no_byte_of_a_manifest_can_change_unnoticed(good: Path) -> None:
    data = (good / "manifest.json").read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= (0x01, 0x20, 0x80)[position % 3]
        with changed(good / "manifest.json", bytes(flipped)), pytest.raises(CheckpointError):
            read(good)
    assert holds(good, 1)


@given(st.sampled_from(FILES), st.integers(0, 10**6), st.integers(1, 255))
@settings(deadline=None, max_examples=300)
def test_no_byte_of_any_file_can_change_unnoticed(
    good: Path, name: str, position: int, change: int
) -> None:
    data = bytearray((good / name).read_bytes())
    data[position % len(data)] ^= change
    with changed(good / name, bytes(data)):
        assert_refused(good, name)


@given(st.sampled_from(FILES), st.integers(0, 10**6))
@settings(deadline=None, max_examples=100)
def test_no_file_can_be_cut_off_unnoticed(good: Path, name: str, length: int) -> None:
    data = (good / name).read_bytes()
    with changed(good / name, data[: length % len(data)]):
        assert_refused(good, name)


@given(st.sampled_from(FILES), st.binary(min_size=1, max_size=10))
@settings(deadline=None, max_examples=50)
def test_nothing_can_be_added_to_a_file_unnoticed(good: Path, name: str, data: bytes) -> None:
    with changed(good / name, (good / name).read_bytes() + data):
        assert_refused(good, name)


def test_an_undamaged_checkpoint_is_not_refused(good: Path) -> None:
    (good / "notes.txt").write_text("of the user's own")
    assert holds(good, 1)
    verify(good)


def test_an_error_of_damage_names_file_expected_and_found(store: CheckpointStore) -> None:
    path = save(store, 1)
    data = (path / "state.json").read_bytes()
    (path / "state.json").write_bytes(data[:-1])
    assert_refused(path, f"state.json: expected {len(data)} bytes, got {len(data) - 1}")
    (path / "state.json").write_bytes(data[:-1] + b"]")
    assert_refused(
        path,
        f"state.json: expected content with sha256 {hashlib.sha256(data).hexdigest()}",
        f"got content with sha256 {hashlib.sha256(data[:-1] + b']').hexdigest()}",
    )


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_no_plain_file_is_refused(
    store: CheckpointStore, name: str
) -> None:
    path = save(store, 1)
    (path / name).rename(path / "elsewhere")
    assert_refused(path, f"{name}: expected a plain file, got nothing of that name")
    (path / name).symlink_to("elsewhere")
    assert_refused(path, f"{name}: expected a plain file, got a symbolic link")
    (path / name).unlink()
    os.mkfifo(path / name)
    assert_refused(path, f"{name}: expected a plain file, got something else")
    (path / name).unlink()
    (path / name).mkdir()
    assert_refused(path, f"{name}: expected a plain file, got a folder")


def test_files_of_two_checkpoints_do_not_mix(store: CheckpointStore) -> None:
    first, second = save(store, 1), save(store, 2)
    for name in FILES:
        before = (second / name).read_bytes()
        with changed(second / name, (first / name).read_bytes()):
            assert before != (second / name).read_bytes()
            assert_refused(second)
    first.rename(store.folder / "step-0000000007")
    assert_refused(
        store.folder / "step-0000000007",
        "manifest.json: expected the step in the folder's name, got 1",
    )


def test_a_checkpoint_may_be_copied_under_a_name_of_ones_own(
    store: CheckpointStore, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(save(store, 1), tmp_path / "best"))
    assert holds(path, 1)


def test_the_newest_good_one_is_offered(store: CheckpointStore) -> None:
    first, second, third = (save(store, step) for step in (1, 2, 3))
    (third / "model.safetensors").unlink()
    (first / "model.safetensors").unlink()
    assert_refused(third, f"The newest undamaged one is {second}.")
    assert_refused(first, f"The newest undamaged one is {second}.")
    assert_refused(
        store.folder / "step-0000000009",
        "got nothing of that name",
        f"The newest undamaged one is {second}.",
    )
    assert_refused(store.folder, f"The newest undamaged one is {second}.")
    (second / "model.safetensors").unlink()
    assert_refused(second, "There is no undamaged one beside it")
    assert_refused(third / "state.json", "expected a folder with a checkpoint, got a file")


def test_a_checkpoint_that_makes_no_sense_does_not_offer_itself(store: CheckpointStore) -> None:
    path = save(store, 1)
    plant(path, "state.json", b"[]")
    with pytest.raises(CheckpointError, match="There is no undamaged one beside it"):
        read(path)


# Harm


def test_the_test_can_forge_a_manifest(store: CheckpointStore) -> None:
    path = save(store, 1)
    before = snapshot(path)
    forge(path)
    plant(path, "state.json", (path / "state.json").read_bytes())
    assert snapshot(path) == before
    forge(path, epoch=7)
    assert read(path).epoch == 7


def test_another_version_is_refused_with_the_one_that_is_read(store: CheckpointStore) -> None:
    path = save(store, 1)
    for version in (1, 3):
        forge(path, version=version, files="quite different")
        assert_refused(
            path,
            "manifest.json: expected version 2",
            f"got {version}: use the Lockstep that wrote it",
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "another program"},
        {"step": 2},
        {"step": -1},
        {"step": True},
        {"step": "1"},
        {"step": None},
        {"epoch": 0.5},
        {"files": {}},
        {"files": []},
        {"files": {"state.json": {"size": 2, "sha256": ""}}},
        {"info": {"$tensor": "0"}},
        {"info": {"$object": "os.system"}},
        {"info": [[[[[]]]]] * 2 and json.loads("[" * 80 + "]" * 80)},
        {"info": {"a": {"$float": "1"}}},
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_a_manifest_that_makes_no_sense_is_refused(
    store: CheckpointStore, changes: dict[str, Any]
) -> None:
    path = save(store, 1)
    forge(path, **changes)
    assert_refused(path, "manifest.json: ")


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/hostname", "weights.pt", "manifest.json", "", "."]
)
def test_a_manifest_cannot_name_other_files(store: CheckpointStore, name: str) -> None:
    path = save(store, 1)
    (store.folder / "outside").write_bytes(b"secret")
    content = json.loads((path / "manifest.json").read_bytes())["content"]
    forge(
        path,
        files={
            **content["files"],
            name: {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()},
        },
    )
    assert_refused(path, "manifest.json: expected the files state.json, state.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {"size": 1},
        {"size": -1, "sha256": ""},
        {"size": "1", "sha256": ""},
        {"size": 1, "sha256": 5},
    ],
    ids=str,
)
def test_a_manifest_must_have_size_and_checksum(store: CheckpointStore, entry: Any) -> None:
    path = save(store, 1)
    content = json.loads((path / "manifest.json").read_bytes())["content"]
    forge(path, files={**content["files"], "state.json": entry})
    assert_refused(path, "manifest.json: expected a size and a sha256 for each file")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"content": []}',
        b'{"content": {}}',
        b"[" * 100_000,
        b'{"content": {"format": "lockstep checkpoint", "version": 2, "step": 1e999}}',
        b'{"content": {"format": "lockstep checkpoint", "version": 2, "step": NaN}}',
        *(
            b'{"content": {"format": "lockstep checkpoint", "version": 2, "step": %b%b}}'
            % (b"[" * deep, b"]" * deep)
            for deep in (100, 900, 1200, 5000)
        ),
        b'{"content": {"format": "lockstep checkpoint", "version": 2, "step": '
        + b"9" * 5000
        + b"}}",
        b"\xff\xfe\x00",
        pickle.dumps({"content": {}}),
    ],
    ids=lambda data: repr(data[:40]) + str(len(data)),
)
def test_what_is_no_manifest_is_refused(store: CheckpointStore, data: bytes) -> None:
    path = save(store, 1)
    (path / "manifest.json").write_bytes(data)
    assert_refused(path, "manifest.json: ")


PART = "part-00000.safetensors"
PIECES = [[PART, "0.0", [0], [2]], ["part-00001.safetensors", "0.1", [2], [2]]]


def test_parts_are_read_as_they_are_described(store: CheckpointStore) -> None:
    path = in_parts(save(store, 1))
    verify(path)
    assert holds(path, 1)


@pytest.mark.parametrize(
    "told",
    [
        {"pieces": PIECES[:1]},
        {"pieces": PIECES[1:]},
        {"pieces": [*PIECES, PIECES[1]]},
        {"pieces": [PIECES[0], PIECES[0]]},
        {"pieces": [[PART, "0.0", [0], [4]]]},
        {"pieces": [[PART, "0.0", [-2], [2]], PIECES[1]]},
        {"pieces": [[PART, "0.0", [0, 0], [2, 1]], PIECES[1]]},
        {"pieces": [[PART, "0.0", [0], [2.0]], PIECES[1]]},
        {"pieces": [[PART, "none", [0], [2]], PIECES[1]]},
        {"pieces": [["../outside", "0.0", [0], [2]], PIECES[1]]},
        {"pieces": [["state.json", "0.0", [0], [2]], PIECES[1]]},
        {"pieces": [[["a"], "0.0", [0], [2]], PIECES[1]]},
        {"pieces": [[PART]]},
        {"pieces": 5},
        {"shape": [2, 2]},
        {"shape": [2**62, 2**62]},
        {"shape": "4"},
        {"dtype": "Q7"},
        {"dtype": None},
        None,
    ],
    ids=str,
)
def test_parts_with_the_right_checksum_must_make_sense(store: CheckpointStore, told: Any) -> None:
    path = in_parts(save(store, 1))
    layout = json.loads((path / "parts.json").read_bytes())
    layout["0"] = told and {**layout["0"], **told}
    plant(path, "parts.json", json.dumps(layout).encode())
    verify(path)
    with pytest.raises(
        CheckpointError,
        match=r"(parts\.json|part-00000\.safetensors): (its content|cannot be read)",
    ):
        read(path)


def test_a_part_of_another_format_is_not_mistaken_for_it(store: CheckpointStore) -> None:
    path = in_parts(save(store, 1))
    part = safetensors.torch.load_file(path / PART)
    plant(path, PART, safetensors.torch.save({**part, "0.0": part["0.0"].double()}))
    with pytest.raises(CheckpointError, match=f"{PART}: its content is invalid"):
        read(path)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickles_are_never_loaded(store: CheckpointStore, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    kinds = {
        save(store, 1): FILES[1:],
        in_parts(save(store, 2)): ["state.json", "parts.json", PART],
    }
    for path, name in [(path, name) for path, files in kinds.items() for name in files]:
        before = (path / "manifest.json").read_bytes()
        with changed(path / name, bomb):
            plant(path, name, bomb)
            with pytest.raises(CheckpointError, match=f"{name}: its content is invalid"):
                read(path)
        (path / "manifest.json").write_bytes(before)
    (tmp_path / "weights").write_bytes(bomb)
    with pytest.raises(CheckpointError):
        load_weights(tmp_path / "weights")
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb)
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("state.json", b"null"),
        ("state.json", b"{}"),
        ("state.json", b"[[1, 2]]"),
        ("state.json", b'{"a": {"$tensor": "0"}}'),
        ("state.json", b'{"a": {"$tensor": "2"}}'),
        ("state.json", b'{"a": {"$object": "os.system"}}'),
        ("state.json", b"[" * 100_000 + b"]" * 100_000),
        ("state.json", b'{"model": ["b.weight"], "a": {"$tensor": "2"}}'),
        ("state.json", b'{"model": ["b.weight", "c"], "a": {"$tensor": "2"}}'),
        ("state.json", b'{"model": [[], {}], "a": {"$tensor": "2"}}'),
        ("state.json", b'{"model": 5, "a": {"$tensor": "2"}}'),
        ("state.safetensors", b""),
        ("state.safetensors", b"\xff" * 100),
        ("state.safetensors", safetensors.torch.save({})),
        ("state.safetensors", safetensors.torch.save({"9": torch.ones(1)})),
        ("model.safetensors", safetensors.torch.save({"other": torch.ones(1)})),
        (
            "model.safetensors",
            (61).to_bytes(8, "little")
            + b'{"a":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]}}   x',
        ),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_content_with_the_right_checksum_must_make_sense(
    store: CheckpointStore, name: str, data: bytes
) -> None:
    path = save(store, 1)
    plant(path, name, data)
    verify(path)
    with pytest.raises(CheckpointError, match=r"state\.json: its content|safetensors: its content"):
        read(path)
