"""What is asked of processes of this host by their PIDs; most of it is tested where it is used,
with real jobs.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from lockstep.system.processes import has_variables, read_status, resident_bytes, signal_name

NONE = [-1, 1 << 22 | 1, 1 << 70]  # Linux gives no PID above 4194304


def test_the_memory_of_a_process_is_measured() -> None:
    assert 1 << 20 < resident_bytes(os.getpid()) < 1 << 40


def test_the_variables_that_a_process_was_started_with_are_compared() -> None:
    with subprocess.Popen(
        ["cat"], env={"ONE": "1", "OTHER": "x=y"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdin.write(b"started\n")
        process.stdin.flush()
        process.stdout.readline()  # until it runs, Linux may show no variables
        assert has_variables(process.pid, {"ONE": "1"}) and has_variables(
            process.pid, {"ONE": "1", "OTHER": "x=y"}
        )
        assert not has_variables(process.pid, {"ONE": "1", "LOCKSTEP_NO_SUCH": "1"})
        assert not has_variables(process.pid, {"ONE": "12"})
        process.kill()


@pytest.mark.parametrize("pid", NONE)
def test_a_pid_that_no_process_has_is_no_error(pid: int) -> None:
    assert resident_bytes(pid) == 0
    assert not has_variables(pid, {"PATH": os.environ["PATH"]})
    assert read_status(pid) is None


def test_signals_without_a_name_have_their_number() -> None:
    assert [signal_name(number) for number in (9, 15, 41)] == ["SIGKILL", "SIGTERM", "signal 41"]
