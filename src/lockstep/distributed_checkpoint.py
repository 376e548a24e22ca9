"""Writes a checkpoint in parts, one from each worker, and reads of it what each needs, by torch.distributed.checkpoint.

What torch plans (who writes which part of which tensor, who reads what from where) is torch's; the files are ours:
safetensors, with their layout as JSON beside them in place of torch's own file of metadata, which is a pickle.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

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

from . import manifest
from .checkpoint import CheckpointStore, check_pieces
from .communicator import Communicator
from .errors import CheckpointError
from .manifest import MANIFEST, PARTS, TREE, part_name
from .packing import Entry, Json, StoredTensor, code_of, copy_piece, cpu_copy, pack, to_json, write_bytes, write_tensors

__all__ = ["fill", "prepare"]

_POLL = 0.1
"""Seconds between two looks at whether the other workers have written their parts, in the background."""

_GRACE = 60.0
"""Seconds that rank 0 waits for the others' parts when its run has failed: who has died writes nothing more."""

Exchange = Callable[[Json], list[Json]]
"""Every worker's outcome of writing its part, in rank order; on workers but rank 0 perhaps nothing."""


def prepare(
    store: CheckpointStore,
    comm: Communicator,
    state: Mapping[str, Any],
    more: Callable[[], Mapping[str, Any]],
    *,
    step: int,
    epoch: int,
    info: Mapping[str, Any],
    copy: bool = False,
    leaving: Callable[[], bool] = lambda: False,
) -> Callable[[], None]:
    """What writes this worker's part of a checkpoint when it is called, once; called by all workers together.

    The checkpoint is there when all of them have done so: rank 0 puts it together.

    Args:
        store: where it goes; all workers see its folder.
        comm: the workers, two or more.
        state: tensors may be a DTensor; of others, and of plain values, those of rank 0 are saved.
        more: called on rank 0 alone: what it adds to the state, without a DTensor.
        step: optimizer steps done.
        epoch: the epoch.
        info: plain values about the run.
        copy: whether tensors are copied now, and what is returned is called in a thread: it then uses no collective.
        leaving: whether this worker's run has ended with an error: others may be gone, and are not waited for long.

    Raises:
        CheckpointError: on every worker, when the folder cannot be made, or is not seen by all.
        ConfigError: `state` or `info` holds something that cannot be stored; names its place.
    """
    head = manifest.head(step=step, epoch=epoch, info=info)
    stack, packed = ExitStack(), []

    def begin() -> Path:
        value, tensors = pack({**state, **more()}, spread=True)
        packed.append((to_json("state", value), tensors))
        needed = len(packed[0][0]) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return stack.enter_context(store.writing(step, needed))

    folder = comm.on_rank0(begin)
    try:
        # The numbers by which tensors are known are given in the order of the state: what is only rank 0's comes last.
        tree, tensors = packed[0] if packed else (b"", pack(dict(state), spread=True)[1])
        _check_seen(comm, folder)
        writer = _save_plan(tensors, comm)
    except BaseException as error:
        stack.__exit__(type(error), error, error.__traceback__)
        raise
    part = {name: cpu_copy(tensor) for name, tensor in writer.tensors.items()} if copy else writer.tensors
    exchange = _over_store(comm, f"{step}/{folder.name}", leaving) if copy else comm.allgather_object

    def write() -> None:
        with stack:  # empty but on rank 0
            outcomes = exchange(_write_part(folder / part_name(comm.rank), part))
            part.clear()
            if comm.rank == 0:
                entries = _entries(store.path(step), outcomes)
                entries[TREE] = write_bytes(folder / TREE, tree)
                entries[PARTS] = write_bytes(folder / PARTS, to_json("state", writer.layout))
                write_bytes(folder / MANIFEST, manifest.render(head, entries))

    return write


def _check_seen(comm: Communicator, folder: Path) -> None:
    blind = [rank for rank, seen in enumerate(comm.allgather_object(folder.is_dir())) if not seen]
    if blind:
        raise CheckpointError(
            f"{folder.parent}: rank {blind[0]} does not see what rank 0 has made there, and each worker writes its "
            "part of a checkpoint. Choose a folder on a file system that all machines share."
        )


def _save_plan(tensors: Mapping[str, Tensor], comm: Communicator) -> _PartWriter:
    writer = _PartWriter(comm.rank)
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    try:
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=comm.group)
    except CheckpointException as error:
        raise _first(error) from None
    return writer


def _write_part(path: Path, tensors: Mapping[str, Tensor]) -> Json:
    try:
        # Flushed here: on another machine than rank 0's, nobody else can do it.
        return asdict(write_tensors(path, tensors, flush=True))
    except OSError as error:
        return {"errno": error.errno, "error": error.strerror or str(error)}
    except Exception as error:
        return {"errno": None, "error": f"{type(error).__name__}: {error}"}


def _entries(path: Path, outcomes: list[Json]) -> dict[str, Entry]:
    """The files of all workers.

    Raises:
        OSError: one could not write its part.
        CheckpointError: for another reason.
    """
    for rank, outcome in enumerate(outcomes):
        if "error" in outcome:
            what = f"{outcome['error']} (rank {rank})"
            raise CheckpointError(f"{path}: {what}") if outcome["errno"] is None else OSError(outcome["errno"], what)
    return {part_name(rank): Entry(**outcome) for rank, outcome in enumerate(outcomes)}


def _over_store(comm: Communicator, number: str, leaving: Callable[[], bool]) -> Exchange:
    """An exchange that is no collective, so that a thread can make it beside the training.

    Args:
        comm: the workers.
        number: the same on all of them, and of no other exchange.
        leaving: see `prepare`.
    """
    # The record of a group's name is the same on its members, and no other group's.
    name = getattr(comm.group, "group_name", "")
    store = PrefixStore(f"lockstep/checkpoint/{name}/{number}", c10d._get_default_store())
    keys = [str(rank) for rank in range(comm.size)]

    def exchange(outcome: Json) -> list[Json]:
        store.set(str(comm.rank), json.dumps(outcome))
        if comm.rank:
            return []
        limit = math.inf
        while not store.check(keys):
            if limit == math.inf and (leaving() or not threading.main_thread().is_alive()):
                limit = time.monotonic() + _GRACE
            if time.monotonic() > limit:
                return [{"errno": None, "error": "the run ended before all workers had written their parts"}]
            time.sleep(_POLL)
        found = [json.loads(store.get(key)) for key in keys]
        for key in keys:
            store.delete_key(key)
        return found

    return exchange


def fill(targets: Mapping[str, tuple[Tensor, StoredTensor]], comm: Communicator) -> None:
    """Read stored tensors into those that are here, of a DTensor this worker's part alone; called by all together.

    Args:
        targets: by any name, the same on all workers: what is filled, and with what; of the same shape.
        comm: the workers, two or more.

    Raises:
        CheckpointError: on every worker, when one cannot read its part; some tensors may have been filled.
    """
    real = {name: _real(target, stored) for name, (target, stored) in targets.items()}
    reader = _PartReader({name: stored for name, (_, stored) in targets.items()})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        load(cast(Any, real), storage_reader=reader, planner=planner, process_group=comm.group)
    except CheckpointException as error:
        raise _first(error) from None


def _real(target: Tensor, stored: StoredTensor) -> Tensor:
    return torch.view_as_real(target) if stored.is_complex else target


def _first(error: CheckpointException) -> BaseException:
    """What went wrong on the first worker on which something did."""
    rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if isinstance(reason, CheckpointError):
        return reason
    return CheckpointError(f"a checkpoint in parts: rank {rank}: {type(reason).__name__}: {reason}")


class _PartWriter(StorageWriter):
    """Finds out which tensors this worker is to write, and on rank 0 how all fit together; writes nothing itself.

    Attributes:
        tensors: parts of tensors as they are here, by their names in this worker's file.
        layout: on rank 0, what `PARTS` holds.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.tensors: dict[str, Tensor] = {}
        self.layout: dict[str, Json] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: it is used once."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Nothing to be set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Note what is to be written."""
        results = []
        for item in plan.items:
            data: Any = item.tensor_data
            sizes = tuple(data.chunk.sizes)
            if math.prod(sizes):
                name = f"{item.index.fqn}.{item.index.index}"
                tensor = self.tensors[name] = cast(Tensor, planner.resolve_data(item)).detach()
                results.append(WriteResult(item.index, tensor.nbytes, (part_name(self._rank), name, sizes)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note where everything will be."""
        for key, described in metadata.state_dict_metadata.items():
            whole = cast(TensorStorageMetadata, described)
            self.layout[key] = {"dtype": code_of(whole.properties.dtype), "shape": list(whole.size), "pieces": []}
        for result in (result for from_one in results for result in from_one):
            file, name, sizes = result.storage_data
            offsets = list(cast(torch.Size, result.index.offset))
            self.layout[result.index.fqn]["pieces"].append([file, name, offsets, list(sizes)])
        for told in self.layout.values():
            check_pieces(told["shape"], [(offsets, sizes) for _, _, offsets, sizes in told["pieces"]])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is never chosen by a path."""
        return False


class _PartReader(StorageReader):
    """Reads what torch has planned from the files in which stored tensors are.

    Args:
        stored: by the names of the plan.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: it is used once."""

    def read_metadata(self) -> Metadata:
        """What the stored tensors say of themselves."""
        return Metadata({name: _described(tensor) for name, tensor in self._stored.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read it, a block after the other."""
        for item in plan.items:
            index = cast(int, item.storage_index.index)
            target = planner.resolve_tensor(item).detach()
            copy_piece(target, self._stored[item.storage_index.fqn].pieces[index], item.storage_offsets)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is never chosen by a path."""
        return False


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in tensor.pieces]
    return TensorStorageMetadata(TensorProperties(tensor.stored_dtype), torch.Size(tensor.stored_shape), chunks)
