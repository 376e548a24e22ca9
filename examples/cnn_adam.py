"""A convolutional network with dropout and Adam on a list of devices, with a progress bar, saved on
the CPU.

python examples/cnn_adam.py [DEVICE ...]      e.g. cpu cpu, or cuda:0 cuda:1
"""

import sys
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file

import lockstep


def make_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(14 * 14 * 32, 128),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(128, 10),
    )


def train(devices, path, epochs=3, batch_size=64):
    training, test = lockstep.data.digits()
    torch.manual_seed(0)
    model = lockstep.DataParallel(make_model(), devices, loss=torch.nn.CrossEntropyLoss())
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(epochs):
        model.train()
        total = 0.0
        batches = torch.randperm(len(training)).split(batch_size)
        for indices in track(batches, f"epoch {epoch + 1}/{epochs}"):
            images, labels = training.collated_batch(indices)
            optimizer.zero_grad()
            loss = model(images, target=labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(images)  # means of batches, the last of which is shorter
        print(f"loss {total / len(training):.4f}  test accuracy {accuracy(model, test):.2%}")
    save_file(model.state_dict(), path)  # names without "module.", tensors on the CPU


def accuracy(model, data):
    images, labels = data.collated_batch(range(len(data)))
    model.eval()
    with torch.no_grad():
        return (model(images).cpu().argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    path = Path("cnn_adam.safetensors")
    train(sys.argv[1:] or ["cpu", "cpu"], path)
    alone = make_model()
    alone.load_state_dict(load_file(path))
    print(f"loaded on one device: test accuracy {accuracy(alone, lockstep.data.digits()[1]):.2%}")
