"""What one host of an elastic job keeps while it is open which host leads, and how it claims to go on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lockstep.elastic.membership import Leave
from lockstep.elastic.succession import HostView
from lockstep.launcher.elastic_host import _Inbox, _SharedFolder, claim_succession
from lockstep.launcher.elastic_job import Ask, Ended, FromWorker, HostMessages, Saved

VIEW = HostView(1, 2, 0, (0, 1, 2), "folder")


def ended(number: int) -> Ended:
    return Ended(number, 0, True, None)


def test_what_a_report_says_is_not_handled_again() -> None:
    inbox = _Inbox()
    before: list[HostMessages] = [Saved("one"), FromWorker(3, Leave()), ended(3), Ask(1, "resize", 2)]
    after: list[HostMessages] = [FromWorker(4, Leave()), ended(4)]
    for message in before:
        inbox.add(1, message)
    inbox.mark(1)
    for message in after:
        inbox.add(1, message)
    inbox.add(2, ended(7))  # of a host without a report
    assert inbox.drop_reported() == [(1, ended(3))]
    kept = [before[0], before[3], *after]
    assert list(inbox.take()) == [*((1, message) for message in kept), (2, ended(7))]
    assert list(inbox.take()) == []


def test_a_report_is_good_for_one_time() -> None:
    inbox = _Inbox()
    inbox.mark(1)
    assert list(inbox.take()) == []
    inbox.add(1, ended(3))
    assert inbox.drop_reported() == []
    assert list(inbox.take()) == [(1, ended(3))]


def test_the_first_claim_wins_and_all_get_to_know_it(tmp_path: Path) -> None:
    proposals = [(2, 3, leader) for leader in range(8)]
    winners = []

    def claim(proposal: tuple[int, int, int]) -> None:
        winners.append(claim_succession(tmp_path, VIEW, proposal))

    threads = [threading.Thread(target=claim, args=(proposal,)) for proposal in proposals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 8 and len(set(winners)) == 1 and winners[0] in proposals
    assert [path.name for path in tmp_path.iterdir()] == ["after-1-2-0.json"]  # and no drafts
    other = HostView(1, 3, 0, (0, 1), "folder")
    assert claim_succession(tmp_path, other, (9, 9, 9)) == (9, 9, 9)


@pytest.mark.parametrize("text", ["", "[1, 2", "[1, 2]", '["a", 2, 3]', "{}"])
def test_a_damaged_claim_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "after-1-2-0.json").write_text(text)
    with pytest.raises(ValueError):
        claim_succession(tmp_path, VIEW, (2, 3, 1))
    assert len(list(tmp_path.iterdir())) == 1


def test_the_folder_of_claims_is_removed_if_nobody_has_to_find_it(tmp_path: Path) -> None:
    shared, again = _SharedFolder(), _SharedFolder()
    shared.make(tmp_path, "")
    assert Path(shared.path).parent == tmp_path / ".hosts"
    again.make(tmp_path, shared.path)  # of the launcher that leads next
    assert again.path == shared.path
    again.leave("", removes=False)
    assert Path(shared.path).is_dir()
    shared.leave("", removes=True)
    assert not (tmp_path / ".hosts").exists()
