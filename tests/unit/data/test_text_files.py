"""Text files as blocks of bytes, or of a tokenizer's tokens, which are kept and checked."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.data import TextBlocks, text_files
from lockstep.data.text_files import text
from lockstep.errors import ConfigError, DataError

STORY = "One ship sails east.\nTwo ships sail wést.\n" * 20


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(STORY, encoding="utf-8")
    return path


def make_tokenizer(path: Path, **settings: Any) -> Path:
    """Train a small BPE tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [STORY], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    for name, arguments in settings.items():
        getattr(made, name)(**arguments)
    made.save(str(path))
    return path


def all_tokens(blocks: TextBlocks) -> list[int]:
    return [token for inputs, _ in blocks for token in inputs.tolist()]


def test_blocks_of_bytes(story: Path) -> None:
    train, test = lockstep.data.text(story, context=10, validation=0.25)
    assert test is not None
    data = STORY.encode()
    cut = len(data) - round(len(data) / 4)
    assert (len(train), len(test)) == ((cut - 1) // 10, (len(data) - cut - 1) // 10)
    inputs, targets = train[3]
    assert inputs.dtype == targets.dtype == torch.int64
    assert bytes(inputs.tolist()) == data[30:40] and bytes(targets.tolist()) == data[31:41]
    assert bytes(test[0][0].tolist()) == data[cut : cut + 10]
    assert train.vocabulary == 256 and train.context == 10
    assert train.decode(train.encode("wést")) == "wést"
    assert (
        repr(train)
        == f"TextBlocks('story.txt', {len(train)} blocks of 10 tokens, vocabulary of 256)"
    )
    assert list(train)[-1][1].shape == (10,)  # iteration ends with the last block


def test_batches_are_the_items(story: Path) -> None:
    train, _ = text(story, 10)
    inputs, targets = train.collated_batch(torch.tensor([5, 0, 5]))
    assert torch.equal(inputs, torch.stack([train[5][0], train[0][0], train[5][0]]))
    assert torch.equal(targets, torch.stack([train[5][1], train[0][1], train[5][1]]))
    assert inputs.is_contiguous() and targets.is_contiguous()
    for index in (-1, len(train)):
        with pytest.raises(IndexError, match="block"):
            train[index]


def test_without_validation(story: Path) -> None:
    train, test = text(story, 10, validation=0.0)
    assert test is None and len(train) == (len(STORY.encode()) - 1) // 10


def test_a_copy_maps_the_file_and_holds_none_of_it(
    story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(story.parent)
    train, _ = text("story.txt", 10)
    monkeypatch.chdir("/")
    sent = pickle.dumps(train)
    assert len(sent) < 500
    assert all_tokens(pickle.loads(sent)) == all_tokens(train)
    assert isinstance(train._tokens.values, np.memmap)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "any").write_bytes(bytes(range(256)) * 2)
    train, _ = text(tmp_path / "any", 16)
    assert train[8][0].tolist() == list(range(128, 144))
    assert "�" in train.decode([200, 201])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"file": "none.txt"}, "none.txt: expected a text file, got no such file"),
        ({"file": "empty"}, "empty: expected a text file, got an empty file"),
        ({"file": "."}, r"\.: expected a text file, got a folder"),
        ({"file": "pipe"}, "pipe: expected a text file, got no regular file"),
        (
            {"context": 800},
            "story.txt: expected at least 801 tokens for training, one block and the token after "
            "it",
        ),
        (
            {"context": 100},
            "story.txt: expected at least 101 tokens for validation, .* got 86 of 860",
        ),
        ({"context": 0}, "context: expected a whole number of at least 1, got 0"),
        ({"context": 2.5}, "context: expected"),
        (
            {"validation": 1.0},
            "validation: expected a share of the text from 0 to below 1, got 1.0",
        ),
        ({"validation": float("nan")}, "validation: expected"),
        (
            {"data_dir": "."},
            "data_dir: expected nothing, as text without a tokenizer needs no other files",
        ),
        ({"tokenizer": "none.json"}, "none.json: expected a tokenizer, got no such file"),
        (
            {"tokenizer": "story.txt"},
            "story.txt: expected a tokenizer.json of the package tokenizers, got ",
        ),
        (
            {"tokenizer": "other.json"},
            "other.json: expected a tokenizer.json of the package tokenizers, got ",
        ),
    ],
)
def test_bad_input(
    story: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(story.parent)
    Path("empty").touch()
    os.mkfifo("pipe")
    Path("other.json").write_text('{"model": {"type": "BPE"}}')
    before = sorted(Path().rglob("*"))
    with pytest.raises((DataError, ConfigError), match=f"^{said}") as caught:
        text(**{"file": "story.txt", "context": 10, **options})
    assert "\n" not in str(caught.value)
    assert sorted(Path().rglob("*")) == before


# --- tokenizers
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "tokenizer.json")


def load(story: Path, tokenizer: Path, context: int = 5) -> TextBlocks:
    return text(story, context, tokenizer, validation=0.0, data_dir=story.parent / "kept")[0]


def test_tokens_of_a_tokenizer(story: Path, tokenizer: Path) -> None:
    blocks = load(story, tokenizer)
    assert 256 < blocks.vocabulary <= 300
    found = all_tokens(blocks)
    assert STORY.startswith(blocks.decode(found[:60])) and len(found) < len(STORY) / 2
    assert blocks.decode(blocks.encode("Two ships")) == "Two ships"
    assert all_tokens(pickle.loads(pickle.dumps(blocks))) == found


def test_a_text_is_tokenised_once(
    story: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = all_tokens(load(story, tokenizer))
    monkeypatch.setattr(text_files, "_tokenise", None)  # it is not called
    assert all_tokens(load(story, tokenizer)) == found
    assert sorted(path.suffix for path in (story.parent / "kept").iterdir()) == [".bin", ".json"]


def test_tokens_that_are_damaged_or_of_another_text_are_not_used(
    story: Path, tokenizer: Path
) -> None:
    found = all_tokens(load(story, tokenizer))
    (kept,) = (story.parent / "kept").glob("*.bin")
    (record,) = (story.parent / "kept").glob("*.json")
    for damage in (b"\x07" * kept.stat().st_size, b"", kept.read_bytes()[:-2]):
        kept.write_bytes(damage)
        assert all_tokens(load(story, tokenizer)) == found
    for damage_text in (
        "",
        "[]",
        json.dumps({"key": "x", "tokens": 3, "sha256": ""}),
        '{"tokens": {}}',
    ):
        record.write_text(damage_text)
        assert all_tokens(load(story, tokenizer)) == found
    story.write_text(STORY.replace("ship", "boat"), encoding="utf-8")
    other = load(story, tokenizer)
    assert "boat" in other.decode(all_tokens(other)) and "ship" not in other.decode(
        all_tokens(other)
    )
    assert len(list((story.parent / "kept").glob("*.bin"))) == 2


def test_another_tokenizer_makes_other_tokens(story: Path, tokenizer: Path) -> None:
    found = all_tokens(load(story, tokenizer))
    content = json.loads(tokenizer.read_text())
    content["model"]["merges"] = content["model"]["merges"][:5]
    tokenizer.write_text(json.dumps(content))
    assert len(all_tokens(load(story, tokenizer))) > len(found)


def test_settings_for_batches_do_not_shorten_a_text(
    story: Path, tmp_path: Path, tokenizer: Path
) -> None:
    padding = {"length": 5000, "pad_id": 1}
    other = make_tokenizer(
        tmp_path / "t.json", enable_truncation={"max_length": 8}, enable_padding=padding
    )
    assert all_tokens(load(story, other)) == all_tokens(load(story, tokenizer))


@pytest.mark.parametrize("size", [7, 64, 1000])
def test_pieces_of_a_large_text(
    story: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    story.write_text(STORY + "é" * 40, encoding="utf-8")  # some pieces of 7 bytes have no line end
    monkeypatch.setattr(text_files, "_PIECE", size)
    blocks = load(story, tokenizer, context=1)
    whole = [*all_tokens(blocks), int(blocks[len(blocks) - 1][1])]
    assert blocks.decode(whole) == STORY + "é" * 40


def test_text_that_is_not_utf_8(story: Path, tokenizer: Path) -> None:
    story.write_bytes(b"fine\n" * 30 + b"caf\xe9 au lait\n")
    with pytest.raises(
        DataError,
        match=r"got the byte 0xe9 at position 153\. Without a tokenizer, bytes are tokens",
    ):
        load(story, tokenizer)
    assert not (story.parent / "kept").exists() or not list((story.parent / "kept").iterdir())


def test_a_folder_that_cannot_be_made(story: Path, tokenizer: Path) -> None:
    with pytest.raises(
        DataError, match="expected a folder for the file of tokens, got Not a directory"
    ):
        text(story, 5, tokenizer, data_dir=story / "kept")


def test_the_package_is_missing(
    story: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(
        ConfigError, match=r"^tokenizer needs the package tokenizers: .*'lockstep-train\[text\]'$"
    ):
        load(story, tokenizer)
