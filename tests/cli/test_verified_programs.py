"""`lockstep verify` names the cause in programs of DDP, Accelerate, Fabric and Transformers, and none
in right ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command import Here

PROGRAMS = Path(__file__).parent / "verified_programs"

RIGHT = [
    ("plain_ddp.py", "right"),
    ("plain_ddp.py", "right accumulation"),
    ("plain_ddp.py", "batch a worker"),
    ("accelerated.py", "right"),
    ("accelerated.py", "split batches"),
    ("accelerated.py", "growing batch"),
    ("with_fabric.py", "right"),
    ("with_fabric.py", "scaled lr"),
    ("with_transformers.py", "right token mean"),
]

WRONG = [
    ("plain_ddp.py", "sum", "gradient scale. The gradient at step 0 is 0.5 times as large"),
    ("plain_ddp.py", "accumulation", "gradient scale. The gradient at step 0 is 0.5 times"),
    (
        "plain_ddp.py",
        "scheduler",
        "learning-rate steps. lr at step 1 is 0.09 on 1 worker and 0.081",
    ),
    ("plain_ddp.py", "scaled lr", "learning rate. lr at step 0 is 0.1 on 1 worker and 0.2"),
    ("plain_ddp.py", "batch norm", "batch norm statistics. The gradient of"),
    ("plain_ddp.py", "dropout", "random draws. The gradient of"),
    ("plain_ddp.py", "no sampler", "data order. On 2 workers, ranks 0 and 1 train on the same 8"),
    ("plain_ddp.py", "random sampler alone", "data order. In step 0, 7 of 16 samples"),
    (
        "plain_ddp.py",
        "padding",
        "data order. In step 2, 15 of 15 samples on 1 worker are among the 16",
    ),
    ("plain_ddp.py", "drop last", "data order. In step 2"),
    ("plain_ddp.py", "not wrapped", "synchronisation. On 2 workers, rank 1 has another"),
    ("accelerated.py", "scheduler", "learning-rate steps. lr at step 1 is 0.00975"),
    ("accelerated.py", "default sampler", "data order. In step 0"),
    ("with_fabric.py", "never synced", "synchronisation. On 2 workers, rank 1"),
    ("with_transformers.py", "token mean", "gradient scale. At step 0 the loss is a mean over"),
    ("with_transformers.py", "dropout", "random draws. The gradient of"),
]


def verify(here: Here, program: str, fault: str) -> tuple[int, str]:
    ended = here("verify", "--workers", "1,2", "--steps", "4", PROGRAMS / program, fault)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, " ".join((ended.stdout + ended.stderr).split())


@pytest.mark.parametrize(("program", "variant"), RIGHT)
def test_right_programs_have_no_cause(program: str, variant: str, here: Here) -> None:
    code, said = verify(here, program, variant)
    assert code == 0 and "Cause:" not in said, said
    assert "The same at every number of workers, up to rounding." in said


@pytest.mark.parametrize(("program", "fault", "cause"), WRONG)
def test_faults_are_named(program: str, fault: str, cause: str, here: Here) -> None:
    code, said = verify(here, program, fault)
    assert code == 1 and said.count("Cause:") == 1, said
    assert f"Cause: {cause}" in said
    assert "What to do:" in said
