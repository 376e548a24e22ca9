"""Programs that were written for other launchers and libraries run under `lockstep run` as they
are.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support.command import Here

# as the tutorial of DistributedDataParallel has it for torchrun
TUTORIAL = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x):
        return self.second(self.relu(self.first(x)))

def demo():
    dist.init_process_group("gloo")
    model = DDP(ToyModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    nn.MSELoss()(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", total.item())
    dist.destroy_process_group()

if __name__ == "__main__":
    demo()
"""

LOOP = """
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    library.backward(loss)
    optimizer.step()
"""

HEAD = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
loader = torch.utils.data.DataLoader(data, batch_size=4)
"""

ACCELERATE = f"""
from accelerate import Accelerator
library = Accelerator(cpu=True)
{HEAD}
model, optimizer, loader = library.prepare(model, optimizer, loader)
for x, y in loader:{LOOP}
print("sum", library.reduce(torch.ones(1), "sum").item())
library.end_training()
"""

FABRIC = f"""
from lightning_fabric import Fabric
library = Fabric(accelerator="cpu", strategy="ddp", devices=2)
library.launch()
{HEAD}
model, optimizer = library.setup(model, optimizer)
for x, y in library.setup_dataloaders(loader):{LOOP}
print("sum", library.all_reduce(torch.ones(1), reduce_op="sum").item())
"""


@pytest.mark.parametrize(
    ("library", "text"),
    [("torch", TUTORIAL), ("accelerate", ACCELERATE), ("lightning_fabric", FABRIC)],
    ids=["torch", "accelerate", "fabric"],
)
def test_it_runs_on_two_ranks(library: str, text: str, tmp_path: Path, here: Here) -> None:
    if importlib.util.find_spec(library) is None:  # importing it here would change this process
        pytest.skip(f"{library} is not installed")
    program = tmp_path / "program.py"
    program.write_text(text)
    ended = here("run", "-np", 2, program)
    assert ended.returncode == 0, ended.stderr
    sums = [line for line in ended.stdout.splitlines() if "sum" in line]
    assert sorted(sums) == ["[0] sum 2.0", "[1] sum 2.0"]
