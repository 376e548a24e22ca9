"""A program in the manner of Horovod's MNIST example: only the import and the data are others.

lockstep run -np 2 examples/horovod_mnist.py [--data digits | fashion-mnist] [--epochs N]
    [--use-adasum] ...
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import lockstep
import lockstep.compat.horovod.torch as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser(description="handwritten digits by several ranks")
parser.add_argument("--data", choices=["digits", "fashion-mnist"], default="digits")
parser.add_argument("--batch-size", type=int, default=32, help="samples of each rank in a step")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class Net(nn.Module):
    """Two convolutions and two linear layers: (n, 1, 28, 28) → logarithms of 10 probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify `x`."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.view(-1, 320)))
        return F.log_softmax(self.fc2(x), dim=1)


def metric_average(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epoch: int
) -> None:
    model.train()
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    for data, target in loader:
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()


def test(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    seen = len(loader.sampler)  # type: ignore[arg-type]
    return metric_average(loss / seen, "avg_loss"), metric_average(correct / seen, "avg_accuracy")


def main() -> None:
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    read = lockstep.data.digits if args.data == "digits" else lockstep.data.fashion_mnist
    train_set, test_set = read()
    parts = {"num_replicas": hvd.size(), "rank": hvd.rank()}
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=DistributedSampler(train_set, **parts)
    )
    test_loader = DataLoader(
        test_set, 256, sampler=DistributedSampler(test_set, shuffle=False, **parts)
    )

    model = Net()
    scale = 1 if args.use_adasum else hvd.size()
    inner = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        inner,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(args.epochs):
        train(model, optimizer, train_loader, epoch)
        loss, accuracy = test(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}  loss {loss:.4f}  accuracy {accuracy:.2%}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
