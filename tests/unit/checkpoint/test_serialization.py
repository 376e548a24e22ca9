"""Trees survive the way through JSON and safetensors, and hostile ones are refused."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import os
import tempfile
from collections import OrderedDict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.checkpoint import serialization
from lockstep.checkpoint.folder import read_tensors
from lockstep.checkpoint.serialization import (
    MAX_DEPTH,
    TensorFile,
    blocks,
    check_storable,
    check_tensors,
    copy_piece,
    from_json,
    is_storable_name,
    pack,
    to_json,
    unpack,
    write_tensors,
)
from lockstep.errors import CheckpointError, ConfigError

FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
INTEGERS = [
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
COMPLEX = [torch.complex64, torch.complex128]


def through_files(tree: Any) -> Any:
    value, tensors = pack(tree)
    return read_tensors(
        unpack(from_json(to_json("state", value)), through_file(tensors, stored=True))
    )


def through_file(tensors: dict[str, Tensor], stored: bool = False) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".safetensors", delete=False) as stream:
        path = Path(stream.name)
    path.unlink()
    entry = write_tensors(path, tensors)
    data = path.read_bytes()
    assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    found = TensorFile(path, path.name).tensors()
    for tensor in found.values():
        tensor.pieces[0].file._open()
    path.unlink()  # what is open can still be read
    return found if stored else read_tensors(found)


def write(path: Path, data: bytes) -> TensorFile:
    path.write_bytes(data)
    return TensorFile(path, path.name)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type at every place, order of keys included, NaN equal to itself, 0.0
    not to -0.0.
    """
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(
            type(i) is type(j) and same(a[i], b[j]) for i, j in zip(a, b, strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return bool(a == b)


def raw(tensor: Tensor) -> bytes:
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def nested(levels: int) -> Any:
    tree: Any = 1
    for _ in range(levels):
        tree = [tree]
    return tree


tensors = st.builds(
    lambda dtype, shape, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 100),
)
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=5) | st.integers() | st.sampled_from(["$tensor", "$tuple"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just("0"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$tensor", "$complex", "$float", "$tuple", "$items", "$", "a"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=10,
)


@given(trees)
@settings(deadline=None, max_examples=200)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(through_files(tree), tree)


@pytest.mark.parametrize(
    "tree",
    [
        {1: "int", "1": "str"},
        {"$tensor": "0"},
        {"$items": [["a", 1]], "$": ()},
        (float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1.7976931348623157e308, 0.1),
        {"b": 1, "a": {2: None, -1: True}},
        [(), [], {}, ((),), [[]]],
        2**8000,
        -(2**8000),
        "\ud800\x00\u2028é😀",
        {"betas": (0.9, 0.999), "params": [0, 1, 2]},
    ],
    ids=lambda tree: str(tree)[:30].encode("ascii", "backslashreplace").decode(),
)
def test_what_json_alone_would_change_comes_back_as_it_was(tree: Any) -> None:
    assert same(through_files(tree), tree)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, *FLOATS, *INTEGERS, *COMPLEX], ids=str)
def test_tensors_of_every_type_and_shape_come_back_as_they_were(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.arange(1, math.prod(shape) + 1, dtype=torch.float32).reshape(shape).to(dtype)
    assert same(through_files({"a": tensor})["a"], tensor)


def test_bits_of_not_a_number_are_kept() -> None:
    tensor = torch.tensor([0x7FC00001, -1, -(2**31)], dtype=torch.int32).view(torch.float32)
    assert raw(through_files(tensor)) == raw(tensor)


def test_views_come_back_as_tensors_of_their_own() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    complex_base = torch.complex(base, base + 1)
    tree = {
        "same": [base, base],
        "transposed": base.T,
        "strided": base[:, ::2],
        "expanded": base[:1].expand(5, 4),
        "part": base[1:2],
        "conjugated": complex_base.conj(),
        "negated": complex_base.conj().imag,
    }
    found = through_files(tree)
    assert same(found, tree)
    found["same"][0].fill_(-1)
    assert torch.equal(found["same"][1], base)


def test_parameters_and_ordered_dicts_come_back_plain() -> None:
    model = nn.Linear(2, 2)
    found = through_files(
        {"model": model.state_dict(keep_vars=True), "order": OrderedDict(b=1, a=2)}
    )
    assert type(found["model"]["weight"]) is Tensor
    assert not found["model"]["weight"].requires_grad
    assert type(found["order"]) is dict
    assert list(found["order"]) == ["b", "a"]


def test_a_real_optimizer_comes_back() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    found = through_files(state)
    assert same(found, state)
    torch.optim.AdamW(model.parameters()).load_state_dict(found)


class Level(enum.IntEnum):
    LOW = 1


class MyTensor(Tensor):
    pass


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (np.float64(1.0), ["numpy.float64", ".item()"]),
        (np.int64(1), ["numpy.int64", ".item()"]),
        (np.zeros(2), ["numpy.ndarray", "torch.from_numpy()"]),
        (Level.LOW, ["Level"]),
        (Pair(1, 2), ["Pair"]),
        (torch.Size([1]), ["torch.Size"]),
        (len, ["builtin_function_or_method"]),
        (object(), ["builtins.object"]),
        (b"bytes", ["builtins.bytes"]),
        ({1, 2}, ["builtins.set"]),
        (1j, ["builtins.complex"]),
        (torch.float32, ["torch.dtype"]),
        (2**9000, ["8192 bits", "9001 bits"]),
        (torch.ones(2).to_sparse(), ["sparse", "to_dense()"]),
        (torch.ones(2, device="meta"), ["meta"]),
        (torch.ones(2).as_subclass(MyTensor), ["MyTensor"]),
        (torch.ones(2).to(torch.float8_e4m3fnuz), ["torch.float8_e4m3fnuz"]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else value[0],
)
def test_what_cannot_be_stored_is_named_with_its_path(leaf: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        pack({"optimizer": {"state": {3: {"foo": [0, leaf]}}}})
    assert str(caught.value).startswith("optimizer.state.3.foo.1: expected ")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "key", [True, 1.5, None, (1,), np.int64(1), 2**9000], ids=lambda key: type(key).__name__
)
def test_other_keys_than_strings_and_integers_are_named(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"^a\.b: expected keys of type str or int, got"):
        pack({"a": {"b": {key: 1}}})


def test_nesting_is_bounded_on_both_ways() -> None:
    assert same(through_files(nested(MAX_DEPTH)), nested(MAX_DEPTH))
    with pytest.raises(ConfigError, match="levels of nesting"):
        pack(nested(MAX_DEPTH + 1))
    with pytest.raises(ValueError, match="levels of nesting"):
        unpack(nested(MAX_DEPTH + 1), {})
    with pytest.raises(ValueError, match="nested too deeply"):
        from_json(b"[" * 100_000 + b"]" * 100_000)


def test_a_list_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(ConfigError, match="levels of nesting"):
        pack(tree)


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": "1"},
        {"$tensor": 0},
        {"$tensor": ["0"]},
        [{"$tensor": "0"}, {"$tensor": "0"}],
        {"$complex": "0"},
        {"$tuple": {"a": 1}},
        {"$float": "1.5"},
        {"$float": 1},
        {"$float": []},
        {"$items": {"a": 1}},
        {"$items": [["a"]]},
        {"$items": [["a", 1, 2]]},
        {"$items": [["a", 1], ["a", 2]]},
        {"$items": [[True, 1]]},
        {"$items": [[1.5, 1]]},
        {"$items": [[None, 1]]},
        {"$items": [[["a"], 1]]},
        {"$object": "os.system"},
        {"$tuple": [], "a": 1},
        {"$tuple": [], "$items": []},
        {"$": 1},
        float("nan"),
        float("inf"),
        b"bytes",
        {1: 2},
    ],
    ids=str,
)
def test_values_that_pack_does_not_make_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^place"):
        unpack({"place": value}, {"0": torch.ones(3)})


def test_an_error_names_the_path_in_the_tree() -> None:
    with pytest.raises(ValueError, match=r"^optimizer\.state\.0\.1: "):
        unpack({"optimizer": {"state": {"$items": [[0, [1, {"$float": "x"}]]]}}}, {})


def test_tensors_that_the_tree_does_not_use_are_refused() -> None:
    with pytest.raises(ValueError, match="does not use: 0"):
        unpack({}, {"0": torch.ones(1)})


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, dtype=torch.int32), torch.ones(3), torch.tensor(1.0)], ids=str
)
def test_a_complex_tensor_needs_pairs_of_floats(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="not a complex tensor"):
        unpack({"$complex": "0"}, {"0": tensor})


@given(json_values)
@settings(deadline=None, max_examples=300)
def test_no_json_value_raises_anything_but_value_error(value: Any) -> None:
    with_tensor = {"0": torch.ones(2, 2)}
    try:
        tree = unpack(value, with_tensor)
    except ValueError:
        return
    assert same(unpack(*pack(tree)), tree)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b'{"a":1}x', b"9" * 10_000, b"\x80\x04\x8c\x02os\x94."],
    ids=lambda data: repr(data[:10]),
)
def test_what_is_no_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        from_json(data)


def test_json_is_bounded_on_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.checkpoint.serialization.MAX_JSON", 100)
    assert from_json(to_json("state", ["a" * 90])) == ["a" * 90]
    with pytest.raises(
        ConfigError, match=r"^state: expected at most 100 bytes of plain values, got 104 bytes"
    ):
        to_json("state", "a" * 102)
    with pytest.raises(ValueError, match="at most 100 bytes of JSON, got 104"):
        from_json(json.dumps("a" * 102).encode())


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_names_that_safetensors_cannot_store_are_named(name: str) -> None:
    assert not is_storable_name(name)
    with pytest.raises(ConfigError, match="state_dict: expected names"):
        check_tensors("state_dict", {name: torch.ones(1)})


@pytest.mark.parametrize("name", ["", "a.b", "größe", "__metadata", "a\x00b"])
def test_all_other_names_can_be_stored(name: str) -> None:
    assert is_storable_name(name)
    check_tensors("state_dict", {name: torch.ones(1)})
    assert list(through_file({name: torch.ones(1)})) == [name]


def test_types_that_safetensors_cannot_store_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^state_dict: expected tensors of types .*, got torch\.complex128$"
    ):
        check_tensors("state_dict", {"a": torch.ones(1, dtype=torch.complex128)})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        b"\xff" * 16,
        b"\x80\x02}q\x00.",
        (2).to_bytes(8, "little") + b"[]",
        (53).to_bytes(8, "little")
        + b'{"a":{"dtype":"Q7","shape":[1],"data_offsets":[0,1]}}'
        + b"x",
        (54).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'
        + b"xxxx",
        (61).to_bytes(8, "little")
        + b'{"a":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]}}   '
        + b"x",
    ],
    ids=lambda data: repr(data[8:24]),
)
def test_what_is_no_safetensors_file_is_a_value_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError):
        write(tmp_path / "a", data).tensors()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packing")


@given(st.integers(0, 10**6), st.integers(1, 255))
@settings(deadline=None, max_examples=200)
def test_a_changed_safetensors_file_raises_only_documented_errors(
    folder: Path, position: int, change: int
) -> None:
    (folder / "good").unlink(missing_ok=True)
    write_tensors(folder / "good", {"a": torch.ones(2, 2), "b": torch.zeros(0)})
    data = bytearray((folder / "good").read_bytes())
    data[position % len(data)] ^= change
    try:
        found = read_tensors(write(folder / "changed", bytes(data)).tensors())
    except (ValueError, CheckpointError):
        return
    assert all(isinstance(tensor, Tensor) for tensor in found.values())


def test_a_file_that_is_cut_off_while_it_is_open_is_an_error_and_no_signal(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"a": torch.ones(100_000)})
    stored = TensorFile(tmp_path / "a", "a").tensors()["a"]
    os.truncate(tmp_path / "a", 5000)
    with pytest.raises(
        CheckpointError, match=f"^{tmp_path}: a: (cannot be read|its content is invalid): "
    ):
        stored.read()


@pytest.mark.parametrize("block", [1, 24, 10**6])
def test_files_are_those_of_the_library_whatever_is_copied_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(blocks, "__defaults__", (block,))
    image = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    held = {
        "channels last": image.to(memory_format=torch.channels_last),
        "turned": image[0, 0].T,
        "strided": image[:, ::2],
        "half": image.half(),
        "none": torch.zeros(2, 0, 3).transpose(0, 2),
        "number": torch.tensor(3, dtype=torch.int64),
        "mirrored": torch.complex(image, image).conj(),
    }
    write_tensors(tmp_path / "a", held, flush=True)
    contents = {name: tensor.resolve_conj().contiguous() for name, tensor in held.items()}
    assert same(
        dict(sorted(safetensors.torch.load_file(tmp_path / "a").items())),
        dict(sorted(contents.items())),
    )
    found = TensorFile(tmp_path / "a", "a").tensors()
    assert same(read_tensors(found), dict(sorted(contents.items())))
    target = torch.zeros(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    found["channels last"].read_into(target)
    assert torch.equal(target, image.double())


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 8), st.integers(1, 200))
@settings(deadline=None, max_examples=200)
def test_blocks_cover_a_tensor_in_the_order_of_memory(
    shape: list[int], width: int, most: int
) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    found = [tensor[block] for block in blocks(shape, width, most)]
    assert all(
        block.is_contiguous() and (block.numel() * width <= most or block.numel() == 1)
        for block in found
    )
    assert torch.equal(
        torch.cat([block.reshape(-1) for block in found] or [tensor.reshape(-1)]),
        tensor.reshape(-1),
    )


def test_of_many_files_few_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "_MAX_OPEN", 3)
    open_files: serialization.OpenFiles = deque()
    files = []
    for number in range(9):
        write_tensors(tmp_path / str(number), {"a": torch.tensor(number)})
        files.append(TensorFile(tmp_path / str(number), str(number), open_files))
    for _ in range(2):
        assert [int(file.tensors()["a"].read()) for file in files] == list(range(9))
        assert (
            sum(str(tmp_path) in str(path.resolve()) for path in Path("/proc/self/fd").iterdir())
            == 3
        )


def test_a_tensor_is_taken_as_it_is_whatever_the_default_device() -> None:
    weight = nn.Parameter(torch.ones(2, 3)).T
    with torch.device("meta"):
        found = check_storable(weight.detach(), "weight")
        copy = through_file({"a": found})["a"]
    assert found.data_ptr() == weight.data_ptr()
    assert copy.device.type == "cpu"
    assert torch.equal(copy, weight)


def bytes_read() -> int:
    """What this process has asked the system for since it began."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_part_of_a_tensor_is_read_without_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(2.0**18).reshape(64, 64, 64)
    write_tensors(tmp_path / "a", {"a": whole, "b": whole})
    stored = TensorFile(tmp_path / "a", "a").tensors()["a"]
    monkeypatch.setattr(blocks, "__defaults__", (2**14,))
    before = bytes_read()
    assert torch.equal(stored.read(), whole)
    assert bytes_read() - before < 1.1 * whole.nbytes
    for region in (
        (slice(3, 5), slice(10, 64), slice(0, 64)),
        (slice(0, 64), slice(1, 2), slice(7, 9)),
    ):
        target, before = torch.zeros(whole[region].shape), bytes_read()
        copy_piece(target, stored.pieces[0], [part.start for part in region])
        assert torch.equal(target, whole[region])
        assert bytes_read() - before < 1.1 * target.nbytes + 4096
