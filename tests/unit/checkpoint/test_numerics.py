"""A resume under other numerics says whether the order, draws or bits differ from here on."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import Checkpoints
from lockstep.checkpoint import manifest
from lockstep.checkpoint.folder import read
from lockstep.checkpoint.numerics import (
    CHANGES,
    NUMERICS,
    Change,
    changes_since,
)
from lockstep.data import loader as loader_module
from lockstep.errors import CheckpointError
from lockstep.training import trainer as trainer_module
from support.checkpoints import forge

MADE_UP = {
    1: Change("0.2", bits="the first that is recorded"),
    2: Change("0.3", order="blocks are permuted by another key"),
    4: Change(
        "0.5", order="windows are shuffled in two passes", bits="weights are summed in pairs"
    ),
}

ORDER = (
    "the order of samples differs: in an epoch in progress some come twice, and others not at all"
)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (4, ""),
        (
            2,
            "this run was saved by Lockstep 0.3 (numerics 2), and goes on with 0.5 (numerics 4). "
            f"From here on {ORDER} (0.5: windows are shuffled in two passes), the last bits of "
            "results differ (0.5: weights are summed in pairs). Unchanged: random draws",
        ),
        (
            1,
            "this run was saved by Lockstep 0.2 (numerics 1), and goes on with 0.5 (numerics 4). "
            f"From here on {ORDER} (0.3: blocks are permuted by another key; 0.5: windows are "
            "shuffled in two passes), the last bits of results differ (0.5: weights are summed in "
            "pairs). Unchanged: random draws",
        ),
        (
            5,
            "this run was saved by a newer Lockstep, with numerics 5, and goes on with 0.5 "
            "(numerics 4): the order of samples, random draws and bits may differ from here on. "
            "Use the Lockstep that saved it, or read in its changelog what differs",
        ),
    ],
)
def test_what_differs_is_one_line(saved: int, said: str) -> None:
    assert changes_since(saved, MADE_UP) == said


def test_a_checkpoint_without_a_number_is_older_than_all_versions() -> None:
    assert changes_since(0, MADE_UP).startswith(
        "this run was saved by Lockstep before 0.2, without a version of the numerics, and goes "
        "on with 0.5 (numerics"
    )


def test_each_version_has_changed_something() -> None:
    assert list(CHANGES) == list(range(1, NUMERICS + 1))
    assert all(change.order or change.draws or change.bits for change in CHANGES.values())


# --- what resumes
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def upgrade(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, the code is that of the last of the made-up versions."""

    def upgraded() -> None:
        for module in (loader_module, trainer_module):
            monkeypatch.setattr(
                module, "changes_since", lambda saved: changes_since(saved, MADE_UP)
            )
        for module in (loader_module, trainer_module, manifest):
            monkeypatch.setattr(module, "NUMERICS", max(MADE_UP))

    return upgraded


DATA = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))


def make(run_dir: Path | None) -> lockstep.Trainer:
    lockstep.init("cpu")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    callbacks = [Checkpoints()] if run_dir else []
    return lockstep.Trainer(
        model, optimizer, torch.nn.MSELoss(), 4, run_dir=run_dir, callbacks=callbacks
    )


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, str]]:
    return [record for record in caplog.record_tuples if "numerics" in record[2]]


def test_a_checkpoint_has_the_number_beside_its_format(tmp_path: Path) -> None:
    make(tmp_path).fit(DATA, 1)
    path = tmp_path / "checkpoints/step-0000000002"
    content = json.loads(path.joinpath("manifest.json").read_bytes())["content"]
    assert (content["version"], content["numerics"]) == (2, NUMERICS)
    assert read(path).numerics == NUMERICS


def test_a_resumed_run_says_it_once(
    tmp_path: Path, upgrade: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path).fit(DATA, 1)
    make(tmp_path).fit(DATA, 2, resume="latest")
    assert said(caplog) == []
    upgrade()
    make(tmp_path).fit(DATA, 3, resume="latest")
    expected = changes_since(NUMERICS, MADE_UP)
    assert said(caplog) == [("lockstep.training.trainer", logging.WARNING, expected)]
    make(tmp_path).fit(DATA, 4, resume="latest")
    assert len(said(caplog)) == 1  # that was saved after the upgrade


def test_one_of_before_the_numbers_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path).fit(DATA, 1)
    path = tmp_path / "checkpoints/step-0000000002"
    forge(path, numerics=0)
    make(tmp_path).fit(DATA, 2, resume="latest")
    assert [text for _, _, text in said(caplog)] == [changes_since(0)]


def test_a_number_that_is_none_is_damage(tmp_path: Path) -> None:
    make(tmp_path).fit(DATA, 1)
    path = tmp_path / "checkpoints/step-0000000002"
    forge(path, numerics="1")
    with pytest.raises(CheckpointError, match="expected numerics of at least 0, if any, got 1"):
        read(path)


def test_a_state_that_a_program_keeps_says_it(
    upgrade: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(None)
    trainer.fit(DATA, 1)
    state = trainer.state_dict()
    make(None).load_state_dict(state)
    assert said(caplog) == []
    upgrade()
    make(None).load_state_dict(state)
    assert [text for _, _, text in said(caplog)] == [changes_since(NUMERICS, MADE_UP)]


def test_the_position_of_an_own_loop_says_it(
    upgrade: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    lockstep.init("cpu")
    loader = lockstep.Loader(DATA, 4)
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    loader.load_state_dict(state)
    assert said(caplog) == []
    upgrade()
    loader.load_state_dict(state)
    assert said(caplog) == [
        ("lockstep.data.loader", logging.WARNING, changes_since(NUMERICS, MADE_UP))
    ]
    caplog.clear()
    del state["numerics"]
    loader.load_state_dict(state)
    assert "before 0.2" in said(caplog)[0][2]
