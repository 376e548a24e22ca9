"""The program whose runs `blame.py` makes, and `lockstep blame` replays: one damaged sample in a
training.

It trains on the handwritten digits for 120 steps, or up to the first loss that is not finite, and
writes the loss over the undamaged data after the step with the sample, and ten steps later. A twin
without damage ends there.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep

STEPS = 120
LATER = 10
GLOBAL_BATCH = 16
NETWORKS = ("mlp", "lenet", "normed")
DAMAGES = ("none", "x1000", "nan")
SOURCES = ("map", "stream")

Sample = tuple[torch.Tensor, torch.Tensor]


class Digits(torch.utils.data.Dataset[Sample]):
    """The digits, one of them damaged."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return self.images[index], self.labels[index]


def as_sample(record: dict[str, Any]) -> Sample:
    """A sample of a line of a stream."""
    return torch.tensor(record["image"]).reshape(1, 28, 28), torch.tensor(record["label"])


def damaged(image: torch.Tensor, damage: str) -> torch.Tensor:
    """An image that is damaged so."""
    if damage == "x1000":
        return image * 1000
    image = image.clone()
    if damage == "nan":
        image[0, 14, 14] = torch.nan
    return image


def write_stream(folder: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    """The digits as four files of JSON lines."""
    folder.mkdir(parents=True)
    places = torch.arange(len(images)).tensor_split(4)
    for number, of_file in enumerate(places):
        lines = [
            json.dumps({"image": images[i].flatten().tolist(), "label": int(labels[i])})
            for i in of_file.tolist()
        ]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")


def data_folder(run_dir: Path) -> Path:
    """Where the files of a run's stream are."""
    return run_dir.parent / f"{run_dir.name}-data"


def digits_stream(run_dir: Path) -> Any:
    """The stream of a run."""
    files = str(data_folder(run_dir) / "*.jsonl")
    return lockstep.data.Stream(files, map=as_sample, shuffle_window=256)


def make_network(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network, and its optimizer."""
    if name == "mlp":
        layers = [nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)]
        model: nn.Module = nn.Sequential(*layers)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name == "lenet":
        model = lockstep.models.lenet()
    else:
        first = [nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)]
        second = [nn.Conv2d(8, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
        model = nn.Sequential(*first, *second, nn.Linear(256, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class LossOfAll(lockstep.callbacks.Callback):
    """The loss over the undamaged digits, in evaluation mode, after some steps.

    Args:
        steps: their numbers.
        images, labels: the digits.
    """

    def __init__(self, steps: tuple[int, ...], images: torch.Tensor, labels: torch.Tensor) -> None:
        self.losses: list[float] = []
        self._steps = steps
        self._images, self._labels = images, labels

    def on_train_step_end(self, trainer: Any, result: Any) -> None:
        """Measure the loss, if it is time."""
        if result.step in self._steps:
            trainer.model.eval()
            with torch.no_grad():
                output = trainer.model(self._images)
            trainer.model.train()
            self.losses.append(float(nn.functional.cross_entropy(output, self._labels)))


def main() -> None:
    """Train; the arguments are the run directory, the seed, the network, the damage, and the
    source of the data.
    """
    run_dir, text, network, damage, source = sys.argv[1:]
    seed = int(text)
    torch.set_num_threads(1)
    lockstep.init("cpu")
    digits, _ = lockstep.data.digits()
    images, labels = digits.collated_batch(list(range(len(digits))))
    bad = int(torch.randint(len(digits), (), generator=torch.Generator().manual_seed(seed)))
    all_images = images.clone()
    all_images[bad] = damaged(images[bad], damage)
    data: torch.utils.data.Dataset[Sample] = Digits(all_images, labels)
    if source == "stream":
        folder = data_folder(Path(run_dir))
        if not folder.exists():
            write_stream(folder, all_images, labels)
        data = digits_stream(Path(run_dir))
    order = lockstep.Loader(data, GLOBAL_BATCH, seed=seed).order(0)
    place = int((order == bad).nonzero())
    step = place // GLOBAL_BATCH
    torch.manual_seed(seed)
    model, optimizer = make_network(network)
    losses = LossOfAll((step, step + LATER), images, labels)
    trainer = lockstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        GLOBAL_BATCH,
        seed=seed,
        run_dir=run_dir,
        callbacks=[losses, lockstep.callbacks.Checkpoints("30steps")],
        virtual_workers=4,
    )
    with suppress(lockstep.DivergedError):
        trainer.fit(data, max_steps=STEPS if damage != "none" else step + LATER + 1)
    report = {"sample": bad, "step": step, "losses": losses.losses}
    Path(run_dir, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
