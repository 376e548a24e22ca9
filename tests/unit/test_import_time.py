"""`import lockstep` costs little more than `import torch`, which every user pays anyway."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

import pytest

SHARE = 0.20

# processor time, which other programs on the host do not lengthen
PROGRAM = """
import json, sys, time
start = time.process_time()
import torch
middle = time.process_time()
import lockstep
end = time.process_time()
print(json.dumps({"torch": middle - start, "lockstep": end - middle, "modules": sorted(sys.modules)}))
"""

SLOW = {"accelerate", "matplotlib", "psutil", "rich", "sklearn", "tensorboard", "yaml"}


@pytest.fixture(scope="module")
def imports() -> list[dict[str, Any]]:
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True)
        for _ in range(3)
    ]
    return [json.loads(run.stdout) for run in runs]


def test_import_costs_little_beside_torch(imports: list[dict[str, Any]]) -> None:
    assert statistics.median(run["lockstep"] / run["torch"] for run in imports) <= SHARE


def test_import_brings_in_nothing_slow(imports: list[dict[str, Any]]) -> None:
    modules = {name.partition(".")[0] for name in imports[0]["modules"]}
    assert "lockstep" in modules
    assert not modules & SLOW


def test_a_launcher_starts_the_fork_server_before_it_loads_pytorch() -> None:
    """Then both load it at once; one after the other takes twice as long."""
    program = (
        "import sys; import lockstep.launcher.start, lockstep.launcher.remote_hosts.ssh; "
        "print('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
        == b"False\n"
    )
