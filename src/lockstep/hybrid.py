"""Runs models as compiled programs, and saves them as files that need none of their source code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map  # as torch.export walks through arguments

from .atomic import write_bytes
from .data.nested import map_tensors
from .errors import ConfigError, LockstepError
from .replicas.copies import replicate
from .replicas.spread import leaves

__all__ = ["export", "hybridize"]

_ONNX = ("onnx", "onnxscript", "onnxruntime")


def hybridize(model: nn.Module, **options: Any) -> nn.Module:
    """Let `model` run compiled from its next call on; it stays the same object, with the same names in its state.

    The first call of each kind of input takes seconds to minutes, while `torch.compile` makes a program of the model.
    What cannot become one program is compiled in parts, and what cannot be compiled at all runs as before; a warning
    then says why, once. Small models may run slower than before: measure. Hooks are to be registered before that call;
    later ones may not be run.

    Args:
        model: any module.
        options: of `torch.compile`, e.g. ``mode="max-autotune"``, ``dynamic=True``, ``backend="aot_eager"``.

    Returns:
        `model`.

    Raises:
        ConfigError: for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError("model", "a module", found=type(model).__name__)
    as_before = _uncompiled(model)
    fullgraph = bool(options.pop("fullgraph", True))
    ways: list[tuple[Callable[..., Any], str]] = (
        [(torch.compile(as_before, fullgraph=True, **options), "as one program")] if fullgraph else []
    )
    ways += [(torch.compile(as_before, fullgraph=False, **options), "in parts"), (as_before, "uncompiled")]

    def call(*args: Any, **kwargs: Any) -> Any:
        reason: Exception | None = None
        for number, (way, how) in enumerate(ways):
            try:
                found = way(*args, **kwargs)
            except Exception as error:
                # The last way is the model itself: what fails there fails on these inputs, compiled or not.
                if number == len(ways) - 1 or not _is_the_compilers(error):
                    raise
                reason = error
                continue
            if reason is not None:
                said = f"{type(model).__name__} runs {how}, not {ways[number - 1][1]}: {_first_lines(reason)}"
                warnings.warn(f"hybridize: {said}", RuntimeWarning, stacklevel=2)
                del ways[:number]
            return found
        raise AssertionError("the last way returns or raises")

    model._compiled_call_impl = call
    return model


def _uncompiled(model: nn.Module) -> Callable[..., Any]:
    """The call of `model` as torch has it, in a function of its own."""

    def as_before(*args: Any, **kwargs: Any) -> Any:  # torch compiles no function that is its own
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # Torch keeps programs by their code, eight for each: models that shared it would use up each other's share, and run
    # each other's programs, without hooks of their own.
    as_before.__code__ = as_before.__code__.replace(co_name=f"as_before_{id(model)}")
    return as_before


def _is_the_compilers(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _first_lines(error: BaseException) -> str:
    """What an error of the compiler says, without the advice and traces that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "TORCHDYNAMO" not in line]
    return " ".join(lines[:3]) or type(error).__name__


def export(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    onnx: bool | None = None,
) -> list[Path]:
    """Save the model as a program that `torch.export.load(path).module()` runs without the model's source code.

    The program is that of evaluation mode, on the CPU. The saved file is loaded again and run on the example before it
    gets its name: what is there afterwards gives what the model gives.

    Args:
        model: any module that `torch.export` can trace; it stays as it is, wherever it is.
        example: its inputs: a tensor or a tuple of arguments, of at least two samples if their number shall be free.
        path: of the file, ``.pt2`` by custom; ONNX goes beside it, with the suffix ``.onnx``.
        dynamic_shapes: as of `torch.export.export`; with None the first dimension of every tensor is free where the
            model allows it.
        onnx: whether to write ONNX, too, checked with onnxruntime; with None if the extra "onnx" is installed and the
            model has an ONNX form, else a warning says why it has none.

    Returns:
        The files that were written.

    Raises:
        ConfigError: when the model cannot be traced, or cannot be written as ONNX, or the extra is missing, or nothing
            can be written to `path`.
        LockstepError: when a saved program gives other outputs than the model; nothing is written then.
    """
    _check_path(Path(path))
    missing = [name for name in _ONNX if importlib.util.find_spec(name) is None]
    if onnx and missing:
        raise ConfigError(
            "onnx", f"{', '.join(missing)} installed", found="not", hint="pip install 'lockstep-train[onnx]'."
        )
    args = example if isinstance(example, tuple) else (example,)
    args = map_tensors(lambda tensor: tensor.detach().cpu(), args)
    # What spreads a model over devices, torch's or Lockstep's own, holds it as `module`; others may hold a part there.
    whole = model.module if hasattr(model, "device_ids") else model
    copied: nn.Module = replicate(whole, ["cpu"])[0].eval()
    if dynamic_shapes is None:
        named = inspect.signature(copied.forward).bind(*args).arguments  # as torch.export names them
        dynamic_shapes = tree_map(_free_first, dict(named))
    with torch.no_grad():
        expected = copied(*args)
        program = _traced(copied, args, dynamic_shapes)
    files = {Path(path): _archive(program, args, expected)}
    if onnx or (onnx is None and not missing):
        try:
            files[Path(path).with_suffix(".onnx")] = _onnx(program, args, expected)
        except ConfigError as error:
            if onnx:
                raise
            warnings.warn(f"export: no ONNX file was written. {error}", RuntimeWarning, stacklevel=2)
    for file, data in files.items():
        write_bytes(file, data)
    return list(files)


def _check_path(path: Path) -> None:
    if path.suffix == ".onnx":
        raise ConfigError(
            "path", "another suffix, such as .pt2", got=str(path), hint="ONNX goes beside the file that it names."
        )
    if not path.absolute().parent.is_dir():
        raise ConfigError("path", "a file in a folder that is there", got=str(path), hint="Make the folder first.")


def _free_first(argument: Any) -> Mapping[int, Any] | None:
    if not isinstance(argument, torch.Tensor):
        return None
    return {0: torch.export.Dim.AUTO} if argument.dim() else {}


def _traced(model: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any) -> Any:
    try:
        return torch.export.export(model, args, dynamic_shapes=dynamic_shapes)
    except Exception as error:
        raise ConfigError(
            "model",
            "a module that torch.export can trace",
            found=f"{type(model).__name__} ({_first_lines(error)})",
            hint="Control flow that depends on values of tensors cannot be traced.",
        ) from error


def _archive(program: Any, args: tuple[Any, ...], expected: Any) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    with torch.no_grad():
        found = torch.export.load(buffer).module()(*args)
    _check_same("archive", [t for _, t in leaves(found)], [t for _, t in leaves(expected)])
    return buffer.getvalue()


def _onnx(program: Any, args: tuple[Any, ...], expected: Any) -> bytes:
    onnxruntime: Any = importlib.import_module("onnxruntime")

    with tempfile.TemporaryDirectory(prefix="lockstep-onnx-") as folder, _quiet():
        file = Path(folder) / "model.onnx"
        try:
            torch.onnx.export(program, args, file, external_data=False, verbose=False)
        except torch.onnx.OnnxExporterError as error:
            raise ConfigError("model", "one that has an ONNX form", found=_cause(error)) from error
        data = file.read_bytes()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    tensors = [tensor for _, tensor in leaves(args)]
    inputs = {slot.name: tensor.numpy() for slot, tensor in zip(session.get_inputs(), tensors, strict=True)}
    found = [torch.from_numpy(array) for array in session.run(None, inputs)]
    _check_same("ONNX", found, [t for _, t in leaves(expected)])
    return data


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of its own use of torch, and of packages that it could have used."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _cause(error: BaseException) -> str:
    """What the innermost exception says: the outer ones repeat how to report it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _first_lines(error)


def _check_same(kind: str, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        raise LockstepError(
            f"export: expected the {kind} program to give the model's outputs on the example, got others: "
            f"{_first_lines(error)}. Nothing was written."
        ) from None
