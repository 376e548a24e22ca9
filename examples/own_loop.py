"""The same training with a loop of one's own.

python examples/own_loop.py [EPOCHS]
"""

import sys

import torch

import lockstep

comm = lockstep.init()
torch.manual_seed(0)
train, test = lockstep.data.digits()
model = lockstep.models.lenet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_fn = torch.nn.CrossEntropyLoss()

loader = lockstep.Loader(train, global_batch_size=64, seed=0)
step = lockstep.TrainStep(model, optimizer, loss_fn)
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
    for batch in loader.epoch(epoch):
        loss = step(batch)  # the mean over the global batch, the same on every worker
    measured = lockstep.evaluate(model, lockstep.Loader(test, global_batch_size=256), loss_fn)
    if comm.rank == 0:
        print(f"epoch {epoch + 1}  loss {float(loss):.4f}  accuracy {measured['accuracy']:.2%}")
