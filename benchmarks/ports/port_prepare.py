"""The port with `lockstep.prepare`: the loop stays."""

import torch
from problem import BATCH, EPOCHS, data, make_model
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lockstep

torch.manual_seed(0)
train, test = data()
train_loader = DataLoader(train, BATCH, shuffle=True)
test_loader = DataLoader(test, BATCH)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.7)
prepared = lockstep.prepare(model, optimizer, scheduler, train_loader, max_grad_norm=1.0)
train_loader = prepared[-1]
for epoch in range(EPOCHS):
    model.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
    measured = lockstep.evaluate(model, test_loader, F.cross_entropy)
    if lockstep.init().rank == 0:
        print(f"epoch {epoch}: loss {measured['loss']:.4f}, accuracy {measured['accuracy']:.4f}")
if lockstep.init().rank == 0:
    torch.save(model.state_dict(), "model.pt")
