"""Whether the processes of other ranks live: by pidfds, by the process table, from several
threads.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress

import pytest

from lockstep.system.processes import ProcessLiveness


def test_a_number_that_no_process_has_counts_as_ended() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    liveness = ProcessLiveness({0: os.getpid(), 1: child})
    assert liveness.poll() == {1}
    liveness.close()


def test_without_pidfds_the_process_table_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(pid: int) -> int:
        raise OSError("no such call")

    monkeypatch.setattr(os, "pidfd_open", none)
    test_a_number_that_no_process_has_counts_as_ended()
    monkeypatch.delattr(os, "pidfd_open")
    test_a_number_that_no_process_has_counts_as_ended()


def test_two_threads_may_find_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread and the progress thread look at the same time, and both have seen the end
    before either acts.
    """
    both = threading.Barrier(2)
    real = select.poll

    class Poll:
        def __init__(self) -> None:
            self.poller = real()

        def register(self, descriptor: int, events: int) -> None:
            self.poller.register(descriptor, events)

        def poll(self, timeout: int) -> list[tuple[int, int]]:
            found = self.poller.poll(timeout)
            with suppress(threading.BrokenBarrierError):  # when only one at a time comes here
                both.wait(0.2)
            return found

    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    liveness = ProcessLiveness({7: child})
    monkeypatch.setattr(select, "poll", Poll)
    found: list[set[int]] = []
    threads = [threading.Thread(target=lambda: found.append(liveness.poll())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.waitpid(child, 0)
    liveness.close()
    assert found == [{7}, {7}]
