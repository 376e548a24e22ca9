"""What each of two replicas is given: a batch of 17 samples, and one of 15 beside it.

python examples/input_splitting.py
"""

import torch

import lockstep


class Model(torch.nn.Module):
    """Says what it sees."""

    def forward(self, inputs):  # noqa: D102
        print(f"in the model: {list(inputs[0].shape)} and {list(inputs[1].shape)}\n", end="")
        return inputs


def main():
    model = lockstep.DataParallel(Model(), ["cpu", "cpu"])
    inputs = [torch.rand(17, 2), torch.rand(15, 3)]
    print(f"outside: {list(inputs[0].shape)} and {list(inputs[1].shape)}")
    outputs = model(inputs)
    print(
        f"back: {list(outputs[0].shape)} and {list(outputs[1].shape)}, the same: "
        f"{torch.equal(inputs[0], outputs[0])}"
    )


if __name__ == "__main__":
    main()
