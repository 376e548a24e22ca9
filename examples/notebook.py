"""Two workers from a notebook cell, or from any function.

python examples/notebook.py
"""

import torch

import lockstep


def train(epochs: int) -> float:
    """Runs on every worker; what rank 0 returns comes back."""
    training, test = lockstep.data.digits()
    model = lockstep.models.lenet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    trainer = lockstep.Trainer(model, optimizer, torch.nn.CrossEntropyLoss(), global_batch_size=64)
    history = trainer.fit(training, epochs, validate=test)
    return history[-1]["val_accuracy"]


if __name__ == "__main__":
    accuracy = lockstep.launch(train, 5, workers=2)
    print(f"accuracy {accuracy:.2%}")
