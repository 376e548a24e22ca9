"""Gloo's waits are ended from outside, and its destructor keeps nobody waiting."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.gloo import abort_gloo
from support import warm_python
from support.conformance import Ranks

LIMIT_S, SOON_S = 20.0, 5.0


def wait_for_each_other() -> None:
    """Each rank is in another operation, so that neither ends; then they give the group up."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S))
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1 << 20), group=group, async_op=True)
    else:
        work = dist.barrier(group=group, async_op=True)
    assert work is not None
    time.sleep(0.5)
    assert not work.is_completed()
    dist.barrier()
    began = time.monotonic()
    abort_gloo(group)
    # "reset" where the other rank has given the group up while data from here lay unread there
    with pytest.raises(RuntimeError, match=r"closure|closed|reset by peer"):
        work.wait()
    dist.destroy_process_group(group)
    del work, group
    assert time.monotonic() - began < SOON_S  # the group's destructor has waited for nothing


@pytest.mark.parametrize("transport", ["gloo"])
@pytest.mark.parametrize("size", [2])
def test_operations_that_wait_for_each_other_are_ended(ranks: Ranks) -> None:
    ranks.run(wait_for_each_other)


# The other rank is stopped when it waits for the data and killed when a part of them is on the way.
LOST_SEND = """
import os, signal, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from lockstep.gloo import abort_gloo, keep_until_ended
other = os.fork()
store = dist.FileStore("store", 2)
dist.init_process_group(
    "gloo", store=store, rank=int(other == 0), world_size=2, timeout=timedelta(seconds=float(sys.argv[1]))
)
sent, received = torch.ones(2, 1 << 23), torch.empty(2, 1 << 23)
if other:
    os.waitpid(other, os.WUNTRACED)
work = dist.all_to_all_single(received, sent, async_op=True)
time.sleep(float(sys.argv[2]))
if not other:
    os.kill(os.getpid(), signal.SIGSTOP)
os.kill(other, signal.SIGKILL)
began = time.monotonic()
group = dist.group.WORLD
abort_gloo(group)
keep_until_ended([group], [work])
ended = work.is_completed()
dist.destroy_process_group()
del group, work
print(ended, time.monotonic() - began)
"""


def test_the_destructor_of_a_group_with_a_lost_send_keeps_nobody_waiting(
    warm: None, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(LOST_SEND)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    for pause in (0.3, 1.0, 3.0, 10.0):  # on a busy machine no data may be on the way yet
        (tmp_path / "store").unlink(missing_ok=True)
        words = [tmp_path / "program.py", LIMIT_S, pause]
        done = warm_python.run(words, tmp_path, variables)
        assert done.returncode == 0, done
        # Gloo of torch 2.10 writes lines of its own
        ended, seconds = done.stdout.splitlines()[-1].split()
        if ended == "False":
            break
    assert ended == "False"  # else there is nothing to keep, and this module can do without it
    assert float(seconds) < SOON_S


def test_messages_of_an_aborted_group_have_ended(warm: None, tmp_path: Path) -> None:
    """Their works do not say so by themselves, and the group would be kept for ever."""
    collective = "dist.all_to_all_single(received, sent, async_op=True)"
    assert collective in LOST_SEND
    message = "dist.isend(sent, 1) if other else None"
    (tmp_path / "program.py").write_text(LOST_SEND.replace(collective, message))
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm_python.run([tmp_path / "program.py", LIMIT_S, 0.3], tmp_path, variables)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("True "), done


# The interpreter's end lasts until the send has ended, at its time limit.
SLOW_END = """
class Slow:
    def __del__(self, sleep=time.sleep, seconds=float(sys.argv[3])):
        sleep(seconds)
sys.slow = Slow()
"""


def test_a_send_that_ends_when_the_program_does_does_not_abort_it(
    warm: None, tmp_path: Path
) -> None:
    """Python ends a thread that comes back from C++ when the interpreter ends, and with it the
    process.
    """
    (tmp_path / "program.py").write_text(LOST_SEND + SLOW_END)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm_python.run([tmp_path / "program.py", 2.0, 0.3, 4.0], tmp_path, variables)
    assert done.returncode == 0, done
