"""The watch's rules: which records agree, what machines tell of each other, how calls are put into words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from multiprocessing import process
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lockstep.recorder import Raw
from lockstep.watch.causes import first_line
from lockstep.watch.far import Far
from lockstep.watch.finding import Finding
from lockstep.watch.judge import KINDS, differences, is_error
from lockstep.watch.machines import Job, compare, rows_of, slow_of
from lockstep.watch.places import is_internal, stack_of
from lockstep.watch.report import Report, read
from lockstep.watch.rounds import Rounds
from lockstep.watch.session import Session
from lockstep.watch.signs import KINDS as CALLS
from lockstep.watch.signs import in_words

RAW = Raw(1, 2, 3, fingerprint=4, line=5, batch=6, loop=7, entered=0, left=0, what=0, place=0, group=0, name=0, peer=-1)
AFTER = -2 - 10  # a loop that has ended after 10 batches


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, []),
        ({"fingerprint": 0}, ["desync"]),
        ({"line": 0}, ["lines"]),
        ({"line": 0, "name": 3}, ["lines"]),  # only names that both have given
        ({"batch": 5}, ["batches"]),
        ({"batch": 5, "line": 0}, ["batches", "lines"]),
        ({"batch": 5, "loop": 8}, []),
        ({"batch": -1, "loop": 0}, []),
        ({"batch": AFTER}, []),  # a like call on the same line: on purpose, for all that is known
        ({"batch": AFTER, "line": 0}, ["ended", "lines"]),
    ],
)
def test_what_makes_two_records_differ(changes: dict[str, int], expected: list[str]) -> None:
    assert list(differences(RAW, replace(RAW, **changes))) == expected


def test_ranks_may_say_that_their_batches_differ() -> None:
    assert not list(differences(RAW, replace(RAW, batch=5), uneven=True))
    assert not list(differences(replace(RAW, name=1), replace(RAW, line=0, name=1)))


def test_what_programs_do_on_purpose_is_an_error_in_strict_mode_alone() -> None:
    assert [kind for kind in KINDS if not is_error(kind, strict=False)] == ["batches", "lines"]
    assert all(is_error(kind, strict=True) for kind in KINDS)


JOB = Job([[0, 1], [2, 3]], {9: [0, 1, 2, 3]})


def told(state: str = "runs", head: int = 5, waits: Any = None, **record: int) -> dict[str, Any]:
    values = {"fingerprint": 1, "line": 1, "batch": 1, "loop": 1, "named": 0, **record}
    records = [[number, *values.values()] for number in range(max(1, head - 3), head + 1)]
    return {"state": state, "groups": {"9": [head, waits, records]}}


def said(*parts: dict[str, Any]) -> dict[int, Any]:
    """What two machines say of two ranks each."""
    found = {}
    for number, part in enumerate(parts):
        ranks = [2 * number, 2 * number + 1]
        rows = {str(rank): [part["state"], "", f"host{number}", 1, None, None, None, ""] for rank in ranks}
        head, waits, records = part["groups"]["9"]
        group = [ranks, head, waits, records, ["barrier()", "a.py:1 in f\nx"]]
        found[number] = {"ranks": rows, "groups": {"9": [group]}}
    return found


def found(lost: str, *parts: dict[str, Any]) -> str:
    finding = compare(JOB, said(*parts), {1: (lost, "why")} if lost else {})
    return "" if finding is None else f"{finding.kind}: {finding.sentence}"


def test_machines_that_go_together_have_nothing_to_say() -> None:
    assert found("", told(), told(head=7)) == ""
    assert found("lost", told(), told()) == ""  # nobody waits for it


def test_what_machines_do_otherwise_is_found() -> None:
    assert found("", told(), told(fingerprint=2)).startswith("desync: As collective 2 of all ranks, rank 0 called")
    assert found("", told(), told(batch=2)) == "batches: Rank 0 is on batch 1, rank 2 is on batch 2."
    assert found("", told(), told(batch=2, loop=2)) == ""


@pytest.mark.parametrize("state, kind", [("died", "lost"), ("ended", "left"), ("frozen", "frozen")])
def test_a_rank_that_will_not_come_is_found(state: str, kind: str) -> None:
    assert found("", told(waits=[5, 1.0, 0.0]), told(state, head=4)).startswith(f"{kind}: Rank 2 on host1 ")
    assert found("", told(waits=[5, 1.0, 0.0]), told(state, head=5)) == ""
    assert found("", told(waits=[5, 1.0, 0.0]), told(head=4)) == ""


def test_a_machine_that_is_lost_is_a_fault_if_others_wait_for_it() -> None:
    waits = told(waits=[5, 1.0, 0.0])
    assert found("", waits, told(head=4)) == ""
    assert found("lost", waits, told(head=4)).startswith("lost: Rank 2 on host1 is not heard of any more")
    assert found("died", waits, told(head=4)).startswith("lost: Rank 2 on host1 died while others waited")
    assert found("died", waits, told("ended", head=4)).startswith("left: ")  # it has told that before
    assert compare(JOB, {0: said(waits)[0], 1: {}}, {1: ("lost", "")}) is not None  # it has never said anything
    rows = rows_of(JOB, {}, {1: ("lost", "for 30 s")})
    assert [(rank, row.state) for rank, row in rows.items()] == [(2, "lost"), (3, "lost")]


def test_slow_ranks_are_named() -> None:
    assert [(late, waiting) for *_, late, waiting in slow_of(JOB, said(told(waits=[5, 6.0, 0.0]), told(head=4)))] == [
        ([2, 3], [0, 1])
    ]


class Store:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.messages = 0

    def set(self, key: str, value: str) -> None:
        self.values[key], self.messages = value, self.messages + 1

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.messages += 1
        return [self.values[key].encode() for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()

    def set_timeout(self, timeout: timedelta) -> None:
        assert timeout <= timedelta(seconds=5)  # the watch goes on without a store


def test_each_machine_sends_two_messages_a_round_and_the_first_hears_all() -> None:
    store = Store()
    machines = [Rounds(store, number, 125) for number in range(125)]
    for machine in machines:
        machine.begin()
    store.messages = 0
    for number, machine in enumerate(machines):
        machine.tell({"ranks": number})
    heard = [machine.hear() for machine in machines]
    assert store.messages == 250
    assert [len(values) for _, values in heard] == [125] + [1] * 124
    assert heard[0][1][7]["ranks"] == 7
    assert machines[7].report("first") == "first"
    assert machines[8].report("second") == "first"
    assert {machine.hear()[0] for machine in machines} == {"first"}


def report(sentence: str) -> Report:
    return Report("lost", sentence, (), (1,), (), "", "", 0.0, "")


def test_the_first_report_of_any_machine_is_that_of_all(tmp_path: Path) -> None:
    store = Store()
    met = SimpleNamespace(machines=((0,), (1,)), store=store, heartbeat=None)
    limits = SimpleNamespace(heartbeat_s=30.0)
    one, two = (Far(cast("Any", SimpleNamespace(met=met, rank=rank, limits=limits))) for rank in (0, 1))
    assert one.first(report("first")) == report("first")
    session = SimpleNamespace(
        error=None, look=lambda: False, far=two, folder=tmp_path, report=lambda finding: report(finding.sentence)
    )
    taken: list[Report] = []
    session.take = taken.append
    Session.fail(cast("Any", session), Finding("lost", "it follows from the first", ()))
    assert read(tmp_path / "report.json") == report("first")
    assert taken == [report("first")]  # also where the file cannot be read back
    store.values["report"] = "damaged"
    assert two.first(report("second")) == report("second")


def test_calls_in_words() -> None:
    opts = dist.AllreduceOptions()
    opts.reduceOp = dist.ReduceOp.MAX
    operation, key_of = CALLS["allreduce"]
    assert in_words(operation, key_of([torch.ones(2, 3)], opts)) == "all_reduce(float32[2, 3], max)"
    many = key_of([torch.ones(n) for n in range(1, 9)], opts)
    assert in_words(operation, many) == "all_reduce(float32[1], float32[2], float32[3], … 5 more, max)"
    operation, key_of = CALLS["alltoall"]
    assert key_of([torch.ones(3)], [torch.ones(4)]) == key_of([torch.ones(5)], [torch.ones(6)])


def test_the_first_line_of_an_exception() -> None:
    words = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError: one\n  two\nthree\n'
    assert first_line(words) == "ValueError: one"
    assert first_line("") == ""


def test_a_stack_shows_the_users_frames_and_where_it_is_inside() -> None:
    frames = [(torch.__file__, 1, "inner"), ("/home/me/train.py", 7, "main"), ("/home/me/train.py", 9, "<module>")]
    shown = stack_of(frames)
    assert [line.rpartition("/")[2].partition(": ")[0] for line in shown] == [
        "__init__.py:1 in inner",
        "train.py:7 in main",
        "train.py:9 in <module>",
    ]
    assert not is_internal("<stdin>")


def test_a_stack_does_not_show_how_multiprocessing_has_started_the_process() -> None:
    frames = [("/home/me/train.py", 7, "main"), (process.__file__, 1, "run"), ("<string>", 1, "<module>")]
    assert [line.rpartition("/")[2] for line in stack_of(frames)] == ["train.py:7 in main"]
    assert len(stack_of([frames[0], frames[2]])) == 2


def test_a_program_without_a_line_of_the_users_is_where_lockstep_is() -> None:
    program = """
import sys, threading
from lockstep import verify
from lockstep.watch.places import Places

def of_lockstep():
    texts = []
    Places(texts.append).of(sys._getframe())
    print(texts[0].splitlines()[0])

code = of_lockstep.__code__.replace(co_filename=verify.__file__)
thread = threading.Thread(target=type(of_lockstep)(code, globals()))
def spawn_main(): pass  # as in the line with which multiprocessing starts a process
spawn_main.__module__ = "multiprocessing.spawn"
thread.start(); thread.join()
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.strip().endswith("lockstep/verify/__init__.py:8 in of_lockstep")
