"""Checkpoints: the state of a run in a folder that is whole, checked, and independent of devices and workers."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from . import atomic, manifest
from .errors import CheckpointError, ConfigError
from .fingerprints import plain_names
from .manifest import MANIFEST, MODEL, TENSORS, TREE
from .packing import (
    Json,
    Tree,
    from_json,
    from_safetensors,
    is_storable_name,
    pack,
    portable,
    to_json,
    to_safetensors,
    unpack,
)

__all__ = ["Checkpoint", "CheckpointStore", "load_weights", "read", "save_weights", "verify"]

_NAME = re.compile(r"step-(\d{10}|[1-9]\d{10,17})")
_FULL = "Free some space or raise the quota"
_NO_RIGHT = "Choose a folder that this user may write to"
_IN_THE_WAY = "Remove what is in the way, or choose another folder"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NO_RIGHT),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), _IN_THE_WAY),
    errno.ENOENT: "Make the folder first",
}


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        path: the folder that it was read from.
        step: optimizer steps done when it was made.
        epoch: the epoch in which it was made.
        info: plain values about the run.
        state: the state by part (``"model"``, ``"optimizer"``, …), each a tree of plain values and CPU tensors.
    """

    path: Path
    step: int
    epoch: int
    info: dict[str, Any]
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run, each a folder ``step-0000000123`` in one folder.

    Only one process of a run may call `save`; any may read.

    Args:
        folder: where they are; made by the first `save`.
        keep: how many of them stay after a save.

    Raises:
        ConfigError: `keep` is less than 1.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError("keep", "a whole number of at least 1", keep)
        self.folder, self.keep = Path(folder), keep

    def save(self, state: Mapping[str, Tree], *, step: int, epoch: int, info: Mapping[str, Any]) -> Path:
        """Write one checkpoint; then remove all but the newest `keep`, of which this one is always one.

        Another checkpoint of the same step is replaced. The folder appears under its name when all of it has been
        flushed to the device. Where `state["model"]` is a flat dict of tensors, it becomes a ``model.safetensors`` that
        any program can load.

        Raises:
            CheckpointError: it could not be written; what was there before is untouched, and nothing is left over.
            ConfigError: `state` or `info` holds something that cannot be stored; names its place.
        """
        files = _encode(state)
        files[MANIFEST] = manifest.render(files, step=step, epoch=epoch, info=info)
        path = self.folder / f"step-{step:010d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic.sweep(self.folder)
            with atomic.folder(path) as temporary:
                for name, data in files.items():
                    (temporary / name).write_bytes(data)
        except OSError as error:
            raise _not_saved(path, sum(map(len, files.values())), error) from error
        self._prune(path)
        return path

    def paths(self) -> list[Path]:
        """All checkpoints, good or damaged, oldest first by step; unfinished ones do not count.

        Raises:
            CheckpointError: the folder may not be read.
        """
        atomic.restore(self.folder)
        try:
            found = [entry for entry in self.folder.iterdir() if _step(entry) >= 0 and entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot look for checkpoints: {error.strerror}") from error
        return sorted(found, key=_step)

    def latest(self) -> Path | None:
        """The newest checkpoint by step, good or damaged; None where there is none."""
        return max(self.paths(), key=_step, default=None)

    def newest_good(self, before: Path | None = None) -> Path | None:
        """The newest checkpoint whose every file is as it was written; with `before`, the newest older than that."""
        if before is None:
            return _newest_good(self.paths())
        limit = _step(Path(before))
        if limit < 0:
            raise ConfigError("before", "a folder named step- and ten digits", got=str(before))
        return _newest_good(path for path in self.paths() if _step(path) < limit)

    def _prune(self, saved: Path) -> None:
        for path in self.paths()[: -self.keep]:
            if path == saved:
                continue
            try:
                atomic.remove(path)
            except OSError as error:
                # The save itself has succeeded; a run must not end because an old checkpoint stays.
                warnings.warn(f"{path}: cannot remove this old checkpoint: {error.strerror}", stacklevel=3)


def read(path: Path) -> Checkpoint:
    """Read a checkpoint into CPU tensors, after checking size and SHA-256 of every file.

    Raises:
        CheckpointError: it is missing, damaged, half-written, of another version, or no checkpoint; says which file,
            what was expected and what came, and which is the newest good one beside it.
    """
    path = Path(path)
    with _offering_another(path):
        content = _manifest(path)
        state = _decode(path, content["files"])
        return Checkpoint(path, content["step"], content["epoch"], content["info"], state)


def verify(path: Path) -> None:
    """Check size and SHA-256 of every file of a checkpoint.

    Raises:
        CheckpointError: as `read`.
    """
    path = Path(path)
    with _offering_another(path):
        _check(path)


def save_weights(state_dict: Mapping[str, Tensor], path: Path) -> None:
    """Write a model's tensors, from any device, as one safetensors file under their plain names (see `plain_names`).

    Raises:
        CheckpointError: it could not be written; an older file of that name is untouched.
        ConfigError: an entry is no plain dense tensor, or of a type that safetensors does not store.
    """
    path = Path(path)
    tensors = {name: portable(tensor, name) for name, tensor in plain_names(state_dict).items()}
    data = to_safetensors("state_dict", tensors)
    try:
        atomic.write_bytes(path, data)
    except OSError as error:
        raise _not_saved(path, len(data), error) from error


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        CheckpointError: the file cannot be read or is no safetensors file.
    """
    path = Path(path)
    try:
        return from_safetensors(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the weights: {error.strerror}") from error
    except ValueError as error:
        advice = "Give the model.safetensors of a run or of a checkpoint"
        raise CheckpointError(f"{path}: expected a safetensors file, got another ({error}). {advice}.") from error


def _encode(state: Mapping[str, Tree]) -> dict[str, bytes]:
    """The content of every file but the manifest."""
    value, tensors = pack(dict(state))
    files: dict[str, bytes] = {}
    if keys := _flat_model(value):
        files[MODEL] = to_safetensors("state", {name: tensors.pop(key) for name, key in keys.items()})
        value["model"] = list(keys)  # safetensors sorts by name; this keeps the order
    return {**files, TREE: to_json("state", value), TENSORS: to_safetensors("state", tensors)}


def _flat_model(value: Json) -> dict[str, str]:
    """Name → key among the packed tensors, if the packed state has a model that safetensors can hold as it is."""
    model = value.get("model")
    if not isinstance(model, dict) or not all(map(is_storable_name, model)):
        return {}
    if not all(isinstance(node, dict) and set(node) == {"$tensor"} for node in model.values()):
        return {}
    return {name: node["$tensor"] for name, node in model.items()}


def _decode(path: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    def tensors(name: str) -> dict[str, Tensor]:
        data = manifest.load(path, name, files[name])
        return manifest.parsed(path, name, lambda: from_safetensors(data))

    text, rest = manifest.load(path, TREE, files[TREE]), tensors(TENSORS)
    state = manifest.parsed(path, TREE, lambda: dict(unpack(from_json(text), rest)))
    if MODEL in files:
        model = tensors(MODEL)
        state["model"] = manifest.parsed(path, TREE, lambda: _in_order(model, state["model"]))
    return state


def _in_order(model: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    if sorted(names) != sorted(model):
        raise ValueError(f"the names of the model differ from those in {MODEL}")
    return {name: model[name] for name in names}


def _manifest(path: Path) -> dict[str, Any]:
    content = manifest.read(path)
    if _step(path) not in (-1, content["step"]):
        raise CheckpointError(f"{path}: {MANIFEST}: expected the step in the folder's name, got {content['step']}")
    return content


def _check(path: Path) -> None:
    for name, entry in _manifest(path)["files"].items():
        manifest.load(path, name, entry)


def _step(path: Path) -> int:
    """The step in the name of a checkpoint folder, -1 for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _newest_good(paths: Iterable[Path]) -> Path | None:
    for path in reversed(list(paths)):
        with contextlib.suppress(CheckpointError):
            _check(path)
            return path
    return None


@contextlib.contextmanager
def _offering_another(path: Path) -> Iterator[None]:
    atomic.restore(path.parent)
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_offer(path)}.") from error.__cause__


def _offer(path: Path) -> str:
    for folder in (path, path.parent):
        with contextlib.suppress(CheckpointError):
            others = [other for other in CheckpointStore(folder).paths() if other.name != path.name]
            if good := _newest_good(others):
                return f"The newest good one is {good}"
    return "No good one is beside it: start afresh, or give another path"


def _not_saved(path: Path, needed: int, error: OSError) -> CheckpointError:
    """The error for a file or folder that could not be written; `needed` in bytes."""
    free = ""
    with contextlib.suppress(OSError):
        free = f", with {shutil.disk_usage(path.parent).free:,} free"
    advice = _ADVICE.get(error.errno or 0, "Choose a folder on another file system")
    reason = error.strerror or str(error)
    return CheckpointError(
        f"{path}: cannot be saved: {reason}; it needs {needed:,} bytes{free}. {advice}. "
        "What was saved before is untouched."
    )
