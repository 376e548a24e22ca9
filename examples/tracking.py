"""What a run can leave behind: tables, plots, TensorBoard events, traces, averaged weights, and
experiment trackers.

python examples/tracking.py [RUN_DIR]
lockstep run -np 2 examples/tracking.py

Weights & Biases and MLflow are used where they are installed, without a network: `wandb sync`
uploads the first, and `mlflow ui --backend-store-uri sqlite:///RUN_DIR/mlflow.db` shows the second.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import lockstep
from lockstep import callbacks


def trackers(run_dir):
    """The trackers that are installed."""
    found = []
    if find_spec("tensorboard"):
        found.append(callbacks.TensorBoard(every_steps=5))
    if find_spec("wandb"):
        found.append(callbacks.WandB("lockstep-example", mode="offline"))
    if find_spec("mlflow") and find_spec("sqlalchemy"):
        found.append(
            callbacks.MLflow(
                "lockstep-example", tracking_uri=f"sqlite:///{run_dir.absolute()}/mlflow.db"
            )
        )
    return found


def main(run_dir):
    comm = lockstep.init()
    torch.manual_seed(0)
    train, test = lockstep.data.digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    biases = [p for p in model.parameters() if p.ndim == 1]
    weights = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=3e-3
    )
    steps = 6 * -(-len(train) // 64)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 5e-3], total_steps=steps)
    average = callbacks.AveragedWeights(decay=0.9, validate=test, results=("loss", "accuracy"))
    trainer = lockstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        global_batch_size=64,
        scheduler=scheduler,
        max_grad_norm=5.0,
        run_dir=run_dir,
        callbacks=[
            callbacks.LearningRates(["weights", "biases"], momentum=True),
            average,
            callbacks.Profile(range(10, 13)),
            *trackers(run_dir),
            *callbacks.defaults(True),
        ],
    )
    row = trainer.fit(train, epochs=6, validate=test)[-1]
    if comm.rank == 0:
        print(
            f"accuracy {row['val_accuracy']:.3f}, of the averaged weights "
            f"{row['val_averaged_accuracy']:.3f}"
        )
        for path in sorted(Path(trainer.run_dir).iterdir()):
            print(f"{trainer.run_dir}/{path.name}{'/' * path.is_dir()}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tracking"))
