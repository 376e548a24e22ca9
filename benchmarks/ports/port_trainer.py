"""The port with `lockstep.Trainer`, which has the loop."""

import torch
from problem import BATCH, EPOCHS, data, make_model
from torch.nn import functional as F

import lockstep

torch.manual_seed(0)
train, test = data()
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
trainer = lockstep.Trainer(
    model, optimizer, F.cross_entropy, BATCH, max_grad_norm=1.0, schedule=lambda step: 0.7 ** (step // 20)
)
for row in trainer.fit(train, EPOCHS, validate=test):
    if trainer.comm.rank == 0:
        print(f"epoch {row['epoch'] - 1}: loss {row['val_loss']:.4f}, accuracy {row['val_accuracy']:.4f}")
if trainer.comm.rank == 0:
    torch.save(model.state_dict(), "model.pt")
