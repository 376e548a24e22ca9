"""IDX files: read back as written; anything damaged gives an error that names the file."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import idx as idx_module
from lockstep.data.idx import read_idx, read_pair
from lockstep.errors import DataError


def idx(shape: tuple[int, ...], items: bytes, kind: int = 0x08) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, kind, len(shape), *shape) + items


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    return path


IMAGES = idx((2, 3, 4), bytes(range(24)))
LABELS = idx((2,), b"\x00\x09")

contents = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)).flatmap(
    lambda shape: st.tuples(
        st.just(shape), st.binary(min_size=(n := shape[0] * shape[1] * shape[2]), max_size=n)
    )
)


@given(contents, st.sampled_from(["x", "x.gz"]))
@settings(deadline=None, max_examples=40)
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, content: tuple[tuple[int, int, int], bytes], name: str
) -> None:
    shape, items = content
    path = write(tmp_path_factory.mktemp("idx"), name, idx(shape, items))
    array = read_idx(path, 3)
    assert array.shape == shape and array.dtype == torch.uint8
    assert bytes(array.flatten().tolist()) == items


@given(contents, st.sampled_from(["x", "x.gz"]))
@settings(deadline=None, max_examples=15)
def test_a_file_cut_off_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, content: tuple[tuple[int, int, int], bytes], name: str
) -> None:
    path = write(tmp_path_factory.mktemp("idx"), name, idx(*content))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=path.name):
            read_idx(path, 3)


@given(st.binary(max_size=60), st.sampled_from(["x", "x.gz"]), st.booleans())
@settings(deadline=None, max_examples=150)
def test_any_bytes_give_the_same_kind_of_error(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, name: str, headed: bool
) -> None:
    path = tmp_path_factory.mktemp("idx") / name
    head = b"\x1f\x8b\x08\x00" if name.endswith(".gz") else b"\x00\x00\x08\x03"
    path.write_bytes(head + junk if headed else junk)
    try:
        read_idx(path, 3)
    except DataError as error:
        assert str(path) in str(error)


def test_one_changed_byte_of_a_gzip_file_never_gives_other_items(tmp_path: Path) -> None:
    path = write(tmp_path, "x.gz", IMAGES)
    whole, refused = path.read_bytes(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            assert (
                bytes(read_idx(path, 3).flatten().tolist()) == IMAGES[16:]
            )  # a changed date harms nobody
        except DataError:
            refused += 1
    assert refused > len(whole) - 10


@pytest.mark.parametrize("name", ["x", "x.gz"])
@pytest.mark.parametrize(
    ("content", "expected", "got"),
    [
        (
            LABELS,
            "0x00000803 (images: uint8 with 3 dimensions)",
            "0x00000801 (labels: uint8 with 1 dimension)",
        ),
        (idx((1, 1, 1), b"....", 0x0D), "images: uint8", "images: float32 with 3 dimensions"),
        (idx((1, 1), b"."), "images", "array: uint8 with 2 dimensions"),
        (b"\x89PNG....", "0x00000803", "0x89504e47 (not an IDX file)"),
        (b"", "0x00000803", "an empty file"),
        (IMAGES[:9], "header of 16 bytes", "9: it is truncated"),
        (IMAGES[:-1], "24 bytes after the header, for shape (2, 3, 4)", "23"),
        (IMAGES + b".", "24 bytes after the header", "25|more"),
        (idx((0, 28, 28), b""), "at least one item", "(0, 28, 28)"),
        (idx((2**32 - 1,) * 3, b"...."), "bytes", "4|79228162458924105385300197375"),
    ],
)
def test_the_message_names_what_was_expected_and_found(
    tmp_path: Path, name: str, content: bytes, expected: str, got: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        read_idx(path, 3)
    message = str(caught.value)
    assert message.startswith(f"{path}: expected ") and expected in message
    assert any(text in message[message.index(", got ") :] for text in got.split("|"))


def test_a_name_that_does_not_fit_the_compression(tmp_path: Path) -> None:
    plain = tmp_path / "x.gz"
    plain.write_bytes(IMAGES)
    with pytest.raises(
        DataError, match=r"x\.gz: expected a gzip file \(first bytes 1f8b\), got first bytes 0000"
    ):
        read_idx(plain, 3)
    packed = tmp_path / "x"
    packed.write_bytes(gzip.compress(IMAGES))
    with pytest.raises(
        DataError, match=r"got 0x1f8b0800 \(a gzip file, whose name must end in \.gz\)"
    ):
        read_idx(packed, 3)


def test_a_file_that_is_missing_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: expected an IDX file, got no file of this name"):
        read_idx(tmp_path / "absent", 3)
    with pytest.raises(DataError, match="expected a file that can be read, got Is a directory"):
        read_idx(tmp_path, 3)


@pytest.mark.parametrize(
    "content",
    [idx((1, 1, 1), bytes(64 << 20)), idx((1, 1 << 15, 1 << 15), b"...")],
    ids=["bomb", "lying header"],
)
def test_memory_is_used_for_what_is_there_alone(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, "x.gz", content)
    del content
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="after the header"):
            read_idx(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_compressed_file_may_not_unpack_to_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idx_module, "_LARGEST_UNPACKED", 23)
    with pytest.raises(
        DataError, match=r"x\.gz: expected at most 23 bytes .* states 24\. .* unpack the file first"
    ):
        read_idx(write(tmp_path, "x.gz", IMAGES), 3)
    assert read_idx(write(tmp_path, "x", IMAGES), 3).shape == (2, 3, 4)


def test_a_pair_has_one_label_for_each_image(tmp_path: Path) -> None:
    images, labels = write(tmp_path, "images", IMAGES), write(tmp_path, "labels.gz", LABELS)
    pixels, numbers = read_pair(images, labels, 10)
    assert (
        pixels.shape == (2, 1, 3, 4) and numbers.tolist() == [0, 9] and numbers.dtype == torch.int64
    )
    three = write(tmp_path, "three", idx((3,), b"\0\1\2"))
    with pytest.raises(
        DataError, match=r"three: expected 2 labels, one for each image in images, got 3"
    ):
        read_pair(images, three, 10)
    with pytest.raises(DataError, match=r"labels\.gz: expected labels from 0 to 8, got 9"):
        read_pair(images, labels, 9)
