"""Each format of shards: what was written is read, and damage is one line that names the file."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lockstep.data.formats import json_lines, tar_files
from lockstep.data.stream import Stream
from lockstep.errors import ConfigError, DataError

ROWS = [{"number": i, "values": [i / 2, float(i)], "text": f"é{i}"} for i in range(2500)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_jsonl(path: Path) -> Path:
    lines = [json.dumps(row) for row in ROWS]
    path.write_text(
        "\r\n\n".join(lines[:1200]) + "\n" + "\n".join(lines[1200:])
    )  # empty lines, none at the end
    return path


def write_parquet(path: Path) -> Path:
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(ROWS), path, row_group_size=700, write_page_checksum=True
    )
    return path


def write_arrow(path: Path, kind: Any = pyarrow.ipc.new_file) -> Path:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(path), "wb") as file, kind(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=600)
    return path


def write_arrow_stream(path: Path) -> Path:
    return write_arrow(path, pyarrow.ipc.new_stream)


def write_tar(path: Path, keys: int = 250) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for folder in ("photos", "empty"):
            entry = tarfile.TarInfo(folder)
            entry.type = tarfile.DIRTYPE
            archive.addfile(entry)
        for key in range(keys):
            long = "a" * 120 if key == 120 else "a"  # a name that takes a header of its own
            for ending, data in (("txt", b"x" * key), ("SEG.png", str(key).encode())):
                member = tarfile.TarInfo(f"photos/{long}{key}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def write_tokens(path: Path) -> Path:
    np.arange(60_003, dtype=np.uint16).tofile(path)
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "a.jsonl": write_jsonl,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "stream.arrow": write_arrow_stream,
    "a.tar": write_tar,
    "a.bin": write_tokens,
}


def open_stream(path: Path) -> Stream:
    return Stream(path, block_size=8) if path.suffix == ".bin" else Stream(path)


# --- round trips
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "stream.arrow"])
def test_rows(tmp_path: Path, name: str) -> None:
    stream = open_stream(WRITERS[name](tmp_path / name))
    assert len(stream.block_sizes) > 2
    found = list(stream)
    assert [{**row, "values": list(row["values"])} for row in found] == ROWS
    if name != "a.jsonl":
        found[0]["values"][0] = 1.0  # an array, which can be written to


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow"])
def test_some_columns(tmp_path: Path, name: str) -> None:
    path = WRITERS[name](tmp_path / name)
    assert Stream(path, columns=["text"])[5] == {"text": "é5"}
    with pytest.raises(
        DataError, match=f"{name}: ValueError: it has no column 'label', only number, values, text"
    ):
        Stream(path, columns=["label"])


def test_rows_of_other_types(tmp_path: Path) -> None:
    columns = {
        "nothing": pyarrow.array([None, [1]], pyarrow.list_(pyarrow.int16())),
        "gaps": [[1, None], [2, 3]],
        "texts": [["a"], []],
        "bytes": [b"\0", b""],
        "kind": pyarrow.array(["x", "y"]).dictionary_encode(),
        "fixed": pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.float32(), 2)),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    first, second = Stream(tmp_path / "a.parquet")
    assert {**first, "fixed": first["fixed"].tolist()} == {
        "nothing": None,
        "gaps": [1, None],
        "texts": ["a"],
        "bytes": b"\0",
        "kind": "x",
        "fixed": [1.0, 2.0],
    }
    assert first["fixed"].dtype == np.float32 and second["nothing"].tolist() == [1]


def test_samples_of_a_tar_file(tmp_path: Path) -> None:
    stream = Stream(write_tar(tmp_path / "a.tar"))
    assert stream.block_sizes.tolist() == [100, 100, 50]
    assert stream[7] == {"__key__": "photos/a7", "txt": b"x" * 7, "seg.png": b"7"}
    assert [int(sample["seg.png"]) for sample in stream] == [*range(250)]


def test_tokens(tmp_path: Path) -> None:
    stream = Stream(write_tokens(tmp_path / "a.bin"), block_size=1000)
    assert len(stream) == 60 and stream.block_sizes.tolist() == [60]
    inputs, targets = stream[59]
    assert inputs.tolist() == [*range(59_000, 60_000)] and targets.tolist() == [
        *range(59_001, 60_001)
    ]
    stream = Stream(tmp_path / "a.bin", block_size=3)
    assert len(stream) == 20_000 and stream[19_999][1].tolist() == [59_998, 59_999, 60_000]
    np.array([5, -1, 7], dtype=np.int32).tofile(tmp_path / "b.bin")
    (sample,) = Stream(tmp_path / "b.bin", block_size=2, dtype="int32")
    assert sample[1].tolist() == [-1, 7]


# a shard that MDSWriter of mosaicml-streaming 0.13 has written, and what its index says of it
SHARD = zlib.decompress(
    base64.b85decode(
        "c-noD(MrQG6o%6lWbDoh?@KOaNE2n2-pu!qQL;7NB26kyD^4AF;mi0OzJU+qJZFi+V&|c!C;5}}{UM16Auj<TpOEJvA#ae+bXixOHn}v*"
        "x=?0iX%^p7Q;4P!8#;-pZJS(~7Ke*XEA5X~$feSv!l~b#l~pa;OP+BQeb1e(jc>uyft=DgjJ&TAS~|~z<3g=^Zs3HaRFAUwhup(j_2jUotE"
        "x%-_n+>+-wJc>`o59YDqv@RftGcnMGJGPi~Wh#!mb@2d(bPdlvcQ9dd-qFonC?dAREu&+Y`9^Gf22{5<!lAJskz`8Y~$IvP&))aWV51-b"
        "<iuGT(l@CuDS-3Q{o0Wr5?qB6GI$;kgXCEEpf>M#v2Z$vpHYzCrR=pUjcW!*8{gq4@"
    )
)
COLUMNS = {
    "array": "ndarray",
    "big": "str_int",
    "bytes": "bytes",
    "dec": "str_decimal",
    "fixed": "ndarray:float32:2",
    "int": "int",
    "json": "json",
    "str": "str",
    "u8": "uint8",
}


def mds_index(**changes: Any) -> dict[str, Any]:
    entry = {
        "column_encodings": [*COLUMNS.values()],
        "column_names": [*COLUMNS],
        "column_sizes": [None, None, None, None, 8, 8, None, None, 1],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "samples": 3,
        "version": 2,
        "zip_data": None,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(SHARD), "hashes": {}},
    }
    return {**entry, **changes}


def write_mds(folder: Path, data: bytes = SHARD, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    entry = mds_index(**changes)
    (folder / (entry["zip_data"] or entry["raw_data"])["basename"]).write_bytes(data)
    (folder / "index.json").write_text(json.dumps({"shards": [entry], "version": 2}))
    return folder


def packed(name: str, size: int) -> dict[str, Any]:
    return {"basename": f"shard.00000.mds.{name}", "bytes": size, "hashes": {}}


@pytest.mark.parametrize("kind", ["", "gz", "bz2:9", "zstd:7"])
def test_mds(tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {}
    data = SHARD
    if kind:
        pack = {
            "gz": gzip.compress,
            "bz2": bz2.compress,
            "zstd": lambda raw: pyarrow.compress(raw, "zstd", asbytes=True),
        }
        data = pack[kind.partition(":")[0]](SHARD)
        changes = {"compression": kind, "zip_data": packed(kind.partition(":")[0], len(data))}
    stream = Stream(write_mds(tmp_path / "mds", data, **changes))
    assert len(stream) == 3 and stream.block_sizes.tolist() == [3]
    sample = stream[2]
    assert sample.pop("array").tolist() == [[0, 1, 2]] and sample.pop("fixed").tolist() == [
        2.0,
        0.5,
    ]
    assert sample == {
        "int": -2,
        "str": "é2",
        "bytes": b"\2\xff",
        "json": {"a": [2]},
        "u8": 2,
        "big": 10**20 + 2,
        "dec": Decimal("0.1"),
    }


def test_files_are_taken_in_the_order_of_their_names_or_as_given(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(f'"{name}"\n')
    (tmp_path / "none.jsonl").write_text("")
    assert list(Stream(str(tmp_path / "*.jsonl"))) == ["a", "b", "c"]
    assert list(Stream([tmp_path / "c.jsonl", str(tmp_path / "[ab].jsonl")])) == ["c", "a", "b"]
    assert list(Stream(tmp_path / "a.jsonl", read="bin", block_size=1, dtype="uint16")) != []


# --- kept indices
# ---------------------------------------------------------------------------------------------


def test_a_file_is_counted_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")
    kept = tmp_path / ".a.jsonl.lockstep-index.json"
    stream = Stream(path)
    text = kept.read_text()
    with monkeypatch.context() as patched:
        patched.setattr(json_lines.JsonLines, "blocks", None)
        assert list(Stream(path)) == list(stream)
    path.write_text('"other"\n')
    assert list(Stream(path)) == ["other"]
    for damaged in (
        "",
        "{}",
        text,
        kept.read_text().replace("[1]", "[0]"),
        kept.read_text().replace("[1]", "[1,1]"),
    ):
        kept.write_text(damaged)
        assert list(Stream(path)) == ["other"], damaged


def test_the_index_of_a_folder_that_cannot_be_written_is_in_the_home(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    path = write_tar(tmp_path / "data" / "a.tar", 3)
    (
        tmp_path / "data" / ".a.tar.lockstep-index.json"
    ).mkdir()  # root may write into any folder, but not over this
    assert len(Stream(path)) == 3
    assert len([*(home / ".cache" / "lockstep" / "index").iterdir()]) == 1
    monkeypatch.setattr(tar_files.Tar, "blocks", None)
    assert len(Stream(path)) == 3


def test_many_files_of_a_folder_have_one_index(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        (tmp_path / f"{number:02d}.jsonl").write_text(f"{number}\n")
    pattern, kept = str(tmp_path / "*.jsonl"), tmp_path / ".folder.lockstep-index.json"
    stream = Stream(pattern)
    assert list(stream) == list(range(40))
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == [kept]
    with monkeypatch.context() as patched:
        patched.setattr(json_lines.JsonLines, "blocks", None)
        again = Stream(pattern)
        assert list(again) == list(range(40))
        assert again.order_settings() == stream.order_settings()
        assert list(Stream(sorted(tmp_path.glob("[0-2]*.jsonl")))) == list(range(30))
    (tmp_path / "07.jsonl").write_text("700\n701\n")
    changed = [*range(7), 700, 701, *range(8, 40)]
    assert list(Stream(pattern)) == changed
    for damaged in (
        "",
        "{}",
        kept.read_text().replace("[1]", "[0]"),
        kept.read_text().replace("[1]", "[1,1]"),
    ):
        kept.write_text(damaged)
        assert list(Stream(pattern)) == changed, damaged
    kept.unlink()
    kept.mkdir()  # root may write into any folder, but not over this
    assert list(Stream(pattern)) == changed
    assert len([*(home / ".cache" / "lockstep" / "index").iterdir()]) == 1


def test_the_settings_of_the_order_are_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(write_jsonl(tmp_path / "a.jsonl"))
    monkeypatch.setattr(
        stream, "_files", None
    )  # which a position of the loader does not go through
    assert stream.order_settings()["files"].startswith("1 from a.jsonl, ")


# --- damage
# --------------------------------------------------------------------------------------------------


def message(action: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow", "a.tar"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, name: str, part: float) -> None:
    path = WRITERS[name](tmp_path / name)
    os.truncate(path, int(path.stat().st_size * part))
    assert message(lambda: open_stream(path)).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["a.tar", "stream.arrow"])
def test_a_file_that_was_cut_between_two_entries_is_refused(tmp_path: Path, name: str) -> None:
    path = WRITERS[name](tmp_path / name)
    stop = int(open_stream(path)._files[0].places[1][1])
    (tmp_path / f".{name}.lockstep-index.json").unlink(missing_ok=True)
    os.truncate(path, stop)
    assert "no mark of its end" in message(lambda: open_stream(path))


def test_a_damaged_header_in_a_tar_file_is_not_taken_for_its_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar")
    with tarfile.open(path) as archive:
        offset = archive.getmembers()[20].offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 100)
    assert "cut off or damaged" in message(lambda: Stream(path))


def test_a_line_that_was_cut_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")
    os.truncate(path, path.stat().st_size - 5)
    stream = Stream(path)
    assert stream[2498] == ROWS[2498]
    said = r"a\.jsonl: record 2499 \(sample 2499 of the stream\): JSONDecodeError: "
    with pytest.raises(DataError, match=said):
        stream[2499]


def test_damage_within_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 200)
    stream = Stream(path)
    assert stream[0]["number"] == 0
    damaged = [message(lambda at=at: stream[at]) for at in (700, 1400) if not readable(stream, at)]
    assert damaged and "a.parquet: block " in damaged[0]


def readable(stream: Stream, index: int) -> bool:
    try:
        stream[index]
    except DataError:
        return False
    return True


def test_tokens_of_another_type_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"12345")
    expected = "a.bin: ValueError: its size of 5 bytes is no multiple of the 2 of uint16"
    assert expected in message(lambda: Stream(tmp_path / "a.bin", block_size=2))


def test_no_samples_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert message(lambda: Stream(tmp_path / "a.jsonl")) == f"{tmp_path / 'a.jsonl'}: no samples"


@pytest.mark.parametrize(
    ("data", "changes", "said"),
    [
        (SHARD[:-9], {}, "shard shard.00000.mds: 635 bytes, in the index 644"),
        (SHARD, {"samples": 2}, "3 samples, in the index 2"),
        (SHARD[:12] + b"\xff" + SHARD[13:], {}, "the offsets of its samples are damaged"),
        (
            SHARD,
            {"column_sizes": [None] * 9},
            "record 0 .*shard.00000.mds: the sizes of its columns do not fit",
        ),
        (
            SHARD.replace(b'{"a": [2]}', b'{"a": [2}]'),
            {},
            "record 2 .* shard shard.00000.mds, column json: ",
        ),
        (
            SHARD.replace(b"\x11\x08\x01\x03", b"\x07\x08\x01\x03"),
            {},
            "record 2 .* shard.00000.mds, column array: 7",
        ),
        (
            SHARD,
            {"compression": "gz", "zip_data": packed("gz", 644)},
            "block 0 .*: shard shard.00000.mds.gz: Error -3",
        ),
        (SHARD, {"format": "csv"}, "not an index of MDS shards: ValueError: format 'csv'"),
        (SHARD, {"samples": None}, "not an index of MDS shards: TypeError"),
    ],
)
def test_damaged_mds(tmp_path: Path, data: bytes, changes: dict[str, Any], said: str) -> None:
    folder = write_mds(tmp_path / "mds", data, **changes)
    text = message(lambda: list(Stream(folder)))
    assert text.startswith(f"{folder / 'index.json'}: ")
    assert re.search(said, text), text


def test_a_shard_that_is_larger_than_its_index_says_is_not_decompressed_as_a_whole(
    tmp_path: Path,
) -> None:
    data = gzip.compress(bytes(50_000_000))
    folder = write_mds(tmp_path / "mds", data, compression="gz", zip_data=packed("gz", len(data)))
    assert "does not have 644 bytes" in message(lambda: Stream(folder)[0])


def test_pickles_and_shards_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "mds", column_encodings=["pkl", *COLUMNS.values()][:9])
    with pytest.raises(ConfigError, match=r"got pkl of column array\. Pickle can run any program"):
        Stream(folder)
    folder = write_mds(
        tmp_path / "mds", raw_data={"basename": "../mds/shard.00000.mds", "bytes": 644}
    )
    assert "a shard outside of the folder" in message(lambda: Stream(folder))


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ([[]], {}, r"files: expected at least one file, got \[\]"),
        (["{}/*.tar"], {}, r"files: expected a pattern that matches files, got '.*/\*.tar'"),
        (["{}/none.tar"], {}, r"files: expected files that exist, got '.*none.tar'"),
        (["{}"], {}, r"got the folder .*give a pattern such as"),
        ([[3]], {}, "files: expected paths or patterns of files, got 3"),
        (["{}/a.csv"], {}, "names that end with .jsonl, .*got 'a.csv'. Or give the format"),
        (["{}/a.csv", "cvs"], {}, "read: expected one of "),
        (
            ["{}/a.csv", "jsonl"],
            {"columns": ["a"]},
            r"Stream\(\): expected options of the format \"jsonl\"",
        ),
        (["{}/a.csv", "bin"], {}, "block_size: expected the number of tokens"),
        (["{}/a.csv", "bin"], {"block_size": 2, "dtype": "float32"}, "dtype: expected uint16"),
        (["{}/a.csv", "jsonl"], {"lanes": 0}, "lanes: expected a whole number of at least 1"),
        (["{}/a.csv", "jsonl"], {"shuffle_window": 1.5}, "shuffle_window"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, arguments: list[Any], options: dict[str, Any], said: str
) -> None:
    (tmp_path / "a.csv").write_text("1,2\n")
    given = [each.format(tmp_path) if isinstance(each, str) else each for each in arguments]
    with pytest.raises(ConfigError, match=said):
        Stream(*given, **options)


def test_a_missing_package_is_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"needs the package pyarrow: pip install 'lockstep-train\[streams\]'$"
    ):
        Stream(path)
