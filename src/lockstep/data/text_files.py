"""Text files as data for language models: blocks of tokens, which are bytes or those of a
tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .. import arguments
from ..errors import ConfigError, DataError
from ..system import atomic_files
from .download import locked


def text(
    file: str | os.PathLike[str],
    context: int = 256,
    tokenizer: str | os.PathLike[str] | None = None,
    validation: float = 0.1,
    data_dir: str | os.PathLike[str] | None = None,
) -> tuple[TextBlocks, TextBlocks | None]:
    """Load a text file as blocks of tokens, to train a language model on and to validate it.

    Without a tokenizer each byte is a token, so that any file can be read, in any language. The
    file is mapped into memory, not read as a whole. It must not change while it is in use.

    With a tokenizer the text, in UTF-8, is tokenised once, and the tokens are kept in a file. Its
    name contains a digest of the text and of the tokenizer; it is made anew if either has changed,
    or if it is damaged.

    Args:
        file: the text file.
        context: tokens in a block.
        tokenizer: a ``tokenizer.json`` of the package `tokenizers`; None for bytes.
        validation: the share of the text that is held out, from 0 to below 1: its last part.
        data_dir: the folder for the file of tokens; ``~/.cache/lockstep/text`` when None.

    Returns:
        (train, test); test is None if `validation` is 0.

    Raises:
        ConfigError: `context` or `validation` is out of range, the package `tokenizers` is not
            installed, or `data_dir` is given without a tokenizer.
        DataError: a file is missing or empty, the text is shorter than one block for each part, it
            is not UTF-8, or the tokenizer's file is none; names the file.
    """
    context = arguments.whole("context", context, least=1)
    arguments.number(
        "validation", validation, least=0, below=1, expected="a share of the text from 0 to below 1"
    )
    path = _check_file(file, "a text file")
    if tokenizer is None:
        if data_dir is not None:
            raise ConfigError(
                "data_dir",
                "nothing, as text without a tokenizer needs no other files",
                str(data_dir),
            )
        codec: Codec = _Bytes()
        tokens = _Tokens(path, "uint8", path.stat().st_size)
    else:
        codec = from_file = _TokenizerFile(_check_file(tokenizer, "a tokenizer"))
        tokens = _tokenised(path, from_file, _folder(data_dir))
    held_out = round(len(tokens) * validation)
    cut = len(tokens) - held_out
    for part, size in (("training", cut), *((("validation", held_out),) if validation else ())):
        if size <= context:
            raise DataError(
                f"{path}: expected at least {context + 1} tokens for {part}, one block and the "
                f"token after it, got {size} of {len(tokens)} tokens. Use a longer text or a "
                "smaller context"
            )
    train = TextBlocks(tokens, codec, context, 0, cut)
    return train, TextBlocks(tokens, codec, context, cut, len(tokens)) if validation else None


class TextBlocks(Dataset[tuple[Tensor, Tensor]]):
    """A part of a text as consecutive blocks of tokens: items are (tokens, the tokens that follow
    each of them).

    What is left at the end and does not fill a block is not used. Made by `text`.

    Args:
        tokens: the tokens of the text.
        codec: what the tokens are.
        context: tokens in a block.
        start: the first token of the part.
        stop: the end of the part.
    """

    def __init__(self, tokens: _Tokens, codec: Codec, context: int, start: int, stop: int) -> None:
        self._tokens = tokens
        self._codec = codec
        self.context = context
        self._start = start
        self._blocks = (stop - start - 1) // context

    @property
    def vocabulary(self) -> int:
        """The number of different tokens that there can be."""
        return self._codec.vocabulary

    def __len__(self) -> int:
        return self._blocks

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return block `index` and the tokens that follow, each int64 of shape (context,).

        Raises:
            IndexError: `index` is below 0 or beyond the last block.
        """
        inputs, targets = self.collated_batch([index])
        return inputs[0], targets[0]

    def collated_batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return the m blocks at `indices`, in that order, and the tokens that follow: int64 (m,
        context) each.

        Args:
            indices: numbers of blocks, of shape (m,).

        Raises:
            IndexError: an index is below 0 or beyond the last block.
        """
        rows = np.empty((len(indices), self.context + 1), dtype=np.int64)
        for row, index in zip(rows, map(int, indices), strict=True):
            if not 0 <= index < self._blocks:
                raise IndexError(f"block {index} of {self._blocks}")
            row[:] = self._tokens.values[self._start + index * self.context :][: self.context + 1]
        blocks = torch.from_numpy(rows)
        return blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()

    def encode(self, words: str) -> list[int]:
        """Return the tokens of a text.

        Args:
            words: the text.
        """
        return self._codec.encode(words)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD.

        Args:
            tokens: whole numbers, as `encode` returns them.
        """
        return self._codec.decode(list(tokens))

    def __repr__(self) -> str:
        name = self._tokens.path.name
        vocabulary = self.vocabulary
        return (
            f"TextBlocks({name!r}, {len(self)} blocks of {self.context} tokens, vocabulary of "
            f"{vocabulary})"
        )


def _check_file(file: str | os.PathLike[str], expected: str) -> Path:
    """Return the path of `file`, which can be read and is not empty."""
    path = Path(file).expanduser()
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            path.open("rb").close()
            found = "" if status.st_size else "an empty file"
        else:
            found = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
    except OSError as error:
        found = (
            "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror or error)
        )
    if found:
        raise DataError(f"{path}: expected {expected}, got {found}")
    return path


def _folder(data_dir: str | os.PathLike[str] | None) -> Path:
    if data_dir is not None:
        return Path(data_dir).expanduser()
    try:
        return Path.home() / ".cache" / "lockstep" / "text"
    except RuntimeError:
        raise DataError(
            "text: expected a home folder for the file of tokens, got none. Name a folder: data_dir"
        ) from None


class Codec(Protocol):
    """How texts become tokens, and tokens texts."""

    vocabulary: int

    def encode(self, words: str) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""


class _Bytes:
    """Each byte of the text in UTF-8 is a token."""

    vocabulary = 256

    def encode(self, words: str) -> list[int]:
        return list(words.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class _TokenizerFile:
    """The tokens of a tokenizer in the format of the package `tokenizers`.

    Args:
        path: its file.

    Raises:
        ConfigError: the package is not installed.
        DataError: the file is not of that format, or its tokenizer has no tokens.
    """

    def __init__(self, path: Path) -> None:
        arguments.require_package("tokenizers", "tokenizer", "text")
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises no other class
            reason = " ".join(str(error).split())
            raise DataError(
                f"{path}: expected a tokenizer.json of the package tokenizers, got {reason}"
            ) from None
        # Settings for batches of sentences: they would shorten a text, or add to it, without a
        # word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary = 1 + max(
            self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1
        )
        if not self.vocabulary:
            raise DataError(f"{path}: expected a tokenizer with tokens, got one without any")
        self.digest = hashlib.sha256(
            tokenizers.__version__.encode() + path.read_bytes()
        ).hexdigest()

    def encode(self, words: str) -> list[int]:
        return list(self._tokenizer.encode(words, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


class _Tokens:
    """Tokens in a file that is mapped into memory; a copy in another process maps it again.

    Args:
        path: the file.
        dtype: the type of a token: "uint8", "uint16" or "uint32".
        count: the number of tokens.
    """

    def __init__(self, path: Path, dtype: str, count: int) -> None:
        self.path = path.absolute()
        self._dtype = dtype
        self._count = count
        self.values = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r", shape=(count,))

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self._dtype, self._count)


_FORMAT = 1  # of the files of tokens; part of their digest
_PIECE = 1 << 20  # bytes of text that are tokenised at once


def _tokenised(path: Path, codec: _TokenizerFile, folder: Path) -> _Tokens:
    """Return the tokens of the text in `path`, from a file in `folder`, which is made if none there
    is valid.
    """
    key = hashlib.sha256(f"{_FORMAT} {_digest(path)} {codec.digest}".encode()).hexdigest()
    tokens, record = (
        folder / f"{path.stem[:100]}-{key[:16]}{ending}" for ending in (".bin", ".json")
    )
    dtype = "uint16" if codec.vocabulary <= 1 << 16 else "uint32"
    # One process tokenises, others of this host wait for it.
    with locked(folder, "for the file of tokens"):
        count = _valid_count(tokens, record, key, dtype)
        if count is None:
            count = _tokenise(path, codec, tokens, dtype)
            atomic_files.write_json(
                record, {"key": key, "tokens": count, "sha256": _digest(tokens)}
            )
    if count == 0:
        raise DataError(f"{path}: expected a text with tokens, got none from the tokenizer")
    return _Tokens(tokens, dtype, count)


def _valid_count(tokens: Path, record: Path, key: str, dtype: str) -> int | None:
    """Return the number of tokens in a file; None if it does not exist, or differs from its
    record.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        recorded = json.loads(record.read_text(encoding="utf-8"))
        count = int(recorded["tokens"])
        fits = recorded["key"] == key and tokens.stat().st_size == count * np.dtype(dtype).itemsize
        if fits and recorded["sha256"] == _digest(tokens):
            return count
    return None


def _tokenise(path: Path, codec: _TokenizerFile, tokens: Path, dtype: str) -> int:
    """Write the tokens of the text in `path` to the file `tokens`, and return their number."""
    count = 0
    try:
        with (
            path.open("rb") as source,
            atomic_files.file(tokens) as temporary,
            temporary.open("wb") as target,
        ):
            for piece in _pieces(source, path):
                ids = np.asarray(codec.encode(piece), dtype=np.dtype(dtype).newbyteorder("<"))
                target.write(ids.tobytes())
                count += len(ids)
    except OSError as error:
        raise DataError(
            f"{tokens}: the tokens of {path} could not be written: {error.strerror or error}"
        ) from None
    return count


def _pieces(source: BinaryIO, path: Path) -> Iterator[str]:
    """Yield the text in pieces that end with a line, or where there is none for a megabyte, with a
    character.
    """
    position = 0
    rest = b""
    while data := source.read(_PIECE):
        whole = rest + data
        cut = whole.rfind(b"\n") + 1 or _character_end(whole)
        yield _decoded(whole[:cut], position, path)
        position = position + cut
        rest = whole[cut:]
    if rest:
        yield _decoded(rest, position, path)


def _character_end(data: bytes) -> int:
    """Return the position after the last whole character of `data` in UTF-8."""
    start = len(data)
    # a byte within a character
    while start > max(0, len(data) - 4) and data[start - 1] & 0xC0 == 0x80:
        start -= 1
    return max(0, start - 1)


def _decoded(data: bytes, position: int, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = position + error.start
        raise DataError(
            f"{path}: expected a text in UTF-8 for the tokenizer, got the byte "
            f"0x{data[error.start]:02x} at position {where}. Without a tokenizer, bytes are "
            "tokens, and any file can be read"
        ) from None


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_PIECE):
            digest.update(data)
    return digest.hexdigest()
