"""The same bits on one worker, two or three: the last line is always the same.

python examples/same_bits.py                             one worker
lockstep run -n 2 examples/same_bits.py                  two
torchrun --nproc-per-node 3 examples/same_bits.py        three
"""

import torch

import lockstep

comm = lockstep.init("cpu")
torch.manual_seed(0)
train, _ = lockstep.data.digits()
model = torch.nn.Sequential(lockstep.models.lenet(), torch.nn.Dropout(0.1))
optimizer = torch.optim.AdamW(model.parameters())

trainer = lockstep.Trainer(
    model, optimizer, torch.nn.CrossEntropyLoss(), global_batch_size=64, virtual_workers=8
)
trainer.fit(train, epochs=1)
if comm.rank == 0:
    print(lockstep.fingerprint(model, optimizer), f"with {comm.size} worker{'s'[: comm.size != 1]}")
