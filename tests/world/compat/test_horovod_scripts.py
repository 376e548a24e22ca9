"""Programs with the structure of those that were written for Horovod."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support import warm_python

EXAMPLE = Path(__file__).parents[3] / "examples" / "horovod_mnist.py"

# as books teach it: all there is to it is in one file without functions
BOOK = """
import lockstep, torch
hvd.init()
size = hvd.size()
rank = hvd.rank()
local_rank = hvd.local_rank()
torch.manual_seed(rank)
if rank == 0:
    torch.save({}, "model.pt")
_ = hvd.allreduce(torch.Tensor(), name='barrier')
dataset, _ = lockstep.data.digits()
dataset = torch.utils.data.Subset(dataset, range(512))
sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=size, rank=rank)
dataloader = torch.utils.data.DataLoader(dataset, batch_size=64, sampler=sampler)
model = lockstep.models.lenet()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
loss_fn = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for ii, (data, target) in enumerate(dataloader):
        optimizer.zero_grad()
        output = model(data)
        loss = loss_fn(output, target)
        loss.backward()
        optimizer.step()
    losses.append(hvd.allreduce(loss.detach(), name="loss").item())
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
"""

# as the ImageNet example: several batches for each step, warm-up by batches, a checkpoint to resume
# from, metrics
IMAGENET = """
import lockstep, os, torch
import torch.nn.functional as F
hvd.init()
torch.manual_seed(42)
resume = 0
for number in range(2, 0, -1):
    if os.path.exists(f"checkpoint-{number}.pt"):
        resume = number
        break
resume = hvd.broadcast(torch.tensor(resume), root_rank=0, name='resume_from_epoch').item()
batches, passes, lr = 32, 2, 0.01
dataset = torch.utils.data.Subset(lockstep.data.digits()[0], range(512))
sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=batches * passes, sampler=sampler)
model = lockstep.models.lenet()
optimizer = torch.optim.SGD(model.parameters(), lr=lr * passes * hvd.size(), momentum=0.9, weight_decay=5e-5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16, backward_passes_per_step=passes, op=hvd.Average)
if resume > 0 and hvd.rank() == 0:
    checkpoint = torch.load(f"checkpoint-{resume}.pt")
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.), torch.tensor(0.)
    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

def adjust_learning_rate(epoch, batch_idx):
    epoch += float(batch_idx + 1) / len(loader)
    factor = 1. / hvd.size() * (epoch * (hvd.size() - 1) / 2 + 1)
    for group in optimizer.param_groups:
        group['lr'] = lr * hvd.size() * passes * factor

losses = []
for epoch in range(resume, resume + 2):
    model.train()
    sampler.set_epoch(epoch)
    train_loss = Metric('train_loss')
    for batch_idx, (data, target) in enumerate(loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        for i in range(0, len(data), batches):
            loss = F.cross_entropy(model(data[i:i + batches]), target[i:i + batches])
            train_loss.update(loss)
            loss.div_(-(-len(data) // batches))
            loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    losses.append((train_loss.sum / train_loss.n).item())
    if hvd.rank() == 0:
        state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
        torch.save(state, f"checkpoint-{epoch + 1}.pt")
"""


def run_here(program: str) -> tuple[list[float], list[torch.Tensor], int]:
    import lockstep.compat.horovod.torch as hvd

    names: dict[str, Any] = {"hvd": hvd}
    exec(compile(program, "script.py", "exec"), names)
    hvd.barrier()
    hvd.shutdown()
    return (
        names["losses"],
        [p.detach() for p in names["model"].parameters()],
        names.get("resume", 0),
    )


def check(answers: list[Any]) -> list[float]:
    for losses, parameters, _ in answers:
        assert losses == answers[0][0]
        assert all(torch.equal(a, b) for a, b in zip(parameters, answers[0][1], strict=True))
    found: list[float] = answers[0][0]
    assert found[-1] < found[0]
    return found


def test_as_books_teach_it(pool: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    check(pool.run(run_here, BOOK, init=False))
    assert (tmp_path / "model.pt").is_file()


def test_imagenet_style_with_resuming(pool: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    first = check(pool.run(run_here, IMAGENET, init=False))
    answers = pool.run(run_here, IMAGENET, init=False, workers=3)
    assert [resumed for _, _, resumed in answers] == [2, 2, 2]
    assert check(answers)[-1] < first[-1]


def test_a_function_runs_as_the_ranks_of_a_job() -> None:
    from lockstep.compat import horovod

    def work(start: int, step: int = 0) -> Any:
        import horovod.torch as hvd

        hvd.init()
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        if hvd.rank() == 0:
            hvd.shutdown()
        assert (
            multiprocessing.get_start_method(allow_none=True) is None
        )  # DataLoader takes classes of the program
        return start + step * int(os.environ["HOROVOD_RANK"]), total

    assert horovod.run(work, (1,), {"step": 2}, num_proc=2, hosts="localhost:2", verbose=2) == [
        (1, 2.0),
        (3, 2.0),
    ]
    assert horovod.run(work, (1,), {"step": 2}, np=2, use_gloo=True) == [(1, 2.0), (3, 2.0)]
    for elsewhere in ({"hosts": "localhost:1,a:1"}, {"hostfile": "machines"}):
        with pytest.raises(ValueError, match=f"{next(iter(elsewhere))}: expected"):
            horovod.run(work, (1,), np=2, **elsewhere)
    with pytest.raises(ValueError, match=r"options: expected those of horovod\.run, got proc=2"):
        horovod.run(work, (1,), proc=2)


# ranks that are in different places of different batches, on purpose; and then the example
UNEVEN = f"""
import runpy, torch
import lockstep.compat.horovod.torch as hvd
hvd.init()
for batch in torch.utils.data.DataLoader(torch.arange(2.0 + hvd.rank())):
    hvd.allreduce(batch)
assert hvd.join() == hvd.size() - 1
hvd.shutdown()
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def test_the_example_runs_alone_and_on_two_ranks(tmp_path: Path, warm: None) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN)
    for command in ([], ["-m", "lockstep", "run", "-np", "2"]):
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = warm_python.run([*command, script, "--epochs", 2, "--lr", 0.02], tmp_path, variables)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split()[-1].removesuffix("%")) > 60, done.stdout
        assert "warning" not in done.stderr, done.stderr
