"""The ledger's files: records that are torn, damaged or computed again, and what is kept of a
start.
"""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, DataError
from lockstep.proof.ledger import (
    SKIPPED,
    Difference,
    LedgerWriter,
    StepValues,
    first_difference,
    ledger,
    values_of,
)
from lockstep.proof.starts import Data, Start, differences, kept_variables

SIZE = 64


def values(loss: float = 1.5, samples: int = 7) -> StepValues:
    return StepValues(loss, 64.0, 0.25, 0.05, samples, 0.0)


def write(folder: Path, losses: list[float], first: int = 0, workers: int = 1) -> LedgerWriter:
    writer = LedgerWriter(folder, Start(command=["train.py"], workers=workers), first)
    for step, loss in enumerate(losses, first):
        writer.step(step, values(loss), seconds=0.5 * step)
    return writer


def test_what_was_written_is_read(tmp_path: Path) -> None:
    writer = write(tmp_path, [0.1, 0.2], workers=2)
    writer.step(2, values(math.nan, (1 << 40) - 1), SKIPPED)
    writer.fingerprint(3, (1, 2, (1 << 62) - 1, 4, 5))
    writer.rollback(2, 0)
    writer.fault(2, 1)
    writer.close()
    assert (tmp_path / "ledger.bin").stat().st_size == 7 * SIZE
    found = ledger(tmp_path)
    assert found.steps["step"].tolist() == [0, 1, 2]
    assert found.steps["loss"][:2].tolist() == [0.1, 0.2]
    assert math.isnan(found.record(2)["loss"])
    assert found.record(2)["samples"] == (1 << 40) - 1
    assert found.steps["flags"].tolist() == [0, 0, SKIPPED]
    assert found.steps["workers"].tolist() == [2, 2, 2]
    assert found.fingerprints[0].tolist() == (3, 1, 2, (1 << 62) - 1, 4, 5)
    assert found.rollbacks == [(2, 0)]
    assert found.faults == [(2, 1)]
    assert [start.command for start in found.starts] == [["train.py"]]
    assert values_of(found.record(1)) == values(0.2)
    assert not found.damaged
    assert not found.torn


@pytest.mark.parametrize("torn", [1, 37, 63, SIZE, 2 * SIZE + 5])
def test_a_torn_end_is_cut_off_by_the_next_start(tmp_path: Path, torn: int) -> None:
    write(tmp_path, [0.1, 0.2]).close()
    path = tmp_path / "ledger.bin"
    with path.open("ab") as file:
        file.write(b"\xa5" * torn)
    assert ledger(tmp_path).torn == torn % SIZE  # reading changes nothing
    assert ledger(tmp_path).steps["loss"].tolist() == [0.1, 0.2]
    writer = write(tmp_path, [0.3], first=2)
    writer.close()
    assert writer.cut == torn
    found = ledger(tmp_path)
    assert found.steps["loss"].tolist() == [0.1, 0.2, 0.3]
    assert found.steps["start"].tolist() == [0, 0, 1]
    assert not found.damaged


def test_a_torn_line_of_a_start_takes_no_place_of_another(tmp_path: Path) -> None:
    write(tmp_path, [0.1]).close()
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"command": ["half')
    write(tmp_path, [0.2], first=1, workers=3).close()
    assert [start.workers for start in ledger(tmp_path).starts] == [1, 3]


def test_a_damaged_record_is_left_out_and_said(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.2, 0.3]).close()
    data = bytearray((tmp_path / "ledger.bin").read_bytes())
    data[2 * SIZE + 20] ^= 1  # of step 1
    (tmp_path / "ledger.bin").write_bytes(data)
    found = ledger(tmp_path)
    assert found.damaged == [2]
    assert found.steps["step"].tolist() == [0, 2]
    with pytest.raises(
        ConfigError, match=r"step: expected a step of the ledger of .*, 0 to 2, got 1"
    ):
        found.record(1)


def test_hostile_files_are_read_as_what_they_are(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path, Start(), 0)
    writer.event(1, 5, 1 << 60)  # a start whose line is not there
    writer.event(77, 5, 0)  # a kind of a later version
    writer.close()
    (tmp_path / "ledger.jsonl").write_bytes(b"[" * 100_000 + b"\n\xff\n")
    found = ledger(tmp_path)
    assert found.starts == [Start(), Start()]
    assert not len(found.steps)


def test_steps_that_are_computed_again_are_compared(tmp_path: Path) -> None:
    write(tmp_path, [0.1, 0.2, 0.3, 0.4]).close()
    writer = LedgerWriter(tmp_path, Start(), 1)
    assert writer.step(1, values(0.2), seconds=9.0) is None
    assert writer.step(2, values(0.30000000000000004)) == Difference(
        2, "loss", 0.3, 0.30000000000000004
    )
    assert writer.step(4, values(0.5)) is None
    writer.close()
    found = ledger(tmp_path)
    assert found.steps["step"].tolist() == [0, 1, 2, 3, 4]
    assert found.steps["start"].tolist() == [0, 1, 1, 0, 1]
    assert found.recomputed["step"].tolist() == [1, 2]
    assert found.recomputed["loss"].tolist() == [0.2, 0.3]


def test_the_cause_of_a_difference_comes_before_its_consequences() -> None:
    was = values()
    now = was._replace(loss=1.6, gradient_norm=0.3, samples=8)
    difference = first_difference(3, was, now)
    assert str(difference) == "step 3: other samples, or in another order"
    assert first_difference(3, was._replace(loss=math.nan), was._replace(loss=math.nan)) is None
    rounded = was._replace(loss=was.loss * (1 + 1e-6))
    assert first_difference(3, was, rounded) == Difference(3, "loss", was.loss, rounded.loss)
    assert first_difference(3, was, rounded, rounding=True) is None
    assert first_difference(3, was, now._replace(samples=7), rounding=True) == Difference(
        3, "loss", 1.5, 1.6
    )


def test_a_full_disk_is_an_error_of_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write(tmp_path, [0.1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: 20)
        with pytest.raises(OSError) as raised:
            writer.step(1, values())
    assert raised.value.errno == errno.ENOSPC
    writer.close()


def test_a_run_without_a_ledger_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no ledger .ledger=False, or an older version"):
        ledger(tmp_path)
    with pytest.raises(DataError, match="there is no such folder"):
        ledger(tmp_path / "x")


def test_secrets_and_variables_of_the_session_are_not_kept() -> None:
    variables = {
        "RUN": "7",
        "PYTHONPATH": "src",
        "WANDB_API_KEY": "hidden",
        "DATABASE": "postgres://me:hidden@host/db",
        "my_password": "hidden",
        "HF_TOKEN": "hidden",
        "PWD": "/x",
        "RANK": "1",
        "SLURM_PROCID": "1",
        "SSH_CLIENT": "x",
        "LOCKSTEP_JOB_KEY": "hidden",
        "LOCKSTEP_TRANSPORT": "shm",
    }
    kept, withheld = kept_variables(variables)
    assert kept == {"RUN": "7", "PYTHONPATH": "src", "LOCKSTEP_TRANSPORT": "shm"}
    assert withheld == ["WANDB_API_KEY", "DATABASE", "my_password", "HF_TOKEN"]


def test_what_differs_between_two_starts_is_named() -> None:
    one = Start(
        program="a",
        versions={"torch": "2.12"},
        hyperparameters=[{"lr": 0.1}],
        data=Data("Images", 60_000, {}, {"0": "x", "9": "y"}),
    )
    other = Start(
        program="b",
        host="elsewhere",
        versions={"torch": "2.13"},
        hyperparameters=[{"lr": 0.2}],
        data=Data("Images", 40_000, {}, {"0": "x", "9": "z"}),
    )
    assert differences(one, one) == []
    assert differences(one, other) == [
        "the content of samples (9)",
        "the program",
        "versions.torch ('2.12', and '2.13')",
        "hyperparameters.0.lr (0.1, and 0.2)",
        "data (60,000 samples, and 40,000)",
    ]
