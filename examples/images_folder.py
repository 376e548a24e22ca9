"""Trains on a folder of JPEG files, one subfolder for each class, that loader processes decode and
augment.

python examples/images_folder.py               # makes a small folder of pictures first
python examples/images_folder.py FOLDER
lockstep run -np 2 examples/images_folder.py
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

import lockstep

SIDE = 32


class Pictures(torch.utils.data.Dataset):
    """The pictures of a folder; as torchvision's ImageFolder, which works in its place."""

    def __init__(self, folder, augment):
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = sorted(path for path in folder.rglob("*.jpg"))
        self.augment = augment

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        with Image.open(file) as picture:
            picture = picture.convert("RGB").resize((SIDE, SIDE))
        image = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
        if (
            self.augment and torch.rand(()) < 0.5
        ):  # the same draw for this index on any worker, in any process
            image = image.flip(-1)
        return image, self.classes.index(file.parent.name)


def make_pictures(folder, count, seed):
    """Draw circles and squares of random colours and sizes."""
    draw = np.random.default_rng(seed)
    for kind in ("circle", "square"):
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            picture = Image.new("RGB", (48, 48), tuple(draw.integers(0, 90, 3)))
            x, y, size = *draw.integers(2, 14, 2), draw.integers(20, 32)
            shape = ImageDraw.Draw(picture)
            plot = shape.ellipse if kind == "circle" else shape.rectangle
            plot([x, y, x + size, y + size], fill=tuple(draw.integers(150, 256, 3)))
            picture.save(folder / kind / f"{number:04}.jpg")


def main():
    comm = lockstep.init()
    given = [Path(word) for word in sys.argv[1:]]
    folder = given[0] if given else Path("pictures")
    with comm.rank0_first():  # once, while the other workers wait
        if not folder.exists():
            make_pictures(folder / "train", 200, seed=1)
            make_pictures(folder / "test", 50, seed=2)
    train, test = (Pictures(folder / part, augment=part == "train") for part in ("train", "test"))
    torch.manual_seed(0)
    model = lockstep.models.lenet(len(train.classes), (3, SIDE, SIDE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    trainer = lockstep.Trainer(
        model,
        optimizer,
        torch.nn.CrossEntropyLoss(),
        global_batch_size=40,
        virtual_workers=4,
        num_workers=1,
    )
    trainer.fit(train, epochs=5, validate=test)
    if comm.rank == 0:
        print(lockstep.fingerprint(model, optimizer))
        print(f"accuracy {100 * trainer.history[-1]['val_accuracy']:.1f}%")


if __name__ == "__main__":
    main()
