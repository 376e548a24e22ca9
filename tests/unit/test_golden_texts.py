"""No message of the launchers and the watchdog, and none of their options, changes unnoticed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cli.main import _parser
from support import golden_texts

COMMANDS = ("run", "train", "horovodrun", "join", "resize", "top", "submit")


def test_messages_to_users() -> None:
    found = golden_texts.read_by_users()
    before = (
        set(golden_texts.TEXTS.read_text().splitlines()) if golden_texts.TEXTS.exists() else set()
    )
    if before - found:  # a text may have moved to a file in which texts are not pinned
        found |= before & golden_texts.read_by_users(sorted(golden_texts.PACKAGE.rglob("*.py")))
    golden_texts.compare(golden_texts.TEXTS, sorted(found))


def test_options() -> None:
    lines = [line for command in COMMANDS for line in options_of(command)]
    golden_texts.compare(golden_texts.GOLDEN / "options.txt", lines)


def options_of(command: str) -> Iterator[str]:
    """The options of a command in the order of its help, with their groups; argparse lays it
    out.
    """
    top = _parser()
    (commands,) = (
        each.choices for each in top._actions if isinstance(each, argparse._SubParsersAction)
    )
    parser: argparse.ArgumentParser = commands[command]
    yield f"lockstep {command}"
    for group in parser._action_groups:
        yield f"  {group.title}" if group._group_actions else f"  ({group.title}: none)"
        for action in group._group_actions:
            value = action.metavar if action.nargs != 0 else ""
            names = [
                *action.option_strings,
                *([str(value)] if value else [] if action.option_strings else [action.dest]),
            ]
            more = f" (one of {', '.join(map(str, action.choices))})" if action.choices else ""
            text = "hidden" if action.help == argparse.SUPPRESS else f"{action.help}"
            yield f"    {' '.join(names)}{more}: {text}"


FOUND = '''
"""A docstring of several words."""
name: "an annotation of words" = "one two"
KEYS = ("key", "other-key")
print("word", f"of {name!r}", end="stop")
raise ConfigError("argument", "one of " + ", ".join(names), found="both" if name else f"{name}")
assert name, "an assertion that fails"
threading.Thread(target=run, name="lockstep thread")
if name == "two words" or "three more words" in name or name.startswith("four words "):
    hint = (
        f"in {len(name)} parts, "
        f"of {'two words' if name else 'one'}"
    )
text = """
first line of two

second line
"""
names["key of two words"]
os.write(2, b"bytes are text\\n")
re.compile("a pattern of words")
add_argument("--flag", metavar="N", help="help")
'''


def test_what_counts_as_a_text() -> None:
    assert golden_texts.texts(FOUND) == {
        "one two",
        "word",
        "of {}",
        "argument",
        "one of",
        "both",
        "in {} parts, of {}",
        "two words",
        "first line of two",
        "second line",
        "bytes are text",
        "help",
    }


def test_a_change_is_shown_and_accepted_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tests" / "golden" / "texts.txt"
    monkeypatch.setattr(golden_texts, "GOLDEN", tmp_path / "tests" / "data" / "golden")
    monkeypatch.setenv("UPDATE_GOLDEN", "1")
    with pytest.raises(pytest.skip.Exception, match="written anew"):
        golden_texts.compare(path, ["a", "b"])
    monkeypatch.delenv("UPDATE_GOLDEN")
    golden_texts.compare(path, ["a", "b"])
    with pytest.raises(
        pytest.fail.Exception,
        match=r"tests/golden/texts.txt (.|\n)*\n-b\n\+c\n(.|\n)*UPDATE_GOLDEN=1",
    ):
        golden_texts.compare(path, ["a", "c"])
