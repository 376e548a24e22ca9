"""LeNet on Fashion-MNIST, on as many workers as it is started with.

python examples/quickstart.py                            one worker
torchrun --nproc-per-node 4 examples/quickstart.py       four, and the same answer
"""

import torch

import lockstep

lockstep.init()
torch.manual_seed(0)
train, test = lockstep.data.fashion_mnist()
model = lockstep.models.lenet()
trainer = lockstep.Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    torch.nn.CrossEntropyLoss(),
    global_batch_size=256,  # over all workers: their number is a matter of speed
    run_dir="runs/quickstart",
)
trainer.fit(train, epochs=2, validate=test)
