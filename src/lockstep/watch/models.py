"""DistributedDataParallel under watch: models that differ are named, and its backward raises what has gone wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .replacing import Replaced

if TYPE_CHECKING:
    from .view import Session

__all__ = ["replacements"]


def replacements(session: Session) -> list[Replaced]:
    """What has to be replaced in torch for that, while the session lasts."""
    import torch.nn.parallel.distributed as ddp

    def compared(original: Callable[..., Any]) -> Callable[..., Any]:
        def verify(process_group: Any, tensors: Iterable[torch.Tensor], logger: Any = None) -> Any:
            tensors = list(tensors)
            member = getattr(process_group, "watch_member", None)
            if member is not None:
                # no call of c10d's: only a record, at which ranks with another model find each other
                made = getattr(sys._getframe(1).f_locals.get("self"), "module", None)
                started = member.enter("model", _layout(tensors, made))
                if member.agreement is not None:
                    with session.blocking(started.number, member.ranks):
                        member.agreement.ask(started, at_once=True).check()
                member.leave(started, started.entered)
            return original(process_group, tensors, logger)

        return verify

    def explained(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except RuntimeError as error:
                session.explain(error)
                raise

        return run

    return [
        Replaced(ddp, "_verify_param_shape_across_processes", compared),
        Replaced(torch.autograd, "_engine_run_backward", explained),
    ]


def _layout(tensors: list[torch.Tensor], model: torch.nn.Module | None) -> tuple[Any, ...]:
    """Shape, dtype, name and layer of each: two layers of one shape may have changed places."""
    names = {
        id(tensor): f"{f'{path}.' * bool(path)}{name} of {type(layer).__name__}"
        for path, layer in (model.named_modules() if model is not None else ())
        for name, tensor in layer.named_parameters(recurse=False)
    }
    return tuple(((tensor.shape, tensor.dtype), names.get(id(tensor), "")) for tensor in tensors)
