"""The program that is ported: one device, and nothing but PyTorch."""

import torch
from problem import BATCH, EPOCHS, data, make_model
from torch.nn import functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)
train, test = data()
train_loader = DataLoader(train, BATCH, shuffle=True)
test_loader = DataLoader(test, BATCH)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.7)
for epoch in range(EPOCHS):
    model.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()
    total = correct = 0.0
    with torch.no_grad():
        for inputs, targets in test_loader:
            outputs = model(inputs)
            total += F.cross_entropy(outputs, targets, reduction="sum").item()
            correct += (outputs.argmax(1) == targets).sum().item()
    print(f"epoch {epoch}: loss {total / len(test):.4f}, accuracy {correct / len(test):.4f}")
torch.save(model.state_dict(), "model.pt")
