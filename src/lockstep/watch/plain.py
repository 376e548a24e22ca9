"""Text of unknown origin as what a terminal may be sent (pure)."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["plain", "plain_lines"]

# sequences that begin with ESC: colours and cursor movements, titles of windows, and the short ones
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?")
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, direction of writing and the like, halves of characters, breaks


def plain(text: str) -> str:
    """`text` in one line, without anything that a terminal would obey; white space in a row becomes one space."""
    return " ".join(_visible(_SEQUENCE.sub("", text)).split())


def plain_lines(text: str) -> list[str]:
    """The lines of `text`, each with its indentation, without anything that a terminal would obey."""
    lines = _SEQUENCE.sub("", text).replace("\r\n", "\n").expandtabs(4).split("\n")
    return [_visible(line).rstrip() for line in lines]


def _visible(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(" " if unicodedata.category(letter) in _INVISIBLE else letter for letter in text)
