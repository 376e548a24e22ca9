"""A GAN on handwritten digits: two models and two optimizers in a loop of one's own, alike on any
number of workers.

python examples/gan.py [EPOCHS]
lockstep run -np 2 examples/gan.py
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lockstep

comm = lockstep.init()
torch.manual_seed(0)
generator = nn.Sequential(
    nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 784), nn.Sigmoid(), nn.Unflatten(1, (1, 28, 28))
)
judge = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
for_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
loader = DataLoader(lockstep.data.digits()[0], batch_size=64, shuffle=True, drop_last=True)
generator, judge, for_generator, for_judge, loader = lockstep.prepare(
    generator, judge, for_generator, for_judge, loader, virtual_workers=4
)

for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
    for batch in loader.batches():
        for real, _ in for_judge.shards(batch):  # this worker's shards of the batch
            fake = generator(torch.randn(len(real), 16, device=comm.device)).detach()
            for_judge.zero_grad()
            loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()
            loss.backward()
            loss_of_judge = for_judge.step(loss=loss)  # the mean over the batch, in the last shard
        for real, _ in for_generator.shards(batch):
            for_generator.zero_grad()
            loss = F.softplus(
                -judge(generator(torch.randn(len(real), 16, device=comm.device)))
            ).mean()
            loss.backward()
            loss_of_generator = for_generator.step(loss=loss)
    if comm.rank == 0:
        print(
            f"epoch {epoch + 1}  judge {float(loss_of_judge):.4f}  generator "
            f"{float(loss_of_generator):.4f}"
        )
if comm.rank == 0:
    print("fingerprint", lockstep.fingerprint(generator))
