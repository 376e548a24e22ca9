"""Checkpoints: a run's state in a folder, complete, checksummed, independent of devices and number
of workers.
"""

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

from .. import arguments
from ..errors import OUTPUT_FAILED, CheckpointError, ConfigError
from ..system import atomic_files
from . import manifest
from .manifest import MANIFEST, MODEL, PARTS, TENSORS, TREE
from .names import plain_names
from .serialization import (
    Json,
    OpenFiles,
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
    "FINITE",
    "Checkpoint",
    "CheckpointStore",
    "check_finite",
    "check_pieces",
    "load_weights",
    "open_stored",
    "read",
    "read_tensors",
    "save_error",
    "save_weights",
    "suggest_other",
    "verify",
]

FINITE = "finite_weights"
"""The entry of `info` of a checkpoint whose trained parameters were checked before it was written.
"""

_BEST = "best"
_NAME = re.compile(r"step-(\d{10}|[1-9]\d{10,17})")
_FULL = "Free some space or raise the quota"
_NO_PERMISSION = "Choose a folder that this user may write to"
_EXISTS = "Remove the file that blocks this path, or choose another folder"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NO_PERMISSION),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), _EXISTS),
    errno.ENOENT: "Create the folder first",
}


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        path: the folder that it was read from.
        step: optimizer steps done when it was saved.
        epoch: the epoch in which it was saved.
        numerics: the version of the numerics of the Lockstep that wrote it, see
            `lockstep.checkpoint.numerics`.
        info: plain values about the run.
        state: ``"model"``, ``"optimizer"``, … → a tree of plain values and CPU tensors; of plain
            values and stored tensors if it comes from `open_stored`.
    """

    path: Path
    step: int
    epoch: int
    numerics: int
    info: dict[str, Any]
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run, each a folder such as ``step-0000000123``, in one folder.

    Only one process of a run may call `save`; any process may read.

    Args:
        folder: the folder of the checkpoints; the first `save` creates it.
        keep: number of checkpoints that remain after a save.

    Raises:
        ConfigError: `keep` is less than 1.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = Path(folder)
        self.keep = arguments.whole("keep", keep, least=1)

    def save(
        self, state: Mapping[str, Tree], *, step: int, epoch: int, info: Mapping[str, Any]
    ) -> Path:
        """Write one checkpoint; then remove all but the newest `keep`, and never this one.

        An existing checkpoint of the same step is replaced. The folder gets its name after all of
        its files have been flushed to the device. If `state["model"]` is a flat dict of tensors, it
        is stored as ``model.safetensors``, which any program can load.

        Raises:
            CheckpointError: it could not be written; existing checkpoints are untouched, and no
                partial one remains.
            ConfigError: `state` or `info` holds something that cannot be stored; names its place.
        """
        return self.prepare(state, step=step, epoch=epoch, info=info)()

    def prepare(
        self,
        state: Mapping[str, Tree],
        *,
        step: int,
        epoch: int,
        info: Mapping[str, Any],
        copy: bool = False,
    ) -> Callable[[], Path]:
        """Return a function that writes one checkpoint as `save` does; call it once, at any time
        and in any thread.

        Args:
            state: as in `save`.
            step: as in `save`.
            epoch: as in `save`.
            info: as in `save`.
            copy: copy the tensors now, so that later changes to them are not saved. Otherwise they
                are read while the file is written, a block at a time.

        Raises:
            ConfigError: as `save`.
        """
        head = manifest.head(step=step, epoch=epoch, info=info)
        tree, files = _encode(state)
        if copy:
            files = {
                file: {key: cpu_copy(tensor) for key, tensor in content.items()}
                for file, content in files.items()
            }
        needed = len(tree) + sum(
            tensor.nbytes for content in files.values() for tensor in content.values()
        )

        def write() -> Path:
            with self.writing(step, needed) as folder:
                entries = {
                    file: write_tensors(folder / file, content) for file, content in files.items()
                }
                entries[TREE] = write_bytes(folder / TREE, tree)
                write_bytes(folder / MANIFEST, manifest.render(head, entries))
            return self.path(step)

        return write

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step, whether it exists or not."""
        return self.folder / f"step-{step:010d}"

    @contextlib.contextmanager
    def writing(self, step: int, needed: int) -> Iterator[Path]:
        """Yield a folder that becomes the checkpoint of `step` if the block ends without error;
        then remove old ones.

        Args:
            step: the step; an existing checkpoint of it is replaced.
            needed: the size in bytes, for the error message.

        Raises:
            CheckpointError: for an OSError, also of the block; existing checkpoints are untouched.
        """
        path = self.path(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_files.remove_abandoned(self.folder)
            with atomic_files.folder(path) as temporary:
                yield temporary
        except OSError as error:
            raise save_error(path, needed, error) from error
        self._prune(path)

    def paths(self) -> list[Path]:
        """Return all checkpoints, damaged ones included and unfinished ones not, in ascending order
        of their steps.

        Raises:
            CheckpointError: the folder may not be read.
        """
        atomic_files.restore(self.folder)
        try:
            numbered = [
                entry for entry in self.folder.iterdir() if _step(entry) >= 0 and entry.is_dir()
            ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot list its checkpoints: {error.strerror}"
            ) from error
        return sorted(numbered, key=_step)

    def mark_best(self, step: int) -> None:
        """Make the checkpoint of `step` the best one: the link ``best`` leads to it, and it is not
        removed.

        Raises:
            CheckpointError: the link cannot be made.
        """
        try:
            atomic_files.link(self.folder / _BEST, self.path(step).name)
        except OSError as error:
            raise save_error(self.folder / _BEST, 0, error) from error

    def best(self) -> Path | None:
        """Return the checkpoint that was marked as the best one; None without one."""
        try:
            return self.folder / (self.folder / _BEST).readlink()
        except OSError:
            return None

    def latest(self) -> Path | None:
        """Return the checkpoint of the highest step, which may be damaged; None if there is
        none.
        """
        return max(self.paths(), key=_step, default=None)

    def newest_good(self, before: Path | None = None) -> Path | None:
        """Return the newest good checkpoint, undamaged and without NaN in its weights.

        Args:
            before: a checkpoint, for the newest that is older; None for the newest of all.
        """
        if before is None:
            return _newest_good(self.paths())
        limit = _step(Path(before))
        if limit < 0:
            raise ConfigError("before", "a folder named step- and ten digits", got=str(before))
        return _newest_good(path for path in self.paths() if _step(path) < limit)

    def _prune(self, saved: Path) -> None:
        for path in self.paths()[: -self.keep]:
            if path in (saved, self.best()):
                continue
            try:
                atomic_files.remove(path)
            except OSError as error:
                # The save itself has succeeded; a run must not end because an old checkpoint
                # remains.
                warnings.warn(
                    f"{path}: cannot remove this old checkpoint: {error.strerror}", stacklevel=3
                )


def read(path: Path) -> Checkpoint:
    """Read a checkpoint into CPU tensors, after checking size and SHA-256 of every file.

    Raises:
        CheckpointError: it is missing, damaged, incomplete, of another version, or no checkpoint;
            names the file, what was expected and what was found, and the newest undamaged
            checkpoint beside it.
    """
    path = Path(path)
    with _suggesting_other(path):
        stored = open_stored(path)
        return replace(stored, state=read_tensors(stored.state))


def open_stored(path: Path, local_rank: int = 0, local_size: int = 1) -> Checkpoint:
    """Open a checkpoint without reading its tensors: each is a `StoredTensor`.

    Every process checks the size of every file. The processes of one host divide the files among
    them to check their SHA-256.

    Args:
        path: the checkpoint.
        local_rank: number of this process among those that open the checkpoint on this host.
        local_size: number of these processes.

    Raises:
        CheckpointError: as `read`, without naming another checkpoint.
    """
    path = Path(path)
    content = _manifest(path)
    _check_files(path, content["files"], local_rank, local_size)
    state = _stored_state(path, content["files"])
    return Checkpoint(
        path, content["step"], content["epoch"], content["numerics"], content["info"], state
    )


def check_finite(checkpoint: Checkpoint) -> None:
    """Check that an opened checkpoint of a training run has no NaN in its trained parameters.

    They are read only if they were not checked before it was written.

    Raises:
        CheckpointError: naming the first parameter with NaN; or a tensor cannot be read.
    """
    if checkpoint.info.get(FINITE) is True:
        return
    model = checkpoint.state.get("model")
    groups = checkpoint.state.get("hyperparameters")
    if not isinstance(model, dict) or not isinstance(groups, list):
        return  # not of a training run
    for name in (name for group in groups for name in group["parameters"]):
        value = read_tensors(model.get(name))
        if isinstance(value, Tensor) and bool(value.isnan().any()):
            raise CheckpointError(
                f"{checkpoint.path}: expected weights without NaN, got some in {name}"
            )


def read_tensors(tree: Any) -> Any:
    """Return `tree` with every stored tensor in it read into memory.

    Raises:
        CheckpointError: a tensor cannot be read.
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
    with _suggesting_other(path):
        _check(path)


def save_weights(state_dict: Mapping[str, Tensor], path: Path) -> None:
    """Write a model's tensors, from any device, as one safetensors file under their plain names
    (see `plain_names`).

    Raises:
        CheckpointError: it could not be written; an existing file of that name is untouched.
        ConfigError: an entry is not a plain dense tensor, or of a type that safetensors does not
            store.
    """
    path = Path(path)
    tensors = {
        name: check_storable(tensor, name) for name, tensor in plain_names(state_dict).items()
    }
    check_tensors("state_dict", tensors)
    try:
        with atomic_files.file(path) as temporary:
            write_tensors(temporary, tensors)
    except OSError as error:
        raise save_error(path, sum(tensor.nbytes for tensor in tensors.values()), error) from error


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, on the CPU.

    Raises:
        CheckpointError: the file cannot be read or is not a safetensors file.
    """
    path = Path(path)
    try:
        stored = TensorFile(path, path.name).tensors()
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot read the weights: {error.strerror or error}"
        ) from error
    except ValueError as error:
        advice = "Give the model.safetensors of a run or of a checkpoint"
        raise CheckpointError(
            f"{path}: expected a safetensors file, got another ({error}). {advice}."
        ) from error
    return {name: tensor.read() for name, tensor in stored.items()}


def _encode(state: Mapping[str, Tree]) -> tuple[bytes, dict[str, dict[str, Tensor]]]:
    """Return the content of the file of plain values, and the tensors of each safetensors file."""
    value, tensors = pack(dict(state))
    files: dict[str, dict[str, Tensor]] = {}
    if keys := _flat_model(value):
        files[MODEL] = {name: tensors.pop(key) for name, key in keys.items()}
        value["model"] = list(keys)  # keeps their order; the file has another one
    files[TENSORS] = tensors
    for content in files.values():
        check_tensors("state", content)
    return to_json("state", value), files


def _flat_model(value: Json) -> dict[str, str]:
    """Map parameter names to keys of the packed tensors if the model is a flat dict of tensors;
    else return {}.
    """
    model = value.get("model")
    if not isinstance(model, dict) or not all(map(is_storable_name, model)):
        return {}
    if not all(isinstance(node, dict) and set(node) == {"$tensor"} for node in model.values()):
        return {}
    return {name: node["$tensor"] for name, node in model.items()}


def _stored_state(path: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    text = manifest.load(path, TREE, files[TREE])
    tensors = _tensors_of_parts(path, files) if PARTS in files else _tensors_of_file(path, TENSORS)
    state = manifest.parse_content(path, TREE, lambda: dict(unpack(from_json(text), tensors)))
    if MODEL in files:
        model = _tensors_of_file(path, MODEL)
        state["model"] = manifest.parse_content(
            path, TREE, lambda: _in_order(model, state["model"])
        )
    return state


def _tensors_of_file(path: Path, name: str) -> dict[str, StoredTensor]:
    try:
        return manifest.parse_content(path, name, TensorFile(path / name, name).tensors)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {name}: cannot be read: {error.strerror or error}"
        ) from error


def _tensors_of_parts(path: Path, files: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint with one file per worker, as the file `PARTS` describes
    them.
    """
    text = manifest.load(path, PARTS, files[PARTS])
    open_files: OpenFiles = deque()
    parts = {
        name: TensorFile(path / name, name, open_files)
        for name in files
        if name not in (TREE, PARTS)
    }

    def tensor(layout: Json) -> StoredTensor:
        shape = _parse_shape(layout["shape"])
        dtype = dtype_of(layout["dtype"])
        pieces = tuple(
            Piece(parts[file], str(name), _parse_shape(offsets), _parse_shape(sizes), dtype)
            for file, name, offsets, sizes in layout["pieces"]
        )
        check_pieces(shape, [(piece.offsets, piece.sizes) for piece in pieces])
        return StoredTensor(dtype, shape, pieces)

    return manifest.parse_content(
        path, PARTS, lambda: {key: tensor(layout) for key, layout in dict(from_json(text)).items()}
    )


def _parse_shape(numbers: Json) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(
        type(number) is int and 0 <= number < 2**63 for number in numbers
    ):
        raise ValueError(f"expected whole numbers of at least 0, got {str(numbers)[:80]}")
    return tuple(numbers)


def check_pieces(
    shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> None:
    """Check that `boxes` cover a tensor exactly once, as slices along one dimension.

    Args:
        shape: the tensor's shape.
        boxes: (offsets, sizes) of each box.

    Raises:
        ValueError: they do not.
    """
    if not math.prod(shape):
        return  # there is nothing to read
    cut = {
        d
        for offsets, sizes in boxes
        for d in range(len(shape))
        if (offsets[d], sizes[d]) != (0, shape[d])
    }
    dim = min(cut, default=0)
    end = 0
    for offsets, sizes in sorted(boxes):
        if (
            len(offsets) != len(shape)
            or len(sizes) != len(shape)
            or (shape and offsets[dim] != end)
        ):
            raise ValueError(f"the pieces of a tensor of shape {list(shape)} are not contiguous")
        end += sizes[dim] if shape else 1
    if len(cut) > 1 or end != (shape[dim] if shape else 1):
        raise ValueError(f"the pieces do not cover a tensor of shape {list(shape)}")


def _in_order(model: dict[str, StoredTensor], names: list[str]) -> dict[str, StoredTensor]:
    if sorted(names) != sorted(model):
        raise ValueError(f"the names of the model differ from those in {MODEL}")
    return {name: model[name] for name in names}


def _manifest(path: Path) -> dict[str, Any]:
    content = manifest.read(path)
    if _step(path) not in (-1, content["step"]):
        raise CheckpointError(
            f"{path}: {MANIFEST}: expected the step in the folder's name, got {content['step']}"
        )
    return content


def _check_good(path: Path) -> None:
    _check(path)
    content = _manifest(path)
    if content["info"].get(FINITE) is not True:
        check_finite(open_stored(path, local_rank=1))  # its files have just been checked


def _check(path: Path) -> None:
    _check_files(path, _manifest(path)["files"])


def _check_files(
    path: Path, files: Mapping[str, Any], local_rank: int = 0, local_size: int = 1
) -> None:
    for number, name in enumerate(sorted(files)):
        manifest.check(path, name, files[name], content=number % local_size == local_rank)


def _step(path: Path) -> int:
    """Return the step in the name of a checkpoint folder; -1 for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _newest_good(paths: Iterable[Path]) -> Path | None:
    for path in reversed(list(paths)):
        with contextlib.suppress(CheckpointError):
            _check_good(path)
            return path
    return None


@contextlib.contextmanager
def _suggesting_other(path: Path) -> Iterator[None]:
    atomic_files.restore(path.parent)
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {suggest_other(path)}.") from error.__cause__


def suggest_other(path: Path) -> str:
    """Return a sentence that names the newest undamaged checkpoint beside `path`, which cannot be
    used.
    """
    for folder in (path, path.parent):
        with contextlib.suppress(CheckpointError):
            others = [other for other in CheckpointStore(folder).paths() if other.name != path.name]
            if good := _newest_good(others):
                return f"The newest undamaged one is {good}"
    return "There is no undamaged one beside it: start a new run, or give another path"


def save_error(path: Path, needed: int, error: OSError) -> CheckpointError:
    """Return the error for a file or folder of `needed` bytes that could not be written."""
    free = ""
    with contextlib.suppress(OSError):
        free = f", with {shutil.disk_usage(path.parent).free:,} free"
    advice = _ADVICE.get(error.errno or 0, "Choose a folder on another file system")
    reason = error.strerror or str(error)
    failed = CheckpointError(
        f"{path}: cannot be saved: {reason}; it needs {needed:,} bytes{free}. {advice}. Existing "
        "files are untouched."
    )
    failed.exit_code = OUTPUT_FAILED
    return failed
