"""Checkpoints of known content, and forged ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from lockstep.checkpoint.folder import CheckpointStore, read

FILES = ["manifest.json", "model.safetensors", "state.json", "state.safetensors"]


def state(step: int, size: int = 4) -> dict[str, Any]:
    """A state that differs from that of any other step in every file."""
    return {
        "model": {
            "b.weight": torch.full((size,), step, dtype=torch.bfloat16),
            "a.bias": torch.tensor(float(step)),
        },
        "optimizer": {
            "state": {0: {"step": float(step), "exp_avg": torch.full((size,), -float(step))}}
        },
        "position": (step, [None, True, "text"]),
    }


def save(store: CheckpointStore, step: int, size: int = 4) -> Path:
    """Save that state."""
    return store.save(
        state(step, size),
        step=step,
        epoch=step // 2,
        info={"loss": float("nan"), "pair": (1, step)},
    )


def holds(path: Path, step: int, size: int = 4) -> bool:
    """Whether the checkpoint holds just what was saved at `step`, down to types and the order of
    keys.
    """
    found = read(path)
    assert (found.path, found.step, found.epoch) == (path, step, step // 2)
    assert repr(found.info) == repr({"loss": float("nan"), "pair": (1, step)})
    wanted = state(step, size)
    return repr({name: found.state[name] for name in wanted}) == repr(wanted) and len(
        found.state
    ) == len(wanted)


def names(folder: Path) -> list[str]:
    """What is in a folder, hidden things too."""
    return sorted(path.name for path in folder.iterdir())


def snapshot(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def seal(path: Path, content: Any) -> None:
    """Write a manifest with a checksum that is right."""
    checksum = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    path.joinpath("manifest.json").write_text(
        json.dumps({"content": content, "sha256": checksum}, indent=1)
    )


def forge(path: Path, **changes: Any) -> None:
    """Change the manifest of a checkpoint as someone would who means harm."""
    content = json.loads(path.joinpath("manifest.json").read_bytes())["content"]
    seal(path, {**content, **changes})


def plant(path: Path, name: str, data: bytes) -> None:
    """Give a checkpoint another file, with the size and the checksum that belong to it."""
    path.joinpath(name).write_bytes(data)
    content = json.loads(path.joinpath("manifest.json").read_bytes())["content"]
    content["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal(path, content)


def in_parts(path: Path) -> Path:
    """Make of a checkpoint one that two workers have written in parts, by the description of the
    format.
    """
    content = json.loads(path.joinpath("manifest.json").read_bytes())["content"]
    state = read(path).state
    model, moment = state["model"], state["optimizer"]["state"][0]["exp_avg"]
    tree = json.loads(path.joinpath("state.json").read_bytes())
    tree["model"] = {"b.weight": {"$tensor": "0"}, "a.bias": {"$tensor": "1"}}
    tree["optimizer"]["state"]["$items"][0][1]["exp_avg"] = {"$tensor": "2"}
    half = len(moment) // 2
    parts = [
        {"0.0": model["b.weight"][:half], "1.0": model["a.bias"], "2.0": moment[:1]},
        {"0.1": model["b.weight"][half:], "2.1": moment[1:]},
    ]
    names_of = ["part-00000.safetensors", "part-00001.safetensors"]
    layout = {
        "0": {"dtype": "BF16", "shape": [len(moment)], "pieces": []},
        "1": {"dtype": "F32", "shape": [], "pieces": []},
        "2": {"dtype": "F32", "shape": [len(moment)], "pieces": []},
    }
    for name, part in zip(names_of, parts, strict=True):
        for key, tensor in part.items():
            told: Any = layout[key[0]]
            end = sum(sizes[0] for _, _, _, sizes in told["pieces"]) if told["shape"] else 0
            told["pieces"].append([name, key, [end][: tensor.dim()], list(tensor.shape)])
    for old in ("model.safetensors", "state.safetensors"):
        path.joinpath(old).unlink()
    seal(path, {**content, "files": {}})
    plant(path, "state.json", json.dumps(tree).encode())
    plant(path, "parts.json", json.dumps(layout).encode())
    for name, part in zip(names_of, parts, strict=True):
        plant(
            path,
            name,
            safetensors.torch.save({key: tensor.clone() for key, tensor in part.items()}),
        )
    return path


@contextlib.contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    """A file with other content, as long as the block lasts."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)
