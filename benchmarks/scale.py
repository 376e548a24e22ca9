"""What a job of a thousand ranks asks of one store, of one rank's processor, and of one rank's
memory.

Nothing of it needs a thousand processes. The ranks that start are threads, with a store in this
process that counts their messages. Beside each figure stands that of the plain way: every rank
reads what each other has written, and holds an epoch as lists of Python's numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from common import describe_machine, markdown_table
from frame import Benchmark
from lockstep import messages
from lockstep.flight_recorder import RawRecord
from lockstep.stores import combine_nothing, exchange
from lockstep.transports.runtime import host_identity
from lockstep.watchdog.mismatch import compare_records
from lockstep.watchdog.preflight import Digest, encode
from lockstep.watchdog.rendezvous import HostInfo, Readiness, _join_hosts, _join_readiness
from lockstep.watchdog.states import RecordRow
from support.stores import CountingStore, all_ranks

BENCHMARK = Benchmark("scale", __doc__)
EACH = 8  # ranks of a machine
SAMPLES = 10_000_000
Body = Callable[[Any, int, int], None]


def plainly(store: Any, rank: int, size: int) -> None:
    """A group over "shm" is made and watched, and every rank reads the words of each other, one by
    one.
    """
    key = f"{host_identity.host_key()} {rank // EACH}"
    low = rank // EACH * EACH
    said = json.dumps({"machine": key, "pid": 12345, "token": "0123456789ab"})
    for topic, text, ranks in (
        ("host", json.dumps([key, None]), range(size)),
        (f"mapped {low}", "", range(low, low + EACH)),
        (f"open {low}", "", range(low, low + EACH)),
        ("who", said, range(size)),
        ("recorded", json.dumps({"ready": True}), range(size)),
    ):
        store.set(f"{topic}/{rank}", text)
        if topic in ("who", "recorded"):
            store.wait([f"{topic}/{each}" for each in ranks])
            for each in ranks:
                store.wait([f"{topic}/{each}"])  # a check, as the store counts
                store.get(f"{topic}/{each}")
        else:
            store.multi_get([f"{topic}/{each}" for each in ranks])


def exchanging(store: Any, rank: int, size: int) -> None:
    """The same as it is done."""
    key = f"{host_identity.host_key()} {rank // EACH}"
    low = rank // EACH * EACH
    exchange(
        store, "host", rank, json.dumps([key, None]), range(size), host_identity._group_by_host
    )
    for topic in (f"mapped {low}", f"open {low}"):
        exchange(store, topic, rank - low, "", range(low, low + EACH), combine_nothing)
    info = HostInfo([(rank, rank + 1)], "0123456789ab", "", ["10.0.0.1"], key)
    exchange(store, "who", rank, messages.encode(info), range(size), _join_hosts)
    ready = messages.encode(Readiness([(rank, rank + 1)]))
    exchange(store, "recorded", rank, ready, range(size), _join_readiness)


def traffic(body: Body, size: int) -> dict[str, float]:
    """Messages of the rank that sends most, and MiB of values that the store's host sends to
    all.
    """
    stores: list[CountingStore] = all_ranks(size, lambda store, rank: body(store, rank, size))[1]
    received = sum(store.received for store in stores)
    return {"messages": max(store.messages for store in stores), "mib": received / 2**20}


def checking(size: int, times: int = 20) -> dict[str, float]:
    """Bytes that a rank gets before a collective, and µs in which it looks at them: rows of all
    ranks, or a digest.
    """
    call = RecordRow(1000, 1 << 60, 1 << 61, 7, 1 << 62)
    row = (1000, 1 << 60, 1 << 61, 7, 1 << 62)
    words = encode(call)

    def rows() -> None:
        raws = [RawRecord(1, 2, *row, 0, 0, 0, 0, 0, 0, -1) for _ in range(size)]
        assert not any(any(compare_records(raws[0], raw)) for raw in raws)

    def digest() -> None:
        encode(call)
        assert Digest(words).is_equal

    found = {"rows_bytes": 8.0 * 7 * size, "digest_bytes": 8.0 * len(words)}
    for name, look in (("rows_us", rows), ("digest_us", digest)):
        begin = time.process_time()
        for _ in range(times):
            look()
        found[name] = 1e6 * (time.process_time() - begin) / times
    return found


_EPOCH = """
import resource, sys, torch
from lockstep.communicator import Communicator
from lockstep.data.loader import Loader
from lockstep.topology import World
samples, size, plain = map(int, sys.argv[1:])
class Numbered(torch.utils.data.Dataset):
    def __len__(self): return samples
    def __getitem__(self, index): return index
def used():
    with open("/proc/self/statm") as file: return int(file.read().split()[1]) * resource.getpagesize()
loader = Loader(Numbered(), 256, comm=Communicator.at(World(0, size, 0, size), torch.device("cpu")))
next(Loader(torch.utils.data.TensorDataset(torch.arange(256)), 256, comm=loader.comm).epoch(0))
before = used()
if plain:
    order, share = torch.randperm(samples), 256 // size
    parts = [order[start : start + share] for start in range(0, samples, 256)]
    requests = [(1, part.tolist()) for part in parts]
else:
    running = loader.epoch(0)
    next(running)
print(used() - before)
"""


def epoch_bytes(size: int, plain: bool) -> float:
    """Bytes for each of the data set's samples that one of `size` workers holds in mid-epoch."""
    command = [sys.executable, "-c", _EPOCH, str(SAMPLES), str(size), str(int(plain))]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / SAMPLES


def as_table(found: dict[str, Any]) -> str:
    """What is shown."""
    header = [
        "ranks",
        "messages of a rank, plainly",
        "as it is",
        "MiB from the store's host, plainly",
        "as it is",
    ]
    lines = [
        [
            f"{size:,}",
            *(
                f"{each[side][what]:,.{digits}f}"
                for what, digits in _COLUMNS
                for side in ("plain", "now")
            ),
        ]
        for size, each in ((int(size), each) for size, each in found["start"].items())
    ]
    check = [
        "ranks",
        "bytes to a rank, rows of all",
        "a digest",
        "µs to compare, rows of all",
        "a digest",
    ]
    names = ("rows_bytes", "digest_bytes", "rows_us", "digest_us")
    checks = [
        [f"{int(size):,}", *(f"{each[name]:,.0f}" for name in names)]
        for size, each in found["check"].items()
    ]
    epochs = [
        [
            size,
            f"{each['plain']:.1f}",
            f"{each['now']:.1f}",
            f"{each['plain'] / 10:.2f}",
            f"{each['now'] / 10:.2f}",
        ]
        for size, each in found["epoch"].items()
    ]
    held = [
        "workers",
        "bytes a sample, lists",
        "as it is",
        "GB for 100 million samples, lists",
        "as it is",
    ]
    return "\n\n".join(
        markdown_table(*each) for each in ((header, lines), (check, checks), (held, epochs))
    )


_COLUMNS = (("messages", 0), ("mib", 2))


def main() -> None:
    args = BENCHMARK.parse(BENCHMARK.parser("one round"))
    machine = describe_machine()
    sizes = (16, 128) if args.quick else (16, 128, 1000)
    found: dict[str, Any] = {
        "start": {s: {"plain": traffic(plainly, s), "now": traffic(exchanging, s)} for s in sizes},
        "check": {s: checking(s) for s in sizes},
        "epoch": {
            str(size): {
                "plain": epoch_bytes(size, plain=True),
                "now": epoch_bytes(size, plain=False),
            }
            for size in (() if args.quick else (1, 8))
        },
    }
    BENCHMARK.publish(args, machine, as_table(found), "no data", **found)


if __name__ == "__main__":
    main()
