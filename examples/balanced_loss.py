"""The loss where the outputs are: no device has more to do, and the mean is right for uneven parts,
too.

python examples/balanced_loss.py
"""

import torch

import lockstep


def main():
    torch.manual_seed(0)
    images = torch.randn(17, 1, 28, 28)
    labels = torch.randint(10, (17,))
    model = lockstep.models.lenet()
    loss_fn = torch.nn.CrossEntropyLoss()
    alone = loss_fn(model(images), labels)

    # All outputs come to the first device, which alone computes the loss.
    gathering = lockstep.DataParallel(model, ["cpu", "cpu"])
    gathered = loss_fn(gathering(images), labels)

    # Each device computes the loss of its own outputs; a sum and a count come together.
    balanced = lockstep.DataParallel(model, ["cpu", "cpu"], loss=loss_fn)
    on_each = balanced(images, target=labels)

    # The mean of the devices' means counts a sample of 8 for more than one of 9.
    parts = lockstep.replicas.scatter((images, labels), ["cpu", "cpu"])
    of_means = torch.stack([loss_fn(model(x), y) for x, y in parts]).mean()
    for name, loss in {
        "alone": alone,
        "gathered": gathered,
        "on each": on_each,
        "mean of means": of_means,
    }.items():
        print(f"{name:13} {loss.item():.6f}, off by {abs(loss - alone).item():.1e}")


if __name__ == "__main__":
    main()
