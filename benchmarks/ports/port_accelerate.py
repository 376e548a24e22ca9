"""The port to Accelerate. The batch is split among the processes, as otherwise more of them make larger steps."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from problem import BATCH, EPOCHS, data, make_model
from torch.nn import functional as F
from torch.utils.data import DataLoader

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
set_seed(0)
train, test = data()
train_loader = DataLoader(train, BATCH, shuffle=True)
test_loader = DataLoader(test, BATCH)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.7)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
train_loader, test_loader = accelerator.prepare(train_loader, test_loader)
for epoch in range(EPOCHS):
    model.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()
    total = correct = 0.0
    with torch.no_grad():
        for inputs, targets in test_loader:
            outputs, targets = accelerator.gather_for_metrics((model(inputs), targets))
            total += F.cross_entropy(outputs, targets, reduction="sum").item()
            correct += (outputs.argmax(1) == targets).sum().item()
    accelerator.print(f"epoch {epoch}: loss {total / len(test):.4f}, accuracy {correct / len(test):.4f}")
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
