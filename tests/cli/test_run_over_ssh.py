"""`lockstep run -H` over an ssh that is a shell script: what goes over its pipes beside messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.job.connection import START

LIMIT_S = 100.0

LOGIN_SHELL = """#!/bin/sh
printf 'Welcome\\nLast login: never'
echo 'chatter of the shell' >&2
for last; do :; done
exec sh -c "$last"
"""
"""Calls its last argument, the command, after it has written what login shells may write."""


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(LOGIN_SHELL)
    path.chmod(0o755)
    return path


def run(folder: Path, ssh: Path, *words: str) -> tuple[int, list[str], str]:
    """Its exit code, the sorted lines of its standard output, and its standard error."""
    command = [sys.executable, "-m", "lockstep", "run", "-q", *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{ssh.parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        input="",
    )
    return (
        ended.returncode,
        sorted(ended.stdout.removesuffix("\n").split("\n") if ended.stdout else ()),
        ended.stderr,
    )


def test_a_shells_chatter_is_not_shown_and_output_is_no_message(tmp_path: Path, ssh: Path) -> None:
    """Whatever a worker writes, also around Python's streams and what looks like the start, is its output."""
    (tmp_path / "program.py").write_text(f"""
import os, sys
os.write(1, {START!r} + b"\\0\\0\\0\\1x\\n")
print("to standard error", file=sys.stderr)
print(os.read(0, 1))
""")
    code, out, err = run(tmp_path, ssh, "-H", "nowhere:2", "program.py")
    assert (code, sorted(err.splitlines())) == (
        0,
        [f"[{rank}] to standard error" for rank in range(2)],
    )
    said = [START.decode().rstrip("\n"), "\0\0\0\1x", "b''"]
    assert sorted(out) == sorted(f"[{rank}] {text}" for rank in range(2) for text in said)


def test_a_single_workers_lines_have_no_prefix(tmp_path: Path, ssh: Path) -> None:
    (tmp_path / "program.py").write_text("print('alone')")
    assert run(tmp_path, ssh, "-H", "nowhere", "program.py") == (0, ["alone"], "")


def test_what_the_launcher_there_itself_writes_to_standard_output_gets_between_no_messages(
    tmp_path: Path, ssh: Path
) -> None:
    (tmp_path / "noisy.py").write_text("import os\nos.write(1, b'imported\\n')\n")
    (tmp_path / "program.py").write_text("print('alone')")
    code, out, err = run(
        tmp_path,
        ssh,
        "-H",
        "nowhere",
        "--preload",
        "noisy",
        "-x",
        f"PYTHONPATH={tmp_path}",
        "program.py",
    )
    assert (code, out) == (0, ["alone"]), err


def test_what_is_no_message_ends_the_job_with_an_error(tmp_path: Path, ssh: Path) -> None:
    damaged = START.decode("latin-1") + "\\000\\000\\000\\003abc"
    ssh.write_text(f"#!/bin/sh\nprintf '{damaged}'\nexec cat\n")
    (tmp_path / "program.py").touch()
    code, out, err = run(tmp_path, ssh, "-H", "nowhere", "program.py")
    assert (code, out) == (2, [])
    assert (
        "a host on which the launcher starts (nowhere), got its launcher has sent what is no message"
        in err
    )


def test_the_last_words_of_an_ssh_that_fails_are_shown(tmp_path: Path, ssh: Path) -> None:
    ssh.write_text("#!/bin/sh\necho 'of the proxy'\necho 'ssh: no route' >&2\nexit 255\n")
    (tmp_path / "program.py").touch()
    code, out, err = run(tmp_path, ssh, "-H", "nowhere", "program.py")
    assert (code, out) == (2, [])
    assert "ssh reaches (nowhere), got" in err and "of the proxy" in err and "ssh: no route" in err
