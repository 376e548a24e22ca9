"""The compatibility layer has the names that programs for Horovod use, and its document names what
exists.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import lockstep
import lockstep.compat.horovod.torch as hvd
from lockstep.compat import horovod
from lockstep.compat.horovod.common import util
from lockstep.compat.horovod.torch import mpi_ops
from lockstep.training.step.step_arguments import StepOptions

INIT = ("comm", "process_sets", "average")  # arguments that docs/horovod.md names


def test_names_that_scripts_look_for_elsewhere() -> None:
    assert set(mpi_ops.__all__) < set(hvd.__all__)
    assert mpi_ops.start_timeline is hvd.start_timeline
    assert [int(part) for part in horovod.__version__.split(".")] >= [0, 28]
    for name in (
        "mpi_built",
        "gloo_built",
        "nccl_built",
        "ddl_built",
        "ccl_built",
        "cuda_built",
        "rocm_built",
    ):
        assert getattr(util, name)(verbose=True) == getattr(hvd, name)()
    assert util.extension_available("torch")
    assert not util.extension_available("tensorflow")


def test_the_tables_of_names_are_true() -> None:
    text = (Path(__file__).parents[3] / "docs" / "horovod.md").read_text()
    for name in re.findall(r"\bhvd\.(\w+)", text):
        assert hasattr(hvd, name), name
    there = text.split("## Supported names")[1].split("## ")[0]
    for name in re.findall(r"`(\w+)`", there.replace("_async`", "").replace("grouped_`", "")):
        assert hasattr(hvd, name) or name in INIT, name
    own = text.split("## Lockstep's equivalents")[1].split("\n## ")[0]
    names = re.findall(r"comm\.(\w+)", own)
    assert len(names) > 10
    for name in names:
        assert hasattr(lockstep.Communicator, name), name
    calls = re.findall(r"lockstep\.(\w+)\(([^`]*)\)", own)
    assert len(calls) > 5
    for name, arguments in calls:
        found = set(inspect.signature(getattr(lockstep, name)).parameters) | set(
            StepOptions.__annotations__
        )
        assert set(re.findall(r"(\w+)=", arguments)) <= found, name
