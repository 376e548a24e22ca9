"""What a sample is, in words and as a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Subset

from lockstep.data import Stream
from lockstep.proof.samples import Picture, describe, picture


def batch_of_one(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    image = torch.linspace(-1.0, 3.0, 64).reshape(1, *shape)
    return image, torch.tensor([7])


def write_lines(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps({"x": number}) + "\n" for number in range(count)))


def test_an_image_is_described_by_its_shape_and_range() -> None:
    assert describe(None, 3, batch_of_one(1, 8, 8)) == "[1, 8, 8] from -1 to 3, label 7"


def test_values_that_are_not_finite_are_counted_beside_the_range() -> None:
    image, label = batch_of_one(1, 8, 8)
    image[0, 0, 0, 0], image[0, 0, 0, 1] = torch.nan, torch.inf
    words = describe(None, 3, (image, label))
    assert words == "[1, 8, 8] from -0.873 to 3 and 2 not finite, label 7"


def test_a_sample_of_a_stream_is_named_by_file_and_record(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 3)
    write_lines(tmp_path / "b.jsonl", 2500)
    stream = Stream(str(tmp_path / "*.jsonl"))
    assert stream.locate(2) == (tmp_path / "a.jsonl", 2)
    assert stream.locate(3) == (tmp_path / "b.jsonl", 0)
    # in the third block of its file
    assert stream.locate(3 + 2100) == (tmp_path / "b.jsonl", 2100)
    with pytest.raises(IndexError, match="sample 2503 of 2503"):
        stream.locate(2503)
    of_subset = describe(Subset(stream, [0, 2103]), 1, torch.zeros(1, 2))
    assert of_subset == f"{tmp_path / 'b.jsonl'}, record 2100, [2] from 0 to 0"


@pytest.mark.parametrize("shape", [(1, 8, 8), (8, 8), (4, 8, 8), (3, 8, 8)])
def test_an_image_is_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = pytest.importorskip("PIL.Image")
    count = 64 * (shape[0] if len(shape) == 3 else 1)
    image = torch.arange(count, dtype=torch.float32).reshape(1, *shape)
    image[0, ..., 0, 0] = torch.nan
    found = picture(str(tmp_path / "blame"), 5, (image, torch.tensor([1])))
    assert found == Picture(str(tmp_path / "blame" / "sample-5.png"))
    read = images.open(found.path)
    assert read.size == (8, 8)
    assert read.getextrema() is not None
    last = read.getpixel((7, 7))
    assert (last if isinstance(last, int) else last[-1]) == 255


def test_without_pillow_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    found = picture(str(tmp_path), 5, batch_of_one(1, 8, 8))
    assert found == Picture(why_not="Pillow is not installed (pip install pillow)")
    # what is no image needs no Pillow
    assert picture(str(tmp_path), 5, torch.zeros(1, 64)) == Picture()


def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "blame").write_text("a file in its place")
    found = picture(str(tmp_path / "blame"), 5, batch_of_one(1, 8, 8))
    assert found.path == ""
    assert found.why_not.endswith("sample-5.png: File exists")
