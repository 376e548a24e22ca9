"""What each rank of `lockstep bench` does: it times messages and collectives over every transport
that is there.
"""

# torch's stubs lack some of the names of torch.distributed
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist

from .. import environment, messages
from .measurement import (
    FORMAT,
    CollectiveCurve,
    Curve,
    NetworkMeasurement,
    PairMeasurement,
    TransportMeasurement,
)

PROGRESS = "@lockstep-progress "
RESULT = "@lockstep-result "
"""How the lines of rank 0 begin that say what is measured now, and that hold the result as JSON."""


class Settings(msgspec.Struct, frozen=True):
    """How to measure.

    Attributes:
        seconds: that the measurement shall take, in all.
        sizes: of messages, in bytes; multiples of 4.
        transports: "shm", "gloo", "nccl" or "mpi4py".
        least: repetitions of each size.
        pairs: of ranks, at most.
    """

    seconds: float
    transports: tuple[str, ...]
    sizes: tuple[int, ...] = (8, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
    least: int = 5
    pairs: int = 6


_MOST = 1000  # repetitions of a size
_PARTS = 5  # of a measurement, whose medians show the noise
_IDLE_SHARE = 0.5
_COMPUTING_SHARE = 0.3
_PAIR_SHARE = 0.2


def main(text: str) -> None:
    """Measure as the JSON of `Settings` says, and print the result on rank 0."""
    settings = messages.decode(text, Settings)
    over_mpi = settings.transports == ("mpi4py",)
    if over_mpi:
        dist.init_process_group("mpi4py", init_method="mpi4py://")
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    _say("copy bandwidth")
    copy_bandwidth, copy_noise = _copy_bandwidth()
    hosts = _hosts_of_ranks(rank)
    # pairs of ranks: first those of the first ranks of two hosts, then those within hosts
    between = [(a[0], b[0]) for i, a in enumerate(hosts) for b in hosts[i + 1 :]]
    within = [(ranks[i], ranks[i + 1]) for ranks in hosts for i in range(len(ranks) - 1)]
    pairs = (between + within)[: settings.pairs]
    transports = {}
    for transport in settings.transports:
        group = None if over_mpi else dist.new_group(backend=transport)
        bench = _Bench(settings, transport, group, settings.seconds / len(settings.transports))
        transports[transport] = bench.measure(pairs)
    if rank == 0:
        measurement = NetworkMeasurement(
            FORMAT,
            size,
            hosts,
            environment.usable_cores(),
            transports,
            copy_bandwidth,
            copy_noise,
            _description(),
        )
        print(RESULT + messages.encode(measurement), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(PROGRESS + text, flush=True)


def _description() -> str:
    return (
        f"{os.uname().nodename}, {os.uname().machine}, PyTorch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d %H:%M')}"
    )


def _hosts_of_ranks(rank: int) -> tuple[tuple[int, ...], ...]:
    world = environment.find_world()
    nodes = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(nodes, torch.tensor([float(world.node)]))
    numbers = [int(number.item()) for number in nodes]
    return tuple(
        tuple(r for r, node in enumerate(numbers) if node == number)
        for number in sorted(set(numbers))
    )


def _copy_bandwidth() -> tuple[float, float]:
    """Return the bytes per second that one rank copies while the others do too, and the noise."""
    source = torch.ones(8 << 20)
    target = torch.empty_like(source)
    times = []
    for _ in range(2 * _PARTS + 1):
        dist.barrier()
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    known = _slowest(times)[1:]  # without that which first touches the pages
    middle, noise = _summary([known[2 * part : 2 * part + 2] for part in range(_PARTS)])
    return source.nbytes / middle, noise


def _slowest(times: Sequence[float]) -> list[float]:
    """Return the time of the slowest rank for each repetition."""
    tensor = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    values: list[float] = tensor.tolist()
    return values


def _summary(parts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the median, and the noise: how much it differs among the parts of the measurement,
    relative to it.

    Single repetitions differ by far more on a virtual machine, whose cores are taken away now and
    then; a median is none the worse for it.
    """
    low, _, high = statistics.quantiles(
        [statistics.median(times) for times in parts], n=4, method="inclusive"
    )
    middle = statistics.median([time_ for times in parts for time_ in times])
    return middle, (high - low) / middle


class _Bench:
    """Times one transport.

    Args:
        settings: of the measurement.
        transport: its name.
        group: over it; None for the default group.
        seconds: that it may take.
    """

    def __init__(
        self, settings: Settings, transport: str, group: dist.ProcessGroup | None, seconds: float
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._group = group
        self._seconds = seconds
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()
        local = environment.find_world().local_rank
        self._device = torch.device("cuda", local) if transport == "nccl" else torch.device("cpu")
        self._computed = 0

    def measure(self, pairs: Sequence[tuple[int, int]]) -> TransportMeasurement:
        """Measure pairs, and collectives idle and while computing."""
        names = list(_COLLECTIVES)
        share = self._seconds / len(names)
        idle = {name: self._collective(name, "idle", _IDLE_SHARE * share) for name in names}
        alone = self._compute_rate(None)
        with self._computing():
            computing = {
                name: self._collective(name, "computing", _COMPUTING_SHARE * share)
                for name in names
            }
            beside = self._compute_rate(lambda: self._run("all_reduce", self._settings.sizes[-1]))
        measured = [self._pair(pair, _PAIR_SHARE * self._seconds / len(pairs)) for pair in pairs]
        curves = {name: CollectiveCurve(*idle[name], *computing[name]) for name in names}
        return TransportMeasurement(curves, tuple(measured), alone / beside if beside else 0.0)

    def _collective(self, name: str, state: str, seconds: float) -> tuple[Curve, float]:
        sizes = (0,) if name == "barrier" else self._settings.sizes
        _say(f"{self._transport}: {name}, {state}")
        return self._curve({size: self._run(name, size) for size in sizes}, seconds)

    def _curve(self, runs: dict[int, Callable[[], None]], seconds: float) -> tuple[Curve, float]:
        """Time what is run for each size, and return the curve and the noise at the worst size.

        The sizes take turns, so that each is spread over all of the time.
        """
        counts = {size: self._repetitions(run, seconds / len(runs)) for size, run in runs.items()}
        parts: dict[int, list[list[float]]] = {size: [] for size in runs}
        for _ in range(_PARTS):
            for size, run in runs.items():
                parts[size].append(self._repeat(run, counts[size]))
        summaries = {float(size): _summary(times) for size, times in parts.items()}
        return Curve.fit({size: middle for size, (middle, _) in summaries.items()}), max(
            noise for _, noise in summaries.values()
        )

    def _run(self, name: str, size: int) -> Callable[[], None]:
        call = _COLLECTIVES[name](max(1, size // 4), self._size, self._device, self._group)

        def run() -> None:
            call()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return run

    def _repetitions(self, run: Callable[[], None], seconds: float) -> int:
        """Return how many repetitions of a part fit into its share of `seconds`."""
        run()  # connects, and allocates
        first = min(_slowest([_timed(run) for _ in range(3)]))
        return min(_MOST, max(self._settings.least, int(seconds / (2 * first + 1e-4)))) // _PARTS

    def _repeat(self, run: Callable[[], None], count: int) -> list[float]:
        """Return the seconds of the slowest rank in each of `count` repetitions."""
        times = []
        for _ in range(count):
            dist.barrier(self._group)
            times.append(_timed(run))
        return _slowest(times)

    def _pair(self, pair: tuple[int, int], seconds: float) -> PairMeasurement:
        _say(f"{self._transport}: ranks {pair[0]} and {pair[1]}")
        runs = {size: self._ping_pong(pair, size) for size in self._settings.sizes}
        there_and_back, noise = self._curve(runs, seconds)
        one_way = tuple(value / 2 for value in there_and_back.seconds)
        return PairMeasurement(
            pair, msgspec.structs.replace(there_and_back, seconds=one_way), noise
        )

    def _ping_pong(self, pair: tuple[int, int], size: int) -> Callable[[], None]:
        """Return what sends a message there and back; ranks outside of the pair wait."""
        tensor = torch.ones(max(1, size // 4), device=self._device)

        def run() -> None:
            if self._rank == pair[0]:
                dist.send(tensor, pair[1], self._group)
                dist.recv(tensor, pair[1], self._group)
            elif self._rank == pair[1]:
                dist.recv(tensor, pair[0], self._group)
                dist.send(tensor, pair[0], self._group)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return run

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Multiply matrices in another thread during the body, as a backward pass does beside
        communication.
        """
        stop = threading.Event()

        def compute() -> None:
            matrix = torch.ones(256, 256, device=self._device)
            while not stop.is_set():
                torch.mm(matrix, matrix)
                self._computed += 1

        thread = threading.Thread(target=compute, name="lockstep bench", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _compute_rate(self, beside: Callable[[], Callable[[], None]] | None) -> float:
        """Return how many products per second the slowest rank computes, beside an all-reduce that
        repeats or alone.
        """
        if beside is None:
            with self._computing():
                return self._rate(lambda: time.sleep(0.01))
        return self._rate(beside())

    def _rate(self, run: Callable[[], None]) -> float:
        """Return the products per second while `run` repeats, equally often on all ranks."""
        run()
        first = _slowest([_timed(run)])[0]
        before = self._computed
        begin = time.perf_counter()
        for _ in range(max(3, min(50, int(0.3 / first)))):
            run()
        rate = (self._computed - before) / (time.perf_counter() - begin)
        return 1 / _slowest([1 / max(rate, 1e-9)])[0]


def _timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


_Make = Callable[[int, int, torch.device, "dist.ProcessGroup | None"], Callable[[], object]]


def _all_reduce(
    count: int, ranks: int, device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    tensor = torch.zeros(count, device=device)
    return lambda: dist.all_reduce(tensor, group=group)


def _broadcast(
    count: int, ranks: int, device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    tensor = torch.zeros(count, device=device)
    return lambda: dist.broadcast(tensor, 0, group=group)


def _all_gather(
    count: int, ranks: int, device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    tensor = torch.zeros(count, device=device)
    output = torch.empty(count * ranks, device=device)
    return lambda: dist.all_gather_into_tensor(output, tensor, group=group)


def _reduce_scatter(
    count: int, ranks: int, device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    part = max(1, count // ranks)
    tensor = torch.zeros(part * ranks, device=device)
    output = torch.empty(part, device=device)
    return lambda: dist.reduce_scatter_tensor(output, tensor, group=group)


def _all_to_all(
    count: int, ranks: int, device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    part = max(1, count // ranks)
    tensor = torch.zeros(part * ranks, device=device)
    output = torch.empty(part * ranks, device=device)
    return lambda: dist.all_to_all_single(output, tensor, group=group)


def _barrier(
    count: int, ranks: int, device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    return lambda: dist.barrier(group)


_COLLECTIVES: dict[str, _Make] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}

if __name__ == "__main__":
    main(sys.argv[1])
