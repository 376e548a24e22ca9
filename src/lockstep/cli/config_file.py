"""Options from a YAML or TOML file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..training.options import from_mapping

__all__ = ["read_config"]


def read_config(path: Path) -> dict[str, Any]:
    """The options in a file: TOML where its name ends in ``.toml``, YAML otherwise.

    Raises:
        ConfigError: when the file cannot be read or holds something else; names the file, and the option.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("config", "a YAML or TOML file that can be read", found=f"{path} ({reason})") from None
    try:
        content = _toml(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("config", f"{path} to be YAML, or TOML with the ending .toml", found=reason) from None
    if not isinstance(content, dict):
        got = "an empty file" if content is None else type(content).__name__
        raise ConfigError("config", f"{path} to hold options by name, such as `epochs: 20`", found=got)
    return from_mapping(content, str(path))


def _toml(text: str) -> dict[str, Any]:
    # Part of Python since 3.11; before, its twin is installed.
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    content: dict[str, Any] = toml.loads(text)
    return content
