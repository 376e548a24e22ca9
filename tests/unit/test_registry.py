"""Names lead to objects, and wrong names to the right ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.registry import Registry, import_object

NAMES = Registry("model", {"sqrt": "math:sqrt"}, open_ended=True)


def test_short_and_open_names() -> None:
    assert NAMES.load("sqrt")(9) == 3
    assert NAMES.load("math:cos")(0) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sqr", "Did you mean sqrt?"),
        ("nowhere_at_all:thing", "There is no module 'nowhere_at_all'"),
        ("math:coss", "Did you mean cos"),
        (":x", "package.module:name"),
        ("math:", "package.module:name"),
    ],
)
def test_wrong_names(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match="model") as caught:
        NAMES.load(name)
    assert said in str(caught.value)


def test_an_error_inside_the_module_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_another.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        import_object("model", "needs_another:x")


def test_closed_names_have_no_open_form() -> None:
    with pytest.raises(ConfigError):
        Registry("strategy", {"a": "math:sqrt"}).load("math:sqrt")
