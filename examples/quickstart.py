"""LeNet on handwritten digits, on as many workers as it is started with: the program of the README.

python examples/quickstart.py                            one worker
lockstep run -np 2 examples/quickstart.py                two, and the same bits
torchrun --nproc-per-node 2 examples/quickstart.py       under another launcher, and the same bits
"""

import torch

import lockstep

comm = lockstep.init()
torch.manual_seed(0)
train, test = lockstep.data.digits()  # 1,797 images, which come with the package
model = lockstep.models.lenet()
trainer = lockstep.Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    torch.nn.CrossEntropyLoss(),
    global_batch_size=64,  # samples in a step, over all workers
    virtual_workers=8,  # the same bits on 1 to 8 workers
)
trainer.fit(train, epochs=5, validate=test)
accuracy = trainer.evaluate(test)["accuracy"]  # on all workers: they share the work
if comm.rank == 0:
    print(f"accuracy {accuracy:.0%}, fingerprint of the weights {lockstep.fingerprint(model)[:8]}")
