"""ResNet-18 on a list of devices in one process, in short form.

python examples/devices_resnet18.py [DEVICE ...]      e.g. cpu cpu, or cuda:0 cuda:1
"""

import sys
import time

import torch

import lockstep


def train(devices, images=320, epochs=2, batch_size=16, lr=0.02, tested=360):
    training, test = lockstep.data.digits()
    torch.manual_seed(0)
    net = lockstep.DataParallel(
        lockstep.models.resnet18(), devices, loss=torch.nn.CrossEntropyLoss()
    )
    optimizer = torch.optim.SGD(net.parameters(), lr)
    for epoch in range(epochs):
        net.train()
        start = time.perf_counter()
        for indices in torch.randperm(len(training))[:images].split(batch_size):
            inputs, labels = training.collated_batch(indices)
            optimizer.zero_grad()
            net(inputs, target=labels).backward()
            optimizer.step()
        seconds = time.perf_counter() - start
        net.eval()
        inputs, labels = test.collated_batch(range(tested))
        with torch.no_grad():
            reached = (net(inputs).cpu().argmax(1) == labels).float().mean().item()
        print(
            f"epoch {epoch + 1}  time {seconds:.1f} s on {len(devices)} devices  test accuracy "
            f"{reached:.2%}"
        )


if __name__ == "__main__":
    train(sys.argv[1:] or ["cpu", "cpu"])
