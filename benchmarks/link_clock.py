"""The emulated network against the kernel, and time dilation against itself.

Link clock: one process sends to another over TCP between two network namespaces, whose veth pair
`tc tbf` limits to a rate; over a loopback connection whose messages the link clock delays, with
that rate and 200 us more than the latency of the veth pair, as no emulated message can take less
than the clock and the connection themselves; and with `torch.distributed` on the emulated network,
which adds what two messages over Gloo take. All in one run and in turns; medians. Receivers poll,
so that no side counts how late the kernel wakes up a thread. Aims: bandwidth within 3 %, latency
within 20 us. Needs root and Linux.

Time dilation: pairs of workers compute and all-reduce between two emulated hosts: one pair with a
core for each worker and d = 1, and two pairs at the same time, each on one core, with d = 2. Times
divided by d should be the same. One pair alone would leave a core idle, and where two cores are
threads of one, the other then computes faster.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from common import describe_machine, markdown_table
from frame import Benchmark
from lockstep.emulation import delayed_groups
from lockstep.emulation.virtual_time import sleep_until
from lockstep.network import Link, VirtualNetwork

BENCH = Benchmark("link_clock", __doc__ or "", page="planning.md")

RATES_MBIT = (50, 100, 200)  # packets of one segment, the kernel moves some 50 MB/s here
FRAME = (
    1448 / 1514
)  # payload of TCP in a frame as tbf counts it: without preamble, checksum and gap
TURNS = 3  # of both dilations
# of an emulated latency: a message takes some 100 us here through the clock's lock and a socket
FURTHER_S = 2e-4
SMALL = 64
SIZES = (1 << 18, 1 << 20)
NAMES = ("lockstep-clock-a", "lockstep-clock-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 5201


# --- The kernel's side
# ------------------------------------------------------------------------------------------------


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


@contextmanager
def namespaces(mbit: int) -> Iterator[None]:
    """Two namespaces with a veth pair between them, limited to `mbit` in both directions."""
    try:
        for name in NAMES:
            run(f"ip netns add {name}")
        run(f"ip link add eth0 netns {NAMES[0]} type veth peer name eth0 netns {NAMES[1]}")
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            run(f"ip -n {name} addr add {address}/24 dev eth0")
            run(
                f"ip -n {name} link set eth0 gso_max_segs 1 up"
            )  # as a burst of the bucket is one segment
            run(
                f"ip netns exec {name} tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 16kb "
                "limit 16mb"
            )
        yield
    finally:
        for name in NAMES:
            with suppress(subprocess.CalledProcessError):
                run(f"ip netns del {name}")


def connect(rank: int) -> socket.socket:
    """A TCP connection between the namespaces; this thread comes back from there."""
    with Path("/proc/self/ns/net").open() as usual, Path("/run/netns", NAMES[rank]).open() as there:
        _enter(there.fileno())
        try:
            found = open_connection(rank, ADDRESSES[0])
        finally:
            _enter(usual.fileno())
    return found


def open_connection(rank: int, address: str) -> socket.socket:
    """A TCP connection from rank 1 to rank 0, which listens at `address`."""
    server = socket.create_server((address, PORT)) if rank == 0 else None
    dist.barrier()
    if server is None:
        found = socket.create_connection((address, PORT), timeout=30)
    else:
        with server:
            found = server.accept()[0]
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")


def over_kernel(rank: int, connection: socket.socket, size: int) -> float:
    """When this rank has sent or received `size` bytes from rank 0 to rank 1: begin, or end."""
    if rank == 0:
        begin = time.monotonic()
        connection.sendall(bytes(size))
        return begin
    receive(connection, size)
    return time.monotonic()


def receive(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes; polls."""
    found = bytearray(size)
    received = 0
    while received < size:
        with suppress(BlockingIOError):
            received += connection.recv_into(memoryview(found)[received:], 0, socket.MSG_DONTWAIT)
    return bytes(found)


def over_link_clock(rank: int, connection: socket.socket, size: int) -> float:
    """The same over a connection whose messages the link clock delays; the time of arrival travels
    ahead.
    """
    if rank == 0:
        begin = time.monotonic()
        assert delayed_groups._emulation is not None
        with delayed_groups._emulation.clock.cards() as cards:
            _, arrives = cards.send(0, 1, size, begin)
        connection.sendall(struct.pack("d", arrives) + bytes(size))
        return begin
    (arrives,) = struct.unpack("d", receive(connection, 8))
    receive(connection, size)
    sleep_until(arrives)
    return time.monotonic()


def over_gloo(rank: int, connection: socket.socket, size: int) -> float:
    """The same with torch.distributed on the emulated network."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    begin = time.monotonic()
    (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
    return begin if rank == 0 else time.monotonic()


def in_turns(rounds: int) -> dict[str, dict[int, float]]:
    """Median seconds of each size, over the kernel and over the link clock; on both ranks the
    same.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(
        0, {cores[rank % len(cores)]}
    )  # a thread that is moved to another core is some 200 us late
    connection = connect(rank)
    local = open_connection(rank, "127.0.0.1")
    sides = {
        "kernel": (over_kernel, connection),
        "gloo": (over_gloo, local),
        "link clock": (over_link_clock, local),
    }
    times: dict[str, dict[int, list[float]]] = {side: {} for side in sides}
    for i in range(rounds + 2):
        for size in (SMALL, *SIZES):
            for side, (send, over) in sides.items():
                dist.barrier()
                if rank == 0:
                    time.sleep(0.004)  # so that the bucket is full, and rank 1 polls
                stamp = torch.tensor([send(rank, over, size)], dtype=torch.float64)
                stamps = [torch.zeros_like(stamp) for _ in range(2)]
                dist.all_gather(stamps, stamp)
                if i >= 2:
                    times[side].setdefault(size, []).append((stamps[1] - stamps[0]).item())
    connection.close()
    local.close()
    return {
        side: {size: statistics.median(each) for size, each in found.items()}
        for side, found in times.items()
    }


def compare(mbit: int, rounds: int) -> dict[str, Any]:
    """Bandwidth and latency of both sides at one rate."""
    with namespaces(mbit):
        # the first run says what the latency of the veth pair is; the second one compares
        bandwidth = mbit * 1e6 / 8 * FRAME
        first = lockstep.launch(
            in_turns, max(5, rounds // 2), workers=2, network=VirtualNetwork(2, Link(bandwidth, 0))
        )
        link = Link(bandwidth, first["kernel"][SMALL] - SMALL / bandwidth + FURTHER_S)
        found = lockstep.launch(in_turns, rounds, workers=2, network=VirtualNetwork(2, link))
    result: dict[str, Any] = {
        "mbit": mbit,
        "latency_s": link.latency,
        "least_s": first["link clock"][SMALL],
    }
    for side, times in found.items():
        rise = times[SIZES[1]] - times[SIZES[0]]
        result[side] = {"bandwidth": (SIZES[1] - SIZES[0]) / rise, "latency": times[SMALL]}
    return result


# --- Time dilation
# --------------------------------------------------------------------------------------------------


def train(rounds: int, size: int) -> float:
    """The median seconds of a step in the emulated time: some computing, and an all-reduce with the
    other of a pair.
    """
    mine = sorted(os.sched_getaffinity(0))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    count = dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, count, 2)]
    os.sched_setaffinity(0, {mine[rank if count == 2 else rank // 2]})
    matrix = torch.ones(384, 384)
    gradients = torch.ones(size // 4)
    ends = []
    for _ in range(rounds + 3):
        for _ in range(8):
            matrix = torch.mm(matrix, matrix).clamp_(-1, 1)
        dist.all_reduce(gradients, group=pairs[rank // 2])
        ends.append(
            lockstep.emulation.monotonic()
        )  # parts of a step are not as long as on a cluster, whole ones are
    return statistics.median(after - before for before, after in itertools.pairwise(ends[2:]))


def dilated(network: str, rounds: int, size: int) -> dict[str, Any]:
    """The emulated time of a step with d = 1 and with d = 2, in turns."""
    found: dict[int, list[float]] = {1: [], 2: []}
    for _, d in itertools.product(range(TURNS), found):
        on = f"{2 * d} hosts, {network}, dilation {d}"
        found[d].append(lockstep.launch(train, rounds, size, workers=2 * d, threads=1, network=on))
    medians = {f"d={d}": statistics.median(each) for d, each in found.items()}
    return {"network": network, "bytes": size, **medians}


# --- What was found
# --------------------------------------------------------------------------------------------------


def tables(clock: list[dict[str, Any]], dilation: list[dict[str, Any]]) -> str:
    rows = []
    for each in clock:
        kernel = each["kernel"]
        emulated = each["link clock"]
        gloo = each["gloo"]
        off = emulated["bandwidth"] / kernel["bandwidth"] - 1
        late = 1e6 * (emulated["latency"] - kernel["latency"] - FURTHER_S)
        rows.append(
            (
                f"{each['mbit']} Mbit/s",
                *(f"{side['bandwidth'] / 1e6:.2f} MB/s" for side in (kernel, emulated, gloo)),
                f"{100 * off:+.1f} %",
                f"{1e6 * kernel['latency']:.0f} us",
                f"{1e6 * each['least_s']:.0f} us",
                *(f"{1e6 * (side['latency'] - FURTHER_S):.0f} us" for side in (emulated, gloo)),
                f"{late:+.0f} us",
            )
        )
    columns = ("link clock", "torch.distributed", "link clock off by")
    header = (
        "`tbf` rate",
        "bandwidth: kernel",
        *columns,
        "latency: kernel",
        "least of the link clock",
        *columns,
    )
    first = markdown_table(header, rows)
    rows = [
        (
            each["network"],
            f"{each['bytes'] / 1e6:.1f} MB",
            *(f"{1e3 * each[d]:.2f} ms" for d in ("d=1", "d=2")),
            f"{100 * (each['d=2'] / each['d=1'] - 1):+.1f} %",
        )
        for each in dilation
    ]
    return (
        first
        + "\n\n"
        + markdown_table(("network", "all-reduce", "d = 1", "d = 2, divided by 2", "off by"), rows)
    )


def main() -> None:
    parser = BENCH.parser("60")
    args = BENCH.parse(parser)
    if sys.platform != "linux" or os.getuid():
        parser.error("network namespaces need Linux and root")
    rounds = args.rounds or (5 if args.quick else 60)
    machine = describe_machine()
    clock = [compare(mbit, rounds) for mbit in (RATES_MBIT[:1] if args.quick else RATES_MBIT)]
    dilation = []
    if len(os.sched_getaffinity(0)) > 1:
        networks = ("1Gbit, 100us", "10Gbit, 50us")
        dilation = [
            dilated(network, rounds, 1 << 20)
            for network in (networks[:1] if args.quick else networks)
        ]
    BENCH.publish(
        args,
        machine,
        tables(clock, dilation),
        "messages without content",
        clock=clock,
        dilation=dilation,
    )


if __name__ == "__main__":
    main()
