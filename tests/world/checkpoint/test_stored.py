"""What each release has stored is read, and goes on to the same bits; this code computes the bits
of its numerics.

A failure here says that this code reads or computes otherwise than a release did. If numbers are to
change, add a row to `lockstep.checkpoint.numerics.CHANGES` (and to CHANGELOG.md), and store the
checkpoints of the next release: `PYTHONPATH=tests python tests/support/golden.py RELEASE`. What
earlier releases have stored stays as it is.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lockstep.checkpoint.folder import read
from lockstep.checkpoint.numerics import NUMERICS, changes_since
from support.golden import CASES, END, SAVED, Release, releases
from support.pool import Pool

RELEASES = releases()
STORED = [(release, case) for release in RELEASES for case in release.fingerprints]
MARKS = {"sharded": pytest.mark.leaks("a device mesh outlives its job, and its group with it")}
TRAINED = [pytest.param(release, case, marks=MARKS.get(case, ())) for release, case in STORED]


def name(value: object) -> str:
    return value.name if isinstance(value, Release) else str(value)


def train(case: str, folder: Path, steps: int, resume: Path | None = None) -> tuple[str, list[str]]:
    """The fingerprint, and what was said about the numerics."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    try:
        return CASES[case].train(folder, steps, resume), [
            text for text in said if "numerics" in text
        ]
    finally:
        logging.getLogger("lockstep").removeHandler(handler)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("release", "case"), TRAINED, ids=name)
def test_a_stored_checkpoint_is_read_and_goes_on(
    pool: Pool, tmp_path: Path, release: Release, case: str, workers: int
) -> None:
    stored, before = release.fingerprints[case], release.numerics
    said = [
        [changes_since(before)] if before != NUMERICS else [],
        *[[]] * (workers - 1),
    ]  # on rank 0 alone
    for steps, wanted in ((SAVED, stored["saved"]), (END, stored["end"])):
        folder = tmp_path / str(steps)
        folder.mkdir()
        results = pool.run(train, case, folder, steps, release.checkpoint(case), workers=workers)
        if steps == SAVED or before == NUMERICS:
            assert [fingerprint for fingerprint, _ in results] == [wanted] * workers
        assert [texts for _, texts in results] == said


@pytest.mark.parametrize("case", CASES)
def test_this_code_computes_the_bits_of_its_numerics(pool: Pool, tmp_path: Path, case: str) -> None:
    golden = [
        release.fingerprints[case]["end"] for release in RELEASES if release.numerics == NUMERICS
    ]
    assert golden, f"store the checkpoints of numerics {NUMERICS}: see tests/support/golden.py"
    ((fingerprint, said),) = pool.run(train, case, tmp_path, END, workers=1)
    assert (fingerprint, said) == (golden[-1], [])


@pytest.mark.parametrize(("release", "case"), STORED, ids=name)
def test_a_stored_checkpoint_has_its_versions(release: Release, case: str) -> None:
    checkpoint = read(release.checkpoint(case))
    assert (checkpoint.step, checkpoint.numerics) == (SAVED, release.numerics)
    assert 0 < checkpoint.state["loader"]["step"] < 3  # in the middle of an epoch


@pytest.mark.parametrize(("release", "case"), STORED, ids=name)
def test_a_stored_position_of_an_own_loop_goes_on(
    tmp_path: Path, release: Release, case: str
) -> None:
    state, following = release.positions[case]
    _, found = CASES[case].position(tmp_path, state)
    assert found == following or release.numerics != NUMERICS
