"""Workers keep freed memory for the next step, unless the user has settings of the allocator."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.launcher.worker_process.worker import keep_freed_memory
from support import warm_python

# glibc's default gives freed memory back from twice the largest freed block on.
FREED_MB = 96
SCRIPT = """
import resource, sys
from pathlib import Path
from lockstep.launcher.worker_process.worker import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

print(keep_freed_memory() if "call" in sys.argv else "as started", end=" ")
before = resident()
for _ in range(3):
    blocks = [b"x" * (24 << 20) for _ in range(4)]
    del blocks
print((resident() - before) >> 20)
"""

pytestmark = pytest.mark.usefixtures("warm")
only_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")


def kept_mb(ended: subprocess.CompletedProcess[str], word: str) -> int:
    """The memory that the script's process has kept, in MB."""
    assert ended.returncode == 0, ended.stderr
    first, mb = ended.stdout.split()
    assert first == word
    return int(mb)


@only_glibc
def test_freed_memory_is_kept() -> None:
    ended = warm_python.run(["-c", SCRIPT, "call"])
    assert kept_mb(ended, "True") > 0.8 * FREED_MB


@only_glibc
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_ARENA_MAX", "2"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.rtld.nns=2:glibc.malloc.arena_max=2"),
    ],
)
def test_a_setting_of_the_user_holds(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    ended = warm_python.run(["-c", SCRIPT, "call"])
    assert kept_mb(ended, "False") < 0.6 * FREED_MB


@only_glibc
def test_other_tunables_are_no_settings_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.nns=2")
    ended = warm_python.run(["-c", SCRIPT, "call"])
    assert kept_mb(ended, "True") > 0.8 * FREED_MB


def refuses(*_: object) -> str:
    """As musl's confstr."""
    raise OSError(22, "Invalid argument")


@pytest.mark.parametrize(
    "confstr", [refuses, lambda _: None], ids=["musl", "a name without a value"]
)
def test_another_c_library_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, confstr: Callable[[str], str | None]
) -> None:
    executable = tmp_path / "python"  # which is searched for a version of glibc
    executable.write_bytes(b"/lib/ld-musl-x86_64.so.1")
    monkeypatch.setattr(sys, "executable", str(executable))
    monkeypatch.setattr("os.confstr", confstr)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: pytest.fail("a C library was opened"))
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert not keep_freed_memory()
