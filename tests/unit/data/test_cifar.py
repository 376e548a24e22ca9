"""CIFAR-10's pickles: read when they are what they should be, harmless when they are not."""

from __future__ import annotations

import copyreg
import gzip
import io
import os
import pickle
import random
import struct
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data import cifar
from lockstep.errors import DataError

ROWS = 3
PIXELS = np.random.default_rng(0).integers(0, 256, (ROWS, 3072), dtype=np.uint8)
LABELS = [9, 0, 4]


def text(value: bytes) -> bytes:
    return b"U" + bytes([len(value)]) + value


def python2_batch(
    pixels: bytes = PIXELS.tobytes(),
    shape: bytes = b"K" + bytes([ROWS]) + b"M" + struct.pack("<H", 3072) + b"\x86",
    kind: bytes = b"u1",
    fortran: bytes = b"\x89",
    labels: bytes = b"](K\x09K\x00K\x04e",
) -> bytes:
    """A batch as Python 2.6 wrote it, opcode by opcode, with entries that are not needed."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t(K\x01" + shape +
        b"cnumpy\ndtype\nq\n" + text(kind) +
        b"K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb" +
        fortran + b"T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    )  # fmt: skip
    names = (
        b"](" + text(b"cat_s_000001.png") + b"r\x00\x02\x00\x00" + text(b"dog_s_000002.png") + b"e"
    )
    return (
        b"\x80\x02}q\x01(" + text(b"batch_label") + text(b"training batch 1 of 5") + text(b"labels") + labels +
        text(b"data") + array + text(b"filenames") + names + b"u."
    )  # fmt: skip


def check(images: torch.Tensor, labels: torch.Tensor) -> None:
    assert images.dtype == torch.uint8 and images.shape == (ROWS, 3, 32, 32)
    assert images.flatten(1).tolist() == PIXELS.tolist()
    assert labels.dtype == torch.int64 and labels.tolist() == LABELS


def test_a_batch_that_python_2_wrote() -> None:
    assert pickle.loads(python2_batch(), encoding="bytes")[b"data"].tolist() == PIXELS.tolist()
    check(*cifar.parse_batch("x", python2_batch()))


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("key", [str, str.encode])
@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_a_batch_that_python_3_wrote(protocol: int, key: Any, module: bytes) -> None:
    data = pickle.dumps({key("data"): PIXELS, key("labels"): LABELS}, protocol=protocol)
    if protocol < 4:  # in protocol 4 the length of the name stands before it
        data = data.replace(b"numpy._core.multiarray", module).replace(
            b"numpy.core.multiarray", module
        )
    check(*cifar.parse_batch("x", data))


class Payload:
    """Pickles to a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def hostile_pickles(witness: Path) -> dict[str, bytes]:
    command, code = f"touch {witness}", f"open({str(witness)!r}, 'w').close()"
    in_batch = {"labels": LABELS, "data": Payload(eval, code)}
    return {
        "system": b"cos\nsystem\n(" + text(command.encode()) + b"tR.",
        "posix": b"\x80\x02cposix\nsystem\n" + text(command.encode()) + b"\x85R.",
        "eval": pickle.dumps(Payload(eval, code), 2),
        "exec in the data": pickle.dumps(in_batch, 2),
        "protocol 4": pickle.dumps(in_batch, 4),
        "protocol 5": pickle.dumps(in_batch, 5),
        "getattr": b"\x80\x02c__builtin__\ngetattr\ncos\nsystem\n\x86R.",
        "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.",
        "through numpy": b"\x80\x04\x8c\x05numpy\x8c\x0dos.sys.modules\x93.",
        "instance": b"(ios\nsystem\n" + text(command.encode()) + b".",
        "object": b"(cos\nsystem\n" + text(command.encode()) + b"o.",
        "new object": b"\x80\x02cnumpy\nndarray\n(tN\x81.",
        "persistent": b"\x80\x02" + text(b"x") + b"Q.",
        "extension": b"\x80\x02\x82\x01.",
    }


@pytest.mark.parametrize("name", list(hostile_pickles(Path("x"))))
def test_a_hostile_pickle_is_refused_and_does_not_run(tmp_path: Path, name: str) -> None:
    witness = tmp_path / "it-ran"
    with pytest.raises(
        DataError, match=r"^the-file: expected a pickled CIFAR-10 batch, got UnpicklingError"
    ):
        cifar.parse_batch("the-file", hostile_pickles(witness)[name])
    assert not witness.exists()


@pytest.mark.parametrize(
    "name", ["system", "posix", "eval", "exec in the data", "protocol 4", "protocol 5"]
)
def test_the_hostile_pickles_do_run_elsewhere(tmp_path: Path, name: str) -> None:
    witness = tmp_path / "it-ran"
    pickle.loads(hostile_pickles(witness)[name])
    assert witness.exists()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "a memo of 2147483647 entries"),
        (b"Np2147483647\n.", "a memo of 2147483647 entries"),
        (b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns.", "opcode TUPLE1"),
        (
            b"\x80\x02}N" + b"2\x86" * 60 + b"Ns.",
            "opcode TUPLE2",
        ),  # whose hash is that of 2**60 values
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.", "got"),
        (b"\x80\x02T\xff\xff\xff\x7fx.", "got"),
    ],
    ids=["memo", "memo of text", "nesting", "many times the same", "long bytes", "long text"],
)
def test_a_pickle_that_would_use_up_memory_or_stack(data: bytes, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        cifar.parse_batch("x", data)


def test_objects_of_the_extension_registry_are_refused_though_they_are_known() -> None:
    copyreg.add_extension("os", "getcwd", 0x77)
    try:
        assert (
            pickle.loads(b"\x80\x02\x82\x77.") is os.getcwd
        )  # from now on without a look for its name
        with pytest.raises(DataError, match="the opcode EXT1, which is not allowed here"):
            cifar.parse_batch("x", b"\x80\x02\x82\x77)R.")
    finally:
        copyreg.remove_extension("os", "getcwd", 0x77)


def test_no_pickle_leaves_anything_behind() -> None:
    # builds upon the name itself: sets the attribute that says what the name stands for
    spoil = b"\x80\x02cnumpy\ndtype\nN}" + text(b"role") + text(b"encode") + b"s\x86b."
    with pytest.raises(DataError):
        cifar.parse_batch("x", spoil)
    check(*cifar.parse_batch("x", python2_batch()))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a pickled CIFAR-10 batch"),
        (b"PK\x03\x04 no pickle", "a pickled CIFAR-10 batch"),
        (b"\x80\x02]q\x00.", "a dictionary with 'data' and 'labels', got list"),
        (pickle.dumps({"data": PIXELS}, 2), "an entry 'labels', got"),
        (
            pickle.dumps({"fine_labels": LABELS, "data": PIXELS}, 2),
            "an entry 'labels', got .*fine_labels",
        ),
        (pickle.dumps({"data": [1, 2], "labels": LABELS}, 2), "'data' as an array, got list"),
        (pickle.dumps({"data": PIXELS[0], "labels": LABELS}, 2), "two-dimensional array"),
        (python2_batch(kind=b"O8"), r"type u1 \(uint8\), got b'O8'"),
        (
            pickle.dumps({"data": PIXELS.astype(np.float32), "labels": LABELS}, 2),
            "u1 .uint8., got 'f4'",
        ),
        (
            pickle.dumps({"data": PIXELS.astype(object), "labels": LABELS}, 2),
            "u1 .uint8., got 'O8'",
        ),
        (python2_batch(fortran=b"\x88"), "Fortran order"),
        (
            python2_batch(shape=b"J\xff\xff\xff\x7fM\x00\x0c\x86"),
            r"got shape \(2147483647, 3072\) with 9216 bytes",
        ),
        (python2_batch(shape=b"K\x09M\x00\x04\x86"), r"got shape \(9, 1024\) with 9216 bytes"),
        (
            python2_batch(shape=b"K\x00M\x00\x0c\x86", pixels=b""),
            r"got shape \(0, 3072\) with 0 bytes",
        ),
        (python2_batch(shape=b"K\x03U\x01x\x86"), r"got shape \(3, b'x'\)"),
        (python2_batch(pixels=PIXELS.tobytes()[:-1]), "with 9215 bytes"),
        (python2_batch(labels=b"](K\x01K\x02e"), "'labels' as a list of 3 numbers, got 2"),
        (python2_batch(labels=b"K\x01"), "'labels' as a list of 3 numbers, got int"),
        (python2_batch(labels=b"](K\x01K\x02K\x0ae"), "labels from 0 to 9, got 10"),
        (python2_batch(labels=b"](K\x01K\x02U\x01xe"), "labels from 0 to 9, got b'x'"),
    ],
)
def test_what_is_no_batch_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^the-file: expected .*{message}"):
        cifar.parse_batch("the-file", data)


def test_no_damage_gives_another_kind_of_error() -> None:
    whole = python2_batch()
    draw = random.Random(0)
    for length in [*range(400), *range(9500, len(whole))]:
        with pytest.raises(DataError):
            cifar.parse_batch("x", whole[:length])
    for _ in range(3000):
        place = draw.choice([draw.randrange(400), draw.randrange(9400, len(whole))])
        with suppress(DataError):
            cifar.parse_batch(
                "x", whole[:place] + bytes([draw.randrange(256)]) + whole[place + 1 :]
            )


def batches() -> dict[str, bytes]:
    return {
        name: python2_batch(labels=b"](K" + bytes([i]) + b"K\x00K\x00e")
        for i, name in enumerate(cifar.BATCHES)
    }


def archive(path: Path, members: dict[str, bytes], folder: str = cifar.FOLDER) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def unpacked(folder: Path, members: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, content in members.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_and_an_archive_give_the_same(tmp_path: Path) -> None:
    # the published archive has other files between the batches, and another order
    members = {
        "batches.meta": b"no pickle",
        **dict(reversed(batches().items())),
        "readme.html": b".",
    }
    from_folder = cifar.read_folder(unpacked(tmp_path / "folder", members))
    from_archive = cifar.read_archive(archive(tmp_path / "a.tar.gz", members))
    assert set(from_folder) == set(from_archive) == set(cifar.BATCHES)
    for i, name in enumerate(cifar.BATCHES):
        assert from_folder[name][1].tolist() == from_archive[name][1].tolist() == [i, 0, 0]
        assert torch.equal(from_folder[name][0], from_archive[name][0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "folder"]


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    members = batches()
    del members["data_batch_3"]
    with pytest.raises(
        DataError, match="folder/data_batch_3: expected a batch of CIFAR-10, got no file"
    ):
        cifar.read_folder(unpacked(tmp_path / "folder", members))
    with pytest.raises(
        DataError, match=r"a\.tar\.gz: expected the batches .* got none named data_batch_3$"
    ):
        cifar.read_archive(archive(tmp_path / "a.tar.gz", members))
    with pytest.raises(
        DataError, match=r"a\.tar\.gz: expected the batches .* got none named data_batch_1, "
    ):
        cifar.read_archive(archive(tmp_path / "a.tar.gz", batches(), folder="elsewhere"))
    with pytest.raises(DataError, match="absent: expected the archive of CIFAR-10, got no file"):
        cifar.read_archive(tmp_path / "absent")


def test_an_archive_packed_with_leading_dots(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.gz", batches(), folder=f"./{cifar.FOLDER}")
    assert set(cifar.read_archive(path)) == set(cifar.BATCHES)


def test_a_bad_batch_in_an_archive_is_named(tmp_path: Path) -> None:
    members = batches() | {"test_batch": b"junk"}
    with pytest.raises(
        DataError, match=r"a\.tar\.gz \(cifar-10-batches-py/test_batch\): expected a pickled"
    ):
        cifar.read_archive(archive(tmp_path / "a.tar.gz", members))


def test_a_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(f"{cifar.FOLDER}/test_batch")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    with pytest.raises(DataError, match=r"none named data_batch_1, .*test_batch"):
        cifar.read_archive(path)


def test_an_archive_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.gz", batches())
    whole = path.read_bytes()
    for length in [*range(40), *range(40, len(whole) - 2000, 997)]:
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"a\.tar\.gz"):
            cifar.read_archive(path)


def test_a_damaged_archive_gives_no_other_kind_of_error(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.gz", batches())
    tar, draw = gzip.decompress(path.read_bytes()), random.Random(0)
    for _ in range(200):
        damaged = bytearray(tar)
        for _ in range(3):
            damaged[draw.randrange(600)] = draw.randrange(256)
        path.write_bytes(gzip.compress(bytes(damaged), 1))
        try:
            cifar.read_archive(path)
        except DataError as error:
            assert str(error).startswith(str(path))


def test_an_archive_that_unpacks_without_end_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "_LARGEST_ARCHIVE", 1 << 20)
    path = archive(tmp_path / "a.tar.gz", {"batches.meta": bytes(4 << 20), **batches()})
    with pytest.raises(
        DataError, match=r"a\.tar\.gz: expected at most 1048576 bytes when unpacked, got more"
    ):
        cifar.read_archive(path)


def test_a_batch_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "_LARGEST_BATCH", 100)
    with pytest.raises(
        DataError, match="data_batch_1: expected a batch of at most 100 bytes, got more"
    ):
        cifar.read_folder(unpacked(tmp_path / "folder", batches()))
    with pytest.raises(
        DataError, match=r"\(cifar-10-batches-py/data_batch_1\): expected at most 100 bytes, got 9"
    ):
        cifar.read_archive(archive(tmp_path / "a.tar.gz", batches()))
