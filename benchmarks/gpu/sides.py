"""The loops that are compared on a GPU: the tutorials', those written by hand, and Lockstep's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.data import ImageSet

LR = 0.01
MOMENTUM = 0.9

Make = Callable[[], nn.Module]


def small_mlp() -> nn.Module:
    """Three layers: hardly anything to compute."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


MODELS: dict[str, Make] = {
    "LeNet": lockstep.models.lenet,
    "ResNet-18": lockstep.models.resnet18,
    "MLP": small_mlp,
}


def made(make: Make, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with the same first values on each side, and its optimizer."""
    torch.manual_seed(0)
    model = make().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


class Single(Dataset[tuple[Tensor, Tensor]]):
    """Images one by one, as the tutorials' data sets give them."""

    def __init__(self, images: ImageSet) -> None:
        self._images = images.images
        self._labels = images.labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index].float() / 255, self._labels[index]


def tutorial_epoch(
    make: Make, images: ImageSet, batch: int, device: torch.device
) -> Callable[[], None]:
    """The tutorials' loop: DataLoader, nn.DataParallel, and waiting for the device at every
    batch.
    """
    bare, optimizer = made(make, device)
    model: nn.Module = nn.DataParallel(bare, device_ids=[0]) if device.type == "cuda" else bare
    loss_fn = nn.CrossEntropyLoss()
    loader = DataLoader(
        Single(images), batch, shuffle=True, num_workers=4 if len(images) > 10_000 else 0
    )

    def epoch() -> None:
        for inputs, labels in loader:
            inputs = inputs.to(device)
            labels = labels.to(device)
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()

    return epoch


class Resident:
    """Images in the memory of the device, and batches made there.

    Args:
        images: the images.
        device: the device.
        batch: images in a batch; what is left of an epoch is a smaller one.
    """

    def __init__(self, images: ImageSet, device: torch.device, batch: int) -> None:
        self._pixels = images.images.to(device)
        self._labels = images.labels.to(device)
        self._batch = batch
        self._scale = 1 / (255 * images.std[0])
        self._shift = -images.mean[0] / images.std[0]

    def epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches in another order each time."""
        order = torch.randperm(len(self._pixels), device=self._pixels.device)
        for index in torch.split(order, self._batch):
            pixels = self._pixels.index_select(0, index).float().mul_(self._scale).add_(self._shift)
            yield pixels, self._labels.index_select(0, index)


def hand_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[Tensor], object] = torch.autograd.backward,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A step as one writes it by hand, which does not wait; other libraries have a `backward` of
    their own.
    """
    loss_fn = nn.CrossEntropyLoss()

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = loss_fn(model(inputs), labels)
        backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def captured_step(make: Make, inputs: Tensor, labels: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A step by hand as one CUDA graph: forward and backward passes and update; other shapes run as
    usual.
    """
    model, _ = made(make, inputs.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    step = hand_step(model, optimizer)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(inputs, labels)
    torch.cuda.current_stream().wait_stream(side)
    own_inputs = inputs.clone()
    own_labels = labels.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(own_inputs, own_labels)

    def replay(inputs: Tensor, labels: Tensor) -> Tensor:
        if inputs.shape != own_inputs.shape:
            return step(inputs, labels)
        own_inputs.copy_(inputs)
        own_labels.copy_(labels)
        graph.replay()
        return loss

    return replay


def hand_epoch(step: Callable[[Tensor, Tensor], Tensor], data: Resident) -> Callable[[], None]:
    """An epoch by hand, whose losses are added up on the device."""

    def epoch() -> None:
        total = torch.zeros((), device=data._pixels.device)
        for inputs, labels in data.epoch():
            total += step(inputs, labels)
        float(total)

    return epoch


def trainer_epoch(
    make: Make, images: ImageSet, batch: int, compile_mode: str | None = None, **options: Any
) -> Callable[[], None]:
    """An epoch of `Trainer.fit`, with all that it does around it; compiled if a mode of the
    compiler is given.
    """
    comm = lockstep.init()
    model, optimizer = made(make, comm.device)
    if compile_mode is not None:
        model = lockstep.prepare_model(model, comm, compile_model=True, compile_mode=compile_mode)
    trainer = lockstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), batch, callbacks=[], **options
    )
    loader = trainer.loader(images)
    done = [0]

    def epoch() -> None:
        done[0] += 1
        trainer.fit(loader, epochs=done[0])

    return epoch
