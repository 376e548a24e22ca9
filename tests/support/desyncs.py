"""Programs whose ranks diverge, in all the ways in which users have seen them hang."""

from __future__ import annotations

__all__ = ["CASES", "GLOO_CASES", "program"]

# Each rank tells when it begins to go wrong, so that a test can say how long the end took.
_START = """
import os, pathlib, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
last, me = rank == size - 1, rank
os.environ.update({environment!r})
from lockstep import watchdog
from lockstep.transports.runtime import host_identity
{hosts}
watchdog.install(lambda: host_identity.host_key(), lasting=True)
dist.init_process_group({backend!r}, init_method="file://" + path, rank=rank, world_size=size)
x = torch.ones(4)
dist.all_reduce(x)
print("began", time.monotonic(), flush=True)
"""

_LOOP = """
data = torch.arange(160.).view(40, 4)
ddp = DDP(torch.nn.Linear(4, 4))
for number, batch in enumerate(DataLoader(data[:{samples}], batch_size=4)):
    {first}
    ddp(batch).sum().backward()
"""

# what the last rank does otherwise than the rest: (program, what every living rank says)
CASES: dict[str, tuple[str, str]] = {
    "one rank alone, the others end": (
        "if last: dist.all_reduce(x)",
        r"Ranks? .*(exited|destroyed).*while other ranks waited",
    ),
    "one rank alone, the others go on": (
        "if last: dist.all_reduce(x)\ndist.broadcast(x, 0)\ndist.barrier()",
        r"Desync at collective #[0-9]+ of the default group: .*called broadcast\(float32\[4\], root=0\)",
    ),
    "other shape": (
        "dist.all_reduce(torch.ones(4 + last))\nprint('wrong')",
        r"all_reduce\(float32\[5\], sum\)",
    ),
    "other shape of the same size": (
        "dist.all_reduce(torch.ones(6) if last else torch.ones(2, 3))\nprint('wrong')",
        r"all_reduce\(float32\[2, 3\], sum\)",
    ),
    "other dtype": (
        "dist.all_reduce(x.double() if last else x)",
        r"all_reduce\(float64\[4\], sum\)",
    ),
    "other dtype of the same size": (
        "dist.all_reduce(x.int() if last else x)\nprint('wrong')",
        r"all_reduce\(int32\[4\], sum\)",
    ),
    "other operation": (
        "dist.broadcast(x, 0) if last else dist.all_reduce(x)\ndist.barrier()",
        r"Desync at collective #[0-9]+ of the default group: .*called broadcast\(float32\[4\], root=0\)",
    ),
    "other reduction": (
        "dist.all_reduce(x, dist.ReduceOp.MAX if last else dist.ReduceOp.SUM)",
        r"all_reduce\(float32\[4\], max\)",
    ),
    "other root": (
        "dist.broadcast(x, int(last))\ndist.all_reduce(x)",
        r"broadcast\(float32\[4\], root=1\)",
    ),
    "other order": (
        "for n in (4, 5) if last else (5, 4): dist.all_reduce(torch.ones(n))",
        r"all_reduce\(float32\[5\], sum\)",
    ),
    "evaluation on one rank": (
        "import lockstep\nfrom torch.utils.data import TensorDataset as Data\nif me == 0:\n  "
        "loader = lockstep.Loader(Data(torch.ones(8, 4), torch.zeros(8, dtype=torch.long)), 4, "
        "shuffle=False)\n  lockstep.evaluate(torch.nn.Linear(4, 2), loader, "
        "torch.nn.CrossEntropyLoss())\ndist.barrier()",
        r"Rank 0 is in lockstep\.evaluate, rank \d is not.*Call lockstep\.evaluate on every rank",
    ),
    "other group": (
        "pair = dist.new_group([0, size - 1])\nif me: dist.all_reduce(x)\nelse: "
        "dist.all_reduce(x, group=pair)",
        r"Deadlock: .*waits in all_reduce.*waits in all_reduce",
    ),
    "exception": (
        "if last: raise ValueError('mine')\ndist.all_reduce(x)",
        r"raised ValueError: mine",
    ),
    "exception beside a thread": (
        "import threading\nif last:\n  threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "  raise ValueError('mine')\ndist.all_reduce(x)",
        r"raised ValueError: mine",
    ),
    "exception while the others compute": (
        "if last: raise ValueError('mine')\nwhile True: pass",
        r"raised ValueError: mine",
    ),
    "undefined name": (
        "if not last: name = 1\nname\ndist.all_reduce(x)",
        r"raised NameError: .*'name'",
    ),
    "full disk": (
        "if last:\n  with open('/dev/full', 'w', buffering=1) as f: "
        "f.write('line\\n')\ndist.all_reduce(x)",
        r"raised OSError: .*No space left",
    ),
    "killed": (
        "if last: os.kill(os.getpid(), 9)\ndist.all_reduce(x)",
        r"Rank \d (on \S+ )?died while other ranks waited",
    ),
    "stopped": (
        # stopped until the first rank has ended, but not for ever
        "with open(path + f'.pid{rank}', 'w') as f: f.write(str(os.getpid()))\ndist.barrier()\nif "
        "last:\n  first = '/proc/' + pathlib.Path(path + '.pid0').read_text()\n  if os.fork() == "
        "0:\n    for _ in range(400):\n      os.path.exists(first) and time.sleep(0.1)\n    "
        "os.kill(os.getppid(), 9); os._exit(0)\n  os.kill(os.getpid(), 19)\ndist.all_reduce(x)",
        r"Rank \d .*is stopped while other ranks wait",
    ),
    "exits early": (
        "if last: sys.exit(0)\ndist.all_reduce(x)",
        r"Rank \d (on \S+ )?exited while other ranks",
    ),
    "recv without send": (
        "dist.recv(x, size - 1) if me == 0 else dist.all_reduce(x)",
        r"Deadlock: .*waits in recv\(float32\[4\]",
    ),
    "other tag": (
        "if me == 0: dist.send(x, size - 1, tag=5)\nelif last: dist.recv(x, 0, "
        "tag=6)\ndist.barrier()",
        r"Deadlock: .*waits in recv\(float32\[4\], from=0, tag=6\).*The tags differ",
    ),
    "both send first": (
        # more than shared memory has room for
        "big, other = torch.ones(1 << 22), size - 1 - me\nif me in (0, size - 1):\n"
        "  dist.send(big, other)\n  dist.recv(big, other)\ndist.barrier()",
        r"Deadlock: .*waits in send\(float32\[4194304\], to=0\).*Let one side receive first",
    ),
    "group on one rank": (
        "if last: dist.new_group([0, size - 1])\ndist.barrier()",
        r"Deadlock: .*waits in new_group\(\[0, \d\]\).*Call new_group on every rank",
    ),
    "group on one rank, the others end": (
        "if last: dist.new_group([0, size - 1])",
        r"Rank 0 (on \S+ )?exited while other ranks waited for it in new_group",
    ),
    "groups in another order": (
        "for ranks in ([0], list(range(size)))[:: -1 if last else 1]: dist.new_group(ranks)",
        r"Deadlock: .*waits in new_group\(\[0, 1.*\]\)",
    ),
    "skipped batch": (
        # a warning, until this rank has run out of batches
        _LOOP.format(samples=40, first="if last and number == 3: continue"),
        r"(exited|destroyed its process group) after 10 batches while other ranks waited",
    ),
    "uneven batches": (
        _LOOP.format(samples="40 - 8 * last", first=""),
        r"exited after 8 batches|destroyed.*8 batches",
    ),
    "uneven batches, then a metric": (
        _LOOP.format(samples="40 - 8 * last", first="") + "dist.all_reduce(torch.ones(1))",
        r"called all_reduce\(float32\[1\], sum\)",
    ),
    "uneven batches, then a like metric": (
        _LOOP.format(samples="40 - 8 * last", first="") + "dist.all_reduce(torch.ones(20))",
        r"ran out of batches after 8",
    ),
    "unused parameters": (
        "class Model(torch.nn.Module):\n  def __init__(self):\n    super().__init__()\n"
        "    self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)\n"
        "  def forward(self, x): return self.a(x) if last else self.b(self.a(x))\n"
        "ddp = DDP(Model())\nfor _ in range(3): ddp(x[None]).sum().backward()",
        r"has parameters without gradients \(indices 2, 3",
    ),
    "more layers": (
        "DDP(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(1 + last)]))",
        r"The models differ in their parameters",
    ),
    "other layers": ("DDP(torch.nn.Linear(4, 4 + last))", r"The models differ in their parameters"),
    "layers in another order": (
        "DDP(torch.nn.ModuleList([torch.nn.Linear(4, n) for n in ((3, 5) if last else (5, 3))]))",
        r"The models differ in their parameters",
    ),
    "layers of one shape in another order": (
        "layers = [torch.nn.Linear(4, 4), torch.nn.ReLU()]\nDDP(torch.nn.Sequential(*layers[:: -1 "
        "if last else 1]))",
        r"The models differ in their parameters.*0\.weight of Linear.*1\.weight of Linear|1\.weight.*0\.weight",
    ),
}

# the same with what only Gloo has
GLOO_CASES: dict[str, tuple[str, str]] = {
    "monitored barrier": (
        "if last: dist.all_reduce(x)\nelse: dist.monitored_barrier()",
        r"Desync at collective #2 of the default group: .*called monitored_barrier\(\)",
    ),
    "monitored barrier, one exits": (
        "if not last: dist.monitored_barrier()",
        r"Rank \d (on \S+ )?exited while other ranks waited for it in monitored_barrier\(\)",
    ),
    "message larger than its receive": (
        "if me == 0: dist.send(torch.ones(8), size - 1)\nelif last: dist.recv(x, "
        "0)\ndist.barrier()",
        r"Rank 0 sends 32 bytes to rank \d, which receives into 16 bytes",
    ),
}


def program(text: str, backend: str, hosts: str = "", **environment: str) -> str:
    """The source of a program whose ranks are watched.

    Args:
        text: what they do.
        backend: of their group.
        hosts: the host of each rank, a letter each; "" where they are on one.
        environment: variables.
    """
    apart = f"host_identity.host_key = lambda: 'host ' + {hosts!r}[rank]" if hosts else ""
    return _START.format(backend=backend, hosts=apart, environment=environment) + text
