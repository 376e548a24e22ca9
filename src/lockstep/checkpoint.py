"""Checkpoints: the state of a run in a folder that is whole, checked, and independent of devices and workers."""

from __future__ import annotations

import contextlib
import errno
import math
import re
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from . import atomic, manifest
from .errors import CheckpointError, ConfigError
from .fingerprints import plain_names
from .manifest import MANIFEST, MODEL, PARTS, TENSORS, TREE
from .packing import (
    Json,
    Opened,
    Piece,
    StoredTensor,
    TensorFile,
    Tree,
    check_storable,
    check_tensors,
    cpu_copy,
    dtype_of,
    from_json,
    is_storable_name,
    pack,
    to_json,
    unpack,
    write_bytes,
    write_tensors,
)

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "check_pieces",
    "load_weights",
    "not_saved",
    "offer",
    "open_stored",
    "read",
    "read_tensors",
    "save_weights",
    "verify",
]

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
        state: the state by part (``"model"``, ``"optimizer"``, …), each a tree of plain values and CPU tensors; from
            `open_stored` of plain values and stored tensors.
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
        return self.prepare(state, step=step, epoch=epoch, info=info)()

    def prepare(
        self, state: Mapping[str, Tree], *, step: int, epoch: int, info: Mapping[str, Any], copy: bool = False
    ) -> Callable[[], Path]:
        """What writes one checkpoint as `save` does when it is called, once and at any time, in any thread.

        Args:
            state: as in `save`.
            step: as in `save`.
            epoch: as in `save`.
            info: as in `save`.
            copy: whether tensors are copied now, so that what is done to them later is not saved. If not, they are
                read from where they are while the file is written, a block at a time.

        Raises:
            ConfigError: as `save`.
        """
        head = manifest.head(step=step, epoch=epoch, info=info)
        tree, files = _encode(state)
        if copy:
            files = {name: {key: cpu_copy(tensor) for key, tensor in held.items()} for name, held in files.items()}
        needed = len(tree) + sum(tensor.nbytes for held in files.values() for tensor in held.values())

        def write() -> Path:
            with self.writing(step, needed) as folder:
                entries = {name: write_tensors(folder / name, held) for name, held in files.items()}
                entries[TREE] = write_bytes(folder / TREE, tree)
                write_bytes(folder / MANIFEST, manifest.render(head, entries))
            return self.path(step)

        return write

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:010d}"

    @contextlib.contextmanager
    def writing(self, step: int, needed: int) -> Iterator[Path]:
        """Fill a folder that becomes the checkpoint of `step` when the block has ended without error; older ones go.

        Args:
            step: whose checkpoint it is; another one of that step is replaced.
            needed: bytes that it takes, for the error.

        Raises:
            CheckpointError: for an OSError, also of the block; what was there before is untouched.
        """
        path = self.path(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic.sweep(self.folder)
            with atomic.folder(path) as temporary:
                yield temporary
        except OSError as error:
            raise not_saved(path, needed, error) from error
        self._prune(path)

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
        found = open_stored(path)
        return replace(found, state=read_tensors(found.state))


def open_stored(path: Path, share: int = 0, of: int = 1) -> Checkpoint:
    """A checkpoint whose tensors stay in their files, each a `StoredTensor`, until something reads them.

    Args:
        path: where it is.
        share: of the processes that open it on this machine, the number of this one: each checks the SHA-256 of some
            of the files, all of them those of all, and each the size of every file.
        of: how many these are.

    Raises:
        CheckpointError: as `read`, without the offer of another one.
    """
    path = Path(path)
    content = _manifest(path)
    _check_files(path, content["files"], share, of)
    state = _stored_state(path, content["files"])
    return Checkpoint(path, content["step"], content["epoch"], content["info"], state)


def read_tensors(tree: Any) -> Any:
    """A tree with every stored tensor in it read into memory.

    Raises:
        CheckpointError: one cannot be read.
    """
    if isinstance(tree, StoredTensor):
        return tree.read()
    if isinstance(tree, dict):
        return {key: read_tensors(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(read_tensors(value) for value in tree)
    return tree


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
    tensors = {name: check_storable(tensor, name) for name, tensor in plain_names(state_dict).items()}
    check_tensors("state_dict", tensors)
    try:
        with atomic.file(path) as temporary:
            write_tensors(temporary, tensors)
    except OSError as error:
        raise not_saved(path, sum(tensor.nbytes for tensor in tensors.values()), error) from error


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        CheckpointError: the file cannot be read or is no safetensors file.
    """
    path = Path(path)
    try:
        stored = TensorFile(path, path.name).tensors()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the weights: {error.strerror or error}") from error
    except ValueError as error:
        advice = "Give the model.safetensors of a run or of a checkpoint"
        raise CheckpointError(f"{path}: expected a safetensors file, got another ({error}). {advice}.") from error
    return {name: tensor.read() for name, tensor in stored.items()}


def _encode(state: Mapping[str, Tree]) -> tuple[bytes, dict[str, dict[str, Tensor]]]:
    """The content of the file of plain values, and the tensors for each of the other files."""
    value, tensors = pack(dict(state))
    files: dict[str, dict[str, Tensor]] = {}
    if keys := _flat_model(value):
        files[MODEL] = {name: tensors.pop(key) for name, key in keys.items()}
        value["model"] = list(keys)  # the file has them in another order; this keeps it
    files[TENSORS] = tensors
    for held in files.values():
        check_tensors("state", held)
    return to_json("state", value), files


def _flat_model(value: Json) -> dict[str, str]:
    """Name → key among the packed tensors, if the packed state has a model that safetensors can hold as it is."""
    model = value.get("model")
    if not isinstance(model, dict) or not all(map(is_storable_name, model)):
        return {}
    if not all(isinstance(node, dict) and set(node) == {"$tensor"} for node in model.values()):
        return {}
    return {name: node["$tensor"] for name, node in model.items()}


def _stored_state(path: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    text = manifest.load(path, TREE, files[TREE])
    rest = _from_parts(path, files) if PARTS in files else _from_file(path, TENSORS)
    state = manifest.parsed(path, TREE, lambda: dict(unpack(from_json(text), rest)))
    if MODEL in files:
        model = _from_file(path, MODEL)
        state["model"] = manifest.parsed(path, TREE, lambda: _in_order(model, state["model"]))
    return state


def _from_file(path: Path, name: str) -> dict[str, StoredTensor]:
    try:
        return manifest.parsed(path, name, TensorFile(path / name, name).tensors)
    except OSError as error:
        raise CheckpointError(f"{path}: {name}: cannot be read: {error.strerror or error}") from error


def _from_parts(path: Path, files: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors that several workers have written together, as `PARTS` describes them."""
    text = manifest.load(path, PARTS, files[PARTS])
    opened: Opened = deque()
    parts = {name: TensorFile(path / name, name, opened) for name in files if name not in (TREE, PARTS)}

    def tensor(told: Json) -> StoredTensor:
        shape, dtype = _counts(told["shape"]), dtype_of(told["dtype"])
        pieces = tuple(
            Piece(parts[file], str(name), _counts(offsets), _counts(sizes), dtype)
            for file, name, offsets, sizes in told["pieces"]
        )
        check_pieces(shape, [(piece.offsets, piece.sizes) for piece in pieces])
        return StoredTensor(dtype, shape, pieces)

    return manifest.parsed(path, PARTS, lambda: {key: tensor(told) for key, told in dict(from_json(text)).items()})


def _counts(numbers: Json) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"expected whole numbers of at least 0, got {str(numbers)[:80]}")
    return tuple(numbers)


def check_pieces(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """See that boxes make up a tensor, each of its elements once: as slices of it along one dimension.

    Args:
        shape: of the tensor.
        boxes: offsets and sizes of each.

    Raises:
        ValueError: they do not.
    """
    if not math.prod(shape):
        return  # there is nothing to be read
    cut = {d for offsets, sizes in boxes for d in range(len(shape)) if (offsets[d], sizes[d]) != (0, shape[d])}
    place = min(cut, default=0)
    end = 0
    for offsets, sizes in sorted(boxes):
        if len(offsets) != len(shape) or len(sizes) != len(shape) or (shape and offsets[place] != end):
            raise ValueError(f"the pieces of a tensor of shape {list(shape)} do not follow each other")
        end += sizes[place] if shape else 1
    if len(cut) > 1 or end != (shape[place] if shape else 1):
        raise ValueError(f"the pieces of a tensor of shape {list(shape)} are not all of it")


def _in_order(model: dict[str, StoredTensor], names: list[str]) -> dict[str, StoredTensor]:
    if sorted(names) != sorted(model):
        raise ValueError(f"the names of the model differ from those in {MODEL}")
    return {name: model[name] for name in names}


def _manifest(path: Path) -> dict[str, Any]:
    content = manifest.read(path)
    if _step(path) not in (-1, content["step"]):
        raise CheckpointError(f"{path}: {MANIFEST}: expected the step in the folder's name, got {content['step']}")
    return content


def _check(path: Path) -> None:
    _check_files(path, _manifest(path)["files"])


def _check_files(path: Path, files: Mapping[str, Any], share: int = 0, of: int = 1) -> None:
    for number, name in enumerate(sorted(files)):
        manifest.check(path, name, files[name], content=number % of == share)


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
        raise CheckpointError(f"{error}. {offer(path)}.") from error.__cause__


def offer(path: Path) -> str:
    """A sentence that names the newest good checkpoint beside one that cannot be used."""
    for folder in (path, path.parent):
        with contextlib.suppress(CheckpointError):
            others = [other for other in CheckpointStore(folder).paths() if other.name != path.name]
            if good := _newest_good(others):
                return f"The newest good one is {good}"
    return "No good one is beside it: start afresh, or give another path"


def not_saved(path: Path, needed: int, error: OSError) -> CheckpointError:
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
