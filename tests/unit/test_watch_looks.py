"""What the watchers make of what they see: patience, silence, disks that are full, threads, forks and files."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lockstep import environment, private_folders
from lockstep.errors import LockstepError, TransportError
from lockstep.launchers.options import Watch
from lockstep.launchers.watching import Watching
from lockstep.recorder import Call, Log, Recorder, Recording, current, places
from lockstep.recorder.layout import State
from lockstep.watch import hooks, jobs, machines, meeting, stacks
from lockstep.watch import report as reports
from lockstep.watch.batches import replacements
from lockstep.watch.circles import Circles
from lockstep.watch.far import Far
from lockstep.watch.finding import Finding
from lockstep.watch.patience import Patience
from lockstep.watch.places import Places, describe, stack_of
from lockstep.watch.report import Report
from lockstep.watch.rounds import Rounds
from lockstep.watch.session import Session
from lockstep.watch.watcher import Watcher
from support.openings import SQUATS, squat


class Clock:
    """A monotonic clock that goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_patience_counts_what_is_seen_in_every_look(clock: Clock) -> None:
    patience = Patience()
    for seconds in range(4):
        assert patience.seconds("late") == pytest.approx(0.1 * seconds)
        clock.pass_s(0.1)
        assert patience.look() == pytest.approx(0.1)
    patience.look()  # not seen in this one
    patience.look()
    assert patience.seconds("late") == 0


def test_patience_stands_still_while_the_process_is_stopped(clock: Clock) -> None:
    """A whole job may be stopped for an hour: none of its ranks is late or frozen because of that."""
    patience = Patience()
    patience.seconds("late")
    clock.pass_s(3600)
    assert patience.look() == 3600
    assert patience.seconds("late") <= 0.5


def bare_watcher(**session: Any) -> Any:
    found = Watcher.__new__(Watcher)
    said: list[str] = []
    found._session = cast("Any", SimpleNamespace(rank=0, say=said.append, **session))
    found._stop, found._patience = threading.Event(), Patience()
    return found, said


def test_a_full_disk_ends_the_log_and_not_the_watch(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, 1, "here", "program")
    with Recording(recorder.path) as own:
        log = Log(tmp_path, own)
        log._file.close()
        log._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the log closes it
        recorder.enter(1, recorder.open_lane(1), 1, Call(1, "barrier()", 0), 0, 0, 0, 0, -1)
        recorder.leave(1, 1.0)
        watcher, said = bare_watcher()
        watcher._log, watcher._thread = log, threading.current_thread()
        watcher._write_log()
        assert len(said) == 1
        assert "No space left" in said[0]
        watcher._write_log()
        assert len(said) == 1
        watcher._log = log
        watcher.stop()
    recorder.close()


def test_the_watcher_goes_on_whatever_fails() -> None:
    """What fails is said once, and what does not fail is still looked at."""
    looks: list[str] = []
    found = Finding("left", "found")

    def failing(name: str, error: BaseException) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            looks.append(name)
            raise error

        fail.__qualname__ = name
        return fail

    def fail(finding: Finding) -> None:
        looks.append(finding.sentence)
        if looks.count(finding.sentence) > 1:
            watcher._stop.set()
        raise MemoryError(finding.sentence)

    recorder = SimpleNamespace(pid=os.getpid(), phase="runs", beat=failing("beat", SystemError("no")))
    reap, first = failing("reap", RuntimeError("no")), failing("first", TypeError("no"))
    members = [SimpleNamespace(reap=reap, first=first, messages=[])]
    session = {
        "recorder": recorder,
        "recordings": {},
        "members": members,
        "waits_in": lambda: None,
        "limits": SimpleNamespace(debugging=False),
        "health": SimpleNamespace(look=failing("health", IndexError("no"))),
        "look": failing("look", AttributeError("no")),
        "look_who_is_alone": failing("alone", NameError("no")),
        "far": SimpleNamespace(look=failing("far", ZeroDivisionError("no"))),
        "fail": fail,
    }
    watcher, said = bare_watcher(**session)
    watcher._failures, watcher._said, watcher._log = {}, set(), None
    watcher._cycle = SimpleNamespace(look=lambda: found)
    thread = threading.Thread(target=watcher._run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert {"beat", "health", "look", "reap", "first", "far", "found", "alone"} == set(looks)
    assert all(looks.count(name) == 2 for name in set(looks) - {"first"}), looks
    kinds = {text.rpartition("again: ")[2].partition(":")[0] for text in said}
    words = "SystemError RuntimeError TypeError IndexError AttributeError ZeroDivisionError MemoryError NameError"
    assert kinds == set(words.split())
    assert len(said) == 9, said  # once for each part; two of them ask for the first collective


def test_what_fails_for_a_moment_is_not_said() -> None:
    watcher, said = bare_watcher()
    watcher._failures, watcher._said = {}, set()

    def fail() -> None:
        raise ValueError("memory of a rank that is ending")

    for _ in range(49):
        assert watcher._try(fail) is None
    assert not said
    watcher._try(fail)
    assert len(said) == 1


def test_an_error_is_raised_even_if_no_report_can_be_made_of_it(tmp_path: Path) -> None:
    session = bare_session(tmp_path, recorder=SimpleNamespace(world_size=2))

    def fail(finding: Finding) -> Any:
        raise RecursionError("no report")

    session.report = fail
    with pytest.raises(TransportError, match="it is so"):
        session.fail(Finding("lost", "it is so", (1,), key=1, sequence=3), raises=True)


def test_a_log_that_cannot_be_begun_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_TIMELINE", str(tmp_path / "file"))
    said: list[str] = []
    assert hooks._log(cast("Any", SimpleNamespace(rank=1, own=None, say=said.append))) is None
    assert "rank 1 does not record its timeline" in said[0]


def report(sentence: str = "it is so", kind: str = "lost") -> Report:
    return Report(kind, sentence, (), (1,), (), "", "", 0.0, "")


def bare_session(folder: Path, **more: Any) -> Any:
    session = Session.__new__(Session)
    session.folder, session.error, session.lock = folder, None, threading.RLock()
    session.far = cast("Any", SimpleNamespace(first=lambda made: made))
    session.delivered, session.home = threading.Event(), threading.current_thread()
    vars(session).update({"report": lambda finding: report(finding.sentence), "_end_waits": lambda: None, **more})
    return session


@pytest.mark.parametrize("there", ["", "{", '{"lockstep_report": 1}'])
def test_a_finding_is_an_error_here_whatever_the_folder_is_like(tmp_path: Path, there: str) -> None:
    """Nothing of it depends on a file that is damaged or cannot be written."""
    folder = tmp_path
    if there:
        (tmp_path / "report.json").write_text(there)
    else:
        folder = tmp_path / "gone"
    session = bare_session(folder)
    session.fail(Finding("lost", "found"))
    assert "found" in str(session.error)


def test_waits_are_ended_before_the_store_is_asked(tmp_path: Path) -> None:
    order: list[str] = []
    far = SimpleNamespace(first=lambda made: order.append("store"))
    session = bare_session(tmp_path, far=far, _end_waits=lambda: order.append("waits"))
    session.take(report())
    assert order == ["waits", "store"]


def test_a_thread_that_is_the_program_gets_the_error(tmp_path: Path) -> None:
    session = bare_session(tmp_path, home=threading.Thread(target=lambda: session.hand_over()))
    session.hand_over()
    assert not session.delivered.is_set()
    session.home.start()
    session.home.join()
    assert session.delivered.is_set()


def test_two_threads_that_find_something_write_one_whole_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link: Callable[..., None] = os.link

    def link_late(*paths: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        other = threading.Thread(target=reports.write_once, args=(tmp_path, report("second")))
        other.start()
        other.join()
        link(*paths)

    monkeypatch.setattr(os, "link", link_late)
    assert not reports.write_once(tmp_path, report("first"))
    assert reports.read(tmp_path / "report.json") == report("second")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("kind, words", [("lines", "different lines"), ("batches", "is on batch 3")])
def test_what_differs_is_said_where_nothing_can_be_written(tmp_path: Path, kind: str, words: str) -> None:
    said: list[str] = []
    record = SimpleNamespace(what="barrier()", place="a.py:1", source="", sequence=1, group="", batch=3, finished=False)
    own = SimpleNamespace(record=lambda raw: record)
    session = bare_session(tmp_path / "gone", say=said.append, own=own, rank=0, _told=set())
    session.limits = SimpleNamespace(strict=False)
    raws = [cast("Any", SimpleNamespace(line=line, loop=7)) for line in (1, 2)]
    session._warn(kind, raws[0], SimpleNamespace(recording=own, rank=1), raws[1])
    assert words in said[0]
    assert session.has_told(kind, raws[0], raws[1])
    assert not session.has_told("swap", raws[0], raws[1])


# between machines


class Store:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lost = False

    def set(self, key: str, value: str) -> None:
        if self.lost:
            raise RuntimeError("Broken pipe")
        self.values[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if self.lost or any(key not in self.values for key in keys):
            raise RuntimeError("wait timeout")
        return [self.values[key].encode() for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise NotImplementedError

    def set_timeout(self, timeout: object) -> None:
        return


class Place:
    """What a rank's `Far` sees of its session; all of what it finds is in `found`."""

    def __init__(self, rank: int, store: Store, peers: dict[int, Any] | None = None) -> None:
        self.found: list[Finding] = []
        self.session: Any = SimpleNamespace(
            rank=rank,
            uneven=0,
            peers=peers or {},
            recordings={},
            recorder=SimpleNamespace(note=lambda word, value: None),
            members=[],
            met=SimpleNamespace(machines=((0,), (1, 2)), store=store, heartbeat=None),
            health=SimpleNamespace(gone=set(), is_stopped=lambda rank: False),
            limits=SimpleNamespace(debugging=True, strict=False, stall_s=600.0, warning_s=5.0, heartbeat_s=30.0),
            fail=self.found.append,
        )
        self.far = Far(self.session)

    def wait_since(self, entered: float) -> None:
        first = SimpleNamespace(entered=entered)
        self.session.members = [SimpleNamespace(far=(0,), key=9, ranks=(0, 1, 2), first=lambda: first)]

    def rows(self, *rows: tuple[int, str]) -> None:
        told = {str(rank): [state, "ValueError: no", "", 1, None, None, None, ""] for rank, state in rows}
        vars(self.far)["_own"] = lambda: {"ranks": told, "groups": {}}


def test_the_end_of_the_store_is_no_fault_unless_somebody_waits(clock: Clock) -> None:
    """The first rank, which may keep the store, may have come to its end while others still save their results."""
    store = Store()
    places = [Place(0, store), Place(1, store)]
    for place in places:
        place.rows()
    store.lost = True
    for _ in range(20):
        clock.pass_s(0.6)
        places[1].far.look(0.1)
    assert not places[1].found
    places[1].wait_since(clock.now)  # just now: others may still come
    places[1].far.look(0.1)
    clock.pass_s(0.6)
    places[1].far.look(0.1)
    assert not places[1].found
    clock.pass_s(3)
    places[1].far.look(0.1)
    assert [finding.kind for finding in places[1].found] == ["lost"]


def test_a_machine_that_has_said_nothing_yet_is_waited_for(clock: Clock) -> None:
    store = Store()
    place = Place(1, store)
    place.rows()
    place.wait_since(0.0)
    for _ in range(20):
        clock.pass_s(0.6)
        place.far.look(0.1)
    assert not place.found


def test_silence_counts_only_while_somebody_listens(clock: Clock) -> None:
    store = Store()
    one, other = Rounds(store, 0, 2), Rounds(store, 1, 2)
    for each in (one, other):
        each.begin()
        each.tell({})
    one.hear()
    clock.pass_s(3600)
    assert one.silent_s(1) == 3600
    one.forgive()
    assert one.silent_s(1) == 0
    clock.pass_s(2)
    one.hear()
    assert one.silent_s(1) == 2  # still nothing new


@pytest.mark.parametrize("heartbeat_s, speaks", [(0.1, False), (2.0, True)])
def test_a_rank_speaks_for_one_that_holds_its_interpreter(clock: Clock, heartbeat_s: float, speaks: bool) -> None:
    peer = SimpleNamespace(phase="runs", reals={State().heartbeat: clock.now - heartbeat_s})
    assert Place(2, Store(), {1: peer}).far._speaks() is speaks


def test_a_rank_that_raises_leaves_other_machines_a_moment_to_raise_the_same(clock: Clock) -> None:
    store = Store()
    place = Place(0, store)
    Place(1, store)
    place.rows()
    other = Rounds(store, 1, 2)
    told = {str(rank): ["raised" if rank == 1 else "runs", "ValueError: no", "", 1, *[None] * 3, ""] for rank in (1, 2)}
    for _ in range(4):
        other.tell({"ranks": told, "groups": {}})
        place.far.look(0.1)
        clock.pass_s(0.6)
    assert not place.found
    place.far.look(0.1)
    assert [finding.sentence for finding in place.found] == ["Rank 1 has raised ValueError: no."]


def test_a_rank_that_raises_while_others_wait_is_found_at_once() -> None:
    job = machines.Job([[0], [1]], {9: [0, 1]})
    row = ["", "", 1, None, None, None, ""]
    told = {
        0: {"ranks": {"0": ["waits", *row]}, "groups": {"9": [[[0], 3, [3, 0.1, 0.0], [], ["barrier()", "a.py:1"]]]}},
        1: {"ranks": {"1": ["raised", *row]}, "groups": {"9": [[[1], 2, None, [], ["barrier()", "a.py:1"]]]}},
    }
    finding, waits = machines.raised(job, told)
    assert finding is not None
    assert waits
    told[0]["groups"] = {}
    assert machines.raised(job, told)[1] is False


def test_that_the_first_machine_has_left_is_seen_by_those_that_wait_for_it() -> None:
    """Nobody compares for the others any more."""
    store = Store()
    first, place = Place(0, store), Place(1, store)
    first.rows((0, "ended"))
    first.far.look(0.1)
    waits = {"ranks": {}, "groups": {"9": [[[1], 4, [4, 0.5, 0.0], [], ["barrier()", "a.py:3 in f"]]]}}
    vars(place.far)["_own"] = lambda: waits
    place.session.members = [SimpleNamespace(far=(0,), key=9, ranks=(0, 1), first=lambda: None)]
    place.far.look(0.1)
    assert [(finding.kind, finding.culprits) for finding in place.found] == [("left", (0,))]


def circle_of(count: int, sent: int = 0, head: int = 3, number: int = 8) -> dict[int, Any]:
    """Rank 0 waits for a message from rank 2, which waits for it in collective 4, as rank 1 does."""
    row = ["", "host", 1, None, 0.5, ["recv(float32[4], from=2)", "a.py:3 in f", "", 0, "", None], ""]
    groups = [[[[0], head, None, [], ["", ""]], [[1], 4, [4, 1.0], [], ["", ""]]], [[[2], 4, [4, 1.0], [], ["", ""]]]]
    waits = [{"0": [number, 2, 1, 0, 0], "1": [9, -1, 0, 9, 4]}, {"2": [9, -1, 0, 9, 4]}]
    ranks = [{"0": ["waits", *row], "1": ["waits", *row]}, {"2": ["waits", *row]}]
    told = [{"ranks": ranks[i], "groups": {"9": groups[i]}, "waits": waits[i], "count": count} for i in range(2)]
    told[1]["sent"] = {"2": {"0": sent}} if sent else {}
    return dict(enumerate(told))


def test_a_circle_of_ranks_on_several_machines_is_found() -> None:
    circles = Circles()
    assert circles.look(circle_of(1)) is None
    half_new = circle_of(2) | {1: circle_of(1)[1]}
    assert circles.look(half_new) is None  # that of one machine may be of another moment than that of the other
    finding = circles.look(circle_of(2))
    assert finding is not None
    assert "rank 0 waits in recv(float32[4], from=2) at a.py:3 in f for rank 2" in finding.sentence.lower()


@pytest.mark.parametrize("others", [{"sent": 1}, {"head": 4}, {"number": 9}])
def test_ranks_that_go_on_are_in_no_circle(others: dict[str, int]) -> None:
    circles = Circles()
    assert circles.look(circle_of(1)) is None
    assert circles.look(circle_of(2, **others)) is None


def last_of(rank: int, fingerprint: int) -> dict[str, Any]:
    group = [[rank], 4, None, [[4, fingerprint, 1, -1, 0, 0]], ["barrier()", "a.py:3 in f", ""]]
    return {"ranks": {}, "groups": {"9": [group]}, "final": True}


@pytest.mark.parametrize("fingerprint, kinds", [(7, []), (8, ["desync"])])
def test_what_was_called_last_is_compared_at_the_end(fingerprint: int, kinds: list[str]) -> None:
    """A program may be over before the next round."""
    store = Store()
    places = [Place(0, store), Place(1, store)]
    for place, rank, last in zip(places, (0, 1), (7, fingerprint), strict=True):
        place.session.error, place.session.has_failed = None, False
        place.wait_since(0.0)
        vars(place.far)["_own"] = functools.partial(last_of, rank, last)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda place: place.far.settle(), places))
    assert [[finding.kind for finding in place.found] for place in places] == [kinds, kinds]


# the folder


def test_where_one_rank_has_no_room_none_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = meeting._record
    monkeypatch.setattr(
        meeting, "_record", lambda folder, rank, size: (rank != 1 and record(folder, rank, size)) or None
    )
    folder = tmp_path / "job" / "attempt-0"
    folder.mkdir(parents=True)
    monkeypatch.setenv("LOCKSTEP_WATCH_DIR", str(folder))
    store = dist.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> str:
        with pytest.raises(meeting.NoRoomError) as caught:
            meeting.meet(store, rank, 3, "here")
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        said = set(pool.map(join, range(3)))
    assert said == {f"there is no room in {tmp_path} for recordings of the ranks [1]"}
    assert not list(folder.iterdir())


def base_in(parent: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path | None = None) -> Path:
    """The folder for this user's jobs, in `parent` instead of the machine's memory."""
    monkeypatch.setattr(places, "parent", lambda: parent)
    monkeypatch.setattr(environment, "runtime_dir", lambda: runtime)
    return jobs.make_base()


@pytest.mark.parametrize("runtime", [True, False], ids=["runtime directory", "no runtime directory"])
@pytest.mark.parametrize("kind", SQUATS)
def test_nobody_can_keep_ranks_from_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, runtime: bool
) -> None:
    """The usual folder's name can be guessed; others, or containers that share the memory, may take its place."""
    taken, own = tmp_path / f"lockstep-{os.getuid()}", tmp_path / "runtime"
    squat(taken, kind)
    own.mkdir(mode=0o700)
    monkeypatch.setattr(places, "parent", lambda: tmp_path)
    monkeypatch.setattr(environment, "runtime_dir", lambda: own if runtime else None)
    before = set(tmp_path.iterdir())

    # ranks that a launcher has started
    told: list[str] = []
    watching = Watching("run", Watch(), None, told.append)
    watching.begin(0, 0, 2)
    assert told == [] and watching.folder is not None
    assert watching.variables()["LOCKSTEP_WATCH_DIR"] == str(watching.folder)
    assert list(jobs.find_jobs()) == [watching.folder]  # for `lockstep top`
    watching.close()

    # ranks without one
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as pool:
        met = list(pool.map(lambda rank: meeting.meet(store, rank, 3, "here"), range(3)))
    assert len({each.folder for each in met}) == 1 and list(jobs.find_jobs()) == [met[0].folder]
    base = met[0].folder.parent.parent
    assert base.parent == (own if runtime else tmp_path) and private_folders.is_private(base)
    for each in met:
        each.recorder.close()
        for peer in each.peers.values():
            peer.close()
    jobs.remove(met[0].folder.parent)

    assert set(tmp_path.iterdir()) == before
    if taken.is_dir():
        assert list(taken.iterdir()) == []  # nothing is entrusted to what others can change


def test_a_folder_of_an_unknown_user_is_not_taken_for_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container all users of the host whom it does not know have one number, which may be this user's."""
    base = base_in(tmp_path, monkeypatch)
    monkeypatch.setattr(private_folders.os, "access", lambda path, mode: Path(path) != base)
    assert jobs.make_base() != base


@pytest.mark.parametrize("said", [{"token": "../../home"}, {"base": "/etc"}, {"base": "lockstep/../.."}])
def test_a_rank_does_not_record_wherever_the_store_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    base_in(tmp_path, monkeypatch)
    first = {"token": "0123456789ab", "base": "", **said}
    with pytest.raises(LockstepError, match=r"twelve hexadecimal digits|no folder of this user's alone"):
        meeting._folder(first["token"], first["base"], [0], 1)
    assert [path.name for path in tmp_path.iterdir()] == [f"lockstep-{os.getuid()}"]


def test_jobs_of_other_containers_are_not_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_in(tmp_path, monkeypatch)
    for name, space in (("ours", None), ("theirs", "pid:[1]")):
        folder = base / name / "attempt-0"
        folder.mkdir(parents=True)
        about = jobs.About("program", 0, 1)
        jobs.describe(folder, about if space is None else replace(about, space=space))
    jobs.remove_dead()
    assert [path.name for path in base.iterdir()] == ["theirs"]


def test_a_job_that_ends_while_others_look_for_jobs_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_in(tmp_path, monkeypatch)
    for name in ("ended", "other"):
        (base / name / "attempt-0").mkdir(parents=True)
        jobs.describe(base / name / "attempt-0", jobs.About("program", os.getpid(), 1))
    for name in ("scandir", "listdir"):
        listing = getattr(os, name)

        def gone(path: Any, listing: Callable[[Any], Any] = listing) -> Any:
            if Path(path).name == "ended":
                raise FileNotFoundError(path)
            return listing(path)

        monkeypatch.setattr(os, name, gone)
    jobs.remove_dead()
    assert [folder.parent.name for folder in jobs.find_jobs()] == ["other"]


# the process


def batches_of(loader: DataLoader[Any], use: Callable[[Any], object]) -> list[int]:
    """The batches that are noted while `use` takes some from `loader`."""
    noted: list[int] = []
    session: Any = SimpleNamespace(
        recorder=SimpleNamespace(note_batch=lambda number, _: noted.append(number)), uneven=0
    )
    replaced = replacements(session)
    try:
        use(loader)
    finally:
        for each in reversed(replaced):
            each.undo()
    return noted


def loop(loader: DataLoader[Any]) -> None:
    for number, _ in enumerate(loader):
        assert number < 2


def take(loader: DataLoader[Any]) -> None:
    iterator = iter(loader)
    while next(iterator, None) is not None:
        pass


def test_batches_are_counted_in_loops_of_the_program_alone() -> None:
    """A thread may fetch ahead, and a program may take as many batches as it needs: no rank must do as another."""
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(2)), batch_size=1)

    def in_thread(loader: DataLoader[Any]) -> None:
        thread = threading.Thread(target=loop, args=(loader,))
        thread.start()
        thread.join()

    assert batches_of(loader, loop) == [0, 1, -4]
    assert batches_of(loader, take) == []
    assert batches_of(loader, in_thread) == []


def test_a_forked_child_writes_nothing_into_its_parents_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, 0, 1, "here", "program")
    monkeypatch.setattr(current, "recorder", recorder)
    with Recording(recorder.path) as own:
        hooks._after_fork()  # as in the child
        recorder.note_batch(7, 1)
        recorder.beat()
        assert own.state().batch is None
        assert current.recorder is None


def test_a_place_is_described_where_the_current_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert describe("/a/train.py", 3, "main")[0] == "/a/train.py:3 in main"


def test_a_stack_begins_below_the_watch_itself() -> None:
    frames = [(stacks.__file__, 1, "own_stack"), ("/home/me/train.py", 7, "main")]
    assert stack_of(frames) == ("/home/me/train.py:7 in main",)


def test_code_of_two_files_that_is_alike_has_two_places(tmp_path: Path) -> None:
    texts: list[str] = []

    def number(text: str) -> int:
        texts.append(text)
        return len(texts)

    known = Places(number)
    found = []
    for name in ("a.py", "b.py"):
        space: dict[str, Any] = {"known": known}
        exec(compile("import sys\ndef f(): return known.of(sys._getframe())", str(tmp_path / name), "exec"), space)
        found += [space["f"](), space["f"]()]
    assert [place.text for place in found] == [1, 1, 2, 2]
    assert found[0].line != found[2].line
