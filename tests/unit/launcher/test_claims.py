"""Views of an elastic job's hosts as files on shared storage: the first one wins, and all get to
know it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from lockstep.launcher.elastic_jobs import claims
from lockstep.launcher.elastic_jobs.claims import SharedFolder, claim
from lockstep.launcher.elastic_jobs.election import HostView


def view(leader: int, number: int = 3) -> HostView:
    return HostView(number, leader, (0, 1, leader), "folder")


def test_the_first_claim_wins_and_all_get_to_know_it(tmp_path: Path) -> None:
    winners = []
    threads = [
        threading.Thread(target=lambda n=n: winners.append(claim(tmp_path, view(n))))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 8 and all(winner == winners[0] for winner in winners)
    assert winners[0] in [view(number) for number in range(8)]
    assert [path.name for path in tmp_path.iterdir()] == ["view-3.json"]  # and no drafts
    assert claim(tmp_path, view(9, 4)) == view(9, 4)


@pytest.mark.parametrize("text", ["", "[1, 2", "[3, 1]", '["a", 2, [3]]', "{}", '[4, 1, [1], ""]'])
def test_a_damaged_claim_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "view-3.json").write_text(text)
    with pytest.raises(ValueError):
        claim(tmp_path, view(1))
    assert len(list(tmp_path.iterdir())) == 1


def wait_for_thread(name: str = "lockstep claim") -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(20.0)


def test_a_claim_is_made_in_a_thread(tmp_path: Path) -> None:
    shared = SharedFolder()
    shared.claim(str(tmp_path), view(1))
    wait_for_thread()
    assert list(shared.decided) == [view(1)]


def test_storage_that_does_not_answer_is_asked_once_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, asked = threading.Event(), []

    def hang(folder: Path, wanted: HostView) -> HostView:
        asked.append(wanted)
        answers.wait(20.0)
        raise OSError

    monkeypatch.setattr(claims, "claim", hang)
    shared = SharedFolder()
    for _ in range(3):
        shared.claim("folder", view(1))
    answers.set()
    wait_for_thread()
    assert asked == [view(1)] and not shared.decided
    while 3 in shared._claiming:
        time.sleep(0.001)
    shared.claim("folder", view(2))  # the next try
    wait_for_thread()
    assert asked == [view(1), view(2)]


def test_the_folder_of_claims_is_removed_if_nobody_has_to_find_it(tmp_path: Path) -> None:
    shared, again = SharedFolder(), SharedFolder()
    shared.make(tmp_path, "")
    assert Path(shared.path).parent == tmp_path / ".hosts"
    again.make(tmp_path, shared.path)  # of the launcher that leads next
    assert again.path == shared.path
    again.leave("", removes=False)
    assert Path(shared.path).is_dir()
    shared.leave("", removes=True)
    assert not (tmp_path / ".hosts").exists()
