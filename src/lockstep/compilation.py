"""Compilation with `torch.compile`, with fallbacks, and export of models with `torch.export` and
ONNX.
"""

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
from torch.utils._pytree import tree_map  # torch.export uses it for arguments

from . import arguments
from .errors import ConfigError, LockstepError, MissingPackageError
from .parallel.nested import map_tensors
from .parallel.replicas.copies import replicate
from .parallel.replicas.scatter import leaves
from .system.atomic_files import write_bytes

__all__ = ["compile_or_fallback", "export"]

_ONNX = ("onnx", "onnxscript", "onnxruntime")


def compile_or_fallback(model: nn.Module, **options: Any) -> nn.Module:
    """Compile `model` in place from its next call on; its state dict keeps its names.

    The first call with each kind of input takes seconds to minutes, while `torch.compile` compiles
    the model. A model that cannot be compiled as one graph is compiled with graph breaks, and one
    that cannot be compiled at all runs uncompiled; a single warning names the reason. Small models
    may run slower than before: measure. Register hooks before the first call; later hooks may not
    run.

    Args:
        model: any module.
        options: options of `torch.compile`, e.g. ``mode="max-autotune"``, ``dynamic=True``,
            ``backend="aot_eager"``.

    Returns:
        `model`.

    Raises:
        ConfigError: if `model` is not a module.
    """
    arguments.instance("model", model, nn.Module, "a module")
    uncompiled = _uncompiled_call(model)
    fullgraph = bool(options.pop("fullgraph", True))
    attempts: list[tuple[Callable[..., Any], str]] = (
        [(torch.compile(uncompiled, fullgraph=True, **options), "as one program")]
        if fullgraph
        else []
    )
    attempts += [
        (torch.compile(uncompiled, fullgraph=False, **options), "in parts"),
        (uncompiled, "uncompiled"),
    ]

    def call(*args: Any, **kwargs: Any) -> Any:
        reason: Exception | None = None
        for number, (attempt, how) in enumerate(attempts):
            try:
                output = attempt(*args, **kwargs)
            except Exception as error:
                # The last attempt is the uncompiled model: an error there is one of the model or
                # its inputs.
                if number == len(attempts) - 1 or not _is_compiler_error(error):
                    raise
                reason = error
                continue
            if reason is not None:
                message = (
                    f"{type(model).__name__} runs {how}, not {attempts[number - 1][1]}: "
                    f"{_first_lines(reason)}"
                )
                warnings.warn(f"compile_or_fallback: {message}", RuntimeWarning, stacklevel=2)
                del attempts[:number]
            return output
        raise AssertionError("the last attempt returns or raises")

    model._compiled_call_impl = call
    return model


def _uncompiled_call(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls `model` uncompiled, with its own code object."""

    def uncompiled(*args: Any, **kwargs: Any) -> Any:  # torch.compile skips torch's own functions
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # Torch caches compiled programs by code object, eight for each: models that shared one would
    # evict each other's programs, and run each other's, without their own hooks.
    uncompiled.__code__ = uncompiled.__code__.replace(co_name=f"uncompiled_{id(model)}")
    return uncompiled


def _is_compiler_error(error: BaseException) -> bool:
    return type(error).__module__.startswith(
        ("torch._dynamo", "torch._inductor", "torch._functorch")
    )


def _first_lines(error: BaseException) -> str:
    """Return the message of a compiler error, without the advice and stack traces that follow
    it.
    """
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if line.strip() and "TORCHDYNAMO" not in line
    ]
    return " ".join(lines[:3]) or type(error).__name__


def export(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    onnx: bool | None = None,
) -> list[Path]:
    """Save the model as a program that `torch.export.load(path).module()` runs without the model's
    source code.

    The program is traced in evaluation mode, on the CPU. It is loaded again and run on the example
    before the file appears under its name, so that every written file gives the model's outputs.

    Args:
        model: any module that `torch.export` can trace; it is not changed.
        example: example inputs: a tensor or a tuple of arguments, of at least two samples for a
            dynamic batch size.
        path: path of the file, by convention with the suffix ``.pt2``; the ONNX file has the suffix
            ``.onnx`` instead.
        dynamic_shapes: see `torch.export.export`; when None, the first dimension of every tensor is
            dynamic where the model allows it.
        onnx: whether to write an ONNX file as well, checked with onnxruntime; when None, it is
            written if the extra "onnx" is installed and the model can be converted, and a warning
            names the reason otherwise.

    Returns:
        The files that were written.

    Raises:
        ConfigError: if the model cannot be traced or converted to ONNX, the extra is missing, or
            `path` cannot be written.
        LockstepError: if a saved program gives other outputs than the model; nothing is written
            then.
    """
    if arguments.output_file("path", path).suffix == ".onnx":
        hint = "The ONNX file has the suffix .onnx."
        raise ConfigError("path", "another suffix, such as .pt2", got=str(path), hint=hint)
    missing = [name for name in _ONNX if importlib.util.find_spec(name) is None]
    if onnx and missing:
        raise MissingPackageError("onnx", missing[0], "onnx")
    args = example if isinstance(example, tuple) else (example,)
    args = map_tensors(lambda tensor: tensor.detach().cpu(), args)
    # Data-parallel wrappers, torch's and Lockstep's, have `device_ids`; in other models `module`
    # may be a submodule.
    unwrapped = model.module if hasattr(model, "device_ids") else model
    copied: nn.Module = replicate(unwrapped, ["cpu"])[0].eval()
    if dynamic_shapes is None:
        # the names that torch.export uses
        by_name = inspect.signature(copied.forward).bind(*args).arguments
        dynamic_shapes = tree_map(_dynamic_first_dim, dict(by_name))
    with torch.no_grad():
        expected = copied(*args)
        program = _trace(copied, args, dynamic_shapes)
    files = {Path(path): _to_archive(program, args, expected)}
    if onnx or (onnx is None and not missing):
        try:
            files[Path(path).with_suffix(".onnx")] = _to_onnx(program, args, expected)
        except ConfigError as error:
            if onnx:
                raise
            warnings.warn(
                f"export: no ONNX file was written. {error}", RuntimeWarning, stacklevel=2
            )
    for file, data in files.items():
        write_bytes(file, data)
    return list(files)


def _dynamic_first_dim(argument: Any) -> Mapping[int, Any] | None:
    if not isinstance(argument, torch.Tensor):
        return None
    return {0: torch.export.Dim.AUTO} if argument.dim() else {}


def _trace(model: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any) -> Any:
    try:
        return torch.export.export(model, args, dynamic_shapes=dynamic_shapes)
    except Exception as error:
        raise ConfigError(
            "model",
            "a module that torch.export can trace",
            found=f"{type(model).__name__} ({_first_lines(error)})",
            hint="Control flow that depends on values of tensors cannot be traced.",
        ) from error


def _to_archive(program: Any, args: tuple[Any, ...], expected: Any) -> bytes:
    """Return a traced program as an archive of `torch.export`, checked against the `expected`
    outputs.
    """
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    with torch.no_grad():
        outputs = torch.export.load(buffer).module()(*args)
    _check_outputs("archive", [t for _, t in leaves(outputs)], [t for _, t in leaves(expected)])
    return buffer.getvalue()


def _to_onnx(program: Any, args: tuple[Any, ...], expected: Any) -> bytes:
    """Return a traced program as an ONNX file, checked against the `expected` outputs."""
    onnxruntime: Any = importlib.import_module("onnxruntime")

    with tempfile.TemporaryDirectory(prefix="lockstep-onnx-") as folder, _quiet_exporter():
        file = Path(folder) / "model.onnx"
        try:
            torch.onnx.export(program, args, file, external_data=False, verbose=False)
        except torch.onnx.OnnxExporterError as error:
            raise ConfigError(
                "model", "one that has an ONNX form", found=_innermost_message(error)
            ) from error
        data = file.read_bytes()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    tensors = [tensor for _, tensor in leaves(args)]
    inputs = {
        slot.name: tensor.numpy()
        for slot, tensor in zip(session.get_inputs(), tensors, strict=True)
    }
    outputs = [torch.from_numpy(array) for array in session.run(None, inputs)]
    _check_outputs("ONNX", outputs, [t for _, t in leaves(expected)])
    return data


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence the exporter's warnings about its own use of torch and about optional packages."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _innermost_message(error: BaseException) -> str:
    """Return the message of the innermost exception; the outer ones repeat how to report it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _first_lines(error)


def _check_outputs(kind: str, outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    try:
        torch.testing.assert_close(outputs, expected, equal_nan=True)
    except AssertionError as error:
        raise LockstepError(
            f"export: expected the {kind} program to give the model's outputs on the example, got "
            f"others: {_first_lines(error)}. Nothing was written."
        ) from None
