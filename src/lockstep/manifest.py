"""The list of a checkpoint's files with their sizes and checksums, by which damage is found."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .errors import CheckpointError, ConfigError
from .packing import Json, from_json, pack, to_json, unpack

__all__ = ["FORMAT", "MANIFEST", "MODEL", "TENSORS", "TREE", "VERSION", "load", "parsed", "read", "render"]

FORMAT, VERSION = "lockstep checkpoint", 1
# No other names are ever opened, whatever a manifest says.
MANIFEST, MODEL, TREE, TENSORS = "manifest.json", "model.safetensors", "state.json", "state.safetensors"

T = TypeVar("T")


def render(files: Mapping[str, bytes], *, step: int, epoch: int, info: Mapping[str, Any]) -> bytes:
    """The manifest of a checkpoint that consists of `files`.

    Raises:
        ConfigError: `step` or `epoch` is no whole number of at least 0, or `info` holds something that is no plain
            value.
    """
    for name, number in (("step", step), ("epoch", epoch)):
        if not _is_count(number):
            raise ConfigError(name, "a whole number of at least 0", number)
    value, tensors = pack({"info": dict(info)})
    if tensors:
        raise ConfigError("info", "plain values only", found="tensors", hint="Put tensors into the state.")
    entries = {name: {"size": len(data), "sha256": _sha256(data)} for name, data in files.items()}
    head = {"format": FORMAT, "version": VERSION, "step": step, "epoch": epoch}
    return _seal({**head, "info": value["info"], "files": entries})


def read(folder: Path) -> dict[str, Any]:
    """What the manifest in `folder` says: step, epoch, info, and for each file name its size and sha256.

    Raises:
        CheckpointError: it is missing, damaged, of another version, or none of ours.
    """
    try:
        kind = _kind(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from error
    if kind != "a folder":
        raise CheckpointError(f"{folder}: expected a folder with a checkpoint, got {kind}")
    data = load(folder, MANIFEST)
    content = parsed(folder, MANIFEST, lambda: _content(data))
    if content.get("format") != FORMAT:
        raise _bad(folder, MANIFEST, f"the format {FORMAT!r}", repr(content.get("format")))
    if content.get("version") != VERSION:
        expected = f"version {VERSION}, the only one that this program reads"
        raise _bad(folder, MANIFEST, expected, f"{content.get('version')!r}: use the Lockstep that wrote it")
    # Compared as a whole, so that no byte of it can change unnoticed, not even a space.
    if parsed(folder, MANIFEST, lambda: _seal(content)) != data:
        raise _bad(folder, MANIFEST, "the content that its checksum was made of", "other content")
    _check_fields(folder, content)
    info = parsed(folder, MANIFEST, lambda: unpack({"info": content["info"]}, {}))
    return {**content, **info}


def load(folder: Path, name: str, entry: Mapping[str, Any] | None = None) -> bytes:
    """The file `name` of a checkpoint, of the size and with the checksum that its `entry` in the manifest says.

    Raises:
        CheckpointError: it has not, or it cannot be read.
    """
    path = folder / name
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise _bad(folder, name, "a plain file", "a symbolic link" if path.is_symlink() else _kind(path))
        if entry is not None and status.st_size != entry["size"]:
            raise _bad(folder, name, f"{entry['size']:,} bytes", f"{status.st_size:,}")
        data = path.read_bytes()
    except FileNotFoundError:
        raise _bad(folder, name, "a plain file", "nothing of that name") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {name}: cannot be read: {error.strerror}") from error
    if entry is not None and (checksum := _sha256(data)) != entry["sha256"]:
        raise _bad(folder, name, f"content with sha256 {entry['sha256'][:64]}", f"content with sha256 {checksum}")
    return data


def parsed(folder: Path, name: str, parse: Callable[[], T]) -> T:
    """What `parse` makes of the content of a file; that it has the right checksum does not say who wrote it.

    Raises:
        CheckpointError: `parse` found no sense in it.
    """
    try:
        return parse()
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {name}: its content makes no sense: {str(error)[:200]}") from error


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
    step, epoch, files = content.get("step"), content.get("epoch"), content.get("files")
    if not _is_count(step) or not _is_count(epoch) or "info" not in content:
        raise _bad(folder, MANIFEST, "step, epoch and info", f"step {str(step)[:80]}, epoch {str(epoch)[:80]}")
    if not isinstance(files, dict) or not {TREE, TENSORS} <= set(files) <= {MODEL, TREE, TENSORS}:
        raise _bad(folder, MANIFEST, f"the files {TREE}, {TENSORS} and perhaps {MODEL}", str(files)[:200])
    for entry in files.values():
        if not isinstance(entry, dict) or not _is_count(entry.get("size")) or not isinstance(entry.get("sha256"), str):
            raise _bad(folder, MANIFEST, "a size and a sha256 for each file", str(entry)[:200])


def _bad(folder: Path, name: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(f"{folder}: {name}: expected {expected}, got {got}")


def _kind(path: Path) -> str:
    if not path.exists():
        return "nothing of that name"
    return "a folder" if path.is_dir() else "a file" if path.is_file() else "something else"


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 10**18


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
