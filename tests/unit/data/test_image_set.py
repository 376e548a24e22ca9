"""ImageSet: what it hands out, and what it refuses."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.image_set import ImageSet
from lockstep.errors import DataError


def make(
    n: int = 6, shape: tuple[int, int, int] = (3, 5, 7), classes: int = 4, seed: int = 0
) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, classes, (n,), generator=generator)
    mean = [0.1 + 0.2 * c for c in range(shape[0])]
    std = [0.3 + 0.1 * c for c in range(shape[0])]
    return ImageSet(images, labels, [f"c{i}" for i in range(classes)], "made", mean, std)


def test_an_item_is_standardised_per_channel() -> None:
    images = make()
    image, label = images[2]
    mean, std = torch.tensor(images.mean).view(3, 1, 1), torch.tensor(images.std).view(3, 1, 1)
    assert image.dtype == torch.float32 and image.shape == (3, 5, 7)
    torch.testing.assert_close(image, (images.images[2] / 255 - mean) / std)
    assert label.dtype == torch.int64 and label.shape == () and label == images.labels[2]


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    indices=st.lists(st.integers(0, 5), max_size=12),
    seed=st.integers(0, 5),
)
@settings(deadline=None, max_examples=60)
def test_a_batch_is_bitwise_the_stacked_items(
    shape: tuple[int, int, int], indices: list[int], seed: int
) -> None:
    images = make(shape=shape, seed=seed)
    inputs, labels = images.collated_batch(indices)
    assert inputs.dtype == torch.float32 and labels.dtype == torch.int64
    assert inputs.shape == (len(indices), *shape) and labels.shape == (len(indices),)
    for position, index in enumerate(indices):
        image, label = images[index]
        assert torch.equal(inputs[position].view(torch.int32), image.view(torch.int32))
        assert labels[position] == label


def test_a_batch_takes_a_tensor_of_indices_and_leaves_the_images_alone() -> None:
    images = make()
    before = images.images.clone()
    inputs, _ = images.collated_batch(torch.tensor([5, 0]))
    inputs.zero_()
    assert torch.equal(images.images, before)


@pytest.mark.parametrize("indices", [[6], [-1]])
def test_a_batch_beyond_the_ends_is_refused(indices: list[int]) -> None:
    with pytest.raises(IndexError):
        make().collated_batch(indices)


def test_it_can_be_iterated_and_pickled() -> None:
    images = pickle.loads(pickle.dumps(make()))
    assert len(list(images)) == len(images) == 6
    assert images.shape == (3, 5, 7)
    assert images.classes == ("c0", "c1", "c2", "c3") and images.name == "made"
    assert repr(images) == "ImageSet('made', 6 images of 3x5x7, 4 classes)"


GOOD_IMAGES = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
GOOD_LABELS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("images", "labels", "mean", "std", "expected", "got"),
    [
        (GOOD_IMAGES.float(), GOOD_LABELS, [0.5], [1.0], "torch.uint8", "torch.float32"),
        (GOOD_IMAGES[0], GOOD_LABELS, [0.5], [1.0], "(n, channels, height, width)", "(1, 4, 4)"),
        (GOOD_IMAGES[:0], GOOD_LABELS[:0], [0.5], [1.0], "at least one", "(0, 1, 4, 4)"),
        (GOOD_IMAGES, GOOD_LABELS.int(), [0.5], [1.0], "torch.int64", "torch.int32"),
        (GOOD_IMAGES, GOOD_LABELS[None], [0.5], [1.0], "(n,)", "(1, 2)"),
        (GOOD_IMAGES, GOOD_LABELS[:1], [0.5], [1.0], "each of the 2 images", "1 labels"),
        (GOOD_IMAGES, GOOD_LABELS + 1, [0.5], [1.0], "0 to 1", "1 to 2"),
        (GOOD_IMAGES, GOOD_LABELS - 1, [0.5], [1.0], "0 to 1", "-1 to 0"),
        (GOOD_IMAGES, GOOD_LABELS, [0.5, 0.5], [1.0], "each of 1 channels", "(0.5, 0.5)"),
        (GOOD_IMAGES, GOOD_LABELS, [0.5], [0.0], "std above 0", "(0.0,)"),
        (GOOD_IMAGES, GOOD_LABELS, [float("nan")], [1.0], "finite mean", "(nan,)"),
    ],
)
def test_what_does_not_fit_is_refused(
    images: torch.Tensor,
    labels: torch.Tensor,
    mean: list[float],
    std: list[float],
    expected: str,
    got: str,
) -> None:
    ImageSet(GOOD_IMAGES, GOOD_LABELS, ["a", "b"], "made", [0.5], [1.0])
    with pytest.raises(DataError) as caught:
        ImageSet(images, labels, ["a", "b"], "made", mean, std)
    message = str(caught.value)
    assert message.startswith("made: expected") and expected in message
    assert got in message[message.index(", got") :]
