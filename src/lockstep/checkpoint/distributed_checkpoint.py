"""Writes a checkpoint as one file per worker, and reads the parts that a worker needs
(torch.distributed.checkpoint).

torch plans which worker writes or reads which part of which tensor. The file format is Lockstep's
own: safetensors, and their layout as JSON in place of torch's metadata file, which is a pickle.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from .. import messages
from ..communicator import Communicator
from ..errors import CheckpointError
from ..stores import read_message
from . import manifest
from .folder import CheckpointStore, check_pieces
from .manifest import MANIFEST, PARTS, TREE, part_name
from .serialization import (
    Entry,
    Json,
    StoredTensor,
    code_of,
    copy_piece,
    cpu_copy,
    pack,
    to_json,
    write_bytes,
    write_tensors,
)

_POLL = 0.1
"""Seconds between checks whether the other workers have written their parts, in the background."""

_GRACE = 60.0
"""Seconds that rank 0 waits for the other workers' parts after its run has failed: some workers may
have died.
"""


class PartResult(msgspec.Struct, frozen=True):
    """The file that a worker has written, or why it could not write it, with its errno if that was
    an OSError.
    """

    entry: Entry | None = None
    error: str = ""
    errno: int | None = None


Exchange = Callable[[PartResult], list[PartResult]]
"""Gathers the result of writing a part from all workers, in rank order; may return [] on ranks
other than 0.
"""


def prepare(
    store: CheckpointStore,
    comm: Communicator,
    state: Mapping[str, Any],
    rank0_state: Callable[[], Mapping[str, Any]],
    *,
    step: int,
    epoch: int,
    info: Mapping[str, Any],
    copy: bool = False,
    aborting: Callable[[], bool] = lambda: False,
) -> Callable[[], None]:
    """Prepare a checkpoint, and return the function that writes this worker's part of it; all
    workers must call both.

    The checkpoint is complete when every worker has called the returned function, once: rank 0 then
    writes the manifest.

    Args:
        store: the checkpoints of the run, in a folder that all workers can access.
        comm: communicator over the workers, two or more.
        state: the state to save. Of a DTensor each worker saves its shard; of other tensors and
            plain values, rank 0's are saved.
        rank0_state: called on rank 0 only; returns further entries of the state, without a DTensor.
        step: optimizer steps done.
        epoch: the epoch.
        info: plain values about the run.
        copy: copy the tensors now, so that the returned function can run in a thread; it then uses
            no collective.
        aborting: returns whether this worker's run has failed: rank 0 then does not wait long for
            the other workers.

    Raises:
        CheckpointError: on every worker, if the folder cannot be created, or a worker cannot access
            it.
        ConfigError: `state` or `info` holds something that cannot be stored; names its place.
    """
    head = manifest.head(step=step, epoch=epoch, info=info)
    stack = ExitStack()
    packed = []

    def begin() -> Path:
        value, tensors = pack({**state, **rank0_state()}, allow_dtensor=True)
        packed.append((to_json("state", value), tensors))
        needed = len(packed[0][0]) + sum(
            tensor.numel() * tensor.element_size() for tensor in tensors.values()
        )
        return stack.enter_context(store.writing(step, needed))

    folder = comm.on_rank0(begin)
    try:
        # Tensors are numbered in the order of the state. The entries that only rank 0 has follow
        # all others, so that the numbers of the others are the same on all ranks.
        tree, tensors = packed[0] if packed else (b"", pack(dict(state), allow_dtensor=True)[1])
        _check_shared(comm, folder)
        writer = _save_plan(tensors, comm)
    except BaseException as error:
        stack.__exit__(type(error), error, error.__traceback__)
        raise
    part = (
        {name: cpu_copy(tensor) for name, tensor in writer.tensors.items()}
        if copy
        else writer.tensors
    )
    exchange = (
        _exchange_over_store(comm, f"{step}/{folder.name}", aborting)
        if copy
        else comm.allgather_object
    )

    def write() -> None:
        with stack:  # empty on ranks other than 0
            results = exchange(_write_part(folder / part_name(comm.rank), part))
            part.clear()
            if comm.rank == 0:
                entries = _entries(store.path(step), results)
                entries[TREE] = write_bytes(folder / TREE, tree)
                entries[PARTS] = write_bytes(folder / PARTS, to_json("state", writer.layout))
                write_bytes(folder / MANIFEST, manifest.render(head, entries))

    return write


def _check_shared(comm: Communicator, folder: Path) -> None:
    missing = [
        rank for rank, exists in enumerate(comm.allgather_object(folder.is_dir())) if not exists
    ]
    if missing:
        raise CheckpointError(
            f"{folder.parent}: rank {missing[0]} does not see the folder that rank 0 created "
            "there, and each worker writes its part of a checkpoint. Choose a folder on a file "
            "system that all hosts share."
        )


def _save_plan(tensors: Mapping[str, Tensor], comm: Communicator) -> _PartWriter:
    writer = _PartWriter(comm.rank)
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    try:
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=comm.group)
    except CheckpointException as error:
        raise _first_error(error) from None
    return writer


def _write_part(path: Path, tensors: Mapping[str, Tensor]) -> PartResult:
    try:
        # Flushed by this worker: rank 0 may be on another host, and cannot flush it.
        return PartResult(write_tensors(path, tensors, flush=True))
    except OSError as error:
        return PartResult(error=error.strerror or str(error), errno=error.errno)
    except Exception as error:
        return PartResult(error=f"{type(error).__name__}: {error}")


def _entries(path: Path, results: list[PartResult]) -> dict[str, Entry]:
    """Return the manifest's entries for the files of all workers.

    Raises:
        OSError: a worker could not write its part because of an OSError.
        CheckpointError: a worker could not write its part for another reason.
    """
    entries = {}
    for rank, result in enumerate(results):
        if result.entry is None:
            reason = f"{result.error or 'no result'} (rank {rank})"
            if result.errno is None:
                raise CheckpointError(f"{path}: {reason}")
            raise OSError(result.errno, reason)
        entries[part_name(rank)] = result.entry
    return entries


def _exchange_over_store(comm: Communicator, key: str, aborting: Callable[[], bool]) -> Exchange:
    """Return an `Exchange` that uses no collective, so that a thread can call it during training.

    Args:
        comm: communicator over the workers.
        key: the same on all workers, and unique to this exchange.
        aborting: see `prepare`.
    """
    # A group's name is the same on all its members, and differs from that of every other group.
    name = getattr(comm.group, "group_name", "")
    store = PrefixStore(f"lockstep/checkpoint/{name}/{key}", c10d._get_default_store())
    keys = [str(rank) for rank in range(comm.size)]

    def exchange(result: PartResult) -> list[PartResult]:
        store.set(str(comm.rank), messages.encode(result))
        if comm.rank:
            return []
        limit = math.inf
        while not store.check(keys):
            if limit == math.inf and (aborting() or not threading.main_thread().is_alive()):
                limit = time.monotonic() + _GRACE
            if time.monotonic() > limit:
                return [
                    PartResult(error="the run ended before all workers had written their parts")
                ]
            time.sleep(_POLL)
        results = [
            read_message(store.get(key), PartResult, f"what rank {key} has written") for key in keys
        ]
        for key in keys:
            store.delete_key(key)
        return results

    return exchange


def load_tensors(targets: Mapping[str, tuple[Tensor, StoredTensor]], comm: Communicator) -> None:
    """Read stored tensors into existing ones; of a DTensor, only this worker's shard. All workers
    must call it.

    Args:
        targets: name → (the tensor to fill, the stored tensor of the same shape); the names are
            arbitrary, but the same on all workers.
        comm: communicator over the workers, two or more.

    Raises:
        CheckpointError: on every worker, if one cannot read its part; some tensors may have been
            filled by then.
    """
    real = {
        name: torch.view_as_real(target) if stored.is_complex else target
        for name, (target, stored) in targets.items()
    }
    reader = _PartReader({name: stored for name, (_, stored) in targets.items()})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        load(cast(Any, real), storage_reader=reader, planner=planner, process_group=comm.group)
    except CheckpointException as error:
        raise _first_error(error) from None


def _first_error(error: CheckpointException) -> BaseException:
    """Return the error of the lowest rank that failed."""
    rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if isinstance(reason, CheckpointError):
        return reason
    return CheckpointError(
        f"a distributed checkpoint: rank {rank}: {type(reason).__name__}: {reason}"
    )


class _PartWriter(StorageWriter):
    """Records which tensors this worker must write, and on rank 0 the layout of all of them; writes
    nothing itself.

    Attributes:
        tensors: this worker's parts of tensors, by their names in this worker's file.
        layout: on rank 0, the content of the file `PARTS`.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.tensors: dict[str, Tensor] = {}
        self.layout: dict[str, Json] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: it is used once."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Record the tensors to write."""
        results = []
        for item in plan.items:
            data: Any = item.tensor_data
            sizes = tuple(data.chunk.sizes)
            if math.prod(sizes):
                name = f"{item.index.fqn}.{item.index.index}"
                tensor = self.tensors[name] = cast(Tensor, planner.resolve_data(item)).detach()
                results.append(
                    WriteResult(item.index, tensor.nbytes, (part_name(self._rank), name, sizes))
                )
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Record in which file each piece of each tensor will be."""
        for key, entry in metadata.state_dict_metadata.items():
            tensor = cast(TensorStorageMetadata, entry)
            self.layout[key] = {
                "dtype": code_of(tensor.properties.dtype),
                "shape": list(tensor.size),
                "pieces": [],
            }
        for result in itertools.chain.from_iterable(results):
            file, name, sizes = result.storage_data
            offsets = list(cast(torch.Size, result.index.offset))
            self.layout[result.index.fqn]["pieces"].append([file, name, offsets, list(sizes)])
        for layout in self.layout.values():
            check_pieces(
                layout["shape"], [(offsets, sizes) for _, _, offsets, sizes in layout["pieces"]]
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a path does not select this class."""
        return False


class _PartReader(StorageReader):
    """Reads the parts that torch has planned from the files of stored tensors.

    Args:
        stored: the stored tensors, by their names in the plan.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: it is used once."""

    def read_metadata(self) -> Metadata:
        """Return the dtypes, shapes and pieces of the stored tensors."""
        return Metadata({name: _tensor_metadata(tensor) for name, tensor in self._stored.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned parts, a block at a time."""
        for item in plan.items:
            index = cast(int, item.storage_index.index)
            target = planner.resolve_tensor(item).detach()
            copy_piece(
                target, self._stored[item.storage_index.fqn].pieces[index], item.storage_offsets
            )
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a path does not select this class."""
        return False


def _tensor_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        for piece in tensor.pieces
    ]
    return TensorStorageMetadata(
        TensorProperties(tensor.stored_dtype), torch.Size(tensor.stored_shape), chunks
    )
