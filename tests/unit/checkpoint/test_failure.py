"""A save that fails or is killed leaves what was there before, and nothing half-written."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import folder
from lockstep.checkpoint.folder import CheckpointStore, load_weights, read, save_weights, verify
from lockstep.errors import CheckpointError
from lockstep.system import atomic_files
from support.checkpoints import FILES, holds, names, save, snapshot

NOBODY = 65534


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


# Saving that fails


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's right to write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "lockstep-test", str(path)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a file system is not permitted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user may look into, which a pytest folder is not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


def assert_only_good(store: CheckpointStore, steps: list[int]) -> None:
    assert names(store.folder) == [f"step-{step:010d}" for step in steps]
    assert all(holds(path, step) for path, step in zip(store.paths(), steps, strict=True))


def test_a_full_disk_leaves_the_older_checkpoints_good(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk / "run" / "checkpoints")
    save(store, 1)
    save(store, 2)
    with pytest.raises(CheckpointError) as caught:
        save(store, 3, size=300_000)
    assert_only_good(store, [1, 2])
    message = str(caught.value)
    assert message.startswith(
        f"{store.folder / 'step-0000000003'}: cannot be saved: No space left on device"
    )
    assert "; it needs 1,80" in message
    assert " bytes, with " in message
    assert "Free some space" in message
    assert caught.value.exit_code == 74  # not that of bad input
    save(store, 4)
    assert_only_good(store, [1, 2, 4])


@pytest.mark.parametrize("again", [False, True], ids=["another step", "the same step"])
def test_a_disk_that_is_full_at_any_point_of_a_save_leaves_it_whole_or_undone(
    tiny_disk: Path, again: bool
) -> None:
    outcomes = set()
    for free in range(0, 80, 4):  # KiB; one page more each time
        store = CheckpointStore(tiny_disk / f"{free}")
        save(store, 1, size=4000)
        (tiny_disk / "filler").write_bytes(bytes(shutil.disk_usage(tiny_disk).free - free * 1024))
        try:
            save(store, 1 if again else 2, size=5000)
            sizes = {1: 5000} if again else {1: 4000, 2: 5000}
        except CheckpointError:
            sizes = {1: 4000}
        assert names(store.folder) == [f"step-{step:010d}" for step in sizes]
        assert all(
            holds(path, step, sizes[step]) for path, step in zip(store.paths(), sizes, strict=True)
        )
        outcomes.add(str(sizes))
        shutil.rmtree(store.folder)
        (tiny_disk / "filler").unlink()
    assert len(outcomes) == 2


def test_a_file_size_limit_leaves_the_older_checkpoints_good(store: CheckpointStore) -> None:
    save(store, 1)
    for step in (1, 2):
        with (
            file_size_limit(4096),
            pytest.raises(CheckpointError, match=r"File too large; .* Free some space"),
        ):
            save(store, step, size=5000)
    assert_only_good(store, [1])


def test_a_full_disk_leaves_the_older_weights_good(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_weights({"a": torch.ones(3)}, path)
    with (
        file_size_limit(4096),
        pytest.raises(CheckpointError, match=r"File too large; it needs 20,\d\d\d bytes"),
    ):
        save_weights({"a": torch.ones(5000)}, path)
    assert names(tmp_path) == ["model.safetensors"]
    assert torch.equal(load_weights(path)["a"], torch.ones(3))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("fail_at", range(1, len(FILES) + 2))
def test_any_flush_that_fails_leaves_the_older_checkpoints_good(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, step: int, fail_at: int
) -> None:
    def fsync(descriptor: int) -> None:
        if next(calls) == fail_at:
            raise OSError(5, "Input/output error")

    save(store, 1)
    calls = itertools.count(1)
    with (
        monkeypatch.context() as patch,
        pytest.raises(CheckpointError, match=r"Input/output error; .* another file"),
    ):
        patch.setattr(os, "fsync", fsync)
        save(store, step, size=8)
    assert_only_good(store, [1])


def test_an_interrupt_leaves_the_older_checkpoints_good(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path, data: bytes) -> int:
        assert list(path.parent.glob("*.safetensors"))
        raise KeyboardInterrupt

    save(store, 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folder, "write_bytes", interrupt)
        save(store, 2)
    assert_only_good(store, [1])


def test_a_folder_that_may_not_be_written_to_is_named(public_folder: Path) -> None:
    store = CheckpointStore(public_folder / "checkpoints")
    save(store, 1)
    store.folder.chmod(0o555)
    for other in (store, CheckpointStore(store.folder / "deeper")):
        with as_nobody(), pytest.raises(CheckpointError) as caught:
            save(other, 2)
        assert str(caught.value).startswith(
            f"{other.folder}/step-0000000002: cannot be saved: Permission denied"
        )
        assert "Choose a folder that this user may write to" in str(caught.value)
    store.folder.chmod(0o755)
    assert_only_good(store, [1])


def test_a_folder_that_may_not_be_looked_into_is_named(public_folder: Path) -> None:
    path = save(CheckpointStore(public_folder / "checkpoints"), 1)
    public_folder.chmod(0o000)
    attempts: list[Callable[[], object]] = [
        lambda: read(path),
        lambda: verify(path),
        lambda: load_weights(path / "x"),
    ]
    for attempt in (
        *attempts,
        CheckpointStore(public_folder).paths,
        CheckpointStore(path.parent).newest_good,
    ):
        with as_nobody(), pytest.raises(CheckpointError, match="Permission denied"):
            attempt()


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/step-0000000001"])
def test_a_file_in_the_way_is_left_there(tmp_path: Path, part: str) -> None:
    in_the_way = tmp_path / part
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"cannot be saved: .* Remove the file that blocks this path"
    ):
        save(CheckpointStore(tmp_path / "checkpoints"), 1)
    assert snapshot(tmp_path) == {part: b"mine"}


# Killed in the middle


def reported(case: Path) -> list[int]:
    return [int(line) for line in (case / "finished").read_text().split()]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """What is left of a save that was killed, one folder for each call at which it can be
    killed.
    """
    folder = tmp_path_factory.mktemp("killed")
    result = subprocess.run(
        [sys.executable, "-m", "support.checkpoint_killer", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return lambda scenario: sorted((folder / scenario).iterdir())


def test_a_kill_at_any_point_of_a_run_loses_nothing(killed: Callable[[str], list[Path]]) -> None:
    cases = killed("following")
    unfinished = 0
    for case in cases:
        store, steps = CheckpointStore(case / "checkpoints", keep=1), reported(case)
        newest = store.newest_good()
        if steps:
            assert newest is not None
            assert read(newest).step >= steps[-1]
        assert all(holds(path, read(path).step) for path in store.paths())
        unfinished += store.folder.exists() and any(
            name.startswith(".") for name in names(store.folder)
        )
        save(store, 9)
        assert names(store.folder) == [path.name for path in store.paths()]
    assert unfinished > 20
    assert {step for case in cases for step in reported(case)} == {1, 2}


@pytest.mark.parametrize("look", ["newest_good", "read"])
def test_a_kill_at_any_point_of_replacing_a_checkpoint_loses_nothing(
    killed: Callable[[str], list[Path]], tmp_path: Path, look: str
) -> None:
    sizes = []
    for case in killed("replacing"):
        store = CheckpointStore(Path(shutil.copytree(case, tmp_path / case.name)) / "checkpoints")
        path = store.folder / "step-0000000001"
        if look == "newest_good":
            assert store.newest_good() == path
        sizes.append(read(path).state["model"]["b.weight"].numel())
        assert holds(path, 1, size=sizes[-1])
        assert sizes[-1] == 8 or not reported(case)
        save(store, 2)
        assert names(store.folder) == ["step-0000000001", "step-0000000002"]
    assert sizes == sorted(sizes)
    assert set(sizes) == {4, 8}


def test_a_kill_at_any_point_of_replacing_weights_loses_nothing(
    killed: Callable[[str], list[Path]],
) -> None:
    sizes = []
    for case in killed("weights"):
        sizes.append(load_weights(case / "model.safetensors")["a"].numel())
        assert sizes[-1] == 8 or not reported(case)
        atomic_files.remove_abandoned(case)
        assert names(case) == ["finished", "model.safetensors"]
    assert sizes == sorted(sizes)
    assert set(sizes) == {4, 8}
