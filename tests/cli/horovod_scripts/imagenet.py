"""A training as Horovod's users write it: several passes a step, a learning rate that warms up, and
checkpoints.
"""

import argparse
import math
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from horovod.torch.mpi_ops import size as horovod_size
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pth.tar")
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--use-adasum", action="store_true", default=False)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--val-batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005)
parser.add_argument("--seed", type=int, default=42)


class Metric:
    """The mean over ranks of what each has seen."""

    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def pictures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 4, (count,), generator=generator)
    images = torch.randn(count, 3, 16, 16, generator=generator) * 0.5
    for image, target in zip(images, targets, strict=True):
        image[target % 3, 8 * (target // 2) :] += 1.0
    return torch.utils.data.TensorDataset(images, targets)


def small_resnet():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            return F.relu(x + self.bn(self.conv(x)))

    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        Block(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def accuracy(output, target):
    pred = output.max(1, keepdim=True)[1]
    return pred.eq(target.view_as(pred)).cpu().float().mean()


def adjust_learning_rate(epoch, batch_idx):
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 1.0
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        # split into sub-batches of --batch-size
        for i in range(0, len(data), args.batch_size):
            data_batch, target_batch = (
                data[i : i + args.batch_size],
                target[i : i + args.batch_size],
            )
            output = model(data_batch)
            train_accuracy.update(accuracy(output, target_batch))
            loss = F.cross_entropy(output, target_batch)
            train_loss.update(loss)
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        optimizer.step()
    return train_loss.avg.item()


def validate():
    model.eval()
    val_accuracy = Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            val_accuracy.update(accuracy(model(data), target))
    return val_accuracy.avg.item()


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


args = parser.parse_args()
allreduce_batch_size = args.batch_size * args.batches_per_allreduce
hvd.init()
torch.manual_seed(args.seed)
torch.set_num_threads(1)

# if there is a checkpoint, go on from it; all ranks learn of it from rank 0, which may be the only
# one to see it
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if Path(args.checkpoint_format.format(epoch=try_epoch)).exists():
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(
    torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
).item()

train_dataset, val_dataset = pictures(128, seed=0), pictures(64, seed=1)
train_sampler = torch.utils.data.distributed.DistributedSampler(
    train_dataset, num_replicas=horovod_size(), rank=hvd.rank()
)
train_loader = torch.utils.data.DataLoader(
    train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler
)
val_sampler = torch.utils.data.distributed.DistributedSampler(
    val_dataset, num_replicas=hvd.size(), rank=hvd.rank()
)
val_loader = torch.utils.data.DataLoader(
    val_dataset, batch_size=args.val_batch_size, sampler=val_sampler
)

model = small_resnet()
lr_scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
optimizer = optim.SGD(
    model.parameters(), lr=args.base_lr * lr_scaler, momentum=args.momentum, weight_decay=args.wd
)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(resume_from_epoch, args.epochs):
    loss = train(epoch)
    found = validate()
    print(f"epoch {epoch} from {resume_from_epoch}: loss {loss:.6f}, accuracy {found:.3f}")
    save_checkpoint(epoch)
