"""What a replay looks at in a step: losses and gradients by shard, sample and layer, and the
outputs of all modules.
"""

from __future__ import annotations

import pdb  # noqa: T100 - what `lockstep replay --debug` asks for
from typing import Any, NoReturn

import torch
from typing_extensions import override

from ..communicator import Communicator
from ..data.loader import Batch
from ..parallel.fingerprints import checksum_of
from ..parallel.nested import tensors_of
from ..training.step.shards_alone import shards_of, why_not_alone
from ..training.trainer import Trainer
from .replaying import DebuggerLeft


def gathered(comm: Communicator, part: list[Any]) -> list[Any]:
    """Return the parts of all workers one after the other."""
    return [element for parts in comm.allgather_object(part) for element in parts]


def nothing(trainer: Trainer, dataset: Any, batch: Batch, options: dict[str, Any]) -> None:
    """Look at nothing: the step is only compared."""


def look_into(
    trainer: Trainer, dataset: Any, batch: Batch, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the losses of shards and samples, and the norms of the gradients of shards and
    parameters.
    """
    why = why_not_alone(trainer.step)
    if why:
        return {"why_no_shards": why}
    comm = trainer.comm
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    total = [torch.zeros_like(p) for p in parameters.values()]
    shards: list[list[Any]] = []
    losses: list[list[Any]] = []
    counts = 0.0
    for shard in shards_of(trainer.step, batch):
        loss, count, gradients = shard.gradients()
        torch._foreach_add_(total, gradients)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        shards.append([shard.number, loss / count if count else 0.0, norm, list(shard.indices)])
        with torch.no_grad():
            losses += [
                list(pair) for pair in zip(shard.indices, shard.losses().tolist(), strict=True)
            ]
        counts += count
    counts = sum(comm.allgather_object(counts))
    # The gradients are divided by the number of samples, and the step's by what the loss counts.
    scale = batch.global_size / counts if counts else 1.0
    norms = {
        name: float(comm.allreduce(g).norm()) * scale
        for name, g in zip(parameters, total, strict=True)
    }
    rows = gathered(comm, shards)
    return {
        "shards": [[number, loss, norm * scale, samples] for number, loss, norm, samples in rows],
        "losses": gathered(comm, losses),
        "gradient_norms": norms,
    }


def trace(trainer: Trainer, dataset: Any, batch: Batch, options: dict[str, Any]) -> list[list[Any]]:
    """Return (what, checksum) of all that a step computes, in order: weights, samples, outputs,
    gradients.
    """
    model = trainer.model
    weights = [
        [f"the weights at the beginning of the step: {name}", int(checksum_of([p]))]
        for name, p in model.named_parameters()
    ]
    if why_not_alone(trainer.step):
        return weights
    checksums: list[list[Any]] = []
    names = {module: name or "the model" for name, module in model.named_modules()}
    where = ""

    def note(module: torch.nn.Module, _: Any, output: Any) -> None:
        what = f"{where}output of {names[module]} ({type(module).__name__})"
        checksums.append([what, int(checksum_of(tensors_of(output)))])

    for shard in shards_of(trainer.step, batch):
        where = f"shard {shard.number}, "
        checksums.append(
            [f"{where}the content of its samples", int(checksum_of(tensors_of(shard.data)))]
        )
        handles = [module.register_forward_hook(note) for module in names]
        try:
            loss, _, gradients = shard.gradients()
        finally:
            for handle in handles:
                handle.remove()
        checksums.append([f"{where}the loss", int(checksum_of([torch.tensor(loss)]))])
        for name, gradient in zip(shard.parameters, gradients, strict=True):
            checksums.append([f"{where}gradient of {name}", int(checksum_of([gradient]))])
    return weights + gathered(trainer.comm, checksums)


class _Debugger(pdb.Pdb):
    """Python's debugger; who quits it ends the replay."""

    @override
    def do_quit(self, arg: str) -> NoReturn:
        """Quit the debugger, and end the replay before the end of its step."""
        raise DebuggerLeft(0)

    do_q = do_exit = do_quit
    do_EOF = do_quit  # noqa: N815 - what the debugger calls for Ctrl-D


def debug(trainer: Trainer, dataset: Any, batch: Batch, options: dict[str, Any]) -> None:
    """Open the debugger of Python, with the model, the batch and the samples' numbers at hand."""
    model = trainer.model  # noqa: F841 - for whoever debugs
    indices = batch.indices.tolist()  # noqa: F841 - for whoever debugs
    shards = [] if why_not_alone(trainer.step) else shards_of(trainer.step, batch)  # noqa: F841
    step = trainer.step.steps_done
    print(
        f"step {step}, before its passes. At hand: model, batch, indices, shards, dataset, trainer"
    )
    print("for example: p indices; p shards[0].losses(); c goes on to the end of the step")
    _Debugger().set_trace()
