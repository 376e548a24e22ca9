"""Golden results: stored fingerprints of results, by the version of torch and the type of processor
that made them.
"""

from __future__ import annotations

import hashlib
import platform
import re
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from ..system import atomic_files
from .results import as_entries

_VALUES = 4  # of a tensor that are stored, for messages


class Maker(msgspec.Struct, frozen=True, order=True):
    """What the bits of a result depend on, besides the program.

    Attributes:
        torch: the version of torch.
        cpu: the architecture, the instruction set that torch uses, and the model of the processor.
        device: "cpu", or the name of the GPU.
    """

    torch: str
    cpu: str
    device: str

    def __str__(self) -> str:
        return f"torch {self.torch}, {self.cpu}" + (
            "" if self.device == "cpu" else f", {self.device}"
        )


class _Entry(msgspec.Struct, frozen=True):
    """A tensor or a value of a golden result.

    Attributes:
        kind: dtype and shape of a tensor, or the type of a value.
        digest: SHA-256 of the bytes of a tensor, or of the text of a value.
        values: the first values, as texts.
        norm: the 2-norm of a tensor, as a text.
    """

    kind: str
    digest: str
    values: tuple[str, ...]
    norm: str = ""


class _Result(msgspec.Struct, frozen=True):
    """A golden result of one maker."""

    maker: Maker
    entries: dict[str, _Entry]


class _File(msgspec.Struct, frozen=True):
    """All golden results of one name."""

    format: str
    results: list[_Result]


class MadeElsewhereError(Exception):
    """There are golden results, but none that this torch and this processor have made."""


def this_maker() -> Maker:
    """Return what results of this process depend on."""
    instructions = torch.backends.cpu.get_cpu_capability()
    cpu = f"{platform.machine()} {instructions} ({_processor()})"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Maker(str(torch.__version__), cpu, device)


def _processor() -> str:
    """Return the model of the processor, for which libraries of linear algebra choose their
    kernels.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    lines = re.findall(
        r"^(model name|cpu family|model|CPU implementer|CPU part)\s*:\s*(.+?)\s*$",
        text,
        re.MULTILINE,
    )
    first = dict(reversed(lines))  # of the first core, as later entries replace earlier ones
    name = first.pop("model name", "")
    return ", ".join(
        [*([name] if name else []), *(f"{key} {value}" for key, value in sorted(first.items()))]
    ) or (platform.processor() or "unknown processor")


class Golden:
    """Compares results with stored ones; the fixture ``lockstep_golden`` is one, for files beside
    the test.

    A file has a result for each (version of torch, type of processor) that has stored one: bits
    depend on both, and a result is compared with the one of the same torch and processor alone.

    Args:
        folder: of the files; it need not exist.
        name: of the file, without its ending.
        update: store results in place of comparing them.

    Attributes:
        updated: the files that have been written.
    """

    def __init__(self, folder: Path, name: str, update: bool = False) -> None:
        self._folder = folder
        self._name = name
        self._update = update
        self._calls = 0
        self.updated: list[Path] = []

    def __call__(self, result: object, name: str = "") -> None:
        """Assert that a result has the bits of the stored one.

        Args:
            result: a module, a state dict, tensors, numbers, or dicts and lists of them, such as
                what `lockstep.testing.same_at` returns.
            name: of the result, where a test has several; by default they are numbered.

        Raises:
            AssertionError: it differs, and the error names the first entry; or none is stored yet.
            MadeElsewhereError: only other versions of torch or other processors have stored one.
                The fixture skips the test, or fails it, as the option ``lockstep_golden_elsewhere``
                says.
            ConfigError: the result has objects that cannot be compared, or is empty.
            DataError: the file is damaged.
        """
        __tracebackhide__ = True
        self._calls += 1
        suffix = f"-{self._calls}" if self._calls > 1 else ""
        if name:
            suffix = f"-{name}"
        path = self._folder / f"{_file_name(self._name + suffix)}.json"
        entries = {key: _entry(value) for key, value in as_entries(result).items()}
        if not entries:
            raise ConfigError("result", "at least one tensor or value", found="none")
        maker = this_maker()
        stored = {result.maker: result.entries for result in _read(path)}
        if self._update:
            if stored.get(maker) != entries:
                stored[maker] = entries
                _write(path, [_Result(made_by, stored[made_by]) for made_by in sorted(stored)])
                self.updated.append(path)
            return
        if not stored:
            raise AssertionError(
                f"there is no golden result yet: expected {path}. `pytest "
                "--lockstep-update-golden` stores one; look "
                "at it, and commit it."
            )
        if maker not in stored:
            others = "; ".join(str(made_by) for made_by in stored)
            raise MadeElsewhereError(
                f"the golden results in {path} were made elsewhere: by {others}. Here is {maker}, "
                "whose bits may "
                "differ. `pytest --lockstep-update-golden` adds a result of this host, from a "
                "version of the program "
                "that is known to be right."
            )
        text = _describe(stored[maker], entries)
        if text is not None:
            raise AssertionError(
                f"another result than the golden one in {path}, of the same torch and processor "
                f"({maker}): {text}\n"
                "If that is meant, `pytest --lockstep-update-golden` stores the new one."
            )


def _file_name(name: str) -> str:
    """Return a name as one of a file; where characters are replaced, a digest keeps names apart."""
    plain = re.sub(r"[^\w.\-]+", "-", name).strip("-.") or "result"
    if plain == name and len(plain) <= 100:
        return plain
    return f"{plain[:100]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _entry(value: Any) -> _Entry:
    if not isinstance(value, Tensor):
        text = repr(value)
        return _Entry(
            type(value).__name__, hashlib.sha256(text.encode()).hexdigest(), (text[:100],)
        )
    flat = value.reshape(-1)
    digest = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
    numbers = flat.abs().double() if flat.is_complex() else flat.double()
    kind = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    values = tuple(repr(value) for value in flat[:_VALUES].tolist())
    return _Entry(kind, digest, values, f"{float(numbers.norm()):.9g}")


def _describe(expected: dict[str, _Entry], entries: dict[str, _Entry]) -> str | None:
    """Return how results differ, the first entry first; None if they do not."""
    names = list(dict.fromkeys([*expected, *entries]))
    different = [name for name in names if expected.get(name) != entries.get(name)]
    if not different:
        return None
    name = different[0]
    if name not in entries:
        text = f"{name} is missing"
    elif name not in expected:
        text = f"{name} is new"
    else:
        one = expected[name]
        other = entries[name]
        parts = [
            f"{name} is {other.kind}" + (f", was {one.kind}" if other.kind != one.kind else "")
        ]
        parts.append(f"begins with {', '.join(other.values)}, was {', '.join(one.values)}")
        if other.norm:
            parts.append(f"has norm {other.norm}, was {one.norm}")
        text = "; ".join(parts)
    return f"{len(different)} of {len(names)} entries differ; the first: {text}."


def _read(path: Path) -> list[_Result]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    try:
        return msgspec.json.decode(data, type=_File).results
    except msgspec.DecodeError as error:
        raise DataError(
            f"{path}: expected a file of golden results, got one that is damaged ({error}). "
            "Restore it from version "
            "control, or delete it and store results again with `pytest --lockstep-update-golden`."
        ) from None


def _write(path: Path, results: list[_Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(
        msgspec.json.encode(_File("golden results of lockstep.testing, 1", results)), indent=1
    )
    atomic_files.write_bytes(path, text + b"\n")
