"""A training as Horovod's users write it for jobs whose hosts come and go; one operation fails on
the way.
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from horovod.torch.elastic.sampler import ElasticSampler
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.05)
parser.add_argument("--batches-per-commit", type=int, default=2)
parser.add_argument("--fails-at", type=int, default=3)
args = parser.parse_args()

failures = []
seen = []


def breaks_once(state):
    """What a network would do: an operation ends with an error on all ranks."""
    if state.epoch == 1 and state.batch == args.fails_at and not failures:
        failures.append(state.batch)
        hvd.allreduce(torch.zeros(1 + hvd.rank()), name="broken")


def train_epoch(state):
    state.model.train()
    batch_offset = state.batch
    for idx, (data, target) in enumerate(train_loader):
        state.batch = batch_offset + idx
        if args.batches_per_commit > 0 and state.batch % args.batches_per_commit == 0:
            state.commit()
        else:
            state.check_host_updates()
        breaks_once(state)
        state.optimizer.zero_grad()
        loss = F.mse_loss(state.model(data), target)
        loss.backward()
        state.optimizer.step()
        seen.append((state.epoch, idx))
        state.train_sampler.record_batch(idx, args.batch_size)
    return loss


def end_epoch(state):
    state.epoch += 1
    state.batch = 0
    state.train_sampler.set_epoch(state.epoch)
    state.commit()


@hvd.elastic.run
def full_train(state):
    while state.epoch < args.epochs:
        loss = train_epoch(state)
        print(f"epoch {state.epoch}: loss {loss.item():.4f}")
        end_epoch(state)
    return sum(p.double().sum().item() for p in state.model.parameters())


def on_state_reset():
    print(f"reset at epoch {state.epoch}, batch {state.batch}, with {hvd.size()} ranks")
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size()


hvd.init()
torch.manual_seed(hvd.rank())
torch.set_num_threads(1)
inputs = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
train_sampler = ElasticSampler(dataset)
train_loader = torch.utils.data.DataLoader(
    dataset, batch_size=args.batch_size, sampler=train_sampler
)
model = nn.Linear(3, 1)
optimizer = optim.SGD(model.parameters(), lr=args.base_lr * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, train_sampler=train_sampler, epoch=0, batch=0
)
state.register_reset_callbacks([on_state_reset])
weights = full_train(state)
print(f"ended with {len(failures)} failure, {len(seen)} batches, weights {weights:.12f}")
