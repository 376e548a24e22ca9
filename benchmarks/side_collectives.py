"""One side of the collectives benchmark: ranks that carry out the operation they are told to, and
time it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist

from common import keep_freed_memory
from exchanges import Exchange, Place, Verbs, make_exchange, mpi_verbs, pattern, torch_verbs
from meter import Line
from ranks import SHM, join_group, run_ranks


class Nothing(dist.ProcessGroup):
    """A backend that does nothing: what is left is what `torch.distributed` itself takes."""

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        """The name that `new_group` knows."""
        return "nothing"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


def group_of_nothing() -> Any:
    def make(given: Any, options: Any) -> Nothing:
        return Nothing(given.group_rank, given.group_size)  # type: ignore[call-arg]

    dist.Backend.register_backend("nothing", make, extended_api=True, devices=["cpu"])
    return dist.new_group(backend="nothing")


class Side:
    """A rank that takes orders.

    Args:
        place: where it is.
        nothing: a group whose all-reduce does nothing, if there is one.
    """

    def __init__(self, place: Place, nothing: Any) -> None:
        self._place = place
        self._nothing = nothing

    def serve(self, line: Line) -> None:
        """Take turns until the controller has ended."""
        said = line.report({"rank": self._place.rank})
        while said:
            said = line.report({"seconds": self._obey(**json.loads(said))})

    def _obey(self, operation: str, nbytes: int, calls: int, check: bool) -> float:
        """Seconds of one operation; 0 where this rank has no part in it."""
        exchange = self._exchange(operation, nbytes)
        if exchange is not None:
            if check:
                self._check(exchange)
            exchange.call()  # whoever had a turn before has emptied the caches
        self._place.verbs.barrier()
        return 0.0 if exchange is None else _seconds(exchange, calls)

    def _exchange(self, operation: str, nbytes: int) -> Exchange | None:
        if operation == "nothing":
            data = self._place.source[:1]
            group = self._nothing
            return Exchange(lambda: dist.all_reduce(data, group=group), data, lambda: True)
        return make_exchange(operation, self._place, nbytes)

    def _check(self, exchange: Exchange) -> None:
        exchange.source.copy_(pattern(self._place.rank, exchange.source.numel()))
        exchange.call()
        if not exchange.right():
            raise SystemExit("the result is wrong")
        exchange.source.zero_()  # sums of sums would overflow


def _seconds(exchange: Exchange, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        exchange.call()
    return (time.perf_counter() - began) / calls * exchange.share


def serve(args: argparse.Namespace, rank: int, verbs: Verbs, nothing: Any = None) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    Side(Place(verbs, rank, args.workers, args.most), nothing).serve(Line(args.meter))


def serve_with_torch(rank: int, args: argparse.Namespace) -> None:
    join_group(args.side, rank, args.workers, args.meter)
    serve(args, rank, torch_verbs(), group_of_nothing() if args.side == SHM else None)
    dist.destroy_process_group()


def serve_with_mpi(args: argparse.Namespace) -> None:
    from mpi4py import MPI  # type: ignore[import-not-found,import-untyped,unused-ignore]

    serve(args, MPI.COMM_WORLD.Get_rank(), mpi_verbs())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in {"side": str, "workers": int, "meter": str, "most": int}.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    args = parser.parse_args()
    if args.side == "mpich":
        serve_with_mpi(args)
    else:
        run_ranks(lambda rank: serve_with_torch(rank, args), args.workers)


if __name__ == "__main__":
    main()
