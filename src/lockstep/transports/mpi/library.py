"""mpi4py, which is optional and starts MPI when it is imported, and tensors as MPI buffers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ...errors import ConfigError
from ..runtime.tensor_arguments import Tensors, flatten

_LEVELS = ("single", "funneled", "serialized")


@cache
def load_mpi() -> Any:
    """Return the module `mpi4py.MPI`, with MPI started.

    Raises:
        ConfigError: mpi4py or an MPI is not installed, or MPI was started for one thread alone.
    """
    try:
        from mpi4py import MPI
    # the second when there is no MPI library for it to load_mpi
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "backend",
            "one whose packages are installed",
            found=f"mpi4py, which cannot be imported ({error})",
            hint="Install it with an MPI: pip install 'lockstep-train[mpi]'.",
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "mpi4py.rc.thread_level",
            "multiple, as operations continue in the background",
            _LEVELS[
                [MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED].index(
                    MPI.Query_thread()
                )
            ],
            "Leave mpi4py.rc as it is, and take an MPI that is built for threads.",
        )
    return MPI


def mpi_buffer(flat: torch.Tensor) -> Any:
    """Return the bytes of `flat`, which is dense, as an MPI buffer; the caller keeps `flat` alive
    until MPI is done.
    """
    return load_mpi().buffer.fromaddress(flat.data_ptr(), flat.numel() * flat.element_size())


def counts_and_displacements(parts: Tensors) -> tuple[list[int], list[int]]:
    """Return the bytes of each part, and their displacements when they are adjacent in memory."""
    sizes = [part.numel() * part.element_size() for part in parts]
    return sizes, [sum(sizes[:i]) for i in range(len(sizes))]


def flatten_all(parts: Tensors) -> torch.Tensor:
    """Return all elements of `parts` in order: a view where they are adjacent in memory, otherwise
    a copy.
    """
    flats = [flatten(part) for part in parts]
    view = _adjacent_view(flats)
    if view is not None:
        return view
    # as bytes, which can be joined whatever their dtype
    return torch.cat([flat.view(torch.uint8) for flat in flats]).view(flats[0].dtype)


def buffer_for(outputs: Tensors, apart_from: torch.Tensor | None = None) -> torch.Tensor:
    """Return a buffer for all elements of `outputs`: their own memory where they are adjacent,
    otherwise new.

    Args:
        outputs: tensors of one dtype.
        apart_from: memory that the buffer must not share; MPI does not read and write the same
            memory.
    """
    view = None
    if all(
        output.is_contiguous() and not (output.is_neg() or output.is_conj()) for output in outputs
    ):
        view = _adjacent_view([output.view(-1) for output in outputs])
    if view is None or (apart_from is not None and _share_storage(view, apart_from)):
        return outputs[0].new_empty(sum(output.numel() for output in outputs))
    return view


def _share_storage(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether both are in one storage."""
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _adjacent_view(flats: Tensors) -> torch.Tensor | None:
    """Return one flat view of tensors that are adjacent in one storage; None where they are not."""
    filled = [flat for flat in flats if flat.numel()] or list(flats[:1])
    end = filled[0].data_ptr()
    for flat in filled:
        if (
            flat.data_ptr() != end
            or not _share_storage(flat, filled[0])
            or not flat.is_contiguous()
        ):
            return None
        end += flat.numel() * flat.element_size()
    return filled[0].as_strided((sum(flat.numel() for flat in filled),), (1,))
