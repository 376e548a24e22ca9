"""The manifest of a checkpoint: its files with their sizes and checksums, to detect damage."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from .. import arguments
from ..errors import CheckpointError, ConfigError
from .numerics import NUMERICS
from .serialization import MAX_JSON, Entry, Json, from_json, pack, to_json, unpack

FORMAT = "lockstep checkpoint"
VERSION = 2
# Only files with these names, and those of `part_name`, are ever opened, whatever a manifest lists.
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
TREE = "state.json"
TENSORS = "state.safetensors"
PARTS = "parts.json"
_PART = re.compile(r"part-\d{5,9}\.safetensors", re.ASCII)
_CHUNK = 2**20  # bytes hashed at a time

T = TypeVar("T")


def part_name(rank: int) -> str:
    """Return the name of the file with one worker's part of the tensors."""
    return f"part-{rank:05d}.safetensors"


def head(*, step: int, epoch: int, info: Mapping[str, Any]) -> dict[str, Json]:
    """Return the content of a manifest except the list of files.

    Raises:
        ConfigError: `step` or `epoch` is not a whole number of at least 0, or `info` holds
            something other than plain values.
    """
    step = arguments.whole("step", step, least=0)
    epoch = arguments.whole("epoch", epoch, least=0)
    value, tensors = pack({"info": dict(info)})
    if tensors:
        raise ConfigError(
            "info", "plain values only", found="tensors", hint="Put tensors into the state."
        )
    versions = {"format": FORMAT, "version": VERSION, "numerics": NUMERICS}
    return {**versions, "step": step, "epoch": epoch, "info": value["info"]}


def render(head: Mapping[str, Json], files: Mapping[str, Entry]) -> bytes:
    """Return the bytes of the manifest of a checkpoint that consists of `files`."""
    return _seal({**head, "files": {name: asdict(entry) for name, entry in files.items()}})


def read(folder: Path) -> dict[str, Any]:
    """Read the manifest in `folder`: numerics, step, epoch, info, and for each file name its size
    and sha256.

    Raises:
        CheckpointError: it is missing, damaged, of another version, or not a manifest of Lockstep.
    """
    try:
        kind = _kind(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from error
    if kind != "a folder":
        raise CheckpointError(f"{folder}: expected a folder with a checkpoint, got {kind}")
    data = load(folder, MANIFEST)
    content = parse_content(folder, MANIFEST, lambda: _content(data))
    if content.get("format") != FORMAT:
        raise _mismatch(folder, MANIFEST, f"the format {FORMAT!r}", repr(content.get("format")))
    if content.get("version") != VERSION:
        expected = f"version {VERSION}, the only one that this program reads"
        raise _mismatch(
            folder,
            MANIFEST,
            expected,
            f"{content.get('version')!r}: use the Lockstep that wrote it",
        )
    # The whole text is compared, so that a change of any byte is detected, even of a space.
    if parse_content(folder, MANIFEST, lambda: _seal(content)) != data:
        raise _mismatch(
            folder, MANIFEST, "the content that its checksum belongs to", "other content"
        )
    _check_fields(folder, content)
    info = parse_content(folder, MANIFEST, lambda: unpack({"info": content["info"]}, {}))
    return {"numerics": 0, **content, **info}


def load(folder: Path, name: str, entry: Mapping[str, Any] | None = None) -> bytes:
    """Read the small file `name` of a checkpoint, and check its size and checksum against its
    `entry` in the manifest.

    Raises:
        CheckpointError: they differ, or the file cannot be read or is larger than MAX_JSON.
    """
    size = _check_size(folder, name, entry)
    if size > MAX_JSON:
        raise _mismatch(folder, name, f"at most {MAX_JSON:,} bytes", f"{size:,}")
    data = _read_or_raise(folder, name, (folder / name).read_bytes)
    if entry is not None:
        _check_sum(folder, name, entry, _sha256(data))
    return data


def check(folder: Path, name: str, entry: Mapping[str, Any], content: bool = True) -> None:
    """Check a file of a checkpoint against its `entry` in the manifest, reading 1 MiB at a time.

    Args:
        folder: the checkpoint.
        name: the file.
        entry: its size and sha256.
        content: check the sha256 as well, not only the size.

    Raises:
        CheckpointError: they differ, or the file cannot be read.
    """
    _check_size(folder, name, entry)
    if content:
        _check_sum(
            folder, name, entry, _read_or_raise(folder, name, lambda: _sha256_of(folder / name))
        )


def _check_size(folder: Path, name: str, entry: Mapping[str, Any] | None) -> int:
    path = folder / name
    status = _read_or_raise(folder, name, path.lstat)
    if not stat.S_ISREG(status.st_mode):
        raise _mismatch(
            folder, name, "a plain file", "a symbolic link" if path.is_symlink() else _kind(path)
        )
    if entry is not None and status.st_size != entry["size"]:
        raise _mismatch(folder, name, f"{entry['size']:,} bytes", f"{status.st_size:,}")
    return status.st_size


def _check_sum(folder: Path, name: str, entry: Mapping[str, Any], checksum: str) -> None:
    if checksum != entry["sha256"]:
        raise _mismatch(
            folder,
            name,
            f"content with sha256 {entry['sha256'][:64]}",
            f"content with sha256 {checksum}",
        )


def _read_or_raise(folder: Path, name: str, read: Callable[[], T]) -> T:
    """Return `read()`, with an OSError turned into a CheckpointError."""
    try:
        return read()
    except FileNotFoundError:
        raise _mismatch(folder, name, "a plain file", "nothing of that name") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {name}: cannot be read: {error.strerror}") from error


def parse_content(folder: Path, name: str, parse: Callable[[], T]) -> T:
    """Return `parse()`, which parses a file: even with the right checksum, its content may be
    invalid or hostile.

    Raises:
        CheckpointError: `parse` could not parse it.
    """
    try:
        return parse()
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder}: {name}: its content is invalid: {str(error)[:200]}"
        ) from error


def _seal(content: Json) -> bytes:
    checksum = _sha256(to_json("info", content))
    return to_json("info", {"content": content, "sha256": checksum}, indent=1)


def _content(data: bytes) -> dict[str, Json]:
    manifest = from_json(data)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("content"), dict):
        raise ValueError("expected a dict with a dict under 'content'")
    content: dict[str, Json] = manifest["content"]
    return content


def _check_fields(folder: Path, content: dict[str, Json]) -> None:
    step = content.get("step")
    epoch = content.get("epoch")
    files = content.get("files")
    if not _is_count(step) or not _is_count(epoch) or "info" not in content:
        raise _mismatch(
            folder,
            MANIFEST,
            "step, epoch and info",
            f"step {str(step)[:80]}, epoch {str(epoch)[:80]}",
        )
    if not _is_count(content.get("numerics", 0)):
        raise _mismatch(
            folder, MANIFEST, "numerics of at least 0, if any", str(content["numerics"])[:80]
        )
    names = set[Any](files) if isinstance(files, dict) else set[Any]()
    of_one_writer = {TREE, TENSORS} <= names <= {MODEL, TREE, TENSORS}
    of_all_workers = {TREE, PARTS} <= names and all(
        _PART.fullmatch(str(name)) for name in names - {TREE, PARTS}
    )
    if not isinstance(files, dict) or not (of_one_writer or of_all_workers):
        expected = (
            f"the files {TREE}, {TENSORS} and optionally {MODEL}, or {TREE}, {PARTS} and one file "
            "per worker"
        )
        raise _mismatch(folder, MANIFEST, expected, str(files)[:200])
    for entry in files.values():
        if (
            not isinstance(entry, dict)
            or not _is_count(entry.get("size"))
            or not isinstance(entry.get("sha256"), str)
        ):
            raise _mismatch(folder, MANIFEST, "a size and a sha256 for each file", str(entry)[:200])


def _mismatch(folder: Path, name: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(f"{folder}: {name}: expected {expected}, got {got}")


def _kind(path: Path) -> str:
    try:
        # not path.exists(), which in Python 3.14 says no where it may not look
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "nothing of that name"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a file" if stat.S_ISREG(mode) else "something else"


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 10**18


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()
