"""Makes text of unknown origin safe to print on a terminal (pure)."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["plain", "plain_lines"]

# escape sequences: colours and cursor movements, window titles, and the short ones
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
)
# control, format (text direction), surrogates, line separators
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def plain(text: str) -> str:
    """Return `text` in one line, without escape sequences and control characters, with white space
    collapsed.
    """
    return " ".join(_visible(_SEQUENCE.sub("", text)).split())


def plain_lines(text: str) -> list[str]:
    """Return the lines of `text`, with their indentation, without escape sequences and control
    characters.
    """
    lines = _SEQUENCE.sub("", text).replace("\r\n", "\n").expandtabs(4).split("\n")
    return [_visible(line).rstrip() for line in lines]


def _visible(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(" " if unicodedata.category(letter) in _INVISIBLE else letter for letter in text)
